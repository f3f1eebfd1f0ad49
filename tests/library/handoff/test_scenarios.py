"""The sessions of both ends play the texts beside this file, each scenario a test: see player.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import msgspec
import numpy as np
import pytest

from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.effects import ComponentRows, Outcome, Send, Write
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.limits import TOKENS_MAX, Limits
from pdtransfer.wire import Grant, Identity, Part, Registered, Welcome, pack_extents
from tests.library.handoff.player import SessionPlayer, arguments
from tests.library.sim.pools import LAYERS, components
from tests.support.scenarios import ScenarioError, plays, rewrite
from tests.support.session_ends import ARENA_BYTES, LIMITS, REACH, SLOTS, D, DecodeEnd, P, PrefillEnd


class DecodePlayer(SessionPlayer):
    """A decode node; prefill ranks p0, p1 and so on speak to it."""

    end: DecodeEnd
    peer = P
    takes: ClassVar = {"node": Limits, "expect": RoomRequest, "up": Identity}

    def state(self) -> dict[str, str]:
        core = self.end.core
        held = {name: peer.quarantined_bytes for name, peer in core.prefill_peers.peers.items()}
        by_peer = [f"{self.text(name)}={count}" for name, count in held.items() if count and len(held) > 1]
        return {
            "peers": self.text(tuple(core.prefill_peers.peers)),
            **{f"{session.id:x}": session.state.value for session in core.prefill_peers.sessions.values()},
            "free": " ".join(map(str, self.end.free)),
            "quarantined": " ".join([str(core.leases.quarantined_bytes), *by_peer]),
            "cached": f"{len(core.cache)} claimed {core.cache.claimed} evicted {core.cache.evicted_blocks}",
            "matched": str(core.post_landing.matched),
            "mismatched": str(core.post_landing.mismatched),
            "": "idle" if core.idle else "busy",
        }

    def stated(self, kind: Any) -> dict[str, Any]:
        return {"components": self.known}

    @property
    def known(self) -> tuple[Any, ...]:
        return self.end.core.arena.components

    @property
    def them(self) -> Identity:
        return self.end.welcome().identity

    def made(self, kind: Any, words: list[str]) -> Any:
        """From a Welcome of p0 on that is its incarnation."""
        message = super().made(kind, words)
        if kind is Welcome and message.identity.node == self.them.node:
            self.end.incarnation = message.identity.incarnation
        return message

    def do_node(
        self, slots: int = SLOTS, bytes_ready: int | None = None, verify: bool = False, engine_slots: bool = False,
        may_be_one: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """`options` are limits, and arguments of DecodeSessions beside those here."""
        own = {"bytes_ready": bytes_ready, "verify": verify, "engine_slots": engine_slots}
        own["may_be_one"] = lambda _, __: may_be_one
        self.end = DecodeEnd(replace(LIMITS, **options), slots, **own)

    def do_up(self, peer: str = P, bytes_ready: int = ARENA_BYTES, **options: Any) -> list[Any]:
        """A session with this peer: it is dialled, sends Welcome and, once it has the arena, Registered."""
        effects = self.end.core.dial(peer, self.end.now)
        effects += self.end.receive(self.end.welcome(**options), peer=peer)
        session = self.end.core.prefill_peers.peers[peer].session
        effects += self.end.core.offered(session.id, REACH, self.end.now)
        return effects + self.end.receive(Registered(session.id, bytes_ready), peer=peer)

    def do_offered(self, session: int = 0xA0) -> list[Any]:
        return self.end.core.offered(session, REACH, self.end.now)

    def do_expect(self, room: int, salt: bytes = b"", **options: Any) -> list[Any]:
        """`keys` are token ids of the prompt, `chosen` how many slots of each component its engine has chosen."""
        if "keys" in options:
            prompt = options["keys"]
            options = {"tokens": len(prompt) // 4} | options | {"keys": self.end.core.cache.keys(prompt, salt)}
        if "chosen" in options:
            rows = zip(self.known, options["chosen"], strict=True)
            options["chosen"] = tuple(ComponentRows(component, 0, extents_of(np.arange(n))) for component, n in rows)
        options = {"tokens": 8, "sources": () if "rest_max" in options else (P,), "time_left_s": 60.0} | options
        return self.end.core.expect(RoomRequest(room=room, **options), self.end.now)

    def do_release(self, room: int, keys: bytes = b"") -> list[Any]:
        """`keys` are token ids of the prompt and the answer."""
        return self.end.core.release(room, self.end.now, self.end.core.cache.keys(keys, b""))

    def do_clear(self) -> None:
        """All blocks that nobody reads are given up."""
        self.end.core.cache.clear()

    def do_settled(self, grant: int, checksum: int, detail: str = "", session: int = 0xA0) -> list[Any]:
        return self.end.core.settled(session, grant, checksum, detail, self.end.now)

    def do_live(self, seconds: float, peers: tuple[str, ...]) -> list[Any]:
        """Time passes; these peers answer every Ping and Hello."""
        effects = list[Any]()
        for _ in range(round(seconds * 10)):
            for when, effect in self.end.passing(0.1):
                effects.append((when, effect))
                if isinstance(effect, Send) and effect.peer in peers:
                    effects += [(self.end.now, each) for each in self.end.answer(effect)]
        return effects


class PrefillPlayer(SessionPlayer):
    """A prefill node; decode ranks d0, d1 and so on speak to it."""

    end: PrefillEnd
    writes: list[Write]  # in flight
    peer = D
    takes: ClassVar = {"node": Limits, "push": Cell}

    def state(self) -> dict[str, str]:
        core = self.end.core
        return {
            "peers": self.text(tuple(core.peers)),
            "waiting": str(len(core._waiting)),  # rooms that have grants and are not open
            **{f"{session.id:x}": "open" if session.open else "closed" for session in core.sessions.values()},
            "": "idle" if core.idle else "busy",
        }

    def stated(self, kind: Any) -> dict[str, Any]:
        return {"components": self.known, "landing": self.known} | ({"urgent": True} if kind is Write else {})

    @property
    def known(self) -> tuple[Any, ...]:
        return components(SLOTS, 1, page_first=True)

    @property
    def them(self) -> Identity:
        return self.end.hello().identity

    def made(self, kind: Any, words: list[str]) -> Any:
        """A Grant has, where it names no parts, all rows whose last tokens are in [prefix, stop), from slot `at` on."""
        if kind is not Grant:
            return super().made(kind, words)
        hints = {**get_type_hints(Grant), "at": int}
        fields = {"session": 0xA0, "tokens": 8, "prefix": 0, "stop": TOKENS_MAX, "at": 0, "time_left_ms": 60_000}
        fields |= arguments(hints, ["grant"], words)
        stop, at = min(fields["stop"], fields["tokens"]), fields.pop("at")
        rows = [(each.rows(fields["prefix"]), each.rows(stop)) for each in self.known]
        if stop < fields["tokens"] or fields["prefix"]:
            rows = [(fields["prefix"] // each.tokens_per_row, stop // each.tokens_per_row) for each in self.known]
        parts = [
            Part(index, first, end - first, pack_extents(np.array([[at, end - first]])))
            for index, (first, end) in enumerate(rows)
            if end > first
        ]
        return Grant(**{"parts": tuple(parts), "send_aux": stop == fields["tokens"]} | fields)

    def shown(self, effect: Any) -> str:
        if isinstance(effect, Write):
            self.writes.append(effect)
        return super().shown(effect)

    def do_written(self) -> list[Any]:
        """All writes that are in flight have landed."""
        writes, self.writes = self.writes, []
        return [effect for write in writes for effect in self.end.wrote(write)]

    def do_computed(self, room: int, first: int, end: int) -> list[Any]:
        """The engine has these tokens: whole rows of them are pushed."""
        effects = list[Any]()
        for each in self.known:
            rows = np.arange(first // each.tokens_per_row, end // each.tokens_per_row)
            effects += self.end.push(room, component=each.name, first_row=int(rows[0]), source_slots=rows)
        return effects

    def do_node(self, **limits: Any) -> None:
        self.writes = list[Write]()
        self.end = PrefillEnd(replace(LIMITS, **limits))

    def do_up(self, session: int = 0xA0, peer: str = D, incarnation: int = 1) -> list[Any]:
        """A session of this peer: it sends Hello and Register, and its arena is mapped."""
        effects = self.end.receive(self.end.hello(incarnation), self.end.register(session), peer=peer)
        return effects + self.end.core.mapped(session, ARENA_BYTES)

    def do_mapped(self, bytes_ready: int = ARENA_BYTES, session: int = 0xA0) -> list[Any]:
        return self.end.core.mapped(session, bytes_ready)

    def do_open(
        self, room: int, tokens: int | None = 8, time_left_s: float = 60.0, grants: int | None = 1,
        only: tuple[str, ...] | None = None,
    ) -> list[Any]:  # fmt: skip
        options = {"tokens": tokens, "deadline": self.end.now + time_left_s, "peers": only}
        return self.end.open(room, **options | ({} if grants == 1 else {"grants": grants}))

    def do_push(self, room: int, tokens: int = 8, component: str = "", **changes: Any) -> list[Any]:
        """A cell of all its rows and layers for each component, or the one that is named."""
        effects = list[Any]()
        for name in (component,) if component else ("kv", "c4"):
            rows = next((each.rows(tokens) for each in self.known if each.name == name), 1)
            cell = {"first_row": 0, "layers": (0, LAYERS), "source_slots": np.arange(rows)} | changes
            effects += self.end.core.push(room, Cell(name, **cell), self.end.now)
        return effects

    def do_finish(self, room: int, aux: bytes = b"aux") -> list[Any]:
        return self.end.finish(room, aux)

    def do_wrote(
        self, write: int, outcome: Outcome = Outcome.LANDED, checksum: int = 0, session: int = 0xA0
    ) -> list[Any]:
        return self.end.core.wrote(session, write, outcome, "so it ended", self.end.now, checksum=checksum)

    def do_near(self, write: int, session: int = 0xA0) -> list[Any]:
        """Bytes of this write are about to land."""
        return self.end.core.wake_hint(session, write)


PLAYERS = {"decode": DecodePlayer, "prefill": PrefillPlayer}
test_scenario = plays({path: PLAYERS[path.parent.name] for path in sorted(Path(__file__).parent.glob("*/*.txt"))})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("t\njump 1 => nothing", ":2: jump 1: .*jump"),
        ("t\ndial p0 => x\n\nu\nexpect 1 token=8 => x", ":5: .*token: must be one of room, .*tokens"),
        ("t\nexpect 1 tokens=x => x", ":2: .*'x'"),
        ("t\ndial p9 => x", ":2: .*p9"),
        ("t\nDrained 1 2 => x", ":2: .*too many"),
        ("t\ndial p0 => x\n\nt\ndial p0 => x", ":4: .* title .*: t"),
        ("t\n| dial p0 => x\n| dial p0 => x", ":3: expected a step .*: .*dial p0"),
        ("t\n   up", ":2: expected a title"),
        ("up => x", ":1: expected a title"),
    ],
)
def test_a_text_that_is_not_understood_fails_with_its_file_and_line(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "some.txt"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=f"some.txt{named}"):
        rewrite(path, DecodePlayer)


def test_no_field_is_left_out() -> None:
    class Reported(msgspec.Struct):
        grant: int
        peer: str
        new: float
        kept: int = 3

    player = DecodePlayer()
    assert player.shown(Reported(1, P, 0.5)) == "Reported 1 new=0.5"
    assert player.shown(Reported(1, P, 0.5, 4)) == "Reported 1 again kept=4"
    assert player.shown(Reported(1, "tcp://p1", 0.5, 3)) == "Reported 1 p1 new=0.5"
    with pytest.raises(TypeError, match="new: object"):
        player.shown(Reported(1, P, object()))
