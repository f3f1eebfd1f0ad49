"""A writer in a process of its own, as test_shm drives it: argv is session and Reach, stdin one command a line."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import msgspec

from pdtransfer.memory.mapping import Mapping, map_received
from pdtransfer.transports.shm.handover import receive
from pdtransfer.wire import Reach


def count_forever(mapping: Mapping) -> None:
    """Writes a growing count into the arena's first word."""
    count, word = 0, mapping.view[:8].cast("Q")
    while True:
        count += 1
        word[0] = count
        time.sleep(0.001)


def main() -> None:
    session = int(sys.argv[1])
    reach = msgspec.json.decode(sys.argv[2], type=Reach)
    fd = asyncio.run(receive(reach, session, seconds=10))
    mapping = map_received(fd, reach.arena_bytes)
    os.close(fd)
    print("mapped", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "unmap":
                mapping.close()
                print("unmapped", flush=True)
            case "fork":
                if pid := os.fork():
                    print(pid, flush=True)
                else:
                    os.closerange(0, 1_000)  # the mapping alone must hold the lock
                    count_forever(mapping)
            case "count":
                print("counting", flush=True)
                count_forever(mapping)
            case "exit":
                return


if __name__ == "__main__":
    main()
