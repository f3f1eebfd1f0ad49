"""SGLang's servers on a GPU: sparse attention with HiSparse and without it, and what needs a GPU's kernels.

Each server checks all its pools whenever it has nothing to do, and ends where something leaks. Run with
PDTRANSFER_TEST_DEVICE=cuda; `tests/engines/test_sglang.py` runs there as well.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.pcie import PcieReads, UnsupportedError
from tests.engines.sglang_options import COMMON, DECODE, HISPARSE, LENGTHS, PREFILL, SPARSE, TOP_K
from tests.engines.sglang_requests import mixed_requests
from tests.support.paths import REPO
from tests.support.sglang_engine import (
    ANSWER_S,
    DEVICE,
    ENVIRONMENT,
    GPUS,
    PYTHON,
    RefusedError,
    SglangPair,
    SglangServer,
)
from tests.support.vllm_engine import Checkpoints

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="PDTRANSFER_TEST_DEVICE is cpu: no kernels of a GPU"),
]

TOKENS = 64
# Another batch, and chunks of other sizes, move most log-probabilities by less: of bytes and of a choice of the top k
# more than of others. Of an answer to another prompt hardly any token is near.
NEAR, SHARE_MIN, SHARE_OF_ANOTHER = 0.5, 0.7, 0.3

SETTINGS: dict[str, Any] = {"verify": False, "time_left_s": 60.0}
_SETTINGS: dict[str, Any] = {"settings": SETTINGS}


@dataclass
class Generated:
    """Tokens of a request, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts, whose tokens every family has."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(length)] for length in lengths]


def generated(server: SglangServer, prompt: Sequence[int], seconds: float = ANSWER_S, **more: Any) -> Generated:
    """Greedy tokens of one prompt."""
    body = {
        "input_ids": list(prompt), "return_logprob": True, "logprob_start_len": -1,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    } | more  # fmt: skip
    answer = server.ask("/generate", body, seconds)
    return Generated(answer["output_ids"], [each[0] for each in answer["meta_info"]["output_token_logprobs"]])


def handed_over(
    pair: SglangPair, asked: Sequence[Sequence[int]], *, at_once: bool = False, **more: Any
) -> list[Generated]:
    """Of each prompt, what decode goes on with; one at a time, or all at once. `more` are further fields of both."""

    def one(prompt: Sequence[int]) -> Generated:
        room = pair.room() | more
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(generated, pair.prefill, prompt, **room)
            answer = generated(pair.decode, prompt, **room)
            assert first.result().tokens[0] == answer.tokens[0]
        return answer

    with ThreadPoolExecutor(len(asked) if at_once else 1) as threads:
        return list(threads.map(one, asked))


def same(answers: Sequence[Generated], expected: Sequence[Generated]) -> None:
    """The same tokens, with the same log-probabilities."""
    found: list[tuple[int, float]] = []
    for answer, reference in zip(answers, expected, strict=True):
        pairs = zip(answer.tokens, reference.tokens, strict=True)
        equal = next((index for index, (one, other) in enumerate(pairs) if one != other), TOKENS)
        logprobs = zip(answer.logprobs[:equal], reference.logprobs[:equal], strict=True)
        found.append((equal, max((abs(one - other) for one, other in logprobs), default=0.0)))
    assert all(equal == TOKENS and far < 1e-3 for equal, far in found), f"equal tokens, and how far apart: {found}"


