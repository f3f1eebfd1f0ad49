"""bench pd on the CPU, with models too small for its figures: the spans hold together, and it prints them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pdtransfer_lab.bench import pd, pd_rank
from pdtransfer_lab.bench.pd import Pair, Run
from pdtransfer_lab.bench.pd_rank import Prompt, Way

from pdtransfer.errors import WorldError
from pdtransfer.layout.layout import Layout
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.serve.commands import cli
from pdtransfer.serve.tracing.spans import TimedSpan

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


@pytest.mark.full
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


@pytest.mark.full
def test_rows_leave_by_layer_or_at_the_end_as_they_were_asked_to(runs: dict[Way, Run]) -> None:
    by_layer, at_end = (runs[way].of("prefill", "push") for way in ("layers", "end"))
    assert len(by_layer) == 2 * LAYERS
    assert len(at_end) == 1
    assert at_end[0].begin_s >= max(span.end_s for span in runs["end"].of("prefill", "compute"))
    assert runs["none"].of("prefill", "push") == []


@pytest.mark.full
def test_the_parts_of_a_prompts_time_are_its_time(runs: dict[Way, Run]) -> None:
    for way in ("auto", "layers", "end"):
        run, split = runs[way], runs[way].split
        parts = (split.ask_s, split.compute_s, split.exposed_s, split.admission_s, split.step_s)
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(split.ttft_s)
        assert split.ttft_s == pytest.approx(run.of("decode", "step")[0].end_s - run.asked_s)
        assert split.tail_s >= split.exposed_s


@pytest.mark.full
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


def sums_of(layout: Layout, memory: np.ndarray, *slots: np.ndarray) -> pd_rank.Sums:
    sums: pd_rank.Sums = {}
    for slot in slots:
        pd_rank.add_rows(sums, "kv", layout, memory.ctypes.data, slot)
    return sums


def test_sums_see_a_swapped_row_a_swapped_word_and_another_layer(pool: tuple[np.ndarray, np.ndarray]) -> None:
    memory, slots = pool
    sizes = {"kinds": ("latent",), "heads": 1, "head_bytes": 48, "dtype": "bfloat16", "slots": 64, "page_size": 1}
    layout = host_layout("layer_first", layers=3, **sizes)
    sums = sums_of(layout, memory, slots)
    assert len(sums) == len(set(sums.values())) == 3
    assert sums_of(layout, memory, slots[[1, 0, 2, 3]]) != sums
    assert sums_of(layout, memory, slots[:2], slots[2:]) == sums
    # The same rows in another layout.
    other = host_layout("page_first", layers=3, **sizes)
    moved = np.zeros_like(memory)
    for ours, theirs in zip(layout.planes, other.planes, strict=True):
        for slot in range(64):
            moved[theirs.base + slot * theirs.row_stride :][:48] = memory[ours.base + slot * ours.row_stride :][:48]
    assert sums_of(other, moved, slots) == sums
    words = memory[9 * 48 : 9 * 48 + 16].copy()
    memory[9 * 48 : 9 * 48 + 16] = np.concatenate((words[8:], words[:8]))
    assert sums_of(layout, memory, slots) != sums


# How it is shown


def test_json_has_every_part(result: pd.Result, capsys: pytest.CaptureFixture[str]) -> None:
    assert pd.show(result, json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    shown = json.loads(line)
    auto = shown["prompts"]["gqa"]["24"]["auto"]
    parts = [auto[f"{name}_ms"] for name in ("ask", "compute", "exposed", "admission", "step")]
    assert sum(parts) == pytest.approx(auto["ttft_ms"], rel=0.01)
    assert auto["exposed_of_ttft"] == pytest.approx(auto["exposed_ms"] / auto["ttft_ms"], rel=0.01)
    assert set(shown["rows_alone"]["gqa"]) == {"1", "16", "24"}
    assert shown["method"].startswith("Prompts of each size")
    splits, rates = shown["tables"]
    assert [row[:2] for row in splits[1:]] == [["gqa 24", way] for way in pd.WAYS]
    assert [len(row) for row in (*splits, *rates)] == [len(splits[0])] * len(splits) + [len(rates[0])] * len(rates)


@pytest.mark.full
def test_a_person_reads_a_row_for_each_prompt_and_for_rows_alone(
    result: pd.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pd.show(result, json=False) == 0
    out = capsys.readouterr().out
    assert "prefill on cpu, decode on cpu; ms, medians of 1" in out
    for words in (["gqa", "24", "auto"], ["gqa", "24", "none"], ["gqa", "16"]):
        assert any(line.split()[: len(words)] == words for line in out.splitlines()), words


def test_the_command_has_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}

    def measure(**given: object) -> pd.Result:
        seen.update(given)
        return pd.Result(devices=("cpu", "cpu"), chunk_tokens=1, rounds=1)

    monkeypatch.setattr(pd, "measure", measure)
    arguments = ["bench", "pd", "--tokens=24", "--tokens=128", "--attention=gqa", "--rounds=2", "--json"]
    assert cli.main([*arguments, "--prefill-device=cuda:3", "--engine-option=graphs=0"]) == 0
    assert (seen["tokens"], seen["attentions"], seen["rounds"]) == ((24, 128), ("gqa",), 2)
    assert seen["engine_option"] == ("graphs=0",)
    assert seen["on"] == ("cuda:3", "")


def test_devices_that_are_not_named_are_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd, "devices", lambda: ("cuda:0", "cuda:1"))
    result = pd.measure(attentions=(), on=("cuda:3", ""))
    assert result.devices == ("cuda:3", "cuda:1")


def test_an_engine_that_reports_no_layers_is_named() -> None:
    run = Run(prompt=Prompt(1, 4, "auto"), asked_s=0.0, spans=(), same=None)
    with pytest.raises(WorldError, match=r"EngineConfig\.spans"):
        _ = run.split


def test_a_cards_clock_is_set_right_by_what_waited_for_it_but_not_by_more_than_it_may_be_out() -> None:
    spans = (
        TimedSpan(process="prefill", lane="compute", name="rows 0-16", layer=0, begin_s=1.0, end_s=1.002),
        TimedSpan(process="prefill", lane="compute", name="rows 0-16", layer=1, begin_s=1.002, end_s=1.004),
        TimedSpan(process="prefill", lane="push", name="rows 0-16, layers 0-1", layer=0, begin_s=1.001, end_s=1.002),
        TimedSpan(process="prefill", lane="push", name="rows 0-16, layers 1-2", layer=1, begin_s=1.0045, end_s=1.005),
    )
    shifted = pd._set_right(spans)
    assert [span.end_s for span in shifted] == pytest.approx([1.001, 1.003, 1.002, 1.005])
    assert pd._set_right(shifted) == shifted
    with pytest.raises(WorldError, match=r"before they were computed"):
        pd._set_right((*spans[:2], msgspec.structs.replace(spans[3], begin_s=1.0005)))
