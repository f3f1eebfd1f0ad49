"""vLLM's engines on a GPU: prefill and decode share it, with the kernels and layouts that its users have.

Run with PDTRANSFER_TEST_DEVICE=cuda, all of them by tools.engines_on_gpu. Numbers of two bytes: the bits of a token
depend on the batch and the kernel that computed it. So an answer is held against one engine token by token, each behind
all that stands before it: where it has another token than that engine's, both must be nearly as likely.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.lmcache_server import lmcache_server
from tests.support.sglang_engine import DEVICE, free_port
from tests.support.vllm_engine import ENVIRONMENT, PYTHON, Checkpoints, Generated, VllmEngine, prompts
from tests.support.vllm_pair import (
    TOKENS,
    VllmPair,
    continue_as_one,
    handed_over,
    multi_connector,
    received_bytes,
    received_tokens,
    rooms,
    settles,
    ties,
    transfer,
)

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="PDTRANSFER_TEST_DEVICE is cpu: no kernels of a GPU"),
]

LENGTHS = 5, 100, 127, 129, 300, 1_500, 3_000  # the last two have several chunks
ORDERS = "serial", "prefill first", "decode first"
TIME_LEFT_S = 60.0
COMMON: dict[str, Any] = {
    "dtype": "bfloat16", "max_model_len": 8_192, "max_num_batched_tokens": 1_024, "disable_log_stats": False,
    "enable_prefix_caching": True,
}  # fmt: skip
NEWER = "vllm.v1.kv_cache_layout"  # a module that 0.32 has, and 0.26 has not


def interpreted(code: str) -> subprocess.CompletedProcess[str]:
    """What the engines' interpreter makes of this."""
    command, environment = [PYTHON, "-c", code], os.environ | ENVIRONMENT
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def why_not_imported(module: str) -> str:
    """The error of the engines' interpreter; empty if there is none."""
    ended = interpreted(f"import {module}")
    return ended.stderr.strip().rpartition("\n")[2] if ended.returncode else ""


def sum_of(engine: VllmEngine, metric: str) -> float:
    """A metric, over all its labels."""
    return sum(engine.metrics(metric).values())


