"""The demo: its requests, its comparison, and that every failure shows in its exit status."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdtransfer.environment import socket_directory
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.serve.commands import demo
from pdtransfer.serve.commands.demo import DemoAnswer, run
from pdtransfer.serve.commands.demo_config import DemoConfig
from pdtransfer.serve.commands.demo_model import QUESTIONS, DemoModel
from pdtransfer.serve.router.front.text import load_text
from tests.support.http_answers import Answer, answering
from tests.support.paths import REPO
from tests.support.processes import children, command_line
from tests.support.tiny_tokenizer import write_tokenizer
from tests.support.waiting import wait_for

GQA_TOKEN_BYTES = 4 * 2 * 4 * 256  # layers, keys and values, heads, bytes of one head
DIGESTS = {"tokens_digest": "01", "logits_digest": "02", "kv_digest": "03"}


# Requests


def prompts(config: DemoConfig) -> list[str]:
    return DemoModel(config).prompts()


def test_prompts_have_every_size_and_are_determined_by_the_seed() -> None:
    config = DemoConfig(requests=20, prompt_bytes_max=5_000)
    texts = prompts(config)
    sizes = sorted(len(text.encode()) for text in texts)
    assert (len(texts), sizes[0], sizes[-1]) == (20, 1, 5_000)
    assert len(set(sizes)) > 10
    assert prompts(config) == texts
    assert prompts(DemoConfig(requests=20, prompt_bytes_max=5_000, seed=1)) != texts


def test_a_shared_prefix_comes_before_every_prompt() -> None:
    plain, shared = (prompts(DemoConfig(requests=5, shared_prefix=size)) for size in (0, 70))
    assert [text[70:] for text in shared] == plain
    assert len({text[:70] for text in shared}) == 1


@pytest.mark.parametrize("requests", [1, 2])
def test_few_prompts_are_possible(requests: int) -> None:
    assert len(prompts(DemoConfig(requests=requests, prompt_bytes_max=1))) == requests


def test_a_checkpoint_is_asked_each_question_by_its_chat_template(tmp_path: Path) -> None:
    model = DemoModel(DemoConfig(model=str(write_tokenizer(tmp_path))))
    asked = model.prompts()
    assert sorted(asked) == sorted(QUESTIONS)
    assert model.body(asked[0])["messages"] == [{"role": "user", "content": asked[0]}]
    rendered = f"<|im_start|>user\n{asked[0]}<|im_end|>\n<|im_start|>assistant\n"
    ids = model.ids(asked[0]).tolist()
    assert (ids[0], load_text(str(tmp_path)).decode(ids)) == (0, rendered)
    more = DemoModel(DemoConfig(model=str(tmp_path), requests=len(QUESTIONS) + 1)).prompts()
    assert len(set(more)) == len(more) - 1


def test_a_checkpoint_without_a_tokenizer_or_with_settings_of_the_reference_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        DemoModel(DemoConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="decode_tp"):
        DemoConfig(model=str(tmp_path), decode_tp=2)


# Evaluation of the answers


class FakeFleet:
    """Starts nothing; records whether it was stopped."""

    def __init__(self) -> None:
        self.ended = False
        self.url, self.metrics = "http://127.0.0.1:1", ["127.0.0.1:1"]

    async def __aenter__(self) -> FakeFleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ended = True


def answered(text: str, **facts: Any) -> DemoAnswer:
    report = DIGESTS | {"kv_bytes": 4_000_000, "copy_us": 2_000, "handoff_us": 1_000.0} | facts
    return DemoAnswer(text, len(text), seconds=0.5, tokens=4, facts=report)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    fake = FakeFleet()
    monkeypatch.setattr(demo, "_fleet", lambda *_: fake)
    return fake


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, fleet: FakeFleet) -> Callable[..., None]:
    """Sets the answer to each of two prompts, and the number of leaked slots."""

    def answer_with(*made: DemoAnswer, leaked: int = 0) -> None:
        async def ask(*_: object) -> tuple[list[DemoAnswer], float]:
            return list(made), 2.0

        async def leak(*_: object) -> int:
            return leaked

        async def reference(*_: object) -> list[dict[str, str]]:
            return [DIGESTS] * len(made)

        monkeypatch.setattr(demo, "_ask", ask)
        monkeypatch.setattr(demo, "_leaked", leak)
        monkeypatch.setattr(demo, "single_process", reference)

    return answer_with


CONFIG = DemoConfig(requests=2, json=True)


def test_equal_digests_and_no_leaked_slot_are_status_0_and_one_object(
    answers: Callable[..., None], fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(answered("a", handoff_us=3_000.0), answered("b"))
    assert run(CONFIG) == 0
    assert fleet.ended
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["requests"], report["identical"], report["all_identical"]) == (2, 2, True)
    assert (report["bytes"], report["tokens"], report["slots_leaked"], report["failed"]) == (8_000_000, 8, 0, 0)
    assert (report["handoff_ms_p50"], report["handoff_ms_p99"]) == (2.0, 3.0)
    assert report["copy_gb_s"] == 2.0
    assert err == ""


def test_cached_prompt_tokens_are_reported(answers: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    there = answered("a" * 90)
    there.cached = 64
    answers(answered("b" * 10), there)
    run(CONFIG)
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt_tokens"], report["cached_tokens"]) == (100, 64)
    run(DemoConfig(requests=2))
    assert "64 of 100 prompt tokens were cached" in capsys.readouterr().out


def failed(*, facts: bool = True) -> DemoAnswer:
    made = answered("b") if facts else DemoAnswer("b")
    made.error = "no luck"
    return made


@pytest.mark.parametrize("name", DIGESTS)
@pytest.mark.parametrize("value", ["ff", None, ""], ids=["differs", "missing", "of nothing"])
def test_one_digest_that_does_not_agree_is_status_1(
    answers: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, value: str | None,
) -> None:  # fmt: skip
    async def reference(*_: object) -> list[dict[str, str]]:
        return [DIGESTS, DIGESTS | ({name: ""} if value == "" else {})]

    answers(answered("a"), answered("b", **{name: value}))
    monkeypatch.setattr(demo, "single_process", reference)
    assert run(CONFIG) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["identical"], report["all_identical"], report["differ"]) == (1, False, [name])


@pytest.mark.parametrize(
    ("made", "leaked", "shown"),
    [
        ((answered("a"), failed()), 0, {"failed": 1, "identical": 1, "slots_leaked": 0}),
        ((failed(facts=False),) * 2, 0, {"failed": 2, "identical": 0, "handoff_ms_p50": None, "copy_gb_s": None}),
        ((answered("a"),), 3, {"failed": 0, "identical": 1, "slots_leaked": 3}),
    ],
    ids=["one failed", "no answer", "a leaked slot"],
)
def test_what_went_wrong_is_status_1_and_still_one_object(
    made: tuple[DemoAnswer, ...], leaked: int, shown: dict[str, object], answers: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    answers(*made, leaked=leaked)
    assert run(CONFIG) == 1
    assert shown.items() <= json.loads(capsys.readouterr().out).items()


def test_the_table_shows_failures(answers: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    wrong = answered("bb", kv_digest="ff")
    answers(answered("a"), wrong, DemoAnswer("ccc", 3, error="the fleet stayed full"), leaked=2)
    assert run(DemoConfig(requests=3)) == 1
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if " B " in line}
    assert rows["1"].split()[-1] == "yes"
    assert rows["2"].split()[-1] == "NO"
    assert "failed: the fleet stayed full" in rows["3"]
    assert "1 of 3 identical" in out
    assert "2 slots leaked" in out


def test_the_fleet_is_stopped_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask(*_: object) -> None:
        raise WorldError("the router finds no pair of workers")

    monkeypatch.setattr(demo, "_ask", ask)
    with pytest.raises(WorldError, match="no pair"):
        run(CONFIG)
    assert fleet.ended


# A fleet that runs already


def figures(text: bytes) -> Answer:
    return lambda *_: (200, text)


def of_other_engines(*_: object) -> tuple[int, bytes]:
    """As a router in front of other engines answers: healthy, and without `pdtransfer` in its answers."""
    event = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1, "prompt_tokens_details": None}}
    return 200, b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(("counted", "leaked", "words"), [(2, 6, "6 slots leaked"), (0, None, "slots not counted")])
def test_a_running_router_is_used_and_slots_of_its_decodes_are_counted(
    counted: int,
    leaked: int | None,
    words: str,
    answers: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count_slots, urls = demo._leaked, []
    answers(answered("a"))
    answer_all = demo._ask

    async def ask(model: DemoModel, url: str, *others: Any) -> Any:
        urls.append(url)
        return await answer_all(model, url, *others)

    monkeypatch.setattr(demo, "_ask", ask)
    monkeypatch.setattr(demo, "_leaked", count_slots)
    monkeypatch.setattr(demo, "_fleet", lambda *_: pytest.fail("a fleet was started"))
    monkeypatch.setattr(demo, "SETTLE_S", 0.0)
    slots = b'pdtransfer_slots{component="kv"} 10.0\npdtransfer_slots_free{component="kv"} 7.0\n'
    with answering(figures(slots)) as url:
        config = replace(CONFIG, router="http://somewhere:8000", metrics=(url.removeprefix("http://"),) * counted)
        assert run(config) == int(bool(leaked))
        report = json.loads(capsys.readouterr().out)
        run(replace(config, json=False))
    assert report["slots_leaked"] == leaked
    assert words in capsys.readouterr().out
    assert set(urls) == {"http://somewhere:8000"}


def test_a_router_that_does_not_answer_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTLE_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for why in ("nothing listens there", "Timeout on reading"):
            with pytest.raises(WorldError, match=f"no router answers: {why}"):
                run(replace(CONFIG, router=f"http://127.0.0.1:{taken.getsockname()[1]}"))
            taken.listen()  # and never answers


@pytest.mark.parametrize("text", [b"pdtransfer_rooms 1.0\n", b"<html>{", b"\xff"])
def test_metrics_that_are_no_decode_daemons_are_one_error(text: bytes, answers: Callable[..., None]) -> None:
    answers(answered("a"))
    with answering(figures(text)) as url, pytest.raises(WorldError, match=f"{url}/metrics: not a decode daemon's"):
        run(replace(CONFIG, router="http://somewhere:8000", metrics=(url.removeprefix("http://"),), verify=True))


def test_a_router_without_daemons_behind_it_fails_each_request_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def reference(*_: object) -> list[dict[str, str]]:
        return [DIGESTS] * 2

    monkeypatch.setattr(demo, "single_process", reference)
    with answering(of_other_engines) as url:
        assert run(replace(CONFIG, router=url, json=False)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("the router must have daemons behind it") == 2
    assert "0 of 2 identical" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_bytes_max": 200_000}, "has 200032 tokens, a worker of the demo has 131072"),
        ({"engine_option": ("context_tokens=100",)}, "has 8224 tokens, the context has 100"),
        ({"engine_option": ("context_tokens=100",), "router": "http://somewhere:8000"}, "the context has 100"),
    ],
)
def test_a_request_that_no_worker_takes_is_refused_before_anything_starts(
    change: dict[str, Any], words: str, fleet: FakeFleet
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(replace(CONFIG, **change))
    assert not fleet.ended


def test_a_failed_demo_shows_the_daemons_warnings(
    answers: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(_: object, __: object, ___: object, logs: Path) -> FakeFleet:
        (logs / "decode-0.log").write_text("12:00 INFO d ready\n12:01 WARNING d no connection\n")
        return fleet

    monkeypatch.setattr(demo, "_fleet", started)
    answers(answered("a"))
    assert run(CONFIG) == 0
    assert capsys.readouterr().err == ""
    answers(answered("a"), leaked=1)
    assert run(CONFIG) == 1
    assert capsys.readouterr().err == "12:01 WARNING d no connection\n"


def test_prompts_and_answers_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = answered("Why is [red]?")
    made.text = " Because.\n\nSo. "
    for figures in ("- 4,000,000 2.00 1.00 ms 4 0.50 s yes", "4,000,000 1.00 ms 4 yes"):
        demo.show([made], demo.make_report(DemoConfig(requests=1), [made], 1.0, 0), speaks=True)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[lines.index(f"Why is [red]? {figures}".split()) + 1] == ["Because.", "So."]
        monkeypatch.setenv("TERM", "dumb")  # of 80 columns
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)


USAGE = {"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 64}}


def test_pieces_of_a_stream_are_joined() -> None:
    answer, piece = DemoAnswer("a"), {"choices": [{"text": "x"}]}
    first = {"choices": [{"delta": {"role": "assistant", "content": "x"}}]}
    for event in (piece, first, piece | {"pdtransfer": DIGESTS, "usage": USAGE}):
        demo._event(answer, event)
    assert (answer.text, answer.tokens, answer.cached, answer.facts) == ("xxx", 9, 64, DIGESTS)
    demo._event(answer, {"error": {"message": "decode is gone"}})
    assert answer.error == "decode is gone"


def test_a_prompt_beyond_the_models_context_makes_a_longer_context() -> None:
    assert DemoModel(DemoConfig(prompt_bytes_max=16_384, max_tokens=1)).engine_options() == {"context_tokens": "16385"}
    assert DemoModel(DemoConfig(shared_prefix=8_192, max_tokens=7)).engine_options() == {"context_tokens": "16391"}
    assert DemoModel(DemoConfig()).engine_options() == {}


@pytest.mark.slow
def test_the_single_process_runs_apart_and_is_killed_on_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, made = multiprocessing.get_context("spawn"), []

    def process(*arguments: Any, **named: Any) -> Any:
        made.append(spawn.Process(*arguments, **named))
        return made[-1]

    context = SimpleNamespace(Pipe=spawn.Pipe, Process=process)
    monkeypatch.setattr(demo.multiprocessing, "get_context", lambda _: context)

    async def case() -> None:
        config = DemoConfig(requests=1, max_tokens=2)
        with pytest.raises(WorldError, match=r"has failed: .* the context has 100"):
            await demo.single_process(replace(config, engine_option=("context_tokens=100",)), ["x" * 100])
        made.clear()
        one, other = await asyncio.gather(
            demo.single_process(config, ["some text", "some text"]), demo.single_process(config, ["some texu"])
        )
        assert set(one[0]) == set(DIGESTS)
        assert one[0] == one[1]
        assert one[0] != other[0]
        task = asyncio.ensure_future(demo.single_process(config, ["x" * 4_000]))
        while len(made) < 3:  # noqa: ASYNC110 (what it waits for tells nobody)
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(case())
    # One that has answered ends by itself: killed, it would leave its semaphores, of which multiprocessing warns.
    assert [process.exitcode for process in made] == [0, 0, -signal.SIGKILL]


# The real thing


def started(pid: int, word: str) -> list[int]:
    """Child processes of this process whose command line contains the word."""
    return [child for child in children(pid) if any(word in argument for argument in command_line(child))]


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pdtransfer", "demo", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO,
    )  # fmt: skip


def counted(monkeypatch: pytest.MonkeyPatch, figures: dict[str, int]) -> None:
    """Has decode count this during the demo, beside what it had counted before."""
    looks = itertools.cycle([lambda: dict.fromkeys(figures, 5), lambda: {name: 5 + figures[name] for name in figures}])

    async def metrics(decodes: list[str]) -> Counter[str]:
        return Counter(next(looks)() if decodes else {})

    monkeypatch.setattr(demo, "_metrics", metrics)


@pytest.mark.parametrize(("verified", "mismatched", "status"), [(2, 0, 0), (1, 0, 1), (3, 1, 1)])
def test_with_verify_every_room_must_be_verified_and_none_mismatched(
    answers: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verified: int,
    mismatched: int,
    status: int,
) -> None:
    counted(monkeypatch, {"pdtransfer_grants_verified": verified, "pdtransfer_grants_mismatched": mismatched})
    answers(answered("a"), answered("b"))
    assert run(replace(CONFIG, verify=True)) == status
    report = json.loads(capsys.readouterr().out)
    assert (report["grants_verified"], report["grants_mismatched"]) == (verified, mismatched)
    assert run(CONFIG) == 0
    assert "grants_verified" not in json.loads(capsys.readouterr().out)


def test_an_answer_that_decode_computed_alone_has_no_grant_to_verify(
    answers: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a running router's fleet may have them."""

    counted(monkeypatch, {"pdtransfer_grants_verified": 1, "pdtransfer_grants_mismatched": 0})
    answers(answered("a"), answered("b", kv_bytes=0, copy_us=0))
    assert run(replace(CONFIG, verify=True)) == 0
    assert json.loads(capsys.readouterr().out)["handed_over"] == 1


