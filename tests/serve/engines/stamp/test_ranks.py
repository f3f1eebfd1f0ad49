"""Ranks of one worker: the tokens of one process, however heads and layers are divided, dense and with a hot pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdtransfer.errors import ConfigError
from pdtransfer.limits import Limits
from pdtransfer.serve.engine_api import Broken, EngineConfig, HiSparse
from pdtransfer.serve.engines.generation import Generation
from pdtransfer.serve.engines.stamp.factory import create, generate_many
from pdtransfer.wire import Ranks, Sampling
from tests.support.engine_group import Threads, carry, decodes, generate, prefills, together
from tests.support.engine_pair import config, prompts, request

LENGTHS = (1, 63, 300, 129)
TOKENS = 5
HOT, TOP = 48, 16


def expected(options: dict[str, str], asked: Any, max_tokens: int = TOKENS) -> list[Generation]:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return generate_many(config(options=options, slots=4_096), [(prompt, sampling) for prompt in asked])


@pytest.mark.parametrize(
    ("options", "prefill_tp", "prefill_pp", "decode_tp"),
    [
        ({"layers": "2"}, 2, 1, 1),
        ({"layers": "2"}, 1, 1, 2),
        ({"layers": "3"}, 2, 2, 1),
        ({"layers": "2", "kv_heads": "4"}, 2, 1, 2),
        ({"layers": "3", "kv_heads": "4"}, 1, 3, 1),
        ({"layers": "2", "kv_heads": "2"}, 4, 1, 1),
        ({"layers": "2", "kv_heads": "1"}, 2, 2, 4),
        ({"layers": "2", "kv_heads": "8"}, 4, 1, 2),
        # Layers 0 and 2 lead a group: of three stages the second keeps no index.
        ({"layers": "4", "top_k": "16"}, 1, 2, 2),
        ({"layers": "4", "kv_heads": "4", "top_k": "16"}, 2, 3, 2),
    ],
)
def test_groups_generate_what_one_process_generates(
    options: dict[str, str], prefill_tp: int, prefill_pp: int, decode_tp: int
) -> None:
    asked = prompts(7, LENGTHS)
    sources = prefills(prefill_tp, prefill_pp, factory=create, options=options, chunk_tokens=100)
    targets = decodes(decode_tp, factory=create, options=options)
    found = generate(sources, targets, asked, max_tokens=TOKENS)
    for each, one in zip(found, expected(options, asked), strict=True):
        assert each == [one] * decode_tp


@pytest.mark.parametrize("options", [{"layers": "2"}, {"layers": "2", "kv_heads": "4"}], ids=["mla", "gqa"])
def test_ranks_compute_the_rests_of_two_turns_beside_one_another(options: dict[str, str]) -> None:
    """Each writes the rows of its own heads, behind those of the turn before."""
    targets = decodes(2, factory=create, options=options, chunk_tokens=7)
    first, *others = prompts(4, (40, 30, 20))
    begins = request(1, first, max_tokens=10)
    for target in targets:
        target.slots[1] = target.take(0, begins)
        target.engine.admit_rest(begins, target.held(1), 0)
    together([target.run for target in targets])
    done = np.concatenate((first, targets[0].tokens[1][:-1]))
    turns = [
        request(room, np.concatenate((done, further)), max_tokens=8) for room, further in enumerate(others, start=2)
    ]
    for target in targets:
        for turn in turns:
            own = target.take(0, turn)[len(done) :]
            target.slots[turn.room] = np.concatenate((target.slots[1][: len(done)], own))
            target.engine.admit_rest(turn, target.held(turn.room), len(done))
    together([target.run for target in targets])
    for asked in (begins, *turns):
        (whole,) = expected(options, [asked.prompt], asked.sampling.max_tokens)
        assert [target.outcome(asked.room) for target in targets] == [whole] * 2


def test_stages_offer_their_layers_in_cells_of_that_many() -> None:
    options = {"layers": "5", "layers_per_cell": "1"}
    sources = prefills(1, 2, factory=create, options=options, chunk_tokens=100)
    found = generate(sources, decodes(1, factory=create, options=options), prompts(7, LENGTHS), max_tokens=TOKENS)
    assert [one for (one,) in found] == expected(options, prompts(7, LENGTHS))
    assert [cell.layers for cell in sources[0].cells[0]] == [(0, 1), (1, 2)]
    assert [cell.layers for cell in sources[1].cells[0]] == [(2, 3), (3, 4), (4, 5)]


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_that_differ_in_one_bit_spoil_the_tokens(rank: int) -> None:
    sources, targets = prefills(1, factory=create), decodes(2, factory=create)
    asked = prompts(7, LENGTHS)[2:3]
    one = request(0, asked[0], max_tokens=TOKENS)
    sources[0].run(one)
    for target in targets:
        target.admit(one, sources[0])
    row = targets[rank].layout.address(0, int(targets[rank].slots[0][3]))
    targets[rank].memory.view(np.uint32)[row // 4] ^= 1
    together([target.run for target in targets])
    (wanted,) = expected({"layers": "2"}, asked)
    assert targets[0].outcome(0) == targets[1].outcome(0)
    assert targets[0].outcome(0).tokens != wanted.tokens


def test_a_wrong_byte_of_one_rank_is_named_by_all() -> None:
    options = {"layers": "2", "kv_heads": "2", "check": "1"}
    sources, targets = prefills(1, factory=create, options=options), decodes(2, factory=create, options=options)
    one = request(0, prompts(7, LENGTHS)[2], max_tokens=TOKENS)
    sources[0].run(one)
    for target in targets:
        carry(one, sources, target)
        target.engine.admit(one, target.held(0), sources[0].aux[0])
    row = targets[1].layout.address(0, int(targets[1].slots[0][3]))
    targets[1].memory.view(np.uint32)[row // 4] ^= 1
    together([target.run for target in targets])
    for target in targets:
        end = target.ends[0]
        assert isinstance(end, Broken)
        assert "component 'kv', row 3, layer 0, rank 1" in end.detail


@pytest.mark.parametrize(
    ("options", "ranks", "layers", "heads", "replica"),
    [
        ({}, Ranks(1, 2), (0, 4), (0, 1), (1, 2)),
        ({"kv_heads": "4"}, Ranks(1, 2), (0, 4), (2, 4), (0, 1)),
        ({"kv_heads": "2"}, Ranks(3, 4), (0, 4), (1, 2), (1, 2)),
        ({"kv_heads": "4", "layers": "5"}, Ranks(0, 1, 1, 2), (2, 5), (0, 4), (0, 1)),
    ],
)
def test_a_rank_describes_the_layers_and_heads_that_it_keeps(
    options: dict[str, str], ranks: Ranks, layers: Any, heads: Any, replica: Any
) -> None:
    group = next(g for g in Threads(tp=ranks.tp_size, pp=ranks.pp_size).groups() if g.ranks == ranks)
    description = create(config("prefill", options=options, group=group)).description
    assert description.replicas == {"kv": replica}
    layout = description.components[0].layout
    assert layout.layer_range == layers
    assert {(plane.head_start, plane.head_start + plane.head_count) for plane in layout.planes} == {heads}


@pytest.mark.parametrize(
    ("role", "options", "ranks", "text"),
    [
        (
            "prefill",
            {"kv_heads": "8"},
            Ranks(0, 3),
            "tp_size = 3: must divide the 8 kv_heads, or be a multiple of them",
        ),
        ("prefill", {"layers": "2"}, Ranks(0, 1, 0, 3), "pp_size = 3: must be at most the 2 layers"),
        ("decode", {}, Ranks(0, 1, 0, 2), "pp_size = 2: only prefill is split into stages"),
        ("decode", {"pools": "deepseek_v4"}, Ranks(0, 2), "tp_size = 2, pp_size = 1: one process has the pools of "),
    ],
)
def test_a_division_that_is_not_possible_is_one_clear_line(
    role: Any, options: dict[str, str], ranks: Ranks, text: str
) -> None:
    group = Threads(tp=ranks.tp_size, pp=ranks.pp_size).groups()[0]
    with pytest.raises(ConfigError, match=f"^{text}"):
        create(config(role, options=options, group=group))


# HiSparse


def hisparse(slots: int = 1 << 12) -> HiSparse:
    limits = Limits(hisparse_wait_steps=2, hisparse_quantum_steps=3)
    return HiSparse(device_slots=slots, hot_tokens=HOT, dense_slots=1_024, limits=limits)


@pytest.mark.parametrize(
    ("options", "prefill_tp", "decode_tp"),
    [({}, 1, 1), ({"kv_heads": "4"}, 2, 1), ({}, 1, 2), ({"kv_heads": "4"}, 1, 2), ({"kv_heads": "2"}, 2, 4)],
)
def test_requests_that_take_turns_in_the_hot_pool_have_the_tokens_of_one_process(
    options: dict[str, str], prefill_tp: int, decode_tp: int
) -> None:
    """Dense requests beside them, one that leaves while it waits, and one while it runs or has been retracted."""
    options = {"layers": "4", "top_k": str(TOP), "index_share": "1"} | options
    asked = prompts(0, (1, 30, 44, 48, 49, 100, 300) * 2)
    rooms = [request(index, prompt, max_tokens=8, sparse=index % 7 != 2) for index, prompt in enumerate(asked)]
    sources = prefills(prefill_tp, factory=create, slots=4_096, options=options)
    device = hisparse(2 * (HOT + 1))
    targets = decodes(decode_tp, factory=create, slots=2_048, options=options, hisparse=device, batch_max=5)
    together([lambda source=source: source.run(*rooms) for source in sources])

    def script(target: Any) -> None:
        for index, room in enumerate(rooms):
            carry(room, sources, target)
            target.engine.admit(room, target.held(room.room), sources[0].aux[room.room])
            if index == 7:
                target.engine.cancel(6)
            target.step()
        target.engine.cancel(12)
        target.run()

    together([lambda target=target: script(target) for target in targets])
    wanted = expected(options, asked, 8)
    for target in targets:
        figures = target.engine.figures
        for room in rooms:
            assert room.room in (6, 12) or target.outcome(room.room) == wanted[room.room]
        assert (figures.running, figures.waiting) == (0, 0)
        assert figures.admission_bytes == figures.preloaded_bytes
        assert figures.misses > 0
        assert figures.hits > 0
    assert targets[0].engine.figures.retracts > 3


@pytest.mark.parametrize("tokens", [30, 200])
def test_a_wrong_byte_in_the_hot_pool_changes_the_tokens(tokens: int) -> None:
    """Of a request that is on the device whole, and of one whose rows come and go."""
    options = {"layers": "2", "top_k": str(TOP)}
    (prompt,) = prompts(1, (tokens,))
    (wanted,) = expected(options, [prompt], 12)
    (source,), (target,) = (
        prefills(1, factory=create, options=options),
        decodes(1, factory=create, options=options, hisparse=hisparse()),
    )
    one = request(0, prompt, max_tokens=12, sparse=True)
    source.run(one)
    target.admit(one, source)
    target.step()
    hot = target.engine.model.hot
    assert hot.memory.any()
    hot.memory[hot.memory != 0] ^= 0x40
    target.run()
    assert target.outcome(0).tokens[:1] == wanted.tokens[:1]
    assert target.outcome(0).tokens != wanted.tokens


def test_hisparse_needs_positions_to_pick() -> None:
    with pytest.raises(ConfigError, match="enable_hisparse: a step reads every token: set the engine option top_k"):
        create(config("decode", hisparse=hisparse()))
    with pytest.raises(ConfigError, match="pools = deepseek_v4: enable_hisparse is not for them"):
        create(config("decode", options={"pools": "deepseek_v4"}, hisparse=hisparse()))


def test_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device = 'cuda': the stamp engine runs on cpu alone"):
        create(EngineConfig(role="decode", slots=64, page_size=1, device="cuda"))
