"""An engine that computes nothing and takes its time: what fleets of a busy host can still be timed with.

A chunk of a prompt takes `token_us` a token, a decode step `step_ms` and `request_ms` for each request of the batch.
The engine sleeps for what is left of that, so that neighbours on the same cores hardly change its rates. Rows are
never written: what they would hold is nobody's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from pdtransfer import Component, Span, allocate, host_layout
from pdtransfer.kernels.stream import DeviceSpans
from pdtransfer.layout.geometry import Int64s
from pdtransfer.serve.engine_api import DecodeEngine, EngineConfig, EngineDescription, GpuMemory, PrefillEngine, Request
from pdtransfer.serve.engines.shell.decode import DecodeShell, Generating, StepResult
from pdtransfer.serve.engines.shell.facts import ModelFacts
from pdtransfer.serve.engines.shell.first_token import FirstToken
from pdtransfer.serve.engines.shell.prefill import LastRow, PrefillShell, Prompt, Report, Slots

ROW_BYTES = 1_024
PAGE_SIZE = 16
_LETTERS = range(97, 123)
_VOCABULARY = 257


def _facts(config: EngineConfig) -> ModelFacts:
    layout = host_layout(
        config.host_layout, kinds=("latent",), layers=1, heads=1, head_bytes=ROW_BYTES, dtype="uint8",
        slots=config.slots, page_size=PAGE_SIZE,
    )  # fmt: skip
    component = Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=layout)
    description = EngineDescription(
        model="paced", weights=b"paced", components=(component,), memory_bytes=layout.end,
        full_sampling=True,  # of tokens that are not sampled
    )  # fmt: skip
    return ModelFacts(
        description=description, aux_format="paced/1", vocabulary=_VOCABULARY, context_tokens=config.slots, eos=(),
        digests=False,
    )  # fmt: skip


def _until(due_s: float) -> None:
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


class _Paced:
    """What the models of both roles have."""

    hot = capacity = None

    def __init__(self, config: EngineConfig) -> None:
        self.facts, self.spans = _facts(config), DeviceSpans(config.spans, None)

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()


class PacedPrefill(_Paced):
    """A PrefillModel."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.pool = allocate(self.facts.description.memory_bytes).view
        self._token_s = float(config.options.get("token_us", 500)) / 1e6
        self._logits = np.zeros(_VOCABULARY, np.float32)
        self._logits[_LETTERS.start] = 1e3

    def begin(self, request: Request, pool_slots: Slots, slots: Slots) -> None:
        """Nothing is kept of a prompt."""

    def compute(self, prompt: Prompt[None], end: int, computed: Report) -> LastRow | None:
        _until(time.monotonic() + (end - prompt.done) * self._token_s)
        computed((0, 1), None)
        return LastRow(self._logits) if end == len(prompt.request.prompt) else None


class PacedDecode(_Paced):
    """A DecodeModel."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._step_s = float(config.options.get("step_ms", 40)) / 1e3
        self._request_s = float(config.options.get("request_ms", 2)) / 1e3

    def attach(self, arena: memoryview, *, device_address: int, hbm: memoryview | GpuMemory | None) -> None:
        """Reads nothing of it."""

    def begin(self, request: Request, slots: dict[str, Int64s], first: FirstToken) -> None:
        """Nothing is kept of a request."""

    def step(self, running: list[Generating[None]]) -> Sequence[StepResult]:
        _until(time.monotonic() + self._step_s + self._request_s * len(running))
        return [_LETTERS[len(answer.ids) % len(_LETTERS)] for answer in running]

    def kv_digest(self, answer: Generating[None]) -> bytes:  # noqa: ARG002
        return b""


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The factory that --engine names."""
    if config.role == "prefill":
        return PrefillShell(config, PacedPrefill(config))
    return DecodeShell(config, PacedDecode(config))
