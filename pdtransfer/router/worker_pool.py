"""The router's workers: which are connected, their load, and which pair serves a request.

Hello repeats until Welcome; Ping checks that the same process is alive. Only a Pong proves it, because it needs both
directions. A lost worker is sent Hello again without end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..errors import Cause
from ..handoff.effects import Send
from ..handoff.liveness import HELLO_WANTED, NAME_TAKEN, Liveness
from ..handoff.prefix import KnownPrefixes, block_keys, root_key
from ..handoff.states import Word, step
from ..handoff.timers import Timers
from ..limits import AHEAD_PING, PREFIX_PLACED_BLOCKS_MAX, TEXT_LENGTH_MAX, TOKENS_MAX, Limits
from ..wire import VERSION, Goodbye, Hello, Identity, Load, Message, Ping, Pong, Reject, Welcome, split_key
from .figure_window import FigureWindow
from .router_effects import WorkerChanged, WorkerLeft

OBSTACLES_MAX = 3  # that /health shows of one worker

Role = Literal["prefill", "decode"]
Model = tuple[str, bytes]  # name, and digest of the weights


class WorkerState(Word):
    """The connection to a worker."""

    CONNECTING = "connecting"  # Hello repeats
    CONNECTED = "connected"


class WorkerEvent(Word):
    """Events of the connection to a worker."""

    WELCOME = "welcome"
    LOSE = "lose"


class Departure(Word):
    """What an operator has decided about a worker, as the reason why it gets no rooms."""

    STAYS = ""
    DRAINS = "drained by an operator"
    LEAVES = "removed by an operator; its rooms run to their end"


_S, _E = WorkerState, WorkerEvent

WORKER_STATE: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_S.CONNECTING, _E.WELCOME): _S.CONNECTED,
    (_S.CONNECTED, _E.WELCOME): _S.CONNECTED,
    (_S.CONNECTED, _E.LOSE): _S.CONNECTING,
}


@dataclass(slots=True, eq=False)
class Worker:
    """One dialled daemon. `rooms` holds the ids of the rooms that have not ended on it."""

    peer: str
    role: Role
    liveness: Liveness
    known: KnownPrefixes  # prefixes of the prompts sent there
    state: WorkerState = WorkerState.CONNECTING
    identity: Identity | None = None
    load: Load | None = None
    why: str = "has not answered yet"  # the reason why it is not connected
    lost: bool = False  # it has been connected, or was refused: `why` is more than that
    departure: Departure = Departure.STAYS
    rooms: set[int] = field(default_factory=set[int])
    prompt_tokens: int = 0  # of its rooms
    promised_slots: int = 0  # slots for rooms begun after its last Load
    full_until: float = 0.0  # from its last refusal as full
    sparse_full_until: float = 0.0  # the same, for rooms with HiSparse only
    figures: FigureWindow = field(default_factory=FigureWindow)  # of the process that is connected
    next_introduced: int = 0  # for a decode worker: the index of the next prefill rank to name in a Ping

    @property
    def usable(self) -> bool:
        """Whether it gets rooms."""
        ready = self.load is not None and self.load.ready and not self.load.draining
        return ready and self.state is WorkerState.CONNECTED and self.departure is Departure.STAYS

    @property
    def model(self) -> Model:
        """The model's name and its weights' digest; equal on both workers of a pair."""
        assert self.identity is not None
        return self.identity.model, self.identity.weights

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt and its answer at most; TOKENS_MAX where it does not say."""
        assert self.identity is not None
        return self.identity.context_tokens or TOKENS_MAX

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints for decode to dial, one for each rank. The leader's is the one that this router dials."""
        assert self.identity is not None
        return (self.peer, *(member.endpoint for member in self.identity.group[1:]))

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that prefill must accept, one for each rank: by public key, or by node without keys."""
        assert self.identity is not None
        nodes = (self.identity.node, *(member.node for member in self.identity.group[1:]))
        return tuple(split_key(endpoint)[0] or node for endpoint, node in zip(self.endpoints, nodes, strict=True))

    def slots_left(self, *, enable_hisparse: bool) -> int:
        """Free slots for requests of this kind, as far as known. Negative: the newest rooms will queue."""
        assert self.load is not None
        apart = enable_hisparse and self.load.sparse_slots_total > 0
        return (self.load.sparse_slots_free if apart else self.load.slots_free) - self.promised_slots

    def mark_full(self, until: float, *, enable_hisparse: bool) -> None:
        """Marks it full until then. A decode worker that is full for HiSparse still accepts dense rooms."""
        if enable_hisparse and self.role == "decode":
            self.sparse_full_until = max(self.sparse_full_until, until)
        else:
            self.full_until = max(self.full_until, until)

    def full_ms(self, now: float, limits: Limits, *, enable_hisparse: bool) -> float:
        """Milliseconds until it accepts such a room, 0 for now. Rooms may wait for slots: only a full queue is full."""
        assert self.load is not None
        until = max(self.full_until, self.sparse_full_until) if enable_hisparse else self.full_until
        if now < until:
            return (until - now) * 1e3
        quarantined = 0 < self.load.slots_total <= self.load.slots_quarantined
        return 1e3 if quarantined or self.load.rooms_queued >= limits.queue_max else 0.0


def model_text(model: Model) -> str:
    """Returns a model's name with the start of its weights' digest, for people."""
    return f"{model[0]}/{model[1].hex()[:8]}"


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """The two workers of a room."""

    prefill: Worker
    decode: Worker
    keys: tuple[bytes, ...] = ()  # of the prompt's blocks, where placement has a choice


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """The input of placement: u32 token ids, the most tokens that may follow, and the salt."""

    ids: bytes
    growth: int
    salt: bytes

    @property
    def tokens(self) -> int:
        """Slots needed where nothing is cached."""
        return len(self.ids) // 4 + self.growth


@dataclass(frozen=True, slots=True)
class NoPair:
    """No pair can take the request. `retry_ms` is when a full worker may have room, None if no ready workers match."""

    detail: str
    retry_ms: int | None


def obstacle(prefill: Worker, decode: Worker) -> str:
    """Why rooms of these two usable workers of one model cannot land; empty where they can, as far as is known."""
    assert prefill.identity is not None
    assert decode.identity is not None
    names = f"{decode.identity.node} cannot use {prefill.identity.node}"
    if decode.load is not None and decode.load.unusable:
        endpoints = prefill.endpoints
        for each in decode.load.unusable:
            if each.endpoint in endpoints:
                return f"{names}: {each.why}"
    theirs, ours = prefill.identity.transports, decode.identity.transports
    if any(name in ours for name in theirs):
        return ""
    return f"{names}: transport: {', '.join(theirs)} there, {', '.join(ours)} here"


def _no_pair_reason(prefills: Collection[Model], decodes: Collection[Model], model: str | None) -> str:
    """Explains why the ready workers make no pair."""
    for role, models in (("prefill", prefills), ("decode", decodes)):
        if not models:
            return f"no {role} worker is ready; the router's /health says why"
    prefill_models, decode_models = (", ".join(sorted(map(model_text, models))) for models in (prefills, decodes))
    what = "of one model" if model is None else f"of model {model!r}"
    if any(model is None or key[0] == model for key in set(prefills) & set(decodes)):
        return f"no prefill and decode workers {what} can work together; the router's /health says why"
    return f"no prefill and decode workers {what} are ready: prefill has {prefill_models}, decode has {decode_models}"


class WorkerPool:
    """All of a router's workers. Effects go to `out`; `lost` is called for each worker that is lost."""

    def __init__(
        self,
        identity: Identity,
        prefill: Iterable[str],
        decode: Iterable[str],
        limits: Limits,
        out: Callable[[Send | WorkerChanged | WorkerLeft], None],
        lost: Callable[[Worker, Cause, str, float], None],
    ) -> None:
        self._identity, self._limits, self._out, self._lost = identity, limits, out, lost

        workers = [self._new(peer, "prefill") for peer in prefill] + [self._new(peer, "decode") for peer in decode]
        self.by_peer = {worker.peer: worker for worker in workers}
        assert len(self.by_peer) == len(workers), "each worker has one role"
        self.timers: Timers[str] = Timers()

    def start(self, now: float) -> None:
        """Sends the first Hello to each worker."""
        for worker in self.by_peer.values():
            self._hello(worker, now)

    def _new(self, peer: str, role: Role) -> Worker:
        return Worker(peer, role, Liveness(self._limits, 0.0), KnownPrefixes(self._limits.prefix_keys_max))

    def add(self, peer: str, role: Role, now: float) -> None:
        """Takes a worker in, or keeps one that was to leave or to drain."""
        worker = self.by_peer.get(peer)
        if worker is None:
            worker = self.by_peer[peer] = self._new(peer, role)
            self._hello(worker, now)
        assert worker.role == role, "the caller has compared them"
        worker.departure = Departure.STAYS

    def drain(self, peer: str) -> None:
        """Gives a worker no new rooms; those under way run to their end."""
        worker = self.by_peer[peer]
        if worker.departure is Departure.STAYS:
            worker.departure = Departure.DRAINS

    def remove(self, peer: str) -> None:
        """Drains a worker, and forgets it once its last room has ended."""
        worker = self.by_peer[peer]
        worker.departure = Departure.LEAVES
        self.left(worker)

    def left(self, worker: Worker) -> None:
        """Forgets a worker that is to leave and has no room any more."""
        if worker.departure is Departure.LEAVES and not worker.rooms and worker.peer in self.by_peer:
            if worker.state is WorkerState.CONNECTED:
                self._out(Send(worker.peer, Goodbye(self._identity.incarnation, Cause.SHUTDOWN.value)))
            self.timers.clear(worker.peer)
            del self.by_peer[worker.peer]
            self._out(WorkerLeft(worker.peer))

    def tick(self, now: float) -> None:
        """Repeats Hello to unconnected workers, sends Ping to connected ones, and detects silence."""
        while (peer := self.timers.pop(now)) is not None:
            worker = self.by_peer.get(peer)
            if worker is None:
                continue  # it has left
            if worker.state is WorkerState.CONNECTING:
                self._hello(worker, now)
                continue
            if worker.liveness.silent(now):
                text = f"{peer} has been silent for {worker.liveness.silent_ms(now):.0f} ms"
                self._lose(worker, Cause.PEER_LOST, text, now)
                self._hello(worker, now)
            else:
                self._ping(worker, now)

    def receive(self, worker: Worker, message: Message, now: float) -> bool:
        """Handles a message about the worker itself; returns False for any other message."""
        match message:
            case Welcome():
                self._welcome(worker, message, now)
            case Reject(reason=reason) if reason in HELLO_WANTED:
                self._hello(worker, now)
            case Reject():
                text = f"{worker.peer} refuses ({message.reason}): " + "; ".join(message.fields)
                self.refuse(worker, Cause.of(message.reason, Cause.REFUSED), text, now)
            case Pong():
                self._pong(worker, message, now)
            case Goodbye():
                if worker.state is WorkerState.CONNECTED and worker.liveness.incarnation == message.incarnation:
                    text = f"{worker.peer} sent Goodbye ({message.reason})"
                    worker.liveness.part(message.incarnation)
                    self._lose(worker, Cause.PEER_LOST, text, now, orderly=True)
                    self._hello(worker, now)
            case Load():
                worker.load, worker.promised_slots = message, 0
            case _:
                return False
        return True

    def choose(
        self, prompt: RoutedPrompt, *, model: str | None, enable_hisparse: bool, avoid: Iterable[Worker], now: float
    ) -> WorkerPair | NoPair:
        """Chooses the least loaded pair: prefill by pending prompt tokens, decode by free slots, then by rooms.

        Each prompt token cached at a decode worker counts as `prefix_weight` free slots, unless the room would queue
        there. Workers in `avoid` come last. Both workers serve one model; HiSparse needs a decode worker that supports
        it.
        """
        avoided = set(avoid)
        prefills, decodes = self._groups("prefill"), self._groups("decode")
        best: WorkerPair | None = None
        waits_ms: list[float] = []
        for key in prefills.keys() & decodes.keys():
            able = [each for each in decodes[key] if not enable_hisparse or (each.load and each.load.enable_hisparse)]
            if (model is not None and key[0] != model) or not able:
                continue
            able = [each for each in able if any(not obstacle(prefill, each) for prefill in prefills[key])]
            if not able:
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
            free = [each for each in prefills[key] if full_ms[each.peer] == 0]
            able = [
                each for each in able if full_ms[each.peer] == 0 and any(not obstacle(other, each) for other in free)
            ]
            if not able:
                waits_ms.append(self._limits.resend_ms_max)
                continue
            keys = self._keys(key, prompt)
            left = {each.peer: each.slots_left(enable_hisparse=enable_hisparse) for each in able}
            scores = {each.peer: self._score(each, left[each.peer], prompt.tokens, keys) for each in able}
            decode = min(able, key=lambda each: (each in avoided, -scores[each.peer], len(each.rooms), each.peer))
            if best is None or left[decode.peer] > best.decode.slots_left(enable_hisparse=enable_hisparse):
                prefill = min(
                    (each for each in free if not obstacle(each, decode)),
                    key=lambda each: (
                        each in avoided,
                        each.prompt_tokens,
                        each.load.rooms_queued if each.load is not None else 0,
                        len(each.rooms),
                        each.peer,
                    ),
                )
                best = WorkerPair(prefill, decode, keys)
        if best is not None:
            return best
        if waits_ms:
            return NoPair("every worker is full", int(min(waits_ms)) + 1)
        return NoPair(_no_pair_reason(prefills.keys(), decodes.keys(), model), None)

    def models(self) -> dict[str, int]:
        """Returns the models that a ready pair serves, in order. Of each, the tokens of a prompt and its answer that
        some pair takes; TOKENS_MAX where its workers do not say."""
        prefills, decodes = self._groups("prefill"), self._groups("decode")
        served: dict[str, int] = {}
        for key in sorted(prefills.keys() & decodes.keys()):
            if not any(not obstacle(prefill, decode) for prefill in prefills[key] for decode in decodes[key]):
                continue
            longest = min(max(each.context_tokens for each in side[key]) for side in (prefills, decodes))
            served[key[0]] = max(served.get(key[0], 0), longest)
        return served

    def why_not(self, worker: Worker, trouble: str) -> str:
        """Why no room can land with this worker, empty where one can. `trouble` is what keeps it from being reached."""
        if worker.state is not WorkerState.CONNECTED:
            parts = (worker.why, trouble) if worker.lost or not trouble else (trouble,)
            return "; ".join(part for part in parts if part)
        if not worker.usable:
            if worker.departure is not Departure.STAYS:
                return worker.departure.value
            return "it is draining" if worker.load is not None and worker.load.draining else "it is not ready yet"
        others = self._groups("decode" if worker.role == "prefill" else "prefill")
        if not others:
            return ""  # the other role's workers have the reason
        if worker.model not in others:
            there = ", ".join(sorted(map(model_text, others)))
            return f"it has {model_text(worker.model)}, and no ready worker of the other role has: {there}"
        pairs = [(worker, each) if worker.role == "prefill" else (each, worker) for each in others[worker.model]]
        found = [obstacle(*pair) for pair in pairs]
        return "; ".join(found[:OBSTACLES_MAX]) if all(found) else ""

    def goodbye(self, reason: str) -> None:
        """Sends Goodbye to each connected worker."""
        for worker in self.by_peer.values():
            if worker.state is WorkerState.CONNECTED:
                self._out(Send(worker.peer, Goodbye(self._identity.incarnation, reason)))

    def _groups(self, role: str) -> dict[Model, list[Worker]]:
        groups: dict[Model, list[Worker]] = {}
        for worker in self.by_peer.values():
            if worker.role == role and worker.usable:
                groups.setdefault(worker.model, []).append(worker)
        return groups

    def _keys(self, model: Model, prompt: RoutedPrompt) -> tuple[bytes, ...]:
        if sum(worker.role == "decode" for worker in self.by_peer.values()) == 1 or not self._limits.prefix_weight:
            return ()  # no choice to make
        root, blocks_max = root_key(*model, prompt.salt), PREFIX_PLACED_BLOCKS_MAX
        return block_keys(root, prompt.ids, block_tokens=self._limits.prefix_block_tokens, blocks_max=blocks_max)

    def _score(self, decode: Worker, slots_left: int, tokens: int, keys: tuple[bytes, ...]) -> int:
        """Returns the free slots plus the weight of the cached prefix."""
        prefix = decode.known.count(keys) * self._limits.prefix_block_tokens
        fits = slots_left >= tokens - prefix
        return slots_left + (self._limits.prefix_weight * prefix if fits else 0)

    def _welcome(self, worker: Worker, message: Welcome, now: float) -> None:
        identity = message.identity
        if worker.liveness.late(identity.incarnation, now):
            return  # A late message of an earlier process.
        for name, actual, expected in (("version", message.version, VERSION), ("role", identity.role, worker.role)):
            if actual != expected:
                text = f"{name}: {worker.peer} has {actual!r}, this router expects {expected!r}"
                self.refuse(worker, Cause.REFUSED, text, now)
                return
        if (twin := self._twin(worker, identity)) is not None:
            text = f"node: {identity.node!r} is the name of {worker.peer} and of {twin.peer}: give each its own --node"
            if worker.why != text:
                for each in (worker, twin):
                    self._out(Send(each.peer, Reject(0, NAME_TAKEN, (text[:TEXT_LENGTH_MAX],))))
            self.refuse(worker, Cause.REFUSED, text, now)
            return
        if missing := [member.node for member in identity.group[1:] if not member.endpoint]:
            self.refuse(worker, Cause.REFUSED, f"group: {worker.peer} gives no endpoint for {', '.join(missing)}", now)
            return
        if worker.liveness.restarted(identity.incarnation, now) and worker.state is WorkerState.CONNECTED:
            self._lose(worker, Cause.PEER_RESTARTED, f"{worker.peer} is a new process", now)
        if worker.state is WorkerState.CONNECTING:
            self._out(WorkerChanged(worker.peer, ""))
        worker.state = step(WORKER_STATE, worker.state, WorkerEvent.WELCOME)
        worker.identity, worker.why = identity, ""
        worker.liveness.last_seen, worker.liveness.hello_ms = now, 0
        self._ping(worker, now)

    def _twin(self, worker: Worker, identity: Identity) -> Worker | None:
        """The other connected worker of this name. It stays: the one that came later is refused."""
        for each in self.by_peer.values():
            if each is not worker and each.state is WorkerState.CONNECTED:
                assert each.identity is not None
                if each.identity.node == identity.node:
                    return each
        return None

    def _pong(self, worker: Worker, message: Pong, now: float) -> None:
        if worker.state is not WorkerState.CONNECTED or worker.liveness.late(message.incarnation, now):
            return
        if message.incarnation == worker.liveness.incarnation:
            worker.liveness.last_seen = now
            for figures in message.figures:
                worker.figures.add(figures)
        else:
            self._lose(worker, Cause.PEER_RESTARTED, f"{worker.peer} is a new process", now)
            self._hello(worker, now)

    def refuse(self, worker: Worker, cause: Cause, text: str, now: float) -> None:
        """Disconnects a worker, and sends Hello again at the slowest rate: it may be replaced by a matching one."""
        if worker.state is WorkerState.CONNECTED:
            self._lose(worker, cause, text, now)
        elif worker.why != text:
            self._out(WorkerChanged(worker.peer, text))
        worker.why, worker.lost = text, True
        worker.liveness.hello_ms = self._limits.resend_ms_max
        self.timers.set(worker.peer, now + worker.liveness.hello_ms / 1e3)

    def _lose(self, worker: Worker, cause: Cause, text: str, now: float, *, orderly: bool = False) -> None:
        worker.state = step(WORKER_STATE, worker.state, WorkerEvent.LOSE)
        worker.why, worker.lost, worker.load, worker.liveness.hello_ms = text, True, None, 0
        self._out(WorkerChanged(worker.peer, text, orderly))
        worker.full_until = worker.sparse_full_until = 0.0
        worker.known.clear()
        worker.figures.clear()
        self._lost(worker, cause, text, now)

    def _hello(self, worker: Worker, now: float) -> None:
        if self.by_peer.get(worker.peer) is not worker:
            return  # it has left
        self.timers.set(worker.peer, now + worker.liveness.next_hello_ms() / 1e3)
        self._out(Send(worker.peer, Hello(VERSION, VERSION, self._identity)))

    def _ping(self, worker: Worker, now: float) -> None:
        self.timers.set(worker.peer, now + self._limits.ping_ms / 1e3)
        self._out(Send(worker.peer, Ping(self._identity.incarnation, self._prefills_to_name(worker))))

    def _prefills_to_name(self, worker: Worker) -> tuple[str, ...]:
        """Returns some prefill endpoints that a decode worker's rooms may name, the next ones at each call."""
        prefills = self._groups("prefill").get(worker.model, ()) if worker.role == "decode" else ()
        ranks = [endpoint for prefill in prefills for endpoint in prefill.endpoints]
        if len(ranks) <= AHEAD_PING:
            return tuple(ranks)
        first = worker.next_introduced % len(ranks)
        worker.next_introduced = first + AHEAD_PING
        return tuple((ranks + ranks)[first : first + AHEAD_PING])
