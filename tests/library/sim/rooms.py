"""One room of the simulated world, rank by rank on both sides, and the invariants seen from there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.decode.room_request import RoomRequest, chosen_rows
from pdtransfer.handoff.effects import ComponentRows
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.layout.layout import Component, expand_pages

from .copies import is_free, is_shared
from .pools import BLOCK, LAYERS, PAGE, ROW, ROWS_MAX, Int64s, Shape, holds, places, words

if TYPE_CHECKING:
    from .decodes import DecodeNode
    from .prefills import PrefillNode
    from .world import World


_NONE = np.empty(0, np.int64)
GAPS = ": no rank of ", ": more than one rank ", " are the same KV"  # of sources that do not cover a room
FAMILIES = 1_000  # from here on owners of tokens are families; those below are rooms


class Caller(Protocol):
    """Who began a room, and learns how its parts end: a router's service, or what does its work in the rough."""

    def leased(self, target: Target) -> None: ...

    def ready(self, target: Target) -> None: ...

    def ended(self, part: Source | Target, cause: Cause | None, detail: str, retry_ms: int) -> None:
        """`cause` None: prefill's part has landed. Decode's ends by its own release."""
        ...


@dataclass(eq=False)
class Room:
    """What all ranks of a room have in common; `serial` is what its rows are filled with."""

    world: World
    id: int
    serial: int
    tokens: int
    growth: int
    deadline: float  # seconds that it has
    begun_at: float = math.inf
    honest: bool = True  # so are all that it was begun with
    given_up: bool = False  # by one of them
    family: int = 0  # of prompts that begin alike, and
    shared: int = 0  # how many of its tokens do; 0: nobody knows the prompt
    history: Int64s = field(default_factory=lambda: _NONE)  # who these are of, where it goes on from an earlier room
    sent: frozenset[str] | None = None  # components, by sources that cover it together; None: not said
    covered: bool = True  # by them, each row once
    targets: list[Target] = field(default_factory=list["Target"])
    sources: list[Source] = field(default_factory=list["Source"])

    @property
    def aux(self) -> bytes:
        return self.serial.to_bytes(8, "little")

    @cached_property
    def owners(self) -> Int64s:
        """Who each token is of, with those that follow the prompt: a family, an earlier room, or this one."""
        owners = np.full(ROWS_MAX, self.serial)
        owners[: self.shared] = self.history if len(self.history) else FAMILIES + self.family
        return owners

    def ids(self, first: int, end: int) -> bytes:
        """Of tokens of its prompt, or of what follows it. A family differs from others in its first block alone: what
        follows is the same only where that is."""
        ids, owners = np.arange(first, end), self.owners[first:end]
        family = owners > FAMILIES
        ids += np.where(family, (ids < BLOCK) * 1_000 * (owners - FAMILIES), 1_000_000 * owners)
        return ids.astype("<u4").tobytes()

    @property
    def prompt(self) -> bytes:
        return self.ids(0, self.tokens)

    def words(self, component: Component, rows: tuple[int, int], shape: Shape) -> Int64s:
        """What rows are filled with: alike where all their tokens are, and what comes before them."""
        if component.name == "blocks":
            by_token = self._words_of(0, 1, (rows[0] * PAGE, rows[1] * PAGE), Shape(shape.layers))
            return by_token.reshape(len(by_token), -1, PAGE).swapaxes(1, 2)
        return self._words_of(("kv", "c4").index(component.name), component.tokens_per_row, rows, shape)

    def _words_of(self, index: int, tokens_per_row: int, rows: tuple[int, int], shape: Shape) -> Int64s:
        owners: int | Int64s = self.serial
        if self.shared:
            owners = self.owners[np.arange(rows[0] + 1, rows[1] + 1) * tokens_per_row - 1]
        return words(owners, index, rows, shape)

    @property
    def ready(self) -> bool:
        return bool(self.targets) and all(target.ready for target in self.targets)


