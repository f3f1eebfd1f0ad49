"""Groups of layers over the bytes of one pool, as in a hybrid engine: a block belongs to one group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pdtransfer import (
    ArenaMemory,
    Component,
    DecodeClient,
    LocalProtocolError,
    PrefillClient,
    RoomDrained,
    Span,
    WriterOptions,
    strided_layout,
)
from pdtransfer.handoff.slot_allocator import SlotAllocator
from tests.support.client_pair import Pair, settings
from tests.support.layout_tensors import CANARY

BLOCK_TOKENS, BLOCKS, BUFFERS, HEADS, HEAD_BYTES = 16, 48, 2, 2, 256
TOKENS, WINDOW_BLOCKS = 150, 3
ROWS = -(-TOKENS // BLOCK_TOKENS)
GROUPS = {"full": (0, 2), "window": (1, 3)}  # layers of each; the i-th of both lies in buffer i


def components(pool: np.ndarray, origin: int) -> list[Component]:
    """Of a pool uint8 (buffers, blocks, heads, bytes)."""
    made: list[Component] = []
    for name, layers in GROUPS.items():
        views = {(layer, "kv"): pool[index] for index, layer in enumerate(layers)}
        layout = strided_layout(views, axes=("page", "head"), origin=origin, byte_count=pool.nbytes)
        made.append(Component(name, "dram", BLOCK_TOKENS, Span(), layout))
    return made


@dataclass
class Hybrid:
    """Both clients; `source` and `target` are uint8 (buffers, blocks, heads, bytes)."""

    pair: Pair
    source: np.ndarray
    target: np.ndarray

    def expect(self, room: int, full: np.ndarray, window: np.ndarray) -> None:
        self.pair.expect(room, TOKENS, slots={"full": full, "window": behind_nulls(window)})

    def send(self, room: int, full: np.ndarray, window: np.ndarray, after: Any = None) -> None:
        prefill = self.pair.prefill
        prefill.open(room, tokens=TOKENS)
        for first in range(0, ROWS, 4):  # in chunks, a layer at a time
            rows = first, min(ROWS, first + 4)
            for layer in GROUPS["full"]:
                prefill.push(room, full, rows=rows, layers=(layer, layer + 1), component="full", after=after)
        window_rows = ROWS - WINDOW_BLOCKS, ROWS
        prefill.push(room, np.maximum(behind_nulls(window), 0), rows=window_rows, component="window", after=after)
        prefill.finish(room, aux=b"first token")

    def expected(self, *moves: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """The arena after blocks `from` of the source went to blocks `to`."""
        arena = np.full_like(self.target, CANARY)
        for source, target in moves:
            arena[:, target] = self.source[:, source]
        return arena


def behind_nulls(window: np.ndarray) -> np.ndarray:
    """A block for each row: the window has none for its first ones."""
    return np.concatenate([np.full(ROWS - WINDOW_BLOCKS, -1), window])


@contextmanager
def hybrid(**options: Any) -> Iterator[Hybrid]:
    shape = (BUFFERS, BLOCKS, HEADS, HEAD_BYTES)
    source = np.random.default_rng(7).integers(0, 256, shape, np.uint8)
    arena = ArenaMemory.create(source.nbytes, huge_pages="never")
    arena.mapping.array[:] = CANARY
    target = arena.mapping.array[: source.nbytes].reshape(shape)
    at = source.ctypes.data
    writer = WriterOptions(pool_address=at)
    with (
        PrefillClient(settings("p"), components(source, at), writer=writer) as prefill,
        DecodeClient(
            settings("d"), components(target, arena.mapping.address), arena, engine_slots=True, **options
        ) as decode,
    ):
        yield Hybrid(Pair(prefill, decode, None, None), source, target)  # pyright: ignore
    del target


def blocks(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of two rooms' groups, all different, from one numbering."""
    order = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS))
    parts = np.split(order, np.cumsum([ROWS, WINDOW_BLOCKS, ROWS, WINDOW_BLOCKS]))
    return parts[0], parts[1], parts[2], parts[3]


@pytest.mark.parametrize("verify", [False, True])
def test_both_groups_of_two_rooms_land_in_the_blocks_that_the_engine_chose(verify: bool) -> None:
    full, window, other_full, other_window = blocks(1)
    from_full, from_window, from_other_full, from_other_window = blocks(2)
    with hybrid(verify=verify) as made:
        made.expect(1, full, window)
        made.expect(2, other_full, other_window)
        made.send(1, from_full, from_window)
        made.send(2, from_other_full, from_other_window)
        for room in (1, 2):
            ready = made.pair.ready(room)
            made.pair.until(lambda room=room: made.pair.decode_event(room, RoomDrained))
            made.pair.drained(room)
        assert ready.slots["full"].tolist() == other_full.tolist()
        assert ready.slots["window"].tolist() == other_window.tolist()
        moves = [(from_full, full), (from_window, window), (from_other_full, other_full)]
        assert np.array_equal(made.target, made.expected(*moves, (from_other_window, other_window)))


def test_only_an_engine_that_chooses_slots_may_lay_components_over_one_another() -> None:
    pool = np.zeros((BUFFERS, BLOCKS, HEADS, HEAD_BYTES), np.uint8)
    arena = ArenaMemory.create(pool.nbytes, huge_pages="never")
    one_by_one = components(pool, pool.ctypes.data)
    decode = DecodeClient(settings("d"), one_by_one, arena)
    with pytest.raises(LocalProtocolError, match="'full' and 'window' share memory, but not engine_slots=True"):
        decode.start()
    arena.close()


def test_groups_in_one_memory_count_once() -> None:
    pool = np.zeros((BUFFERS, BLOCKS, HEADS, HEAD_BYTES), np.uint8)
    groups = components(pool, pool.ctypes.data)
    assert SlotAllocator(groups, engine_slots=True).slot_bytes == pool.nbytes
