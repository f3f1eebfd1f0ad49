"""The decode side of every engine: batches of landed requests, one token of each per step, read in the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ....errors import CapacityError, ConfigError
from ....kernels.stream import DeviceSpans, span_of
from ....layout.engine_pools import GpuMemory
from ....layout.geometry import Int64s
from ....layout.layout import Component, check_slots
from ...engine_api import Broken, EngineConfig, EngineDescription, Finished, HotFigures, Request, Token
from ...sampling import Picked, chain, pick, tokens_digest
from .facts import NOT_FINITE, ModelFacts
from .first_token import FirstToken

if TYPE_CHECKING:  # most daemons serve no HiSparse request
    from ....hisparse.coordinator import Capacity
    from ....hisparse.hot_requests import HotRequests

KV = "kv"  # the component whose rows a HiSparse request has in the hot pool
State = TypeVar("State")
Events: TypeAlias = list[Token | Finished | Broken]
StepResult: TypeAlias = NDArray[np.float32] | int | str
"""What a step has computed of a room: the logits of its last id, or the first highest of them; or why the room ends."""


@dataclass(slots=True, eq=False)
class Generating(Generic[State]):
    """A landed request. The arena has the rows of its tokens but the last id's. `state` is the model's own."""

    request: Request
    slots: dict[str, Int64s]
    hot: bool  # whether it decodes with HiSparse, from the device pool
    state: State
    logits_digest: bytes
    last: Picked
    ids: list[int]
    reported: bool = False  # whether step() has returned the first id, which came with aux

    @property
    def position(self) -> int:
        """Of the last id."""
        return len(self.request.prompt) + len(self.ids) - 1

    def end(self, eos: Sequence[int]) -> Literal["stop", "length"] | None:
        """The reason why the last id ends the request, or None."""
        if self.ids[-1] in eos and not self.request.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.ids) == self.request.sampling.max_tokens else None


@dataclass(slots=True, eq=False)
class Rest(Generic[State]):
    """A prompt of which the arena has the rows of the first `done` tokens, and decode computes the others."""

    request: Request
    slots: dict[str, Int64s]
    state: State
    done: int


class DecodeModel(Protocol[State]):
    """What computes steps."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def capacity(self) -> Capacity | None:
        """For HiSparse requests; None if none comes."""
        ...

    @property
    def hot(self) -> HotRequests | None:
        """HiSparse requests, once the arena is attached."""
        ...

    @property
    def spans(self) -> DeviceSpans: ...

    def computing(self) -> AbstractContextManager[object]:
        """Prepares the calling thread to compute."""
        ...

    def attach(self, arena: memoryview, *, device_address: int, hbm: memoryview | GpuMemory | None) -> None:
        """Takes the memory, as DecodeEngine. The arena's size is right."""
        ...

    def begin(self, request: Request, slots: dict[str, Int64s], first: FirstToken) -> State:
        """A request has landed in these slots. Raises ValueError for a digest of rows that prefill does not make."""
        ...

    def step(self, running: list[Generating[State]]) -> Sequence[StepResult]:
        """Computes each room's last id at its position. May sort the rooms; the results are in their order then."""
        ...

    def kv_digest(self, answer: Generating[State]) -> bytes:
        """The digest of a request's KV at its end."""
        ...


@runtime_checkable
class RestModel(Protocol[State]):
    """A DecodeModel that computes the rests of prompts as well."""

    @property
    def computes_rests(self) -> bool:
        """As ComputesRests."""
        ...

    def begin_rest(self, request: Request, slots: dict[str, Int64s]) -> State:
        """A request is admitted, of which the arena has the beginning. The state is that of `DecodeModel.begin`."""
        ...

    def compute_rest(self, rest: Rest[State], end: int) -> NDArray[np.float32] | None:
        """Computes tokens [rest.done, end) of the prompt. Returns the logits of its last token; None before."""
        ...


