"""Rooms of a hybrid model, all components in one: from a card-like layer_first pool into every host layout, by nodes
over shared memory. The whole arena is compared with what it should hold.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.layout.layout import Component
from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from pdtransfer.transports.mooncake.host import why_not
from pdtransfer.transports.options import ArenaOptions, WriterOptions
from pdtransfer.wire import pack_ids
from tests.support.hybrid_pools import WINDOW, Pools, pools_of
from tests.support.node_pair import NodePair, node_pair
from tests.support.waiting import until

TOKENS = 4_096  # of the arena: sixteen pages of C4
REQUESTS = 10
TARGETS = [(name, granular) for name in ITEM_LAYOUTS for granular in (False, True)]
target_pools = pytest.mark.parametrize(
    ("name", "granular"), TARGETS, ids=[f"{name}-{'rows' if granular else 'pages'}" for name, granular in TARGETS]
)


@dataclass
class Sent:
    """One room on prefill's side: where each component's rows are, in order."""

    tokens: int
    slots: dict[str, np.ndarray]


@dataclass
class Nodes(NodePair):
    """Prefill's pools as well, and what the arena must hold."""

    source: Pools
    expected: Pools
    rng: np.random.Generator
    sent: dict[int, Sent] = field(default_factory=dict[int, Sent])
    free: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # prefill's pages

    @property
    def components(self) -> tuple[Component, ...]:
        return self.source.components

    def place(self, room: int, tokens: int) -> Sent:
        """Takes pages for a room, anywhere; the window's first token is anywhere in its page."""
        slots: dict[str, np.ndarray] = {}
        for component in self.components:
            page_size, rows = component.layout.page_size, component.rows(tokens)
            skip = max(0, tokens - WINDOW) % page_size if component.span.kind == "last" else 0
            pages = self._take(component, -(-(skip + rows) // page_size))
            slots[component.name] = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[skip : skip + rows]
        self.sent[room] = Sent(tokens, slots)
        return self.sent[room]

    def _take(self, component: Component, count: int) -> np.ndarray:
        layout = component.layout
        free = self.free.setdefault(component.name, self.rng.permutation(layout.slots // layout.page_size).tolist())
        taken, free[:] = free[:count], free[count:]
        assert len(taken) == count, component.name
        return np.array(taken)

    def cells(self, sent: Sent, chunk: int) -> Iterator[Cell]:
        """As a prefill offers them: a compressed row once its last token is there, or the prompt has ended; window and
        states at the end; layers in two groups, later ones first."""
        for first in range(0, sent.tokens, chunk):
            end = min(first + chunk, sent.tokens)
            for component in self.components:
                low, high = first // component.tokens_per_row, end // component.tokens_per_row
                if end == sent.tokens:
                    high = component.rows(sent.tokens)
                    low = low if component.span.kind == "all" else 0
                elif component.span.kind != "all":
                    continue
                lowest, highest = component.layout.layer_range
                middle = (lowest + highest) // 2
                for layers in ((middle, highest), (lowest, middle)):
                    if low < high and layers[0] < layers[1]:
                        yield Cell(component.name, low, layers, sent.slots[component.name][low:high])

    def send(self, room: int, tokens: int, *, chunk: int) -> None:
        sent = self.place(room, tokens)
        self.prefill.open(room, tokens=tokens, time_left_s=100)
        for cell in self.cells(sent, chunk):
            self.prefill.push(room, cell)
        self.prefill.finish(room, aux=b"%d" % room)

    async def ready(self, room: int, *, prefix: int = 0) -> RoomReady:
        """READY, and from here on its rows are expected in the arena, those of a prefix where they were before."""
        event = await super().ready(room)
        sent = self.sent[room]
        crossed = 0
        for component in self.components:
            first = prefix // component.tokens_per_row if component.span.kind == "all" else 0
            rows = component.rows(sent.tokens) - first
            crossed += rows * component.layout.row_bytes
            self.expected.land(
                component.name, sent.slots[component.name][first:], event.slots[component.name][first : first + rows]
            )
        assert event.kv_bytes == crossed
        assert (event.prefix, event.aux) == (prefix, b"%d" % room)
        return event

    @property
    def right(self) -> bool:
        return bool((self.arena.mapping.array[: self.expected.byte_count] == self.expected.memory).all())


@cache
def filled() -> Pools:
    """Prefill's: nobody writes there."""
    source = pools_of("layer_first", tokens=2 * TOKENS, requests=2 * REQUESTS)
    source.fill()
    return source


@asynccontextmanager
async def nodes(
    name: str, *, granular: bool, seed: int = 0, transport: Any = "shm", **decode: Any
) -> AsyncIterator[Nodes]:
    source, expected = filled(), pools_of(name, tokens=TOKENS, requests=REQUESTS, granular=granular)
    async with node_pair(
        source=source.components, target=expected.components, arena_bytes=expected.byte_count,
        writer=WriterOptions(pool_address=source.memory.ctypes.data, transport=transport),
        options=ArenaOptions(transport=transport), **decode,
    ) as pair:  # fmt: skip
        yield Nodes(**vars(pair), source=source, expected=expected, rng=np.random.default_rng(seed))


@pytest.mark.slow
@target_pools
async def test_all_components_of_a_room_land_in_every_host_layout_and_no_other_byte_changes(
    name: str, granular: bool
) -> None:
    """Prompts around every border there is: a row of 4, a window, a row of 128, a page; in chunks that suit none."""
    prompts = {1: 1, 2: 3, 3: 4, 4: 127, 5: 128, 6: 129, 7: 255, 8: 257, 9: 390, 10: 513}
    async with nodes(name, granular=granular) as it:
        for room, tokens in prompts.items():
            it.expect(room, tokens, growth=2 * room)
            it.send(room, tokens, chunk=(1, 5, 3, 50, 128, 37, 64, 100, 130, 512)[room - 1])
        for room, tokens in prompts.items():
            slots = (await it.ready(room)).slots
            rows = {component.name: component.rows(tokens + 2 * room) for component in it.components}
            assert {name: len(set(slot.tolist())) for name, slot in slots.items()} == rows
        assert it.right
        for room in prompts:
            it.decode.release(room)
        await until(lambda: it.decode.core.idle)
        assert it.decode.core.arena.lacking([component.layout.slots for component in it.expected.components]) == [0] * 7


@target_pools
async def test_rows_are_verified_in_every_host_layout(name: str, granular: bool) -> None:
    async with nodes(name, granular=granular, verify=True) as it:
        for room, tokens in {1: 5, 2: 300}.items():
            it.expect(room, tokens)
            it.send(room, tokens, chunk=77)
        await it.ready(1)
        await it.ready(2)
        assert it.right
        landed = it.decode.core.post_landing
        assert (landed.matched, landed.mismatched) == (2, 0)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("name", "granular"), [TARGETS[0], TARGETS[3]], ids=["layer_first-pages", "page_first-rows"])
async def test_components_of_a_room_land_on_another_host_as_well(name: str, granular: bool) -> None:
    async with nodes(name, granular=granular, transport="mooncake", verify=True) as it:
        prompts = {1: 3, 2: 129, 3: 513}
        for room, tokens in prompts.items():
            it.expect(room, tokens, growth=9)
            it.send(room, tokens, chunk=111)
        for room in prompts:
            await it.ready(room)
        assert it.right


@pytest.mark.parametrize("prefix", [1, 4, 130, 256, 299, 300])
async def test_of_a_prefix_whole_rows_stay_away_and_windows_and_states_cross_anew(prefix: int) -> None:
    async with nodes("page_first", granular=False) as it:
        it.expect(1, 300, prefix=prefix)
        it.send(1, 300, chunk=90)
        await it.ready(1, prefix=prefix)
        assert it.right


@target_pools
async def test_prompts_share_blocks_of_every_component_that_has_a_row_for_each_token(name: str, granular: bool) -> None:
    block = 128 if granular else 256
    prompt = np.arange(700) % 251
    async with nodes(name, granular=granular) as it:
        keys = [it.decode.core.cache.keys(pack_ids(prompt[:tokens]), b"") for tokens in (600, 700, 620)]
        assert it.decode.core.cache.block_tokens == block
        it.expect(1, 600, growth=40, keys=keys[0])
        it.send(1, 600, chunk=111)
        first = (await it.ready(1)).slots
        it.expect(2, 700, keys=keys[1])
        it.send(2, 700, chunk=200)
        shared = 600 // block * block
        second = (await it.ready(2, prefix=shared)).slots
        for component in it.components:
            rows = shared // component.tokens_per_row if component.span.kind == "all" else 0
            assert (first[component.name][:rows] == second[component.name][:rows]).all(), component.name
            assert not set(first[component.name][rows:].tolist()) & set(second[component.name][rows:].tolist()), (
                component.name
            )
        assert it.right
        it.decode.release(1)
        it.decode.release(2)
        it.expect(3, 620, keys=keys[2])
        it.send(3, 620, chunk=620)
        await it.ready(3, prefix=620 // block * block)
        assert it.right


async def test_a_prompt_that_one_component_can_never_hold_is_refused_with_all_that_there_is() -> None:
    async with nodes("page_first", granular=False) as it:
        it.expect(1, TOKENS + 1)
        (failed,) = it.events_d
        assert isinstance(failed, RoomFailed)
        for part in (f"'c4': {TOKENS // 4 + 1}", f"'c4': {TOKENS // 4}", "'window': 128"):
            assert part in failed.detail
