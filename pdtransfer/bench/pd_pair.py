"""A prefill and a decode process for `bench pd`, seen from the bench, and what one prompt's time went into."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from re import findall
from typing import Self

import msgspec

from ..config.config import DecodeConfig, PrefillConfig
from ..errors import WorldError
from ..tracing.timeline import Span
from ..tracing.ttft import Split, split_of
from .orders import answer, begun
from .pd_rank import Prompt, Roof, Told, Way, run_decode, run_prefill

LATE_S_MAX = 3e-3  # by which a card's clock may be set wrong
_ANSWER_S = 180.0  # weights are drawn and an arena is backed within it
_answer = partial(answer, who="a process of the bench", within_s=_ANSWER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One prompt: when it was asked, what both processes did, and whether its rows were the same where they landed."""

    prompt: Prompt
    asked_s: float
    spans: tuple[Span, ...]
    same: bool | None  # None: nobody looked

    def of(self, process: str, *lanes: str) -> list[Span]:
        """What one process did in these lanes, by when it began."""
        found = (span for span in self.spans if span.process == process and span.lane in lanes)
        return sorted(found, key=lambda span: span.begin_s)

    @property
    def split(self) -> Split:
        """Where its time went. WorldError where the engine does not say when it computed."""
        if self.prompt.way != "alone" and not self.of("prefill", "compute"):
            raise WorldError("the engine reports no spans of its layers: EngineConfig.spans")
        return split_of(self.spans, self.of("decode", "step"), self.asked_s)


class Pair:
    """Both processes, each with its engine. Whatever fails in one of them is raised here as WorldError."""

    def __init__(self, prefill: PrefillConfig, decode: DecodeConfig) -> None:
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._hisparse, self._on_card = decode.enable_hisparse, prefill.card is not None
        self._rooms = 0
        try:
            self._prefill = self._start(run_prefill, prefill)
            self._decode = self._start(run_decode, decode)
            self._decode.send(_answer(self._prefill))
            _answer(self._decode)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.join(10.0)
            process.kill()

    def prompt(self, tokens: int, way: Way, *, steps: int = 2, check: bool = False) -> Run:
        """One prompt, from the asking until both sides are done with it."""
        self._rooms += 1
        order = Prompt(self._rooms, tokens, way, steps, check, self._hisparse)
        asked_s = time.monotonic()
        self._prefill.send(order)
        self._decode.send(order)
        prefill: Told = _answer(self._prefill)
        decode: Told = _answer(self._decode)
        spans = tuple(span for span in (*prefill.spans, *decode.spans) if span.room in (0, order.room))
        if self._on_card:
            spans = _set_right(spans)
        same = _same(prefill, decode) if check else None
        return Run(prompt=order, asked_s=asked_s, spans=spans, same=same)

    def roof(self, byte_counts: Sequence[int], *, repeats: int = 5) -> list[float]:
        """Seconds that so many bytes take at the least, each the median of several."""
        self._prefill.send(Roof(tuple(byte_counts), repeats))
        return _answer(self._prefill)

    def _start(self, run: Callable[..., None], *arguments: object) -> Connection:
        process, ours = begun(run, *arguments)
        self._processes.append(process)
        self._pipes.append(ours)
        return ours


def _set_right(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """What a card has computed is known by its own clock, which is set by a thread that may wait for the interpreter
    in between: so it may seem later than it was, but not later than the begin of the write that waited for it.

    Raises WorldError where it is out by more than that can be: rows would have left that were not there yet.
    """
    late_s = 0.0
    for push in (span for span in spans if span.lane == "push"):
        first, end, low, high = map(int, findall(r"\d+", push.name)[:4])
        for span in (span for span in spans if span.lane == "compute" and low <= span.layer < high):
            own_first, own_end = map(int, findall(r"\d+", span.name)[:2])
            if own_first < end and first < own_end:
                late_s = max(late_s, span.end_s - push.begin_s)
    if late_s > LATE_S_MAX:
        raise WorldError(f"rows have left {1e3 * late_s:.1f} ms before they were computed")
    return tuple(
        msgspec.structs.replace(span, begin_s=span.begin_s - late_s, end_s=span.end_s - late_s)
        if span.lane in ("compute", "pick")
        else span
        for span in spans
    )


def _same(prefill: Told, decode: Told) -> bool:
    """What landed in DRAM is what was in the pool; components whose rows went elsewhere are not looked at."""
    return bool(decode.sums) and all(prefill.sums.get(key) == value for key, value in decode.sums.items())
