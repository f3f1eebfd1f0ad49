"""What a first token waited for, by the files of those who had a part in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.errors import ConfigError
from pdtransfer.serve.commands import cli
from pdtransfer.serve.tracing.merge_traces import drawn, merge, rooms_of, run
from pdtransfer.serve.tracing.spans import TimedSpan
from pdtransfer.serve.tracing.trace import TraceClock, Traced, read, write

ROOM = 0xABCDEF0123456789


def span(process: str, lane: str, begin_s: float, end_s: float, *, room: int = ROOM, **more: Any) -> TimedSpan:
    return TimedSpan(process=process, lane=lane, name=lane, begin_s=begin_s, end_s=end_s, room=room, **more)


def of_prefill(room: int = ROOM, at: float = 0.0) -> list[TimedSpan]:
    return [
        span("p", "control", at + 1.0, at + 1.5, room=room),
        span("p", "compute", at + 2.0, at + 3.0, room=room, layer=0),
        span("p", "push", at + 3.0, at + 5.0, room=room, layer=0, byte_count=8),
        span("p", "compute", at + 3.0, at + 4.0, room=room, layer=1),
        span("p", "pick", at + 4.0, at + 4.25, room=room),
        span("p", "push", at + 4.0, at + 5.5, room=room, layer=1, byte_count=4),
    ]


def of_decode(room: int = ROOM, at: float = 0.0) -> list[TimedSpan]:
    return [
        span("d", "control", at + 1.0, at + 1.25, room=room),
        span("d", "landing", at + 1.25, at + 6.0, room=room, byte_count=12),
        span("d", "first token", at + 6.0, at + 9.0, room=room),
    ]


STEPS = [span("d", "step", begin, end, room=0) for begin, end in ((5.5, 6.5), (6.5, 7.0), (7.0, 8.75), (8.75, 9.5))]


def test_the_parts_of_a_first_tokens_time_follow_one_another() -> None:
    spans, remarks = merge([Traced(Path("p"), None, of_prefill()), Traced(Path("d"), None, [*of_decode(), *STEPS])])
    assert remarks == []
    (room,) = rooms_of(spans)
    split = room.split
    assert (room.label, room.asked_s) == (ROOM, 1.0)
    assert (split.ask_s, split.compute_s, split.exposed_s) == (1.0, 2.25, 1.75)
    assert (split.admission_s, split.step_s) == (1.0, 2.0), (
        "the step that was over when the token was told, not the one before"
    )
    assert split.ttft_s == 8.0
    assert (split.push_s, split.writes, split.byte_count) == (2.5, 2, 12)


def test_time_begins_where_the_router_has_the_request() -> None:
    spans = [*of_prefill(), *of_decode(), *STEPS, span("r", "request", 0.5, 9.5)]
    (room,) = rooms_of(spans)
    assert (room.asked_s, room.split.ask_s, room.split.ttft_s) == (0.5, 1.5, 8.5)


def test_a_room_without_a_first_token_or_whose_prefill_nobody_recorded_breaks_nothing() -> None:
    assert rooms_of([*of_prefill(), *of_decode()[:2]]) == []
    (room,) = rooms_of(of_decode())
    assert (room.split.compute_s, room.split.exposed_s, room.split.admission_s) == (0.0, 5.0, 3.0)


def test_another_hosts_times_are_placed_by_the_wall_clocks_and_that_is_noted() -> None:
    here, again, there = (
        TraceClock("here", "b1", 1000.0),
        TraceClock("here", "b1", 1000.5),
        TraceClock("there", "b2", 900.0),
    )
    traced = [
        Traced(Path("r"), here, [span("r", "request", 0.5, 9.5)]),
        Traced(Path("p"), again, of_prefill()),
        Traced(Path("d"), there, of_decode(at=100.0)),
    ]
    spans, remarks = merge(traced)
    assert [each.begin_s for each in spans if each.process == "d"] == [1.0, 1.25, 6.0]
    assert next(each.begin_s for each in spans if each.process == "p") == 1.0
    (remark,) = remarks
    assert "there is not here" in remark
    assert "wall clock" in remark


def test_a_rooms_track_has_its_parts_within_the_whole(tmp_path: Path) -> None:
    whole, *parts = drawn(rooms_of([*of_prefill(), *of_decode(), *STEPS]))
    assert (whole.name, whole.begin_s, whole.end_s) == ("8000.00 ms", 1.0, 9.0)
    assert [part.name for part in parts] == ["wait", "compute", "exposed", "admission", "first step"]
    assert [part.begin_s for part in parts[1:]] == [part.end_s for part in parts[:-1]]
    assert parts[-1].end_s == whole.end_s
    write(tmp_path / "t.json", [whole, *parts])
    assert {event["tid"] for event in json.loads((tmp_path / "t.json").read_text()) if event["ph"] == "X"} == {1}


def test_the_command_reads_a_directory_and_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "p.json", of_prefill())
    write(tmp_path / "d.json", [*of_decode(), *STEPS])
    output = tmp_path / "all" / "merged.json"
    output.parent.mkdir()
    assert cli.main(["timeline", str(tmp_path), "--output", str(output), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rooms"][f"{ROOM:016x}"] == {
        "ttft_ms": 8000, "ask_ms": 1000, "compute_ms": 2250, "exposed_ms": 1750, "admission_ms": 1000,
        "step_ms": 2000, "push_ms": 2500, "bytes": 12,
    }  # fmt: skip
    assert {each.process for each in read(output).spans} == {"p", "d", "first tokens"}
    output.rename(tmp_path / "merged.json")
    for where in (tmp_path, tmp_path / "merged.json"):
        assert cli.main(["timeline", str(where), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rooms"] == printed["rooms"], "nothing is told twice"
    assert cli.main(["timeline", str(tmp_path / "p.json"), str(tmp_path / "d.json")]) == 0
    assert f"{ROOM:016x}" in capsys.readouterr().out


def test_without_spans_one_line_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(tmp_path)]) == 2
    assert "--timeline DIRECTORY" in capsys.readouterr().err
    write(tmp_path / "p.json", of_prefill())
    assert cli.main(["timeline", str(tmp_path)]) == 0
    assert "no room's first token" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="output"):
        run([tmp_path], output=tmp_path / "no" / "where.json", json=False)
