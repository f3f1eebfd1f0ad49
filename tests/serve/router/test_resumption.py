"""Answers that go on in another room when the one that generates them is lost: each token once, and none too many."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_fields

from pdtransfer.errors import Cause
from pdtransfer.limits import PROMPT_BYTES_MAX, RESUMPTIONS_MAX
from pdtransfer.serve.router.backends.daemons.router_effects import Emit, Fail, Finish, Retry
from pdtransfer.wire import Begin, Cancel, End, Logprobs, Sampling, Tokens, pack_ids, unpack_ids
from tests.serve.router.router_site import Site
from tests.serve.router.routing_bench import D2, LOAD, P2, Bench, D, P
from tests.support.routing_world import LIMITS
from tests.support.waiting import until

DRAWN = Sampling(12, temperature=0.7, seed=5, min_tokens=6)


def resumable(sampling: Sampling = DRAWN, **more) -> Bench:
    """A router with two workers of each role, and a request whose room is 1, on P and D."""
    bench = Bench(prefill=(P, P2), decode=(D, D2), loads={D2: replace_fields(LOAD, slots_free=900)})
    bench.submit(sampling=sampling, **{"enable_resume": True, **more})
    assert bench.sent(Begin, D)
    return bench


def delivered(bench: Bench, *ids: int, room: int = 1, peer: str = D) -> None:
    bench.receive(peer, Tokens(room, 0, pack_ids(list(ids))))


def prefill_of(bench: Bench, room: int) -> str:
    return next(each.prefill.worker.peer for each in bench.routing.rooms if each.id == room)


@pytest.mark.parametrize("how", ["silent", "new process", "shutdown", "engine", "transfer"])
def test_the_rest_of_an_answer_is_asked_of_another_decode_with_the_tokens_so_far(how: str) -> None:
    bench = resumable(salt=b"s", request_id="r")
    delivered(bench, 21, 22, 23)
    if how == "silent":
        bench.wait(LIMITS.silence_ms / 1e3 + 1, silent=D)
    elif how == "new process":
        bench.welcome(D, 7)
    else:
        bench.receive(D, End(1, how, "", 3))
    begin, *repeated = bench.sent(Begin, D2)
    assert {each.room for each in repeated} <= {begin.room}
    assert not bench.sent(Begin, D)
    assert unpack_ids("prompt", begin.prompt).tolist() == [7, 8, 9, 10, 11, 21, 22]
    assert begin.sampling == replace_fields(DRAWN, max_tokens=10, min_tokens=4, generated=2)
    assert (begin.salt, begin.request_id) == (b"s", "r")
    (retry,) = bench.of(Retry)
    assert (retry.request, retry.next_room, retry.resumed) == (1, begin.room, True)
    assert (bench.routing.resumptions, bench.routing.retries) == (1, 0)

    bench.receive(D2, Tokens(begin.room, 0, pack_ids([23, 24])))
    assert bench.of(Emit) == [Emit(1, [24])]
    ids = list(range(23, 33))
    bench.receive(D2, Tokens(begin.room, 0, pack_ids(ids)), End(begin.room, "length", "", 10))
    assert bench.of(Emit) == [Emit(1, ids[2:])]
    bench.receive(prefill_of(bench, begin.room), End(begin.room, "done", "", 0))
    (finish,) = bench.of(Finish)
    assert (finish.request, finish.room.id, finish.room.resumptions) == (1, begin.room, 1)
    assert finish.room.prompt_tokens == 7


def test_an_answer_is_resumed_only_where_the_request_allows_it() -> None:
    bench = resumable(enable_resume=False)
    delivered(bench, 21, 22)
    bench.welcome(D, 7)
    assert not bench.sent(Begin)
    assert bench.of(Fail)[0].cause is Cause.PEER_RESTARTED


def test_logprobs_of_the_token_that_is_picked_again_are_dropped_with_it() -> None:
    bench = resumable(Sampling(12, logprobs=True))
    rows = [Logprobs(-0.5 - index).pack() for index in range(3)]
    bench.receive(D, Tokens(1, 0, pack_ids([21]), rows[0]))
    bench.receive(D, End(1, "engine", "", 1))
    (begin,) = bench.sent(Begin, D2)
    bench.receive(D2, Tokens(begin.room, 0, pack_ids([21, 22, 23]), b"".join(rows)))
    assert bench.of(Emit) == [Emit(1, [22, 23], rows[1] + rows[2])]


@pytest.mark.parametrize(
    ("sampling", "generated"),
    [
        (Sampling(12), 0),
        (Sampling(12, repetition_penalty=1.2, min_tokens=3), 0),
        (Sampling(12, presence_penalty=0.5), 2),
        (Sampling(12, frequency_penalty=-0.5), 2),
        (Sampling(12, temperature=0.1), 2),
    ],
)
def test_workers_learn_what_was_generated_only_where_a_pick_depends_on_it(sampling: Sampling, generated: int) -> None:
    bench = resumable(sampling)
    delivered(bench, 21, 22, 23)
    bench.receive(D, End(1, "engine", "", 3))
    (begin,) = bench.sent(Begin, D2)
    assert begin.sampling.generated == generated


def test_an_answer_that_lacked_only_its_end_gets_it_and_no_token_more() -> None:
    bench = resumable(Sampling(3))
    delivered(bench, 21, 22, 23)
    bench.welcome(D, 7)
    (begin,) = bench.sent(Begin, D2)
    assert begin.sampling.max_tokens == 1
    bench.receive(D2, Tokens(begin.room, 0, pack_ids([23])), End(begin.room, "length", "", 1))
    assert not bench.of(Emit)
    effects = bench.receive(prefill_of(bench, begin.room), End(begin.room, "done", "", 0))
    assert [effect.room.decode.reason for effect in effects if isinstance(effect, Finish)] == ["length"]


def test_a_room_that_picks_another_token_than_was_delivered_is_not_gone_on_with() -> None:
    bench = resumable()
    delivered(bench, 21, 22)
    bench.receive(D, End(1, "engine", "", 2))
    (begin,) = bench.sent(Begin, D2)
    bench.receive(D2, Tokens(begin.room, 0, pack_ids([20, 24])))
    assert not bench.of(Emit)
    assert bench.sent(Cancel, D2) == [Cancel(begin.room, "engine")]
    assert [each.detail for each in bench.of(Retry)] == ["d1: cannot go on: it picks 20 where 22 was delivered"]
    assert bench.routing.resumptions == 2, "and another worker is asked"


def test_an_answer_is_resumed_so_many_times_and_then_fails() -> None:
    bench = resumable()
    peer, ids = D, list(range(40, 52))
    for done in range(RESUMPTIONS_MAX + 1):
        delivered(bench, *ids[max(0, done - 1) : done + 1], room=done + 1, peer=peer)
        assert bench.of(Emit) == [Emit(1, [ids[done]])]
        bench.receive(peer, End(done + 1, "engine", "", min(done + 1, 2)))
        peer = D2 if peer == D else D
        assert bool(bench.sent(Begin, peer)) is (done < RESUMPTIONS_MAX)
    (failed,) = bench.of(Fail)
    assert (failed.request, failed.cause) == (1, Cause.ENGINE)


def test_an_answer_is_resumed_after_a_retry_before_its_first_token() -> None:
    bench = resumable()
    bench.receive(P, End(1, "transfer", "", 0))
    peer = D if bench.sent(Begin, D) else D2
    delivered(bench, 21, room=2, peer=peer)
    bench.receive(peer, End(2, "engine", "", 1))
    assert [each.room for each in bench.sent(Begin, D if peer == D2 else D2)] == [3]
    assert (bench.routing.retries, bench.routing.resumptions) == (1, 1)


def test_a_client_that_has_left_is_not_resumed() -> None:
    bench = resumable()
    delivered(bench, 21, 22)
    bench.effects = bench.routing.cancel(1, bench.now)
    assert bench.of(Fail)[0].cause is Cause.ABORTED
    bench.welcome(D, 7)
    assert not bench.sent(Begin)


def test_without_another_decode_the_answer_fails_and_the_dead_one_is_not_asked() -> None:
    bench = Bench()
    bench.submit(sampling=DRAWN, enable_resume=True)
    delivered(bench, 21, 22)
    bench.welcome(D, 7)
    assert not bench.sent(Begin)
    assert bench.of(Fail)[0].cause is Cause.PEER_RESTARTED


def test_an_answer_that_no_prompt_could_hold_is_not_kept() -> None:
    bench = resumable(Sampling(12), length=PROMPT_BYTES_MAX // 4 - 2)
    delivered(bench, 21, 22)
    (room,) = bench.routing.rooms
    assert len(room.so_far.ids) == 8
    bench.receive(D, Tokens(1, 2, pack_ids([23])), End(1, "engine", "", 3))
    assert not room.so_far.ids
    assert not bench.sent(Begin)
    assert bench.of(Fail)


def test_a_resumption_that_is_refused_fails_for_the_reason_of_the_loss() -> None:
    bench = resumable()
    delivered(bench, 21, 22)
    bench.receive(D, End(1, "shutdown", "it ends", 2))
    for room, peer in ((2, D2), (3, D), (4, D2)):
        bench.receive(peer, End(room, "refused", "generated: the engine does not support it", 0))
        if bench.of(Fail):
            break
    (failed,) = bench.of(Fail)
    assert failed.cause is Cause.SHUTDOWN
    assert "it ends" in failed.detail
    assert "was not resumed" in failed.detail


# Over HTTP


ASKED = {"prompt": "abcde", "max_tokens": 16, "seed": 3, "logprobs": 1, "enable_resume": True}


def tokens_of(site: Site) -> float | None:
    return site.router.metrics.registry.get_sample_value("pdtransfer_generated_tokens_total", {"model": "m"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.given(decode=2)
async def test_a_client_gets_one_answer_whose_usage_counts_it_once(site: Site, stream: bool) -> None:
    _, wanted, _ = await site.post(**ASKED)
    assert wanted["pdtransfer"]["resumptions"] == 0
    for decode in site.decode:
        decode.more.clear()
        decode.begun.clear()
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked = asyncio.create_task(site.http.post(site.url + "/v1/completions", json=ASKED | more))
    await until(lambda: tokens_of(site) == 16 + 3)
    first, second = site.decode if site.decode[0].begun else site.decode[::-1]
    first.failure = "peer_lost"
    for decode in site.decode:
        decode.more.set()
    async with await asked as response:
        assert response.status == 200
        text = await response.text()
    if stream:
        events = [json.loads(each[6:]) for each in text.split("\n\n") if each.startswith("data: {")]
        choices = [event["choices"][0] for event in events if event["choices"]]
        answer = {
            "text": "".join(choice["text"] for choice in choices),
            "tokens": [token for choice in choices for token in choice["logprobs"]["tokens"]],
            "offsets": [at for choice in choices for at in choice["logprobs"]["text_offset"]],
            "reason": choices[-1]["finish_reason"],
            "usage": events[-1]["usage"],
            "pdtransfer": events[-2]["pdtransfer"],
        }
    else:
        answer = facts(json.loads(text))
    expected = facts(wanted)
    expected["usage"]["prompt_tokens_details"] = None  # what is cached of an answer is not a cached prompt
    record, _ = answer.pop("pdtransfer"), expected.pop("pdtransfer")
    assert answer == expected
    assert (record["resumptions"], record["tokens_digest"], record["kv_digest"]) == (1, None, "03")
    assert (record["decode"], record["room"]) == (second.node, f"{second.begun[0].room:016x}")
    assert site.backend.routing.resumptions == 1
    lost, ended, whole = site.ended[-3:]
    assert [each.resumptions for each in (lost, ended, whole)] == [0, 1, 1]
    assert (lost.retried, lost.tokens + ended.tokens, whole.tokens) == (True, 16, 16)
    assert lost.tokens in (3, 6), "a loss may overtake the piece before it"
    assert (ended.prompt_tokens, whole.prompt_tokens, whole.cached_tokens) == (5 + lost.tokens - 1, 5, None)
    assert whole.rooms == (*lost.rooms, *ended.rooms)


def facts(answer: dict) -> dict:
    choice = answer["choices"][0]
    return {
        "text": choice["text"],
        "tokens": choice["logprobs"]["tokens"],
        "offsets": choice["logprobs"]["text_offset"],
        "reason": choice["finish_reason"],
        "usage": answer["usage"],
        "pdtransfer": answer["pdtransfer"],
    }


@pytest.mark.given(decode=2)
async def test_a_stop_string_may_lie_across_the_loss(site: Site) -> None:
    for decode in site.decode:
        decode.more.clear()
        decode.piece = 2
    body = {"prompt": "abcde", "max_tokens": 16, "stop": "cba", "enable_resume": True}
    asked = asyncio.create_task(site.post(**body))
    await until(lambda: tokens_of(site) == 2)
    first = site.decode[0] if site.decode[0].begun else site.decode[1]
    first.failure = "peer_lost"
    for decode in site.decode:
        decode.more.set()
    _, answer, _ = await asked
    assert answer["choices"][0]["text"] == "ed"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.given(limits=replace(LIMITS, prompts_bytes_max=PROMPT_BYTES_MAX))
async def test_what_is_kept_of_answers_counts_against_the_bytes_of_all_prompts(site: Site) -> None:
    body = {"prompt": ["ab", "cd"], "max_tokens": 400_000}
    status, answer, _ = await site.post(**body, enable_resume=True)
    assert (status, answer["error"]["param"]) == (400, "n"), "it never fits"
