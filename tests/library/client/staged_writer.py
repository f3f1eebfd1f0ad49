"""A prefill client without a GPU, in a process of its own: stdin is one command a line, `ROOM TOKENS` sends a room."""

from __future__ import annotations

import sys

import numpy as np

from pdtransfer.client.clients import PrefillClient
from pdtransfer.transports.options import WriterOptions
from tests.support.client_pair import component, settings
from tests.support.layout_tensors import Pool, mla

PAGE, SLOTS = 16, 4_096


def source() -> Pool:
    """Every slot holds content that is hashed of what it is."""
    pool = Pool(name="layer_first", model=mla(layers=range(2)), page_size=PAGE, slots=SLOTS)
    pool.fill(np.arange(SLOTS))
    return pool


def pages_of(room: int, tokens: int) -> np.ndarray:
    """The pages of a room in that pool."""
    return np.random.default_rng(room).permutation(SLOTS // PAGE)[: -(-tokens // PAGE)]


def main() -> None:
    pool = source()
    writer = WriterOptions(pool_address=pool.memory.ctypes.data)
    with PrefillClient(settings(sys.argv[1]), [component(pool)], writer=writer) as client:
        print(client.endpoint, flush=True)
        for line in sys.stdin:
            room, tokens = map(int, line.split())
            client.open(room, tokens=tokens)
            client.push(room, pages_of(room, tokens), rows=(0, tokens))
            client.finish(room, aux=b"aux")


if __name__ == "__main__":
    main()
