"""The events of a modelled fleet: arrivals, chunks, grants, landings and steps, in order of virtual time.

What decides is the project's own: `WorkerPool` places, `Admission` and `PrefixCache` lease slots for prompt and growth
together. Engines and links are rates. Messages take no time but `Rates.handoff_s`, and no worker fails.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from pdtransfer.errors import ArenaFullError, Cause, ConfigError
from pdtransfer.handoff.admission import Demand
from pdtransfer.limits import LOAD_MS, Limits
from pdtransfer.serve.router.backends.daemons.placement import WorkerPair
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest
from pdtransfer.serve.router.backends.daemons.worker_pool import WorkerPool
from pdtransfer.serve.router.backends.daemons.workers import Worker
from pdtransfer.serve.router.fleet.prefixes import KnownPrefixes
from pdtransfer.serve.router.fleet.roles import NoPair
from pdtransfer.wire import VERSION, Identity, Load, Ranks, Sampling, Welcome

from .modelled_decode import ModelledDecode, arena_component
from .modelled_prefill import ModelledPrefill
from .modelled_request import ModelledRequest
from .rates import Rates
from .serving_figures import ServingFigures, Slo
from .trace import BLOCK_TOKENS, TraceRequest

WORKERS_MAX = 16_384  # of each role
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """What a fleet has. Slots and bytes are of one worker, in tokens."""

    prefill: int = 1
    decode: int = 1
    prefill_slots: int = 65_536
    decode_slots: int = 131_072
    page_size: int = 16
    chunk_tokens: int = 512
    batch_max: int = 256
    bytes_per_token: int = 1
    prefix_cache: bool = True
    prefill_cache_tokens: int = 0  # prefixes that prefill's engine keeps for itself; the project's own keep none
    growth_min: int = 0  # max_tokens that clients ask for at least: slots are leased for them


@dataclass(slots=True)
class LinkLoad:
    """Bytes of one worker by the second: its busiest one."""

    second: int = -1
    in_second: int = 0
    most: int = 0
    total: int = 0

    def add(self, byte_count: int, now: float) -> None:
        """The transfer of these bytes ended now."""
        if int(now) != self.second:
            self.second, self.in_second = int(now), 0
        self.in_second += byte_count
        self.total += byte_count
        self.most = max(self.most, self.in_second)


@dataclass(slots=True)
class FleetLoad:
    """High waters and totals of a run."""

    rooms: int = 0
    rooms_max: int = 0
    queued_max: int = 0  # rooms that wait for slots, of one decode worker
    retries: int = 0
    sessions: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    exposed_s: float = 0.0  # of all transfers: time that no computing hid
    links: dict[str, LinkLoad] = field(default_factory=dict[str, LinkLoad])


def limits_of(limits: Limits, block_tokens: int) -> Limits:
    """Limits with the trace's blocks: what a trace does not separate is shared whole or not at all."""
    return replace(limits, prefix_block_tokens=block_tokens)


def _silent(arrived: int, now: float) -> None:
    pass


def _keep(worker: Worker, cause: Cause, detail: str, now: float) -> None:
    raise AssertionError(f"no worker of the model is lost: {worker.peer}, {cause}, {detail}, at {now}")


