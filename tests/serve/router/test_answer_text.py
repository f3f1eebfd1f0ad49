"""A choice's text ends before a stop string, wherever its tokens end, and nothing that may begin one goes out early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.serve.router.backends.daemons import answer as answer_module
from pdtransfer.serve.router.backends.daemons.answer import AnswerText
from pdtransfer.serve.router.backends.daemons.answers import TextPiece
from pdtransfer.serve.router.front.text import BytesText, token_name
from pdtransfer.wire import Logprobs, Sampling


def growing(*stops: str, keep_stop: bool = False, min_tokens: int = 0, logprobs: bool = False) -> AnswerText:
    sampling = Sampling(1_000, min_tokens=min_tokens, logprobs=logprobs)
    return AnswerText(BytesText(), sampling, stops, keep_stop=keep_stop)


def fed(answer: AnswerText, text: str, *, size: int = 1) -> list[str]:
    """The pieces of the text, fed `size` bytes at a time."""
    ids = list(text.encode())
    return [answer.feed(ids[offset : offset + size], b"").text for offset in range(0, len(ids), size)]


def test_an_incomplete_character_is_held_back_and_high_ids_have_no_text() -> None:
    euro, answer = list("\u20ac".encode()), growing()
    assert [answer.feed(each, b"").text for each in (euro[:1], [300, 70_000], euro[1:])] == ["", "", "\u20ac"]
    assert answer.feed(euro[:2], b"").text == ""
    assert answer.end() == TextPiece("\ufffd")
    assert answer.tokens == 7


def test_text_before_a_stop_goes_out_and_the_stop_does_not() -> None:
    answer = growing("END", "X")
    assert fed(answer, "abE") == ["a", "b", ""]
    assert fed(answer, "NaEN") == ["", "ENa", "", ""]
    assert not answer.stopped
    assert answer.feed(list(b"DabX"), b"").text == ""
    assert (answer.stopped, answer.tokens, answer.end().text) == (True, 8, "")


def test_no_stop_counts_within_the_first_min_tokens() -> None:
    answer = growing("b", min_tokens=3)
    assert "".join(fed(answer, "abab")) == "aba"
    assert (answer.stopped, answer.tokens) == (True, 4)


def test_a_stop_may_end_with_half_a_character_of_the_answer() -> None:
    answer = growing("\ufffd")
    assert answer.feed(list("a\u20ac".encode())[:2], b"").text == "a"
    assert answer.end().text == ""
    assert answer.stopped


def test_logprobs_come_with_their_text_and_none_of_a_stop() -> None:
    answer = growing("END", logprobs=True)
    rows = [Logprobs(-float(index)).pack() for index in range(8)]

    def offsets(text: bytes, first: int) -> list[tuple[str, int, float]]:
        piece = answer.feed(list(text), b"".join(rows[first : first + len(text)]))
        return [(token_name(BytesText(), token.id), token.offset, token.logprobs.own) for token in piece.tokens]

    assert offsets(b"aE", 0) == [("a", 0, 0.0)]
    assert offsets(b"N", 2) == []
    assert offsets(b"b", 3) == [("E", 1, -1.0), ("N", 2, -2.0), ("b", 3, -3.0)]
    assert offsets(b"cEND", 4) == [("c", 4, -4.0)]
    assert answer.end() == TextPiece()


@given(
    st.text("ab\u20ac", max_size=30), st.lists(st.text("ab\u20ac", min_size=1, max_size=4), max_size=4),
    st.integers(1, 7), st.booleans(),
)  # fmt: skip
def test_pieces_are_the_text_up_to_the_first_stop(text: str, stops: list[str], size: int, keep: bool) -> None:
    answer = growing(*stops, keep_stop=keep)
    pieces = [*fed(answer, text, size=size), answer.end().text]
    # The first stop to be complete ends the text; of several that are complete at once, the one that begins first.
    for upto in range(len(text) + 1):
        found = [(at, stop) for stop in stops if (at := text[:upto].find(stop)) >= 0]
        if found:
            at, stop = min(found)
            text = text[: at + (len(stop) if keep else 0)]
            break
    assert "".join(pieces) == text
    assert answer.stopped == bool(found if stops else False)


def test_a_long_stop_costs_little_at_every_token() -> None:
    reads = 0

    class Counted(str):
        def __getitem__(self, at):
            nonlocal reads
            reads += 1
            return super().__getitem__(at)

    answer = growing("a" * 1_023 + "b", Counted("b" + "a" * 1_023), Counted("a" * 500 + "c"))
    assert "".join(fed(answer, "a" * 3_000)) == "a" * 1_977
    assert reads < 9 * 3_000
    assert (answer.feed(list(b"b"), b"").text, answer.stopped) == ("", True)


def test_tokens_without_text_behind_held_text_are_not_looked_at_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    class Scored:
        def __init__(self, token: int, offset: int, _: Logprobs) -> None:
            self.id, self._offset = token, offset

        @property
        def offset(self) -> int:
            nonlocal looks
            looks += 1
            return self._offset

    monkeypatch.setattr(answer_module, "ScoredToken", Scored)
    answer, score = growing("ab", logprobs=True), Logprobs(-1.0).pack()
    for token in (97, *[300] * 500):
        assert answer.feed([token], score) == TextPiece()
    assert looks < 15 * 500
    assert len(answer.end().tokens) == 501
