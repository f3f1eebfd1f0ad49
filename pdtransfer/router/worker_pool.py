"""The daemons that a router has dialled: who is there, what each has left, and which pair a request goes to.

Hello repeats until Welcome; Ping asks whether the process that answered still lives. Only a Pong counts as life: it
proves both directions. A worker that is lost is sought again for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..ends import cause_of
from ..errors import Cause
from ..handoff.effects import Send
from ..handoff.liveness import Lives
from ..handoff.prefix import KnownPrefixes, block_keys, root_key
from ..handoff.states import Word, step
from ..handoff.timers import Timers
from ..limits import AHEAD_PING, PREFIX_PLACED_BLOCKS_MAX, Limits
from ..wire import VERSION, Goodbye, Hello, Identity, Load, Message, Ping, Pong, Reject, Welcome, split_key
from .router_effects import Noticed

Model = tuple[str, bytes]  # its name, and the digest of its weights
GREETINGS_WANTED = frozenset({"hello_first", "hello_required"})  # a Reject that only wants to know who speaks


class Presence(Word):
    """A worker as its router sees it."""

    SOUGHT = "sought"  # Hello repeats
    THERE = "there"


class PresenceEvent(Word):
    """What happens to a worker."""

    WELCOME = "welcome"
    LOSE = "lose"


_P, _E = Presence, PresenceEvent

PRESENCE: dict[tuple[Presence, PresenceEvent], Presence] = {
    (_P.SOUGHT, _E.WELCOME): _P.THERE,
    (_P.THERE, _E.WELCOME): _P.THERE,
    (_P.THERE, _E.LOSE): _P.SOUGHT,
}


@dataclass(slots=True, eq=False)
class Worker:
    """One dialled daemon. `rooms` are the labels of the rooms that have not ended on it."""

    peer: str
    role: Literal["prefill", "decode"]
    lives: Lives
    known: KnownPrefixes  # that were sent there
    state: Presence = Presence.SOUGHT
    identity: Identity | None = None
    load: Load | None = None
    heard: float = 0.0
    why: str = "has not answered yet"  # it is not there
    repeat_ms: int = 0
    rooms: set[int] = field(default_factory=set[int])
    prompt_tokens: int = 0  # of its rooms
    promised_slots: int = 0  # to rooms that were begun after its last Load
    full_until: float = 0.0  # it has said so
    sparse_full_until: float = 0.0  # the same, of rooms that want HiSparse alone
    introduced: int = 0  # a decode: prefill ranks that it was told of, counted around

    @property
    def usable(self) -> bool:
        """Whether it takes rooms at all."""
        return self.state is Presence.THERE and self.load is not None and self.load.ready and not self.load.draining

    @property
    def model(self) -> Model:
        """What the two of a pair have in common: the model's name and its weights' digest."""
        assert self.identity is not None
        return self.identity.model, self.identity.weights

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where decode dials it: of a group every rank, the leader as this router does."""
        assert self.identity is not None
        return (self.peer, *(member.endpoint for member in self.identity.group[1:]))

    @property
    def names(self) -> tuple[str, ...]:
        """Whom prefill has to let in, of a group every rank: by the keys that they are dialled with, else by their
        nodes."""
        assert self.identity is not None
        nodes = (self.identity.node, *(member.node for member in self.identity.group[1:]))
        return tuple(split_key(endpoint)[0] or node for endpoint, node in zip(self.endpoints, nodes, strict=True))

    def slots_left(self, *, enable_hisparse: bool) -> int:
        """Free slots for requests of this kind, as far as this router knows; below 0 its newest rooms will queue."""
        assert self.load is not None
        apart = enable_hisparse and self.load.sparse_slots_total > 0
        return (self.load.sparse_slots_free if apart else self.load.slots_free) - self.promised_slots

    def fill(self, until: float, *, enable_hisparse: bool) -> None:
        """It has said to such a room that it is full. Who waits for a decode's HiSparse holds up no others."""
        if enable_hisparse and self.role == "decode":
            self.sparse_full_until = max(self.sparse_full_until, until)
        else:
            self.full_until = max(self.full_until, until)

    def full_ms(self, now: float, limits: Limits, *, enable_hisparse: bool) -> float:
        """How long it will take no such room, 0 if it takes one now. Rooms may wait for slots; only a full queue is
        full."""
        assert self.load is not None
        until = max(self.full_until, self.sparse_full_until) if enable_hisparse else self.full_until
        if now < until:
            return (until - now) * 1e3
        quarantined = 0 < self.load.slots_total <= self.load.slots_quarantined
        return 1e3 if quarantined or self.load.rooms_queued >= limits.queue_max else 0.0


