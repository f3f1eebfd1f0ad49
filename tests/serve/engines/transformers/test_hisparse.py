"""HiSparse requests of checkpoints with a sparse index: the tokens of transformers, whatever the device holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

from pdtransfer.errors import ConfigError
from pdtransfer.limits import Limits
from pdtransfer.serve.engine_api import Broken, Finished, HiSparse
from pdtransfer.serve.engines.transformers import create, decode
from pdtransfer.serve.engines.transformers.factory import generate_many
from pdtransfer.serve.engines.transformers.steps import DecodeSteps
from pdtransfer.serve.sampling import tokens_digest
from pdtransfer.wire import Sampling
from tests.serve.engines.transformers.checkpoint_ranks import generated_by_ranks, workers
from tests.serve.engines.transformers.replays import Replays
from tests.support import checkpoints
from tests.support.checkpoints import TOP_K, Handoff, generated, prompts, request
from tests.support.fleets import LIMITS, Answer, Site, running
from tests.support.page_table import WatchedMemory, touched_at_picks
from tests.support.waiting import Running, standing

HOT = TOP_K + 8
TOKENS = 16
# Shorter than the places on the device with all that is generated, shorter at first, equal, and several times longer.
LENGTHS = (1, 9, HOT - 3, HOT, 70, 150)


def hisparse(slots: int = 2 * (HOT + 1), **more: Any) -> HiSparse:
    """By default places for two long requests: the others wait, and those that run are retracted for them."""
    limits = Limits(hisparse_wait_steps=2, hisparse_quantum_steps=3)
    return HiSparse(device_slots=slots, hot_tokens=HOT, dense_slots=256, limits=limits, **more)


@pytest.fixture(scope="module", params=[pytest.param("deepseek_v32", marks=pytest.mark.full), "glm_moe_dsa"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("checkpoint") / request.param)


def handoff(directory: Path, hot: HiSparse | None = None, **options: str) -> Handoff:
    settings = {"hisparse": hot or hisparse(), "page_size": 16, "host_layout": "page_first", "batch_max": 5}
    return Handoff.of(directory, prefill={}, decode=settings, **options)


def test_hot_tokens_generate_those_of_transformers_beside_dense_requests(directory: Path) -> None:
    made = handoff(directory)
    rooms = [
        request(2 * index + (not sparse), prompt, TOKENS, sparse=sparse, ignore_eos=True)
        for index, prompt in enumerate(prompts(2, LENGTHS))
        for sparse in (True, False)
        if sparse or index in (0, 4)
    ]
    for room in rooms:
        made.land(room, made.computed(room))
        for event in made.decode.step():
            made.note(event)
    made.run()
    for room in rooms:
        expected = generated(directory, room.prompt, TOKENS, ignore_eos=True)
        assert made.tokens[room.room] == expected, room
    figures = made.decode.figures
    assert figures.hits > 0
    assert figures.misses > 0
    assert figures.retracts > 0
    assert figures.admission_bytes == figures.preloaded_bytes > 0
    assert (figures.running, figures.waiting) == (0, 0)


def test_nothing_of_the_arena_is_read_before_the_first_pick(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = create(checkpoints.config(directory, "prefill"))
    theirs: Any = create(checkpoints.config(directory, "decode", hisparse=hisparse(), page_size=16))
    arena, hbm = WatchedMemory(theirs.description.memory_bytes), np.full(theirs.description.hbm_bytes, 0xFF, np.uint8)
    arena.bytes[:] = 0xFF
    theirs.attach(arena.bytes.data, hbm=hbm.data)
    made = Handoff.between(ours, theirs, arena.bytes, hbm)
    one = request(0, prompts(7, (150,))[0], TOKENS, sparse=True, ignore_eos=True)
    aux = made.computed(one)
    made.copy(one)
    arena.forget()
    touched = touched_at_picks(arena, monkeypatch)
    theirs.admit(one, made.slots[one.room], aux)
    made.run()
    assert touched[0] == 0 < touched[1], "by what the first pick has brought"
    assert made.tokens[0] == generated(directory, one.prompt, TOKENS, ignore_eos=True)


def test_a_request_longer_than_its_places_loses_tokens_and_gets_them_again(directory: Path) -> None:
    made = handoff(directory, hisparse(slots=HOT + 1))
    one = request(0, prompts(7, (150,))[0], 2 * TOKENS, sparse=True, ignore_eos=True)
    made.land(one, made.computed(one))
    made.run()
    assert made.tokens[0] == generated(directory, one.prompt, 2 * TOKENS, ignore_eos=True)
    figures = made.decode.figures
    groups = len(
        {
            plane.layer
            for component in made.decode.description.components
            if component.name == "index"
            for plane in component.layout.planes
        }
    )
    assert figures.misses > groups * HOT  # more than there are places: tokens were evicted for others
    assert figures.hits > 0
    assert (figures.retracts, figures.preloaded_bytes) == (0, 0)


def test_replayed_steps_that_are_filled_up_have_the_same_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: three HiSparse requests run at once, in steps of four, and a request takes another one's place."""
    replays = Replays()
    replays.install(monkeypatch)
    monkeypatch.setattr(decode, "DecodeSteps", lambda *given, **more: DecodeSteps(*given, **more | {"graphs": True}))
    made = handoff(directory, hisparse(slots=3 * (HOT + 1)))
    rooms = [
        request(2 * index + (not sparse), prompt, 2 * TOKENS, sparse=sparse, ignore_eos=True)
        for index, prompt in enumerate(prompts(2, (40, HOT, 70, 150)))
        for sparse in (True, False)
        if sparse or index == 2
    ]
    for room in rooms:
        made.land(room, made.computed(room))
    made.run()
    for room in rooms:
        assert made.tokens[room.room] == generated(directory, room.prompt, 2 * TOKENS, ignore_eos=True), room
    assert replays.captured >= 2  # of HiSparse requests, and of dense ones
    assert replays.replayed > 2 * TOKENS
    assert made.decode.figures.retracts > 0