class Engines:
    """Engines of one model, started together."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack, **common: Any) -> None:
        self._model, self._folder, self._stack, self._common = model, folder, stack, COMMON | common

    def start(self, name: str, **options: Any) -> VllmEngine:
        log = self._folder / f"{name}.log"
        return self._stack.enter_context(VllmEngine(self._model, log, **self._common | options))

    def prefill(self, name: str = "prefill", *, settings: dict[str, Any] | None = None, **options: Any) -> VllmEngine:
        config = transfer("kv_producer", **{"time_left_s": TIME_LEFT_S} | (settings or {}))
        return self.start(name, kv_transfer_config=config, **options)

    def decode(self, name: str = "decode", *, settings: dict[str, Any] | None = None, **options: Any) -> VllmEngine:
        config = transfer("kv_consumer", **{"time_left_s": TIME_LEFT_S} | (settings or {}))
        return self.start(name, kv_transfer_config=config, **options)


@contextmanager
def engines(checkpoints: Checkpoints, folder: Path, family: str, **common: Any) -> Generator[Engines]:
    with ExitStack() as stack:
        yield Engines(checkpoints.path(family), folder, stack, **common)


def answer_as_one(pair: VllmPair, single: VllmEngine, *lengths: int, orders: Sequence[str] = ORDERS) -> None:
    """A pair whose KV stays on the GPU: all at once and one at a time; each depends on its prompt's first half."""
    pair.ready()
    asked, answers = list[list[int]](), list[Generated]()
    for seed, order in enumerate(orders):
        for batch in [prompts(*lengths, seed=seed), *([prompt] for prompt in prompts(*lengths, seed=50 + seed))]:
            asked += batch
            answers += handed_over(pair, batch, order=order)
    pair.settles()
    single.ready()
    continue_as_one(single, asked, answers)
    longest = max(asked, key=len)
    [other] = prompts(len(longest), seed=99)
    changed = other[: len(other) // 2] + longest[len(other) // 2 :]
    of_another = pair.serial(changed, tokens=TOKENS).tokens
    assert ties(single, longest, of_another) is None, "it depends on the first half"
    pair.settles()
    assert received_bytes(pair.decode) > 0


def stays_on_the_gpu(engine: VllmEngine) -> None:
    """Nothing was copied up from host memory."""
    assert sum_of(engine, "vllm:pdtransfer_copied_up_bytes_total") == 0
    assert "does not reach the GPU" not in engine.log.read_text()


def test_dense_models_continue(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """With CUDA graphs, compiled, chunked, and with prefix caches on both sides."""
    graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
    with engines(checkpoints, tmp_path, "llama_long", **graphs) as started:
        pair, single = VllmPair(started.prefill(), started.decode()), started.start("single")
        answer_as_one(pair, single, *LENGTHS)
        # What either side has cached of a prompt.
        shared, short, long = prompts(1_024, 60, 100, seed=5)
        for tail in (short, long):
            before = received_bytes(pair.decode)
            continue_as_one(single, [shared + tail], [pair.serial(shared + tail, tokens=TOKENS)])
            sent = received_bytes(pair.decode) - before
            assert sent < 256 * 16_384 if tail is long else sent >= 1_024 * 16_384
        pair.settles()
        stays_on_the_gpu(pair.decode)


def same_bytes(pair: VllmPair, *lengths: int, whole: int = 1, beginning: int = 0) -> None:
    """Held against prefill's own bytes: decode computes the prompt's last token anew, with other kernels, which a tiny
    random model may turn into other tokens, as one engine does that begins anew behind its own first token: both are
    printed. `whole`: tokens whose bytes can be told apart, where a block has all keys before all scales. The prompts
    share this many tokens at their `beginning`."""
    pair.ready()
    asked = prompts(*lengths)
    shared = max(asked, key=len)[:beginning]
    for number, prompt in enumerate([*shared, *prompt[beginning:]][: len(prompt)] for prompt in asked):
        label, tokens = pair.label(), (len(prompt) - 1) // whole * whole
        assert tokens > 0
        pair.prefill.generated(pair.begin_prefill(prompt, label, request=f"p{number}"))
        sent = pair.prefill.kv_digest(f"p{number}", tokens)
        received = pair.begin_decode(prompt, label, tokens=500, request=f"d{number}")
        settles(lambda number=number: rooms(pair.decode).get("received"), number + 2)
        assert pair.decode.kv_digest(f"d{number}", tokens) == sent
        answer = pair.decode.generated(received)
        assert answer.finish_reason == "length"
        [alone] = pair.prefill.generate([prompt], tokens=TOKENS)
        expected = ties(pair.prefill, [*prompt, alone[0]], alone[1:])
        others = ties(pair.prefill, prompt, answer.tokens[:TOKENS])
        print(f"prompt of {len(prompt)}: others as likely: {others}; of one engine that begins anew: {expected}")
    pair.settles()
    stays_on_the_gpu(pair.decode)


@pytest.mark.parametrize(("model", "cache"), [("deepseek_v3_dense", "auto"), ("llama_long", "fp8")], ids=["mla", "fp8"])
def test_bytes_are_those_of_prefill(checkpoints: Checkpoints, tmp_path: Path, model: str, cache: str) -> None:
    """MLA, without experts; and a cache of fp8, which prefill's kernels and decode's round in other ways."""
    options = {"max_model_len": 2_048, "enable_prefix_caching": False, "kv_cache_dtype": cache}
    with engines(checkpoints, tmp_path, model, **options) as started:
        same_bytes(VllmPair(started.prefill(), started.decode()), 5, 63, 64, 65, 300, 1_500)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2)])
