"""The router's core plays the texts in routing/, as tests/library/handoff/player.py has the language, and goes through
storms: a bad network in virtual time, with the daemons' services.

Its workers p0, d0 and so on have the nodes P0, D0; `node` meets them all. `submit` has the fields of a request and of
its Sampling. Ids and prompts are first:end. Begins to two workers that name each other are one, of P+D, whose
first_token is prefill's. A struct in a field is shown without what is as stated. A RoomEnded is of the request that its
room began, if of no other, and has the detail of an End, if none of its own. Behind the effects: counters, the models
with their longest contexts, the state of each worker with the reason why it gets no room, and requests that are open.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause, RemoteProtocolError
from pdtransfer.handoff.peers import Send
from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.limits import AHEAD_PING, PROMPT_BYTES_MAX, Limits
from pdtransfer.serve.router.backends.daemons import worker_pool
from pdtransfer.serve.router.backends.daemons.router_effects import Emit, RoomEnded, WorkerChanged
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.serve.router.backends.daemons.workers import Worker, obstacle, worker_status
from pdtransfer.serve.router.fleet.roles import Departure
from pdtransfer.serve.router.fleet.status import WorkerStatus
from pdtransfer.serve.router.front.json_bodies import AnswerFailedError
from pdtransfer.wire import (
    VERSION,
    Begin,
    End,
    Goodbye,
    Identity,
    Load,
    Ping,
    Pong,
    Reject,
    Sampling,
    Tokens,
    Unusable,
    Welcome,
    pack_ids,
)
from tests.library.handoff.player import NAMES, PEERS, SessionPlayer
from tests.support.routing_world import LIMITS, Faults, Net, World, identity, request
from tests.support.scenarios import plays
from tests.support.session_ends import CoreAndClock

GENTLE = Limits(resend_ms=50, resend_ms_max=400, ping_ms=200, silence_ms=30_000, room_deadline_ms=60_000)
PROMPT, SAMPLING = pack_ids(range(7, 12)), Sampling(12)
LOAD = Load(True, False, 0, 0, 1_000, 1_000)


class Router(CoreAndClock):
    """A Routing and its clock, with workers that are played."""

    def __init__(
        self, prefill: Iterable[str] = ("p0",), decode: Iterable[str] = ("d0",), limits: Limits = LIMITS
    ) -> None:
        self.me, self.now, rooms = identity("router", "router"), 0.0, iter(range(1, 1_000))
        peers = [[PEERS.get(name, name) for name in names] for names in (prefill, decode)]
        self.core = Routing(self.me, prefill=peers[0], decode=peers[1], limits=limits, mint=lambda: next(rooms))
        self.core.start(self.now)

    def meet(self) -> Router:
        """All workers are there, and ready."""
        for peer, worker in [*self.core.workers.by_peer.items()]:
            node = NAMES.get(peer, peer).upper()
            self.receive(Welcome(VERSION, identity(node, worker.role)), LOAD, peer=peer)
        return self

    def live(self, seconds: float, peers: Iterable[str] = ()) -> Iterator[tuple[float, Any]]:
        """Time passes; these workers answer every Ping, or all do."""
        for when, effect in self.passing(seconds):
            yield when, effect
            if isinstance(getattr(effect, "message", None), Ping) and effect.peer in (peers or (effect.peer,)):
                alive = Pong(self.core.workers.by_peer[effect.peer].identity.incarnation)
                yield from ((when, each) for each in self.receive(alive, peer=effect.peer))


class Refused(msgspec.Struct):
    """A request that is not taken."""

    cause: Cause
    detail: str
    retry_ms: int


class RoutingPlayer(SessionPlayer):
    end: Router
    peer = ""
    known = ()
    sender = ""  # of the message that comes in
    room = 0  # whose Ends are shown
    takes: ClassVar = {
        "node": Limits,
        "submit": type("Asked", (), {"__annotations__": get_type_hints(CompletionRequest) | get_type_hints(Sampling)}),
    }

    @property
    def them(self) -> Identity:
        name = self.sender[-2:]
        return identity(name.upper(), "prefill" if name[0] == "p" else "decode")

    def state(self) -> dict[str, str]:
        core, whys = self.end.core, self.end.core.workers.why_not(lambda _: "")
        return {
            **{name: str(getattr(core, name)) for name in ("retries", "resumptions", "stayed", "prefix_tokens")},
            "models": self.text(core.workers.models()),
            **{
                self.text(each.peer): self._status(worker_status(each, whys[each.peer]))
                for each in core.workers.by_peer.values()
            },
            "open": str(len(core.requests)),
            "": "busy" if core.rooms else "idle",
        }

    def _status(self, status: WorkerStatus) -> str:
        why = [] if status.why is None or status.state == "connecting" else [self.text(status.why)]
        return " ".join([status.state, *["leaves"] * status.leaves, *why])

    def stated(self, kind: Any) -> dict[str, Any]:
        return {
            Begin: {"prompt": PROMPT, "sampling": SAMPLING, "peers": (), "time_left_ms": LIMITS.room_deadline_ms},
            End: {"detail": "", "tokens": 0, "kv_bytes": 0, "prefix": 0},
            Goodbye: {"reason": "shutdown"},
            Load: msgspec.structs.asdict(LOAD),
            Reject: {"session": 0, "reason": "refused"},
            Tokens: {"first": 0},
            Sampling: {"max_tokens": SAMPLING.max_tokens},
        }.get(kind, {"request": 0, "prefill_node": "P0", "decode_node": "D0", "prompt_tokens": len(PROMPT) // 4})

    def _receive(self, name: str, words: list[str]) -> list[Any]:
        self.sender = next(PEERS[word] for word in words if word in PEERS)
        return list(_paired(super()._receive(name, words)))

    def made(self, kind: Any, words: list[str]) -> Any:
        packed = {"ids": _ids, "logprobs": _logprobs, "unusable": _unusable}
        apart = {name: text for name, _, text in (word.partition("=") for word in words) if name in packed}
        made = super().made(
            kind, [word for word in words if word.partition("=")[0] not in apart] + ["ids="] * (kind is Tokens)
        )
        return msgspec.structs.replace(made, **{name: packed[name](text) for name, text in apart.items()})

    def _do(self, verb: str, words: list[str]) -> Iterator[Any]:
        return _paired(super()._do(verb, words))

    def shown(self, effect: Any) -> str:
        if isinstance(effect, RoomEnded):
            self.room, request = effect.id, effect.request
            detail = "" if _reports(effect) else effect.detail
            effect = replace(effect, request=0 if request == effect.id else request, detail=detail)
        shown = super().shown(_struct(effect) if is_dataclass(effect) else effect)
        return re.sub(r"sampling=\((.*?)\)", r"\1", shown)

    def text(self, value: Any, name: str = "") -> str:
        match value:
            case bytes() if name in ("ids", "prompt") and len(value) % 4 == 0:
                return super().text(extents_of(np.frombuffer(value, "<u4").astype(np.int64)))
            case list() if name == "ids":
                return super().text(extents_of(np.array(value)))
            case bytes() if name == "logprobs" and value:
                return ",".join(map(str, np.frombuffer(value, "<f4").tolist()))
            case End():
                return self._inside(value, {"room": self.room, "reason": value.reason}, value.reason)
            case Sampling():
                return self._inside(value, {})
            case _:
                return super().text(value, name)

    def _inside(self, value: msgspec.Struct, stated: dict[str, Any], *words: str) -> str:
        """A struct in a field: these words, and what is not as stated."""
        own, stated = msgspec.structs.asdict(value), _defaults(type(value)) | self.stated(type(value)) | stated
        changed = [f"{name}={self.text(each, name)}" for name, each in own.items() if stated.get(name, ...) != each]
        return f"({' '.join([*words, *changed])})"

    def do_node(self, prefill: int = 1, decode: int = 1, met: bool = True, **limits: Any) -> None:
        names = ([f"{role}{index}" for index in range(count)] for role, count in (("p", prefill), ("d", decode)))
        self.end = Router(*names, replace(LIMITS, **limits))
        if met:
            self.end.meet()

    def do_submit(self, prompt: bytes = b"7:12", **asked: Any) -> list[Any]:
        sampling = {name: asked.pop(name) for name in [*asked] if name in Sampling.__struct_fields__}
        wanted = CompletionRequest(
            prompt=_ids(prompt.decode()), sampling=msgspec.structs.replace(SAMPLING, **sampling), **asked
        )
        try:
            return self.end.core.submit(wanted, self.end.now)[1]
        except AnswerFailedError as error:
            return [Refused(error.cause, str(error), error.retry_ms)]

    def do_broke(self, peer: str) -> list[Any]:
        """What this worker has sent is a breach."""
        return self.end.core.breach(peer, RemoteProtocolError("Tokens.ids", "3 bytes"), self.end.now)

    def do_unread(self, peers: tuple[str, ...]) -> None:
        """The router has yet to read what these workers have sent."""
        self.end.core.workers.look_unread(peers.__contains__, self.end.now)

    def do_depart(self, peer: str, how: str) -> list[Any]:
        return self.end.core.depart_worker(peer, Departure[how.upper()])

    def do_live(self, seconds: float, peers: tuple[str, ...] = ()) -> Iterator[Any]:
        return self.end.live(seconds, peers)


def _paired(effects: Iterable[Any]) -> Iterator[Any]:
    """Begins to both workers of a room that name each other are shown as one, whose first_token is prefill's."""
    last: Any = None
    for effect in [*effects, None]:
        if (both := _both(last, effect)) is None and last is not None:
            yield last
        last = both or effect