@pytest.mark.slow
def test_ranks_run_the_same_requests_and_generate_the_tokens_of_transformers(directory: Path) -> None:
    sources = workers(directory, "prefill", 1)
    targets = workers(directory, "decode", 2, hisparse=hisparse(), page_size=1)
    rooms = [
        request(index, prompt, 8, sparse=index != 1) for index, prompt in enumerate(prompts(8, (9, 40, 70, 100, 120)))
    ]
    for tokens in generated_by_ranks(sources, targets, rooms):
        assert tokens == {room.room: generated(directory, room.prompt, 8) for room in rooms}
    assert {target.figures.retracts > 0 for target in targets} == {True, False}  # they count on the leader


def test_with_digests_every_bit_is_that_of_requests_with_all_tokens_on_the_device(directory: Path) -> None:
    made = handoff(directory, digests="true")
    rooms = [request(index, prompt, 8, sparse=True) for index, prompt in enumerate(prompts(3, LENGTHS))]
    config = checkpoints.config(directory, options={"digests": "true"})
    expected = generate_many(config, [(room.prompt, Sampling(max_tokens=8)) for room in rooms])
    for room in rooms:
        made.land(room, made.computed(room))
    made.run()
    for room, alone in zip(rooms, expected, strict=True):
        end = made.ends[room.room]
        assert isinstance(end, Finished)
        assert (end.tokens_digest, end.logits_digest, end.kv_digest) == (
            alone.tokens_digest, alone.logits_digest, alone.kv_digest
        )  # fmt: skip


def test_the_arena_alone_has_all_rows_and_a_step_reads_what_it_brings(directory: Path) -> None:
    """Of a long request, rows that no step may read before they are brought, and whose loss breaks it."""
    made = handoff(directory)
    long, other = (request(at, prompts(4, (150,))[0], 8, sparse=True) for at in (1, 2))
    for one in (long, other):
        made.land(one, made.computed(one))
    made.arena[np.concatenate(made.addresses(1, 150))] = 0xFF
    made.run()
    assert isinstance(made.ends[1], Broken)
    assert "not finite" in made.ends[1].detail
    assert made.tokens[2] == generated(directory, other.prompt, 8)


def test_a_cancelled_request_gives_all_back_and_changes_no_other(directory: Path) -> None:
    made = handoff(directory)
    rooms = [request(index, prompt, 8, sparse=True) for index, prompt in enumerate(prompts(5, (150, 100, 70, 40)))]
    for one in rooms:
        made.land(one, made.computed(one))
    for event in made.decode.step():
        made.note(event)
    for room in (0, 3):  # one that runs, and one that waits
        made.decode.cancel(room)
        made.arena[np.concatenate(made.addresses(room))] = 0xFF
    made.run()
    assert made.ends.keys() == {1, 2}
    for room in (1, 2):
        assert made.tokens[room] == generated(directory, rooms[room].prompt, 8)
    assert made.decode.idle