@pytest.mark.parametrize(("letters", "fits"), [(1, True), (63, True), (64, False), (200, False)])
def test_workers_use_their_devices_and_a_folder_that_is_not_too_long_for_a_socket(letters: int, fits: bool) -> None:
    assert DemoConfig().cards == {None}
    config = DemoConfig(prefill_device="cuda:2,cuda:0", decode_device="cuda:1", prefill_tp=2)
    assert config.cards == {0, 1, 2}
    prefill, decode = demo._fleet(config, DemoModel(config), 65_536, Path(f"/{'d' * letters}"))._configs
    assert (prefill.device, decode.device) == ("cuda:2,cuda:0", "cuda:1")
    assert decode.socket_directory == (Path(f"/{'d' * letters}/sockets") if fits else socket_directory())
    assert DemoConfig(device="cuda", decode_tp=2).cards == {0, 1}


def test_with_hisparse_hits_are_a_share(
    answers: Callable[..., None], fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"pdtransfer_hot_hits": 3, "pdtransfer_hot_misses": 1, "pdtransfer_retracts": 5}

    counted(monkeypatch, figures)
    answers(answered("a" * 128), answered("b" * 129))
    assert run(replace(CONFIG, hisparse=True)) == 0
    report = json.loads(capsys.readouterr().out)
    shown = {"hit_rate": 0.75, "retracts": 5, "longer_than_hot": 1, "index_copies": 0}
    assert shown.items() <= report.items()
    assert run(replace(CONFIG, hisparse=True, json=False)) == 0
    out = capsys.readouterr().out
    assert "75.0% of picks were hot" in out
    assert "ranks together" not in out
    fleet.metrics = ["127.0.0.1:1", "127.0.0.1:2"]
    assert run(replace(CONFIG, hisparse=True, json=False)) == 0
    assert "on 2 ranks together, 1 swapped in, 0.0 MB" in " ".join(capsys.readouterr().out.split())
    assert run(replace(CONFIG, hisparse=True)) == 0
    assert json.loads(capsys.readouterr().out)["hot_ranks"] == 2
    figures["pdtransfer_preloaded_bytes"] = 30
    assert run(replace(CONFIG, hisparse=True)) == 0
    assert json.loads(capsys.readouterr().out)["preloaded_bytes"] == 30
    assert run(CONFIG) == 0
    assert "preloaded_bytes" not in json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_demo_is_identical_prints_only_its_report_and_transfers_a_shared_prefix_once() -> None:
    demo = start(
        "--json", "--requests", "4", "--prompt-bytes-max", "100", "--max-tokens", "4", "--shared-prefix", "300",
        "--engine-option", "kv_heads=4", "--verify",
    )  # fmt: skip
    out, err = demo.communicate(timeout=300)
    assert demo.returncode == 0, err
    report = json.loads(out)
    wanted = {"requests", "identical", "bytes", "handoff_ms_p50", "handoff_ms_p99", "copy_gb_s", "slots_leaked"}
    assert wanted <= set(report)
    assert (report["requests"], report["identical"], report["all_identical"], report["slots_leaked"]) == (4, 4, True, 0)
    assert report["tokens"] == 16
    assert report["handoff_ms_p50"] > 0
    assert (report["grants_verified"], report["grants_mismatched"]) == (4, 0)
    assert report["cached_tokens"] == 3 * 256
    assert report["bytes"] == (report["prompt_tokens"] - 3 * 256) * GQA_TOKEN_BYTES
    assert err == ""


