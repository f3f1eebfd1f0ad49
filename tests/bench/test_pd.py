"""bench pd on the CPU, with models so small that its figures mean nothing: the spans hold together, and it is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from pdtransfer.bench import pd, pd_pair, pd_report, pd_tell, svg
from pdtransfer.bench.pd_pair import Pair, Run
from pdtransfer.bench.pd_rank import Prompt, Way
from pdtransfer.bench.pd_sums import host_sums
from pdtransfer.commands import cli
from pdtransfer.errors import WorldError
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.tracing.timeline import Span
from pdtransfer.tracing.trace import read
from pdtransfer.tracing.ttft import Split

LAYERS, CHUNK = 3, 16
OPTIONS = (f"layers={LAYERS}", "width=64", "mlp_width=64", "heads=2", "kv_heads=2")


@pytest.fixture(scope="module")
def result() -> pd.Result:
    return pd.measure(
        tokens=(24,), attentions=("gqa",), rounds=1, chunk_tokens=CHUNK, engine_option=OPTIONS, on=("cpu", "cpu")
    )


@pytest.fixture(scope="module")
def runs(result: pd.Result) -> dict[Way, Run]:
    return result.series[0].points[0].shown


# What the processes tell


def test_each_layer_of_each_chunk_is_computed_once_and_all_of_it_crosses_once(
    result: pd.Result, runs: dict[Way, Run]
) -> None:
    for way, run in runs.items():
        layers = [(span.name, span.layer) for span in run.of("prefill", "compute")]
        assert len(layers) == len(set(layers)) == 2 * LAYERS, way
        carried = sum(span.byte_count for span in run.of("prefill", "push"))
        assert carried == (0 if way == "none" else result.series[0].points[0].byte_count)


def test_no_row_leaves_before_its_layer_is_computed_nor_lands_after_ready(runs: dict[Way, Run]) -> None:
    for way in ("auto", "layers", "end"):
        run = runs[way]
        [landing] = run.of("decode", "landing")
        for push in run.of("prefill", "push"):
            first, end, low, high = map(int, re.findall(r"\d+", push.name))
            needed = [
                span
                for span in run.of("prefill", "compute")
                if low <= span.layer < high and _overlap(span.name, (first, end))
            ]
            assert needed
            assert push.begin_s >= max(span.end_s for span in needed), way
            assert push.end_s <= landing.end_s
        assert all(step.begin_s >= landing.end_s for step in run.of("decode", "step"))


def _overlap(name: str, rows: tuple[int, int]) -> bool:
    first, end = map(int, re.findall(r"\d+", name)[:2])
    return first < rows[1] and rows[0] < end


def test_rows_leave_by_layer_or_at_the_end_as_they_were_asked_to(runs: dict[Way, Run]) -> None:
    by_layer, at_end = (runs[way].of("prefill", "push") for way in ("layers", "end"))
    assert len(by_layer) == 2 * LAYERS
    assert len(at_end) == 1
    assert at_end[0].begin_s >= max(span.end_s for span in runs["end"].of("prefill", "compute"))
    assert runs["none"].of("prefill", "push") == []


def test_the_parts_of_a_prompts_time_are_its_time(runs: dict[Way, Run]) -> None:
    for way in ("auto", "layers", "end"):
        run, split = runs[way], runs[way].split
        parts = (split.ask_s, split.compute_s, split.exposed_s, split.admission_s, split.step_s)
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(split.ttft_s)
        assert split.ttft_s == pytest.approx(run.of("decode", "step")[0].end_s - run.asked_s)
        assert split.tail_s >= split.exposed_s


def test_rows_alone_of_every_size_are_timed_beside_the_roof(result: pd.Result) -> None:
    pushed = result.series[0].pushed
    assert list(pushed) == [1, 16, 24]
    row_bytes = pushed[1].byte_count
    assert [each.byte_count for each in pushed.values()] == [row_bytes * tokens for tokens in pushed]
    assert all(0 < each.push_s <= each.ready_s and each.roof_s > 0 for each in pushed.values())


def test_rows_that_landed_otherwise_end_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt(_: object, tokens: int, way: Way, **__: object) -> Run:
        return Run(prompt=Prompt(1, tokens, way), asked_s=0.0, spans=(), same=False)

    monkeypatch.setattr(Pair, "prompt", prompt)
    with pytest.raises(WorldError, match=r"24 tokens, push auto: rows have landed that are not what was computed"):
        pd._point(Pair.__new__(Pair), 24, 1, on_card=False)


# Sums


@pytest.fixture
def pool() -> tuple[np.ndarray, np.ndarray]:
    memory = np.random.default_rng(5).integers(0, 256, 64 * 3 * 48, dtype=np.uint8)
    return memory, np.array([9, 3, 41, 4])


def test_sums_see_a_swapped_row_a_swapped_word_and_another_layer(pool: tuple[np.ndarray, np.ndarray]) -> None:
    memory, slots = pool
    sizes = {"kinds": ("latent",), "heads": 1, "head_bytes": 48, "dtype": "bfloat16", "slots": 64, "page_size": 1}
    layout = host_layout("layer_first", layers=3, **sizes)
    sums = host_sums("kv", layout, memory.ctypes.data, slots, 0)
    assert len(sums) == len(set(sums.values())) == 3
    assert host_sums("kv", layout, memory.ctypes.data, slots[[1, 0, 2, 3]], 0) != sums
    parts = [host_sums("kv", layout, memory.ctypes.data, slots[at : at + 2], at) for at in (0, 2)]
    assert {key: (parts[0][key] + parts[1][key]) % (1 << 64) for key in sums} == sums
    # The same rows in another layout.
    other = host_layout("page_first", layers=3, **sizes)
    moved = np.zeros_like(memory)
    for ours, theirs in zip(layout.planes, other.planes, strict=True):
        for slot in range(64):
            moved[theirs.base + slot * theirs.row_stride :][:48] = memory[ours.base + slot * ours.row_stride :][:48]
    assert host_sums("kv", other, moved.ctypes.data, slots, 0) == sums
    words = memory[9 * 48 : 9 * 48 + 16].copy()
    memory[9 * 48 : 9 * 48 + 16] = np.concatenate((words[8:], words[:8]))
    assert host_sums("kv", layout, memory.ctypes.data, slots, 0) != sums


# Goals


def _split(**given: float) -> Split:
    """Of 8,192 tokens that take 400 ms, 577 MB of them at 50 GB/s."""
    split = Split(
        ask_s=1e-4, compute_s=0.4, exposed_s=5e-4, admission_s=1e-4, step_s=0.03, tail_s=6e-4, push_s=0.39, writes=61,
        last_bytes=8_192 * 1_152, byte_count=8_192 * 61 * 1_152,
    )  # fmt: skip
    return replace(split, **given)


def _result(*, tokens: int = 8_192, auto: Split | None = None, both: bool = True) -> pd.Result:
    splits: dict[Way, Split] = {
        "auto": auto or _split(), "end": _split(exposed_s=0.0125), "none": _split(compute_s=0.396),
    }  # fmt: skip
    byte_count = splits["end"].byte_count
    point = pd.Point(tokens=tokens, byte_count=byte_count, roof_s=byte_count / 55e9, splits=splits, shown={})
    result = pd.Result(devices=("cuda:0", "cuda:1"), chunk_tokens=8_192, rounds=3)
    result.series.append(pd.Series(attention="mla", points=[point]))
    if both:
        result.both = (50.0, 52.0), (49.0, 48.0)
    return result


def test_goals_say_what_was_reached_of_what_was_aimed_at() -> None:
    goals = {goal.name.removeprefix("mla, 8,192 tokens: "): goal for goal in pd.goals(_result())}
    assert [goal.met for goal in goals.values()] == [True, True, True, True, True, False]
    assert goals["exposed transfer, of the serial transfer"].value == pytest.approx(0.04)
    assert goals["exposed transfer, of prefill's compute"].value == pytest.approx(0.00125)
    assert goals["last layer computed to READY"].aim == pytest.approx(0.5 + 8_192 * 1_152 / 55e6 / 0.95)
    assert goals["prefill slowed by the push"].value == pytest.approx(0.4 / 0.396 - 1)
    assert goals["card 1 while both push, of it alone"].value == pytest.approx(48 / 52)


def test_goals_that_are_missed_or_cannot_be_measured_say_so() -> None:
    late = _split(exposed_s=0.005, tail_s=0.005, compute_s=0.42)
    assert [goal.met for goal in pd.goals(_result(auto=late, both=False))] == [False, False, False, False, None, None]
    names = [goal.name for goal in pd.goals(_result(tokens=128))]
    assert len(names) == 4  # what is exposed of a short prompt is nobody's aim
    assert not any("exposed" in name for name in names)


# How it is told


def test_json_has_every_part_and_whether_each_goal_is_met(
    result: pd.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pd_tell.show(result, json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    auto = told["prompts"]["gqa"]["24"]["auto"]
    parts = [auto[f"{name}_ms"] for name in ("ask", "compute", "exposed", "admission", "step")]
    assert sum(parts) == pytest.approx(auto["ttft_ms"], rel=0.01)
    assert auto["exposed_of_ttft"] == pytest.approx(auto["exposed_ms"] / auto["ttft_ms"], rel=0.01)
    assert set(told["rows_alone"]["gqa"]) == {"1", "16", "24"}
    assert {"name", "value", "aim", "at_least", "unit", "met"} == set(told["goals"][0])
    assert told["goals"][-1]["met"] is None
    assert pd_tell.show(result, json=False) == 0
    assert "not measured here" in capsys.readouterr().out


def test_report_is_a_page_of_its_own_and_pictures_are_valid_xml(result: pd.Result, tmp_path: Path) -> None:
    page, timeline, throughput, spans = pd_report.write_report(result, tmp_path / "made" / "here")
    for path in (page, timeline, throughput):
        text = path.read_text()
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|src=|href=|@import|url\(", text), path.name
    for path in (timeline, throughput):
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert path.stat().st_size < 200_000
    titles = [element.text or "" for element in ElementTree.parse(timeline).iter("{http://www.w3.org/2000/svg}title")]
    for layer in range(LAYERS):
        assert any(title.startswith(f"compute: layer {layer}, ") and " ms from " in title for title in titles)
    assert any(title.startswith("push: ") and " MB, " in title for title in titles)
    kept = read(spans).spans
    assert {span.process for span in kept} == {"prefill", "decode"}
    assert len(kept) == sum(len(run.spans) for run in result.series[0].points[0].shown.values())


def test_the_report_has_its_own_shares_beside_published_ones() -> None:
    result = _result(auto=_split(exposed_s=0.0044))
    result.series[0].pushed[64] = pd.Pushed(4_500_000, 2e-3, 3e-3, 1e-3)
    told = re.sub(r"<[^>]+>", "|", pd_report._beside(result))
    assert "2.4 % (SGLang, Mooncake)" in told
    assert "8,192 tokens: 1.01 % (all at the end 2.82 %)" in told
    assert "8,192 tokens: -1.83 %" in told
    assert "4.5 MB (64): 50 %" in told


def test_a_request_that_swaps_in_is_drawn_with_its_first_step(tmp_path: Path) -> None:
    result = pd.measure(
        tokens=(80,), attentions=("mla",), rounds=1, engine_option=OPTIONS, hisparse=True, on=("cpu", "cpu")
    )  # longer than what the device holds
    run = result.series[0].points[0].shown["auto"]
    place, *swaps = run.of("decode", "swap-in")
    assert place.name == "place 80 tokens"
    steps = run.of("decode", "step")
    assert swaps
    assert all(any(step.begin_s <= span.begin_s and span.end_s <= step.end_s for step in steps) for span in swaps)
    _, picture, *_ = pd_report.write_report(result, tmp_path)
    words = [element.text or "" for element in ElementTree.parse(picture).iter()]
    assert "decode's first step, drawn larger" in words
    assert any(word.startswith("swap-in: layer 0, 1 request") for word in words)


def test_what_is_drawn_is_escaped_and_numbers_are_short() -> None:
    picture = svg.Picture(10, 10, named='a "b" & <c>')
    picture.text(1 / 3, 2.0, "<script>")
    picture.rect(0, 0, -1, 1, "ink", title="x < y")
    root = ElementTree.fromstring(picture.alone())
    assert root.attrib["aria-label"] == 'a "b" & <c>'
    assert {"<script>", "x < y"} <= {element.text for element in root.iter()}
    assert 'x="0.33"' in picture.inline()
    assert 'width="0"' in picture.inline()


def test_the_command_has_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}

    def measure(**given: object) -> pd.Result:
        seen.update(given)
        return _result()

    monkeypatch.setattr(pd, "measure", measure)
    arguments = ["bench", "pd", "--tokens=24", "--tokens=128", "--attention=gqa", "--rounds=2", "--json"]
    assert cli.main([*arguments, "--prefill-device=cuda:3", "--engine-option=graphs=0"]) == 0
    assert (seen["tokens"], seen["attentions"], seen["rounds"]) == ((24, 128), ("gqa",), 2)
    assert seen["engine_option"] == ("graphs=0",)
    assert isinstance(seen["on"], tuple)
    assert seen["on"][0] == "cuda:3"


def test_an_engine_that_reports_no_layers_is_named() -> None:
    run = Run(prompt=Prompt(1, 4, "auto"), asked_s=0.0, spans=(), same=None)
    with pytest.raises(WorldError, match=r"EngineConfig\.spans"):
        _ = run.split


def test_a_cards_clock_is_set_right_by_what_waited_for_it_but_not_by_more_than_it_may_be_out() -> None:
    spans = (
        Span(process="prefill", lane="compute", name="rows 0-16", layer=0, begin_s=1.0, end_s=1.002),
        Span(process="prefill", lane="compute", name="rows 0-16", layer=1, begin_s=1.002, end_s=1.004),
        Span(process="prefill", lane="push", name="rows 0-16, layers 0-1", layer=0, begin_s=1.001, end_s=1.002),
        Span(process="prefill", lane="push", name="rows 0-16, layers 1-2", layer=1, begin_s=1.0045, end_s=1.005),
    )
    shifted = pd_pair._set_right(spans)
    assert [span.end_s for span in shifted] == pytest.approx([1.001, 1.003, 1.002, 1.005])
    assert pd_pair._set_right(shifted) == shifted
    with pytest.raises(WorldError, match=r"before they were computed"):
        pd_pair._set_right((*spans[:2], replace_span(spans[3], begin_s=1.0005)))


def replace_span(span: Span, **given: float) -> Span:
    return msgspec.structs.replace(span, **given)