def _both(first: Any, second: Any) -> Any:
    if isinstance(first, tuple) and isinstance(second, tuple):
        both = _both(first[1], second[1]) if first[0] == second[0] else None
        return None if both is None else (first[0], both)
    match first, second:
        case Send(peer=p, message=Begin(peers=(node,)) as one), Send(peer=d, message=Begin(peers=(endpoint,)) as two):
            apart = msgspec.structs.replace(one, peers=(p,), first_token=False)
            if (node, endpoint) == (NAMES[d].upper(), p) and apart == two:
                return Send(f"{NAMES[p]}+{NAMES[d]}", msgspec.structs.replace(one, peers=()))
    return None


def _reports(room: RoomEnded) -> bool:
    """Whether an End of the room has its cause, and its words or else the cause as the detail."""
    ends, why = ((room.prefill_node, room.prefill), (room.decode_node, room.decode)), (room.cause, room.detail)
    return any(end and (end.reason, f"{node}: {end.detail or end.reason}") == why for node, end in ends)


def _ids(text: str) -> bytes:
    if text.startswith("0x"):
        return bytes.fromhex(text[2:])
    return pack_ids([each for run in text.split("+") for each in range(*map(int, run.split(":")))])


def _logprobs(text: str) -> bytes:
    return np.array([float(each) for each in text.split(",")], "<f4").tobytes()


