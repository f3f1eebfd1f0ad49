"""What the time to one prompt's first token went into, by the spans of all processes that had a part in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .timeline import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Seconds of one prompt. The first five follow one another from the asking to the first token that decode tells."""

    ask_s: float  # until the engine begins: pipes or sockets, threads, other prompts
    compute_s: float  # to the end of the pick of the first token, gaps between layers included
    exposed_s: float  # from there to READY; 0 where nothing crossed
    admission_s: float  # from READY to the first step's begin
    step_s: float
    tail_s: float  # from the end of the last layer to READY
    push_s: float  # from the first write's begin to the last one's end
    writes: int
    last_bytes: int  # of the write that ended last
    byte_count: int  # that crossed

    @property
    def ttft_s(self) -> float:
        """From the asking to the first token that decode computed."""
        return self.ask_s + self.compute_s + self.exposed_s + self.admission_s + self.step_s


def split_of(spans: Sequence[Span], steps: Sequence[Span], asked_s: float) -> Split:
    """Of one room's `spans`, where `steps` are those of the decode that has it, in order; more than one room may be in
    a step. The first step is the last one that was over when the first token was told; where nobody says when that
    was, it is the first after READY."""

    def of(*lanes: str) -> list[Span]:
        return sorted((span for span in spans if span.lane in lanes), key=lambda span: span.begin_s)

    layers, pushes = of("compute"), of("push")
    computed = [*layers, *of("pick")]
    begin_s = min((span.begin_s for span in computed), default=asked_s)
    end_s = max((span.end_s for span in computed), default=begin_s)
    ready_s = max((span.end_s for span in of("landing")), default=end_s)
    told_s = max((span.end_s for span in of("first token")), default=None)
    after = [span for span in steps if span.begin_s >= ready_s and (told_s is None or span.end_s <= told_s)]
    first = (after[0] if told_s is None else after[-1]) if after else None
    if told_s is None:
        told_s = first.end_s if first is not None else ready_s
    step_s = told_s - first.begin_s if first is not None else 0.0
    last = max(pushes, key=lambda span: span.end_s, default=None)
    return Split(
        ask_s=begin_s - asked_s,
        compute_s=end_s - begin_s,
        exposed_s=ready_s - end_s,
        admission_s=told_s - ready_s - step_s,
        step_s=step_s,
        tail_s=ready_s - max((span.end_s for span in layers), default=ready_s),
        push_s=last.end_s - pushes[0].begin_s if last is not None else 0.0,
        writes=len(pushes),
        last_bytes=last.byte_count if last is not None else 0,
        byte_count=sum(span.byte_count for span in pushes),
    )
