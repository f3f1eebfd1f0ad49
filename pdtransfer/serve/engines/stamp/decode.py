"""The decode side: each next token is picked by a digest of the request's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....kernels.stream import DeviceSpans
from ....layout.geometry import Int64s
from ....layout.layout import Component
from ...engine_api import EngineConfig, GpuMemory, Request
from ...sampling import DIGEST_BYTES
from ..shell.decode import Generating, Rest, StepResult, hot_capacity
from ..shell.first_token import FirstToken
from ..shell.token_rows import last_tokens, row_of
from .digests import RowDigest, read, total
from .options import KV, StampOptions, facts_of
from .rows import StampRows
from .stamps import Stamper, Words, stamps_of
from .tokens import logits_of
from .units import Units, picked

if TYPE_CHECKING:
    from ....hisparse.hot_requests import HotRequests
    from .hot import StampHot


@dataclass(slots=True, eq=False)
class AnswerStamps:
    """What is known of a landed request's rows."""

    digests: list[RowDigest]  # of each component
    landed: int  # the digest of the rows that prefill wrote; 0 of a rest until it is computed
    stamper: Stamper
    stamp: Words = field(default_factory=lambda: np.empty(0, np.uint64))  # of the last id, while a step computes
    spoilt: int | None = None  # how the rows that landed differ from those that prefill wrote; None until they are read


StampAnswer: TypeAlias = Generating[AnswerStamps]