def named(model: Model) -> str:
    """A model for people: its name, and the beginning of its weights' digest, which tells engines' options apart."""
    return f"{model[0]}/{model[1].hex()[:8]}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a room goes."""

    prefill: Worker
    decode: Worker
    keys: tuple[bytes, ...] = ()  # of the prompt's blocks, where there may be a choice


@dataclass(frozen=True, slots=True)
class Prompt:
    """What placement looks at: u32 token ids, the tokens that may follow, and the salt."""

    ids: bytes
    growth: int
    salt: bytes

    @property
    def tokens(self) -> int:
        """Slots that it needs where nothing of it is known."""
        return len(self.ids) // 4 + self.growth


@dataclass(frozen=True, slots=True)
class NoPair:
    """Nowhere to go: `retry_ms` says when the full ones may have room, None that no ready workers match."""

    detail: str
    retry_ms: int | None


def _mismatch(prefills: Collection[Model], decodes: Collection[Model], model: str | None) -> str:
    """Why those that are ready make no pair, for whoever started them."""
    for role, models in (("prefill", prefills), ("decode", decodes)):
        if not models:
            return f"no {role} worker is ready; the router's /health says why"
    here, there = (", ".join(sorted(map(named, models))) for models in (prefills, decodes))
    what = "of one model" if model is None else f"of model {model!r}"
    return f"no prefill and decode workers {what} are ready: prefill has {here}, decode has {there}"


