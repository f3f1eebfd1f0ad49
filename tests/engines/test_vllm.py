"""Two vLLM engines with pdtransfer between them: same tokens as one engine, and no block lost, whatever ends."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.adapters.kit.ends import FAILURES_MAX
from pdtransfer.adapters.vllm import figures
from pdtransfer.bus.keys import generate
from pdtransfer.handoff.identity_check import ShownIdentity
from pdtransfer.schema import convert
from pdtransfer.serve.commands.engine_facts import compare
from tests.support.paths import REPO
from tests.support.vllm_engine import CPU_FLAGS, ENVIRONMENT, PYTHON, Checkpoints, Generated, VllmEngine, prompts
from tests.support.vllm_pair import (
    LENGTHS,
    SENDS,
    TOKENS,
    VllmPair,
    handed_over,
    multi_connector,
    received_bytes,
    received_tokens,
    rooms,
    settles,
    transfer,
)

WINDOWS = 63, 64, 65, 190, 191, 192, 193, 318, 319, 320, 321, 446, 447, 448, 449
CHUNKS = {"max_num_batched_tokens": 256, "enable_prefix_caching": False, "disable_log_stats": False}
# Without a graph vLLM's build for CPUs makes no room for what a stage gets from the one before it.
STAGES = {"pipeline_parallel_size": 2, "enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}}
BLOCK_BYTES = 128 * 4 * 2 * 64 * 2 * 4  # of the model llama in float32
TIME_LEFT_S = 20.0  # after which either side gives a hand-off up

Family = tuple[VllmPair, VllmEngine]  # and one engine that does both


@contextmanager
def family(checkpoints: Checkpoints, folder: Path, name: str, dtype: str, **options: Any) -> Iterator[Family]:
    """Three engines of one model, started together."""
    model = checkpoints.path(name)
    with ExitStack() as stack:

        def start(role: str, **more: Any) -> VllmEngine:
            return stack.enter_context(
                VllmEngine(model, folder / f"{role}.log", dtype=dtype, **CHUNKS | options | more)
            )

        prefill = start("prefill", kv_transfer_config=transfer("kv_producer", time_left_s=TIME_LEFT_S))
        receives = transfer("kv_consumer", verify=True, time_left_s=TIME_LEFT_S)
        pair, single = VllmPair(prefill, start("decode", kv_transfer_config=receives)), start("single")
        pair.ready()
        single.ready()
        yield pair, single


@pytest.fixture(scope="module")
def llama(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    with family(checkpoints, tmp_path_factory.mktemp("llama"), "llama", "float32") as made:
        yield made


def failures(engine: VllmEngine) -> dict[str, float]:
    """Hand-offs of an engine that failed, by their cause."""
    found = engine.metrics("vllm:pdtransfer_failures_total")
    return {name.split()[1]: value for name, value in found.items()}


def identity(engine: VllmEngine) -> ShownIdentity:
    """What `pdtransfer doctor` asks an engine for."""
    answer = engine.generated(engine.add([0], tokens=1, kv_transfer_params={"identify": True}))
    assert answer.kv_transfer_params is not None
    return convert(answer.kv_transfer_params["identity"], ShownIdentity)


def lands_as_prefill_has_it(
    pair: VllmPair, prompt: list[int], *, ranks: dict[VllmEngine, int] | None = None
) -> Generated:
    """Hands over a prompt of a model with one latent, or of engines with one rank. Each rank of decode then has the
    bytes of all its tokens but the last one that each rank of prefill has. `ranks` are those of engines that have
    several."""
    label, ranks = pair.label(), ranks or {}

    def digests(engine: VllmEngine) -> set[str]:
        return {engine.kv_digest(label, len(prompt) - 1, rank=rank) for rank in range(ranks.get(engine, 1))}

    before = rooms(pair.decode).get("received", 0)
    sent = pair.prefill.add(prompt, tokens=1, request=label, kv_transfer_params=SENDS)
    params = pair.prefill.generated(sent).kv_transfer_params
    expected = digests(pair.prefill)
    added = pair.decode.add(prompt, tokens=200, request=label, kv_transfer_params=params)
    settles(lambda: rooms(pair.decode).get("received"), before + ranks.get(pair.decode, 1))
    assert (len(expected), digests(pair.decode)) == (1, expected)
    return pair.decode.generated(added)


@pytest.mark.parametrize("order", ["serial", "prefill first", "decode first", "by X-Request-Id"])
def test_decode_continues_what_prefill_computed(llama: Family, order: str) -> None:
    pair, single = llama
    asked = prompts(*LENGTHS, seed=len(order))
    before, of_peers = rooms(pair.decode), received_tokens(pair.decode)
    made = handed_over(pair, asked, order=order)
    assert [each.tokens for each in made] == single.generate(asked, tokens=TOKENS)
    pair.settles()
    assert rooms(pair.decode)["received"] - before["received"] == len(LENGTHS)
    # All but the last of each prompt, and of 129 that one as well, since a block begins with it.
    assert received_tokens(pair.decode) - of_peers == sum(LENGTHS) - len(LENGTHS) + 1


@pytest.mark.parametrize(
    ("name", "dtype", "cache"),
    [("qwen3", "bfloat16", "auto"), ("qwen3", "bfloat16", "fp8"), ("gpt_oss", "float32", "auto")],
)
def test_other_models_continue_as_well(
    name: str, dtype: str, cache: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Two bytes a number, and one; and experts with windows in every other layer, whose groups of layers have blocks of
    their own in the same memory. With AMX, bits depend on how a step is shared: there a cache of one byte a number is
    held against prefill's."""
    if cache == "fp8" and not re.search("avx512|amx", CPU_FLAGS):
        pytest.skip("vLLM keeps a cache of 8 bits on processors with AVX-512 or AMX alone")
    by_bytes = cache == "fp8" and "amx" in CPU_FLAGS
    with family(checkpoints, tmp_path, name, dtype, kv_cache_dtype=cache) as (pair, single):
        for order in ("decode first", "serial"):
            asked = prompts(*LENGTHS, seed=len(order))
            made = handed_over(pair, asked, order=order)
            assert by_bytes or [each.tokens for each in made] == single.generate(asked, tokens=TOKENS)
        for prompt in asked if by_bytes else ():
            assert len(lands_as_prefill_has_it(pair, prompt).tokens) == 200
        pair.settles()
        assert rooms(pair.decode) == {"received": (3 if by_bytes else 2) * len(LENGTHS) + 1}


