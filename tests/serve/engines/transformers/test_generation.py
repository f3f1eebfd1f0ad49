"""Checkpoints of each family generate what transformers' own `generate` does: in one process, and over a hand-off."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

import torch
from numpy.typing import NDArray

from pdtransfer.layout.layout import slots_of_rows
from pdtransfer.serve.engine_api import Broken, Computed, Finished, Prefilled
from pdtransfer.serve.engines.transformers.factory import generate_many
from pdtransfer.serve.engines.transformers.steps import first_highest
from pdtransfer.wire import Sampling
from tests.support import checkpoints
from tests.support.checkpoints import FAMILIES, WINDOW, Handoff, generated, prompts, request

TOKENS = 30
# Two runs in bfloat16 that add up in another order round as much as each other, and neither is the reference: float32
# is. Twice the error of transformers' own run is one bit of bfloat16's eight; a wrong row, or rows of fewer bits, cost
# several. Of each token's error the median, since in either run a token near a tie may get other experts, on any
# processor.
BFLOAT16_ERROR_MAX = 2.0


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: root / family for family in FAMILIES}


def made(directories: dict[str, Path], family: str) -> Path:
    where = directories[family]
    return where if where.exists() else checkpoints.make(family, where)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("host_layout", "page_size"), [pytest.param("page_first", 1, marks=pytest.mark.full), ("page_head", 16)]
)
def test_chunks_and_batches_of_unequal_lengths_generate_the_tokens_of_transformers(
    directories: dict[str, Path], family: str, host_layout: str, page_size: int
) -> None:
    directory = made(directories, family)
    config = checkpoints.config(directory, host_layout=host_layout, page_size=page_size)
    sampling = Sampling(max_tokens=TOKENS)
    found = generate_many(config, [(prompt, sampling) for prompt in prompts()])
    expected = [generated(directory, prompt, TOKENS) for prompt in prompts()]
    assert [list(each.tokens) for each in found] == expected
    assert len({token for tokens in expected for token in tokens}) > TOKENS  # not one token over and over
    assert {len(tokens) == TOKENS for tokens in expected} >= {True}
    ends = ["length" if len(tokens) == TOKENS and tokens[-1] != checkpoints.EOS else "stop" for tokens in expected]
    assert [each.reason for each in found] == ends


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "deepseek_v32"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(
            {"host_layout": "layer_first", "page_size": 16},
            {"host_layout": "page_first", "page_size": 1},
            marks=pytest.mark.full,
        ),
        ({"host_layout": "page_first_direct", "page_size": 1}, {"host_layout": "page_head", "page_size": 8}),
    ],
)
def test_rows_that_landed_in_another_layout_generate_the_same(
    directories: dict[str, Path], family: str, prefill: dict[str, object], decode: dict[str, object]
) -> None:
    directory = made(directories, family)
    handoff = Handoff.of(directory, prefill=prefill, decode=decode, digests="true", layers_per_cell="1")
    one_process = generate_many(
        checkpoints.config(directory, options={"digests": "true"}),
        [(prompt, Sampling(max_tokens=9)) for prompt in prompts()],
    )
    requests = [request(room, prompt, max_tokens=9) for room, prompt in enumerate(prompts())]
    for each in requests:
        handoff.land(each, handoff.computed(each))
    handoff.run()
    for each, alone in zip(requests, one_process, strict=True):
        assert tuple(handoff.tokens[each.room]) == alone.tokens
        end = handoff.ends[each.room]
        assert isinstance(end, Finished)
        assert (end.logits_digest, end.kv_digest) == (alone.logits_digest, alone.kv_digest)
        assert len(end.kv_digest) == 16


def test_kv_in_the_memory_of_a_device_generates_the_same(directories: dict[str, Path]) -> None:
    directory = made(directories, "gemma3")
    handoff = Handoff.of(directory, prefill={}, decode={}, kv_memory="hbm")
    assert len(handoff.arena) == 0
    one = request(1, prompts()[-1], max_tokens=TOKENS)
    handoff.land(one, handoff.computed(one))
    handoff.run()
    assert handoff.tokens[1] == generated(directory, one.prompt, TOKENS)


def bfloat16_errors(directory: Path, prompt: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the logits of eight tokens in bfloat16 are from those in float32, of their size: of a hand-off, and of
    transformers' own model over the same tokens."""
    handoff = Handoff.of(directory, prefill={}, decode={}, dtype="bfloat16")
    seen: list[torch.Tensor] = []
    model = handoff.decode.model._checkpoint.model
    model.register_forward_hook(lambda *given: seen.append(given[-1].logits[0, -1].float()))
    one = request(1, prompt, max_tokens=9, ignore_eos=True)
    handoff.land(one, handoff.computed(one))
    handoff.run()
    whole = torch.as_tensor(np.concatenate((prompt, handoff.tokens[1]))[None])
    with torch.inference_mode():
        exact, rounded = (
            checkpoints.model(directory, dtype)(whole).logits[0, len(prompt) : len(prompt) + 8].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    found = torch.stack(seen)
    assert found.shape == exact.shape
    ours, theirs = ((logits - exact).norm(dim=-1) / exact.norm(dim=-1) for logits in (found, rounded))
    return ours, theirs


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_in_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(
    directories: dict[str, Path], family: str
) -> None:
    directory = made(directories, family)
    errors = [bfloat16_errors(directory, prompts(seed)[-1]) for seed in (1, 2, 3)]
    ours, theirs = (float(torch.cat(each).median()) for each in zip(*errors, strict=True))
    assert 0 < ours < BFLOAT16_ERROR_MAX * theirs


def test_of_equal_logits_the_first_is_picked_whoever_is_in_the_batch(directories: dict[str, Path]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, -1.0], [float("-inf"), 1.0, 1.0, 0.0]])
    assert first_highest(logits).tolist() == [1, 0, 1]
    config = checkpoints.config(made(directories, "qwen3"))
    greedy, drawn = Sampling(max_tokens=8), Sampling(max_tokens=8, temperature=0.7, top_p=0.9, seed=5)
    alone = [generate_many(config, [(prompts()[4], each)])[0].tokens for each in (greedy, drawn)]
    together = generate_many(config, [(prompts()[4], greedy), (prompts()[4], drawn), (prompts()[1], drawn)])
    assert [each.tokens for each in together[:2]] == alone
    assert alone[0] != alone[1]


