"""A writer in a process of its own whose card writes, as test_fence_gpu drives it: argv is session and Reach, stdin one
command a line."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import msgspec
import numpy as np

from pdtransfer.kernels import card as cards
from pdtransfer.kernels.ipc import Handle, Opened
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.kernels.pools import Pool
from pdtransfer.layout import Layout, Plane
from pdtransfer.memory import map_received
from pdtransfer.transports.shm.handover import receive
from pdtransfer.wire import Reach

ROW = 4_096


def flat(byte_count: int) -> Layout:
    return Layout((Plane(0, "k", "uint8", 0, 1, 0, ROW, ROW, ROW),), 1, byte_count // ROW)


def push_for_ever(target: Pool, sources: list[Pool], stream: int) -> None:
    """Queues launches, each of other bytes than the last, as fast as the driver takes them: many are always queued."""
    every = range(target.layout.slots)
    while True:
        for source in sources:
            kv_copy(target, source, every, every, len(every), stream=stream)


def main() -> None:
    session = int(sys.argv[1])
    reach = msgspec.json.decode(sys.argv[2], type=Reach)
    fd = asyncio.run(receive(reach, session, seconds=10))
    mapping = map_received(fd, reach.arena_bytes)
    os.close(fd)
    here = cards.card(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    mapping.register(here, mapping.byte_count)
    assert mapping.registered is not None
    layout = flat(mapping.byte_count)
    source_bytes = max(layout.end, reach.hbm_bytes // 2)
    pools = list[Pool]()
    for seed in (here.ordinal, here.ordinal + 100):
        address = here.allocate(source_bytes)
        here.upload(address, np.random.default_rng(seed).integers(1, 256, source_bytes, dtype=np.uint8), 0)
        here.synchronise(0)
        pools.append(Pool(layout=layout, address=address, card=here.ordinal))
    target = Pool(layout=layout, address=mapping.registered.device_address, card=here.ordinal, host=True)
    print("mapped", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "push":
                threading.Thread(target=push_for_ever, args=(target, pools, here.stream()), daemon=True).start()
            case "hbm":  # the first half of it, device to device
                opened = Opened(Handle.unpack(reach.hbm_handle), on=here.ordinal)
                half = flat(reach.hbm_bytes // 2)
                ours = [Pool(layout=half, address=pool.address, card=here.ordinal) for pool in pools]
                theirs = Pool(layout=half, address=opened.address, card=here.ordinal)
                threading.Thread(target=push_for_ever, args=(theirs, ours, here.stream()), daemon=True).start()
                print("opened", flush=True)
            case "half":  # the one that belongs to this card's number
                half = layout.slots // 2
                rows = range(here.ordinal * half, here.ordinal * half + half)
                for _ in range(10):
                    kv_copy(target, pools[0], rows, range(half), half)
                here.synchronise(0)
                print("done", flush=True)
            case "fork":
                if pid := os.fork():
                    print(pid, flush=True)
                else:
                    time.sleep(300)  # it never touches the card
                    os._exit(0)
            case "exec":  # the child closes nothing by itself
                if pid := os.fork():
                    print(pid, flush=True)
                else:
                    os.execvp("sleep", ["sleep", "300"])
            case "exit":
                return


if __name__ == "__main__":
    main()