def test_windows_of_64_tokens_continue_at_each_offset_of_a_block(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Prompts that end within a window of a block's end, or just behind it: which blocks decode needs changes there."""
    with family(checkpoints, tmp_path, "gemma3", "float32") as (pair, single):
        asked = prompts(*WINDOWS, seed=24)
        for order in ("decode first", "serial"):
            made = handed_over(pair, asked, order=order)
            assert [each.tokens for each in made] == single.generate(asked, tokens=TOKENS)
        pair.settles()
        assert rooms(pair.decode) == {"received": 2 * len(WINDOWS) + 1}


@pytest.mark.parametrize(
    ("name", "drafts"), [("deepseek_v3", None), ("deepseek_v3_drafted", {"method": "mtp", "num_speculative_tokens": 2})]
)
def test_latent_attention_continues(
    name: str, drafts: dict[str, Any] | None, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Held against prefill's own bytes, of the layer that drafts as well: decode computes the prompt's last token anew,
    with other kernels, and a tiny random model turns what these round into other tokens."""
    # With drafts, vLLM starts no prompt of more tokens than this on CPUs, where it makes no chunks of them.
    options = {"speculative_config": drafts, "max_num_batched_tokens": 1024} if drafts else {}
    with family(checkpoints, tmp_path, name, "float32", **options) as (pair, _):
        for prompt in prompts(5, 16, 17, 300, 700):
            assert len(lands_as_prefill_has_it(pair, prompt).tokens) == 200
        pair.settles()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_ranks_of_unequal_groups_hand_over_in_both_directions(
    name: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Two ranks share llama's heads, and both hold all of a latent, whose bytes are compared: see the test before this
    one. Each engine sends and receives."""
    with ExitStack() as stack:

        def start(size: int) -> VllmEngine:
            both = transfer("kv_both", verify=True)
            model, log = checkpoints.path(name), tmp_path / f"{size}.log"
            options = CHUNKS | {"kv_transfer_config": both, "tensor_parallel_size": size}
            return stack.enter_context(VllmEngine(model, log, **options))

        one, two = start(1), start(2)
        for pair in (VllmPair(two, one), VllmPair(one, two)):
            pair.ready()
            for prompt in prompts(5, 129, 300, 700):
                if name == "llama":
                    assert pair.serial(prompt, tokens=TOKENS).tokens == one.generate([prompt], tokens=TOKENS)[0]
                else:
                    assert len(lands_as_prefill_has_it(pair, prompt, ranks={two: 2}).tokens) == 200
            pair.settles()
        # Each rank counts for itself.
        assert [rooms(each) for each in (one, two)] == [{"received": 5, "sent": 5}, {"received": 10, "sent": 10}]


def test_engines_beside_such_with_decode_context_parallelism_hand_over_among_themselves(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """With the stripes that such an engine has, which vLLM itself has on GPUs alone; and not to one without them."""
    with ExitStack() as stack:

        def start(name: str, size: int, **settings: Any) -> VllmEngine:
            both = transfer("kv_both", verify=True, rows="blocks", time_left_s=TIME_LEFT_S, **settings)
            options = CHUNKS | {"kv_transfer_config": both, "tensor_parallel_size": size, "enable_prefix_caching": True}
            log = tmp_path / f"{name}.log"
            return stack.enter_context(VllmEngine(checkpoints.path("llama"), log, **options))

        single, double, without = start("single", 1, dcp_size=2), start("double", 2, dcp_size=2), start("without", 1)
        pair = VllmPair(single, double)
        pair.ready()
        [beginning] = prompts(300, seed=41)
        asked = [*prompts(*LENGTHS, seed=40), beginning, *(beginning + tail for tail in prompts(50, 250, seed=42))]
        answers = [pair.serial(prompt, tokens=TOKENS) for prompt in asked]
        without.ready()
        assert [answer.tokens for answer in answers] == without.generate(asked, tokens=TOKENS)
        # Of the last two the blocks of the beginning are in decode's prefix cache, and the block behind them is not.
        counts = [
            answer.kv_transfer_params["kv_bytes"] // BLOCK_BYTES for answer in answers if answer.kv_transfer_params
        ]
        assert counts == [-(-length // 128) for length in [*LENGTHS, 300]] + [1, 3]
        pair.settles()
        assert "dcp_size" in [
            row.name for row in compare(identity(single), identity(without)) if row.state == "differs"
        ]
        label, [prompt] = pair.label(), prompts(200, seed=43)
        pair.prefill.generated(pair.begin_prefill(prompt, label))
        refused = VllmPair(single, without, identity=pair.identity)
        assert without.generated(refused.begin_decode(prompt, label, tokens=1)).finish_reason == "error"
        assert re.search(r"dcp_size: d-\S+ has nothing, p-\S+ '2'", without.log.read_text()), without.log_end()


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("llama", (32, 128), {}),
        (
            "deepseek_v3",
            (16, 64),
            {"attention_config": {"backend": "CPU_MLA"}, "stand_in": "tests.engines.vllm_latents"},
        ),
        pytest.param("qwen3_moe", (32, 128), {}, marks=pytest.mark.full),
    ],
    ids=["llama", "deepseek_v3", "qwen3_moe"],
)
def test_blocks_of_unequal_sizes_hand_over_in_both_directions(
    name: str, sizes: tuple[int, int], options: dict[str, Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """With the defaults of both: each engine sends and receives, and answers as it does alone. Of latents the bytes of
    both caches are compared, with a stand-in for vLLM's kernel, which has one size of blocks."""
    with ExitStack() as stack:

        def start(size: int) -> VllmEngine:
            both = transfer("kv_both", verify=True, time_left_s=TIME_LEFT_S)
            config = CHUNKS | options | {"kv_transfer_config": both, "block_size": size}
            return stack.enter_context(VllmEngine(checkpoints.path(name), tmp_path / f"{size}.log", **config))

        small, large = start(sizes[0]), start(sizes[1])
        assert [engine.ready()["block_size"] for engine in (small, large)] == list(sizes)
        for pair in (VllmPair(small, large), VllmPair(large, small)):
            pair.ready()
            asked = prompts(*LENGTHS, seed=32)
            if name == "deepseek_v3":
                for prompt in asked * 2:
                    assert len(lands_as_prefill_has_it(pair, prompt).tokens) == 200
            else:
                expected = pair.decode.generate(asked, tokens=TOKENS)
                for order in ("serial", "decode first"):
                    made = handed_over(pair, asked, order=order)
                    assert [each.tokens for each in made] == expected
            pair.settles()
        assert [row.state for row in compare(identity(small), identity(large)) if row.name == "block_size"] == [
            "may differ"
        ]
        count = 2 * len(LENGTHS) + 1
        assert [rooms(each) for each in (small, large)] == [{"received": count, "sent": count}] * 2


def test_prefill_may_have_several_stages(checkpoints: Checkpoints, tmp_path: Path, llama: Family) -> None:
    """Each stage sends its own layers, and decode learns of both from one answer."""
    good, single = llama
    config = {"kv_transfer_config": transfer("kv_producer", time_left_s=TIME_LEFT_S)}
    with VllmEngine(checkpoints.path("llama"), tmp_path / "staged.log", **CHUNKS | STAGES | config) as prefill:
        pair = VllmPair(prefill, good.decode)
        pair.ready()
        asked = prompts(*LENGTHS, seed=25)
        before = rooms(pair.decode)["received"]
        made = handed_over(pair, asked, order="serial")
        assert [each.tokens for each in made] == single.generate(asked, tokens=TOKENS)
        pair.settles()
        assert pair.identity["pp_size"] == 2
        assert rooms(pair.decode)["received"] - before == len(LENGTHS)
        assert rooms(prefill)["sent"] == 2 * (len(LENGTHS) + 1), "each stage counts for itself"


@pytest.mark.parametrize("prefill_stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_decode_may_have_several_stages(
    prefill_stages: int, checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """Each stage receives its own layers: of a prefill engine that has all of them, and of one with stages, which keep
    seven processes busy with those of the other tests."""
    good, single = llama
    with ExitStack() as stack:

        def start(role: str, **extra: Any) -> VllmEngine:
            config = {"kv_transfer_config": transfer(role, time_left_s=TIME_LEFT_S, **extra)}
            log = tmp_path / f"{role}.log"
            return stack.enter_context(VllmEngine(checkpoints.path("llama"), log, **CHUNKS | STAGES | config))

        decode = start("kv_consumer", verify=True)
        pair = VllmPair(good.prefill if prefill_stages == 1 else start("kv_producer"), decode)
        pair.ready()
        # Proxies that ask decode first know the first rank's port alone, and expect the others behind it.
        orders = ["serial", "decode first"] if prefill_stages == 1 else ["serial"]
        before, reported = received_bytes(decode), 0
        for order in orders:
            asked = prompts(*LENGTHS, seed=len(order))
            made = handed_over(pair, asked, order=order)
            assert [each.tokens for each in made] == single.generate(asked, tokens=TOKENS)
            reported += sum(answer.kv_transfer_params["kv_bytes"] for answer in made if answer.kv_transfer_params)
        pair.settles()
        assert received_bytes(decode) - before == reported, "of both stages"
        received = 2 * (len(orders) * len(LENGTHS) + 1)
        assert rooms(decode) == {"received": received}, "each stage counts for itself"
        [prompt] = prompts(200, seed=26)
        pair.begin_decode(prompt, pair.label(), tokens=TOKENS, request="gone")
        settles(lambda: decode.state()["free_blocks"] < pair.blocks["decode"], True)
        decode.abort("gone")
        pair.settles()
        settles(lambda: rooms(decode), {"received": received, "failed": 2})
        assert pair.serial(prompt, tokens=TOKENS).tokens == single.generate([prompt], tokens=TOKENS)[0]


def test_prompts_that_either_engine_has_cached_are_sent_in_part(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with family(checkpoints, tmp_path, "llama", "float32", enable_prefix_caching=True) as (pair, single):
        shared, one, two, other = prompts(512, 60, 100, 200, seed=5)
        for tail in (one, two):
            [expected] = single.generate([shared + tail], tokens=TOKENS)
            before = received_bytes(pair.decode)
            assert pair.serial(shared + tail, tokens=TOKENS).tokens == expected
            blocks = 5 if tail is one else 1  # of the second prompt decode has the first four
            assert received_bytes(pair.decode) - before == blocks * BLOCK_BYTES
        # Prefill has the prompt's first blocks, decode has none of it.
        pair.prefill.generate([shared[:256] + other], tokens=1)
        longer = shared[:256] + other + one
        [expected] = single.generate([longer], tokens=TOKENS)
        pair.decode.kill()
        model = checkpoints.path("llama")
        receives = transfer("kv_consumer", verify=True)
        with VllmEngine(model, tmp_path / "again.log", kv_transfer_config=receives, **CHUNKS) as again:
            again.ready()
            params = pair.prefilled(longer)
            assert again.generated(again.add(longer, tokens=TOKENS, kv_transfer_params=params)).tokens == expected
            settles(pair.prefill.state, {"free_blocks": pair.blocks["prefill"], "requests": 0})


# Requests that end early


def test_decode_gives_up_before_prefill_has_begun(llama: Family) -> None:
    pair, _ = llama
    [prompt], label = prompts(300, seed=7), pair.label()
    added = pair.begin_decode(prompt, label, tokens=TOKENS, request="given-up")
    settles(lambda: pair.decode.state()["free_blocks"], pair.blocks["decode"] - 3)
    pair.decode.abort("given-up")
    assert pair.decode.generated(added).finish_reason == "abort"
    pair.settles()
    # Prefill has learned that nobody waits for the room: it does not keep the blocks until a deadline.
    pair.prefill.generated(pair.begin_prefill(prompt, label))
    pair.settles()


def test_decode_gives_up_while_prefill_computes(llama: Family) -> None:
    pair, single = llama
    [prompt, other], label = prompts(700, 200, seed=8), pair.label()
    pair.prefill.hold()
    sent = pair.begin_prefill(prompt, label)
    pair.begin_decode(prompt, label, tokens=TOKENS, request="half-way")
    pair.prefill.step()  # the first chunk
    settles(lambda: pair.decode.state()["requests"], 1)
    pair.decode.abort("half-way")
    settles(pair.decode.state, {"free_blocks": pair.blocks["decode"], "requests": 0})
    pair.prefill.resume()
    pair.prefill.generated(sent)
    pair.settles()
    assert pair.serial(other, tokens=TOKENS).tokens == single.generate([other], tokens=TOKENS)[0]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_prefill_is_given_up(llama: Family, steps: int) -> None:
    """Before its first step, and between its chunks. Decode's load fails, which ends the request, long before the
    limit of either side."""
    pair, _ = llama
    [prompt], label = prompts(700, seed=9 + steps), pair.label()
    pair.prefill.hold()
    pair.begin_prefill(prompt, label, request=f"gone-{steps}")
    received = pair.begin_decode(prompt, label, tokens=TOKENS)
    pair.prefill.step(steps)
    pair.prefill.abort(f"gone-{steps}")
    pair.prefill.resume()
    assert pair.decode.generated(received, seconds=TIME_LEFT_S / 2).finish_reason == "error"
    pair.settles()


def test_decode_ends_before_it_has_blocks(llama: Family) -> None:
    """What prefill has kept for it is free at once."""
    pair, _ = llama
    before = failures(pair.prefill)
    [prompt] = prompts(300, seed=12)
    params = pair.prefilled(prompt)
    assert pair.prefill.state()["requests"] == 1
    pair.decode.hold()
    pair.decode.add(prompt, tokens=TOKENS, kv_transfer_params=params, request="never")
    pair.decode.abort("never")
    pair.decode.resume()
    settles(lambda: pair.prefill.state()["requests"], 0, seconds=TIME_LEFT_S / 2)
    pair.settles()
    assert {cause: count - before.get(cause, 0) for cause, count in failures(pair.prefill).items()} == {
        cause: float(cause == "aborted") for cause in failures(pair.prefill)
    }
    assert re.search(
        r"handed over: aborted: .* gave it up: request .*never.* was given up", pair.prefill.log.read_text()
    )


def test_a_hand_off_that_its_proxy_gives_up_costs_no_block(llama: Family) -> None:
    """Its request has ended, and decode was never asked."""
    pair, _ = llama
    [prompt], label = prompts(300, seed=29), pair.label()
    pair.prefill.generated(pair.begin_prefill(prompt, label))
    assert pair.prefill.state()["requests"] == 1
    pair.prefill.generated(pair.prefill.add([1], tokens=1, kv_transfer_params={"abort_transfer_id": label}))
    settles(lambda: pair.prefill.state()["requests"], 0, seconds=TIME_LEFT_S / 2)
    received = pair.begin_decode(prompt, label, tokens=TOKENS)
    assert pair.decode.generated(received, seconds=TIME_LEFT_S / 2).finish_reason == "error"
    pair.settles()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"remote_port": 0}, "remote_port: 0, expected int >= 1"),
        ({"remote_port": "7801"}, "remote_port: '7801', expected int"),
        ({"tp_size": 10**9}, "tp_size: 1000000000, expected int <= 64"),
        ({"remote_host": "10.1.2.3"}, "remote_host: 10.1.2.3 is another host"),
        ({"remote_host": ["127.0.0.1"]}, "remote_host: an array of 1, expected str"),
        ({"transfer_id": "x" * 10_000}, "transfer_id: 'xxx"),
        ({"transfer_id": {"a": 1}}, "transfer_id: an object of 1, expected str"),
        ({"transfer_mode": "pull"}, "transfer_mode: 'pull', not 'push'"),
        ({"do_remote_decode": True}, "do_remote_prefill, do_remote_decode: both are true, one must be false"),
        ({"remote_endpoints": ["tcp://127.0.0.1:1"] * 2}, "remote_endpoints: one is there twice"),
    ],
)
def test_wrong_parameters_end_their_request_alone(llama: Family, wrong: dict[str, Any], text: str) -> None:
    pair, single = llama
    [prompt, other] = prompts(200, 150, seed=14)
    params = pair.receives(pair.label()) | wrong
    added = pair.decode.add(prompt, tokens=TOKENS, kv_transfer_params=params)
    fine = pair.serial(other, tokens=TOKENS)
    assert fine.tokens == single.generate([other], tokens=TOKENS)[0]
    assert pair.decode.generated(added).finish_reason == "error"
    assert text in pair.decode.log.read_text()
    pair.settles()


def test_metrics_are_those_of_the_manual(llama: Family) -> None:
    pair, _ = llama
    [prompt] = prompts(150, seed=26)
    before = pair.decode.metrics("vllm:pdtransfer_").get("vllm:pdtransfer_failures_total refused", 0.0)
    pair.serial(prompt, tokens=2)
    wrong = pair.decode.add(prompt, tokens=2, kv_transfer_params=pair.receives(pair.label()) | {"remote_port": 0})
    assert pair.decode.generated(wrong).finish_reason == "error"
    pair.settles()
    found = pair.decode.metrics("vllm:pdtransfer_")
    assert found["vllm:pdtransfer_failures_total refused"] == before + 1
    names = {re.sub("(?<=seconds)_(sum|count)$", "", name.split()[0]) for name in found}
    names.add("vllm:pdtransfer_refusals_total")  # there is none until a peer does not fit
    assert names == set(re.findall(r"^\| `(vllm:\w+)`", (REPO / "docs/vllm.md").read_text(), re.MULTILINE))


def test_wrong_parameters_of_prefill_hand_nothing_over(llama: Family) -> None:
    pair, _ = llama
    [prompt] = prompts(200, seed=15)
    for params in (SENDS | {"transfer_id": 7}, SENDS | {"do_remote_decode": "yes"}):
        made = pair.prefill.generated(pair.prefill.add(prompt, tokens=1, kv_transfer_params=params))
        assert (made.finish_reason, made.kv_transfer_params) == ("length", None)
    label = pair.label()
    one, two = (pair.begin_prefill(prompt, label) for _ in range(2))  # a label is used once
    assert [pair.prefill.generated(each).finish_reason for each in (one, two)] == ["length", "length"]
    assert pair.decode.generated(pair.begin_decode(prompt, label, tokens=1)).finish_reason == "length"
    pair.settles()


def test_many_requests_at_once_leave_no_block_behind(llama: Family) -> None:
    """200 of them: in each order, with some that are given up on either side at any time."""
    pair, single = llama
    draw = random.Random(16)
    asked = prompts(*(draw.randrange(5, 700) for _ in range(200)), seed=16)
    kept: list[tuple[list[int], Any]] = []
    for at, prompt in enumerate(asked):
        label, fate = pair.label(), draw.choice(("kept", "kept", "kept", "decode", "prefill"))
        sides = [
            lambda prompt=prompt, label=label, at=at: pair.begin_prefill(prompt, label, request=f"p{at}"),
            lambda prompt=prompt, label=label, at=at: pair.begin_decode(prompt, label, tokens=8, request=f"d{at}"),
        ]
        first = draw.randrange(2)
        made = {first: sides[first](), 1 - first: sides[1 - first]()}
        if fate == "kept":
            kept.append((prompt, made[1]))
        elif fate == "decode":
            pair.decode.abort(f"d{at}")
        else:
            pair.prefill.abort(f"p{at}")
            pair.decode.abort(f"d{at}")
    found = [pair.decode.generated(added, seconds=240.0) for _, added in kept]
    assert {each.finish_reason for each in found} == {"length"}
    pair.settles()
    few = draw.sample(range(len(kept)), 24)
    assert [found[at].tokens for at in few] == single.generate([kept[at][0] for at in few], tokens=8)


def test_a_preempted_request_is_handed_over_when_it_has_been_computed_again(
    checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """Of nine blocks another request takes one that the second half of this prompt needs."""
    good, single = llama
    few = {"num_gpu_blocks_override": 10, "long_prefill_token_threshold": 32}
    config = {"kv_transfer_config": transfer("kv_producer", time_left_s=TIME_LEFT_S)}
    with VllmEngine(checkpoints.path("llama"), tmp_path / "few.log", **CHUNKS | few | config) as prefill:
        pair = VllmPair(prefill, good.decode)
        pair.ready()
        other, prompt = prompts(630, 512, seed=19)
        [expected] = single.generate([prompt], tokens=TOKENS)
        for label in (None, pair.label()):
            prefill.hold()
            running = prefill.add(other, tokens=40)
            prefill.step(3)
            params = SENDS if label is None else pair.sends(label)
            sent = prefill.add(prompt, tokens=1, kv_transfer_params=params)
            prefill.step(16)
            if label is not None:
                received = pair.begin_decode(prompt, label, tokens=TOKENS)
            prefill.resume()
            returned = prefill.generated(sent).kv_transfer_params
            if label is None:
                assert returned is not None
                received = pair.decode.add(prompt, tokens=TOKENS, kv_transfer_params=returned)
                assert pair.decode.generated(received).tokens == expected
            else:  # decode may have been told of the room that was given up
                assert returned is None
                assert pair.decode.generated(received).finish_reason == "error"
            prefill.generated(running)
            pair.settles()
        assert prefill.metrics("vllm:num_preemptions")["vllm:num_preemptions_total"] == 2


# Other connectors beside it


@pytest.mark.parametrize("order", ["ours first", "ours second"])
def test_it_is_one_of_several_connectors(checkpoints: Checkpoints, tmp_path: Path, llama: Family, order: str) -> None:
    """Beside vLLM's example, which keeps a prompt's blocks in files: what the first has, the other does not load."""
    good, single = llama
    ours = transfer("kv_consumer", verify=True, time_left_s=TIME_LEFT_S)
    storage = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "storage")}}
    files = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"} | storage
    connectors = [ours, files] if order == "ours first" else [files, ours]
    config = {"kv_transfer_config": multi_connector(*connectors), "disable_hybrid_kv_cache_manager": True}
    with VllmEngine(checkpoints.path("llama"), tmp_path / "several.log", **CHUNKS | config) as decode:
        pair = VllmPair(good.prefill, decode)
        pair.ready()
        asked = prompts(*LENGTHS, seed=23)
        expected = single.generate(asked, tokens=TOKENS)
        # Once a prompt has been here, the files have its blocks, but for the block of its last two tokens.
        in_files = [(length - 2) // 128 for length in LENGTHS]
        for again in (False, True):
            before = received_bytes(decode)
            made = handed_over(pair, asked, order="serial")
            assert [each.tokens for each in made] == expected
            pair.settles()  # prefill keeps nothing for a room that was declined
            from_files = in_files if again and order == "ours second" else [0] * len(LENGTHS)
            sent = sum(-(-length // 128) for length, count in zip(LENGTHS, from_files, strict=True) if count == 0)
            assert received_bytes(decode) - before == sent * BLOCK_BYTES
        before = received_tokens(decode)
        assert decode.generate(asked, tokens=TOKENS) == expected
        assert received_tokens(decode) - before == sum(in_files) * 128
        data = figures.empty() | {"rooms": {"received": 3}}
        assert decode.figures_of("PDTransferConnector", data) == {"PDTransferConnector": {"rooms received": 3}}


# By transports between hosts


def why_not_by(transport: str) -> str:
    """Why the engines' interpreter has not what a transport needs; empty where it has."""
    code = f"from pdtransfer.transports.{transport}.host import why_not; print(why_not())"
    ran = subprocess.run([PYTHON, "-c", code], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_kv_is_sent_by_a_transport_between_hosts(
    transport: str, checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """By TCP of this host, where the setting names it on both sides."""
    _, single = llama
    if reason := why_not_by(transport):
        pytest.skip(reason)
    with ExitStack() as stack:

        def start(role: str, **more: Any) -> VllmEngine:
            config = {"kv_transfer_config": transfer(role, transport=transport, time_left_s=60.0, **more)}
            log = tmp_path / f"{role}.log"
            return stack.enter_context(VllmEngine(checkpoints.path("llama"), log, **CHUNKS | config))

        pair = VllmPair(start("kv_producer"), start("kv_consumer", verify=True))
        pair.ready()
        asked = prompts(*LENGTHS, seed=44)
        expected = single.generate(asked, tokens=TOKENS)
        for order in ("serial", "decode first"):
            made = handed_over(pair, asked, order=order)
            assert [answer.tokens for answer in made] == expected
        pair.settles()
        assert rooms(pair.decode) == {"received": 2 * len(LENGTHS) + 1}
        for engine in (pair.prefill, pair.decode):
            assert f": over {transport}" in engine.log.read_text()


# Engines with keys


def test_with_keys_an_engine_serves_those_on_its_list(checkpoints: Checkpoints, tmp_path: Path, llama: Family) -> None:
    other, single = llama
    lines = {name: generate(tmp_path / name) for name in ("p0", "d0", "d1")}
    for name, peers in (("p0", "d0"), ("d0", "p0"), ("d1", "p0")):
        (tmp_path / f"{name}.peers").write_text(lines[peers])
    with ExitStack() as stack:

        def start(name: str, role: str) -> VllmEngine:
            config = transfer(
                role, engine_id=name, key=str(tmp_path / f"{name}.key"), allow=str(tmp_path / f"{name}.peers"),
                time_left_s=TIME_LEFT_S / 2,
            )  # fmt: skip
            log = tmp_path / f"{name}.log"
            return stack.enter_context(VllmEngine(checkpoints.path("llama"), log, kv_transfer_config=config, **CHUNKS))

        prefill, listed, unlisted = start("p0", "kv_producer"), start("d0", "kv_consumer"), start("d1", "kv_consumer")
        pair = VllmPair(prefill, listed)
        pair.ready()
        [prompt] = prompts(300, seed=20)
        expected = single.generate([prompt], tokens=TOKENS)
        assert pair.serial(prompt, tokens=TOKENS).tokens == expected[0]
        # A proxy that keeps vLLM's own fields alone: the key is that of the name.
        assert handed_over(pair, [prompt], order="decode first")[0].tokens == expected[0]
        unlisted.ready()
        for engine in (unlisted, other.decode):
            stranger = VllmPair(prefill, engine, identity=pair.identity)
            params = stranger.prefilled(prompt)
            made = engine.generated(engine.add(prompt, tokens=1, kv_transfer_params=params))
            assert made.finish_reason == "error"
        assert "has a key, this engine has none: set key and allow" in other.decode.log.read_text()
        pair.settles()


# Engines that end


def test_a_dead_prefill_engine_costs_time_and_no_answer(
    checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """Killed in mid-transfer: decode computes the prompt itself. Both may be started again, one after the other."""
    _, single = llama
    model = checkpoints.path("llama")
    asked = prompts(700, 300, 640, seed=17)
    expected = single.generate(asked, tokens=TOKENS)

    def start(role: str, name: str) -> VllmEngine:
        config = transfer(role, policy="recompute", time_left_s=TIME_LEFT_S)
        return VllmEngine(model, tmp_path / f"{name}.log", kv_transfer_config=config, **CHUNKS)

    with ExitStack() as stack:
        decode = stack.enter_context(start("kv_consumer", "decode"))
        killed, other = (stack.enter_context(start("kv_producer", name)) for name in ("killed", "prefill"))
        fleet = VllmPair(killed, decode)
        fleet.ready()
        killed.hold()
        labels = [fleet.label() for _ in asked]
        for prompt, label in zip(asked, labels, strict=True):
            fleet.begin_prefill(prompt, label)
        added = [fleet.begin_decode(prompt, label, tokens=TOKENS) for prompt, label in zip(asked, labels, strict=True)]
        settles(lambda: decode.state()["requests"], 3)
        killed.step(2)
        killed.kill()
        assert [decode.generated(each).tokens for each in added] == expected
        assert rooms(decode)["failed"] == 3

        fleet = VllmPair(other, decode)
        fleet.ready()  # another process in its place
        assert [fleet.serial(prompt, tokens=TOKENS).tokens for prompt in asked] == expected
        params = fleet.prefilled(asked[0])
        decode.kill()
        again = stack.enter_context(start("kv_consumer", "again"))
        fleet = VllmPair(other, again)
        fleet.ready()
        made = again.generated(again.add(asked[0], tokens=TOKENS, kv_transfer_params=params))
        assert made.tokens == expected[0], "what prefill keeps is for whoever asks first"
        fleet.settles()


def test_engines_that_do_not_fit_are_refused_with_both_values(
    checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    pair, single = llama
    with ExitStack() as stack:

        def start(name: str, dtype: str, **more: Any) -> VllmEngine:
            receives = transfer("kv_consumer", time_left_s=TIME_LEFT_S)
            options = CHUNKS | more | {"kv_transfer_config": receives}
            path = checkpoints.path("llama")
            return stack.enter_context(VllmEngine(path, tmp_path / f"{name}.log", dtype=dtype, **options))

        other_name = start("name", "bfloat16", served_model_name="another")
        other_size = start("size", "float32", block_size=96)  # no power of two: its tokens cannot be sent
        drafts = {"method": "draft_model", "model": str(checkpoints.path("llama")), "num_speculative_tokens": 1}
        drafts_alone = start("drafts", "float32", speculative_config=drafts)
        prompt, fine = prompts(200, 150, seed=18)
        for engine, differs, line in (
            (other_name, "model", r"model: d-\S+ has 'another \(KV bfloat16\)', p-\S+ '\S*llama \(KV float32\)'"),
            (other_size, "block_size", r"refused: block_size: d-\S+ has '96', p-\S+ '128'"),
            (drafts_alone, "speculation", r"refused: speculation: d-\S+ has 'draft_model \w+', p-\S+ nothing"),
        ):
            blocks = engine.ready()["blocks"] - 1
            one, two = (identity(each) for each in (pair.prefill, engine))
            assert differs in [row.name for row in compare(one, two) if row.state == "differs"]
            made = VllmPair(pair.prefill, engine, identity=pair.identity)
            for _ in range(FAILURES_MAX + 1):
                label = made.label()
                pair.prefill.generated(made.begin_prefill(prompt, label))
                assert engine.generated(made.begin_decode(prompt, label, tokens=1)).finish_reason == "error"
            assert engine.state() == {"free_blocks": blocks, "requests": 0}
            settles(lambda: pair.prefill.state()["requests"], 0, seconds=TIME_LEFT_S / 2)
            received = line.replace("refused: ", r"\(refused\): ")
            warned = rf"the last {FAILURES_MAX} hand-offs have all failed, the latest as refused: .*{received}"
            assert len(re.findall(warned, engine.log.read_text())) == 1, engine.log_end()
            assert re.search(line, pair.prefill.log.read_text(), re.MULTILINE), pair.prefill.log_end()
        assert pair.serial(fine, tokens=TOKENS).tokens == single.generate([fine], tokens=TOKENS)[0]
        pair.settles()