class Workers:
    """All of a router's workers. Effects go to `out`; `lost` is called for each that was there and is no longer."""

    def __init__(
        self,
        identity: Identity,
        prefill: Iterable[str],
        decode: Iterable[str],
        limits: Limits,
        out: Callable[[Send | Noticed], None],
        lost: Callable[[Worker, Cause, str, float], None],
    ) -> None:
        self._identity, self._limits, self._out, self._lost = identity, limits, out, lost

        def worker(peer: str, role: Literal["prefill", "decode"]) -> Worker:
            return Worker(peer, role, Lives(limits.silence_ms), KnownPrefixes(limits.prefix_keys_max))

        workers = [worker(peer, "prefill") for peer in prefill] + [worker(peer, "decode") for peer in decode]
        self._decode_count = sum(worker.role == "decode" for worker in workers)
        self.by_peer = {worker.peer: worker for worker in workers}
        assert len(self.by_peer) == len(workers), "a worker is dialled once, in one role"
        self.timers: Timers[str] = Timers()

    def start(self, now: float) -> None:
        """Says the first Hello to each."""
        for worker in self.by_peer.values():
            self._hello(worker, now)

    def tick(self, now: float) -> None:
        """Repeats Hello to those sought, Ping to those there, and looks for silence."""
        while (peer := self.timers.pop(now)) is not None:
            worker = self.by_peer[peer]
            if worker.state is Presence.SOUGHT:
                self._hello(worker, now)
                continue
            silent_ms = (now - worker.heard) * 1e3
            if silent_ms >= self._limits.silence_ms:
                self._lose(worker, Cause.PEER_LOST, f"{peer} has been silent for {silent_ms:.0f} ms", now)
                self._hello(worker, now)
            else:
                self._ping(worker, now)

    def receive(self, worker: Worker, message: Message, now: float) -> bool:
        """Takes a message about the worker itself; False for any other."""
        match message:
            case Welcome():
                self._welcome(worker, message, now)
            case Reject(reason=reason) if reason in GREETINGS_WANTED:
                self._hello(worker, now)
            case Reject():
                text = f"{worker.peer} refuses ({message.reason}): " + "; ".join(message.fields)
                self.refuse(worker, cause_of(message.reason, Cause.REFUSED), text, now)
            case Pong():
                self._pong(worker, message, now)
            case Goodbye():
                known = worker.identity
                if worker.state is Presence.THERE and known is not None and known.incarnation == message.incarnation:
                    self._lose(worker, Cause.PEER_LOST, f"{worker.peer} says goodbye ({message.reason})", now)
                    self._hello(worker, now)
            case Load():
                worker.load, worker.promised_slots = message, 0
            case _:
                return False
        return True

    def choose(
        self, prompt: Prompt, *, model: str | None, enable_hisparse: bool, avoid: Iterable[Worker], now: float
    ) -> Pair | NoPair:
        """The pair with the least to do: prefill by prompt tokens not yet done, decode by free slots, then by rooms.

        A token of the prompt that is known to be at a decode counts as `prefix_weight` free slots there, unless the
        room would have to queue for slots. Workers to `avoid` come last. A pair has one model; HiSparse wants a decode
        that can do it.
        """
        bad = set(avoid)
        prefills, decodes = self._groups("prefill"), self._groups("decode")
        best: Pair | None = None
        waits_ms: list[float] = []
        for key in prefills.keys() & decodes.keys():
            able = [each for each in decodes[key] if not enable_hisparse or (each.load and each.load.enable_hisparse)]
            if (model is not None and key[0] != model) or not able:
                continue
            sides = prefills[key], able
            full_ms = {
                each.peer: each.full_ms(now, self._limits, enable_hisparse=enable_hisparse)
                for some in sides
                for each in some
            }
            wait_ms = max(min(full_ms[each.peer] for each in some) for some in sides)
            if wait_ms > 0:
                waits_ms.append(wait_ms)
                continue
            able = [each for each in able if full_ms[each.peer] == 0]
            keys = self._keys(key, prompt)
            left = {each.peer: each.slots_left(enable_hisparse=enable_hisparse) for each in able}
            scores = {each.peer: self._score(each, left[each.peer], prompt.tokens, keys) for each in able}
            decode = min(able, key=lambda each: (each in bad, -scores[each.peer], len(each.rooms), each.peer))
            if best is None or left[decode.peer] > best.decode.slots_left(enable_hisparse=enable_hisparse):
                prefill = min(
                    (each for each in prefills[key] if full_ms[each.peer] == 0),
                    key=lambda each: (each in bad, each.prompt_tokens, self._queued(each), len(each.rooms), each.peer),
                )
                best = Pair(prefill, decode, keys)
        if best is not None:
            return best
        if waits_ms:
            return NoPair("every worker is full", int(min(waits_ms)) + 1)
        return NoPair(_mismatch(prefills.keys(), decodes.keys(), model), None)

    def models(self) -> list[str]:
        """Models that a ready pair serves."""
        return sorted({key[0] for key in self._groups("prefill").keys() & self._groups("decode").keys()})

    def goodbye(self, reason: str) -> None:
        """Tells each that is there."""
        for worker in self.by_peer.values():
            if worker.state is Presence.THERE:
                self._out(Send(worker.peer, Goodbye(self._identity.incarnation, reason)))

    def _groups(self, role: str) -> dict[Model, list[Worker]]:
        groups: dict[Model, list[Worker]] = {}
        for worker in self.by_peer.values():
            if worker.role == role and worker.usable:
                groups.setdefault(worker.model, []).append(worker)
        return groups

    def _keys(self, model: Model, prompt: Prompt) -> tuple[bytes, ...]:
        if self._decode_count == 1 or not self._limits.prefix_weight:
            return ()  # there is never a choice
        root, blocks_max = root_key(*model, prompt.salt), PREFIX_PLACED_BLOCKS_MAX
        return block_keys(root, prompt.ids, block_tokens=self._limits.prefix_block_tokens, blocks_max=blocks_max)

    def _score(self, decode: Worker, slots_left: int, tokens: int, keys: tuple[bytes, ...]) -> int:
        """Free slots, and what the prefix counts as."""
        prefix = decode.known.count(keys) * self._limits.prefix_block_tokens
        fits = slots_left >= tokens - prefix
        return slots_left + (self._limits.prefix_weight * prefix if fits else 0)

    @staticmethod
    def _queued(worker: Worker) -> int:
        assert worker.load is not None
        return worker.load.rooms_queued

    def _welcome(self, worker: Worker, message: Welcome, now: float) -> None:
        theirs, known = message.identity, worker.identity
        if worker.lives.late(theirs.incarnation, now):
            return  # A late word of a process that is gone.
        for name, there, here in (("version", message.version, VERSION), ("role", theirs.role, worker.role)):
            if there != here:
                text = f"{name}: {worker.peer} has {there!r}, this router expects {here!r}"
                self.refuse(worker, Cause.REFUSED, text, now)
                return
        if nowhere := [member.node for member in theirs.group[1:] if not member.endpoint]:
            self.refuse(worker, Cause.REFUSED, f"group: {worker.peer} says nowhere to dial {', '.join(nowhere)}", now)
            return
        if known is not None and known.incarnation != theirs.incarnation:
            if worker.state is Presence.THERE:
                self._lose(worker, Cause.PEER_RESTARTED, f"{worker.peer} is a new process", now)
            worker.lives.end(known.incarnation, now)
        if worker.state is Presence.SOUGHT:
            self._out(Noticed(worker.peer, ""))
        worker.state = step(PRESENCE, worker.state, PresenceEvent.WELCOME)
        worker.identity, worker.heard, worker.repeat_ms, worker.why = theirs, now, 0, ""
        self._ping(worker, now)

    def _pong(self, worker: Worker, message: Pong, now: float) -> None:
        if worker.state is not Presence.THERE or worker.lives.late(message.incarnation, now):
            return
        assert worker.identity is not None
        if message.incarnation == worker.identity.incarnation:
            worker.heard = now
        else:
            self._lose(worker, Cause.PEER_RESTARTED, f"{worker.peer} is a new process", now)
            self._hello(worker, now)

    def refuse(self, worker: Worker, cause: Cause, text: str, now: float) -> None:
        """Ends with a worker. It may be replaced by one that fits: it is asked again, at the slowest pace."""
        if worker.state is Presence.THERE:
            self._lose(worker, cause, text, now)
        elif worker.why != text:
            self._out(Noticed(worker.peer, text))
        worker.why = text
        worker.repeat_ms = self._limits.resend_ms_max
        self.timers.set(worker.peer, now + worker.repeat_ms / 1e3)

    def _lose(self, worker: Worker, cause: Cause, text: str, now: float) -> None:
        worker.state = step(PRESENCE, worker.state, PresenceEvent.LOSE)
        worker.why, worker.load, worker.repeat_ms = text, None, 0
        self._out(Noticed(worker.peer, text))
        worker.full_until = worker.sparse_full_until = 0.0
        worker.known.clear()
        self._lost(worker, cause, text, now)

    def _hello(self, worker: Worker, now: float) -> None:
        worker.repeat_ms = min(max(2 * worker.repeat_ms, self._limits.resend_ms), self._limits.resend_ms_max)
        self.timers.set(worker.peer, now + worker.repeat_ms / 1e3)
        self._out(Send(worker.peer, Hello(VERSION, VERSION, self._identity)))

    def _ping(self, worker: Worker, now: float) -> None:
        self.timers.set(worker.peer, now + self._limits.ping_ms / 1e3)
        self._out(Send(worker.peer, Ping(self._identity.incarnation, self._ahead(worker))))

    def _ahead(self, worker: Worker) -> tuple[str, ...]:
        """Some of the prefill ranks that a decode worker's rooms may name, the next ones each time."""
        prefills = self._groups("prefill").get(worker.model, ()) if worker.role == "decode" else ()
        ranks = [endpoint for prefill in prefills for endpoint in prefill.endpoints]
        if len(ranks) <= AHEAD_PING:
            return tuple(ranks)
        first = worker.introduced % len(ranks)
        worker.introduced = first + AHEAD_PING
        return tuple((ranks + ranks)[first : first + AHEAD_PING])
