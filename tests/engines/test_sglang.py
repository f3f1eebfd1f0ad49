"""Two SGLang servers with pdtransfer between them: same tokens as one server, and no page lost, whatever ends.

Every server checks all its pools whenever it has nothing to do, and ends where something leaks: see `settles`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import aiohttp
import pytest

from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.servers.backend import Servers
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import RouterConfig
from tests.engines.sglang_requests import Family, mixed_requests
from tests.support.llmd_sidecar import PREFILLER, sidecar
from tests.support.sglang_engine import (
    ANSWER_S,
    DEVICE,
    ENVIRONMENT,
    PYTHON,
    RefusedError,
    SglangPair,
    SglangServer,
    free_port,
    is_since,
)
from tests.support.vllm_engine import Checkpoints, prompts
from tests.support.waiting import run_on_loop, until

pytestmark = pytest.mark.timeout(2_000)  # servers start slowly on a busy host

TOKENS = 24
LENGTHS = 5, 15, 16, 17, 255, 256, 300, 700
TIME_LEFT_S = 30.0  # after which either side gives a hand-off up
PREFILL = {"disaggregation_mode": "prefill"}
DECODE: dict[str, Any] = {"disaggregation_mode": "decode"}
if DEVICE == "cpu" and is_since("0.5.18"):  # the default backup of what is retracted is pinned by CUDA
    DECODE["disaggregation_decode_retraction_backup"] = "cpu_tensor"


@contextmanager
def servers(model: Path, folder: Path, **options: dict[str, Any]) -> Iterator[list[SglangServer]]:
    """Servers of one model, by the names of their logs, started together. The ranks of one need a GPU each."""
    if DEVICE != "cpu" and any(each.get("tp_size", 1) * each.get("pp_size", 1) > 1 for each in options.values()):
        pytest.skip("all servers share one GPU")
    with ExitStack() as stack:
        settings = {"verify": True, "time_left_s": TIME_LEFT_S}
        made = [
            stack.enter_context(SglangServer(model, folder / f"{name}.log", **{"settings": settings} | each))
            for name, each in options.items()
        ]
        for each in made:
            each.ready()
        yield made


@contextmanager
def family(model: Path, folder: Path, **options: Any) -> Iterator[Family]:
    made = servers(model, folder, prefill=options | PREFILL, decode=options | DECODE, single=options)
    with made as (prefill, decode, single):
        yield SglangPair(prefill, decode), single


WIDE = "float32" if DEVICE == "cpu" else "bfloat16"


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "bfloat16"), ("gemma3", WIDE), ("deepseek_v3_yarn", WIDE)])
def test_other_models_continue_as_well(name: str, dtype: str, sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """They come first, before servers run that the other tests share.

    Two bytes a number; windows, which have a pool and pages of their own; and MLA, one latent row a token."""
    with family(sglang_checkpoints.path(name), tmp_path, dtype=dtype) as (pair, single):
        for prompt in prompts(*LENGTHS, seed=4):  # one at a time: the bits of two bytes depend on who shares a batch
            assert pair.generate([prompt], tokens=TOKENS) == single.generate([prompt], tokens=TOKENS), len(prompt)
        pair.settles()


def test_ranks_of_data_parallel_attention_hand_over(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Each rank has requests and a cache of its own; prefill's is identified by the request's room. Two ranks to two,
    and to a server of one rank."""
    ranks: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "enable_dp_lm_head": True}
    made = servers(
        sglang_checkpoints.path("qwen3"), tmp_path, prefill=PREFILL | ranks, decode=DECODE | ranks, single=DECODE
    )
    asked = prompts(*LENGTHS, seed=5)
    expected = sglang_checkpoints.generate("qwen3", asked, tokens=TOKENS)
    with made as (prefill, decode, single):
        for target in (decode, single):
            pair = SglangPair(prefill, target)
            assert pair.generate(asked, tokens=TOKENS) == expected
            pair.settles()


