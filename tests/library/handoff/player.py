"""Plays scenarios (tests/support/scenarios.py) of what one end of a session receives, and of all that it then does.

A message or effect has its name, its grant or room, and PEER.SESSION where they are not p0 or d0, and a0. Then comes
each field by name that is not as stated here: what the struct has as its default, `STATED` below, and of a Hello or
Welcome the identity that its sender has in all scenarios. `again`: the fields that follow differ from those of the last
one of that name, number, peer and session; the others are equal. Rows and slots are first:end. A part of a Grant is
COMPONENT[rows]@slots, with its component's place in Register; a Write has COMPONENT[slots read]@slots. `@0.1 0.3` are
the seconds of a step at which its effect came. Behind the effects: free slots of each component, bytes in quarantine,
states of sessions, and whether the node is idle.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from pdtransfer import wire
from pdtransfer.errors import LocalProtocolError, RemoteProtocolError
from pdtransfer.handoff.effects import ComponentRows, Send, Write
from pdtransfer.handoff.slot_allocator import extents_of, slot_count
from pdtransfer.layout.layout import Component
from pdtransfer.wire import VERSION, Holds, Identity, Member, Part, Ranks, Withdrawn, pack_extents, unpack_extents
from tests.library.sim.pools import LAYERS
from tests.support.scenarios import Player
from tests.support.session_ends import ARENA_BYTES, REACH, kv_bytes

PEERS = {f"p{n}": f"tcp://p{n}" for n in range(5)} | {
    f"{role}{n}": f"node:{role}{n}" for role in "dr" for n in range(4)
}
NAMES = {endpoint: name for name, endpoint in PEERS.items()}
GROUP = PEERS | {"x": ""}  # what a member's endpoint is; x gives none
STATED = {
    "session": 0xA0, "tokens": 8, "prefix": 0, "send_aux": True, "time_left_ms": 60_000, "aux": b"", "detail": "",
    "incarnation": 1, "version": VERSION, "version_min": VERSION, "version_max": VERSION, "fields": (), "reach": REACH,
    "layers": (0, LAYERS), "quiescent": False, "kv_bytes": kv_bytes(8), "bytes_ready": ARENA_BYTES,
}  # fmt: skip
_hints = cache(get_type_hints)
_WHO = re.compile(r"([pdr]\d)?\.?\b([a-f][0-9a-f]+)?")
_PART = re.compile(r"(\d+)\[(\d+):(\d+)\]@([\d:+]*)")
_HELD = re.compile(r"(\w+)(?:\[(\d+):(\d+)\])?((?:/\d+)*)")
_NUMBERS = ("write", "grant", "room")  # the first of these that a struct has is printed without its name


class SessionPlayer(Player):
    """One end of the sessions. Verbs are its methods that begin with `do_`, methods of its core, and messages."""

    makes = "node"
    end: Any
    peer: str  # whom a message is from, and to, where no other is named
    takes: ClassVar[dict[str, type]] = {}  # whose fields are arguments of a verb, too

    def __init__(self) -> None:
        self._reported: dict[tuple[str, ...], dict[str, str]] = {}
        super().__init__()

    @property
    def them(self) -> Identity:
        """Whose Hello or Welcome comes in."""
        raise NotImplementedError

    @property
    def known(self) -> tuple[Component, ...]:
        """Components that are printed by their names."""
        raise NotImplementedError

    def stated(self, kind: Any) -> dict[str, Any]:
        """What is as stated at this end alone."""
        raise NotImplementedError

    def effects(self, verb: str, words: list[str]) -> list[str]:
        started = getattr(self, "end", self).__dict__.get("now", 0.0)
        reported = dict[str, list[float]]()
        try:
            for each in (self._receive if verb[0].isupper() else self._do)(verb, words):
                when, effect = each if isinstance(each, tuple) else (self.end.now, each)
                reported.setdefault(self.shown(effect), []).append(when - started)
        except (LocalProtocolError, RemoteProtocolError) as error:
            return [f"{type(error).__name__} {json.dumps(str(error), ensure_ascii=False)}"]
        is_timed = verb in ("tick", "live")
        return [text + _times(times, is_timed=is_timed) for text, times in reported.items()]

    def do_tick(self, seconds: float) -> list[Any]:
        """Time passes, and nobody speaks."""
        return list(self.end.passing(seconds))

    def do_wait(self, seconds: float) -> None:
        """Time passes, and nothing that falls due is done."""
        self.end.now += seconds

    # From words to calls

    def _do(self, verb: str, words: list[str]) -> list[Any]:
        does = getattr(self, f"do_{verb}", None) or getattr(self.end.core, verb)
        places = [*inspect.signature(does).parameters]
        given = arguments(_hints(does) | _hints(self.takes.get(verb, type)), places, words)
        return does(**given, **({"now": self.end.now} if "now" in places else {})) or []

    def _receive(self, name: str, words: list[str]) -> list[Any]:
        """A peer sends this message."""
        peer, session = self.peer, ""
        for word in words:
            if who := _WHO.fullmatch(word):
                peer, session = PEERS[who[1]] if who[1] else peer, who[2] or ""
                words = [each for each in words if each is not word] + [f"session={session}"] * bool(session)
        return self.end.receive(self.made(getattr(wire, name), words), peer=peer)

    def made(self, kind: Any, words: list[str]) -> Any:
        """A struct of these words, the other fields as stated."""
        hints = _hints(kind)
        fields = {name: value for name, value in (STATED | self.stated(kind)).items() if name in hints}
        if "identity" in hints:
            of_identity = _hints(Identity)
            inner = [word for word in words if word.partition("=")[0] in of_identity]
            fields["identity"] = msgspec.structs.replace(self.them, **arguments(of_identity, [], inner))
            words = [word for word in words if word not in inner]
        return kind(**fields | arguments(hints, [name for name in hints if name in _NUMBERS], words))

    # From effects to words

    def shown(self, effect: Any) -> str:
        """An effect with each of its fields that is not as stated."""
        peer = self.peer
        if isinstance(effect, Send):
            peer, effect = effect.peer, effect.message
        kind, fields = type(effect), msgspec.structs.asdict(effect)
        peer = fields.pop("peer", peer)
        if "identity" in fields:
            ours = msgspec.structs.asdict(self.end.me)
            identity = msgspec.structs.asdict(fields.pop("identity"))
            fields |= {name: value for name, value in identity.items() if value != ours[name]}
        texts = {name: self.text(value, name) for name, value in fields.items()}
        number = next((texts.pop(name) for name in _NUMBERS if name in texts), "")
        session = texts.pop("session") if fields.get("session") else ""  # that of a refused Hello is 0
        who = ".".join([NAMES.get(peer, peer)] * (peer != self.peer) + [session] * (session not in ("", "a0")))
        words = tuple(each for each in (kind.__name__, number, who) if each)
        if kind is Write:
            rows = {name: texts.pop(name) for name in ("component", "source_slots", "target_slots")}
            words += ("{component}[{source_slots}]@{target_slots}".format_map(rows),)
        before, self._reported[words] = self._reported.get(words, {}), texts
        defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
        stated = STATED | {name: each for name, each in defaults.items() if each is not msgspec.NODEFAULT}
        stated |= self.stated(kind)
        changed = self._differing(texts, {name: self.text(stated[name], name) for name in texts.keys() & stated.keys()})
        if before.keys() == texts.keys() and len(again := self._differing(texts, before)) < len(changed):
            changed = ["again", *again]
        return " ".join([*words, *changed])

    @staticmethod
    def _differing(texts: dict[str, str], from_those: dict[str, str]) -> list[str]:
        return [f"{name}={text}" for name, text in texts.items() if from_those.get(name) != text]

    def text(self, value: Any, name: str = "") -> str:
        """A value as the texts have it. What is of no type known here is an error."""
        match value:
            case Enum():
                return str(value.value)
            case str():
                short = NAMES.get(value, value)
                return short if re.fullmatch(r"[\w./:*+-]+", short) else json.dumps(short, ensure_ascii=False)
            case None | bool() | int() | float():
                return f"{value:x}" if name == "session" else str(value).lower()
            case bytes():
                return value.decode() if value.isalnum() and value.isascii() else f"0x{value.hex()}"
            case np.ndarray():
                pairs = value if value.ndim == 2 else extents_of(value)
                return "+".join(f"{first}:{first + count}" for first, count in pairs.tolist()) or "none"
            case dict():
                return "{" + ", ".join(f"{key}: {self.text(each)}" for key, each in value.items()) + "}"
            case tuple() | list():
                return ",".join(self.text(each) for each in value) or "none"
            case msgspec.Struct():
                return self._inner(value)
            case _:
                raise TypeError(f"{name}: {type(value).__name__} has no text")

    def _inner(self, value: Any) -> str:
        """A struct in a field: a known one short, with what it may have besides."""
        fields, short = msgspec.structs.asdict(value), ""
        if isinstance(value, Part | ComponentRows):
            component, first, extents = (fields.pop(name) for name in ("component", "first_row", "extents"))
            extents = unpack_extents("", extents) if isinstance(extents, bytes) else extents
            rows = fields.pop("rows", slot_count(extents))
            short = f"{self.text(component)}[{first}:{first + rows}]@{self.text(extents)}"
        elif value in self.known:
            return value.name
        rest = " ".join(f"{name}={self.text(each, name)}" for name, each in fields.items())
        return short + (f"({rest})" if rest else "")


def _times(times: list[float], *, is_timed: bool) -> str:
    if not is_timed:
        return f" x{len(times)}" if len(times) > 1 else ""
    first = " ".join(f"{round(when, 3):g}" for when in times[:4])
    return f" @{first}" + (f" .. {round(times[-1], 3):g} x{len(times)}" if len(times) > 4 else "")


def arguments(hints: dict[str, Any], places: list[str], words: list[str]) -> dict[str, Any]:
    """Words by their names, those without one in these places."""
    unnamed, found = iter(places), dict[str, Any]()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or '"' in name:
            name, text = next(unnamed, "too many"), word
        if name not in hints:
            raise KeyError(f"{name}: must be one of {', '.join(hints)}")
        found[name] = _value(name, hints[name], text.strip('"'))
    return found


def _value(name: str, kind: Any, text: str) -> Any:
    """The value that a field of this name or type has by these words."""
    items = [each for each in text.split(",") if each not in ("", "none")]
    origin, inner = get_origin(kind), get_args(kind)
    if name in _BY_NAME:
        return _BY_NAME[name](text if name in _WHOLE else items)
    if type(None) in inner:
        return None if text == "none" else _value(name, inner[0], text)
    if origin is tuple:
        return tuple(_value("", inner[0], each) for each in items)
    if origin is np.ndarray:
        return _numbers(items)
    if kind is bytes:
        return bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode()
    if kind is bool:
        return {"true": True, "false": False}[text]
    return kind(text) if inspect.isclass(kind) else text


def _numbers(items: list[str]) -> Any:
    """Those of runs such as 0:8+12:16."""
    runs = [map(int, each.split(":")) for item in items for each in item.split("+")]
    return np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)])


def _parts(items: list[str]) -> tuple[Part, ...]:
    parts = list[Part]()
    for item in items:
        index, first, end, slots = _PART.fullmatch(item).groups()
        runs = [tuple(map(int, each.split(":"))) for each in slots.split("+") if each]
        extents = pack_extents(np.array([(start, stop - start) for start, stop in runs], np.int64).reshape(-1, 2))
        parts.append(Part(int(index), int(first), int(end) - int(first), extents))
    return tuple(parts)


def _held(text: str) -> Holds:
    """COMPONENT, COMPONENT[layers] or COMPONENT/REPLICA/REPLICAS."""
    name, first, end, replica = _HELD.fullmatch(text).groups()
    return Holds(name, int(first or 0), int(end or LAYERS), 0, 1, *map(int, replica.split("/")[1:]))


_WHOLE = ("session", "session_id", "peer", "fields", "ranks")
_BY_NAME: dict[str, Callable[[Any], Any]] = {
    "session": lambda text: int(text, 16),
    "session_id": lambda text: int(text, 16),
    "peer": PEERS.__getitem__,
    "fields": lambda text: tuple(text.split("; ")) if text else (),
    "parts": _parts,
    "ranks": lambda text: Ranks(*map(int, text.split("/"))),
    "group": lambda items: tuple(Member(each, GROUP[each] if number else "") for number, each in enumerate(items)),
    "keys": lambda items: _numbers(items).astype("<u4").tobytes(),
    "chosen": lambda items: tuple(map(int, items)),
    "holds": lambda items: tuple(map(_held, items)),
    "withdrawn": lambda items: tuple(Withdrawn(int(room), why) for room, _, why in (e.partition("/") for e in items)),
} | dict.fromkeys(("sources", "only", "peers"), lambda items: tuple(PEERS[each] for each in items))
