"""Timelines on disk: what viewers and `pdtransfer timeline` find in them, however their processes ended."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdtransfer.errors import ConfigError
from pdtransfer.serve.tracing import trace
from pdtransfer.serve.tracing.spans import TimedSpan
from pdtransfer.serve.tracing.trace import Recorder, TraceClock, read, write
from tests.support.waiting import wait_for


def span(begin_s: float, end_s: float, *, lane: str = "push", process: str = "prefill", **more: Any) -> TimedSpan:
    return TimedSpan(process=process, lane=lane, name="x", begin_s=begin_s, end_s=end_s, **more)


def test_spans_of_several_processes_come_back_from_a_file_with_their_clock(tmp_path: Path) -> None:
    spans = [
        span(0.125, 2.5, process=name, room=(1 << 64) - 1, layer=0, byte_count=9, lane=lane)
        for name in ("prefill", "decode")
        for lane in ("push", "step")
    ]
    spans.append(span(3.0, 3.0))
    clock = TraceClock("here", "b007", 1.5e9)
    write(tmp_path / "spans.json", spans, clock)
    assert read(tmp_path / "spans.json") == trace.Traced(tmp_path / "spans.json", clock, spans)


def test_a_file_is_a_json_array_of_what_viewers_read(tmp_path: Path) -> None:
    write(tmp_path / "t.json", [span(1.0, 2.0, room=10, layer=3, byte_count=7)])
    process, track, event = json.loads((tmp_path / "t.json").read_text())
    assert (process["ph"], process["name"], process["args"]) == ("M", "process_name", {"name": "prefill"})
    assert (track["ph"], track["name"], track["args"]) == ("M", "thread_name", {"name": "push"})
    assert process["pid"] == track["pid"] == event["pid"]
    assert track["tid"] == event["tid"]
    assert (event["ph"], event["cat"], event["ts"], event["dur"]) == ("X", "push", 1e6, 1e6)
    assert event["args"] == {"room": "000000000000000a", "layer": 3, "bytes": 7}


def test_no_two_spans_of_a_track_overlap_but_one_within_the_other(tmp_path: Path) -> None:
    given = [(0, 4), (1, 2), (2, 4), (3, 6), (4, 5), (3.5, 3.7), (1.5, 1.6), (0, 9), (9, 9.5), (8, 9.2)]
    write(tmp_path / "t.json", [span(*times) for times in given])
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in json.loads((tmp_path / "t.json").read_text()):
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, tracks.values())) == len(given)
    assert (0, 4e6) in tracks[1]
    assert (1e6, 2e6) in tracks[1], "a part lies on the track of its whole"
    for own in tracks.values():
        for index, (begin, end) in enumerate(own):
            for other_begin, other_end in own[:index]:
                apart = end <= other_begin or other_end <= begin
                assert (
                    apart or (other_begin <= begin and end <= other_end) or (begin <= other_begin and other_end <= end)
                )


PROGRAM = """
import sys, time
from pathlib import Path
from pdtransfer.serve.tracing.trace import Recorder
recorder = Recorder(Path(sys.argv[1]), "decode-0")
at = 0
while True:
    recorder.timeline("step", "1 request", at, at + 1, room=7)
    at += 1
    if at % 100 == 0: time.sleep(0.001)
"""


def test_a_file_is_whole_when_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "made" / "decode-0.json"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path.parent)])
    try:
        wait_for(lambda: path.exists() and path.stat().st_size > 100_000)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = read(path)
    assert found.clock == msgspec.structs.replace(trace.own_clock(), wall_s=found.clock.wall_s)
    assert [span.begin_s for span in found.spans] == list(range(len(found.spans)))
    assert {span.process for span in found.spans} == {"decode-0"}
    text = path.read_text()
    if not text.endswith("]\n"):  # the kernel was in the middle of a write
        text = text[: text.rindex(",\n")] + "]"
    assert len(json.loads(text)) > len(found.spans)


def test_an_event_that_was_cut_short_is_left_out_and_another_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write(path, [span(0, 1), span(1, 2)])
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read(path).spans) == 1
    path.write_text('[\n{"ph":"X"},\n{}\n]\n')
    with pytest.raises(ConfigError, match=r"t\.json:2: .*name"):
        read(path)
    path.write_text('[\n{"ph":"X","name":"x","pid":3},\n{}\n]\n')
    with pytest.raises(ConfigError, match=r"t\.json:2: .*3"):
        read(path)
    with pytest.raises(ConfigError, match=r"nowhere\.json: No such file"):
        read(tmp_path / "nowhere.json")


def test_what_was_written_over_the_end_between_two_reads_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write(path, [span(0, 1)])
    before = path.read_bytes()
    write(path, [span(0, 1), span(1, 2), span(2, 3)])
    path.write_bytes(before + path.read_bytes()[len(before) :])  # the first read ended at the former end
    assert [span.begin_s for span in read(path).spans] == [0]


@pytest.mark.slow
def test_the_latest_spans_are_kept_in_two_files_of_bounded_size(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[\n]\n")  # of a process before
    recorder = Recorder(tmp_path, "p", bytes_max=4_000)
    for index in range(200):
        recorder.timeline("push", "x", index, index + 1, room=index)
        if index % 20 == 19:
            wait_for(lambda: not recorder.timeline._spans)
    recorder.close()
    older, newest = (read(tmp_path / name) for name in ("p.1.json", "p.json"))
    rooms = [each.room for each in (*older.spans, *newest.spans)]
    assert rooms == list(range(200 - len(rooms), 200)), "in order, without a gap, the latest"
    assert 20 < len(rooms) < 200
    assert all((tmp_path / name).stat().st_size <= 4_000 for name in ("p.json", "p.1.json"))
    assert {span.process for span in newest.spans} == {"p"}, "tracks are named anew in each"
    assert newest.clock == older.clock


def test_a_process_that_begins_leaves_what_the_one_before_it_has_written(tmp_path: Path) -> None:
    for room in (1, 2):
        recorder = Recorder(tmp_path, "p")
        recorder.timeline("push", "x", 0, 1, room=room)
        recorder.close()
    assert [read(tmp_path / name).spans[0].room for name in ("p.1.json", "p.json")] == [1, 2]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"(?m)^timeline = '.*/file/here': Not a directory$"):
        Recorder(tmp_path / "file" / "here", "p")


def test_a_disk_that_hangs_keeps_no_process_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, hanging, over = Recorder(tmp_path, "p"), threading.Event(), threading.Event()

    def hangs(*_: object) -> int:
        hanging.set()
        assert over.wait(60)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", hangs)
    monkeypatch.setattr(trace, "CLOSE_S", 0.01)
    recorder.timeline("push", "x", 0, 1, room=1)
    assert hanging.wait(60)
    recorder.timeline("push", "x", 1, 2, room=1)
    recorder.close()
    assert recorder._thread.is_alive()
    over.set()
    recorder._thread.join(60)
    assert not recorder._thread.is_alive()


def test_a_disk_that_is_full_is_logged_once_and_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, "p")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    for room in range(3):
        recorder.timeline("push", "x", 0, 1, room=room)
        wait_for(lambda: not recorder.timeline._spans)
    recorder.close()
    assert caplog.text.count("No space left on device: writing has stopped") == 1
    assert json.loads((tmp_path / "p.json").read_text())