@pytest.mark.full
def test_data_parallel_engines_behind_one_address_hand_over(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Without DP attention: each rank has the whole model. SGLang's prefill chooses one by the request's room, and its
    decode takes turns. Two to two, and two to a server of one."""
    ranks = {"dp_size": 2, "nccl_port": False}  # a port for each
    made = servers(
        sglang_checkpoints.path("qwen3"), tmp_path, prefill=PREFILL | ranks, decode=DECODE | ranks, single=DECODE
    )
    asked = prompts(*LENGTHS, seed=5)
    expected = sglang_checkpoints.generate("qwen3", asked, tokens=TOKENS)
    with made as (prefill, decode, single):
        for target in (decode, single):
            pair = SglangPair(prefill, target)
            for prompt, tokens in zip(asked, expected, strict=True):
                rooms = [pair.room(2 * random.getrandbits(60) + rank + 2) for rank in (0, 1)]
                first = [prefill.add(prompt, tokens=TOKENS, **room) for room in rooms]
                assert [target.add(prompt, tokens=TOKENS, **room).result() for room in rooms] == [tokens] * 2
                assert [sent.result()[0] for sent in first] == tokens[:1] * 2
            pair.settles()


@pytest.mark.skipif(not is_since("0.5.23"), reason="the stand-in is for SGLang 0.5.23's runner")
def test_ranks_of_context_parallelism_hand_over(
    sglang_checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank computes some of the tokens, and has the KV of all. The first one sends them, also where SGLang would
    have each rank send some of the pages; then without those that decode has kept."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1")
    ranks = {"tp_size": 2, "attn_cp_size": 2, "enable_prefill_cp": True, "cp_strategy": "zigzag"}
    keeps = {"disable_radix_cache": False}
    made = servers(
        sglang_checkpoints.path("qwen3"), tmp_path, prefill=PREFILL | keeps | ranks,
        decode=DECODE | keeps | {"disaggregation_decode_enable_radix_cache": True},
    )  # fmt: skip
    asked = prompts(*LENGTHS, seed=5)
    expected = sglang_checkpoints.generate("qwen3", asked, tokens=TOKENS)
    with made as (prefill, decode):
        pair = SglangPair(prefill, decode)
        for _ in range(2):
            assert pair.generate(asked, tokens=TOKENS) == expected
        [prompt], room = prompts(700, seed=8), pair.room()
        given_up = [side.add(prompt, tokens=100, rid="given up", **room) for side in (prefill, decode)]
        decode.give_up(given_up[1], "given up")
        given_up[0].exception(2 * TIME_LEFT_S)
        assert pair.generate(asked[:1], tokens=TOKENS) == expected[:1]
        pair.settles()


@pytest.fixture(scope="module")
def llama(sglang_checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Prefill and decode keep what they have computed or received."""
    shared: dict[str, Any] = {"disable_radix_cache": False, "enable_metrics": True}
    model, folder = sglang_checkpoints.path("llama"), tmp_path_factory.mktemp("llama")
    of_decode = DECODE | shared | {"disaggregation_decode_enable_radix_cache": True}
    with servers(model, folder, prefill=PREFILL | shared, decode=of_decode, single={}) as (one, two, single):
        yield SglangPair(one, two), single


@pytest.mark.skipif(DEVICE != "cpu", reason="transformers compute on a CPU, with float32")
def test_one_server_generates_what_transformers_generate(llama: Family, sglang_checkpoints: Checkpoints) -> None:
    """Which the other tests rely on."""
    _, single = llama
    asked = prompts(5, 100, 300)
    assert single.generate(asked, tokens=TOKENS) == sglang_checkpoints.generate("llama", asked, tokens=TOKENS)


@pytest.mark.parametrize("apart_s", [0.0, 0.5, -0.5], ids=["at once", "prefill first", "decode first"])
def test_decode_continues_what_prefill_computed(llama: Family, apart_s: float) -> None:
    pair, single = llama
    asked = prompts(*LENGTHS, seed=int(apart_s * 2) + 5)
    assert pair.generate(asked, tokens=TOKENS, apart_s=apart_s) == single.generate(asked, tokens=TOKENS)
    pair.settles()


def test_servers_with_other_pages_and_ranks_hand_over_in_both_directions(
    sglang_checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """Pages of one token, of sixteen and of sixty-four; one rank and two, which share the heads; and both alike."""
    pair, single = llama
    asked = prompts(5, 17, 300, 700, seed=6)
    expected = single.generate(asked, tokens=TOKENS)
    model = sglang_checkpoints.path("llama")
    for options in ({"page_size": 1}, {"page_size": 64, "tp_size": 2}):
        with servers(model, tmp_path, prefill=PREFILL | options, decode=DECODE | options) as (prefill, decode):
            for one, two in ((prefill, pair.decode), (pair.prefill, decode), (prefill, decode)):
                other = SglangPair(one, two)
                assert other.generate(asked, tokens=TOKENS) == expected, options
                other.settles()


def in_each_order(pair: SglangPair, asked: list[list[int]], expected: list[list[int]]) -> None:
    """Both servers asked at once, and either first; and requests that are given up, on either side first."""
    for apart_s in (0.0, 0.3, -0.3):
        assert pair.generate(asked, tokens=TOKENS, apart_s=apart_s) == expected
    for sides in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
        room = pair.room()
        name = str(room["bootstrap_room"])
        given_up = {side.url: side.add(asked[-1], tokens=100, rid=name, **room) for side in sides}
        for side in sides:
            side.give_up(given_up[side.url], name)
    assert pair.generate(asked[:1], tokens=TOKENS) == expected[:1]
    pair.settles()


def one_stage_does_not_learn_where_prefill_listens(pair: SglangPair, prompt: list[int], expected: list[int]) -> None:
    """The request fails on both sides at once, not by SGLang's limit of minutes; its number may be used again."""
    paths: list[str] = []

    def answer(path: str) -> Any:
        if "prefill_dp_rank=0" in path:  # where a rank listens
            paths.append(path)
            if len(paths) == 1:
                return None
        with urlopen(f"http://127.0.0.1:{pair.prefill.bootstrap_port}{path}", timeout=ANSWER_S) as response:
            return json.load(response) if "/route" in path else {}

    room = pair.room()
    with answering(answer) as port:
        requests = [
            side.add(prompt, tokens=TOKENS, **room | {"bootstrap_port": port}) for side in (pair.prefill, pair.decode)
        ]
        for request in requests:
            assert isinstance(request.exception(2 * TIME_LEFT_S), RefusedError)
    assert len(paths) > 1
    first, tokens = [side.add(prompt, tokens=TOKENS, **room).result for side in (pair.prefill, pair.decode)]
    assert (first()[0], tokens()) == (expected[0], expected)


def test_a_prefill_server_with_pipeline_stages_hands_over(
    sglang_checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """Two stages, of which one has one layer and the other two."""
    pair, single = llama
    asked = prompts(5, 17, 300, 700, seed=18)
    expected = single.generate(asked, tokens=TOKENS)
    with servers(sglang_checkpoints.path("llama"), tmp_path, prefill=PREFILL | {"pp_size": 2}) as [prefill]:
        in_each_order(SglangPair(prefill, pair.decode), asked, expected)


@pytest.mark.skipif(DEVICE != "cpu" or not is_since("0.5.23"), reason="the stand-in is for 0.5.23's convolutions")
def test_states_are_sent_between_servers_of_unequal_ranks(
    sglang_checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of short convolutions, whose channels two ranks share out; in both directions."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    ranks = {"tp_size": 2}
    options = {"p1": PREFILL, "d2": DECODE | ranks, "p2": PREFILL | ranks, "d1": DECODE, "single": {}}
    asked = prompts(*LENGTHS, seed=35)
    with servers(sglang_checkpoints.path("lfm2"), tmp_path, **options) as (p1, d2, p2, d1, single):
        expected = single.generate(asked, tokens=TOKENS)
        for pair in (SglangPair(p1, d2), SglangPair(p2, d1)):
            assert pair.generate(asked, tokens=TOKENS) == expected
            pair.settles()


@pytest.mark.skipif(not is_since("0.5.23"), reason="decode stages of this SGLang do not agree how a request has ended")
def test_a_decode_server_with_pipeline_stages_receives(
    sglang_checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """Two stages on both sides, and on decode alone, which SGLang's own backends refuse. What has landed at one stage
    and not at the other, or failed, ends at both."""
    pair, single = llama
    asked = prompts(5, 17, 300, 700, seed=19)
    expected = single.generate(asked, tokens=TOKENS)
    options = {"prefill": PREFILL | {"pp_size": 2}, "decode": DECODE | {"pp_size": 2}}
    with servers(sglang_checkpoints.path("llama"), tmp_path, **options) as (prefill, decode):
        for staged in (SglangPair(prefill, decode), SglangPair(pair.prefill, decode)):
            in_each_order(staged, asked, expected)
        one_stage_does_not_learn_where_prefill_listens(SglangPair(prefill, decode), asked[0], expected[0])
        mixed_requests(SglangPair(prefill, decode), single)
        _, received = SglangPair(prefill, decode).begin(asked, tokens=TOKENS)
        time.sleep(0.2)
        prefill.kill()
        for request, tokens in zip(received, expected, strict=True):
            error = request.exception(2 * TIME_LEFT_S)
            assert isinstance(error, RefusedError) or request.result() == tokens[: len(request.result())]
        decode.settles()
        assert SglangPair(pair.prefill, decode).generate(asked, tokens=TOKENS) == expected


def test_what_decode_has_kept_is_not_sent_again(llama: Family) -> None:
    """By the bytes that prefill has sent: SGLang counts a token as cached wherever its KV has come from."""
    pair, single = llama
    shared, one, two = prompts(512, 60, 100, seed=7)
    asked = [shared + one, shared + two]
    expected = single.generate(asked, tokens=TOKENS)
    hits, megabytes = [], [pair.prefill.metric("sglang:kv_transfer_total_mb_sum")]
    for prompt, tokens in zip(asked, expected, strict=True):
        room = pair.room()
        sent = pair.prefill.add(prompt, tokens=TOKENS, **room)
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        made = pair.decode.ask("/generate", {"input_ids": prompt, "sampling_params": sampling} | room)
        assert (made["output_ids"], sent.result()[0]) == (tokens, tokens[0])
        hits.append(made["meta_info"]["cached_tokens"])
        megabytes.append(pair.prefill.metric("sglang:kv_transfer_total_mb_sum"))
    assert hits[0] < 16 <= 512 <= hits[1] < 512 + 100
    first, second = (after - before for before, after in pairwise(megabytes))
    not_cached = [len(prompt) - hit for prompt, hit in zip(asked, hits, strict=True)]
    of_pages = 16 / not_cached[0]  # a page is sent whole
    assert second / first == pytest.approx(not_cached[1] / not_cached[0], abs=of_pages)
    pair.settles()


@pytest.mark.skipif(not is_since("0.5.21"), reason="this SGLang receives no request on the host")
def test_requests_above_the_threshold_land_in_host_memory_and_are_loaded(
    sglang_checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """SGLang's scheduler chooses for each, waits for room on the device, and loads them with its own code; the copies
    themselves are made by a stand-in for its kernel."""
    pair, single = llama
    long, *asked = prompts(700, 5, 17, 300, 600, seed=20)
    expected = single.generate([long, *asked], tokens=TOKENS)
    host = DECODE | {
        "disaggregation_decode_retraction_backup": "host_pool", "disaggregation_decode_host_receive_threshold": 0.1,
        "hicache_io_backend": "direct", "hicache_ratio": 2.0, "enable_metrics": True,
    }  # fmt: skip
    with servers(sglang_checkpoints.path("llama"), tmp_path, decode=host) as [decode]:
        made, on_host = SglangPair(pair.prefill, decode), "sglang:num_decode_host_receive_reqs_total"
        room = made.room()
        sent = pair.prefill.add(long, tokens=1, **room)
        first = decode.add(long, tokens=300, **room)
        sent.result()
        while decode.used_tokens() < len(long) and not first.done():
            time.sleep(0.05)
        assert decode.metric(on_host) == 0
        # The stand-in has the cache elsewhere; a GPU writes its own pages and the host pool.
        elsewhere = "in host memory first" if DEVICE == "cpu" else "in SGLang's pages"
        for server, where in ((pair.decode, "in SGLang's pages"), (decode, elsewhere)):
            assert f"pdtransfer decode: KV lands {where}" in server.log.read_text()
        assert made.generate(asked, tokens=TOKENS) == expected[1:]
        assert first.result()[:TOKENS] == expected[0]
        assert decode.metric(on_host) == len(asked)
        # Given up while they land: SGLang has its host pages back.
        held = decode.add(long, tokens=300, **made.room())
        for name in ("on host", "on host too"):
            decode.give_up(decode.add(asked[-1], tokens=4, rid=name, **made.room()), name)
        decode.give_up(held)
        assert made.generate(asked, tokens=TOKENS) == expected[1:]
        made.settles()


def test_sglang_exports_what_it_knows_of_a_transfer(llama: Family) -> None:
    pair, _ = llama
    [prompt] = prompts(310, seed=21)
    names = "total_mb_sum", "latency_ms_count", "speed_gb_s_count", "alloc_ms_count"

    def exported() -> list[float]:
        return [pair.prefill.metric(f"sglang:kv_transfer_{name}") for name in names]

    before = exported()
    pair.generate([prompt], tokens=4)
    megabytes, *counts = [after - here for after, here in zip(exported(), before, strict=True)]
    token_bytes = 4_096 if DEVICE == "cpu" else 2_048  # of 4 layers of 2 heads
    assert megabytes == pytest.approx(320 * token_bytes / 2**20)  # whole pages
    assert counts == [1, 1, 1]


# Prefill servers that do not fit


@contextmanager
def bootstrap_server(server: dict[str, Any], rank: dict[str, Any]) -> Iterator[int]:
    """Answers as SGLang's own of a server of one rank, but for these fields; yields its port."""
    sizes = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
    of_server = sizes | {"page_size": None, "kv_cache_dtype": None, "follow_bootstrap_room": True} | server
    of_rank = {"rank_ip": "127.0.0.1", "rank_port": 1} | rank

    with answering(lambda path: of_server if "prefill_dp_rank=-1" in path else of_rank) as port:
        yield port


@contextmanager
def answering(answer: Callable[[str], Any]) -> Iterator[int]:
    """The port of a server that answers each path with this JSON; with None it has failed."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = answer(self.path)
            body = json.dumps(content).encode()
            self.send_response(500 if content is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_a_prefill_server_that_does_not_fit_costs_its_requests_alone(llama: Family) -> None:
    """SGLang would end the decode engine; here each request says what does not fit."""
    pair, single = llama
    answers: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "kv_cache_dtype=fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, {}), "page_size=64": ({"page_size": 64}, {}),
        "attn_tp_size: 1000000000, expected int <= 64": ({"attn_tp_size": 10**9}, {}),
        "attn_cp_size: 0, expected int >= 1": ({"attn_cp_size": 0}, {}),
        "dsv41_spec_layout: 5, expected object": ({"dsv41_spec_layout": 5}, {}),
        "pp_size: '1', expected int": ({"pp_size": "1"}, {}), "rank_port: 'x', expected int": ({}, {"rank_port": "x"}),
        "rank_ip: expected str, got null": ({}, {"rank_ip": None}),
    }  # fmt: skip
    [prompt] = prompts(300, seed=19)
    with ExitStack() as stack:
        asked = {
            text: pair.decode.add(
                prompt, tokens=4, **pair.room() | {"bootstrap_port": stack.enter_context(bootstrap_server(*answer))}
            )
            for text, answer in answers.items()
        }
        for text, each in asked.items():
            with pytest.raises(RefusedError) as refused:
                each.result(4 * TIME_LEFT_S)
            assert text in str(refused.value)
    assert pair.generate([prompt], tokens=TOKENS) == single.generate([prompt], tokens=TOKENS)
    pair.settles()


@pytest.mark.parametrize("room", [0, -1, 2**63, 2**64 - 1])
def test_a_room_that_cannot_be_costs_its_request_alone(room: int, llama: Family) -> None:
    """SGLang would end the prefill engine, or wait on decode forever."""
    pair, single = llama
    [prompt] = prompts(300, seed=22)
    for side in (pair.prefill, pair.decode):
        with pytest.raises(RefusedError, match=f"bootstrap_room: {room}, expected"):
            side.add(prompt, tokens=4, **pair.room(room)).result(2 * TIME_LEFT_S)
    assert pair.generate([prompt], tokens=TOKENS) == single.generate([prompt], tokens=TOKENS)
    pair.settles()


# Requests that end early


@pytest.mark.parametrize("gives_up", ["decode", "prefill", "both"])
@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_a_request_that_is_given_up_leaves_nothing(llama: Family, gives_up: str, after_s: float) -> None:
    """Before the other side has it, and while prefill computes."""
    pair, single = llama
    [prompt, other], room = prompts(700, 200, seed=8), pair.room()
    sides = {"prefill": pair.prefill, "decode": pair.decode}
    asked = {name: side.add(prompt, tokens=100, rid=f"{name}-{room['bootstrap_room']}", **room)
             for name, side in sides.items() if after_s or name == gives_up or gives_up == "both"}  # fmt: skip
    time.sleep(after_s)
    for name in asked if gives_up == "both" else [gives_up]:
        sides[name].give_up(asked[name], f"{name}-{room['bootstrap_room']}")
    for each in asked.values():
        assert each.exception(2 * TIME_LEFT_S) is None or isinstance(each.exception(), RefusedError)
    assert pair.generate([other], tokens=TOKENS) == single.generate([other], tokens=TOKENS)
    pair.settles()


def test_a_side_whose_peer_is_never_asked_does_not_wait_forever(llama: Family) -> None:
    """Decode waits as long as a hand-off may take; prefill for SGLang's own limit, or until it is given up. Then decode
    does not wait at all."""
    pair, _ = llama
    [prompt], room = prompts(300, seed=9), pair.room()
    failed = pair.decode.metric("sglang:num_transfer_failed_reqs_total")
    sent = pair.prefill.add(prompt, tokens=4, rid="never asked", **room)
    with pytest.raises(RefusedError, match="deadline"):
        pair.decode.add(prompt, tokens=4, **pair.room()).result(4 * TIME_LEFT_S)
    assert not sent.done()
    pair.prefill.give_up(sent, "never asked")
    with pytest.raises(RefusedError, match=r"aborted: tcp://127\.0\.0\.1:\d+: its request was given up before"):
        pair.decode.add(prompt, tokens=4, **room).result(4 * TIME_LEFT_S)
    pair.settles()
    assert pair.decode.metric("sglang:num_transfer_failed_reqs_total") == failed + 2


def test_many_requests_at_once_leave_nothing_behind(llama: Family) -> None:
    mixed_requests(*llama)


# Decode's memory


POOL_TOKENS, RESERVED_TOKENS = 992, 32  # whole pages


def test_a_request_that_decode_has_no_memory_for_is_refused_or_waits_alone(
    sglang_checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """SGLang's decode admits a prompt once the reserve is free beside it, and its validation asks for the prompt."""
    few = DECODE | {"max_total_tokens": POOL_TOKENS, "num_reserved_decode_tokens": RESERVED_TOKENS}
    never, large, waits, passes = prompts(980, 300, 320, 20, seed=17)
    with servers(sglang_checkpoints.path("llama"), tmp_path, prefill=PREFILL, decode=few) as (prefill, decode):
        pair = SglangPair(prefill, decode)

        async def case() -> None:
            config = RouterConfig(
                engine="sglang", listen="127.0.0.1:0", prefill=(prefill.url,), decode=(decode.url,),
                limits=Limits(ping_ms=1_000, silence_ms=20_000),
            )  # fmt: skip
            router = router_of(config)
            url = "http://" + await router.open()
            async with aiohttp.ClientSession() as http:
                try:
                    await until(router.backend.usable)

                    async def post(prompt: list[int], tokens: int) -> tuple[int, Any]:
                        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
                        async with http.post(url + "/v1/completions", json=body) as response:
                            return response.status, await response.json()

                    async with asyncio.timeout(20):
                        status, answer = await post(never, 4)
                    assert status == 400
                    for part in ("980", "--num-reserved-decode-tokens 32", str(POOL_TOKENS), "--max-total-tokens"):
                        assert part in answer["message"]
                    runs = asyncio.create_task(post(large, 600))
                    # Once it generates, SGLang keeps free what it may grow to.
                    await until(lambda: decode.used_tokens() >= len(large) + 40, seconds=ANSWER_S)
                    behind = asyncio.create_task(post(waits, 4))
                    await until(lambda: "1 requests wait for memory of decode" in decode.log.read_text(), seconds=60)
                    passed, state = await asyncio.gather(post(passes, 4), asyncio.to_thread(decode.ask, "/server_info"))
                    assert passed[0] == 200
                    assert not behind.done(), "it has passed"
                    assert not runs.done()
                    state = state["internal_states"][0]["pdtransfer"]
                    assert state["context_tokens"] == POOL_TOKENS - RESERVED_TOKENS
                    assert state["waiting"]["requests"] == 1
                    assert f"the first needs {len(waits) + RESERVED_TOKENS} tokens" in state["waiting"]["why"]
                    assert (await runs)[0] == (await behind)[0] == 200
                finally:
                    await router.close()

        run_on_loop(case)
        pair.settles()


# Routers


def test_behind_our_router(llama: Family) -> None:
    pair, single = llama
    [prompt, other] = prompts(300, 200, seed=10)
    [expected, of_other] = single.generate([prompt, other], tokens=TOKENS)
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    async def case() -> None:
        config = RouterConfig(
            engine="sglang", listen="127.0.0.1:0", prefill=(pair.prefill.url,), decode=(pair.decode.url,),
            limits=Limits(ping_ms=1_000, silence_ms=20_000),
        )  # fmt: skip
        router = router_of(config)
        backend = router.backend
        assert isinstance(backend, Servers)
        url = "http://" + await router.open()
        async with aiohttp.ClientSession() as http:
            try:
                await until(lambda: backend.pool.usable)

                async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
                    async with http.post(url + path, json=body) as response:
                        return response.status, await response.json()

                status, answer = await post("/v1/completions", body | {"bootstrap_room": 1, "bootstrap_port": 1})
                assert (status, words(answer["choices"][0]["text"])) == (200, expected)
                sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
                status, answer = await post("/generate", {"input_ids": [prompt, other], "sampling_params": sampling})
                assert (status, [each["output_ids"] for each in answer]) == (200, [expected, of_other])
                status, answer = await post("/v1/completions", body | {"n": 2})
                assert (status, [words(choice["text"]) for choice in answer["choices"]]) == (200, [expected] * 2)
                async with http.post(url + "/v1/completions", json=body | {"stream": True}) as response:
                    assert words(text_of(await response.text())) == expected
                # A client that leaves within a stream.
                left = body | {"stream": True, "max_tokens": 600}
                async with http.post(url + "/v1/completions", json=left) as response:
                    await response.content.readuntil(b"\n\n")
                    response.close()
            finally:
                await router.close()

    run_on_loop(case)
    pair.settles()


def words(text: str) -> list[int]:
    """The tokens of a text of a tiny checkpoint."""
    return [int(word[1:]) for word in text.split()]


def text_of(stream: str) -> str:
    """The text of a stream, which must be whole."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


def test_behind_sglangs_own_router(llama: Family, tmp_path: Path) -> None:
    pair, single = llama
    if DEVICE != "cpu" and subprocess.run([PYTHON, "-c", "import sglang_router"], check=False).returncode != 0:
        pytest.skip("SGLang's router is not among what was brought to this GPU")
    [prompt] = prompts(300, seed=11)
    port = free_port()
    command = [
        PYTHON, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port),
        "--prefill", pair.prefill.url, str(pair.prefill.bootstrap_port), "--decode", pair.decode.url,
        "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}

        async def case() -> None:
            async with aiohttp.ClientSession() as http:

                async def answers() -> dict[str, Any] | None:
                    assert process.poll() is None, "the router has ended: see router.log"
                    try:
                        async with http.post(f"http://127.0.0.1:{port}/generate", json=body) as response:
                            return await response.json() if response.status == 200 else None
                    except aiohttp.ClientError:
                        return None

                made = await until(answers, seconds=ANSWER_S)
                assert made["output_ids"] == single.generate([prompt], tokens=TOKENS)[0]

        run_on_loop(case)
    finally:
        process.terminate()
        process.wait()
    pair.settles()


def test_behind_llm_ds_sidecar(llama: Family, tmp_path: Path) -> None:
    """Its own program where PDTRANSFER_TEST_SIDECAR names it, else played as its source has it."""
    pair, single = llama
    [prompt] = prompts(300, seed=12)
    [expected] = single.generate([prompt], tokens=TOKENS)
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    named = {PREFILLER: pair.prefill.url.removeprefix("http://")}
    with sidecar(pair.decode.url, "sglang", pair.prefill.bootstrap_port, tmp_path / "sidecar.log") as front:
        whole = front.post("/v1/completions", body, named)
        assert (whole.status, words(whole.json["choices"][0]["text"])) == (200, expected)
        stream = front.post("/v1/completions", body | {"stream": True}, named)
        assert words(text_of(stream.text)) == expected
    pair.settles()


# Servers that end


def test_dead_servers_cost_their_requests_and_may_be_started_again(
    sglang_checkpoints: Checkpoints, tmp_path: Path, llama: Family
) -> None:
    """Each is killed with requests half-way, and another process takes its address. SGLang answers a request that is
    given up with what it has."""
    good, single = llama
    asked = prompts(700, 640, 300, 600, seed=17)
    expected = single.generate(asked, tokens=TOKENS)
    model = sglang_checkpoints.path("llama")
    with servers(model, tmp_path, prefill=PREFILL, decode=DECODE) as (prefill, decode):
        for pair, killed in ((SglangPair(prefill, good.decode), prefill), (SglangPair(good.prefill, decode), decode)):
            assert pair.generate(asked[:1], tokens=TOKENS) == expected[:1]
            sent, received = pair.begin(asked, tokens=TOKENS)
            time.sleep(0.2)
            killed.kill()
            left = received if killed is prefill else sent
            for each, tokens in zip(left, expected, strict=True):
                if killed is decode:  # which may not have asked for it: a router gives it up
                    good.prefill.give_up(each)
                error = each.exception(2 * TIME_LEFT_S)
                assert isinstance(error, RefusedError) or each.result() == tokens[: len(each.result())]
            (good.decode if killed is prefill else good.prefill).settles()
        again = {"prefill": PREFILL | {"like": prefill}, "decode": DECODE | {"like": decode}}
        with servers(model, tmp_path, **again) as (prefill, decode):
            for pair in (SglangPair(prefill, good.decode), SglangPair(good.prefill, decode)):
                assert pair.generate(asked, tokens=TOKENS) == expected
                pair.settles()
