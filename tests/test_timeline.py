"""Spans: what reports them, how many are kept, how they are written down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdtransfer.engine.marks import UNTOLD_MAX, Marks
from pdtransfer.errors import ConfigError
from pdtransfer.timeline import Span, Timeline, read, write


def test_the_latest_spans_are_kept_and_taken_once() -> None:
    timeline = Timeline("prefill", spans_max=3)
    for at in range(5):
        timeline("compute", f"layer {at}", at, at + 0.5, room=7, layer=at)
    taken = timeline.take()
    assert [span.layer for span in taken] == [2, 3, 4]
    assert {(span.process, span.lane, span.room, span.seconds) for span in taken} == {("prefill", "compute", 7, 0.5)}
    assert timeline.take() == []


def test_who_is_never_idle_keeps_a_bounded_number_of_spans_to_itself() -> None:
    timeline = Timeline("prefill")
    marks = Marks(timeline, torch.device("cpu"))
    for room in range(2 * UNTOLD_MAX):
        with marks.span("compute", "", room=room):
            pass
    told = [span.room for span in timeline.take()]
    marks.tell()
    told += (left := [span.room for span in timeline.take()])
    assert len(left) <= UNTOLD_MAX
    assert told == list(range(2 * UNTOLD_MAX)), "each once, in order"


def test_spans_come_back_from_a_file_that_several_processes_append_to(tmp_path: Path) -> None:
    spans = [
        Span(process=name, lane="push", name="rows 0-4", begin_s=0.125, end_s=2.5, room=1 << 63, byte_count=9)
        for name in ("prefill", "decode")
    ]
    for span in spans:
        write(tmp_path / "spans.jsonl", [span])
    assert read(tmp_path / "spans.jsonl") == spans


def test_a_line_that_is_no_span_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    write(path, [Span(process="p", lane="push", name="x", begin_s=0, end_s=1)])
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match=r"spans\.jsonl:2: .*process"):
        read(path)
