"""Several prefill and several decode clients over shared memory: a room lands whole on each, or fails for all."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff.effects import RoomDrained, RoomFailed, RoomLanded, RoomLeased, RoomReady
from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.options import WriterOptions
from pdtransfer.wire import Member
from tests.support.client_pair import Expected, Late, settings, slots_of_pages
from tests.support.layout_tensors import CANARY, Pool, mha, mla
from tests.support.rank_grid import JUNK, Part, Place
from tests.support.waiting import PATIENCE_S

GQA = Part("kv", mha(layers=range(4), heads=range(2), head_bytes=32))
MLA = Part("kv", mla(layers=range(4), head_bytes=64))
SLOTS = 128
Size = tuple[int, int]  # tensor-parallel ranks, stages


@dataclass
class Node:
    """One client, its pool, and its events."""

    name: str
    client: Any
    pool: Pool
    component: Component
    events: list[Any] = field(default_factory=list)

    def event_of(self, room: int, kind: type[Any]) -> Any:
        return next((event for event in self.events if isinstance(event, kind) and event.room == room), None)


@dataclass
class Fleet:
    """A prefill worker of several ranks, and a decode worker."""

    prefill: list[Node]
    decode: list[Node]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        nodes = [*self.prefill, *self.decode]
        while not condition():
            assert time.monotonic() < deadline, [(node.name, node.events) for node in nodes]
            select.select([node.client for node in nodes], [], [], 0.02)
            for node in nodes:
                node.events += node.client.poll()

    @property
    def sources(self) -> list[str]:
        return [node.client.endpoint for node in self.prefill]

    @property
    def members(self) -> list[Member]:
        return [Member(node.name, node.client.endpoint) for node in self.prefill]

    def begin(self, room: int, tokens: int, *, led: bool = False, **more: Any) -> None:
        for node in self.prefill:
            node.client.open(room, tokens=tokens, grants=len(self.decode), **more)
        for node in self.decode:
            node.client.expect(room, tokens=tokens, sources=self.sources[:1] if led else self.sources, whole_group=led)

    def lands(self, room: int, tokens: int, **more: Any) -> None:
        """A room from its beginning on."""
        self.begin(room, tokens, **more)
        self.send(room, tokens)
        self.check_landed(room, tokens)

    def fails(self, room: int) -> RoomFailed:
        """On the first decode rank."""
        self.until(lambda: self.decode[0].event_of(room, RoomFailed))
        return self.decode[0].event_of(room, RoomFailed)

    def fill(self, node: Node, seed: int, tokens: int) -> np.ndarray:
        """Random pages of the room, whose rows hold what every holder of them has."""
        pool = node.pool
        pages = np.random.default_rng(seed).permutation(pool.slots // pool.page_size)[: -(-tokens // pool.page_size)]
        contents = np.arange(JUNK, JUNK + pool.slots)
        contents[slots_of_pages(pages, pool.page_size, tokens)] = np.arange(tokens)
        pool.fill(contents)
        return pages

    def send(self, room: int, tokens: int, after: list[Late] | None = None) -> None:
        """Every rank offers its rows chunk by chunk and layer by layer, in an order of its own."""
        for index, node in enumerate(self.prefill):
            pages, (first, end) = self.fill(node, room + index, tokens), node.pool.layout.layer_range
            cuts = [(0, tokens // 3), (tokens // 3, tokens)]
            cells = [(rows, (layer, layer + 1)) for rows in cuts for layer in range(first, end)]
            random.Random(room + index).shuffle(cells)
            for number, (rows, layers) in enumerate(cells):
                event = None if after is None else after[number % len(after)]
                node.client.push(room, pages, rows=rows, layers=layers, after=event)
            node.client.finish(room, aux=b"of " + node.name.encode())

    def failed(self, room: int) -> dict[str, Cause]:
        """Waits until every node has said that the room failed, and prefill that its pages are safe."""
        nodes = [*self.prefill, *self.decode]
        self.until(lambda: all(node.event_of(room, RoomFailed) for node in nodes))
        self.until(lambda: all(node.event_of(room, RoomDrained) for node in self.prefill))
        return {node.name: node.event_of(room, RoomFailed).cause for node in nodes}

    def check_landed(self, room: int, tokens: int) -> None:
        """Bitwise: each arena holds the room's rows of its own planes, and canaries beside them."""
        self.until(
            lambda: all(node.event_of(room, RoomReady) or node.event_of(room, RoomFailed) for node in self.decode)
        )
        for node in self.decode:
            ready = node.event_of(room, RoomReady)
            assert ready is not None, node.events
            expected = Expected(node.pool)
            expected.pool.__dict__["memory"] = np.full_like(node.pool.memory, CANARY)
            expected.land(np.arange(tokens), ready.slots["kv"][:tokens])
            assert expected.holds(node.pool.memory)
            assert ready.kv_bytes == tokens * node.pool.layout.row_bytes
            assert ready.aux == b"of p0"
        self.until(lambda: all(node.event_of(room, RoomDrained) for node in self.prefill))
        sent = sum(node.event_of(room, RoomLanded).kv_bytes for node in self.prefill)
        assert sent == sum(tokens * node.pool.layout.row_bytes for node in self.decode), "no byte twice"


