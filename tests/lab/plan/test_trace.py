"""Traces: both formats, hostile lines named by number and field, and what is cut, scaled and copied."""

from __future__ import annotations

import pytest
from pdtransfer_lab.plan.trace import copies, cut_trace, parse_trace, scale_tokens, speed_up

from pdtransfer.errors import WorldError

GOOD = '{"timestamp": 1500, "input_length": 513, "output_length": 7, "hash_ids": [3, 9]}'
CSV = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def line(**fields: object) -> str:
    import json

    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]} | fields)


def test_a_line_of_mooncake_is_a_request() -> None:
    (request,) = parse_trace([GOOD, "\n"]).requests
    assert (request.at_s, request.input_tokens, request.output_tokens, request.blocks) == (1.5, 513, 7, (3, 9))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "line 2"),
        (line(timestamp=-1), r"line 2.*\$\.timestamp"),
        (line(timestamp=1e300), r"line 2.*\$\.timestamp"),
        (line(input_length=0), r"line 2.*\$\.input_length"),
        (line(input_length=1 << 40), r"line 2.*\$\.input_length"),
        (line(output_length="x"), r"line 2.*\$\.output_length"),
        (line(hash_ids=[1]), "line 2: hash_ids: 1 ids, an input_length of 600 has 2 blocks"),
        (line(hash_ids=[1, -2]), r"line 2.*\$\.hash_ids"),
        (line(hash_ids=[1, 1 << 70]), r"line 2"),
        (line(hash_ids=None), r"line 2.*\$\.hash_ids"),
        ("[" * 100_000, "line 2"),
        ('{"timestamp": 0}', "line 2.*input_length"),
        ("\ud800", "line 2"),
    ],
)
def test_a_bad_line_of_mooncake_is_named(text: str, named: str) -> None:
    with pytest.raises(WorldError, match=named):
        parse_trace([GOOD, text])


def test_burstgpt_has_no_hashes_and_leaves_failures_out() -> None:
    trace = parse_trace([CSV, "5,ChatGPT,472,18,490,Conversation log\n", "9,GPT-4,700,0,1,x\n"])
    assert trace.skipped == 1
    (request,) = trace.requests
    assert (request.at_s, request.input_tokens, request.output_tokens) == (5.0, 472, 18)
    twice = parse_trace([CSV, "5,m,600,1,1,x\n", "6,m,600,1,1,x\n"]).requests
    assert not set(twice[0].blocks) & set(twice[1].blocks)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([CSV, "1,m,5,5,10,x\n", "nan,m,5,5,10,x\n"], "line 3: Timestamp = 'nan'"),
        ([CSV, "1,m,-5,5,10,x\n"], "line 2: Request tokens"),
        ([CSV, "1,m,5\n"], "line 2: Response tokens = ''"),
        (["a,b\n", "1,2\n"], "line 1: Request tokens, Response tokens, Timestamp: no such column"),
        ([CSV, '1,m,5,5,10,"' + "x" * 200_000 + '"\n'], "line 2"),
        ([], "has no"),
        ([CSV], "no request"),
    ],
)
def test_a_bad_line_of_burstgpt_is_named(lines: list[str], named: str) -> None:
    with pytest.raises(WorldError, match=named):
        parse_trace(lines)


def test_a_cut_counts_from_its_start() -> None:
    trace = parse_trace([line(timestamp=at * 1_000) for at in (3, 1, 2, 4)])
    assert [request.at_s for request in trace.requests] == [1, 2, 3, 4]
    assert [request.at_s for request in cut_trace(trace, from_s=2, until_s=4).requests] == [0, 1]
    assert len(cut_trace(trace, limit=3).requests) == 3
    assert [request.at_s for request in speed_up(trace, 2).requests] == [0.5, 1, 1.5, 2]
    with pytest.raises(WorldError, match="no request from 5 s"):
        cut_trace(trace, from_s=5)


@pytest.mark.parametrize("scale", [0.001, 0.05, 0.9, 3])
def test_scaled_blocks_are_shared_as_before(scale: float) -> None:
    trace = scale_tokens(parse_trace([line(input_length=length) for length in (513, 1_024, 700)]), scale)
    assert trace.block_tokens == max(1, round(512 * scale))
    for request in trace.requests:
        assert len(request.blocks) == 2
        assert trace.block_tokens < request.input_tokens <= 2 * trace.block_tokens
        assert request.output_tokens == max(1, round(20 * scale))


def test_copies_are_other_users_with_the_same_system_prompt() -> None:
    lines = [line(timestamp=index * 100, hash_ids=[0, 10 + index]) for index in range(20)]
    found = list(copies(parse_trace(lines), 3))
    assert len(found) == 60
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert all(each.blocks[0] == 0 for each in found)
    assert len({each.blocks[1] for each in found}) == 60
    assert list(copies(parse_trace(lines), 1)) == list(parse_trace(lines).requests)