def _unusable(text: str) -> tuple[Unusable, ...]:
    peer, _, why = text.partition("/")
    return (Unusable(PEERS[peer], why),)


@cache
def _kind(of: type) -> type[msgspec.Struct]:
    """A request's number is shown as a room's."""
    names = {"id": "room"} if of is RoomEnded else {"request": "room"}
    return msgspec.defstruct(
        of.__name__,
        [
            (names.get(each.name, each.name), Any, *([each.default] * (each.default is not MISSING)))
            for each in fields(of)
        ],
    )


def _defaults(of: type[msgspec.Struct]) -> dict[str, Any]:
    return dict(zip(reversed(of.__struct_fields__), reversed(of.__struct_defaults__), strict=False))


def _struct(value: Any) -> msgspec.Struct:
    return _kind(type(value))(*(getattr(value, each.name) for each in fields(value)))


test_scenario = plays(dict.fromkeys(sorted(Path(__file__).parent.glob("routing/*.txt")), RoutingPlayer))


def test_no_room_is_0_which_names_none_on_the_wire() -> None:
    router = Router().meet()
    router.core._mint = iter((0, 7)).__next__
    assert router.core.submit(request(), 0.0)[0] == 7


def test_a_ping_names_few_ranks_and_all_of_them_in_turn() -> None:
    prefill = [f"tcp://p{number}:1" for number in range(2 * AHEAD_PING + 1)]
    router, named = Router(prefill).meet(), list[str]()
    for _ in range(5):
        sent = [each for _, each in router.live(LIMITS.ping_ms / 1e3)]
        pings = [each.message for each in sent if each.peer == PEERS["d0"]]
        assert [len(ping.peers) for ping in pings] == [AHEAD_PING]
        named += pings[0].peers
    start = prefill.index(named[0])
    assert named == [prefill[(start + place) % len(prefill)] for place in range(len(named))]


@pytest.mark.parametrize("early", [True, False])
def test_an_answer_behind_a_prompt_of_the_greatest_length_is_kept_while_a_prompt_can_hold_it(early: bool) -> None:
    """The first token, which prefill has sent, is delivered once all the same."""
    router = Router(("p0", "p1"), ("d0", "d1")).meet()
    length = PROMPT_BYTES_MAX // 4 - 2 * (not early)
    router.core.submit(request(length=length, enable_resume=True, early=early), 0.0)
    router.receive(Tokens(1, 0, _ids("21:22" if early else "21:23")), peer=PEERS["p0" if early else "d0"])
    (room,) = router.core.rooms
    assert len(room.so_far.ids) == 8 * (not early)
    failed = [Tokens(1, 2, _ids("23:24"))] * (not early) + [End(1, "engine", "", 3 * (not early))]
    ends = router.receive(*failed, peer=PEERS["d0"])
    assert not room.so_far.ids
    assert [each.next_room for each in ends if isinstance(each, RoomEnded)] == [2 if early else None]
    if early:
        emitted = router.receive(Tokens(2, 0, _ids("21:23")), peer=PEERS["d1"])
        assert [each.ids for each in emitted if isinstance(each, Emit)] == [[22]]