def test_every_end_of_sequence_of_the_generation_config_ends_a_request(tmp_path: Path) -> None:
    directory = checkpoints.make("llama", tmp_path / "m")
    first = generated(directory, prompts()[-1], 6)
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [511, first[3]]}))
    config = checkpoints.config(directory)
    stopped, ignoring = generate_many(
        config, [(prompts()[-1], Sampling(max_tokens=6, ignore_eos=ignore)) for ignore in (False, True)]
    )
    assert (list(stopped.tokens), stopped.reason) == (first[: first.index(first[3]) + 1], "stop")
    assert (list(ignoring.tokens), ignoring.reason) == (first, "length")


def test_a_room_with_rows_that_are_not_finite_breaks_alone(directories: dict[str, Path]) -> None:
    directory = made(directories, "qwen3")
    handoff = Handoff.of(directory, prefill={}, decode={})
    long, short = request(1, prompts()[-1]), request(2, prompts()[1])
    for each in (long, short):
        handoff.land(each, handoff.computed(each))
    layout = handoff.decode.description.components[0].layout
    for number, plane in enumerate(layout.planes):
        at = layout.address(number, handoff.slots[1]["kv"][3:4])[0]
        handoff.arena[at : at + plane.row_bytes] = 0xFF
    handoff.run()
    assert isinstance(handoff.ends[1], Broken)
    assert "not finite" in handoff.ends[1].detail
    assert handoff.tokens[2] == generated(directory, short.prompt, 8)


