"""Splits the time to one prompt's first token into parts, from the spans of all processes involved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .spans import TimedSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Parts of one prompt's time in seconds. The first five follow one another, from the request to the first token
    from decode."""

    ask_s: float  # until prefill computes: pipes, sockets, threads, other prompts
    compute_s: float  # until the first token is picked, gaps between layers included
    exposed_s: float  # from there to READY; 0 without a transfer
    admission_s: float  # from READY to the start of the first step
    step_s: float
    tail_s: float  # from the end of the last layer to READY
    push_s: float  # from the start of the first write to the end of the last
    writes: int
    last_bytes: int  # bytes of the write that ended last
    byte_count: int  # bytes that were transferred

    @property
    def ttft_s(self) -> float:
        """From the request to the first token that decode computed."""
        return self.ask_s + self.compute_s + self.exposed_s + self.admission_s + self.step_s


def split_of(spans: Sequence[TimedSpan], steps: Sequence[TimedSpan], asked_s: float) -> Split:
    """Splits one room's `spans`. `steps` are the steps of its decode worker, in order; a step may hold several rooms.
    The first step is the last one that ended before the first token was reported, or, where that is unknown, the first
    after READY."""

    def of(*lanes: str) -> list[TimedSpan]:
        return sorted((span for span in spans if span.lane in lanes), key=lambda span: span.begin_s)

    layers, pushes = of("compute"), of("push")
    computed = [*layers, *of("pick")]
    begin_s = min((span.begin_s for span in computed), default=asked_s)
    end_s = max((span.end_s for span in computed), default=begin_s)
    ready_s = max((span.end_s for span in of("landing")), default=end_s)
    first_token_s = max((span.end_s for span in of("first token")), default=None)
    after = [
        span for span in steps if span.begin_s >= ready_s and (first_token_s is None or span.end_s <= first_token_s)
    ]
    first = (after[0] if first_token_s is None else after[-1]) if after else None
    if first_token_s is None:
        first_token_s = first.end_s if first is not None else ready_s
    step_s = first_token_s - first.begin_s if first is not None else 0.0
    last = max(pushes, key=lambda span: span.end_s, default=None)
    return Split(
        ask_s=begin_s - asked_s, compute_s=end_s - begin_s, exposed_s=ready_s - end_s,
        admission_s=first_token_s - ready_s - step_s, step_s=step_s,
        tail_s=ready_s - max((span.end_s for span in layers), default=ready_s),
        push_s=last.end_s - pushes[0].begin_s if last is not None else 0.0,
        writes=len(pushes), last_bytes=last.byte_count if last is not None else 0,
        byte_count=sum(span.byte_count for span in pushes),
    )  # fmt: skip
