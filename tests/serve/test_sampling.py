"""Picks follow every field of Sampling, and depend on the request, the logits and the ids alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.serve import sampling as module
from pdtransfer.serve.sampling import (
    adjusted,
    beyond_basic,
    check_asked,
    check_sampling,
    draw,
    is_argmax,
    logprobs_of,
    pick,
)
from pdtransfer.wire import Logprobs, Sampling, pack_biases, unpack_biases, unpack_logprobs

LOGITS = np.log(np.array([0.05, 0.4, 0.25, 0.3], np.float32))
PROMPT = np.array([3], np.int64)


def asked(**fields: Any) -> Sampling:
    return Sampling(**{"max_tokens": 99, **fields})


def drawn(**fields: Any) -> list[int]:
    """Which ids come in many draws at temperature 1."""
    sampling = asked(temperature=1.0, **fields)
    return sorted({draw(LOGITS, sampling, index) for index in range(2_000)})


def picked(ids: list[int], **fields: Any) -> int:
    return pick(LOGITS, asked(**fields), prompt=PROMPT, ids=ids, eos=(1,)).id


@pytest.mark.parametrize(("top_k", "kept"), [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_likeliest(top_k: int, kept: list[int]) -> None:
    assert drawn(top_k=top_k) == kept


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, [0, 1, 2, 3]), (0.1, [0, 1, 2, 3]), (0.7, [1, 3]), (1.0, [1])])
def test_min_p_is_relative_to_the_likeliest(min_p: float, kept: list[int]) -> None:
    assert drawn(min_p=min_p) == kept


def test_top_p_is_of_what_top_k_leaves() -> None:
    assert drawn(top_k=2, top_p=0.6) == [1, 3]  # of the whole, 0.6 would take a third
    assert drawn(top_k=2, top_p=0.55) == [1]


def test_penalties_count_what_was_generated() -> None:
    assert picked([]) == 1
    assert picked([1], presence_penalty=1.0) == 3
    assert picked([1], presence_penalty=0.1) == 1
    assert picked([1] * 5, presence_penalty=0.1) == 1
    assert picked([1] * 5, frequency_penalty=0.1) == 3
    assert picked([0] * 40, frequency_penalty=-2.0) == 0


def test_the_repetition_penalty_counts_the_prompt_as_well() -> None:
    logits = np.array([2.0, 1.9, -1.0], np.float32)
    prompt = np.array([0, 2, 0], np.int64)
    after = adjusted(logits, asked(repetition_penalty=2.0), prompt=prompt, ids=[2])
    assert after.tolist() == [1.0, np.float32(1.9), -2.0]
    assert logits.tolist() == [2.0, np.float32(1.9), -1.0]


def test_no_end_of_sequence_comes_before_min_tokens() -> None:
    assert [picked([0] * count, min_tokens=3) for count in range(5)] == [3, 3, 3, 1, 1]


def test_a_bias_is_added_to_the_logits_of_its_ids() -> None:
    bias = pack_biases({1: -100.0, 0: 1.0})
    assert picked([], logit_bias=bias) == 3
    assert picked([], logit_bias=pack_biases({0: 100.0})) == 0


def test_logprobs_are_of_the_logits_as_the_model_gave_them() -> None:
    sampling = asked(logprobs=True, top_logprobs=2, temperature=5.0, logit_bias=pack_biases({0: 100.0}))
    found = pick(LOGITS, sampling, prompt=PROMPT, ids=[])
    assert found.id == 0
    assert found.logprobs is not None
    assert found.logprobs.own == pytest.approx(math.log(0.05), abs=1e-6)
    assert [each for each, _ in found.logprobs.top] == [1, 3]
    assert [value for _, value in found.logprobs.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)
    assert pick(LOGITS, asked(), prompt=PROMPT, ids=[]).logprobs is None
    certain = logprobs_of(np.array([1e4, 0.0], np.float32), 0, 1)
    assert certain == Logprobs(0.0, ((0, 0.0),))


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.3}, {"top_p": 0.999}, {"min_p": 1e-4}, {"top_k": 9_000}])
def test_a_large_vocabulary_is_drawn_from_as_if_it_were_sorted(fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(3).normal(0, 1, 20_000).astype(np.float32)
    sampling = asked(temperature=1.3, seed=7, **fields)
    partly = [draw(logits, sampling, index) for index in range(40)]
    monkeypatch.setattr(module, "SORTED_MAX", len(logits))
    assert partly == [draw(logits, sampling, index) for index in range(40)]
    assert len(set(partly)) > 10


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_break_no_pick(value: float, fields: Any) -> None:
    sampling = asked(**{"temperature": 1.0, "logprobs": True, "top_logprobs": 4, **fields})
    for count in (1, 5, 8):
        logits = np.arange(8, dtype=np.float32)
        logits[:count] = value
        picked = pick(logits, sampling, prompt=np.array([1]), ids=[])
        assert 0 <= picked.id < 8
        assert picked.logprobs is not None
        assert len(unpack_logprobs("x", picked.logprobs.pack(), sampling, 1)[0].top) == 4


def test_an_excluded_token_has_openais_least_logprob() -> None:
    excluded = np.array([0, -np.inf, -np.inf], np.float32)
    assert logprobs_of(excluded, 0, 2) == Logprobs(0.0, ((0, 0.0), (1, -9_999.0)))


@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_tiny_repetition_penalty_takes_a_seen_token(fields: Any) -> None:
    sampling = asked(temperature=1.0, repetition_penalty=1e-300, **fields)
    assert pick(np.arange(8, dtype=np.float32), sampling, prompt=np.array([2, 3]), ids=[4]).id in (2, 3, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.8},
        {"frequency_penalty": 0.3}, {"repetition_penalty": 1.3, "temperature": 2.0}, {"min_tokens": 9},
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [0, 1, 5])
def test_ids_that_were_generated_in_another_room_count_as_this_ones(fields: Any, before: int) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(12, 16)).astype(np.float32)
    prompt, whole = np.array([3, 5], np.int64), asked(**fields)
    ids: list[int] = []
    for row in logits:
        ids.append(pick(row, whole, prompt=prompt, ids=ids, eos=(1,)).id)
    rest = replace(whole, generated=before, min_tokens=max(0, whole.min_tokens - before))
    longer, again = np.concatenate((prompt, np.array(ids[:before], np.int64))), list[int]()
    for row in logits[before:]:
        again.append(pick(row, rest, prompt=longer, ids=again, eos=(1,)).id)
    assert ids[:before] + again == ids
    assert len(set(ids)) > 3


def test_a_prompt_has_more_than_the_ids_that_were_generated_before() -> None:
    prompt = np.arange(3)
    check_asked(prompt, asked(generated=2), vocabulary=4, context_tokens=200)
    with pytest.raises(ValueError, match="generated: 3, the prompt with them has 3 tokens"):
        check_asked(prompt, asked(generated=3), vocabulary=4, context_tokens=200)


def test_what_needs_more_than_an_argmax_is_distinguished_from_what_does_not() -> None:
    assert is_argmax(asked(ignore_eos=True, top_k=3, top_p=0.5))
    for fields in ({"temperature": 1.0}, {"min_tokens": 1}, {"logprobs": True}, {"repetition_penalty": 1.1}):
        assert not is_argmax(asked(**fields)), fields
    assert beyond_basic(asked(temperature=1.0, top_p=0.5, seed=3, ignore_eos=True)) is None
    assert beyond_basic(asked(min_p=0.5)) == "min_p"
    assert beyond_basic(asked(temperature=1.0, generated=3)) == "generated"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("temperature", -1.0), ("temperature", math.nan), ("top_p", 0.0), ("min_p", 1.5),
        ("presence_penalty", 2.5), ("frequency_penalty", math.nan), ("repetition_penalty", 0.0), ("seed", 1 << 64),
        ("min_tokens", 100), ("generated", -1), ("top_logprobs", 5), ("logit_bias", b"123"),
        ("logit_bias", pack_biases({4: 1.0})), ("logit_bias", pack_biases({0: math.inf})),
        ("logit_bias", pack_biases({1: 1.0}) * 2),
    ],
)  # fmt: skip
def test_what_no_pick_could_follow_is_refused_by_its_name(field: str, value: Any) -> None:
    check_sampling(asked(), 4)
    with pytest.raises(ValueError, match=field):
        check_sampling(asked(**{field: value}), 4)


def test_packed_logprobs_come_back_and_wrong_ones_are_refused() -> None:
    sampling = asked(logprobs=True, top_logprobs=2)
    rows = [Logprobs(-0.5, ((7, -0.25), (8, -1.5))), Logprobs(-2.0, ((0, 0.0), (1 << 31, -9.0)))]
    data = b"".join(row.pack() for row in rows)
    assert unpack_logprobs("logprobs", data, sampling, 2) == rows
    assert unpack_logprobs("logprobs", b"", asked(), 2) == []
    wrong = [data[:-1], b"", data * 2, Logprobs(math.nan, rows[0].top).pack() + data[:20]]
    wrong += [Logprobs(0.5, rows[0].top).pack() + data[:20], Logprobs(-1.0, ((1, math.inf), (2, -1.0))).pack() * 2]
    for each in wrong:
        with pytest.raises(RemoteProtocolError, match="logprobs"):
            unpack_logprobs("logprobs", each, sampling, 2)
    ids, values = unpack_biases("logit_bias", pack_biases({3: 0.5, 9: -1.0}))
    assert (ids.tolist(), values.tolist()) == ([3, 9], [0.5, -1.0])


@pytest.mark.parametrize("vocabulary", [32, 4_096])
@pytest.mark.parametrize("asked", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("penalty", [1e-300, 1e-39, 100.0])
def test_adjustments_beyond_float32_leave_a_token_to_pick(
    vocabulary: int, asked: dict[str, Any], penalty: float
) -> None:
    logits = np.random.default_rng(0).standard_normal(vocabulary).astype(np.float32)
    logits[3] = 0.0
    for bias in (-3.4e38, 3.4e38):
        biases = pack_biases(dict.fromkeys(range(30), bias))
        for temperature in (0.0, 1.0):
            extreme = {"temperature": temperature, "repetition_penalty": penalty, "logit_bias": biases, "min_tokens": 5}
            sampling = Sampling(max_tokens=8, **extreme, **asked)
            check_sampling(sampling, vocabulary)
            picked = pick(logits, sampling, prompt=np.arange(31), ids=[1, 2], eos=(30,))
            assert 0 <= picked.id < vocabulary
            assert picked.id != 30
            if bias > 0:
                assert picked.id < 30
        plain = Sampling(max_tokens=8, temperature=1.0, repetition_penalty=penalty, **asked)
        assert 0 <= pick(logits, plain, prompt=np.arange(31), ids=[1, 2]).id < vocabulary