@pytest.fixture(scope="module")
def site(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    """Real daemons. The device of decode has places for two long requests."""
    one = {"model": str(directory), "engine_option": ("threads=1",), "page_size": 16}
    sparse = one | {
        "enable_hisparse": True, "hot_tokens": HOT, "device_slots": 2 * (HOT + 1), "dense_slots": 1_024,
        "host_layout": "layer_first", "verify": True,
        "limits": replace(LIMITS, hisparse_wait_steps=1, hisparse_quantum_steps=2),
    }  # fmt: skip
    prefill = one | {"chunk_tokens": 32, "host_layout": "page_first"}
    yield from standing(running(tmp_path_factory.mktemp("f"), prefills=[prefill], decodes=[sparse]))


def answered(answer: Answer, directory: Path, prompt: NDArray[np.int64], sparse: bool) -> bool:
    """Whether it has the tokens of transformers, and was decoded as asked."""
    expected = tokens_digest(generated(directory, prompt, TOKENS, ignore_eos=True)).hex()
    return (answer.status, answer.facts["tokens_digest"], answer.facts["enable_hisparse"]) == (200, expected, sparse)


@pytest.mark.full
async def test_daemons_answer_both_kinds_of_requests_with_the_tokens_of_transformers(
    site: Site, directory: Path
) -> None:
    asked = [(prompt, kind) for prompt in prompts(6, LENGTHS) for kind in (True, False)]
    answers = await asyncio.gather(
        *(site.complete(prompt.tolist(), max_tokens=TOKENS, enable_hisparse=kind) for prompt, kind in asked)
    )
    for answer, (prompt, kind) in zip(answers, asked, strict=True):
        assert answered(answer, directory, prompt, kind), answer
    await site.settled()
    metrics = await site.metrics(site.decode)
    # Three long requests fill their places in each group of layers, of which there are at least two.
    assert metrics["pdtransfer_hot_misses_total"] > 3 * 2 * HOT
    assert metrics["pdtransfer_admission_bytes_total"] == metrics["pdtransfer_preloaded_bytes_total"] > 0
    assert (metrics["pdtransfer_hisparse_running"], metrics["pdtransfer_grants_mismatched_total"]) == (0, 0)


async def test_a_prefix_that_is_cached_crosses_once(site: Site, directory: Path) -> None:
    first, second = prompts(9, (150, 40))
    longer = np.concatenate((first, second))
    for prompt in (first, longer):
        answer = await site.complete(prompt.tolist(), max_tokens=TOKENS, enable_hisparse=True)
        assert answered(answer, directory, prompt, True), answer
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    await site.settled()


def refusal(directory: Path, hot: HiSparse, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        create(checkpoints.config(directory, "decode", hisparse=hot, options=options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_can_not_be_kept_hot_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    for family in ("llama", "deepseek_v3"):
        made = checkpoints.make(family, tmp_path / family)
        assert "enable_hisparse: the model has no sparse index" in refusal(made, hisparse())
    small = HiSparse(device_slots=99, hot_tokens=TOP_K - 1, dense_slots=16)
    assert f"hot_tokens = {TOP_K - 1}: must be at least" in refusal(directory, small)
    assert "device_slots = 32: must be above hot_tokens" in refusal(directory, hisparse(slots=HOT))
    assert "kv_memory = dram: with enable_hisparse" in refusal(directory, hisparse(), kv_memory="dram")


def test_a_request_that_could_not_run_alone_is_refused_with_both_values(directory: Path) -> None:
    made = handoff(directory)
    for sparse, figures in ((True, r"1030 .*1024|1030 tokens.*1024"), (False, "1030 tokens, the arena has 256 slots")):
        with pytest.raises(ValueError, match=figures):
            made.decode.check(request(1, np.full(1_022, 5), 8, sparse=sparse))
    plain = Handoff.of(directory, prefill={}, decode={})
    with pytest.raises(ValueError, match="enable_hisparse"):
        plain.decode.check(request(1, np.full(9, 5), 8, sparse=True))
