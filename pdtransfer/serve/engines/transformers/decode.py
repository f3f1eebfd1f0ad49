"""Decode of a checkpoint: one forward pass for all running requests, out of the arena. HiSparse requests have one of
their own, out of the device pool that holds their hot tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import CapacityError, ConfigError
from ....hisparse.hot_requests import HotRequests, HotShape, capacity_of, pool_slots
from ....kernels.plane_views import device_tensor
from ....kernels.pools import Pool
from ....kernels.stream import DeviceSpans, Download, span_of, upload
from ....layout.layout import Component, check_slots
from ...engine_api import Broken, CardMemory, EngineConfig, EngineDescription, Finished, HotFigures, Request, Token
from ...sampling import DIGEST_BYTES, Picked, chain, is_argmax, pick, tokens_digest
from .checkpoint import Checkpoint, ModelOptions
from .layers import INDEX, KV, WINDOW, describe, hot_component, pick_groups
from .paged import PagedModel, PagedRows
from .requests import FirstToken, check_request
from .steps import DecodeSteps, StepMade

_DIGEST_ROWS = 1_024  # rows read at once: a digest does not copy a whole request


@dataclass(slots=True, eq=False)
class _Generating:
    """A landed request. The arena has the rows of tokens [0, position), without the last id's."""

    request: Request
    slots: dict[str, NDArray[np.int64]]
    hot: bool  # whether it decodes with HiSparse
    logits_digest: bytes
    last: Picked
    ids: list[int] = field(default_factory=list[int])
    reported: bool = False  # whether step() has returned the first id, which came with aux

    @property
    def position(self) -> int:
        return len(self.request.prompt) + len(self.ids) - 1

    def end(self, eos: frozenset[int]) -> Literal["stop", "length"] | None:
        """The reason why the last id ends the request, or None."""
        if self.ids[-1] in eos and not self.request.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.ids) == self.request.sampling.max_tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class _Stepped:
    """What a step has made of a room: the row of its logits, or its likeliest id; or why the room ends."""

    room: _Generating
    made: NDArray[np.float32] | int
    error: str