@pytest.mark.full
def test_a_demo_of_a_checkpoint_is_identical(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")
    from tests.support import checkpoints

    made = checkpoints.make("qwen3", write_tokenizer(tmp_path, vocabulary=512))
    asked = ["--model", str(made), "--requests", "3", "--max-tokens", "6", "--shared-prefix", "100", "--verify"]
    demo = start("--json", *asked)
    out, err = demo.communicate(timeout=300)
    assert demo.returncode == 0, err
    report = json.loads(out)
    assert (report["requests"], report["identical"], report["slots_leaked"]) == (3, 3, 0)
    assert (report["grants_verified"], report["cached_tokens"] > 0) == (3, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "ranks"), [(0, 1), pytest.param(4, 2, marks=pytest.mark.full)]
)  # integration/test_hisparse has all four
def test_a_demo_that_decodes_from_hot_tokens_is_identical_and_copies_no_index(heads: int, ranks: int) -> None:
    demo = start(
        "--hisparse", "--json", "--requests", "6", "--prompt-bytes-max", "600", "--max-tokens", "6",
        "--engine-option", f"kv_heads={heads}", "--engine-option", "layers=2", "--decode-tp", str(ranks),
    )  # fmt: skip
    out, err = demo.communicate(timeout=300)
    assert demo.returncode == 0, err
    report = json.loads(out)
    assert (report["requests"], report["identical"], report["slots_leaked"]) == (6, 6, 0)
    assert report["index_copies"] == 0
    assert report["longer_than_hot"] == 2
    assert report["hot_misses"] >= 2 * 64 * ranks
    assert report["swapped_bytes"] > 0
    assert err == ""


