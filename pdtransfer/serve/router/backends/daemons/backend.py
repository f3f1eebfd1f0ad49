"""Our own daemons behind a router, over a bus that runs on the loop of the HTTP side."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from ..... import __version__
from .....bus import Bus
from .....bus.gone import Gone
from .....bus.keys import AllowList, KeyPair, revoked
from .....bus.limits import BusLimits
from .....client.core_driver import EffectRunner, LoopClock, Ticker
from .....errors import ConfigError, RemoteProtocolError
from .....handoff.events import Spans
from .....handoff.peers import Send
from .....limits import TOKENS_MAX, WORKERS_MAX
from .....wire import Identity, Message, Ranks, split_key
from ....process.signals import reload
from ....settings.router import RouterConfig
from ....tracing.ended_request import EndedRequests
from ...fleet.roles import Departure, Role
from ...fleet.status import WorkerStatus
from ...front.backend import Paths
from ...front.body_readers import BodyReading
from ...front.client_request import ClientRequest
from ...front.json_bodies import Read, RefusedRequestError, WholeAnswer
from ...front.status import RouterMetrics
from ...front.text import TextCodec, load_text
from .answer import Answer, Choice
from .answers import model
from .completions import Completion, ReadBody, completion_of, detokenized, read_body, tokenized
from .router_effects import Emit, RoomEnded, RoutingEffect, WorkerChanged, WorkerLeft
from .router_rooms import rooms_by_progress
from .routing import Routing
from .routing_metrics import RoutingMetrics
from .workers import model_text, worker_status

log = logging.getLogger(__name__)

CHAT, MODELS, VERSION = "/v1/chat/completions", "/v1/models", "/version"


class Daemons:
    """As Backend. A request is a room on two workers for each of its answers."""

    paths = Paths(
        generate=("/v1/completions", CHAT), texts=("/tokenize", "/detokenize"), lookups=(MODELS + "/{name:.+}", VERSION)
    )
    inline_bytes_max = 4 << 10  # tokenised too

    def __init__(
        self, config: RouterConfig, metrics: RouterMetrics, ended: EndedRequests, spans: Spans | None = None
    ) -> None:
        """`ended` gets a record of each room at its end."""
        self._config, self._spans, self._ended = config, spans, ended
        self.text: TextCodec = load_text(config.model)
        path = config.allow
        self.reloads: Collection[Callable[[], None]] = () if path is None else (lambda: reload(path, self.allow),)
        self.incarnation = secrets.randbits(64)
        self._created = int(time.time())
        self._bus = Bus(
            node=config.node,
            keys=None if config.key is None else KeyPair.read(config.key),
            allowed=None if config.allow is None else AllowList.read(config.allow),
            receive=self._receive,
            refused=self._refused,
            insecure=config.insecure,
            limits=BusLimits(dials_max=WORKERS_MAX),
            gone=self._report_gone,
        )
        self.routing = Routing(
            Identity(config.node, "router", self.incarnation, Ranks(), "", b"", config.limits.window),
            prefill=config.prefill,
            decode=config.decode,
            limits=config.limits,
            mint=lambda: secrets.randbits(64),
        )
        self._clock = LoopClock.among_peers(config.limits.ping_ms)
        self._perform = EffectRunner(self._perform_one, Ticker(self.routing.next_tick, self._tick, self._clock))
        self._choices: dict[int, Choice] = {}
        self.metrics = RoutingMetrics(metrics, self.routing, self._bus)

    async def open(self) -> None:
        """Dials the workers."""
        for endpoint, role in self.roles().items():
            self._bus.dial(endpoint, role)
        self._perform(self.routing.start(self._clock.now()))

    def allow(self, allowed: AllowList) -> None:
        """Replaces the allow-list: loses workers that it no longer lists in their role, and dials listed ones again."""
        for endpoint in self._bus.allow(allowed):
            self._receive(endpoint, revoked())
        for endpoint, role in self.roles().items():
            with suppress(ConfigError):  # not on the list
                self._bus.dial(endpoint, role)

    def stop(self) -> None:
        """Fails unfinished requests, and sends Goodbye to the workers."""
        self._perform(self.routing.close(self._clock.now()))
        self._perform.ticker.stop()

    async def close(self) -> None:
        """Closes the bus."""
        await self._bus.close()

    # The bus

    def _receive(self, peer: str, message: Message) -> None:
        try:
            effects = self.routing.receive(peer, message, self._clock.now())
        except RemoteProtocolError as breach:
            self._refused(peer, breach)
            return
        self._perform(effects)

    def _refused(self, peer: str, breach: RemoteProtocolError) -> None:
        """Handles a breach: the bus reports undecodable messages, the core invalid ones."""
        self.metrics.breaches.inc()
        log.warning("%s broke the protocol: %s", peer, breach)
        self._perform(self.routing.breach(peer, breach, self._clock.now()))

    def _report_gone(self, peer: str, gone: Gone | None) -> None:
        self._perform(self.routing.gone(peer, "" if gone is None else gone.text, self._clock.now()))

    def _tick(self) -> None:
        self.routing.workers.look_unread(self._bus.behind, self._clock.now())
        self._perform(self.routing.tick(self._clock.now()))

    def _perform_one(self, effect: RoutingEffect) -> None:
        match effect:
            case Send(peer, message):
                self._bus.send(peer, message)
            case Emit():
                self._emit(effect)
            case RoomEnded():
                self._ended(self._choices[effect.request].room_ended(effect, time.monotonic()))
            case WorkerChanged(peer, ""):
                worker = self.routing.workers.by_peer[peer]
                assert worker.identity is not None
                log.info("%s %s is connected at %s", worker.role, worker.identity.node, peer)
            case WorkerLeft(peer):
                self._bus.hang_up(peer)
                log.info("worker %s was removed: its last room has ended", split_key(peer)[1])
            case WorkerChanged(_, why, orderly):
                log.log(logging.INFO if orderly else logging.WARNING, "%s", why)

    def _emit(self, emit: Emit) -> None:
        choice, now = self._choices[emit.request], time.monotonic()
        of = self.metrics.of(choice.client.model)
        if choice.first_s is not None:
            for _ in emit.ids:
                of.inter_token.observe((now - choice.token_s) / len(emit.ids))
        else:
            of.first_token.observe(now - choice.began_s)
        choice.put(emit.ids, emit.logprobs, now)
        of.generated_tokens.inc(len(emit.ids))

    # The workers

    def roles(self) -> dict[str, Role]:
        """The workers that are here, by endpoint."""
        return {worker.peer: worker.role for worker in self.routing.workers.by_peer.values()}

    def add_worker(self, role: Role, address: str) -> None:
        """Dials a worker, or keeps one that was to leave. Raises ConfigError and WorldError."""
        self._bus.dial(address, role)
        self._perform(self.routing.add_worker(address, role, self._clock.now()))

    def depart_worker(self, address: str, departure: Departure) -> None:
        """Gives the worker no new rooms, and closes the connection of one that leaves after the last one."""
        self._perform(self.routing.depart_worker(address, departure))

    def workers_status(self) -> list[WorkerStatus]:
        """What is known of each worker."""
        pool = self.routing.workers
        why_not = pool.why_not(self._bus.trouble)
        return [worker_status(worker, why_not[peer]) for peer, worker in pool.by_peer.items()]

    def usable(self) -> bool:
        """True if some pair of workers is ready."""
        return bool(self.routing.workers.models())

    def health(self) -> dict[str, object]:
        """Each worker, and why it gets no rooms."""
        pool = self.routing.workers
        why_not = pool.why_not(self._bus.trouble)
        workers = [
            {
                "peer": worker.peer,
                "role": worker.role,
                "node": worker.identity.node if worker.identity is not None else None,
                "usable": worker.usable,
                "model": model_text(worker.model) if worker.identity is not None else None,
                "why": why_not[worker.peer] or None,
            }
            for worker in pool.by_peer.values()
        ]
        return {"workers": workers}

    def state(self) -> dict[str, Any]:
        """As Backend.state."""
        routing = self.routing
        rooms = rooms_by_progress(routing.rooms)
        return {"models": list(routing.workers.models()), "rooms": rooms, "retries": routing.retries}

    # Requests

    async def look_up(self, path: str, authorization: str) -> WholeAnswer:
        """Answers /v1/models, /v1/models/NAME and /version."""
        del authorization
        models = {name: model(name, self._created, longest) for name, longest in self._served().items()}
        pages = {f"{MODELS}/{name}": entry for name, entry in models.items()}
        pages |= {VERSION: {"version": __version__}, MODELS: {"object": "list", "data": list(models.values())}}
        if path not in pages:
            name = path.removeprefix(MODELS + "/")
            raise RefusedRequestError("model", f"{name[:64]!r} is not served", code="model_not_found", status=404)
        return WholeAnswer.of_json(msgspec.json.encode(pages[path]))

    def _served(self) -> dict[str, int | None]:
        """The models that are served, with the length that the workers and the checkpoint allow."""
        longest_here = self.text.max_model_len or TOKENS_MAX
        longest = {name: min(longest_here, theirs) for name, theirs in self.routing.workers.models().items()}
        return {name: None if tokens == TOKENS_MAX else tokens for name, tokens in longest.items()}

    def reading(self, path: str) -> BodyReading[Read]:
        """How a body is read."""
        if path == "/tokenize":
            return BodyReading(tokenized, Read, {"served": self._served()})
        if path == "/detokenize":
            return BodyReading(detokenized, Read, {})
        return BodyReading(read_body, ReadBody, {"chat": path == CHAT})

    def request(self, read: ReadBody, body: bytes, client: ClientRequest) -> Completion:
        """The rooms that a body asks for. Raises RefusedRequestError."""
        del body
        completion = completion_of(
            read,
            seed=secrets.randbits(63),
            text=self.text,
            served=self._served(),
            enable_hisparse=self._config.enable_hisparse,
            enable_resume=self._config.enable_resume,
            early=self._config.stream_from == "prefill",
            request_id=client.request_id,
            traceparent=client.traceparent,
        )
        client.model, client.stream = completion.model or "", completion.stream
        client.prompt_tokens, client.enable_hisparse = completion.prompt_tokens, completion.rooms[0].enable_hisparse
        self.metrics.of(client.model)  # however the request ends, it counts as one of this model
        return completion

    async def answer(self, request: Completion, client: ClientRequest) -> WholeAnswer | Answer:
        """Begins all rooms, or none, and answers with them."""
        answer = Answer(request, client, self.text, self._stop, self._end)
        with ExitStack() as undo:
            undo.callback(self._end, answer)
            await self._begin(answer)
            if not request.stream:
                return WholeAnswer.of_json(await answer.whole())
            await answer.begin()
            undo.pop_all()
        return answer

    async def _begin(self, answer: Answer) -> None:
        """Begins a room for each choice. Raises AnswerFailedError for the first that is refused."""
        of = self.metrics.of(answer.client.model)
        for request in answer.completion.rooms:
            if answer.choices:
                await asyncio.sleep(0)  # The prompts of many rooms take their time: others have their turn.
            room, effects = self.routing.submit(request, self._clock.now())
            self._choices[room] = answer.add(room)
            self._perform(effects)
            of.prompt_tokens.inc(request.prompt_tokens)

    def _stop(self, request: int) -> None:
        """A stop string was met."""
        self._perform(self.routing.stop(request, self._clock.now()))

    def _end(self, answer: Answer) -> None:
        """Nobody waits for its rooms any more: cancels those that have not ended."""
        for room, choice in answer.choices.items():
            if choice.end is None:
                self._perform(self.routing.cancel(room, self._clock.now()))
            del self._choices[room]
        spans, now = self._spans, time.monotonic()
        if spans is None or len(answer.choices) < answer.completion.answers:
            return
        for choice in answer.choices.values():
            if choice.end is not None and choice.end.cause is None:  # a failed room has no name in the timeline
                first_s = choice.first_s or choice.began_s
                spans("request", "to the first token", choice.began_s, first_s, room=choice.end.id)
                spans("request", "from the first token on", first_s, now, room=choice.end.id)
