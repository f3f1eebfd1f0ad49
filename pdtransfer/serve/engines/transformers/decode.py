"""Decode of a checkpoint: one forward pass for all running requests, over the arena. HiSparse requests have a pass of
their own, over the device pool that holds their hot tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import ConfigError
from ....hisparse.hot_requests import HotRequests, HotShape, pool_slots
from ....kernels.pools import Pool
from ....kernels.stream import DeviceSpans, Download, upload
from ....layout.geometry import Int64s
from ...engine_api import EngineConfig, EngineDescription, GpuMemory, Request
from ...sampling import DIGEST_BYTES, is_argmax
from ..shell.decode import Generating, Rest, StepResult, hot_capacity
from ..shell.facts import NOT_FINITE
from ..shell.first_token import FirstToken
from ..shell.torch_memory import arena_tensors
from .checkpoint import Checkpoint, ModelOptions
from .layers import INDEX, KV, WINDOW, describe, hot_component, pick_groups
from .paged import PagedModel, PagedRows
from .steps import DecodeSteps, StepMade

_DIGEST_ROWS = 1_024  # rows read at once: a digest does not copy a whole request


class CheckpointDecode:
    """A DecodeModel."""

    def __init__(
        self, config: EngineConfig, options: ModelOptions, checkpoint: Checkpoint,
        description: EngineDescription | None = None,
    ) -> None:  # fmt: skip
        """`description` is of memory that something else has laid out; by default it is decode's own."""
        self._config, self._options, self._checkpoint = config, options, checkpoint
        hisparse = config.hisparse
        if hisparse is not None and options.kv_memory != "auto":
            text = "with enable_hisparse the KV is in dram, and that of dense requests in hbm"
            raise ConfigError(f"kv_memory = {options.kv_memory}: {text}")
        self.capacity = hot_capacity(config, checkpoint.top)
        hbm = options.kv_memory == "hbm" or (options.kv_memory == "auto" and checkpoint.device.type == "cuda")
        self.facts = checkpoint.facts(
            options,
            description or describe(
                config, checkpoint.shapes, name=checkpoint.name, digest=checkpoint.digest,
                window_slots=options.window_slots, hbm=hbm and hisparse is None,
                context_tokens=checkpoint.context_tokens,
            ),
        )  # fmt: skip
        # Rows before a window are not kept, and hot tokens are elsewhere. Digests promise the bits of a prompt's
        # chunks, which rows of an answer are not.
        spans = {component.span.kind for component in self.facts.description.components}
        self.computes_rests = spans == {"all"} and hisparse is None and not options.digests
        self._components = {component.name: component for component in self.facts.description.components}
        self._steps: DecodeSteps | None = None
        self.hot: HotRequests | None = None
        self._hot_steps: DecodeSteps | None = None
        self._landed: PagedRows | None = None  # KV of HiSparse requests
        self.spans = DeviceSpans(config.spans, checkpoint.device)

    def computing(self) -> AbstractContextManager[object]:
        """On the thread that is about to compute."""
        return self._checkpoint.computing()

    def attach(self, arena: memoryview, *, device_address: int, hbm: memoryview | GpuMemory | None) -> None:
        """Takes the arena, or the GPU's memory where that has the KV, or both with HiSparse."""
        memories = arena_tensors(
            self.facts.description, self._checkpoint.device, arena, device_address=device_address, hbm=hbm
        )
        self.take(memories.get("hbm", memories.get("dram")))
        if len(memories) > 1:
            self._take_hot(memories["dram"])

    def take(self, memory: Tensor | None) -> None:
        """Decodes from this memory, uint8, which the model's device reads and writes."""
        assert self._steps is None, "attach is called once"
        assert memory is not None
        self._model = PagedModel(self._checkpoint, memory, list(self._components.values()))
        # With digests each request is computed at its own size, which a graph's shapes are not. Several ranks meet on
        # the host within a step.
        self._graphs = memory.is_cuda and not self._options.digests and self._config.group.ranks.tp_size == 1
        self._steps = DecodeSteps(self._model, self._checkpoint.device, graphs=self._graphs)

    def _take_hot(self, arena: Tensor) -> None:
        """Decodes HiSparse requests whose KV lands in this memory, uint8."""
        hisparse, capacity, checkpoint = self._config.hisparse, self.capacity, self._checkpoint
        assert hisparse is not None
        assert capacity is not None
        landed = self.facts.description.components[0]
        near = hot_component(self._config, checkpoint.shapes, slots=pool_slots(hisparse))
        shape = HotShape(
            layout=near.layout, groups=pick_groups(checkpoint.shapes), top=checkpoint.top,
            tokens_max=min(self._config.slots, checkpoint.context_tokens),
        )  # fmt: skip
        device = arena.get_device() if arena.is_cuda else None
        host = Pool(layout=landed.layout, address=arena.data_ptr(), device=device, host=arena.is_cuda)
        self.hot = HotRequests(self._config.group, hisparse, capacity, shape, host, checkpoint.device, self.spans)
        model = PagedModel(checkpoint, self.hot.memory, [near], index=self._model.rows)
        self._hot_steps = DecodeSteps(
            model, checkpoint.device, graphs=self._graphs, hot=self.hot, batch_max=capacity.rows, spans=self.spans
        )
        self._landed = PagedRows(arena, [landed], checkpoint.shapes)

    def begin(self, request: Request, slots: dict[str, Int64s], first: FirstToken) -> None:
        """Nothing is kept of a request."""

    def begin_rest(self, request: Request, slots: dict[str, Int64s]) -> None:
        """Nothing is kept of a request."""

    def compute_rest(self, rest: Rest[None], end: int) -> NDArray[np.float32] | None:
        """Computes tokens [done, end) through all layers, as prefill does. Nothing is written any more when it returns:
        the room may be dropped before the next chunk."""
        prompt, device = rest.request.prompt, self._checkpoint.device
        slots = {name: upload(torch.as_tensor(indices[:end]), device) for name, indices in rest.slots.items()}
        chunk = upload(torch.as_tensor(prompt[rest.done : end]), device)
        logits = Download(self._model.chunk(chunk, slots, done=rest.done)).get().numpy()
        return logits if end == len(prompt) else None

    def step(self, running: list[Generating[None]]) -> Sequence[StepResult]:
        """Runs a step of these rooms: those with HiSparse apart. With digests each room is computed by itself, as
        products of matrices round by the size of a batch."""
        kinds = [[answer for answer in running if answer.hot == hot] for hot in (False, True)]
        parts = [[answer] for kind in kinds for answer in kind] if self._options.digests else kinds
        results: dict[int, StepResult] = {}
        for part in parts:
            part.sort(key=lambda answer: answer.request.room)
            if part:
                results |= zip((answer.request.room for answer in part), self._pass(part), strict=True)
        return [results[answer.request.room] for answer in running]

    def _pass(self, part: list[Generating[None]]) -> list[StepResult]:
        """One forward pass of rooms that are all HiSparse, or all not."""
        result = self._forward(part)
        # A vocabulary of logits for each request is much to copy where their likeliest ids are all that counts.
        if self._options.digests or not all(is_argmax(answer.request.sampling) for answer in part):
            return list(Download(result.logits).get().numpy())
        likeliest, finite = Download(result.likeliest), Download(result.finite)
        ids, good = likeliest.get().numpy(), finite.get().numpy()
        return [int(row) if right else NOT_FINITE for row, right in zip(ids, good, strict=True)]

    def _forward(self, part: list[Generating[None]]) -> StepMade:
        """What each room's last id at its position leads to."""
        steps = self._hot_steps if part[0].hot else self._steps
        assert steps is not None, "attach comes before step"
        return steps.step(
            [(answer.request.room, len(answer.request.prompt), self._read(answer)) for answer in part],
            ids=[answer.ids[-1] for answer in part], positions=[answer.position for answer in part],
        )  # fmt: skip

    def _read(self, answer: Generating[None]) -> dict[str, NDArray[np.int64]]:
        """The slots that a step reads: of a HiSparse room those of its index, as the others are found by its picks."""
        return {INDEX: answer.slots[INDEX]} if answer.hot else answer.slots

    def kv_digest(self, answer: Generating[None]) -> bytes:
        """Of the bytes of all rows that a next token would attend to, by layer, kind and position."""
        assert self._steps is not None
        digest = blake2b(digest_size=DIGEST_BYTES)
        tokens = np.arange(answer.position)
        slots = {name: component_slots[: answer.position] for name, component_slots in answer.slots.items()}
        if WINDOW in slots:
            ring, prompt = answer.slots[WINDOW], len(answer.request.prompt)
            begins = prompt - self._components[WINDOW].rows(prompt)
            slots[WINDOW] = ring[(tokens[-len(ring) :] - begins) % len(ring)]
        for shape in self._checkpoint.shapes:
            kinds = [(kind, shape.component) for kind, *_ in shape.kinds] + [(INDEX, INDEX)] * bool(shape.index)
            for kind, component in kinds:
                component_slots = torch.as_tensor(slots[component])
                for first in range(0, len(component_slots), _DIGEST_ROWS):
                    part = upload(component_slots[first : first + _DIGEST_ROWS], self._checkpoint.device)
                    source = self._landed if answer.hot and component == KV else self._steps.rows
                    assert source is not None
                    rows = Download(source.read(shape.layer, kind, component, part).view(torch.uint8)).get()
                    digest.update(np.ascontiguousarray(rows.numpy()).data)
        return digest.digest()
