"""Prompts that decode remembers, beside a naive model: a memory of which rows were written where, and who uses what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdtransfer.handoff.prefix import PrefixCache, block_tokens_of
from pdtransfer.handoff.prefix_keys import RunningKeys, block_keys, root_key
from pdtransfer.handoff.slot_allocator import Holding, SlotAllocator, slots_of
from pdtransfer.layout.layout import Component, Layout, Plane, Span
from pdtransfer.limits import Limits
from pdtransfer.serve.router.fleet.prefixes import KnownPrefixes
from tests.support.effort import some

BLOCK, BLOCKS_MAX = 8, 7
SALTS = (b"", b"salt")


def component(name: str, slots: int, page: int, tokens_per_row: int = 1, span: Span | None = None) -> Component:
    layout = Layout((Plane(0, "latent", "int64", 0, 1, 0, 8 * page, 8, 8),), page, slots)
    return Component(name, "dram", tokens_per_row, span or Span(), layout)


# 80 tokens and 64; a window of 6 that is never shared.
COMPONENTS = (component("kv", 80, 2), component("c4", 16, 1, 4), component("swa", 120, 2, 1, Span("last", 6)))


def ids(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def cache(components: Sequence[Component] = COMPONENTS, *, enabled: bool = True, blocks_max: int = 100) -> PrefixCache:
    limits = Limits(prefix_block_tokens=5, prefix_blocks_max=blocks_max)
    return PrefixCache(SlotAllocator(components), limits, model="m", weights=b"w", enabled=enabled)


def rows_of(tokens: int) -> list[int]:
    return [each.rows(tokens) for each in COMPONENTS]


@dataclass(eq=False)
class Room:
    """What the model knows of one room."""

    prompt: tuple[int, ...]
    salt: bytes
    growth: int
    holding: Holding
    shared: int  # blocks that were there
    leases: int = 1
    kept: bool = False
    slots: list[list[int]] = field(default_factory=list)

    @property
    def chain(self) -> list[tuple]:
        full = len(self.prompt) // BLOCK
        return [(self.salt, self.prompt[: BLOCK * (index + 1)]) for index in range(full)]


class ShareAndEvict(RuleBasedStateMachine):
    """Rooms lease, land, fail and go in any order; what is shared reads as its own prompt says, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = cache(blocks_max=BLOCKS_MAX)
        assert self.cache.block_tokens == BLOCK
        self.memory: list[dict[int, object]] = [{} for _ in COMPONENTS]
        self.rooms: list[Room] = []
        self.used: dict[tuple, int] = {}  # last use of each block that is there, by what it holds
        self.clock = 0

    # The model

    def claims(self, chain: tuple) -> int:
        return sum(chain in room.chain[: len(room.holding.blocks)] for room in self.rooms)

    def evict_one(self) -> None:
        leaves = [
            each for each in self.used
            if not self.claims(each) and not any(o[0] == each[0] and o[1][: len(each[1])] == each[1] for o in self.used
                                                 if o != each)
        ]  # fmt: skip
        del self.used[min(leaves, key=lambda each: (self.used[each], -len(each[1])))]

    @property
    def idle(self) -> int:
        return sum(not self.claims(each) for each in self.used)

    def content(self, room: Room, at: int, row: int) -> object:
        end = min(len(room.prompt), (row + 1) * COMPONENTS[at].tokens_per_row)
        return room.salt, room.prompt[:end]

    def write(self, room: Room, *, first: bool) -> None:
        """What crosses: all rows of the prompt but those of the prefix."""
        for index, each in enumerate(COMPONENTS):
            held = room.shared * BLOCK // each.tokens_per_row if each.span.kind == "all" else 0
            for row in range(held, each.rows(len(room.prompt))):
                self.memory[index][room.slots[index][row]] = self.content(room, index, row) if first else None

    # What happens

    @rule(
        blocks=st.lists(st.integers(0, 1), max_size=4), rest=st.integers(0, BLOCK - 1), growth=st.integers(0, 20),
        salt=st.sampled_from(SALTS),
    )  # fmt: skip
    def lease(self, blocks: list[int], rest: int, growth: int, salt: bytes) -> None:
        prompt = tuple(token for block in blocks for token in [block] * BLOCK) + (7,) * rest
        if not prompt:
            return
        chain = [(salt, prompt[: BLOCK * (index + 1)]) for index in range(len(blocks))]
        shared = next((index for index, each in enumerate(chain) if each not in self.used), len(chain))
        keys = self.cache.keys(ids(prompt), salt)
        rows = rows_of(len(prompt) + growth)
        idle = self.idle - sum(not self.claims(each) for each in chain[:shared])
        evict = 0
        for free, need, each in zip(self.cache.arena.free, rows, COMPONENTS, strict=True):
            of_block = BLOCK // each.tokens_per_row if each.span.kind == "all" else 0
            page = each.layout.page_size
            lacking = -(-(need - shared * of_block) // page) * page - free.free_slots
            if lacking > 0:
                evict = max(evict, -(-lacking // of_block) if of_block else 1 << 30)
        holding = self.cache.allocate(rows, self.cache.longest(keys), queried=len(keys))
        if evict > idle:
            assert holding is None
            return
        assert holding is not None
        assert holding.prefix == shared * BLOCK
        room = Room(prompt, salt, growth, holding, shared)
        self.rooms.append(room)
        for _ in range(evict):
            self.evict_one()
        room.slots = [
            slots_of(extents, count=count).tolist() for extents, count in zip(holding.extents, rows, strict=True)
        ]
        assert [len(slot) for slot in room.slots] == rows
        holding.claims += 1
        self.write(room, first=False)

    def some(self, data: st.DataObject, *, landing: bool | None = None) -> Room | None:
        fit = [room for room in self.rooms if landing is None or bool(room.leases) == landing]
        return data.draw(st.sampled_from(fit)) if fit else None

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        room = self.some(data, landing=True)
        if room is None:
            return
        self.write(room, first=True)
        room.leases = 0
        assert not self.cache.drop(room.holding)
        room.holding.blocks = list(room.holding.blocks)
        room.kept = True
        self.keep(room)

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=16))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        """A READY room fills some of its growth, and shares the blocks that are full now."""
        room = self.some(data, landing=False)
        if room is None:
            return
        before, tokens = len(room.prompt), tokens[: room.growth]
        room.prompt, room.growth = (*room.prompt, *tokens), room.growth - len(tokens)
        for index, each in enumerate(COMPONENTS):
            for row in range(
                before // each.tokens_per_row if each.span.kind == "all" else 0, each.rows(len(room.prompt))
            ):
                self.memory[index][room.slots[index][row]] = self.content(room, index, row)
        self.keep(room)

    def keep(self, room: Room) -> None:
        chain = room.chain
        there = next((index for index, each in enumerate(chain) if each not in self.used), len(chain))
        self.cache.keep(room.holding, self.cache.keys(ids(room.prompt), room.salt))
        fresh = len(chain) - there
        for each in chain[:there]:
            self.used[each] = -1
        while self.idle and len(self.used) + fresh > BLOCKS_MAX:
            self.evict_one()
        for each in chain[there : there + min(fresh, BLOCKS_MAX - len(self.used))]:
            self.used[each] = -1

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        """A READY room is released."""
        room = self.some(data, landing=False)
        if room is not None:
            self.leave(room)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A room fails before it is READY; its lease ends later."""
        room = self.some(data, landing=True)
        if room is not None:
            assert not self.cache.drop(room.holding)
            self.leave(room)

    def leave(self, room: Room) -> None:
        self.clock += 1
        chain = room.chain[: len(room.holding.blocks)]
        assert self.cache.drop(room.holding)
        self.rooms.remove(room)
        self.used |= {each: self.clock for each in chain if not self.claims(each)}

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.used = {each: when for each, when in self.used.items() if self.claims(each)}

    # What holds

    @invariant()
    def what_is_there_matches_the_model(self) -> None:
        keys = {self.cache.keys(ids(prompt), salt)[-1] for salt, prompt in self.used}
        assert self.cache._blocks.keys() == keys
        assert self.cache.claimed == len(self.used) - self.idle
        assert len(self.cache) <= BLOCKS_MAX

    @invariant()
    def a_look_up_of_few_keys_finds_what_one_of_all_finds(self) -> None:
        for room in self.rooms:
            keys = self.cache.keys(ids(room.prompt), room.salt)
            assert self.cache.cached_tokens(keys) == len(self.cache.longest(keys)) * BLOCK

    @invariant()
    def every_slot_is_free_or_a_block_s_or_one_room_s(self) -> None:
        for index, free in enumerate(self.cache.arena.free):
            held = [slot for room in self.rooms for slot in slots_of(room.holding.own[index]).tolist()]
            for block in self.cache._blocks.values():
                held += [slot for start, count in block.runs[index] for slot in range(start, start + count)]
            assert len(held) == len(set(held)), "two own a slot"
            assert len(held) + free.free_slots == free.slots

    @invariant()
    def a_room_reads_what_its_prompt_names(self) -> None:
        for room in self.rooms:
            for index, each in enumerate(COMPONENTS):
                full = each.rows(len(room.prompt))
                rows = full if room.kept else room.shared * BLOCK // each.tokens_per_row
                if each.span.kind == "all":
                    assert [self.memory[index][slot] for slot in room.slots[index][:rows]] == [
                        self.content(room, index, row) for row in range(rows)
                    ]

    def teardown(self) -> None:
        for room in list(self.rooms):
            if room.leases:
                self.cache.drop(room.holding)
            self.leave(room)
        self.cache.clear()
        assert [free.free_slots for free in self.cache.arena.free] == [80, 16, 120]


TestShareAndEvict = ShareAndEvict.TestCase
TestShareAndEvict.settings = settings(max_examples=some(150), stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_keys_are_equal_exactly_as_far_as_the_prompts_are(one: list[int], other: list[int]) -> None:
    root = root_key("m", b"w", b"")
    first, second = (block_keys(root, ids(each), block_tokens=3, blocks_max=100) for each in (one, other))
    assert (len(first), len(second)) == (len(one) // 3, len(other) // 3)
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        assert (a == b) == (one[: 3 * index + 3] == other[: 3 * index + 3])
    running = RunningKeys(root, ids(one), block_tokens=3, blocks_max=100)
    for piece in (other[:2], other[2:]):
        running.generated(ids(piece))
    assert tuple(running.keys) == block_keys(root, ids(one + other[:-1]), block_tokens=3, blocks_max=100)


def test_equal_tokens_of_another_model_weights_or_salt_share_nothing() -> None:
    differ = [("m", b"w", b""), ("n", b"w", b""), ("m", b"x", b""), ("m", b"w", b"s"), ("mw", b"", b"")]
    assert len({root_key(*each) for each in differ}) == 5


@pytest.mark.parametrize(
    ("components", "least", "block_tokens"),
    [
        ([component("kv", 64, 1)], 16, 16),
        ([component("kv", 64, 8)], 12, 16),
        ([component("kv", 64, 8), component("c128", 64, 2, 128)], 16, 256),
        ([component("kv", 64, 1), component("state", 64, 16, 1, Span("once"))], 5, 5),
        ([component("state", 64, 16, 1, Span("once"))], 16, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_block_is_whole_pages_of_every_component_that_it_has_rows_of(
    components: list[Component], least: int, block_tokens: int
) -> None:
    assert block_tokens_of(components, least) == block_tokens


def landed(of: PrefixCache, prompt: list[int], growth: int = 0) -> Holding:
    keys = of.keys(ids(prompt), b"")
    holding = of.allocate(rows_of(len(prompt) + growth), of.longest(keys), queried=len(keys))
    assert holding is not None
    of.keep(holding, keys)
    return holding


def test_a_cache_that_is_off_keeps_nothing() -> None:
    off = cache(enabled=False)
    off.drop(landed(off, [1] * 40))
    assert len(off) == 0
    assert off.free_slots[0] == off.arena.free[0].free_slots == 80


def test_what_may_still_be_written_does_not_enter_the_cache() -> None:
    one = cache()
    holding = one.allocate(rows_of(16), [])
    assert holding is not None
    holding.claims += 1
    with pytest.raises(AssertionError, match="a writer may still hold a lease"):
        one.keep(holding, one.keys(ids([1] * 16), b""))


def test_blocks_that_a_waiting_room_shares_are_not_evicted_for_it() -> None:
    """The room fits only by sharing what would be the oldest to go."""
    one = cache()
    one.drop(landed(one, [1] * 32))
    one.drop(landed(one, [2] * 24))
    holding = landed(one, [1] * 32 + [3] * 30)
    assert holding.prefix == 32
    assert (one.evicted_blocks, one.hit_tokens, one.queried_tokens) == (3, 32, 14 * BLOCK)


def test_a_block_may_lie_in_two_runs() -> None:
    one = cache()
    rooms = [one.allocate([rows, 0, 0], []) for rows in (12, 8, 12, 48)]
    for room in rooms[::2]:
        assert room is not None
        one.drop(room)
    runs = [block.runs[0] for block in landed(one, [1] * 24).blocks]
    assert runs == [((20, 8),), ((28, 4), (0, 4)), ((4, 8),)]


def test_the_last_block_s_tokens_and_growth_are_never_shared() -> None:
    one = cache()
    holding = landed(one, [1] * 15, growth=9)
    assert len(holding.blocks) == 1
    (run,) = holding.blocks[0].runs[0]
    assert run[1] == BLOCK
    one.drop(holding)
    assert one.arena.free[0].free_slots == 80 - BLOCK


def test_blocks_of_an_answer_are_shared_and_what_was_twice_stays_the_rooms_own() -> None:
    one = cache()
    keys = [one.keys(ids([1] * 16 + [answer] * 8), b"") for answer in (2, 3)]
    rooms = [one.allocate(rows_of(16 + 10), []) for _ in keys]
    for room, room_keys in zip(rooms, keys, strict=True):
        assert room is not None
        one.keep(room, room_keys[:2])
        one.keep(room, room_keys)
    assert [len(room.blocks) for room in rooms if room is not None] == [3, 3]
    assert len(one) == 4, "the prompt's two, and one of each answer"
    for room in rooms:
        assert room is not None
        assert one.drop(room)
    assert one.arena.free[0].free_slots == 80 - 4 * BLOCK
    one.clear()
    assert [free.free_slots for free in one.arena.free] == [80, 16, 120]


def test_keys_of_more_blocks_than_a_room_has_slots_for_are_left_out() -> None:
    """An engine may have generated more than it was asked for."""
    one = cache()
    room, other = one.allocate(rows_of(16 + 3), []), one.allocate(rows_of(16), [])
    assert room is not None
    assert other is not None
    one.keep(room, one.keys(ids([1] * 40), b""))
    assert len(room.blocks) == len(one) == 2
    assert one.drop(room)
    one.clear()
    assert one.arena.free[0].free_slots == 80 - 16, "the other room's are in use"


def test_what_is_full_of_blocks_in_use_leaves_the_rest_private() -> None:
    one = cache(blocks_max=2)
    first = landed(one, [1] * 24)
    assert len(first.blocks) == len(one) == 2
    second = landed(one, [2] * 24)
    assert (len(second.blocks), len(one)) == (0, 2), "the first room's are in use"
    one.drop(second)
    one.drop(first)
    assert (one.arena.free[0].free_slots, one.free_slots[0]) == (64, 80)


def test_of_a_prompt_whose_end_is_forgotten_the_beginning_is_known() -> None:
    known = KnownPrefixes(4)
    one, other = (tuple(b"%d" % n for n in range(first, first + 3)) for first in (0, 10))
    known.learn(one)
    known.learn(other)
    assert (known.count(one), known.count(other)) == (1, 3)
    known.learn(one[:1])
    known.learn((b"20",))
    assert (known.count(one), known.count(other)) == (1, 2)
    assert known.count((b"9", *one)) == 0
    known.clear()
    assert known.count(one) == 0


def test_what_is_left_is_reported_in_tokens_whichever_component_is_scarce() -> None:
    one = cache()
    assert one.scarcest(enable_hisparse=False) == (64, 64), "c4 has a row for 4 tokens, and the fewest"
    assert one.allocate([0, 0, 90], []) is not None  # windows alone: 30 of 120 rows are left
    assert one.scarcest(enable_hisparse=True) == (16, 64)
    assert one.allocate([72, 0, 0], []) is not None  # 8 of 80
    assert one.scarcest(enable_hisparse=False) == (6, 64)
    every = sum(each.bytes_of(each.layout.slots) for each in COMPONENTS)
    assert [one.tokens_of(part) for part in (0, every // 2, every)] == [0, 32, 64]


def test_of_a_single_component_tokens_left_are_its_slots_and_only_those_with_memory_count() -> None:
    prefix_cache = PrefixCache(SlotAllocator(COMPONENTS[:1], 30 * 8), Limits(), model="m", weights=b"w")
    assert (prefix_cache.scarcest(enable_hisparse=False), prefix_cache.tokens_of(7 * 8)) == ((30, 30), 7)
    assert prefix_cache.allocate([7], []) is not None
    assert prefix_cache.scarcest(enable_hisparse=False) == (22, 30)  # whole pages of 2
    prefix_cache.arena.grow(80 * 8)
    assert prefix_cache.scarcest(enable_hisparse=False) == (72, 80)
    states = cache((component("state", 5, 1, 1, Span("once")),))
    assert states.allocate([1], []) is not None
    assert states.scarcest(enable_hisparse=False) == (4, 5)


def test_what_requests_of_the_other_kind_have_left_is_not_reported() -> None:
    dense = Component("kv", "hbm", 1, Span(), component("kv", 40, 2).layout)
    one = cache((*COMPONENTS[:2], dense))
    assert [one.scarcest(enable_hisparse=sparse) for sparse in (False, True)] == [(40, 40), (64, 64)]
    assert one.allocate([0, 0, 30], []) is not None
    assert [one.scarcest(enable_hisparse=sparse) for sparse in (False, True)] == [(10, 40), (64, 64)]
    assert one.tokens_of((40 + 16) * 8) == 40
