"""The router's workers: which are connected, and their load.

Hello repeats until Welcome; Ping checks that the same process is alive. Only a Pong proves it, because it needs both
directions. A lost worker is sent Hello again without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count

from .....errors import Cause
from .....handoff.liveness import NAME_TAKEN, Liveness, PeerProcess
from .....handoff.peers import Peers, Send
from .....handoff.prefix_keys import RunningKeys, root_key
from .....handoff.timers import TimerKey, Timers
from .....limits import AHEAD_PING, PREFIX_PLACED_BLOCKS_MAX, TEXT_LENGTH_MAX, WORKERS_MAX, Limits
from .....wire import VERSION, Goodbye, Identity, Load, Message, Ping, Pong, Reject, Welcome, split_key
from ...fleet.prefixes import KnownPrefixes, PrefixHolders
from ...fleet.roles import Departure, NoPair, Role
from .placement import CandidatesByModel, FreeSlots, WorkerPair
from .router_effects import WorkerChanged, WorkerLeft
from .router_rooms import CompletionRequest
from .workers import NOT_ANSWERED, FigureWindow, Model, Worker, model_text, obstacle, reasons

OBSTACLES_MAX = 3  # that /health shows of one worker


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

        self._holders = PrefixHolders()
        self._candidates = CandidatesByModel()
        self._policy = FreeSlots(self._candidates, self._holders, limits)
        self._by_node: dict[str, Worker] = {}  # connected ones, by their names
        self._numbers = count()
        self._free_numbers: list[int] = []  # of workers that have left: masks stay as short as the fleet was large
        self._slow: set[Worker] = set()  # connected ones that have not answered for slow_ms
        workers = [self._new(peer, "prefill") for peer in prefill] + [self._new(peer, "decode") for peer in decode]
        self.timers: Timers[TimerKey] = Timers()
        self._peers: Peers[Worker] = Peers(
            identity, limits, self.timers, out, look=self._look, peers_max=WORKERS_MAX, ping=self._ping_due
        )
        self.by_peer = self._peers.by_name
        self.by_peer.update({worker.peer: worker for worker in workers})
        assert len(self.by_peer) == len(workers), "each worker has one role"

    def start(self, now: float) -> None:
        """Sends the first Hello to each worker."""
        for worker in list(self.by_peer.values()):
            self._meet(worker, now)

    def _meet(self, worker: Worker, now: float) -> None:
        self._peers.add(worker, now)
        self._peers.greet(worker, now)

    def add(self, peer: str, role: Role, now: float) -> None:
        """Takes a worker in, or keeps one that was to leave or to drain."""
        worker = self.by_peer.get(peer)
        if worker is None:
            worker = self._new(peer, role)
            self._meet(worker, now)
        assert worker.role == role, "the caller has compared them"
        worker.departure = Departure.STAYS
        self._candidates.changed(worker)

    def depart(self, peer: str, departure: Departure) -> None:
        """Gives a worker no new rooms; those under way run to their end, after which one that leaves is forgotten. It
        is not kept by a later drain."""
        worker = self.by_peer[peer]
        if worker.departure is not Departure.LEAVES:
            worker.departure = departure
        self._candidates.changed(worker)
        self.left(worker)

    def left(self, worker: Worker) -> None:
        """Forgets a worker that is to leave and has no room any more."""
        current = self.by_peer.get(worker.peer) is worker  # not one that was added since
        if current and worker.departure is Departure.LEAVES and not worker.rooms:
            if worker.connected:
                self._out(Send(worker.peer, Goodbye(self._identity.incarnation, Cause.SHUTDOWN.value)))
            self._peers.remove(worker)
            self._candidates.forget(worker)
            self._slow.discard(worker)
            self._rename(worker, "")
            worker.known.clear()  # before another worker gets its number
            self._free_numbers.append(worker.number)
            self._out(WorkerLeft(worker.peer))

    def tick(self, now: float) -> None:
        """Repeats Hello to unconnected workers, sends Ping to connected ones, and detects silence."""
        while (key := self.timers.pop(now)) is not None:
            is_known = self._peers.tick(key, now)
            assert is_known, key

    def look_unread(self, behind: Callable[[str], bool], now: float) -> None:
        """Keeps workers that have not answered for slow_ms, while the router is `behind` with what they have sent."""
        for worker in self._slow:
            if behind(worker.peer):
                worker.liveness.unread(now)

    def gone(self, peer: str, evidence: str, now: float) -> None:
        """There is evidence that the worker `peer` is gone; empty: no longer. It is repeated while it stands."""
        self._peers.gone(peer, evidence, now)

    def _look(self, worker: Worker, now: float) -> None:
        if worker.connected and worker.liveness.silent(now):
            self._lose(worker, Cause.PEER_LOST, worker.liveness.why(worker.peer, now), now)
            self._greet(worker, now)
        elif worker.connected and worker.liveness.slow(now):
            self._slow.add(worker)

    def receive(self, worker: Worker, message: Message, now: float) -> bool:
        """Handles a message about the worker itself; returns False for any other message."""
        self._candidates.changed(worker)
        match message:
            case Welcome():
                self._welcome(worker, message, now)
            case Reject() if self._peers.asks_for_hello(worker, message, now, met=worker.connected):
                pass
            case Reject():
                text = f"{worker.peer} refuses ({message.reason}): " + "; ".join(message.fields)
                breach = message.reason == Cause.BREACH.value  # else no room on it is wrong: others may be tried
                self.refuse(worker, Cause.BREACH if breach else Cause.PEER_LOST, text, now)
            case Pong():
                self._pong(worker, message, now)
            case Goodbye():
                if worker.connected and worker.liveness.receive(message, now) is PeerProcess.LEFT:
                    text = f"{worker.peer} sent Goodbye ({message.reason})"
                    worker.liveness.part(message.incarnation)
                    self._lose(worker, Cause.PEER_LOST, text, now, orderly=True)
                    self._greet(worker, now)
            case Load() if worker.connected:
                begins = message.ready and not (worker.load and worker.load.ready)
                worker.loaded(message)
                worker.ready_since = now if begins else worker.ready_since
                for affected in self.by_peer.values() if begins else (worker,):
                    self._heed(affected, now)
            case Load():
                pass  # of a process that has left
            case _:
                return False
        return True

    def begin(self, pair: WorkerPair, room: int, request: CompletionRequest) -> int:
        """A room begins on this pair. Returns the tokens of the prompt that are known to be cached at decode."""
        for worker in (pair.prefill, pair.decode):
            if worker is not None:
                worker.rooms.add(room)
                self._candidates.changed(worker)
        if pair.prefill is not None:
            pair.prefill.prompt_tokens += request.prompt_tokens
        if pair.computed is not None:
            pair.decode.computing[room] = pair.computed
        cached = pair.decode.known.count(pair.keys) * self._limits.prefix_block_tokens
        pair.decode.known.learn(pair.keys)
        pair.decode.promised[room] = request.tokens
        return cached

    def end(self, worker: Worker, room: int, prompt_tokens: int) -> None:
        """A room with this many prompt tokens has ended on this worker."""
        worker.rooms.discard(room)
        worker.promised.pop(room, None)
        worker.computing.pop(room, None)
        if worker.role == "prefill":
            worker.prompt_tokens -= prompt_tokens
        self._candidates.changed(worker)

    def answer_keys(self, worker: Worker, prompt: bytes, salt: bytes) -> RunningKeys | None:
        """The keys of a prompt's blocks, for those of its answer to follow. None where decode computes no next turn."""
        if not (worker.rest_max and self._limits.turn_tokens_max):
            return None
        block_tokens, blocks_max = self._limits.prefix_block_tokens, PREFIX_PLACED_BLOCKS_MAX
        return RunningKeys(root_key(*worker.model, salt), prompt, block_tokens=block_tokens, blocks_max=blocks_max)

    def answered(self, worker: Worker, keys: RunningKeys | None) -> None:
        """Decode has a prompt and its answer, with these keys."""
        if keys is not None:
            worker.known.learn(keys.keys)
            worker.known.answered(keys.keys)

    def choose(
        self, request: CompletionRequest, avoid: Iterable[Worker], now: float, *, may_stay: bool = False
    ) -> WorkerPair | NoPair:
        """As FreeSlots.choose; slow workers come last as well."""
        return self._policy.choose(request, self._slow.union(avoid), now, may_stay=may_stay)

    def models(self) -> Mapping[str, int]:
        """Returns the models that a ready pair serves, in order. Of each, the tokens of a prompt and its answer that
        some pair takes; TOKENS_MAX where its workers report no limit."""
        return self._candidates.served()

    def why_not(self, trouble: Callable[[str], str]) -> dict[str, str]:
        """Why no room can land with each worker, by peer; empty where one can. `trouble` returns what keeps a peer from
        being reached."""
        others = {"prefill": self._candidates.groups("decode"), "decode": self._candidates.groups("prefill")}
        return {
            peer: self._why_not(worker, others[worker.role], trouble(peer)) for peer, worker in self.by_peer.items()
        }

    def _why_not(self, worker: Worker, others: dict[Model, list[Worker]], trouble: str) -> str:
        """`others` are the usable workers of the other role."""
        if not worker.connected:
            if worker.why in ("", NOT_ANSWERED):
                return trouble or worker.why
            return worker.why if worker.why.endswith(trouble) else f"{worker.why}; {trouble}"
        if not worker.usable:
            if worker.departure is not Departure.STAYS:
                return worker.departure.value
            return "it is draining" if worker.load is not None and worker.load.draining else "it is not ready yet"
        if not others:
            return ""  # the other role's workers have the reason
        if worker.model not in others:
            models = ", ".join(sorted(map(model_text, others)))
            return f"it has {model_text(worker.model)}, and no ready worker of the other role has: {models}"
        obstacles: list[str] = []
        for other in others[worker.model]:
            text = obstacle(worker, other) if worker.role == "prefill" else obstacle(other, worker)
            if not text:
                return ""
            obstacles.append(text)
        return "; ".join(obstacles[:OBSTACLES_MAX])

    def goodbye(self, reason: str) -> None:
        """Sends Goodbye to each connected worker."""
        for worker in self.by_peer.values():
            if worker.connected:
                self._out(Send(worker.peer, Goodbye(self._identity.incarnation, reason)))

    def _new(self, peer: str, role: Role) -> Worker:
        number = self._free_numbers.pop() if self._free_numbers else next(self._numbers)
        prefixes = KnownPrefixes(self._limits.prefix_keys_max, self._holders, number)
        worker = Worker(peer, role, Liveness(self._limits, 0.0), number, prefixes)
        self._candidates.came(worker)
        return worker

    def _welcome(self, worker: Worker, message: Welcome, now: float) -> None:
        identity = message.identity
        process = worker.liveness.receive(message, now)
        if process is PeerProcess.LATE:
            return
        for name, actual, expected in (("version", message.version, VERSION), ("role", identity.role, worker.role)):
            if actual != expected:
                text = f"{name}: {worker.peer} has {actual!r}, this router expects {expected!r}"
                self.refuse(worker, Cause.PEER_LOST, text, now)
                return
        if (twin := self._by_node.get(identity.node)) is not None and twin is not worker:
            self._refuse_twin(worker, twin, identity, now)
            return
        if missing := [member.node for member in identity.group[1:] if not member.endpoint]:
            text = f"group: {worker.peer} gives no endpoint for {', '.join(missing)}"
            self.refuse(worker, Cause.PEER_LOST, text, now)
            return
        if process is PeerProcess.ANOTHER and worker.connected:
            self._lose(worker, Cause.PEER_RESTARTED, f"{worker.peer} is a new process", now)
            if self.by_peer.get(worker.peer) is not worker:
                return  # it has left with its last room
        if not worker.connected:
            self._out(WorkerChanged(worker.peer, ""))
        self._rename(worker, identity.node)
        worker.identity, worker.why = identity, ""
        worker.liveness.seen(now)
        self._peers.met(worker, now)
        self._out(Send(worker.peer, self._ping(worker)))

    def _refuse_twin(self, worker: Worker, twin: Worker, identity: Identity, now: float) -> None:
        """The other connected worker of this name stays: the one that came later is refused."""
        assert twin.identity is not None
        keys = {split_key(named.peer)[0] for named in (worker, twin)}
        # Both endpoints lead to one process where it reports so, and with keys both have its key.
        if identity.incarnation == twin.identity.incarnation and len(keys) == 1:
            text = f"the same worker as {twin.peer}: its rooms go there"
            self.refuse(worker, Cause.PEER_LOST, text, now, orderly=True)
            return
        text = f"node: {identity.node!r} is the name of {worker.peer} and of {twin.peer}: give each its own --node"
        if worker.why != text:
            for refused in (worker, twin):
                self._out(Send(refused.peer, Reject(0, NAME_TAKEN, (text[:TEXT_LENGTH_MAX],))))
        self.refuse(worker, Cause.PEER_LOST, text, now)

    def _rename(self, worker: Worker, node: str) -> None:
        """The worker is connected by this name; an empty one: it is not connected."""
        if worker.identity is not None and self._by_node.get(worker.identity.node) is worker:
            del self._by_node[worker.identity.node]
        if node:
            self._by_node[node] = worker

    def _pong(self, worker: Worker, message: Pong, now: float) -> None:
        if not worker.connected:
            return
        match worker.liveness.receive(message, now):
            case PeerProcess.SAME:
                worker.liveness.seen(now)
                self._slow.discard(worker)
                self._heed(worker, now)
                for figures in message.figures:
                    worker.figures.add(figures)
            case PeerProcess.ANOTHER:
                self._lose(worker, Cause.PEER_RESTARTED, f"{worker.peer} is a new process", now)
                self._greet(worker, now)
            case _:
                pass

    def _heed(self, decode: Worker, now: float) -> None:
        if decode.load is not None and (decode.load.unusable or decode.unusable):
            greeted_ms = self._limits.silence_ms + 2 * self._limits.resend_ms_max  # decode greets it anew by then
            decode.unusable = reasons(decode.load, self.by_peer.values(), now - greeted_ms / 1e3)
            self._candidates.changed(decode)

    def refuse(self, worker: Worker, cause: Cause, text: str, now: float, *, orderly: bool = False) -> None:
        """Disconnects a worker, and sends Hello again at the slowest rate: it may be replaced by a matching one."""
        if worker.connected:
            self._lose(worker, cause, text, now, orderly=orderly)
        elif worker.why != text:
            self._out(WorkerChanged(worker.peer, text, orderly))
        worker.why = text
        if self.by_peer.get(worker.peer) is worker:  # else it has left with its last room
            self._peers.greet_later(worker, now)

    def _lose(self, worker: Worker, cause: Cause, text: str, now: float, *, orderly: bool = False) -> None:
        assert worker.connected
        assert text, "the reason of a loss"
        self._slow.discard(worker)
        self._candidates.changed(worker)
        self._rename(worker, "")
        worker.why, worker.load, worker.liveness.hello_ms = text, None, 0
        worker.unusable = {}
        self._out(WorkerChanged(worker.peer, text, orderly))
        worker.full_until = worker.sparse_full_until = 0.0
        worker.known.clear()
        worker.figures = FigureWindow()
        self._lost(worker, cause, text, now)

    def _greet(self, worker: Worker, now: float) -> None:
        if self.by_peer.get(worker.peer) is worker:  # else it has left with its last room
            self._peers.greet(worker, now)

    def _ping_due(self, worker: Worker, now: float) -> Ping | None:
        """Every `ping_ms`, whatever else is sent: only a Ping shows a daemon that its router lives."""
        connected = worker.connected and not worker.liveness.silent(now)
        return self._ping(worker) if connected else None

    def _ping(self, worker: Worker) -> Ping:
        return Ping(self._identity.incarnation, self._prefills_to_name(worker))

    def _prefills_to_name(self, worker: Worker) -> tuple[str, ...]:
        """Returns some prefill endpoints that a decode worker's rooms may name, the next ones at each call."""
        ranks = self._candidates.prefill_endpoints(worker.model) if worker.role == "decode" else ()
        if len(ranks) <= AHEAD_PING:
            return tuple(ranks)
        first = worker.next_introduced % len(ranks)
        worker.next_introduced = first + AHEAD_PING
        return tuple(ranks[index % len(ranks)] for index in range(first, first + AHEAD_PING))
