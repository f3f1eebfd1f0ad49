"""Decode of a checkpoint: one forward pass for all running requests, out of the arena."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine_api import Broken, CardMemory, EngineConfig, EngineDescription, Finished, HotFigures, Request, Token
from ...kernels.plane_views import device_tensor
from ...kernels.stream import DeviceSpans, Download, span_of, upload
from ...layout.layout import check_slots
from ...sampling import DIGEST_BYTES, Picked, chain, is_argmax, pick, tokens_digest
from .checkpoint import Checkpoint, ModelOptions
from .layers import INDEX, WINDOW, describe
from .paged import PagedModel
from .requests import FirstToken, check_request
from .steps import DecodeSteps, StepMade

_DIGEST_ROWS = 1_024  # rows read at once: a digest does not copy a whole request


@dataclass(slots=True)
class _Generating:
    """A landed request. The arena has the rows of tokens [0, position), without the last id's."""

    request: Request
    slots: dict[str, NDArray[np.int64]]
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


class CheckpointDecode:
    """A DecodeEngine. Rooms beyond batch_max take turns."""

    def __init__(self, config: EngineConfig, options: ModelOptions, checkpoint: Checkpoint) -> None:
        self._config, self._options, self._checkpoint = config, options, checkpoint
        hbm = options.kv_memory == "hbm" or (options.kv_memory == "auto" and checkpoint.device.type == "cuda")
        self._description = describe(
            config, checkpoint.shapes, name=checkpoint.name, digest=checkpoint.digest,
            window_slots=options.window_slots, hbm=hbm, context_tokens=checkpoint.context_tokens,
        )  # fmt: skip
        self._components = {each.name: each for each in self._description.components}
        self._steps: DecodeSteps | None = None
        self._rooms: dict[int, _Generating] = {}
        self._spans = DeviceSpans(config.spans, checkpoint.device)

    @property
    def card(self) -> EngineDescription:
        """What peers compare."""
        return self._description

    @property
    def idle(self) -> bool:
        """Whether step() would do nothing."""
        return not self._rooms

    @property
    def figures(self) -> HotFigures:
        """Of HiSparse requests, which there are none of."""
        return HotFigures()

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | CardMemory | None = None) -> None:
        """Takes the arena, or the card's memory where that has the KV."""
        description, on_card = self._description, self._checkpoint.device.type == "cuda"
        if description.hbm_bytes:
            if hbm is None or isinstance(hbm, CardMemory) != on_card:
                raise ValueError(f"hbm: {type(hbm).__name__}, the engine computes on {self._checkpoint.device}")
            memory = (
                device_tensor(hbm.address, description.hbm_bytes, self._checkpoint.device).view(torch.uint8)
                if isinstance(hbm, CardMemory)
                else torch.frombuffer(hbm, dtype=torch.uint8, count=description.hbm_bytes)
            )
        elif arena.nbytes < description.memory_bytes or arena.readonly:
            kind = "read-only" if arena.readonly else "writable"
            raise ValueError(f"arena: {arena.nbytes} {kind} bytes, expected {description.memory_bytes} writable ones")
        elif on_card:
            if not device_address:
                raise ValueError(f"arena: it was not registered with {self._checkpoint.device}")
            memory = device_tensor(device_address, description.memory_bytes, self._checkpoint.device).view(torch.uint8)
        else:
            memory = torch.frombuffer(arena, dtype=torch.uint8, count=description.memory_bytes)
        self.take(memory)

    def take(self, memory: Tensor, description: EngineDescription | None = None) -> None:
        """Decodes from this memory, uint8, which the model's device reads and writes; laid out as `description`, by
        default this engine's own."""
        assert self._steps is None, "attach is called once"
        self._description = description or self._description
        self._components = {each.name: each for each in self._description.components}
        model = PagedModel(self._checkpoint, memory, self._description.components)
        # With digests each request is computed at its own size, which a graph's shapes are not. Several ranks meet on
        # the host within a step.
        graphs = memory.is_cuda and not self._options.digests and self._config.group.ranks.tp_size == 1
        self._steps = DecodeSteps(model, self._checkpoint.device, graphs=graphs)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that this engine can never serve."""
        check_request(request, self._checkpoint)
        tokens = len(request.prompt) + request.sampling.max_tokens
        if tokens > self._config.slots:
            raise ValueError(f"{tokens} tokens, the arena has {self._config.slots} slots")

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        """The room has landed in these slots."""
        self.check(request)
        if request.room in self._rooms:
            raise ValueError(f"room {request.room:016x} exists already")
        first = FirstToken.unpack(aux, prompt_tokens=len(request.prompt), vocabulary=self._checkpoint.vocabulary)
        if slots.keys() != self._components.keys():
            raise ValueError(f"slots: of components {sorted(slots)}, expected {sorted(self._components)}")
        tokens = len(request.prompt) + request.sampling.max_tokens
        for name, own in slots.items():
            rows = self._components[name].rows(tokens)
            if own.shape != (rows,) or own.dtype != np.int64:
                raise ValueError(f"slots of {name}: {own.dtype} of shape {own.shape}, expected int64 of {(rows,)}")
            check_slots(own, self._components[name].layout.slots, f"slots of {name}")
        picked = first.picked(request.sampling)
        self._rooms[request.room] = _Generating(request, slots, first.logits_digest, picked, [first.id])

    @torch.inference_mode()
    def step(self) -> list[Token | Finished | Broken]:
        """Runs one decode step for up to batch_max rooms."""
        self._checkpoint.enter()
        if self._rooms:
            self._spans.anchor()
        events: list[Token | Finished | Broken] = []
        running: list[_Generating] = []
        for number in list(islice(self._rooms, self._config.batch_max)):
            # Moved to the end of the queue, so that rooms take turns.
            room = self._rooms[number] = self._rooms.pop(number)
            if room.reported or not self._report(room, events):
                running.append(room)
        # With digests each request is computed by itself, as products of matrices round by the size of a batch.
        for part in [[room] for room in running] if self._options.digests else [running] if running else []:
            name, alone = span_of([room.request.room for room in part])
            with self._spans.span("step", name, room=alone):
                made = self._forward(part)
                finite = Download(made.finite)
                # A vocabulary of logits for each request is much to copy where their likeliest ids are all that counts.
                likeliest = not self._options.digests and all(is_argmax(room.request.sampling) for room in part)
                found = Download(made.likeliest if likeliest else made.logits)
                rows, good = found.get().numpy(), finite.get().numpy()
            for room, row, right in zip(part, rows, good, strict=True):
                if not right:
                    del self._rooms[room.request.room]
                    detail = f"at position {room.position}: the logits are not finite"
                    events.append(Broken(room=room.request.room, detail=detail))
                    continue
                self._advance(room, Picked(int(row)) if likeliest else self._pick(room, row), events)
        self._spans.report()
        return events

    def cancel(self, room: int) -> None:
        """Drops the room."""
        self._rooms.pop(room, None)

    def _forward(self, rooms: list[_Generating]) -> StepMade:
        """What each room's last id at its position leads to."""
        assert self._steps is not None, "attach comes before step"
        rooms.sort(key=lambda room: room.request.room)
        return self._steps.step(
            [(room.request.room, len(room.request.prompt), room.slots) for room in rooms],
            ids=[room.ids[-1] for room in rooms], positions=[room.position for room in rooms],
        )  # fmt: skip

    def _pick(self, room: _Generating, logits: NDArray[np.float32]) -> Picked:
        if self._options.digests:
            room.logits_digest = chain(room.logits_digest, logits)
        request = room.request
        return pick(logits, request.sampling, prompt=request.prompt, ids=room.ids, eos=tuple(self._checkpoint.eos))

    def _advance(self, room: _Generating, picked: Picked, events: list[Token | Finished | Broken]) -> None:
        room.last = picked
        room.ids.append(picked.id)
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
        del self._rooms[number]
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
                    rows = Download(self._steps.rows.read(shape.layer, kind, component, part).view(torch.uint8)).get()
                    digest.update(np.ascontiguousarray(rows.numpy()).data)
        return digest.digest()
