"""A prefill client in a process of its own, as two_gpu/clients drives it: argv names the device of its pool, and the
transport. stdin is one command a line. Every slot of either component holds content that is hashed of what it is."""

from __future__ import annotations

import os
import select
import sys

import numpy as np
import torch

from pdtransfer.bounds import device_index
from pdtransfer.client.clients import PrefillClient
from pdtransfer.handoff.effects import RoomDrained, RoomLeased
from pdtransfer.layout.layout import Component
from pdtransfer.transports.options import WriterOptions
from tests.support.client_pair import component, settings
from tests.support.layout_tensors import Model, Pool, mla

KV, INDEX = mla(layers=range(4), head_bytes=1_152), mla(layers=range(2), head_bytes=128)
SLOTS, PAGE = 8_192, 64


def pool_of(model: Model, *, name: str = "layer_first", page_size: int = PAGE, base: int = 0) -> Pool:
    return Pool(name=name, model=model, page_size=page_size, slots=SLOTS, base=base)


def pools() -> tuple[Pool, Pool]:
    """The KV and the index, one behind the other."""
    kv = pool_of(KV)
    index = pool_of(INDEX)
    for each in (kv, index):
        each.fill(np.arange(SLOTS))
    return kv, index


def named(pool: Pool, name: str, *, memory: str = "dram", base: int = 0) -> Component:
    one = component(pool)
    return Component(name, memory, 1, one.span, one.layout.rebase(base))  # type: ignore[arg-type]


def send(client: PrefillClient, how: str, room: int, tokens: int) -> None:
    """`send` a whole room, or `begin` it: then it never ends here."""
    client.open(room, tokens=tokens)
    pages = np.random.default_rng(room).permutation(SLOTS // PAGE)
    for name in ("kv", "index"):
        client.push(room, pages, rows=(0, tokens), component=name)
    if how == "send":
        client.finish(room, aux=b"aux")


def main() -> None:
    device, transport = sys.argv[1:]
    kv, index = pools()
    whole = torch.from_numpy(np.concatenate([kv.memory, index.memory])).to(device)
    if whole.is_cuda:
        torch.cuda.synchronize(device)
    own = [named(kv, "kv"), named(index, "index", base=len(kv.memory))]
    writer = WriterOptions(pool_address=whole.data_ptr(), device=device_index(device), transport=transport)
    with PrefillClient(settings("p"), own, writer=writer) as client:
        print(client.endpoint, flush=True)
        while True:
            ready, _, _ = select.select([sys.stdin, client], [], [])
            if client in ready:
                for event in client.poll():
                    if isinstance(event, RoomLeased | RoomDrained):
                        print(type(event).__name__.removeprefix("Room"), event.room, flush=True)
            if sys.stdin in ready:
                got = os.read(0, 4_096).decode()  # whole lines, many at once
                if not got:
                    return
                for line in got.splitlines():
                    how, room, tokens = line.split()
                    send(client, how, int(room), int(tokens))


if __name__ == "__main__":
    main()
