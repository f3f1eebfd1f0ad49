"""The first token of a room that prefill sends to the router, before decode has the KV."""

from __future__ import annotations

import pytest

from pdtransfer.errors import Cause, RemoteProtocolError
from pdtransfer.limits import PROMPT_BYTES_MAX
from pdtransfer.serve.router.backends.daemons.router_effects import Emit, Fail, Finish, Retry
from pdtransfer.wire import Begin, End, Logprobs, Sampling, Tokens, TokensAcked, pack_ids
from tests.serve.router.router_site import site
from tests.serve.router.routing_bench import D2, P2, Bench, D, P


def begun(**more) -> Bench:
    """A router with two workers of each role, and a request whose room is 1, on P and D."""
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    bench.submit(**{"early": True, **more})
    assert (bench.sent(Begin, P)[0].room, bench.sent(Begin, D)[0].room) == (1, 1)
    return bench


def tokens(*ids: int, room: int = 1, first: int = 0, logprobs: bytes = b"") -> Tokens:
    return Tokens(room, first, pack_ids(list(ids)), logprobs)


def retried(bench: Bench) -> tuple[int, str, str]:
    """The room that was begun anew, and its workers."""
    begins = [
        (effect.message, effect.peer) for effect in bench.effects if isinstance(getattr(effect, "message", 0), Begin)
    ]
    (room,) = {begin.room for begin, _ in begins}
    assert not any(begin.first_token for begin, _ in begins), "the client has it"
    prefill, decode = sorted((peer for _, peer in begins), key=lambda peer: "d" in peer[6:7])
    return room, prefill, decode


def test_prefills_token_is_delivered_and_decodes_tokens_go_on_behind_it() -> None:
    bench = begun()
    assert (bench.sent(Begin, P)[0].first_token, bench.sent(Begin, D)[0].first_token) == (True, False)
    bench.receive(P, tokens(21))
    assert (bench.of(Emit), bench.sent(TokensAcked, P)) == ([Emit(1, [21])], [TokensAcked(1, 1)])
    bench.receive(P, tokens(21))  # repeated: its acknowledgement was lost
    assert (bench.of(Emit), bench.sent(TokensAcked, P)) == ([], [TokensAcked(1, 1)])
    bench.receive(D, tokens(21))
    assert (bench.of(Emit), bench.sent(TokensAcked, D)) == ([], [TokensAcked(1, 1)])
    bench.receive(D, tokens(22, 23, first=1))
    assert bench.of(Emit) == [Emit(1, [22, 23])]
    bench.receive(D, End(1, "length", "", 3))
    bench.receive(P, End(1, "done", "", 1))
    assert [type(each) for each in bench.of(Finish)] == [Finish]


def test_where_decode_is_the_first_prefills_token_adds_nothing() -> None:
    bench = begun()
    bench.receive(D, tokens(21, 22))
    bench.receive(P, tokens(21))
    assert (bench.of(Emit), bench.sent(TokensAcked, P)) == ([], [TokensAcked(1, 1)])
    bench.receive(D, tokens(23, first=2))
    assert bench.of(Emit) == [Emit(1, [23])]


def test_its_logprobs_come_with_it_once() -> None:
    rows = [Logprobs(-0.5 - index).pack() for index in range(2)]
    bench = begun(sampling=Sampling(12, logprobs=True))
    bench.receive(P, tokens(21, logprobs=rows[0]))
    assert bench.of(Emit) == [Emit(1, [21], rows[0])]
    bench.receive(D, tokens(21, 22, logprobs=b"".join(rows)))
    assert bench.of(Emit) == [Emit(1, [22], rows[1])]


@pytest.mark.parametrize(("early", "ids"), [(False, [21]), (True, [21, 22])], ids=["not asked", "two"])
def test_tokens_that_prefill_was_not_asked_for_are_a_breach(early: bool, ids: list[int]) -> None:
    bench = begun(early=early)
    with pytest.raises(RemoteProtocolError, match="is not decoded on"):
        bench.receive(P, tokens(*ids))


@pytest.mark.parametrize("bad", [tokens(22, first=1), tokens(21, logprobs=b"x")], ids=["the second", "logprobs"])
def test_a_wrong_first_token_fails_its_room_and_another_pair_serves_it(bad: Tokens) -> None:
    bench = begun()
    bench.receive(P, bad)
    assert bench.of(Emit) == []
    assert [each.cause for each in bench.of(Retry)] == [Cause.BREACH]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("lost", [P, D])
def test_a_room_that_is_lost_behind_its_first_token_is_begun_anew_and_delivers_the_rest(
    lost: str, resume: bool
) -> None:
    bench = begun(enable_resume=resume)
    bench.receive(P, tokens(21))
    bench.receive(lost, End(1, "engine", "", 0))
    assert [each.resumed for each in bench.of(Retry)] == [resume]
    room, _, decode = retried(bench)
    bench.receive(decode, tokens(21, 22, room=room))
    assert bench.of(Emit) == [Emit(1, [22])]


def test_a_token_of_a_prompt_of_the_greatest_length_is_delivered_once() -> None:
    bench = begun(enable_resume=True, length=PROMPT_BYTES_MAX // 4)
    bench.receive(P, tokens(21))
    bench.receive(D, End(1, "engine", "", 0))
    room, _, decode = retried(bench)
    bench.receive(decode, tokens(21, 22, room=room))
    assert bench.of(Emit) == [Emit(1, [22])]


def test_an_answer_that_no_room_goes_on_with_fails() -> None:
    bench = begun()
    bench.receive(P, tokens(21))
    bench.receive(D, tokens(20, 22))
    assert [each.detail for each in bench.of(Retry)] == ["d0: cannot go on: it picks 20 where 21 was delivered"]
    room, _, decode = retried(bench)
    bench.receive(decode, tokens(20, 22, room=room))
    assert bench.of(Emit) == []
    assert [(each.request, each.cause) for each in bench.of(Fail)] == [(1, Cause.ENGINE)]


async def test_only_streams_ask_for_it_and_only_where_the_flag_allows_it() -> None:
    for stream_from in ("prefill", "decode"):
        async with site(stream_from=stream_from) as it:
            for stream in (True, False):
                body = {"prompt": "once", "max_tokens": 3, "stream": stream}
                async with it.http.post(it.url + "/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()
            asked = [[begin.first_token for begin in side[0].begun] for side in (it.prefill, it.decode)]
            assert asked == [[stream_from == "prefill", False], [False, False]]