class _Part:
    """What a part of a room on either side has to keep: it ends once, and in time."""

    def __init__(self, room: Room, node: DecodeNode | PrefillNode, caller: Caller) -> None:
        self.room, self.world, self.caller = room, room.world, caller
        self.life = node.life
        self.failed = self.killed = False
        self.deadline = math.inf  # by its node's clock
        self.seconds = room.deadline  # that this part has

    def check_cause(self, cause: Cause) -> None:
        """No honest room is lost to a stranger, and none to a busy host."""
        if self.world.strangers and self.room.honest and not self.room.given_up:
            self.world.fail(f"room {self.room.id} is lost to a stranger: {cause}")
        if self.world.profile.starved and not self.room.given_up:
            self.world.fail(f"room {self.room.id} is lost, though everybody lives: {cause}")

    def check_deadline(self, node: DecodeNode | PrefillNode, cause: Cause | None) -> None:
        """No room waits beyond its deadline, and none is reported to have that was not there yet."""
        if node.clock > max(self.deadline, node.thawed) + 1e-6:
            self.world.fail(f"room {self.room.id} waited {node.clock - self.deadline:.4f} beyond its deadline")
        since = self.world.now - self.room.begun_at
        if cause is Cause.DEADLINE and since < self.seconds * (0.98 - 2 * self.world.profile.skew) - 0.01:
            self.world.fail(f"room {self.room.id} of {self.seconds:.2f} s is at its deadline after {since:.2f}")