def test_latents_that_ranks_have_in_turn_are_those_of_prefill(
    checkpoints: Checkpoints, tmp_path: Path, prefill_ranks: int, decode_ranks: int
) -> None:
    """Decode context parallelism, of as many ranks as tensor parallelism. Both engines share two GPUs."""
    counted = interpreted("import torch, vllm; print(torch.cuda.device_count(), vllm.__version__)")
    cards, version = counted.stdout.split()[-2:]
    if int(cards) < 2:
        pytest.skip("this host has one GPU")
    # Since 0.32 the connector sets it.
    blocks = {"cp_kv_cache_interleave_size": 64} if [int(part) for part in version.split(".")[:2]] < [0, 32] else {}

    def sizes(ranks: int) -> dict[str, Any]:
        size = {"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks, "disable_custom_all_reduce": True}
        return size | (blocks if ranks > 1 else {})

    options = {"max_model_len": 2_048, "block_size": 64, "environment": {"NCCL_NVLS_ENABLE": "0"}}
    with engines(checkpoints, tmp_path, "deepseek_v3_dense", **options) as started:
        prefill = started.prefill(settings={"dcp_size": 2}, **sizes(prefill_ranks))
        decode = started.decode(settings={"dcp_size": 2}, **sizes(decode_ranks))
        same_bytes(VllmPair(prefill, decode), 5, 63, 64, 65, 250, 300, 1_500, beginning=200)


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_bytes_of_sparse_attention_are_those_of_prefill(checkpoints: Checkpoints, tmp_path: Path, cache: str) -> None:
    """DSA, without experts: each layer has latents, and the index that chooses 2,048 tokens of them. A block of the
    index has all keys before all scales."""
    if error := why_not_imported("vllm.third_party.deep_gemm"):
        pytest.skip(f"the index is computed by DeepGEMM: {error}")
    options = {"max_model_len": 4_096, "enable_prefix_caching": False, "kv_cache_dtype": cache}
    with engines(checkpoints, tmp_path, "glm_dsa", **options) as started:
        same_bytes(VllmPair(started.prefill(), started.decode()), 65, 300, 1_500, 3_000, whole=64)


def test_kv_lands_in_hisparses_host_pool(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Decode keeps all latents in host memory, and reads the chosen ones from there; the index is on the GPU."""
    for module in ("vllm.v1.hisparse.runtime", "vllm.third_party.deep_gemm"):
        if error := why_not_imported(module):
            pytest.skip(f"no HiSparse there: {error}")
    hisparse = {
        "kv_connector": "HiSparseConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"host_pool_gib": 1},
    }  # fmt: skip
    both = multi_connector(transfer("kv_consumer", time_left_s=TIME_LEFT_S), hisparse)
    options = {"max_model_len": 8_192, "enable_prefix_caching": False, "max_num_seqs": 4}
    with engines(checkpoints, tmp_path, "glm_dsa", **options) as started:
        pair = VllmPair(started.prefill(), started.start("decode", kv_transfer_config=both))
        same_bytes(pair, 65, 300, 1_500, 3_000, 5_000, whole=64)
        assert sum_of(pair.decode, "vllm:hisparse_host_to_device_bytes") > 0
        assert sum_of(pair.decode, "vllm:hisparse_host_cache_usage_perc") == 0
        # Attention sees all tokens of a prompt that is no longer than what the index chooses.
        asked = prompts(65, 300, 1_500, 1_990, seed=9)
        for order in ORDERS:
            continue_as_one(pair.prefill, asked, handed_over(pair, asked, order=order))
        pair.settles()


# Beside a tier in host memory

CHUNK = 32  # of LMCache: more tokens than a test generates, and several blocks


@pytest.fixture(scope="module", params=["OffloadingConnector", "LMCache"])
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def offloading(
    tier: str, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmEngine]]:
    """A prefill engine, and decode engines with the connector of a tier behind ours and before it."""
    folder = tmp_path_factory.mktemp("tiers")
    ours = transfer("kv_consumer", time_left_s=TIME_LEFT_S)
    with ExitStack() as stack:
        if tier == "LMCache":
            if error := why_not_imported("lmcache.integration.vllm.lmcache_mp_connector"):
                pytest.skip(f"no LMCache there: {error}")
            offloads = stack.enter_context(lmcache_server(PYTHON, folder / "lmcache.log", chunk=CHUNK))
        else:
            offloads = {
                "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 3 << 29},
            }  # fmt: skip
        started = stack.enter_context(engines(checkpoints, folder, "llama_long"))
        tiers = {"prefill": started.prefill()}
        for name, connectors in (("ours first", [ours, offloads]), ("ours second", [offloads, ours])):
            tiers[name] = started.start(name.replace(" ", "-"), kv_transfer_config=multi_connector(*connectors))
        yield tiers


@pytest.mark.parametrize("order", ["ours first", "ours second"])
def test_what_a_tier_in_host_memory_has_is_not_sent_again(
    tier: str, offloading: dict[str, VllmEngine], order: str
) -> None:
    """With such a connector in MultiConnector: the first of both that has a prompt loads it. LMCache keeps what its
    engine has computed itself, and nothing that came from a peer."""
    decode = offloading[order]
    pair = VllmPair(offloading["prefill"], decode)
    pair.ready()
    asked = prompts(100, 300, 1_500, 3_000, seed=len(order))
    sent: list[float] = []
    for times in range(2):
        before = received_bytes(decode)
        answers = handed_over(pair, asked, order="serial")
        pair.settles()
        sent.append(received_bytes(decode) - before)
        assert [answer.finish_reason for answer in answers] == ["length"] * len(asked)
        others = [ties(pair.prefill, prompt, answer.tokens) for prompt, answer in zip(asked, answers, strict=True)]
        print(f"{order}, time {times + 1}: {sent[-1]:,.0f} bytes were sent, {others} tokens are others as likely")
        assert None not in others
        settles(decode.forgets, True)
        # Without a peer only the tier has it.
        before = received_tokens(decode)
        loaded = decode.generate(asked, tokens=TOKENS)
        hits = received_tokens(decode) - before
        print(f"{order}, time {times + 1}: {hits:,.0f} tokens of {sum(map(len, asked)):,} came from the tier")
        if tier == "LMCache" and times == 1 and not hits:
            log = (decode.log.parent / "lmcache.log").read_text()
            pytest.skip(f"LMCache keeps nothing here: {[line for line in log.splitlines() if 'Error' in line][-1:]}")
        assert (hits > 0.9 * sum(map(len, asked))) == (tier == "OffloadingConnector" or times == 1)
        assert None not in [ties(pair.prefill, prompt, tokens) for prompt, tokens in zip(asked, loaded, strict=True)]
        pair.settles()
        settles(decode.forgets, True)
    assert sent[0] > 0
    assert sent[1] == (sent[0] if order == "ours first" else 0)
    stays_on_the_gpu(decode)


# Over Mooncake


def test_kv_is_sent_over_mooncake(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """By its engines, with a small staging buffer where they do not reach the GPU's memory, and checksums."""
    if error := why_not_imported("mooncake.engine"):
        pytest.skip(f"no Mooncake there: {error}")
    settings = {"transport": "mooncake", "time_left_s": 120.0}
    with engines(checkpoints, tmp_path, "llama_long", enable_prefix_caching=False) as started:
        prefill = started.prefill(settings=settings)
        decode = started.decode(settings=settings | {"host_buffer_gib": 0.25, "verify": True})
        pair = VllmPair(prefill, decode)
        pair.ready()
        asked = prompts(3_000, 6_000, seed=8)  # the second does not fit into the share of the buffer that one moves at
        answers = handed_over(pair, asked, order="serial")
        answers += handed_over(pair, asked, order="decode first")
        continue_as_one(prefill, asked * 2, answers)
        pair.settles()
        received = received_bytes(decode)
        copied = sum_of(decode, "vllm:pdtransfer_copied_up_bytes_total")
        print(f"{received:,.0f} bytes were sent, {copied:,.0f} were copied up")
        assert received >= 2 * 9_000 * 16_384
        assert copied >= received, "what is verified lands in host memory first"
        assert "over mooncake" in decode.log.read_text()


# Layouts


@pytest.fixture(scope="module")
def layouts(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], VllmEngine]]:
    """Prefill and decode engines with heads that lie apart, and with tokens whose heads lie together."""
    with engines(checkpoints, tmp_path_factory.mktemp("layouts"), "llama_long", max_model_len=2_048) as started:
        by_role: dict[tuple[str, str], VllmEngine] = {}
        for layout in ("HND", "NHD"):
            environment = {"VLLM_KV_CACHE_LAYOUT": layout}
            by_role["prefill", layout] = started.prefill(f"prefill-{layout}", environment=environment)
            by_role["decode", layout] = started.decode(f"decode-{layout}", environment=environment)
        yield by_role


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_either_layout_continues(layouts: dict[tuple[str, str], VllmEngine], layout: str) -> None:
    prefill = layouts["prefill", layout]
    pair = VllmPair(prefill, layouts["decode", layout])
    answer_as_one(pair, prefill, 5, 129, 300, 1_500, orders=["serial", "decode first"])
    stays_on_the_gpu(pair.decode)
    names = {"HND": "LBHNC", "NHD": "LBNHC"}  # as newer versions call them
    log = prefill.log.read_text()
    assert f"KV cache layout to {layout}" in log or f"Using {names[layout]} KV cache layout" in log


