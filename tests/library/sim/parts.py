"""Prefills that each have some components, and the rooms that several of them write: each row is one's to write."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, combinations
from typing import TYPE_CHECKING

from pdtransfer.handoff.decode.records import SessionRecord
from pdtransfer.handoff.slot_allocator import slots_of
from pdtransfer.wire import Grant, unpack_extents

from .pools import places

if TYPE_CHECKING:
    from .decodes import DecodeNode
    from .prefills import PrefillNode
    from .rooms import Room
    from .world import World

SOURCES_MAX = 3  # of a room
_PLAIN = ("kv",), ("c4",), ("kv", "c4")
_DESCRIBED = ("blocks",), ("kv", "blocks"), ("blocks", "c4"), ("kv", "blocks", "c4")  # too, by page


def names_held(world: World) -> tuple[str, ...]:
    """What the next prefill has. The first ones have one component each, so that some of them cover a room."""
    known, rng = len(world.held), world.rng
    if world.profile.stand_ins:
        first, rest = (("kv",), ("c4",), ("blocks",)), _PLAIN + _DESCRIBED
    else:
        first, rest = (("kv",), ("c4",)), _PLAIN
    world.held.append(first[known] if known < len(first) else rng.choice(rest))
    return world.held[-1]


def sent_by(names: tuple[str, ...]) -> list[str]:
    """Of a component with a stand-in the component is sent, where a prefill has both."""
    return [name for name in names if name != "kv" or "blocks" not in names]


class Parts:
    """The prefills of a world, and which of them cover a room together."""

    def __init__(self, world: World) -> None:
        self._world = world
        groups = zip(world.prefill_groups, world.held, strict=True)
        prefills = [(node, sent_by(names)) for (node,), names in groups]
        self._covering: list[tuple[list[PrefillNode], frozenset[str]]] = []
        self._others: list[list[PrefillNode]] = []
        for some in chain.from_iterable(combinations(prefills, count) for count in range(1, SOURCES_MAX + 1)):
            nodes, sent = [node for node, _ in some], Counter(chain.from_iterable(names for _, names in some))
            if sent in (Counter(["kv", "c4"]), Counter(["blocks", "c4"])):
                self._covering.append((nodes, frozenset(sent)))
            else:
                self._others.append(nodes)

    def choose(self, room: Room) -> list[PrefillNode]:
        """The prefills of a room, in any order; now and then such as do not cover it."""
        rng, seen = self._world.rng, self._world.seen
        if rng.random() < 0.15:
            room.covered, nodes = False, rng.choice(self._others)
            seen["rooms that their sources do not cover"] += 1
        else:
            nodes, room.sent = rng.choice(self._covering)
            seen["rooms of several prefills"] += len(nodes) > 1
            seen["rooms by page" if "blocks" in room.sent else "rooms by token"] += 1
        return rng.sample(nodes, len(nodes))


class SoleWriters:
    """One life of a decode node's grants: none has a word of a room that another session's has."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._words: dict[int, dict[int, set[int]]] = defaultdict(dict)  # by room and session

    def granted(self, session: SessionRecord, message: Grant) -> None:
        """A Grant that was not sent before."""
        if self._node.world.parts is None:
            return
        words: set[int] = set()
        for part in message.parts:
            slots = slots_of(unpack_extents("extents", part.extents))
            words.update(places(session.targets[part.component])[:, :, slots].ravel().tolist())
        of_room = self._words[message.room]
        for other, theirs in of_room.items():
            if other != session.id and words & theirs:
                self._node.world.fail(f"{self._node.name} grants rows of room {message.room} to two writers")
        of_room[session.id] = of_room.get(session.id, set()) | words