@pytest.mark.slow
def test_a_demo_whose_arena_is_tampered_with_fails() -> None:
    """Overwrites decode's arena again and again: its KV and logits differ from prefill's."""
    demo = start("--json", "--requests", "4", "--prompt-bytes-max", "50", "--max-tokens", "40", "--concurrency", "2")
    try:
        (pid,) = wait_for(lambda: started(demo.pid, "--node=decode-0"))
        (memory,) = wait_for(lambda: arena_of(pid))
        while demo.poll() is None and Path(f"/proc/{pid}").exists():
            memory[:] = 0.5
            time.sleep(0.002)
        out, _ = demo.communicate(timeout=300)
    finally:
        demo.kill()
        demo.communicate()
    assert demo.returncode == 1
    report = json.loads(out)
    assert report["all_identical"] is False
    assert report["identical"] < 4


def arena_of(pid: int) -> list[np.ndarray]:
    """The start of a decode's arena, where its first rooms are, as float32; None before there is one."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:decode-0" in os.readlink(path) and os.stat(path).st_size >= 1 << 20:
                return [np.memmap(path, dtype=np.float32, mode="r+", shape=1 << 18)]
        except OSError:
            pass
    return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_daemon_that_is_just_being_started_is_stopped_as_well(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is there, and the start has not returned it: twice the signal, as timeout(1) sends it."""
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\ntrap 'echo stopped >>{tmp_path}/stopped; exit' TERM\nwhile :; do sleep 0.02; done\n"
    )
    program.chmod(0o755)
    create, processes = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()

    async def created(*arguments: Any, **more: Any) -> asyncio.subprocess.Process:
        processes.append(await create(*arguments, **more))
        await asyncio.sleep(0.2)
        for _ in range(2):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
        return processes[0]

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", created)
    assert run(CONFIG) == 128 + number
    assert (tmp_path / "stopped").read_text() == "stopped\n"
    assert [process.returncode for process in processes] == [0]


@pytest.mark.slow
def test_a_stopped_demo_stops_its_daemons() -> None:
    demo = start("--requests", "4")
    daemons = wait_for(lambda: len(found := started(demo.pid, "--node=")) >= 2 and found)
    demo.send_signal(signal.SIGTERM)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 128 + signal.SIGTERM
    assert out == ""
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in daemons)