def test_rows_that_rooms_share_are_not_written(directories: dict[str, Path]) -> None:
    directory = made(directories, "gemma3")
    handoff = Handoff.of(directory, prefill={}, decode={"page_size": 1})
    first = request(1, prompts()[-1], max_tokens=TOKENS)
    handoff.land(first, handoff.computed(first))
    shared = {"kv": handoff.slots[1]["kv"][:48]}
    layout = next(component for component in handoff.decode.description.components if component.name == "kv").layout
    rows = [layout.address(number, shared["kv"]) for number in range(len(layout.planes))]
    before = [handoff.arena[row[:, None] + np.arange(64)].copy() for row in rows]
    second = request(2, np.concatenate((first.prompt[:48], prompts(5, (9,))[0])), max_tokens=TOKENS)
    aux = handoff.computed(second)
    handoff.cells[2] = [cell for cell in handoff.cells[2] if cell.component != "kv" or cell.rows[1] > 48]
    handoff.land(second, aux, shared)
    handoff.run()
    for each in (first, second):
        assert handoff.tokens[each.room] == generated(directory, each.prompt, TOKENS)
    after = [handoff.arena[row[:, None] + np.arange(64)] for row in rows]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_a_windows_rows_alone_stay_of_layers_that_have_one(directories: dict[str, Path]) -> None:
    handoff = Handoff.of(made(directories, "gemma3"), prefill={}, decode={"batch_max": 2}, window_slots="0")
    window = next(component for component in handoff.decode.description.components if component.name == "window")
    assert window.rows(10_000) == WINDOW
    assert window.layout.slots == 2 * 2 * WINDOW
    one = request(1, prompts()[-1])
    handoff.computed(one)
    rows = [cell.rows for cell in handoff.cells[1] if cell.component == "window"]
    assert (rows[0][0], rows[-1][1]) == (0, WINDOW)
    assert all(before[1] == after[0] for before, after in pairwise(rows))


def test_an_engine_computes_with_its_threads_on_whatever_thread_it_is_called(directories: dict[str, Path]) -> None:
    prefill = Handoff.of(made(directories, "llama"), prefill={}, decode={}).prefill
    found: list[int] = []

    def compute() -> None:
        torch.set_num_threads(2)
        assert prefill.admit(request(1, prompts()[0]))  # what it times begins here, on a GPU by an event
        found.append(torch.get_num_threads())
        torch.set_num_threads(2)
        prefill.step()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [1, 1]


def test_a_layers_rows_are_there_when_its_cell_is_reported(directories: dict[str, Path]) -> None:
    """As on a GPU, but that the GPU would be behind: the next layer has not begun."""
    engine = Handoff.of(made(directories, "llama"), prefill={}, decode={}, layers_per_cell="1").prefill
    (component,) = engine.description.components
    pool = np.frombuffer(engine.pool.view, np.uint8)
    reported: list[tuple[Computed, bytes]] = []

    def rows(cell: Computed) -> bytes:
        held = slots_of_rows(cell.pages, component.layout.page_size, cell.rows, skip=cell.skip)
        taken = np.zeros_like(pool)
        checkpoints.move((pool, component.layout), held, (taken, component.layout), held, cell.layers)
        assert taken.any()
        return taken.tobytes()

    engine.report = lambda events: reported.extend((event, rows(event)) for event in events)
    assert engine.admit(request(1, prompts()[0], 4))
    returned = []
    while not engine.idle:
        returned += engine.step()
    assert [type(each) for each in returned] == [Prefilled]
    layers = len({plane.layer for plane in component.layout.planes})
    assert [cell.layers[0] for cell, _ in reported[:layers]] == list(range(layers))
    assert reported[-1][0].rows[1] == len(prompts()[0])
    assert all(rows(cell) == then for cell, then in reported)