class DecodeShell(Generic[State]):
    """A DecodeEngine. Rooms beyond batch_max take turns. HiSparse rooms first wait for a place on the device."""

    def __init__(
        self, config: EngineConfig, model: DecodeModel[State], *, warm_up: Callable[[], None] = lambda: None
    ) -> None:
        if config.group.ranks.pp_size > 1:
            raise ConfigError(f"pp_size = {config.group.ranks.pp_size}: only prefill is split into stages")
        self.model, self._config, self._facts, self._warm_up = model, config, model.facts, warm_up
        self.description: EngineDescription = model.facts.description
        # If a component has two variants, the second, in HBM, is for requests without HiSparse.
        self._dense = {component.name: component for component in self.description.components}
        self._sparse = {component.name: component for component in reversed(self.description.components)}
        self._answers: dict[int, Generating[State]] = {}
        self._rests: dict[int, Rest[State]] = {}
        self._rest_model: RestModel[State] | None = None
        if isinstance(model, RestModel) and model.computes_rests:
            self._rest_model = model

    @property
    def idle(self) -> bool:
        """True if step() would do nothing."""
        return not self._answers and not self._rests and (self.model.hot is None or self.model.hot.idle)

    @property
    def computes_rests(self) -> bool:
        """True if the model can compute the rest of a prompt."""
        return self._rest_model is not None

    @property
    def figures(self) -> HotFigures:
        """Of HiSparse requests."""
        return HotFigures() if self.model.hot is None else self.model.hot.figures

    def warm_up(self) -> None:
        """One-time work, before the first request."""
        with self.model.computing():
            self._warm_up()

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | GpuMemory | None = None) -> None:
        """Takes the arena."""
        size = self.description.memory_bytes
        if size and (arena.nbytes < size or arena.readonly):
            kind = "read-only" if arena.readonly else "writable"
            raise ValueError(f"arena: {arena.nbytes} {kind} bytes, expected {size} writable ones")
        self.model.attach(arena, device_address=device_address, hbm=hbm)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that this engine can never serve."""
        self._facts.check(request)
        tokens = len(request.prompt) + request.sampling.max_tokens
        for component in self._components_of(request).values():
            if component.rows(tokens) > component.layout.slots:
                raise ValueError(f"{tokens} tokens, the arena has {component.layout.slots} slots of {component.name}")
        if request.enable_hisparse:
            if self.model.capacity is None:
                raise ValueError("enable_hisparse: this engine has no device pool for it")
            try:
                self.model.capacity.check(tokens=len(request.prompt), growth=request.sampling.max_tokens)
            except CapacityError as error:
                raise ValueError(str(error)) from error

    def admit(self, request: Request, slots: dict[str, Int64s], aux: bytes) -> None:
        """The room has landed in these slots."""
        self._check_new(request)
        prompt, growth = len(request.prompt), request.sampling.max_tokens
        first = FirstToken.unpack(aux, prompt_tokens=prompt, facts=self._facts)
        picked = first.picked(request.sampling)
        self._check_slots(request, slots)
        with self.model.computing():
            state = self.model.begin(request, slots, first)
        hot = self.model.hot if request.enable_hisparse else None
        if hot is not None:
            hot.offer(request.room, slots[KV], tokens=prompt, growth=growth)
        self._answers[request.room] = Generating(
            request, slots, hot is not None, state, first.logits_digest, picked, [first.id]
        )  # fmt: skip

    def admit_rest(self, request: Request, slots: dict[str, Int64s], done: int) -> None:
        """As ComputesRests: a chunk of the oldest rest is computed before each step."""
        if self._rest_model is None or request.enable_hisparse:
            raise ValueError("this engine computes no prompt")
        self._check_new(request)
        if not 0 <= done < len(request.prompt):
            raise ValueError(f"{done} tokens are in the arena, the prompt has {len(request.prompt)}")
        self._check_slots(request, slots)
        with self.model.computing():
            state = self._rest_model.begin_rest(request, slots)
        self._rests[request.room] = Rest(request, slots, state, done)

    def step(self) -> Events:
        """Runs one decode step for up to batch_max rooms."""
        with self.model.computing():
            return self._step()

    def cancel(self, room: int) -> None:
        """Drops the room."""
        self._release(room, drop=True)

    def _step(self) -> Events:
        hot, events = self.model.hot, Events()
        if self._answers or self._rests:
            self.model.spans.anchor()
        if hot is not None:
            hot.turn()
        if self._rests:
            self._compute_rest(next(iter(self._rests.values())), events)
        running: list[Generating[State]] = []
        ready = (room for room, answer in self._answers.items() if not answer.reported or self._placed(answer))
        for room in list(islice(ready, self._config.batch_max)):
            # Moved to the end of the queue, so that rooms take turns.
            answer = self._answers[room] = self._answers.pop(room)
            if (answer.reported or not self._report(answer, events)) and self._placed(answer):
                running.append(answer)
        if running:
            self._run(running, events)
        self.model.spans.report()
        if hot is not None:
            hot.count(exact=any(isinstance(event, Finished | Broken) for event in events))
        return events

    def _compute_rest(self, rest: Rest[State], events: Events) -> None:
        """Computes a chunk of a prompt. At its end the request generates, as one that has landed."""
        assert self._rest_model is not None
        request, end = rest.request, min(rest.done + self._config.chunk_tokens, len(rest.request.prompt))
        with self.model.spans.span("compute", f"rows {rest.done}-{end}", room=request.room):
            logits = self._rest_model.compute_rest(rest, end)
        rest.done = end
        if logits is None:
            return
        del self._rests[request.room]
        if not np.isfinite(logits).all():
            events.append(Broken(room=request.room, detail=NOT_FINITE))
            return
        first = pick(logits, request.sampling, prompt=request.prompt, ids=(), eos=self._facts.eos)
        digest = chain(b"", logits) if self._facts.digests else b""
        self._answers[request.room] = Generating(
            request, rest.slots, hot=False, state=rest.state, logits_digest=digest, last=first, ids=[first.id]
        )

    def _run(self, running: list[Generating[State]], events: Events) -> None:
        """Computes and picks the next id of each room."""
        hot = self.model.hot
        name, alone = span_of([answer.request.room for answer in running])
        with self.model.spans.span("step", name, room=alone):
            results = self.model.step(running)
        refused: Sequence[int] = ()
        if hot is not None and any(answer.hot for answer in running):
            hot.stepped()
            refused = hot.refused()
        for answer, result in zip(running, results, strict=True):
            room, error = answer.request.room, result if isinstance(result, str) else ""
            if room in refused:
                error = "the device has no room for the tokens that its index picked"
            elif isinstance(result, np.ndarray) and not np.isfinite(result).all():
                error = NOT_FINITE
            if error or isinstance(result, str):
                self._release(room, drop=True)
                events.append(Broken(room=room, detail=f"at position {answer.position}: {error}"))
                continue
            answer.last = Picked(result) if isinstance(result, int) else self._pick(answer, result)
            answer.ids.append(answer.last.id)
            self._report(answer, events)

    def _pick(self, answer: Generating[State], logits: NDArray[np.float32]) -> Picked:
        if self._facts.digests:
            answer.logits_digest = chain(answer.logits_digest, logits)
        request = answer.request
        return pick(logits, request.sampling, prompt=request.prompt, ids=answer.ids, eos=self._facts.eos)

    def _report(self, answer: Generating[State], events: Events) -> bool:
        """Reports the last id, and the end if it ends the request. Returns whether it does."""
        answer.reported = True
        room, ids = answer.request.room, answer.ids
        events.append(Token(room=room, index=len(ids) - 1, id=ids[-1], logprobs=answer.last.logprobs))
        reason = answer.end(self._facts.eos)
        if reason is None:
            return False
        events.append(Finished(
            room=room, reason=reason, tokens_digest=tokens_digest(ids), logits_digest=answer.logits_digest,
            kv_digest=self.model.kv_digest(answer) if self._facts.digests else b"",
        ))  # fmt: skip
        self._release(room, drop=False)
        return True

    def _placed(self, answer: Generating[State]) -> bool:
        """True if a step may run the room."""
        return not answer.hot or (self.model.hot is not None and self.model.hot.placed(answer.request.room))

    def _release(self, room: int, *, drop: bool) -> None:
        """Ends the room. When this returns, nothing reads or writes its slots."""
        self._rests.pop(room, None)
        if self._answers.pop(room, None) is not None and self.model.hot is not None:
            self.model.hot.release(room, drop=drop)

    def _check_new(self, request: Request) -> None:
        self.check(request)
        if request.room in self._answers or request.room in self._rests:
            raise ValueError(f"room {request.room:016x} exists already")

    def _components_of(self, request: Request) -> dict[str, Component]:
        """The components in which this request has rows, by name."""
        return self._sparse if request.enable_hisparse else self._dense

    def _check_slots(self, request: Request, slots: dict[str, Int64s]) -> None:
        components = self._components_of(request)
        if slots.keys() != components.keys():
            raise ValueError(f"slots: of components {sorted(slots)}, expected {sorted(components)}")
        tokens = len(request.prompt) + request.sampling.max_tokens
        for name, given in slots.items():
            rows = components[name].rows(tokens)
            if given.shape != (rows,) or given.dtype != np.int64:
                raise ValueError(f"slots of {name}: {given.dtype} of shape {given.shape}, expected int64 of {(rows,)}")
            check_slots(given, components[name].layout.slots, f"slots of {name}")


def hot_capacity(config: EngineConfig, top: int) -> Capacity | None:
    """The capacity for HiSparse requests of a model whose steps read `top` positions, or all tokens with 0. Raises
    ConfigError if no long request could ever run."""
    if config.hisparse is None:
        return None
    if not top:
        raise ConfigError("enable_hisparse: a step reads every token: set the engine option top_k")
    from ....hisparse.hot_requests import capacity_of

    return capacity_of(config.hisparse, top, rows=config.batch_max, slots=config.slots)