def test_what_keeps_a_worker_from_being_reached_is_its_reason_once() -> None:
    router, p0 = Router().meet(), PEERS["p0"]
    router.receive(Goodbye(1, "shutdown"), peer=PEERS["d0"])
    router.core.gone(p0, "nothing listens there", router.now)
    assert WorkerChanged in [type(each) for each in router.tick(LIMITS.silence_ms / 1e3)]
    reasons = router.core.workers.why_not(lambda _: "nothing listens there")
    assert reasons["node:d0"] == "node:d0 sent Goodbye (shutdown); nothing listens there"
    assert (
        reasons[p0] == router.core.workers.by_peer[p0].why == f"{p0} has been silent for 1000 ms: nothing listens there"
    )


def test_the_reasons_of_a_large_fleet_take_no_look_at_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = ([f"tcp://{role}{number}:1" for number in range(52)] for role in "pd")
    workers, looks = Router(prefill, decode).meet().core.workers, Counter[str]()
    usable = Worker.usable.fget
    assert usable is not None
    monkeypatch.setattr(Worker, "usable", property(lambda each: looks.update(["usable"]) or usable(each)))
    monkeypatch.setattr(worker_pool, "obstacle", lambda *pair: looks.update(["obstacle"]) or obstacle(*pair))
    assert workers.why_not(lambda _: "") == dict.fromkeys((*prefill, *decode), "")
    assert looks["usable"] <= 3 * 104
    assert looks["obstacle"] == 104


@pytest.mark.slow
def test_every_request_finishes_on_a_network_that_only_loses_repeats_and_reorders() -> None:
    for seed in range(40):
        world = World(seed, net=Net(0.25, 0.25, (0.001, 0.3)), limits=GENTLE)
        world.run(3)
        labels = [world.submit(request(seed + i, max_tokens=1 + i * 5, early=i % 2 == 0)) for i in range(6)]
        world.run(40)
        assert all(world.ends[label].cause is None for label in labels), f"seed {seed}"
        world.heal()
        world.run(10)
        world.check_quiet()


def storm(seed: int, *, resume: bool = False) -> World:
    """All faults at once, then a repaired network."""
    net = Net(drop=0.15, duplicate=0.15, delay_s=(0.001, 0.25))
    world = World(seed, net=net, faults=Faults(fail=0.1, full=0.05))
    world.run(2)
    for step in range(12):
        for i in range(2):
            sampling = Sampling(world.random.choice((1, 3, 20)), temperature=1.0)
            label = world.submit(request(step * 10 + i, sampling=sampling, enable_resume=resume, early=i == 0))
            if isinstance(label, int) and world.random.random() < 0.15:
                wait = world.random.uniform(0, 1.5)
                world.at(world.now + wait, lambda each=label: world.perform(world.routing.cancel(each, world.now)))
        victim = world.random.choice(world.daemons)
        match world.random.randrange(12):
            case 0:
                victim.start()
            case 1:
                world.cut.add(victim.node)
                world.at(world.now + world.random.uniform(0.1, 3), lambda each=victim.node: world.cut.discard(each))
            case 2:
                world.restart_router()
            case 3:
                victim.perform(victim.service.goodbye("shutdown"))
        world.run(world.random.uniform(0.05, 0.6))
    world.heal()
    world.run(40)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 30))
def test_every_request_ends_once_and_nothing_is_left_after_a_storm(first: int) -> None:
    finished = failed = 0
    for seed in range(first, first + 30):
        try:
            world = storm(seed)
            world.check_quiet()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        causes = [end.cause for end in world.ends.values()]
        finished, failed = finished + causes.count(None), failed + len(causes) - causes.count(None)
    assert finished > failed, "most requests survive"


@pytest.mark.slow
def test_answers_are_resumed_in_a_storm_and_none_has_a_token_twice_or_lacks_one() -> None:
    ends, resumptions = list[RoomEnded](), 0
    for seed in range(20):
        try:
            world = storm(seed, resume=True)
            world.check_quiet()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        ends += world.ends.values()
        resumptions += world.routing.resumptions
    assert resumptions
    assert any(end.cause is None and end.resumptions for end in ends)