@contextmanager
def fleet(
    part: Part,
    prefill: Size,
    decode: Size,
    layouts: tuple[str, str] = ("layer_first", "page_head"),
    *,
    led: bool = False,
    **more: Any,
) -> Iterator[Fleet]:
    """`more` is DecodeClient's. With `led` the first prefill rank learns the others' endpoints from the test."""
    with ExitStack() as stack:
        made = Fleet([], [])
        for index, place in enumerate(part.places(*prefill)):
            pool = part.pool(place, layouts[0], 16, SLOTS)
            client = PrefillClient(
                settings(f"p{index}", ranks=place.ranks, group=None if led and not index else ()),
                [part.component(pool)],
                writer=WriterOptions(pool_address=pool.memory.ctypes.data), replicas={"kv": place.replica},
            )  # fmt: skip
            made.prefill.append(Node(f"p{index}", stack.enter_context(client), pool, part.component(pool)))
        for index, place in enumerate(part.places(*decode)):
            made.decode.append(decode_node(stack, part, place, f"d{index}", layouts[1], **more))
        yield made


def decode_node(stack: ExitStack, part: Part, place: Place, name: str, layout: str, **more: Any) -> Node:
    pool = part.pool(place, layout, 1, SLOTS)
    size = len(pool.memory)
    arena = ArenaMemory.create(size, huge_pages="never")

    def close() -> None:
        for view in ("memory", "tensor"):
            pool.__dict__.pop(view, None)
        with suppress(BufferError):  # a failed test's frames still look at it
            arena.close()

    stack.callback(close)
    arena.mapping.array[:] = CANARY
    pool.__dict__["memory"] = arena.mapping.array[:size]
    client = DecodeClient(settings(name, ranks=place.ranks), [part.component(pool)], arena, **more)
    return Node(name, stack.enter_context(client), pool, part.component(pool))


@pytest.mark.parametrize(
    ("part", "prefill", "decode"),
    [
        (GQA, (2, 1), (1, 1)), (GQA, (1, 1), (2, 1)), (GQA, (2, 1), (2, 1)), (GQA, (4, 1), (1, 1)),
        (GQA, (1, 2), (1, 1)), (GQA, (2, 2), (1, 1)), (GQA, (2, 2), (2, 1)),
        (MLA, (2, 1), (1, 1)), (MLA, (2, 1), (2, 1)), (MLA, (2, 2), (2, 1)),
    ],
    ids=lambda of: {id(GQA): "gqa", id(MLA): "mla"}.get(id(of), str(of)),
)  # fmt: skip
def test_a_room_of_several_ranks_lands_bit_for_bit_on_each_decode_rank(part: Part, prefill: Size, decode: Size) -> None:
    with fleet(part, prefill, decode) as it:
        it.lands(1, 50)


@pytest.mark.parametrize(
    "layouts", [("layer_first", "page_first"), ("page_first", "page_first_direct"), ("page_head", "layer_first")]
)
def test_stages_and_slices_land_in_every_layout(layouts: tuple[str, str]) -> None:
    with fleet(GQA, (2, 2), (2, 1), layouts) as it:
        it.lands(1, 77)


@pytest.mark.parametrize("part", [GQA, MLA], ids=["gqa", "mla"])
def test_what_each_rank_sent_is_verified_on_each_decode_rank(part: Part) -> None:
    with fleet(part, (2, 2), (2, 1), verify=True) as it:
        it.lands(1, 50)