class CheckpointDecode:
    """A DecodeEngine. Rooms beyond batch_max take turns. HiSparse rooms first wait for a place on the device."""

    def __init__(self, config: EngineConfig, options: ModelOptions, checkpoint: Checkpoint) -> None:
        self._config, self._options, self._checkpoint = config, options, checkpoint
        hisparse = config.hisparse
        if hisparse is not None and options.kv_memory != "auto":
            text = "with enable_hisparse the KV is in dram, and that of dense requests in hbm"
            raise ConfigError(f"kv_memory = {options.kv_memory}: {text}")
        self._capacity = (
            None
            if hisparse is None
            else capacity_of(hisparse, checkpoint.top, rows=config.batch_max, slots=config.slots)
        )
        hbm = options.kv_memory == "hbm" or (options.kv_memory == "auto" and checkpoint.device.type == "cuda")
        self._description = describe(
            config, checkpoint.shapes, name=checkpoint.name, digest=checkpoint.digest,
            window_slots=options.window_slots, hbm=hbm and hisparse is None, context_tokens=checkpoint.context_tokens,
        )  # fmt: skip
        # If a component has two variants, the second, in HBM, is for requests without HiSparse.
        self._components = {each.name: each for each in self._description.components}
        self._sparse = self._components | {each.name: each for each in reversed(self._description.components)}
        self._steps: DecodeSteps | None = None
        self._hot: HotRequests | None = None
        self._hot_steps: DecodeSteps | None = None
        self._landed: PagedRows | None = None  # KV of HiSparse requests
        self._rooms: dict[int, _Generating] = {}
        self._spans = DeviceSpans(config.spans, checkpoint.device)

    @property
    def card(self) -> EngineDescription:
        """What peers compare."""
        return self._description

    @property
    def idle(self) -> bool:
        """Whether step() would do nothing."""
        return not self._rooms and (self._hot is None or self._hot.idle)

    @property
    def figures(self) -> HotFigures:
        """Of HiSparse requests."""
        return HotFigures() if self._hot is None else self._hot.figures

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | CardMemory | None = None) -> None:
        """Takes the arena, or the GPU's memory where that has the KV, or both with HiSparse."""
        description, device = self._description, self._checkpoint.device
        near = None
        if description.hbm_bytes:
            if hbm is None or isinstance(hbm, CardMemory) != (device.type == "cuda"):
                raise ValueError(f"hbm: {type(hbm).__name__}, the engine computes on {device}")
            near = (
                device_tensor(hbm.address, description.hbm_bytes, device).view(torch.uint8)
                if isinstance(hbm, CardMemory)
                else torch.frombuffer(hbm, dtype=torch.uint8, count=description.hbm_bytes)
            )
        if not description.memory_bytes:
            assert near is not None
            self.take(near)
            return
        if arena.nbytes < description.memory_bytes or arena.readonly:
            kind = "read-only" if arena.readonly else "writable"
            raise ValueError(f"arena: {arena.nbytes} {kind} bytes, expected {description.memory_bytes} writable ones")
        if device.type == "cuda":
            if not device_address:
                raise ValueError(f"arena: it was not registered with {device}")
            memory = device_tensor(device_address, description.memory_bytes, device).view(torch.uint8)
        else:
            memory = torch.frombuffer(arena, dtype=torch.uint8, count=description.memory_bytes)
        self.take(memory if near is None else near)
        if near is not None:
            self._take_hot(memory)

    def take(self, memory: Tensor, description: EngineDescription | None = None) -> None:
        """Decodes from this memory, uint8, which the model's device reads and writes; laid out as `description`, by
        default this engine's own."""
        assert self._steps is None, "attach is called once"
        if description is not None:
            self._description = description
            self._components = self._sparse = {each.name: each for each in description.components}
        self._model = PagedModel(self._checkpoint, memory, list(self._components.values()))
        # With digests each request is computed at its own size, which a graph's shapes are not. Several ranks meet on
        # the host within a step.
        self._graphs = memory.is_cuda and not self._options.digests and self._config.group.ranks.tp_size == 1
        self._steps = DecodeSteps(self._model, self._checkpoint.device, graphs=self._graphs)

    def _take_hot(self, arena: Tensor) -> None:
        """Decodes HiSparse requests whose KV lands in this memory, uint8."""
        hisparse, capacity, checkpoint = self._config.hisparse, self._capacity, self._checkpoint
        assert hisparse is not None
        assert capacity is not None
        landed = self._sparse[KV]
        near = hot_component(self._config, checkpoint.shapes, slots=pool_slots(hisparse))
        shape = HotShape(
            layout=near.layout, groups=pick_groups(checkpoint.shapes), top=checkpoint.top,
            tokens_max=min(self._config.slots, checkpoint.context_tokens),
        )  # fmt: skip
        card = arena.get_device() if arena.is_cuda else None
        host = Pool(layout=landed.layout, address=arena.data_ptr(), card=card, host=arena.is_cuda)
        self._hot = HotRequests(self._config.group, hisparse, capacity, shape, host, checkpoint.device, self._spans)
        model = PagedModel(checkpoint, self._hot.memory, [near], index=self._model.rows)
        self._hot_steps = DecodeSteps(
            model, checkpoint.device, graphs=self._graphs, hot=self._hot, batch_max=capacity.rows, spans=self._spans
        )
        self._landed = PagedRows(arena, [landed], checkpoint.shapes)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that this engine can never serve."""
        check_request(request, self._checkpoint)
        tokens = len(request.prompt) + request.sampling.max_tokens
        kv = self._components_of(request).get(KV)
        slots = self._config.slots if kv is None else kv.layout.slots
        if tokens > slots:
            raise ValueError(f"{tokens} tokens, the arena has {slots} slots")
        if request.enable_hisparse:
            if self._capacity is None:
                raise ValueError("enable_hisparse: this engine has no device pool for it")
            try:
                self._capacity.check(tokens=len(request.prompt), growth=request.sampling.max_tokens)
            except CapacityError as error:
                raise ValueError(str(error)) from error

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        """The room has landed in these slots."""
        self.check(request)
        if request.room in self._rooms:
            raise ValueError(f"room {request.room:016x} exists already")
        first = FirstToken.unpack(aux, prompt_tokens=len(request.prompt), vocabulary=self._checkpoint.vocabulary)
        components = self._components_of(request)
        if slots.keys() != components.keys():
            raise ValueError(f"slots: of components {sorted(slots)}, expected {sorted(components)}")
        prompt, growth = len(request.prompt), request.sampling.max_tokens
        for name, own in slots.items():
            rows = components[name].rows(prompt + growth)
            if own.shape != (rows,) or own.dtype != np.int64:
                raise ValueError(f"slots of {name}: {own.dtype} of shape {own.shape}, expected int64 of {(rows,)}")
            check_slots(own, components[name].layout.slots, f"slots of {name}")
        picked = first.picked(request.sampling)
        hot = self._hot if request.enable_hisparse else None
        if hot is not None:
            hot.offer(request.room, slots[KV], tokens=prompt, growth=growth)
        self._rooms[request.room] = _Generating(
            request, slots, hot is not None, first.logits_digest, picked, [first.id]
        )  # fmt: skip

    @torch.inference_mode()
    def step(self) -> list[Token | Finished | Broken]:
        """Runs one decode step for up to batch_max rooms."""
        self._checkpoint.enter()
        if self._rooms:
            self._spans.anchor()
        if self._hot is not None:
            self._hot.turn()
        events: list[Token | Finished | Broken] = []
        running: list[_Generating] = []
        ready = (number for number, room in self._rooms.items() if not room.reported or self._placed(room))
        for number in list(islice(ready, self._config.batch_max)):
            # Moved to the end of the queue, so that rooms take turns.
            room = self._rooms[number] = self._rooms.pop(number)
            if (room.reported or not self._report(room, events)) and self._placed(room):
                running.append(room)
        for each in self._stepped(running):
            self._advance(each, events)
        self._spans.report()
        if self._hot is not None:
            self._hot.count(exact=any(isinstance(each, Finished | Broken) for each in events))
        return events

    def cancel(self, room: int) -> None:
        """Drops the room."""
        self._release(room, drop=True)

    def _placed(self, room: _Generating) -> bool:
        """Whether a step may run the room."""
        return not room.hot or (self._hot is not None and self._hot.placed(room.request.room))

    def _release(self, room: int, *, drop: bool) -> None:
        """Ends the room. When this returns, nothing reads or writes its slots."""
        if self._rooms.pop(room, None) is not None and self._hot is not None:
            self._hot.release(room, drop=drop)

    def _components_of(self, request: Request) -> dict[str, Component]:
        """The components in which this request has rows."""
        return self._sparse if request.enable_hisparse else self._components

    def _stepped(self, running: list[_Generating]) -> list[_Stepped]:
        """Runs a step of these rooms: those with HiSparse apart. With digests each room is computed by itself, as
        products of matrices round by the size of a batch."""
        kinds = [[room for room in running if room.hot == hot] for hot in (False, True)]
        parts = [[room] for kind in kinds for room in kind] if self._options.digests else kinds
        made = [each for part in parts if part for each in self._pass(part)]
        if self._hot is not None:
            self._hot.stepped()
        return made

    def _pass(self, part: list[_Generating]) -> list[_Stepped]:
        """One forward pass of rooms that are all HiSparse, or all not."""
        name, alone = span_of([room.request.room for room in part])
        with self._spans.span("step", name, room=alone):
            made = self._forward(part)
            finite = Download(made.finite)
            # A vocabulary of logits for each request is much to copy where their likeliest ids are all that counts.
            likeliest = not self._options.digests and all(is_argmax(room.request.sampling) for room in part)
            found = Download(made.likeliest if likeliest else made.logits)
            rows, good = found.get().numpy(), finite.get().numpy()
        refused = self._hot.refused() if self._hot is not None and part[0].hot else ()
        results: list[_Stepped] = []
        for room, row, right in zip(part, rows, good, strict=True):
            error = "the device has no place for its picks" if room.request.room in refused else ""
            # The memory of the logits is that of the next pass as well.
            results.append(
                _Stepped(room, int(row) if likeliest else row, error if right else "the logits are not finite")
            )
        return results

    def _forward(self, rooms: list[_Generating]) -> StepMade:
        """What each room's last id at its position leads to."""
        steps = self._hot_steps if rooms[0].hot else self._steps
        assert steps is not None, "attach comes before step"
        rooms.sort(key=lambda room: room.request.room)
        return steps.step(
            [(room.request.room, len(room.request.prompt), self._read(room)) for room in rooms],
            ids=[room.ids[-1] for room in rooms], positions=[room.position for room in rooms],
        )  # fmt: skip

    def _read(self, room: _Generating) -> dict[str, NDArray[np.int64]]:
        """The slots that a step reads: of a HiSparse room those of its index, as the others are found by its picks."""
        return {INDEX: room.slots[INDEX]} if room.hot else room.slots

    def _pick(self, room: _Generating, logits: NDArray[np.float32]) -> Picked:
        if self._options.digests:
            room.logits_digest = chain(room.logits_digest, logits)
        request = room.request
        return pick(logits, request.sampling, prompt=request.prompt, ids=room.ids, eos=tuple(self._checkpoint.eos))

    def _advance(self, stepped: _Stepped, events: list[Token | Finished | Broken]) -> None:
        room, made = stepped.room, stepped.made
        if stepped.error:
            self._release(room.request.room, drop=True)
            events.append(Broken(room=room.request.room, detail=f"at position {room.position}: {stepped.error}"))
            return
        room.last = Picked(made) if isinstance(made, int) else self._pick(room, made)
        room.ids.append(room.last.id)
        self._report(room, events)

    def _report(self, room: _Generating, events: list[Token | Finished | Broken]) -> bool:
        """Reports the last id, and the end if it ends the request. Returns whether it does."""
        room.reported = True
        number = room.request.room
        events.append(Token(room=number, index=len(room.ids) - 1, id=room.ids[-1], logprobs=room.last.logprobs))
        reason = room.end(self._checkpoint.eos)
        if reason is None:
            return False
        events.append(Finished(
            room=number, reason=reason, tokens_digest=tokens_digest(room.ids), logits_digest=room.logits_digest,
            kv_digest=self._kv_digest(room) if self._options.digests else b"",
        ))  # fmt: skip
        self._release(number, drop=False)
        return True

    def _kv_digest(self, room: _Generating) -> bytes:
        """Of the bytes of all rows that a next token would attend to, by layer, kind and position."""
        assert self._steps is not None
        digest = blake2b(digest_size=DIGEST_BYTES)
        tokens = np.arange(room.position)
        slots = {name: own[: room.position] for name, own in room.slots.items()}
        if WINDOW in slots:
            ring, prompt = room.slots[WINDOW], len(room.request.prompt)
            begins = prompt - self._components[WINDOW].rows(prompt)
            slots[WINDOW] = ring[(tokens[-len(ring) :] - begins) % len(ring)]
        for shape in self._checkpoint.shapes:
            kinds = [(kind, shape.component) for kind, *_ in shape.kinds] + [(INDEX, INDEX)] * bool(shape.index)
            for kind, component in kinds:
                own = torch.as_tensor(slots[component])
                for first in range(0, len(own), _DIGEST_ROWS):
                    part = upload(own[first : first + _DIGEST_ROWS], self._checkpoint.device)
                    source = self._landed if room.hot and component == KV else self._steps.rows
                    assert source is not None
                    rows = Download(source.read(shape.layer, kind, component, part).view(torch.uint8)).get()
                    digest.update(np.ascontiguousarray(rows.numpy()).data)
        return digest.digest()
