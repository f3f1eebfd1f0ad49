"""Two vLLM servers, each in both roles, behind our router: what comes early, stays or is parsed is what one engine
says.

The model is sure of each next token, so that streams begin with prefill's. Each request has a salt of its own, so that
no engine has anything of another's."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked_features import CHAT, COMPLETION, OTHER, TEMPLATE, TEXT, texts_of
from tests.support.sglang_engine import free_port
from tests.support.vllm_engine import Checkpoints
from tests.support.vllm_pair import settles, transfer
from tests.support.vllm_server import ANSWER_S, HttpProcess, model_of_bytes, router, stream_of, vllm_server

pytestmark = pytest.mark.timeout(1_200)

EARLY = "pdtransfer_first_tokens_early_total"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TURNS, TURN_TOKENS = 10, 48
# Letters that begin no longer token, so that a text of them has the tokens that were generated.
LETTERS = "bjnpqvx"
RATIO_MAX = 1.05  # of prompt tokens that are computed over ten turns, to one engine's


@dataclass
class Site:
    """Servers `a` and `b`; `folder` has the logs."""

    a: HttpProcess
    b: HttpProcess
    folder: Path
    salts: Iterator[int] = field(default_factory=count)

    def salted(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": "m", "cache_salt": f"salt {next(self.salts)}"} | body

    def handed_over(self) -> float:
        """Hand-offs that `b` has received."""
        return self.b.metric("vllm:pdtransfer_rooms_total", end="received")

    def computed(self) -> float:
        """Tokens of prompts that either has computed."""
        return sum(
            each.metric("vllm:prompt_tokens_by_source_total", source="local_compute") for each in (self.a, self.b)
        )


@pytest.fixture(scope="module")
def site(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("both")
    thinks = TEMPLATE + "{{ '<think>' }}"
    marks = "<think>", "</think>"
    model = model_of_bytes(checkpoints.path("blip2"), folder, special=("<image>",), marks=marks, template=thinks)
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(
                vllm_server(
                    model, folder / f"{name}.log", "--enable-prefix-caching", "--reasoning-parser", "deepseek_r1",
                    "--enable-prompt-tokens-details",
                    transfer=transfer("kv_both", bind=f"tcp://127.0.0.1:{free_port()}", time_left_s=180.0),
                )
            )
            for name in "ab"
        )  # fmt: skip
        yield Site(a.ready(), b.ready(), folder)


@pytest.fixture(scope="module")
def front(site: Site) -> Iterator[HttpProcess]:
    """A router that prefills on `a` and decodes on `b`."""
    blocks = "--limits.prefix-block-tokens", "16"
    with router(site.a, site.b, site.folder / "router.log", *blocks, turn_tokens=1024) as started:
        yield started.ready()


def test_an_answer_reports_the_bytes_that_were_sent(site: Site, front: HttpProcess) -> None:
    """It is also the first one, from which the router learns who prefill is."""
    body = site.salted(COMPLETION)
    answer = front.post(COMPLETIONS, body)
    reported = answer["kv_transfer_params"]
    settles(lambda: site.b.metric("vllm:pdtransfer_bytes_total", direction="received"), reported["kv_bytes"])
    assert reported["kv_lost"] is False
    assert answer["choices"] == site.b.post(COMPLETIONS, body)["choices"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
def test_cached_tokens_are_those_of_the_prompt(
    site: Site, front: HttpProcess, path: str, body: dict[str, Any], stream: bool, n: int
) -> None:
    """vLLM's decode counts all KV that it has received as cached, but for the last token's."""

    def details(server: HttpProcess, asked: dict[str, Any]) -> Any:
        if not stream:
            return server.post(path, asked)["usage"]["prompt_tokens_details"]
        return stream_of(server.url, path, asked | {"stream_options": {"include_usage": True}})[-1]["usage"][
            "prompt_tokens_details"
        ]

    sampled = {"n": n} | ({"temperature": 1, "seed": 5} if n > 1 else {})
    asked = site.salted(body | sampled | {"max_tokens": 4})
    assert details(front, asked)["cached_tokens"] == 0
    cached = site.salted(body | sampled | {"max_tokens": 4})
    site.a.post(path, cached | {"n": 1})
    expected = details(site.a, cached | {"n": 1, "temperature": 0})
    assert expected["cached_tokens"] > 0
    assert details(front, cached) == expected


def letters(site: Site) -> list[int]:
    """The tokens of LETTERS."""
    tokens = site.b.post("/tokenize", {"model": "m", "prompt": LETTERS, "add_special_tokens": False})["tokens"]
    assert len(tokens) == len(LETTERS)
    return tokens


@pytest.mark.parametrize("budget", [0, 1, 8])
def test_reasoning_is_parsed_of_the_whole_output(site: Site, front: HttpProcess, budget: int) -> None:
    """Decode's server parses its own output from the first token on, which prefill's server has made as well."""
    body = CHAT | {"thinking_token_budget": budget, "max_tokens": 24, "ignore_eos": True}
    body["allowed_token_ids"] = letters(site)  # a letter that comes in two tokens ends in either text
    before = site.handed_over()
    [alone] = site.b.post(CHATS, site.salted(body))["choices"]
    [answer] = front.post(CHATS, site.salted(body))["choices"]
    assert answer == alone
    assert bool(answer["message"]["reasoning"]) == (budget > 0)
    assert answer["message"]["content"]
    texts = texts_of(stream_of(front.url, CHATS, site.salted(body)))
    assert texts == texts_of(stream_of(site.b.url, CHATS, site.salted(body)))
    assert texts.get("content") == answer["message"]["content"]
    settles(lambda: site.handed_over() - before, 2)


def test_an_image_is_seen_by_prefill_and_decode_has_its_kv(site: Site, front: HttpProcess) -> None:
    def answer(server: HttpProcess, shade: int) -> Any:
        pixels = bytes((shade * row * column) % 256 for row in range(32) for column in range(32) for _ in range(3))
        url = f"data:image/x-portable-pixmap;base64,{base64.b64encode(b'P6 32 32 255 ' + pixels).decode()}"
        seen = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": url}}]
        [choice] = server.post(CHATS, site.salted(CHAT | {"messages": [{"role": "user", "content": seen}]}))["choices"]
        return choice

    def on_b(source: str) -> float:
        return site.b.metric("vllm:prompt_tokens_by_source_total", source=source)

    alone = [answer(site.b, shade) for shade in (3, 7)]
    assert alone[0] != alone[1]
    before, computed = site.handed_over(), on_b("local_compute")
    assert [answer(front, shade) for shade in (3, 7)] == alone
    settles(lambda: site.handed_over() - before, 2)
    assert on_b("local_compute") - computed == 2, "the last token of each prompt"


def test_streams_that_begin_with_prefills_token_are_those_of_one_engine(site: Site, front: HttpProcess) -> None:
    """Behind some of these texts the next token is clear, and a word. Prefill's answer may come behind decode's: they
    are asked until one did not."""
    asked = [COMPLETION | {"prompt": TEXT[: 60 + 7 * number]} for number in range(12)]
    alone = [stream_of(site.b.url, COMPLETIONS, site.salted(body)) for body in asked]
    before, deadline = front.metric(EARLY), time.monotonic() + ANSWER_S
    while front.metric(EARLY) == before:
        assert time.monotonic() < deadline, "decode answers before prefill"
        for body, expected in zip(asked, alone, strict=True):
            answer = stream_of(front.url, COMPLETIONS, site.salted(body))
            assert texts_of(answer) == texts_of(expected)
            assert answer[-1]["choices"][0]["finish_reason"] == expected[-1]["choices"][0]["finish_reason"] == "length"
    assert front.metric("pdtransfer_first_tokens_wrong_total") == 0


def test_the_next_turn_of_a_chat_stays_where_its_kv_is(site: Site, front: HttpProcess) -> None:
    allowed = letters(site)

    def ten_turns(server: HttpProcess) -> tuple[list[str], float]:
        body, before, answers = site.salted(COMPLETION | {"max_tokens": TURN_TOKENS}), site.computed(), list[str]()
        text = TEXT[:200]
        for turn in range(TURNS):
            body |= {"prompt": text, "allowed_token_ids": allowed}
            answers.append(server.post(COMPLETIONS, body)["choices"][0]["text"])
            text += f"{answers[-1]}\n{turn}. {OTHER[turn : turn + 20]}\n"
        # A server counts a prompt with the step behind it.
        settles(lambda: site.computed() - before >= len(TEXT[:200]), True)
        return answers, site.computed() - before

    kept = front.metric("pdtransfer_requests_kept_total")
    answers, alone = ten_turns(site.b)
    behind, computed = ten_turns(front)
    assert behind == answers
    assert computed <= RATIO_MAX * alone
    assert front.metric("pdtransfer_requests_kept_total") - kept == TURNS - 1


def answering(front: HttpProcess) -> int:
    """Answers that a router waits for."""
    with urllib.request.urlopen(f"{front.url}/health", timeout=ANSWER_S) as response:
        return sum(server["unfinished"] for server in json.loads(response.read())["servers"])


def test_a_server_in_both_roles_computes_what_it_is_chosen_for_twice(site: Site) -> None:
    """`a` is in both roles, `b` decodes: of requests one after the other each is to decode every second one."""
    before = site.handed_over()
    more = "--decode", site.b.url
    with router(site.a, site.a, site.folder / "both.log", *more) as both:
        both.ready()
        for number in range(4):
            settles(lambda: answering(both), 0)
            body = COMPLETION | {"prompt": TEXT[number:]}
            [alone] = site.b.post(COMPLETIONS, site.salted(body))["choices"]
            assert both.post(COMPLETIONS, site.salted(body))["choices"] == [alone]
        assert both.metric("pdtransfer_requests_kept_total") == 2
    settles(lambda: site.handed_over() - before, 2)