@pytest.mark.parametrize("who", ["p0", "p1", "d0", "d1"])
def test_whoever_gives_a_room_up_ends_it_for_all_and_the_next_one_lands(who: str) -> None:
    with fleet(MLA, (2, 1), (2, 1)) as it:
        it.begin(1, 40)
        it.until(lambda: all(node.event_of(1, RoomLeased) for node in it.prefill))
        next(node for node in (*it.prefill, *it.decode) if node.name == who).client.abort(1)
        assert set(it.failed(1).values()) == {Cause.ABORTED}
        it.lands(2, SLOTS)  # of all slots: none is left leased


def test_a_room_is_for_the_decode_ranks_that_it_names() -> None:
    with fleet(GQA, (2, 1), (2, 1)) as it:
        it.lands(1, 40, peers=["d0", "d1"])
        it.begin(2, 40, peers=["d0", "somebody"])
        it.until(lambda: it.decode[1].event_of(2, RoomFailed))
        failed = it.decode[1].event_of(2, RoomFailed)
        assert failed.cause is Cause.BREACH
        assert failed.detail.endswith("is for ['node:d0', 'node:somebody'], not for node:d1")


def test_a_rank_that_cannot_be_is_refused_when_it_starts() -> None:
    pool = MLA.pool(MLA.places(1, 1)[0], "page_first", 1, 8)
    client = PrefillClient(settings("p"), [MLA.component(pool)], replicas={"kv": (0, 2)})
    with pytest.raises(LocalProtocolError, match="replicas: 2, must be at most tp_size 1"):
        client.start()
    client.close()


# One address for a whole group


@pytest.mark.parametrize(("prefill", "decode"), [((2, 1), (1, 1)), ((2, 2), (2, 1)), ((1, 1), (1, 1))], ids=str)
def test_the_leader_s_address_is_all_that_decode_needs(prefill: Size, decode: Size) -> None:
    with fleet(GQA, prefill, decode, led=True) as it:
        it.begin(1, 50, led=True)  # before the leader knows its group
        it.prefill[0].client.set_group(it.members)
        it.send(1, 50)
        it.check_landed(1, 50)


def test_a_leader_that_does_not_know_its_group_answers_nobody() -> None:
    with fleet(GQA, (2, 1), (1, 1), led=True) as it:
        it.decode[0].client.expect(1, tokens=40, sources=it.sources[:1], whole_group=True, time_left_s=1.0)
        failed = it.fails(1)
        assert (failed.cause, failed.detail) == (
            Cause.DEADLINE,
            f"not ready in time, still connecting: no session with prefill is up yet ({it.sources[0]})",
        )


@pytest.mark.parametrize(
    ("endpoint", "cause", "text"),
    [
        ("tcp://127.0.0.1:1", Cause.PEER_LOST, "tcp://127.0.0.1:1 has been silent for "),
        ("127.0.0.1:7101", Cause.PEER_LOST, "endpoint '127.0.0.1:7101': "),
    ],
)
def test_a_member_that_cannot_be_reached_ends_the_room(endpoint: str, cause: Cause, text: str) -> None:
    with fleet(GQA, (2, 1), (1, 1), led=True) as it:
        it.prefill[0].client.set_group([it.members[0], Member("p1", endpoint)])
        it.begin(1, 40, led=True)
        failed = it.fails(1)
        assert (failed.cause, failed.detail[: len(text)]) == (cause, text)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([], "group: [] are not 1..256 ranks with 'p0' first"),
        ([Member("p1", "tcp://a:1"), Member("p0", "tcp://a:2")], "group: ['p1', 'p0'] are not 1..256 ranks with"),
        ([Member("p0", ""), Member("p1", "")], "group: [''] of ['p1'] are not one endpoint each"),
        ([Member("p0", ""), Member("p0", "tcp://a:1")], "group: ['tcp://a:1'] of ['p0'] are not one endpoint each"),
        ([Member("p0", ""), *[Member(f"p{n}", "tcp://a:1") for n in (1, 2)]], "group: ['tcp://a:1', 'tcp://a:1'] of"),
    ],
)
def test_groups_that_cannot_be_are_refused(members: list[Member], text: str) -> None:
    with fleet(GQA, (2, 1), (1, 1), led=True) as it:
        leader = it.prefill[0].client
        with pytest.raises(LocalProtocolError) as caught:
            leader.set_group(members)
        assert str(caught.value)[: len(text)] == text
        leader.set_group(it.members)
        with pytest.raises(LocalProtocolError, match="group: it is set already"):
            leader.set_group(it.members)