class Source(_Part):
    """A room on one prefill rank: the engine's pages and cells, and what the core says of them."""

    def __init__(self, room: Room, node: PrefillNode, caller: Caller) -> None:
        super().__init__(room, node, caller)
        self.node = node
        self.opened = self.landed = self.drained = False
        self.withdrawn = False  # its engine gave it up before it was opened
        self.left_out = False  # decode does not know of this rank
        rng, p = self.world.rng, self.world.profile
        self.peers: list[str] | None = None  # that it is for; None: for all
        self.skips = rng.random() < p.engine_skips  # the engine forgets a cell
        self.pages: list[int] = []
        self.source_slots: Int64s = np.empty(0, dtype=np.int64)  # of whole pages

    def open(self, *, seconds: float, grants: int, peers: list[str] | None) -> None:
        node, room = self.node, self.room
        if self.withdrawn and self.life == node.life:
            return
        node.rooms[room.id], self.opened, self.life, self.peers = self, True, node.life, peers
        room.sources.append(self)
        self.deadline = node.clock + seconds
        node.perform(
            node.core.open(
                room.id, tokens=room.tokens, now=node.clock, deadline=self.deadline, grants=grants, peers=peers
            )
        )
        self._start()

    def abort(self, cause: Cause = Cause.ABORTED) -> None:
        self.room.given_up = True
        if not self.opened:
            self.withdrawn, self.life = True, self.node.life
            self.world.seen["rooms given up before they were opened"] += 1
        if not self.killed:
            self.node.perform(self.node.core.abort(self.room.id, self.node.clock, cause))

    def _start(self) -> None:
        """The engine takes the room up once there are pages for it."""
        node, rng = self.node, self.world.rng
        needed = -(-self.room.tokens // PAGE)
        if self.failed:
            return
        if needed > len(node.pages):
            node.later(0.05, self._start)
            return
        self.pages, node.pages = node.pages[:needed], node.pages[needed:]
        self.source_slots = expand_pages(np.array(self.pages), PAGE, PAGE * needed)
        cells: list[tuple[int, int, int, tuple[int, int]]] = []
        for index, component in enumerate(node.components):
            rows = component.rows(self.room.tokens)
            first, end = holds(component).layers
            cuts = sorted({0, rows, *(rng.randrange(rows + 1) for _ in range(rng.randint(0, 2)))})
            for low, high in pairwise(cuts):
                middle = rng.randint(first, end)
                split = [(first, middle), (middle, end)] if first < middle < end else [(first, end)]
                cells += [(index, low, high, layers) for layers in split]
        rng.shuffle(cells)
        if self.skips:
            self.world.seen["cells that the engine forgets"] += 1
            cells.pop()
        node.later(rng.expovariate(200.0), lambda: self._compute(cells))

    def _slots_of(self, component: Component) -> Int64s:
        return np.array(self.pages, np.int64) if component.name == "blocks" else self.source_slots

    def _compute(self, cells: list[tuple[int, int, int, tuple[int, int]]]) -> None:
        """The engine computes a cell, offers it, and goes on, unless the room has failed meanwhile."""
        node, world = self.node, self.world
        if self.failed:
            return
        if cells:
            index, low, high, layers = cells.pop()
            component = node.components[index]
            slots, here = self._slots_of(component)[low:high], holds(component)
            at = places(component)[layers[0] - here.layers[0] : layers[1] - here.layers[0]]
            node.pool[at[:, :, slots]] = self.room.words(component, (low, high), Shape(layers, here.heads))
            node.perform(node.core.push(self.room.id, Cell(component.name, low, layers, slots), node.clock))
        if cells:
            node.later(world.rng.expovariate(500.0), lambda: self._compute(cells))
        else:
            node.later(world.rng.expovariate(500.0), self._finish)

    def _finish(self) -> None:
        self.node.perform(self.node.core.finish(self.room.id, aux=self.room.aux, now=self.node.clock))

    def on_landed(self) -> None:
        if self.landed or self.failed:
            self.world.fail(f"room {self.room.id} lands after it has ended")
        if self.skips and not self.world.profile.ranks:  # else another rank may send the same
            self.world.fail(f"room {self.room.id} lands without a cell that was never offered")
        self.landed = True
        self.check_deadline(self.node, None)
        self.caller.ended(self, None, "", 0)

    def on_failed(self, effect: fx.RoomFailed) -> None:
        if self.landed or self.failed:
            self.world.fail(f"room {self.room.id} fails on prefill after it has ended")
        self.check_cause(effect.cause)
        if effect.cause is Cause.DEADLINE and self.world.profile.patient and self.room.honest and not self.left_out:
            self.world.fail(f"room {self.room.id} waited on prefill for its deadline, and for nothing else")
        self.failed = True
        self.check_deadline(self.node, effect.cause)
        self.caller.ended(self, effect.cause, effect.detail, effect.retry_ms)

    def on_drained(self) -> None:
        """Invariant 1: from here on the engine reuses the pages, so it poisons them."""
        if self.drained or not (self.landed or self.failed):
            self.world.fail(f"room {self.room.id} drains twice, or before it has ended")
        self.drained = True
        node = self.node
        for component in node.components:
            node.pool[places(component)[:, :, self._slots_of(component)[: component.layout.slots]]] = -1
        node.pages += self.pages
        self.pages = []

    def on_killed(self) -> None:
        """What its process knew of this room is gone."""
        if not self.drained:
            self.killed = True

    @property
    def over(self) -> bool:
        return self.killed or self.drained

    @property
    def begun(self) -> bool:
        return self.opened

    def check_end(self) -> None:
        """Invariant 4: ended, exactly once."""
        if not self.killed and (self.landed + self.failed != 1 or not self.drained):
            self.world.fail(f"room {self.room.id} has not ended on {self.node.name}, or its pages were not given back")


class Target(_Part):
    """A room on one decode rank: what it has to read, and what decode writes behind it."""

    def __init__(self, room: Room, node: DecodeNode, caller: Caller) -> None:
        super().__init__(room, node, caller)
        self.node = node
        self.expected = self.ready = self.released = False
        self.whole_group = False  # its sources are the leader's to name
        self.hasty = False  # it has far less time than prefill
        self.corrupted = False  # a row of it is not what was sent
        self.grown = 0  # tokens that decode has written behind the prompt's
        self.ready_at = math.inf
        self.drained = False
        self.prefix = 0  # tokens that the engine has
        self.rest_max = 0  # without a prefill: tokens that the engine computes at most
        self.follows = False  # without a prefill: exactly those, since the leader of its ranks computes them
        self.cached = 0  # tokens that were in the arena already
        self.written = 0  # tokens whose rows are there
        self.chosen: list[Int64s] = []  # slots of each component, where the engine chooses them
        self.first_rows = [0] * len(node.components)  # the first of each that has to cross

    def expect(self, seconds: float, sources: list[str], whole_group: bool = False) -> None:
        node, room = self.node, self.room
        node.dialled.update(sources)
        self.whole_group = whole_group
        placed = None
        if self.world.profile.placed:
            placed = self._choose()
            if placed is None:  # the engine asks when some have come back
                if seconds > 0.2:
                    node.later(0.1, lambda: self.expect(seconds - 0.1, sources))
                return
        node.rooms[room.id], self.expected, self.life = self, True, node.life
        room.targets.append(self)
        if node.engine is not None and self.world.rng.random() < 0.5:
            node.engine.reserve(self)
        self.deadline = node.clock + seconds
        keys = node.core.cache.keys(room.prompt, b"") if room.family else ()
        if self.follows:
            keys = keys[: (room.tokens - self.rest_max) // BLOCK]
        request = RoomRequest(
            room=room.id, tokens=room.tokens, sources=sources, time_left_s=seconds, growth=room.growth, keys=keys,
            chosen=placed, prefix=self.prefix, whole_group=whole_group, rest_max=self.rest_max,
        )  # fmt: skip
        node.perform(node.core.expect(request, node.clock))

    def _choose(self) -> tuple[ComponentRows, ...] | None:
        """What the engine chooses, and that it is not let choose what is nobody's; None without enough of it."""
        node, room, rng = self.node, self.room, self.world.rng
        rows = [component.rows(room.tokens) for component in node.components]
        places_of = [index for index, component in enumerate(node.components) if component.name not in node.stand_ins]
        if any(rows[index] > len(node.slots[index]) for index in places_of):
            self.world.seen["waits for slots"] += 1
            return None
        self.prefix = rng.choice([0, 0, rng.randint(0, room.tokens)])
        self.chosen = [_NONE] * len(rows)
        absent = [0] * len(rows)
        for index in places_of:
            slots, count = node.slots[index], rows[index]
            if rng.random() < 0.5:
                rng.shuffle(slots)
            self.chosen[index] = np.array(slots[len(slots) - count :], np.int64)
            del slots[len(slots) - count :]
            absent[index] = rng.choice([0, 0, rng.randint(0, count)])
        if node.stand_ins:  # the same pages, by token
            self.chosen[0] = expand_pages(self.chosen[2], PAGE, rows[0])
            absent[0] = min(PAGE * absent[2], rows[0])
        asked: dict[str, Int64s] = {}
        for index, component in enumerate(node.components):
            first = self.first_rows[index] = max(absent[index], self.prefix // component.tokens_per_row)
            asked[component.name] = np.where(np.arange(rows[index]) < absent[index], -1, self.chosen[index])
            held = self.room.words(component, (0, first), holds(component))
            node.where(component)[places(component)[:, :, self.chosen[index][:first]]] = held
        placed = chosen_rows(node.components, asked, tokens=room.tokens, prefix=self.prefix)
        if rng.random() < 0.2:
            self._misuse(asked)
        others = [room for room in node.rooms.values() if room.chosen and not room.drained and room.life == node.life]
        if others and rng.random() < 0.1:
            self._take_twice(placed, rng.choice(others))
        return placed

    def _misuse(self, asked: dict[str, Int64s]) -> None:
        """Slots outside the pool, or one twice, are refused before anything is asked."""
        for index, component in enumerate(self.node.components):
            own, first = asked[component.name], self.first_rows[index]
            wrong = component.layout.slots if len(own) - first < 2 or self.world.rng.random() < 0.5 else int(own[-1])
            if len(own) > first and (wrong != own[first] or wrong == component.layout.slots):
                changed = own.copy()
                changed[first] = wrong
                try:
                    chosen_rows(self.node.components, {**asked, component.name: changed}, tokens=self.room.tokens)
                except LocalProtocolError:
                    self.world.seen["wrong slots refused"] += 1
                else:
                    self.world.fail(f"room {self.room.id} may have slot {wrong} of {component.name}")

    def _take_twice(self, placed: tuple[ComponentRows, ...], other: Target) -> None:
        """Slots of a room that has not drained are refused."""
        arena = self.node.core.arena
        parts = zip(other.chosen, other.first_rows, strict=True)
        theirs = [extents_of(slots[first:][-1:]) for slots, first in parts]  # one slot of theirs instead of all of ours
        if not any(map(len, theirs)):
            return
        mixed = [taken if len(taken) else own.extents for taken, own in zip(theirs, placed, strict=True)]
        before = [free.free_slots for free in arena.free]
        try:
            arena.take(self.room.id, tuple(mixed))
        except LocalProtocolError:
            self.world.seen["slots of another room refused"] += 1
        else:
            self.world.fail(f"room {self.room.id} may have the slots of room {other.room.id}, which has not drained")
        if before != [free.free_slots for free in arena.free]:
            self.world.fail(f"{self.node.name} keeps slots that it has refused")

    def on_drained(self) -> None:
        """The engine may reuse its slots, so it poisons what it does not read any more."""
        if self.drained or not (self.ready or self.failed):
            self.world.fail(f"room {self.room.id} drains twice, or before it has ended, on decode")
        self.drained = True
        self.world.seen["chosen slots drained"] += 1
        if self.failed:
            self._give_back()

    def _give_back(self) -> None:
        for component, slots, mine in zip(self.node.components, self.node.slots, self.chosen, strict=True):
            self.node.where(component)[places(component)[:, :, mine]] = -1
            if component.name not in self.node.stand_ins:
                slots += mine.tolist()
        self.chosen = []

    def abort(self, cause: Cause = Cause.ABORTED) -> None:
        """A room that is READY stays."""
        self.room.given_up = True
        if self.expected and not self.killed:
            self.node.perform(self.node.core.abort(self.room.id, self.node.clock, cause))

    def release(self, keys: Sequence[bytes] = ()) -> None:
        self._read("release", grown=True)
        self.released = True
        if self.world.profile.placed:
            self._give_back()
        self.node.perform(self.node.core.release(self.room.id, self.node.clock, keys))

    def on_event(self, event: fx.DecodeEvent) -> None:
        match event:
            case fx.RoomReady():
                self.on_ready(event)
            case fx.RoomFailed():
                self.world.log(f"{self.node.name} room {event.room} failed {event.cause} {event.detail}")
                self.on_failed(event)
            case fx.RoomDrained():
                self.on_drained()

    def on_ready(self, effect: fx.RoomReady) -> None:
        """Invariants 3 and 4."""
        world, room = self.world, self.room
        if self.ready or self.failed:
            world.fail(f"room {room.id} is READY after it has ended")
        self.check_deadline(self.node, None)
        self.ready, self.ready_at = True, world.now
        if effect.aux != (b"" if self.rest_max else room.aux) and room.honest:
            world.fail(f"room {room.id} has another's aux")
        if not room.covered:
            world.fail(f"room {room.id} is READY, though its sources do not send each row once")
        self._check_slots(effect)
        self._check_bytes(effect)
        if not world.profile.placed and (effect.prefix % BLOCK or effect.prefix > room.shared):
            world.fail(f"room {room.id} shares {effect.prefix} tokens, it has {room.shared} in common with others")
        world.seen["tokens shared"] += effect.prefix
        self.cached = effect.prefix
        self.written = effect.prefix if self.rest_max else room.tokens
        self._read("READY", grown=False)
        if self.node.engine is None and not world.profile.turns:
            self._grow()
        self.caller.ready(self)

    def _check_slots(self, effect: fx.RoomReady) -> None:
        world, room, components = self.world, self.room, self.node.components
        self.slots = effect.slots
        if world.profile.placed:
            self.slots = {component.name: own for component, own in zip(components, self.chosen, strict=True)}
        for index, component in enumerate(components):
            rows = component.rows(room.tokens + room.growth) - self.first_rows[index]
            if len(effect.slots.get(component.name, _NONE)) != rows:
                world.fail(f"room {room.id} got other than {rows} slots for {component.name}")
            place = places(component)[:, :, effect.slots.get(component.name, _NONE)]
            lands = self.node.where(component) is self.node.memory and self._is_sent(component)
            if lands and place.size and (int(place.max()) + 1) * ROW > self.node.arena.byte_count:
                world.fail(f"room {room.id} got slots for {component.name} where there is no memory yet")

    def _check_bytes(self, effect: fx.RoomReady) -> None:
        world, room, components = self.world, self.room, self.node.components
        rest = {
            component: component.rows(room.tokens) - effect.prefix // component.tokens_per_row
            for component in components
        }
        if world.profile.placed:
            rest = {
                component: component.rows(room.tokens) - self.first_rows[index]
                for index, component in enumerate(components)
            }
            if effect.prefix != self.prefix:
                world.fail(f"room {room.id} has a prefix of {effect.prefix}, it asked for {self.prefix}")
        sent = filter(self._is_sent, components)
        if effect.kv_bytes != (not self.rest_max) * sum(component.bytes_of(rest[component]) for component in sent):
            world.fail(f"room {room.id} is READY with {effect.kv_bytes} bytes")
        if self.rest_max and not 0 < room.tokens - effect.prefix <= self.rest_max:
            world.fail(f"room {room.id} has {room.tokens - effect.prefix} tokens to compute, of {self.rest_max}")
        if self.follows and room.tokens - effect.prefix != self.rest_max:
            world.fail(f"room {room.id} computes {room.tokens - effect.prefix} tokens, its leader {self.rest_max}")

    def _is_sent(self, component: Component) -> bool:
        return self.room.sent is None or component.name in self.room.sent

    def on_failed(self, effect: fx.RoomFailed) -> None:
        world, room = self.world, self.room
        if self.ready or self.failed:
            world.fail(f"room {room.id} fails on decode after it has ended: {effect.cause} {effect.detail}")
        self.check_cause(effect.cause)
        if effect.cause is Cause.BREACH and room.honest:
            world.fail(f"room {room.id}: honest peers were accused: {effect.detail}")
        if room.sent is not None and any(gap in effect.detail for gap in GAPS):
            world.fail(f"room {room.id} fails, though its sources send each row once: {effect.detail}")
        if ": no rank of " in effect.detail and (world.profile.routers or self.whole_group):
            world.fail(f"room {room.id}: its router or its leader left a rank out: {effect.detail}")
        if effect.cause is Cause.DEADLINE and self.hasty:
            world.seen["rooms that decode gave up in haste"] += 1
        elif effect.cause is Cause.DEADLINE and world.profile.patient and room.honest:
            world.fail(f"room {room.id} waited for its deadline, and for nothing else: {effect.detail}")
        # Another decode rank of the room may learn of it, in the words of the one that read the row.
        readers = [rank.rooms.get(room.id) for rank in world.decodes.values()]
        if "checksum" in effect.detail and not any(each is not None and each.corrupted for each in readers):
            world.fail(f"room {room.id} fails for rows that are right: {effect.detail}")
        world.seen["rooms with a corrupted row"] += self.corrupted
        self.failed = True
        if self.node.engine is not None:
            self.node.engine.failed(self)
        self.check_deadline(self.node, effect.cause)
        self.caller.ended(self, effect.cause, effect.detail, effect.retry_ms)

    def on_killed(self) -> None:
        if not (self.failed or self.released):
            self.killed = True

    def _grow(self) -> None:
        """Decode writes its own rows behind the prompt's."""
        component, room = self.node.components[0], self.room
        own = words(room.serial, 0, (room.tokens, room.tokens + room.growth), holds(component))
        self.node.where(component)[places(component)[:, :, self.slots["kv"][room.tokens :]]] = own
        self.grown = room.growth

    def compute(self, stop: int) -> None:
        """The engine writes the rows of all tokens before `stop`, from those before them. Invariant 1: the slots are
        this room's still, and no other room reads them."""
        core, written = self.node.core, self.written
        for index, component in enumerate(self.node.components):
            rows = written // component.tokens_per_row, component.rows(stop)
            slots = self.slots[component.name][: rows[1]]
            if any(is_free(core.arena.free[index], slot) for slot in slots.tolist()):
                self.world.fail(f"{self.node.name} computes rows of room {self.room.id} with slots that are free")
        self._read("a step", grown=False)
        for index, component in enumerate(self.node.components):
            rows = written // component.tokens_per_row, component.rows(stop)
            slots = self.slots[component.name][slice(*rows)]
            if any(is_shared(core.cache, index, slot) for slot in slots.tolist()):
                self.world.fail(f"{self.node.name} computes rows of room {self.room.id} in slots that rooms share")
            own = self.room.words(component, rows, holds(component))
            self.node.where(component)[places(component)[:, :, slots]] = own
        self.written = stop

    def _read(self, when: str, *, grown: bool) -> None:
        if not self.room.honest:
            return  # whoever should have written it may not have
        for index, component in enumerate(self.node.components):
            if component.name in self.node.stand_ins.values():
                continue  # the same bytes, and those behind the prompt
            rows = component.rows(self.written) + (self.grown if grown and not index else 0)
            got = self.node.where(component)[places(component)[:, :, self.slots[component.name][:rows]]]
            if (got != self.room.words(component, (0, rows), holds(component))).any():
                self.world.fail(f"at {when} room {self.room.id} reads rows of {component.name} wrong")

    @property
    def over(self) -> bool:
        """Whether decode has nothing more to do with it."""
        return self.failed or self.released or self.killed

    @property
    def begun(self) -> bool:
        return self.expected

    def check_end(self) -> None:
        """Invariant 4: ended, exactly once."""
        if not self.over or (self.ready and self.failed):
            self.world.fail(f"room {self.room.id} has not ended once on {self.node.name}")


assert LAYERS >= 2, "or no stage of a pipeline has a layer"
