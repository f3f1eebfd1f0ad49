"""doctor compares two engines by what their servers tell, and finds what the engines themselves find when they meet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdtransfer import Cause
from pdtransfer.handoff.identity_check import ShownIdentity, shown
from pdtransfer.serve.commands import engine_facts
from pdtransfer.serve.commands.cli import main
from tests.support.client_pair import client_pair, settings
from tests.support.http_answers import Answer, Site
from tests.support.json_values import spoiled

FACTS = {"hidden_size": "256", "block_size": "128", "engine": "vLLM 0.32.0"}


def vllm(identity: Any) -> Answer:
    """A vLLM server: it tells who it is in the answer to a request that asks for it."""

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/health":
            return 200, b""
        if path == "/v1/models" and "longest" in (identity or {}):
            return 200, json.dumps({"data": [{"id": "m", "max_model_len": identity["longest"]}]}).encode()
        if path != "/v1/completions":
            return 404, b'{"detail":"Not Found"}'
        asked = json.loads(body)
        assert (asked["max_tokens"], asked["kv_transfer_params"]) == (1, {"identify": True})
        params = None if identity is None else {"identity": identity}
        return 200, json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": params}).encode()

    return answer


def sglang(identity: Any) -> Answer:
    """An SGLang server of two data parallel ranks."""

    def answer(path: str, _: bytes) -> tuple[int, bytes]:
        if path != "/server_info":
            return 500, b"it would compute a token"
        own_fields = {} if identity is None else {"pdtransfer": identity}
        states = [{"last_gen_throughput": 0.0} | own_fields] * 2
        return 200, json.dumps({"disaggregation_mode": "decode", "internal_states": states}).encode()

    return answer


def daemon(identity: Any, *, ready: bool = True) -> Answer:
    def answer(path: str, _: bytes) -> tuple[int, bytes]:
        if path != "/health":
            return 404, b"404: Not Found"
        health = {"ready": ready} | ({"identity": identity} if ready else {})
        return 200 if ready else 503, msgspec.json.encode(health)

    return answer


KINDS = {"vllm": vllm, "sglang": sglang, "daemon": daemon}


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as ended:
        yield Site(ended)


def identity_of(role: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "model": "m", "weights": "77", "facts": FACTS} | more


CASES: dict[str, dict[str, Any]] = {
    "equal": {},
    "another model": {"model": "other"},
    "another fact": {"weights": b"x", "facts": FACTS | {"block_size": "64"}},
    "a fact more": {"weights": b"x", "facts": FACTS | {"window": "64"}},
    "another digest of equal facts": {"weights": b"x"},
    "another engine": {"facts": FACTS | {"engine": "SGLang 0.5.23"}},
    "another engine, that does not fit": {
        "weights": b"x", "facts": FACTS | {"engine": "SGLang 0.5.23", "block_size": "1"},
    },
}  # fmt: skip


@pytest.mark.parametrize("decode", CASES.values(), ids=CASES)
def test_the_verdict_is_that_of_the_engines_own_handshake(
    site: Site, decode: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [{"facts": FACTS}, {"facts": FACTS} | decode]
    one, two = (
        site.url(vllm(shown(settings(role[0], **more).identity(role))))
        for role, more in zip(("prefill", "decode"), options, strict=True)
    )
    status = main(["doctor", one, two, "--json"])
    report = json.loads(capsys.readouterr().out)
    with client_pair(prefill_settings=options[0], decode_settings=options[1]) as pair:
        pair.expect(7, 16)
        pair.send(7, 16)
        if status == 0:
            pair.ready(7)
            assert report["differences"] == []
            return
        failed = pair.failed(7)
    assert failed.cause is Cause.REFUSED
    for line in report["differences"]:
        assert line.replace(one, "p").replace(two, "d") in failed.detail
    differing = {fact["name"] for fact in report["facts"] if fact["state"] == "differs"}
    assert differing == {line.partition(":")[0] for line in report["differences"]} - {"engine"} != set()


@pytest.mark.parametrize("decode", KINDS)
@pytest.mark.parametrize("prefill", KINDS)
def test_servers_of_each_kind_are_compared(
    site: Site, prefill: str, decode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, two = site.url(KINDS[prefill](identity_of("prefill"))), site.url(KINDS[decode](identity_of("both")))
    assert main(["doctor", url, two]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The engines fit."
    other = site.url(KINDS[decode](identity_of("decode", weights="78", facts=FACTS | {"block_size": "64"})))
    assert main(["doctor", url, other]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "The engines do not fit: block_size."


OF_KIND = {"vllm": "longest", "sglang": "context_tokens", "daemon": "context_tokens"}


@pytest.mark.parametrize(
    ("prefill", "decode", "longest"), [(512, 900, 512), (900, 512, 512), (0, 512, 512), (700, 0, 700), (0, 0, None)]
)
@pytest.mark.parametrize("decode_kind", KINDS)
@pytest.mark.parametrize("prefill_kind", KINDS)
def test_a_pair_is_as_long_as_for_a_router(
    site: Site, prefill_kind: str, decode_kind: str, prefill: int, decode: int, longest: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By what a router reads: vLLM's /v1/models, SGLang's /server_info, and a daemon's identity."""
    lengths = {"prefill": {OF_KIND[prefill_kind]: prefill}, "decode": {OF_KIND[decode_kind]: decode}}
    urls = [
        site.url(KINDS[kind](identity_of(role, **lengths[role])))
        for kind, role in ((prefill_kind, "prefill"), (decode_kind, "decode"))
    ]
    assert main(["doctor", *urls]) == 0
    *_, line, last = capsys.readouterr().out.splitlines()
    assert last == "The engines fit."
    assert (line == f"The longest request has {longest} tokens, of its prompt and answer together.") == bool(longest)
    assert main(["doctor", *urls, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["longest_request"] == longest
    rows = [fact for fact in report["facts"] if fact["name"] == "longest request"]
    assert [(row["prefill"], row["decode"]) for row in rows] == (
        [tuple(str(tokens) if tokens else None for tokens in (prefill, decode))] if longest else []
    )
    assert {row["state"] for row in rows} <= {"equal", "may differ"}


def test_the_shortest_rank_of_a_server_bounds_the_pair_and_engines_that_do_not_fit_have_no_length(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [{"pdtransfer": identity_of("decode", context_tokens=tokens)} for tokens in (900, 400)]
    info = json.dumps({"disaggregation_mode": "decode", "internal_states": ranks}).encode()
    decode = site.url(lambda *_: (200, info))
    for weights, longest in (("77", 400), ("78", None)):
        prefill = site.url(daemon(identity_of("prefill", context_tokens=512, weights=weights)))
        main(["doctor", prefill, decode, "--json"])
        assert json.loads(capsys.readouterr().out)["longest_request"] == longest


def test_the_table_has_both_values_of_every_fact(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    facts = FACTS | {"engine": "vLLM 0.33.0", "block_size": "64"}
    url, two = site.url(vllm(identity_of("prefill"))), site.url(vllm(identity_of("decode", weights="78", facts=facts)))
    assert main(["doctor", url, two]) == 1
    head, *rows, last = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    found = [[word.strip() for word in row if word.strip()] for row in rows]
    assert found == [
        ["model", "m", "m", "equal"],
        ["hidden_size", "256", "256", "equal"],
        ["block_size", "128", "64", "differs"],
        ["engine", "vLLM 0.32.0", "vLLM 0.33.0", "may differ"],
    ]
    assert [word.strip() for word in head if word.strip()] == ["fact", f"prefill {url}", f"decode {two}"]
    assert last == ["The engines do not fit: block_size."]


@pytest.mark.parametrize(
    ("roles", "line"),
    [
        (("decode", "decode"), "role: {one} has 'decode', must be 'prefill'"),
        (("prefill", "prefill"), "role: {two} has 'prefill', {one} 'decode'"),
        (("decode", "prefill"), "role: {one} has 'decode', must be 'prefill'"),
    ],
)
def test_engines_in_the_wrong_role_do_not_fit(
    site: Site, roles: tuple[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (site.url(vllm(identity_of(role))) for role in roles)
    assert main(["doctor", one, two]) == 1
    *_, problem, last = capsys.readouterr().out.splitlines()
    assert (problem, last) == (line.format(one=one, two=two), "The engines do not fit.")


def test_a_key_is_shown_to_servers_that_ask_for_one(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (site.url(sglang(identity_of(role)), key="secret") for role in ("prefill", "decode"))
    assert main(["doctor", one, two]) == 1
    assert capsys.readouterr().err == (
        f"pdtransfer: {one} asks for an API key: name a file that has one with --api-key\n"
    )
    (tmp_path / "key").write_text("secret\n")
    assert main(["doctor", one, two, "--api-key", str(tmp_path / "key")]) == 0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (vllm(None), "reports no facts: it must be a vLLM server with PDTransferConnector, an SGLang server"),
        (sglang(None), "reports no facts"),
        (lambda *_: (200, b"<html>"), "JSON: "),
        (lambda *_: (200, b'{"ready":true,"servers":[]}'), "reports no facts"),  # a router
        (lambda *_: (500, b""), "reports no facts"),
        (daemon(None, ready=False), "is not ready yet"),
        (vllm(identity_of("router")), "kv_transfer_params.identity.role: Invalid enum value 'router'"),
        (vllm(identity_of("prefill", weights="7")), "kv_transfer_params.identity.weights: expected str matching"),
        (vllm(identity_of("prefill", facts={"a": 1})), "facts"),
        (sglang(identity_of("prefill", facts={str(index): "" for index in range(65)})), "facts"),
    ],
)
def test_a_server_that_reports_no_facts_is_named(
    site: Site, answer: Answer, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = site.url(vllm(identity_of("prefill"))), site.url(answer)
    assert main(["doctor", good, other]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"pdtransfer: {other}")
    assert error in text
    assert len(text.splitlines()) == 1


def test_a_server_that_is_not_there_is_named(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    good = site.url(vllm(identity_of("prefill")))
    assert main(["doctor", good, "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "pdtransfer: http://127.0.0.1:1 does not answer: Connection refused\n"


def test_any_value_in_any_field_of_a_servers_answer_is_one_line(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Of another type, too long, or with control characters."""
    answers: list[Any] = []

    def one(path: str, body: bytes) -> tuple[int, bytes]:
        return vllm(answers[-1])(path, body)

    good, other = site.url(vllm(identity_of("prefill"))), site.url(one)
    for _, value in spoiled(identity_of("decode")):
        answers.append(value)
        status = main(["doctor", good, other])
        printed = capsys.readouterr()
        assert status in (0, 1)
        assert len(printed.err.splitlines()) == (0 if printed.out else 1)
        assert "\x1b" not in printed.out + printed.err


def test_what_a_node_shows_is_read_back_as_it_was() -> None:
    identity = settings("d", facts=FACTS, context_tokens=700).identity("decode")
    read = msgspec.convert(shown(identity, both=True), ShownIdentity)
    assert read.role == "both"
    assert shown(read.in_role("decode", "d")) == shown(identity)
    rows = engine_facts.compare(read, read)
    assert [row.name for row in rows] == ["model", *FACTS, "longest request"]
    assert {row.state for row in rows} == {"equal"}