@pytest.mark.parametrize(
    ("sent", "kept", "refusal"),
    [
        ("HND", "NHD", r"refused: .*head_end: \S+ has heads 0\.\.3 of 'group0', which has 0"),
        ("NHD", "HND", r"refused: .*layout: kind kv layers \S+ row_bytes: source \d+, target \d+"),
    ],
    ids=["prefill HND", "prefill NHD"],
)
def test_unequal_layouts_are_refused(
    layouts: dict[tuple[str, str], VllmEngine], sent: str, kept: str, refusal: str
) -> None:
    prefill, decode = layouts["prefill", sent], layouts["decode", kept]
    pair = VllmPair(prefill, decode)
    for name, engine in (("prefill", prefill), ("decode", decode)):
        pair.blocks[name] = engine.ready()["blocks"] - 1
    [prompt] = prompts(300, seed=12)
    before = rooms(decode)
    assert pair.serial(prompt, tokens=TOKENS).finish_reason == "error"
    settles(lambda: rooms(decode).get("failed"), before.get("failed", 0) + 1)
    assert rooms(decode).get("received") == before.get("received")
    assert re.search(f"its KV was not received: {refusal}", decode.log.read_text()), decode.log_end()
    pair.settles()


# Speculation

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "ngram"])
def test_speculation_on_both_sides_continues(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    """A drafter's KV is sent as well. It has the model's own layers, and drafts what the model takes."""
    family = "llama_drafted" if kind == "eagle" else "llama"
    drafts: dict[str, Any] = {"method": kind, "num_speculative_tokens": 3}
    if kind == "eagle":
        drafts["model"] = str(tmp_path / "head")
        checkpoints.eagle(checkpoints.path(family), tmp_path / "head")
    elif kind == "draft_model":
        drafts["model"] = str(checkpoints.path(family))
    elif error := why_not_imported("numba"):
        pytest.skip(f"vLLM drafts from the prompt by numba: {error}")
    else:
        drafts = NGRAM
    with engines(checkpoints, tmp_path, family, max_model_len=2_048, speculative_config=drafts) as started:
        pair = VllmPair(started.prefill(), started.decode())
        if kind == "ngram":
            [beat] = prompts(20, seed=33)
            pair.ready()
            continue_as_one(pair.prefill, [beat * 12], handed_over(pair, [beat * 12], order="decode first"))
        answer_as_one(pair, pair.prefill, 5, 129, 300, 700, orders=["serial", "decode first"])
        shares: list[float] = []
        for engine in (pair.prefill, pair.decode):
            drafted, taken = (
                sum_of(engine, f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
            )
            assert drafted > 0
            shares.append(taken / drafted)
        print(f"of the drafts one engine took {shares[0]:.2f}, decode {shares[1]:.2f}")
        if kind != "ngram":
            assert shares[1] > 0.75 * shares[0] > 0.2, "the drafter has the KV of the prompt"
        stays_on_the_gpu(pair.decode)


# What ends early


def test_requests_and_prefill_end_early(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """40 requests, two in five given up; then prefill is killed with six under way, and another one takes its place."""
    settings = {"bind": f"tcp://127.0.0.1:{free_port()}"}
    with engines(checkpoints, tmp_path, "llama_long", enable_prefix_caching=False) as started:
        single = started.start("single")
        pair = VllmPair(started.prefill(settings=settings), started.decode())
        pair.ready()
        draw = random.Random(16)
        asked = prompts(*(draw.randrange(5, 3_000) for _ in range(40)), seed=16)
        fates = ["kept"] * 24 + ["decode", "prefill"] * 8
        draw.shuffle(fates)
        kept: list[tuple[list[int], Any]] = []
        for number, (prompt, fate) in enumerate(zip(asked, fates, strict=True)):
            label = pair.label()
            pair.begin_prefill(prompt, label, request=f"p{number}")
            received = pair.begin_decode(prompt, label, tokens=TOKENS, request=f"d{number}")
            if fate == "kept":
                kept.append((prompt, received))
            elif fate == "decode":
                pair.decode.abort(f"d{number}")
            else:
                pair.prefill.abort(f"p{number}")
                pair.decode.abort(f"d{number}")
        answers = [pair.decode.generated(received) for _, received in kept]
        pair.settles()
        single.ready()
        continue_as_one(single, [prompt for prompt, _ in kept], answers)

        under_way = prompts(*[3_000] * 6, seed=17)
        labels = [pair.label() for _ in under_way]
        added = [
            pair.begin_decode(prompt, label, tokens=TOKENS) for prompt, label in zip(under_way, labels, strict=True)
        ]
        settles(lambda: pair.decode.state()["requests"], len(under_way))
        pair.prefill.hold()
        for prompt, label in zip(under_way, labels, strict=True):
            pair.begin_prefill(prompt, label)
        pair.prefill.step(4)  # some chunks
        pair.prefill.kill()
        again = started.prefill("again", settings=settings)
        reasons = [pair.decode.generated(request).finish_reason for request in added]
        print(f"with prefill killed: {reasons}")
        assert set(reasons) <= {"error", "length"}
        assert "error" in reasons
        settles(pair.decode.state, {"free_blocks": pair.blocks["decode"], "requests": 0})
        pair = VllmPair(again, pair.decode)
        pair.ready()
        continue_as_one(single, under_way, handed_over(pair, under_way, order="prefill first"))
        pair.settles()
        stays_on_the_gpu(pair.decode)


def test_blocks_of_unequal_sizes_continue_by_tokens(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """In both directions, with `rows` set on both sides, as GPUs need it."""
    config = transfer("kv_both", rows="tokens", time_left_s=TIME_LEFT_S)
    with engines(checkpoints, tmp_path, "llama_long", enable_prefix_caching=False) as started:
        small, large = (
            started.start(f"blocks-{size}", block_size=size, kv_transfer_config=config) for size in (16, 64)
        )
        for pair in (VllmPair(small, large), VllmPair(large, small)):
            answer_as_one(pair, pair.prefill, 5, 63, 64, 65, 300, 1_500, orders=["serial", "decode first"])
            stays_on_the_gpu(pair.decode)


@pytest.mark.parametrize(
    ("sent", "kept"), [("BLHNC", "BLHNC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")], ids=["both", "prefill", "decode"]
)
def test_blocks_of_all_layers_continue(checkpoints: Checkpoints, tmp_path: Path, sent: str, kept: str) -> None:
    """Where all layers of a block lie together, on both sides or on one."""
    if why_not_imported(NEWER):
        pytest.skip("this version of vLLM has no such layout")
    with engines(checkpoints, tmp_path, "llama_long", max_model_len=2_048) as started:
        prefill = started.prefill(environment={"VLLM_KV_CACHE_LAYOUT": sent})
        pair = VllmPair(prefill, started.decode(environment={"VLLM_KV_CACHE_LAYOUT": kept}))
        answer_as_one(pair, prefill, 5, 129, 300, 1_500, orders=["serial", "decode first"])
        stays_on_the_gpu(pair.decode)
        for engine, layout in ((prefill, sent), (pair.decode, kept)):
            assert f"Using {layout} KV cache layout" in engine.log.read_text()


@pytest.mark.parametrize("family", ["granite_hybrid", "jamba"])
def test_states_are_sent_with_the_kv(checkpoints: Checkpoints, tmp_path: Path, family: str) -> None:
    """Those of Mamba 2 and of Mamba."""
    if why_not_imported(NEWER):
        pytest.skip("this version of vLLM lacks what states need")
    with engines(checkpoints, tmp_path, family, enable_prefix_caching=False, max_model_len=1_024) as started:
        pair = VllmPair(started.prefill(), started.decode())
        answer_as_one(pair, pair.prefill, 5, 100, 300, 1_000)
        stays_on_the_gpu(pair.decode)


@pytest.mark.parametrize("family", ["granite_hybrid", "lfm2"])
def test_states_are_refused_by_older_versions(checkpoints: Checkpoints, tmp_path: Path, family: str) -> None:
    """Those of Mamba 2, and of short convolutions: vLLM has what they need since 0.32."""
    if not why_not_imported(NEWER):
        pytest.skip("this version of vLLM has what states need")
    with engines(checkpoints, tmp_path, family, enable_prefix_caching=False, max_model_len=1_024) as started:
        decode = started.decode()
        with pytest.raises(RuntimeError, match="MambaSpec is not supported"):
            decode.ready()


# A large cache


def shared_bytes(engine: VllmEngine) -> int:
    """Of its process, as the kernel counts them: memory that is shared or pinned."""
    [line] = re.findall(r"^RssShmem:\s+(\d+) kB$", Path(f"/proc/{engine.process.pid}/status").read_text(), re.MULTILINE)
    return int(line) << 10


def test_a_large_cache_is_there_as_soon(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As a small one, and so is its first hand-off: no memory of the host is made for it, and nothing registered."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", "--id", gpu, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    free = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    large = min(100, free // 1024 - 14)
    if large < 40:
        pytest.skip(f"other processes have this GPU's memory: {free} MiB are free")
    with engines(checkpoints, tmp_path, "llama_long", enable_prefix_caching=False) as started:
        prefill = started.prefill()
        by_size = {gib: started.decode(f"decode-{gib}", kv_cache_memory_bytes=gib << 30) for gib in (4, large)}
        prompt, *warm = prompts(3_000, 3_000, 3_000, seed=44)
        prefill.generate(warm, tokens=2)
        figures: dict[int, tuple[float, float, int]] = {}
        for gib, decode in by_size.items():
            pair = VllmPair(prefill, decode)
            registered = decode.ready()["register_s"]
            begin = time.monotonic()
            pair.ready()
            first = time.monotonic() - begin
            continue_as_one(prefill, [prompt], handed_over(pair, [prompt], order="decode first"))
            shared = shared_bytes(decode)
            figures[gib] = registered, first, shared
            print(f"{gib} GiB: registered in {registered:.3f} s, first hand-off {first:.3f} s, {shared:,} bytes shared")
            pair.settles()
            stays_on_the_gpu(decode)
        for small_figure, large_figure, more in zip(figures[4], figures[large], (0.5, 0.5, 1 << 30), strict=True):
            assert large_figure < small_figure + more
        assert figures[large][0] < 1
