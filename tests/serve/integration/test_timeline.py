"""Timelines of real processes: where a request's time went, by its label, also of one that was killed."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from pdtransfer.serve.commands.cli import main
from pdtransfer.serve.tracing import trace
from pdtransfer.serve.tracing.merge_traces import files, merge, rooms_of
from tests.support.fleets import prompts, running
from tests.support.waiting import until

LANES = {  # of a request, by the process that writes each in its own time
    *(("prefill-0", lane) for lane in ("control", "compute", "push")),
    *(("decode-0", lane) for lane in ("control", "landing", "first token", "generate")),
    ("router", "request"),
}


async def test_a_requests_time_is_shown_by_its_label_and_a_killed_daemons_file_is_whole(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("timeline") / "made"
    router = own = {"timeline": directory}
    own = own | {"engine_option": ("layers=2", "top_k=16", "index_share=1")}
    sparse = {"enable_hisparse": True, "hot_tokens": 48, "device_slots": 98, "dense_slots": 1_024}
    async with running(
        tmp_path_factory.mktemp("f"), ends_as=(-signal.SIGKILL,), router=router, prefills=[own], decodes=[own | sparse]
    ) as site:
        await site.complete("the session is up")
        texts = prompts(1, 30, 300)
        answers = await asyncio.gather(*(site.complete(text, enable_hisparse=True) for text in texts))
        labels = [int(answer.facts["room"], 16) for answer in answers]
        carried = [answer.facts["kv_bytes"] for answer in answers]

        async def written() -> bool:
            spans, _ = merge([trace.read(file) for file in files([directory])])
            each = [[span for span in spans if span.room == label] for label in labels]
            pushed = [sum(span.byte_count for span in own if span.lane == "push") for own in each]
            return pushed == carried and all({(span.process, span.lane) for span in own} >= LANES for own in each)

        await until(written, "all of it is on disk")
        site.decode.process.kill()
        await site.decode.process.wait()
        traced = [trace.read(file) for file in files([directory])]
        for file in files([directory]):
            assert json.loads(file.read_text()), file
        spans, remarks = merge(traced)
        assert not remarks
        assert {span.process for span in spans} == {"prefill-0", "decode-0", "router"}
        for label, text, answer in zip(labels, texts, answers, strict=True):
            own = [span for span in spans if span.room == label]
            assert max(span.end_s for span in own if span.lane == "compute") <= max(
                span.end_s for span in own if span.lane == "landing"
            )
            (room,) = [room for room in rooms_of(spans) if room.label == label]
            split = room.split
            assert min(split.ask_s, split.compute_s, split.exposed_s, split.admission_s) >= 0
            assert split.byte_count == answer.facts["kv_bytes"], len(text)
            (to_first_token,) = [span for span in own if (span.lane, span.name) == ("request", "to the first token")]
            assert to_first_token.begin_s == room.asked_s
            assert split.ttft_s <= to_first_token.seconds
        assert any(span.lane == "swap-in" for span in spans)
        assert {span.room for span in spans} <= {0, *(room.label for room in rooms_of(spans))}


@pytest.mark.full
async def test_every_rank_records_spans_under_the_rooms_label(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("timeline")
    own = {"timeline": directory, "tp_size": 2}
    async with running(tmp_path_factory.mktemp("f"), prefills=[own], decodes=[own]) as site:
        label = int((await site.complete("of two ranks each")).facts["room"], 16)

        async def written() -> bool:
            spans, _ = merge([trace.read(file) for file in files([directory])])
            lanes = {(span.process, span.lane) for span in spans if span.room == label}
            return lanes >= {
                *((f"prefill-0{rank}", lane) for rank in ("", "-tp1") for lane in ("control", "compute", "push")),
                *((f"decode-0{rank}", lane) for rank in ("", "-tp1") for lane in ("landing", "step")),
            }

        await until(written, "every rank has told its part under the room's label")
    spans, remarks = merge([trace.read(file) for file in files([directory])])
    assert not remarks
    (room,) = [room for room in rooms_of(spans) if room.label == label]
    ends = [span.end_s for span in spans if (span.lane, span.room) == ("landing", label)]
    assert len(ends) == 2
    split = room.split
    assert room.asked_s + split.ask_s + split.compute_s + split.exposed_s == pytest.approx(max(ends)), "READY on both"


def test_a_directory_that_cannot_be_made_is_one_line_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for role in ("prefill", "decode", "router"):
        assert main([role, "--timeline", str(tmp_path / "file" / "below")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("Not a directory"), line
        assert f"timeline = '{tmp_path}/file/below'" in line