class StampDecode:
    """A DecodeModel."""

    def __init__(self, config: EngineConfig, options: StampOptions) -> None:
        self._options = options
        # Picks, windows and states are of a whole prompt, and hot tokens are elsewhere.
        self.computes_rests = not (options.top_k or options.pools or config.hisparse is not None)
        self.facts = facts_of(config, options)
        self.capacity = hot_capacity(config, options.top_k)
        components = self.facts.description.components
        self._dense = {component.name: component for component in components}
        self._hot: StampHot | None = None
        if self.capacity is not None:
            from .hot import StampHot

            self._hot = StampHot(config, options, components[0], self.capacity)
        self._rows: dict[tuple[str, str], StampRows] = {}  # by component and memory
        self.spans = DeviceSpans(config.spans, None)
        self._units = Units(options, self._dense, config.group)

    @property
    def hot(self) -> HotRequests | None:
        return None if self._hot is None else self._hot.requests

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def attach(self, arena: memoryview, *, device_address: int, hbm: memoryview | GpuMemory | None) -> None:
        if device_address or isinstance(hbm, GpuMemory):
            raise ValueError("hbm: memory of a GPU, the stamp engine runs on cpu alone")
        memories = {"dram": arena} | ({} if hbm is None else {"hbm": hbm})
        for component in self.facts.description.components:
            memory = memories[component.memory]
            rows = StampRows(memory, component.layout, component.name, self._options.seed)
            self._rows[component.name, component.memory] = rows
        if self._hot is not None:
            self._hot.attach(arena, self.spans)

    def begin(self, request: Request, slots: dict[str, Int64s], first: FirstToken) -> AnswerStamps:
        if len(first.rows_digest) != DIGEST_BYTES:
            raise ValueError(f"aux: a digest of rows of {len(first.rows_digest)} bytes, expected {DIGEST_BYTES}")
        stamper = Stamper()
        stamper.extend(request.prompt)
        return AnswerStamps(self._row_digests(request, slots), _number(first.rows_digest), stamper)

    def _row_digests(self, request: Request, slots: dict[str, Int64s]) -> list[RowDigest]:
        components = dict(self._dense)
        if request.enable_hisparse:
            components[KV] = self.facts.description.components[0]
        return [
            RowDigest(self._rows[name, component.memory], component, slots[name], len(request.prompt))
            for name, component in components.items()
        ]

    def begin_rest(self, request: Request, slots: dict[str, Int64s]) -> AnswerStamps:
        stamper = Stamper()
        stamper.extend(request.prompt)
        return AnswerStamps(self._row_digests(request, slots), 0, stamper)

    def compute_rest(self, rest: Rest[AnswerStamps], end: int) -> NDArray[np.float32] | None:
        """Writes the rows of tokens [done, end). At the end of the prompt all of its rows are read. The digest that
        prefill would send follows from the prompt: so the answer shows a wrong row of its cached beginning as it shows
        one that landed."""
        prompt, state = rest.request.prompt, rest.state
        stamps = stamps_of(prompt[:end])
        for digest in state.digests:
            digest.rows.write(digest.slots[rest.done : end], stamps[rest.done :])
        if end < len(prompt):
            return None
        read([(digest, end) for digest in state.digests])
        written = [total(digest.rows.words.sums(stamps)) for digest in state.digests]
        totals = np.stack([np.concatenate(written), np.concatenate([digest.total for digest in state.digests])])
        landed, digest = self._units.together(totals)
        state.landed = _number(landed)
        state.spoilt = _number(digest) ^ state.landed
        return logits_of(digest)

    def step(self, running: list[StampAnswer]) -> Sequence[StepResult]:
        """Writes the rows of each room's last id, reads, and computes the logits of the next."""
        self._read_landed([answer for answer in running if answer.state.spoilt is None])
        for answer in running:
            answer.state.stamp = answer.state.stamper.extend(np.array(answer.ids[-1:]))
        hot = [answer for answer in running if answer.hot]
        if self._hot is not None and hot:
            rooms = [answer.request.room for answer in hot]
            self._hot.write(rooms, [answer.position for answer in hot], _joined(hot))
        self._write([answer for answer in running if not answer.hot], self._dense)
        self._write(hot, {name: component for name, component in self._dense.items() if name != KV})
        digests = self._read_picks(running, self._read(running))
        errors = self._wrong(running) if self._options.check else {}
        return [
            errors.get(answer.request.room) or logits_of(digest)
            for answer, digest in zip(running, digests, strict=True)
        ]

    def kv_digest(self, answer: StampAnswer) -> bytes:
        if answer.state.spoilt is None:
            self._read_landed([answer])
        (digest,) = self._read([answer], whole=True)
        return digest

    def _write(self, answers: Sequence[StampAnswer], components: Mapping[str, Component]) -> None:
        """Writes the rows of each room's last id where it landed."""
        if not answers:
            return
        stamps = _joined(answers)
        for name, component in components.items():
            rows = [row_of(component, answer.position, len(answer.request.prompt)) for answer in answers]
            slots = [answer.slots[name][row] for answer, row in zip(answers, rows, strict=True)]
            self._rows[name, component.memory].write(np.array(slots), stamps)

    def _read_landed(self, answers: Sequence[StampAnswer]) -> None:
        """Reads the rows of prompts before anything is written: a step may write over them."""
        if answers:
            for answer, digest in zip(answers, self._digests(answers, newest=False), strict=True):
                answer.state.spoilt = _number(digest) ^ answer.state.landed

    def _read(self, answers: Sequence[StampAnswer], *, whole: bool = False) -> list[bytes]:
        """The digest of each room's rows on all ranks, changed for good if other bytes landed than prefill wrote.
        `whole`: all rows are read anew, without the last id's."""
        digests = self._digests(answers, newest=not whole, whole=whole)
        return [
            (_number(digest) ^ (answer.state.spoilt or 0)).to_bytes(DIGEST_BYTES, "little")
            for answer, digest in zip(answers, digests, strict=True)
        ]

    def _digests(self, answers: Sequence[StampAnswer], *, newest: bool, whole: bool = False) -> list[bytes]:
        """Reads the rows that are due; `newest`: with those of each room's last id."""
        due = [(digest, answer.position + newest) for answer in answers for digest in answer.state.digests]
        read(due, whole=whole)
        totals = [np.concatenate([digest.total for digest in answer.state.digests]) for answer in answers]
        return self._units.together(np.stack(totals))

    def _read_picks(self, answers: Sequence[StampAnswer], digests: list[bytes]) -> list[bytes]:
        """The digests with those of the rows that each room picks by its own, in every group of layers."""
        top = self._options.top_k
        if not top or self._options.pools:
            return digests
        rows = self._rows[KV, self._dense[KV].memory]
        totals = np.zeros((len(answers), rows.heads), np.uint64)
        hot = [index for index, answer in enumerate(answers) if answer.hot]
        for number, layers in enumerate(self._options.groups()):
            picks = [
                picked(digest, number, answer.position, top) for digest, answer in zip(digests, answers, strict=True)
            ]
            if self._hot is not None and hot:
                totals[hot] += self._hot.read(number, layers, [picks[index] for index in hot])
            for index, answer in enumerate(answers):
                if not answer.hot:
                    totals[index] += total(rows.sums(answer.slots[KV][picks[index]], layers))
        sums = self._units.together(totals, kv_alone=True)
        return [digest + more for digest, more in zip(digests, sums, strict=True)]

    def _wrong(self, answers: Sequence[StampAnswer]) -> dict[int, str]:
        """By room, the name of a row on some rank whose bytes are not those of the request's tokens."""
        places = np.full((len(answers), 3), -1, np.int64)  # component, row, layer
        for place, answer in zip(places, answers, strict=True):
            prompt = answer.request.prompt
            stamps = stamps_of(np.concatenate((prompt, np.array(answer.ids))))
            for number, digest in enumerate(answer.state.digests):
                last = last_tokens(digest.component, len(stamps))
                rows = np.array([row_of(digest.component, int(token), len(prompt)) for token in last])
                if place[0] < 0 and (wrong := digest.rows.wrong(digest.slots[rows], stamps[last])) is not None:
                    place[:] = number, rows[wrong[0]], wrong[1]
        parts = self._units.gather(places)
        errors: dict[int, str] = {}
        for number, answer in enumerate(answers):
            for rank, part in enumerate(parts):
                index, row, layer = (int(value) for value in part[number])
                if index >= 0 and answer.request.room not in errors:
                    name = answer.state.digests[index].component.name
                    where = f"component {name!r}, row {row}, layer {layer}, rank {rank}"
                    errors[answer.request.room] = f"{where}: these bytes are not this room's"
        return errors


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def _joined(answers: Sequence[StampAnswer]) -> Words:
    return np.concatenate([answer.state.stamp for answer in answers])