def share_near(single: SglangServer, prompt: Sequence[int], answer: Generated) -> float:
    """The share of an answer's tokens that a single server thinks nearly likeliest behind all before them."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    info = single.ask(
        "/generate",
        {
            "input_ids": [*prompt, *answer.tokens], "sampling_params": sampling, "return_logprob": True,
            "logprob_start_len": len(prompt) - 1, "top_logprobs_num": 1,
        },
    )["meta_info"]  # fmt: skip
    scored, likeliest = info["input_token_logprobs"][-TOKENS:], info["input_top_logprobs"][-TOKENS:]
    # SGLang shows the last token of the vocabulary as 0.
    assert all(shown in (token, 0) for (_, shown, *_), token in zip(scored, answer.tokens, strict=True))
    share = sum(best[0][0] - own[0] < NEAR for own, best in zip(scored, likeliest, strict=True)) / TOKENS
    print(f"prompt of {len(prompt)}: {share:.2f} of the tokens near the likeliest")
    return share


def follow(single: SglangServer, asked: Sequence[Sequence[int]], answers: Sequence[Generated]) -> None:
    """A single server would give these answers. Requests that share batches differ in the last bits, so of two tokens
    that are as likely either may be picked, and what follows is another text."""
    for prompt, answer in zip(asked, answers, strict=True):
        assert share_near(single, prompt, answer) >= SHARE_MIN


class Servers:
    """Servers of one model, started together; each is waited for where it is first asked."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack, **options: dict[str, Any]) -> None:
        self._started = {
            name: stack.enter_context(SglangServer(model, folder / f"{name}.log", **_SETTINGS | COMMON | given))
            for name, given in options.items()
        }
        self._stack, self._model, self._folder, self.options = stack, model, folder, options

    def __getitem__(self, name: str) -> SglangServer:
        return self._started[name].ready()

    def pair(self, prefill: str, decode: str) -> SglangPair:
        return SglangPair(self[prefill], self[decode])

    def again(self, name: str) -> None:
        """Ends a server with SIGKILL; another one takes its address."""
        dead = self._started[name]
        os.killpg(dead.process.pid, signal.SIGKILL)
        dead.process.wait()
        options = _SETTINGS | COMMON | self.options[name]
        log = self._folder / f"{name}-again.log"
        self._started[name] = self._stack.enter_context(SglangServer(self._model, log, like=dead, **options))