class FleetModel:
    """One run. `progress` gets the number of requests that have arrived and the virtual time, now and then."""

    def __init__(
        self, shape: FleetShape, rates: Rates, limits: Limits, *, block_tokens: int = BLOCK_TOKENS,
        slo: Slo | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.rates, self._limits = shape, rates, limits_of(limits, block_tokens)
        self._block_tokens = -(-block_tokens // shape.page_size) * shape.page_size
        if shape.prefix_cache and self._block_tokens != block_tokens:
            text = f"page_size = {shape.page_size}: blocks of {block_tokens} tokens are not whole pages"
            raise ConfigError(text)
        self.figures, self.load = ServingFigures(slo or Slo()), FleetLoad()
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._number = self._room = 0
        self._now = 0.0
        self._deadline_s = limits.room_deadline_ms / 1e3
        self._awaited: deque[ModelledRequest] = deque()  # whose deadline is next
        component = arena_component(
            slots=shape.decode_slots, page_size=shape.page_size, bytes_per_token=shape.bytes_per_token
        )
        self._component = component
        self.prefills = {f"p{index}": self._prefill(f"p{index}") for index in range(shape.prefill)}
        self.decodes = {
            f"d{index}": ModelledDecode(
                f"d{index}", component, rates, self._limits, batch_max=shape.batch_max, prefix_cache=shape.prefix_cache,
                on_steps=self.figures.gaps.add, on_end=self._answered,
            )
            for index in range(shape.decode)
        }  # fmt: skip
        self._load_due = dict.fromkeys([*self.prefills, *self.decodes], 0.0)
        self._load_waits: set[str] = set()
        self.load.links = {peer: LinkLoad() for peer in self._load_due}
        self.pool = self._connected()

    def _prefill(self, peer: str) -> ModelledPrefill:
        shape = self.shape
        blocks = shape.prefill_cache_tokens // self._block_tokens
        cache = KnownPrefixes(blocks) if blocks else None
        return ModelledPrefill(
            peer, self.rates.prefill, slots=shape.prefill_slots, chunk_tokens=shape.chunk_tokens, cache=cache
        )

    def _connected(self) -> WorkerPool:
        """The router's pool, which has met all workers."""
        pool = WorkerPool(
            Identity("router", "router", 1, Ranks(), "", b"", 1), self.prefills, self.decodes, self._limits,
            lambda _: None, _keep,
        )  # fmt: skip
        for peer, worker in pool.by_peer.items():
            pool.receive(worker, Welcome(VERSION, Identity(peer, worker.role, 1, Ranks(), "model", b"", 1)), 0.0)
            pool.receive(worker, self._load_of(peer), 0.0)
        return pool

    def run(self, requests: Iterable[TraceRequest], progress: Callable[[int, float], None] = _silent) -> None:
        """Runs until every request has ended. `requests` come in the order of their arrival."""
        events = self._events
        arrived = 0
        for request in requests:
            while events and events[0][0] <= request.at_s:
                at_s, _, call, argument = heappop(events)
                self._now = at_s
                call(argument)
            self._now = request.at_s
            self._expire()
            self._arrive(request)
            arrived += 1
            if not arrived % 1_024:
                progress(arrived, self._now)
        while events:
            self._now, _, call, argument = heappop(events)
            call(argument)
            self._expire()
        progress(arrived, self._now)

    def _schedule(self, when: float, call: Callable[..., None], argument: object) -> None:
        self._number += 1
        heappush(self._events, (when, self._number, call, argument))

    # A request

    def _arrive(self, arrival: TraceRequest) -> None:
        growth = max(arrival.output_tokens, self.shape.growth_min)
        keys = tuple(
            [block.to_bytes(16, "little") for block in arrival.blocks[: arrival.input_tokens // self._block_tokens]]
        )
        ids = bytes(_ID_BYTES * arrival.input_tokens)
        prompt = CompletionRequest(prompt=ids, sampling=Sampling(growth), keys=keys)
        rows = self._component.rows(prompt.tokens)
        inflight = arrival.input_tokens * self.shape.bytes_per_token
        demand = Demand((rows,), inflight, keys if self.shape.prefix_cache else ())
        if self.load.rooms >= self._limits.rooms_max:
            self.figures.failed("429", ended_s=self._now)
            return
        pair = self.pool.choose(prompt, (), self._now)
        if isinstance(pair, NoPair):
            self.figures.failed("503" if pair.retry_ms is None else "429", ended_s=self._now)
            return
        self._room += 1
        request = ModelledRequest(
            self._room, arrival.at_s, arrival.input_tokens, arrival.output_tokens, prompt, demand, keys, pair
        )
        self.load.rooms += 1
        self.load.rooms_max = max(self.load.rooms_max, self.load.rooms)
        self._awaited.append(request)
        self._begin(request)

    def _begin(self, request: ModelledRequest) -> None:
        """Begins the room on its pair, which may refuse it: then it is tried once on another."""
        pair = request.pair
        self.pool.begin(pair, request.room, request.prompt)
        prefill, decode = self.prefills[_prefill(pair).peer], self.decodes[pair.decode.peer]
        try:
            if not prefill.fits(request):
                raise ArenaFullError("the pool is too small", retry_ms=None)
            decode.admission.check(request.demand.rows, rooms=decode.rooms)
        except ArenaFullError as error:
            self._refused(request, error)
            return
        self.load.sessions.add((prefill.peer, decode.peer))
        decode.rooms += 1
        decode.admission.enqueue(request.room, request.demand)
        decode.queued[request.room] = request
        self.load.queued_max = max(self.load.queued_max, len(decode.admission))
        prefill.add(request)
        self._lease(decode)
        self._compute(prefill)

    def _refused(self, request: ModelledRequest, error: ArenaFullError) -> None:
        pair = request.pair
        for worker in (_prefill(pair), pair.decode):
            self.pool.end(worker, request.room, request.tokens)
        if error.retry_ms is not None:
            pair.decode.mark_full(self._now + error.retry_ms / 1e3, enable_hisparse=False)
        again = self.pool.choose(request.prompt, (pair.decode,), self._now)
        if request.retried or error.retry_ms is None or isinstance(again, NoPair) or again.decode is pair.decode:
            self._fail(request, "400" if error.retry_ms is None else "429")
            return
        request.pair, request.retried = again, True
        self.load.retries += 1
        self._begin(request)

    def _fail(self, request: ModelledRequest, status: str) -> None:
        request.over = True
        self.load.rooms -= 1
        self.figures.failed(status, ended_s=self._now)

    def _expire(self) -> None:
        """Fails the rooms without progress until their deadline."""
        awaited, due = self._awaited, self._now - self._deadline_s
        while awaited and (awaited[0].at_s <= due or awaited[0].landed or awaited[0].over):
            request = awaited.popleft()
            if request.landed or request.over:
                continue
            prefill, decode = self._workers(request)
            self._fail(request, "504")
            for worker in (_prefill(request.pair), request.pair.decode):
                self.pool.end(worker, request.room, request.tokens)
            decode.rooms -= 1
            decode.admission.withdraw(request.room)
            decode.queued.pop(request.room, None)
            if not request.in_transfer:  # else pages and slots are written until it has landed
                self._give_up(request)
            self._compute(prefill)
            self._lease(decode)

    def _give_up(self, request: ModelledRequest) -> None:
        """Nothing reads or writes the memory of a request that has failed."""
        prefill, decode = self._workers(request)
        if request.holding is not None:
            decode.admission.landed(request.demand, request.holding)
            decode.cache.drop(request.holding)
        if request.computed_s >= 0:
            prefill.free(request)

    def _workers(self, request: ModelledRequest) -> tuple[ModelledPrefill, ModelledDecode]:
        return self.prefills[_prefill(request.pair).peer], self.decodes[request.pair.decode.peer]

    # Prefill

    def _compute(self, prefill: ModelledPrefill) -> None:
        ends_s = prefill.begin_chunk(self._now, self._block_tokens)
        if ends_s is not None:
            self._schedule(ends_s, self._chunk, prefill)
        if prefill.waiting != prefill.announced:  # placement reads nothing else of prefill's Load
            prefill.announced = prefill.waiting
            self._announce(prefill.peer)

    def _chunk(self, prefill: ModelledPrefill) -> None:
        request = prefill.end_chunk()
        if request is not None:
            request.computed_s = self._now
            if request.over:
                prefill.free(request)
            else:
                self._transfer(request)
        self._compute(prefill)

    # The way

    def _transfer(self, request: ModelledRequest) -> None:
        """Sends what is left once the prompt is computed and slots are leased; a link carries one room at a time."""
        if request.computed_s < 0 or request.granted_s < 0:
            return
        assert request.holding is not None
        prefill, decode = self._workers(request)
        per_token, rate = self.shape.bytes_per_token, self.rates.link_bytes_s
        byte_count = (request.tokens - request.holding.prefix) * per_token
        left = byte_count
        if request.granted_s < request.computed_s:  # chunks left as they were computed, but for the last one
            since_s = self._now - max(request.granted_s, request.compute_begins_s)
            left = min(byte_count, max(request.last_chunk * per_token, byte_count - since_s * rate))
        begins_s = max(self._now, prefill.link_free_s, decode.link_free_s)
        lands_s = begins_s + left / rate
        prefill.link_free_s = decode.link_free_s = lands_s
        request.in_transfer = True
        self.load.exposed_s += lands_s - self._now
        for peer in (prefill.peer, decode.peer):
            self.load.links[peer].add(byte_count, lands_s)
        self._schedule(lands_s + self.rates.handoff_s, self._landed, request)

    def _landed(self, request: ModelledRequest) -> None:
        prefill, decode = self._workers(request)
        if request.over:
            self._give_up(request)
            self._compute(prefill)
            self._lease(decode)
            return
        prefill.free(request)
        self._compute(prefill)
        assert request.holding is not None
        request.landed = True
        self.pool.end(_prefill(request.pair), request.room, request.tokens)
        decode.admission.landed(request.demand, request.holding)
        decode.cache.keep(request.holding, request.demand.keys)
        self._lease(decode)
        self._schedule(decode.join(request, self._now), self._advance, decode)

    # Decode

    def _lease(self, decode: ModelledDecode) -> None:
        while (room := decode.admission.head()) is not None:
            holding = decode.admission.admit(self._now)
            if holding is None:
                break
            request = decode.queued.pop(room)
            request.holding, request.granted_s = holding, self._now
            decode.slots_taken_max = max(decode.slots_taken_max, decode.slots_taken)
            self._transfer(request)
        self._announce(decode.peer)

    def _advance(self, decode: ModelledDecode) -> None:
        if decode.due_s == self._now:  # else the batch has changed since
            due_s = decode.advance(self._now)
            if due_s >= 0:
                self._schedule(due_s, self._advance, decode)

    def _answered(self, request: ModelledRequest, now: float) -> None:
        assert request.holding is not None
        decode = self.decodes[request.pair.decode.peer]
        decode.rooms -= 1
        decode.cache.drop(request.holding)
        self.load.rooms -= 1
        self.pool.end(request.pair.decode, request.room, request.tokens)
        overhead_s = self.rates.overhead_s
        self.figures.answered(
            at_s=request.at_s, ttft_s=request.first_token_s - request.at_s + overhead_s,
            total_s=now - request.at_s + overhead_s, prompt_tokens=request.tokens, cached_tokens=request.holding.prefix,
            output_tokens=request.output_tokens,
        )  # fmt: skip
        self._lease(decode)

    # What routers know

    def _announce(self, peer: str) -> None:
        """Its Load changed: sent now, or as soon as a service may."""
        if peer in self._load_waits:
            return
        due_s = self._load_due[peer]
        if self._now >= due_s:
            self._send(peer)
        else:
            self._load_waits.add(peer)
            self._schedule(due_s, self._send, peer)

    def _send(self, peer: str) -> None:
        self._load_waits.discard(peer)
        self._load_due[peer] = self._now + LOAD_MS / 1e3
        self.pool.receive(self.pool.by_peer[peer], self._load_of(peer), self._now)

    def _load_of(self, peer: str) -> Load:
        prefill = self.prefills.get(peer)
        if prefill is not None:
            slots = self.shape.prefill_slots
            return Load(True, False, 0, prefill.waiting, max(0, slots - prefill.slots_taken), slots)
        decode = self.decodes[peer]
        queued = len(decode.admission)
        return Load(True, False, decode.rooms - queued, queued, decode.cache.free_slots[0], decode.slots)

    # What came of it

    def report(self) -> dict[str, Any]:
        """The figures of the requests, and what the fleet took for them."""
        seconds = max(self.figures.ended_s, 1e-9)
        prefills, decodes = list(self.prefills.values()), list(self.decodes.values())
        high = max(worker.slots_taken_max for worker in decodes)
        links = self.load.links
        per_decode = Counter(decode for _, decode in self.load.sessions)
        return self.figures.report() | {
            "arena_high_water_tokens": high,
            "arena_high_water_share": round(high / decodes[0].slots, 4),
            "fleet": {
                "prefill": len(prefills),
                "decode": len(decodes),
                "prefill_busy_mean": round(sum(worker.busy_s for worker in prefills) / len(prefills) / seconds, 4),
                "prefill_busy_max": round(max(worker.busy_s for worker in prefills) / seconds, 4),
                "decode_busy_mean": round(sum(worker.busy_s for worker in decodes) / len(decodes) / seconds, 4),
                "prefill_slots_high_water": max(worker.slots_taken_max for worker in prefills),
                "batch_high_water": max(worker.batch_high for worker in decodes),
                "rooms_high_water": self.load.rooms_max,
                "queued_high_water": self.load.queued_max,
                "retries": self.load.retries,
                "sessions_of_a_decode_max": max(per_decode.values(), default=0),
                "kv_bytes": sum(links[worker.peer].total for worker in prefills),
                "prefill_link_gb_s_max": round(max(links[worker.peer].most for worker in prefills) / 1e9, 6),
                "decode_link_gb_s_max": round(max(links[worker.peer].most for worker in decodes) / 1e9, 6),
                "exposed_transfer_ms_mean": round(1e3 * self.load.exposed_s / max(1, self._room), 4),
            },
        }


def modelled(
    requests: Iterable[TraceRequest], shape: FleetShape, rates: Rates, limits: Limits, *,
    block_tokens: int = BLOCK_TOKENS, slo: Slo | None = None, progress: Callable[[int, float], None] = _silent,
) -> FleetModel:  # fmt: skip
    """A run of the model, which has ended."""
    model = FleetModel(shape, rates, limits, block_tokens=block_tokens, slo=slo)
    model.run(requests, progress)
    return model


def _prefill(pair: WorkerPair) -> Worker:
    assert pair.prefill is not None, "the modelled decode workers compute no prompts"
    return pair.prefill
