"""Lands the KV of one room in another process, with both clients of pdtransfer and numpy alone.

    pip install .
    python examples/embed.py

The child process is a prefill rank: it has computed the KV of a prompt and sends it. The parent process is a decode
rank: it receives the rows in its arena, checks every byte, and gives the slots back. Both are on this host, so the
prefill process maps the arena and writes the rows straight into it.
"""

from __future__ import annotations

import logging
import multiprocessing
import select
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pdtransfer import (
    ArenaMemory,
    Component,
    DecodeClient,
    Layout,
    NodeSettings,
    PrefillClient,
    RoomDrained,
    RoomFailed,
    RoomReady,
    Span,
    WriterOptions,
    allocate,
    host_layout,
)

ROOM = 0x5EED  # the number by which both sides know the room; no number is used twice
TOKENS, LAYERS, WIDTH = 100, 4, 576  # a row of one layer is WIDTH float16 values
TIMEOUT_S = 30.0
Kind = TypeVar("Kind")


def settings(node: str) -> NodeSettings:
    """The same model and weights on both sides, or they would refuse each other. Without keys only loopback works."""
    return NodeSettings(node=node, model="tiny", weights=b"digest of the weights")


def layout(name: str, *, slots: int, page_size: int) -> Layout:
    """The bytes of a pool: here one tensor of latent KV (MLA). `kinds=("k", "v")` and more heads describe GQA."""
    return host_layout(
        name,
        kinds=("latent",),
        layers=LAYERS,
        heads=1,
        head_bytes=WIDTH * 2,
        dtype="float16",
        slots=slots,
        page_size=page_size,
    )


def component(pool: Layout) -> Component:
    """One part of the model's cache: a row for each token, in host memory."""
    return Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=pool)


def computed() -> NDArray[np.float16]:
    """What a model would compute: float16 (TOKENS, LAYERS, WIDTH), the same in both processes."""
    return np.random.default_rng(1).random((TOKENS, LAYERS, WIDTH)).astype(np.float16)


def wait(client: PrefillClient | DecodeClient, kind: type[Kind]) -> Kind:
    """The first event of this kind. A scheduler adds `client.fileno()` to its own loop instead, and never waits."""
    while True:
        readable, _, _ = select.select([client], [], [], TIMEOUT_S)
        if not readable:
            raise SystemExit(f"no {kind.__name__} within {TIMEOUT_S} s")
        for event in client.poll():
            if isinstance(event, kind):
                return event
            if isinstance(event, RoomFailed):
                raise SystemExit(f"the room failed ({event.cause}): {event.detail}")


def prefill(pipe: Connection) -> None:
    """The prefill rank: pages of 16 tokens, each layer a tensor of its own, as an engine has them."""
    pool_layout = layout("layer_first", slots=1_024, page_size=16)
    pool = allocate(pool_layout.end)  # any memory will do; its address is all that the client needs
    client = PrefillClient(
        settings("prefill-0"), [component(pool_layout)], writer=WriterOptions(pool_address=pool.address)
    )
    with client:
        pipe.send(client.endpoint)

        # The engine puts the prompt's KV into pages that its allocator chose, in no particular order.
        pages = np.random.default_rng(2).permutation(1_024 // 16)[: -(-TOKENS // 16)]
        slots = (pages[:, None] * 16 + np.arange(16)).reshape(-1)[:TOKENS]
        pool.array.view(np.float16).reshape(LAYERS, 1_024, WIDTH)[:, slots] = computed().transpose(1, 0, 2)

        # The room may be opened, pushed and finished before or after the decode rank asks for it. An engine that
        # computes in chunks pushes each of them at once, with the chunk's rows and an event to wait for (`after`).
        client.open(ROOM, tokens=TOKENS)
        client.push(ROOM, pages, rows=(0, TOKENS))
        client.finish(ROOM, aux=b"the first token")
        wait(client, RoomDrained)  # from now on the engine may reuse the pages


def decode(source: str) -> None:
    """The decode rank: an arena of single tokens, all layers of a token side by side."""
    arena_layout = layout("page_first", slots=2_048, page_size=1)
    arena = ArenaMemory.create(arena_layout.end)
    arena.prefault()  # backs it with memory, so that no write ever waits for a page
    with DecodeClient(settings("decode-0"), [component(arena_layout)], arena) as client:
        # `growth` leases slots for what decode itself will generate.
        client.expect(ROOM, tokens=TOKENS, sources=[source], growth=28)
        ready = wait(client, RoomReady)
        slots = ready.slots["kv"]  # int64 (TOKENS + growth,): the slot of each row
        rows = arena.mapping.array[: arena_layout.end].view(np.float16).reshape(2_048, LAYERS, WIDTH)
        assert ready.aux == b"the first token"
        assert len(slots) == TOKENS + 28
        assert np.array_equal(rows[slots[:TOKENS]], computed())
        del rows  # an arena with views of it cannot be closed
        client.release(ROOM)  # the engine is done with the slots: another room may have them
    arena.close()
    print(f"{TOKENS} tokens, {ready.kv_bytes:,} bytes: every byte is where it belongs")


def main() -> None:
    logging.getLogger("pdtransfer").setLevel(logging.ERROR)  # a peer that shuts down is a warning
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    child = spawn.Process(target=prefill, args=(sender,))
    child.start()
    sender.close()
    try:
        decode(receiver.recv())
        child.join(TIMEOUT_S)
    finally:
        child.kill()
    if child.exitcode:
        raise SystemExit(f"the prefill process ended with {child.exitcode}")


if __name__ == "__main__":
    main()