@pytest.fixture(scope="module", params=["glm_dsa", "deepseek_v32"])
def sparse(
    request: pytest.FixtureRequest, sglang_checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Decode servers of sparse attention: with HiSparse; with HiSparse, a small device pool and checksums; without."""
    model, folder = sglang_checkpoints.path(request.param), tmp_path_factory.mktemp(request.param)
    checked = {"settings": SETTINGS | {"verify": True}}
    with ExitStack() as stack:
        yield Servers(
            model, folder, stack,
            single=SPARSE, prefill=SPARSE | PREFILL,
            hisparse=SPARSE | DECODE | HISPARSE,
            small=SPARSE | DECODE | HISPARSE | checked | {"max_total_tokens": 6_400},
            device=SPARSE | DECODE | checked,
        )  # fmt: skip


def test_many_requests_at_once_leave_nothing_behind(sparse: Servers) -> None:
    mixed_requests(sparse.pair("prefill", "hisparse"), sparse["single"])


@pytest.mark.parametrize("decode", ["hisparse", "small", "device"])
def test_decode_continues_what_prefill_computed(sparse: Servers, decode: str) -> None:
    asked = prompts(*LENGTHS)
    expected = [generated(sparse["single"], prompt) for prompt in asked]
    pair = sparse.pair("prefill", decode)
    same(handed_over(pair, asked), expected)
    follow(sparse["single"], asked, handed_over(pair, asked, at_once=True))
    [other] = prompts(LENGTHS[-1], seed=2)
    changed = other[: len(other) // 2] + asked[-1][len(other) // 2 :]
    [of_another] = handed_over(pair, [changed])
    assert share_near(sparse["single"], asked[-1], of_another) < SHARE_OF_ANOTHER, "it depends on the first half"
    pair.settles()
    if decode == "hisparse":  # a server that verifies has KV land in host memory, where it computes checksums
        assert "does not reach the GPU" not in pair.decode.log.read_text(), "nothing is copied up from host memory"


@pytest.mark.parametrize("dies", ["prefill", "hisparse"])
def test_another_server_takes_the_address_of_one_that_was_killed(sparse: Servers, dies: str) -> None:
    asked = prompts(300, 6_000)
    expected = [generated(sparse["single"], prompt) for prompt in asked]
    pair = sparse.pair("prefill", "hisparse")
    first, received = pair.begin([prompts(6_000, seed=number)[0] for number in range(6)], tokens=TOKENS)
    time.sleep(0.3)
    sparse.again(dies)
    for each in (*first, *received):
        assert each.exception(120) is None or isinstance(each.exception(), (RefusedError, OSError))
    pair = sparse.pair("prefill", "hisparse")
    same(handed_over(pair, asked), expected)
    pair.settles()


# What the GPU reads

ROW_BYTES = 4 * (512 + 64) * 2  # of glm_dsa: a latent row in each layer
SHORT_CONTEXT, CONTEXT = 1_984, 15_936  # the first fits into a device buffer: whole pages, with room for a token
ADMISSIONS = 5
QUIET_S = 1.0
SLACK_BYTES = 4 << 20  # commands for the GPU, and indices: prompts of 15,936 have 73 MB of rows


def read_by_an_admission(counter: PcieReads, pair: SglangPair, length: int) -> int:
    """Bytes that the GPU receives for one hand-off, and for no step of decode: the middle of several, each with its own
    prompt, less what it receives without one."""
    received: list[int] = []
    for asked in prompts(*[length] * (ADMISSIONS + 1), seed=length):
        time.sleep(QUIET_S)
        counter.since_last()
        time.sleep(QUIET_S)
        idle = counter.since_last()
        began = time.monotonic()
        first, answers = pair.begin([asked], tokens=1)
        assert answers[0].result() == first[0].result()
        time.sleep(QUIET_S)
        received.append(int(counter.since_last() - idle / QUIET_S * (time.monotonic() - began)))
    return sorted(received[1:])[ADMISSIONS // 2]  # the first one may load kernels


@pytest.fixture
def counter() -> PcieReads:
    try:
        return PcieReads()
    except UnsupportedError as error:
        pytest.skip(f"the driver does not count what the GPU receives: {error}")


def test_an_admission_reads_no_more_than_the_preload(
    sglang_checkpoints: Checkpoints, tmp_path: Path, counter: PcieReads
) -> None:
    """By the driver's counter of what crosses the bus. With HiSparse SGLang preloads a context that fits into the
    device buffer, and of a longer one nothing. A server without HiSparse that verifies copies all rows up: the counter
    sees them. Nothing else may use the GPU meanwhile."""
    checked = {"settings": SETTINGS | {"verify": True}}
    with ExitStack() as stack:
        servers = Servers(
            sglang_checkpoints.path("glm_dsa"), tmp_path, stack, prefill=SPARSE | PREFILL,
            hisparse=SPARSE | DECODE | HISPARSE, copies=SPARSE | DECODE | checked,
        )  # fmt: skip
        received: dict[tuple[str, int], int] = {}
        for decode in ("hisparse", "copies"):
            pair = servers.pair("prefill", decode).ready()
            for length in (SHORT_CONTEXT, CONTEXT):
                received[decode, length] = read_by_an_admission(counter, pair, length)
                rows = length * ROW_BYTES
                print(f"{decode}, {length} tokens: received {received[decode, length]:,} bytes; rows: {rows:,} bytes")
    for length in (SHORT_CONTEXT, CONTEXT):
        assert received["copies", length] > 0.9 * length * ROW_BYTES, "the counter sees what is copied up"
    assert received["hisparse", SHORT_CONTEXT] > 0.9 * SHORT_CONTEXT * ROW_BYTES
    # Headers of packets count too.
    assert received["hisparse", SHORT_CONTEXT] < 1.3 * SHORT_CONTEXT * ROW_BYTES + SLACK_BYTES
    # Nothing is preloaded. A step loads the rows that it chooses, which is no more than a buffer holds.
    assert received["hisparse", CONTEXT] < TOP_K * ROW_BYTES


# DeepSeek V4

# Across the edges of rows of 4 and 128 and of pages. The last two have two chunks, and more rows of 4 than are chosen
# or than HiSparse's buffer has. One of them ends within a row.
V4_LENGTHS = 5, 127, 128, 255, 256, 257, 300, 1_023, 2_054, 3_000
V4_TOP_K = 512
V4_CONFIG: dict[str, Any] = {  # sizes that its kernels have, with few layers and experts
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
    "vocab_size": 8_192, "hidden_size": 4_096, "moe_intermediate_size": 2_048, "intermediate_size": 2_048,
    "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1_024,
    "kv_lora_rank": 512, "qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "v_head_dim": 512, "o_groups": 8,
    "o_lora_rank": 1_024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": V4_TOP_K, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "topk_method": "noaux_tc", "num_hash_layers": 0, "n_hash_layers": 0,
    "compress_ratios": [0, 0, 4, 128, 4, 128], "sliding_window": 128, "window_size": 128, "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32,
        "beta_slow": 1,
    },
}  # fmt: skip
V4: dict[str, Any] = {
    "attention_backend": False, "load_format": "dummy", "skip_tokenizer_init": True, "dsa_topk_backend": "torch",
    "disable_flashinfer_autotune": True, "page_size": 256, "swa_full_tokens_ratio": 0.5, "max_total_tokens": 65_536,
}  # fmt: skip
V4_BUFFERS = {"top_k": V4_TOP_K, "device_buffer_size": V4_TOP_K, "host_to_device_ratio": 4}
V4_ENVIRONMENT = {  # without tilelang's kernels, which not each environment has
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "false", "SGLANG_OPT_USE_TILELANG_MHC_POST": "false",
    "SGLANG_OPT_FUSE_MHC_POST_PRE": "false",
}  # fmt: skip
FIRST_ANSWER_S = 400.0  # kernels are compiled


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Decode servers of DeepSeek V4, with HiSparse and without it."""
    folder = tmp_path_factory.mktemp("v4")
    (folder / "config.json").write_text(json.dumps(V4_CONFIG))
    weights = os.pathsep.join([str(REPO / "tests" / "engines" / "weights"), ENVIRONMENT["PYTHONPATH"]])
    hisparse = {"enable_hisparse": True, "hisparse_config": json.dumps(V4_BUFFERS)}
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        for name, value in (V4_ENVIRONMENT | {"PYTHONPATH": weights}).items():
            patched.setitem(ENVIRONMENT, name, value)
        servers = Servers(
            folder, folder, stack, single=V4, prefill=V4 | PREFILL,
            device=V4 | DECODE | {"settings": SETTINGS | {"verify": True}}, hisparse=V4 | DECODE | hisparse,
        )  # fmt: skip
        # Of all tokens, SGLang reports those as used for which the pool on the GPU has no room.
        servers["hisparse"].at_rest = servers["hisparse"].used_tokens()
        [longest] = prompts(V4_LENGTHS[-1], seed=3)
        with ThreadPoolExecutor(5) as threads:
            asked = [threads.submit(generated, servers["single"], longest, seconds=FIRST_ANSWER_S)]
            for decode in ("device", "hisparse"):
                room = servers.pair("prefill", decode).room() | {"seconds": FIRST_ANSWER_S}
                asked += [threads.submit(generated, servers[side], longest, **room) for side in ("prefill", decode)]
            for each in asked:
                each.result()
        yield servers


@pytest.fixture(scope="module")
def v4_answers(v4: Servers) -> list[tuple[list[int], Generated, float]]:
    """Prompts; what one server answers, the same when it is asked again; and the share of this that the server itself
    finds near the likeliest, as it computes all tokens at once."""
    single, asked = v4["single"], prompts(*V4_LENGTHS)
    answers, again = ([generated(single, prompt) for prompt in asked] for _ in range(2))
    same(again, answers)
    return [(prompt, answer, share_near(single, prompt, answer)) for prompt, answer in zip(asked, answers, strict=True)]


@pytest.mark.timeout(580)
@pytest.mark.parametrize("decode", ["device", "hisparse"])
def test_deepseek_v4_continues(v4: Servers, v4_answers: list[tuple[list[int], Generated, float]], decode: str) -> None:
    """As one server without HiSparse does. Requests that share batches have nearly what it has."""
    single, pair = v4["single"], v4.pair("prefill", decode)
    asked = [prompt for prompt, *_ in v4_answers]
    same(handed_over(pair, asked), [answer for _, answer, _ in v4_answers])
    for (prompt, _, own), answer in zip(v4_answers, handed_over(pair, asked, at_once=True), strict=True):
        assert share_near(single, prompt, answer) >= SHARE_MIN * own
    for prompt in asked[3:]:
        [other] = prompts(len(prompt), seed=2)
        [of_another] = handed_over(pair, [other[: len(other) // 2] + prompt[len(other) // 2 :]])
        assert share_near(single, prompt, of_another) < SHARE_OF_ANOTHER, "it depends on the first half"
    pair.settles()
    if decode == "hisparse":
        assert "does not reach the GPU" not in pair.decode.log.read_text(), "nothing is copied up from host memory"


# Other forms of the sparse cache

HICACHE: dict[str, Any] = {  # prefill's radix cache has little room on the GPU, and more behind it in host memory
    "disable_radix_cache": False, "enable_hierarchical_cache": True, "hicache_size": 2, "max_total_tokens": 8_192,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "hicache": SPARSE,
    "fp8": SPARSE | {
        "kv_cache_dtype": "fp8_e4m3", "dsa_prefill_backend": "flashmla_kv", "dsa_decode_backend": "flashmla_kv"
    },
    "cuda graphs": SPARSE | {
        "disable_cuda_graph": False, "cuda_graph_max_bs_decode": 4, "cuda_graph_backend_prefill": "disabled"
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", list(FORMS))
def test_other_forms_of_the_sparse_cache_continue(sglang_checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    """With HiSparse, and without it. What prefill has kept begins other chunks, so answers follow."""
    options, asked, keeps = FORMS[kind], prompts(*LENGTHS), kind == "hicache"
    with ExitStack() as stack:
        servers = Servers(
            sglang_checkpoints.path("glm_dsa"), tmp_path, stack, single=options,
            prefill=options | PREFILL | (HICACHE if keeps else {}),
            hisparse=options | DECODE | HISPARSE, device=options | DECODE,
        )  # fmt: skip
        expected = [generated(servers["single"], prompt) for prompt in asked]
        for decode in ("device", "hisparse"):
            pair = servers.pair("prefill", decode)
            answers = handed_over(pair, asked)
            if keeps:
                follow(servers["single"], asked, answers)
            else:
                same(answers, expected)
            follow(servers["single"], asked, handed_over(pair, asked, at_once=True))
            pair.settles()
        if keeps:  # of each round that is asked at once
            kept = sum(map(int, re.findall(r"#cached-token: (\d+)", servers["prefill"].log.read_text())))
            assert kept > 2 * HICACHE["max_total_tokens"], "more than the GPU has room for"


# Dense attention

SHORT: dict[str, Any] = {"context_length": 2_048}  # all that the small families have
DENSE: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "cuda graphs": {"disable_cuda_graph": False, "cuda_graph_max_bs_decode": 8, "cuda_graph_max_bs_prefill": 256},
    "radix cache": {"disable_radix_cache": False},
    "hicache": {},
    "dp attention": {"enable_dp_attention": True, "dp_size": 1},
}


@pytest.mark.parametrize("kind", list(DENSE))
def test_dense_models_continue(sglang_checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    options, asked = SHORT | DENSE[kind], prompts(5, 300, 1_500)
    of_prefill, of_decode = options | PREFILL, options | DECODE
    if kind == "radix cache":
        of_decode |= {"disaggregation_decode_enable_radix_cache": True}
    elif kind == "hicache":  # beside the longest prompt there is room for two pages
        of_prefill |= HICACHE | {"max_total_tokens": 1_664}
    with ExitStack() as stack:
        model = sglang_checkpoints.path("qwen3")
        servers = Servers(model, tmp_path, stack, single=options, prefill=of_prefill, decode=of_decode)
        pair = servers.pair("prefill", "decode")
        expected = [generated(servers["single"], prompt) for prompt in asked]
        for _ in range(2):  # the second time, with what caches have kept: chunks begin elsewhere
            answers = handed_over(pair, asked)
            follow(servers["single"], asked, answers)
            if kind not in ("radix cache", "hicache"):
                same(answers, expected)
        follow(servers["single"], asked, handed_over(pair, asked, at_once=True))
        pair.settles()
        if kind == "hicache":
            assert "#cached-token: 256" in servers["prefill"].log.read_text(), "all but the last page of 300"


@pytest.mark.skipif(GPUS < 2, reason="the ranks of a server need a GPU each: PDTRANSFER_TEST_GPUS is less than 2")
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3_yarn"])
def test_ranks_and_stages_of_two_gpus_hand_over(
    sglang_checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One rank to one, two to one, one to two, two to two, and two pipeline stages to one rank. Heads are shared out;
    latents are on each rank. Decode computes checksums of what landed. Prefill's one rank has another GPU than
    decode's."""
    monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")  # other servers have the GPUs as well
    asked, second = prompts(5, 300, 1_500), SHORT | {"base_gpu_id": 1}
    ranks = SHORT | {"tp_size": 2, "disable_custom_all_reduce": True}
    checked = DECODE | {"settings": SETTINGS | {"verify": True}}
    with ExitStack() as stack:
        servers = Servers(
            sglang_checkpoints.path(name), tmp_path, stack, single=second, p1=SHORT | PREFILL, p2=ranks | PREFILL,
            stages=SHORT | PREFILL | {"pp_size": 2}, d1=second | checked, d2=ranks | checked,
        )  # fmt: skip
        expected = [generated(servers["single"], prompt) for prompt in asked]
        for prefill, decode in (("p1", "d1"), ("p2", "d1"), ("p1", "d2"), ("p2", "d2"), ("stages", "d1")):
            pair = servers.pair(prefill, decode)
            answers = handed_over(pair, asked)
            if (prefill, decode) == ("p1", "d1"):
                same(answers, expected)
            follow(servers["single"], asked, answers)
            follow(servers["single"], asked, handed_over(pair, asked, at_once=True))
            pair.settles()


def test_an_adapter_by_its_name_continues(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """LoRA, which both servers have loaded, beside requests without it."""
    asked, model = prompts(5, 300, 1_500), sglang_checkpoints.path("llama")
    sglang_checkpoints.adapter(model, tmp_path / "tuned")
    options = SHORT | {
        "enable_lora": True, "lora_paths": f"tuned={tmp_path / 'tuned'}", "max_loras_per_batch": 2,
        "lora_backend": "triton",
    }  # fmt: skip
    with ExitStack() as stack:
        servers = Servers(
            model, tmp_path, stack, single=options, prefill=options | PREFILL, decode=options | DECODE
        )  # fmt: skip
        pair, answers = servers.pair("prefill", "decode"), list[list[Generated]]()
        for named in ({"lora_path": "tuned"}, {}):
            expected = [generated(servers["single"], prompt, **named) for prompt in asked]
            answers.append(handed_over(pair, asked, **named))
            same(answers[-1], expected)
        assert all(tuned.tokens != plain.tokens for tuned, plain in zip(*answers, strict=True))
        pair.settles()


def test_states_are_sent_with_the_kv(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Of gated delta nets, between layers of experts."""
    asked = prompts(5, 300, 1_500)
    with ExitStack() as stack:
        model = sglang_checkpoints.path("qwen3_next")
        servers = Servers(model, tmp_path, stack, single=SHORT, prefill=SHORT | PREFILL, decode=SHORT | DECODE)
        pair = servers.pair("prefill", "decode")
        follow(servers["single"], asked, handed_over(pair, asked))
        follow(servers["single"], asked, handed_over(pair, asked, at_once=True))
        pair.settles()


def test_kv_is_sent_over_mooncake(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """With checksums, which a server computes of what landed."""
    command, environment = [PYTHON, "-c", "import mooncake.engine"], os.environ | ENVIRONMENT
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"no Mooncake there: {ended.stderr.strip().rpartition(chr(10))[2]}")
    settings = {"settings": SETTINGS | {"transport": "mooncake"}}
    checked = {"settings": SETTINGS | {"transport": "mooncake", "verify": True}}
    asked = prompts(5, 300, 1_500)
    with ExitStack() as stack:
        model = sglang_checkpoints.path("qwen3")
        servers = Servers(
            model, tmp_path, stack, single=SHORT, prefill=SHORT | PREFILL | settings, decode=SHORT | DECODE | checked
        )
        expected = [generated(servers["single"], prompt) for prompt in asked]
        pair = servers.pair("prefill", "decode")
        same(handed_over(pair, asked), expected)
        follow(servers["single"], asked, handed_over(pair, asked, at_once=True))
        pair.settles()
        assert "over mooncake" in pair.decode.log.read_text()


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        pytest.param(
            "hisparse",
            marks=pytest.mark.xfail(
                raises=OSError, strict=True, reason="SGLang ends: its pool of sparse rows has no get_cpu_copy"
            ),
        ),
    ],
)
def test_what_decode_retracts_goes_on(
    sglang_checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """SGLang's own switch: decode retracts requests at fixed intervals of steps, as where its pool is full."""
    common, hisparse = (SPARSE, HISPARSE) if kind == "hisparse" else (SHORT, dict[str, Any]())
    asked = prompts(700, 900, 1_100)
    with ExitStack() as stack:
        model = sglang_checkpoints.path("glm_dsa" if kind == "hisparse" else "qwen3")
        servers = Servers(model, tmp_path, stack, single=common, prefill=common | PREFILL)
        monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
        monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")
        retracting = Servers(model, tmp_path, stack, decode=common | DECODE | hisparse)
        pair = SglangPair(servers["prefill"], retracting["decode"])
        answers = handed_over(pair, asked, at_once=True)
        follow(servers["single"], asked, answers)
        assert "Testing retraction" in pair.decode.log.read_text()
        pair.settles()
