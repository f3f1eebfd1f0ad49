"""A writer in a process of its own whose GPU writes, as test_fence_gpu drives it: argv is session, Reach and the GPU,
or cpu; stdin one command a line."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from pdtransfer.kernels import gpu as gpus
from pdtransfer.kernels.kv_copy import kv_copy
from pdtransfer.kernels.pools import Pool
from pdtransfer.layout.layout import Layout, Plane
from pdtransfer.memory.cuda_ipc import Handle, Opened
from pdtransfer.memory.mapping import map_received
from pdtransfer.transports.shm.handover import receive
from pdtransfer.wire import Reach

ROW = 4_096


def flat(byte_count: int) -> Layout:
    return Layout((Plane(0, "k", "uint8", 0, 1, 0, ROW, ROW, ROW),), 1, byte_count // ROW)


def push_forever(target: Pool, sources: list[Pool], stream: int) -> None:
    """Queues launches, each of other bytes than the last, as fast as the driver takes them: many are always queued."""
    every = range(target.layout.slots)
    while True:
        for source in sources:
            kv_copy(target, source, every, every, len(every), stream=stream)


def copy_forever(target: memoryview) -> None:
    """The same without a GPU."""
    sources = [np.random.default_rng(seed).integers(1, 256, len(target), np.uint8) for seed in range(2)]
    while True:
        for source in sources:
            np.copyto(np.frombuffer(target, np.uint8), source)


def main() -> None:
    session = int(sys.argv[1])
    reach = msgspec.json.decode(sys.argv[2], type=Reach)
    fd = asyncio.run(receive(reach, session, seconds=10))
    mapping = map_received(fd, reach.arena_bytes)
    os.close(fd)
    if sys.argv[3:] == ["cpu"]:
        print("mapped", flush=True)
        obey({"push half": lambda: started(copy_forever, mapping.view[: mapping.byte_count // 2])})
        return
    gpu = gpus.gpu_at(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    mapping.register(gpu, mapping.byte_count)
    assert mapping.registered is not None
    layout = flat(mapping.byte_count)
    source_bytes = max(layout.end, reach.hbm_bytes // 2)
    pools = list[Pool]()
    for seed in (gpu.ordinal, gpu.ordinal + 100):
        address = gpu.allocate(source_bytes)
        gpu.upload(address, np.random.default_rng(seed).integers(1, 256, source_bytes, dtype=np.uint8), 0)
        gpu.synchronise(0)
        pools.append(Pool(layout=layout, address=address, device=gpu.ordinal))
    target = Pool(layout=layout, address=mapping.registered.device_address, device=gpu.ordinal, host=True)
    stream = gpu.stream()

    def hbm() -> None:
        """The first half of it, device to device."""
        opened = Opened(Handle.unpack(reach.hbm_handle), gpu.ordinal)
        part = flat(reach.hbm_bytes // 2)
        ours = [Pool(layout=part, address=pool.address, device=gpu.ordinal) for pool in pools]
        started(push_forever, Pool(layout=part, address=opened.address, device=gpu.ordinal), ours, stream)
        print("opened", flush=True)

    def push_half() -> None:
        part = flat(mapping.byte_count // 2)
        ours = [Pool(layout=part, address=pool.address, device=gpu.ordinal) for pool in pools]
        started(push_forever, Pool(layout=part, address=target.address, device=gpu.ordinal, host=True), ours, stream)

    def half() -> None:
        """The one that belongs to this GPU's number."""
        half = layout.slots // 2
        rows = range(gpu.ordinal * half, gpu.ordinal * half + half)
        for _ in range(10):
            kv_copy(target, pools[0], rows, range(half), half)
        gpu.synchronise(0)
        print("done", flush=True)

    print("mapped", flush=True)
    obey(
        {"push": lambda: started(push_forever, target, pools, stream), "push half": push_half, "hbm": hbm, "half": half}
    )


def started(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def obey(commands: dict[str, Callable[[], None]]) -> None:
    """Each line of stdin, until it ends or asks for the end."""
    for line in sys.stdin:
        match line.strip():
            case "fork":
                if pid := os.fork():
                    print(pid, flush=True)
                else:
                    time.sleep(300)  # it never touches the GPU
                    os._exit(0)
            case "exec":  # the child closes nothing by itself
                if pid := os.fork():
                    print(pid, flush=True)
                else:
                    os.execvp("sleep", ["sleep", "300"])
            case "exit":
                return
            case name:
                commands[name]()


if __name__ == "__main__":
    main()
