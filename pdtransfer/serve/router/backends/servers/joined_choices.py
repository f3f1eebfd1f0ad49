"""The answers to requests for one choice each, joined to the answer to a request for all of them, as SGLang writes it.
No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import msgspec
from msgspec import Raw

from .....errors import RemoteProtocolError
from .....limits import HTTP_BODY_BYTES_MAX
from .....schema import parse
from .early_token import EVENT_END

_ANSWER, _ANSWERS = msgspec.json.Decoder(dict[str, Raw]), msgspec.json.Decoder(list[dict[str, Raw]])
_EITHER = msgspec.json.Decoder(dict[str, Raw] | list[dict[str, Raw]])
_OBJECT, _INDEX = msgspec.json.Decoder(dict[str, Any]), msgspec.json.Decoder(int)
_DONE, _ZERO, _NULL = b"data: [DONE]" + EVENT_END, Raw(b"0"), Raw(b"null")
_OF_ALL = ("sglext", "usage")  # what an answer has once for all its choices; a stream's last events, in this order


class JoinedAnswers:
    """Whole answers. Choice i of a prompt follows choice i - 1, then come those of the next prompt."""

    failed = False

    def __init__(self, count: int) -> None:
        self._bodies = [bytearray() for _ in range(count)]

    def take(self, number: int, piece: bytes) -> bytes:
        """Takes a piece of the answer with this number; returns what the client gets by now. Raises
        RemoteProtocolError."""
        self._bodies[number] += piece
        _bound(self._bodies[number])
        return b""

    def end(self) -> bytes:
        """Returns the rest, once all answers have ended. Raises RemoteProtocolError."""
        answers = [parse(bytes(body), _EITHER) for body in self._bodies]
        first = answers[0]
        if isinstance(first, list) or "choices" not in first:  # of /generate: an answer, or one for each prompt
            return msgspec.json.encode(_in_turn([_listed(answer) for answer in answers]))
        if any(isinstance(answer, list) or "choices" not in answer for answer in answers):
            raise RemoteProtocolError("answers", "differ in their form")
        objects = cast("list[dict[str, Raw]]", answers)
        choices = _in_turn([parse(answer["choices"], _ANSWERS) for answer in objects])
        numbered = [choice | {"index": index} for index, choice in enumerate(choices)]
        return msgspec.json.encode(_of_all(objects) | {"choices": numbered})


class JoinedEvents:
    """Streams, event by event. As SGLang does, an error ends all of them."""

    def __init__(self, count: int) -> None:
        self._count, self.failed = count, False
        self._rests = [b""] * count  # the begin of the next event of each stream
        self._last: dict[str, list[dict[str, Raw]]] = {name: [] for name in _OF_ALL}

    def take(self, number: int, piece: bytes) -> bytes:
        """As JoinedAnswers.take; an empty piece ends a stream."""
        *events, rest = (self._rests[number] + piece).split(EVENT_END)
        if rest and not piece:
            raise RemoteProtocolError("stream", "ends within an event")
        _bound(rest)
        self._rests[number] = rest
        return b"".join(self._event(number, event + EVENT_END) for event in events)

    def end(self) -> bytes:
        """As JoinedAnswers.end; also behind an error, which is `failed`."""
        last = [] if self.failed else [_event(_of_all(chunks)) for chunks in self._last.values() if chunks]
        return b"".join((*last, _DONE))

    def _event(self, number: int, event: bytes) -> bytes:
        if event == _DONE:
            return b""
        read = parse(event.removeprefix(b"data: "), _ANSWER)
        if "error" in read:
            self.failed = True
            return event
        if "choices" not in read:  # of /generate
            return _event(self._numbered(number, read))
        if choices := parse(read["choices"], _ANSWERS):
            return _event(read | {"choices": [self._numbered(number, choice) for choice in choices]})
        for name in _OF_ALL:
            if read.get(name, _NULL) != _NULL:
                self._last[name].append(read)
        return b""

    def _numbered(self, number: int, choice: dict[str, Raw]) -> Mapping[str, object]:
        return choice | {"index": parse(choice.get("index", _ZERO), _INDEX) * self._count + number}


def _of_all(answers: Sequence[dict[str, Raw]]) -> dict[str, object]:
    """The first answer, with what is of all choices: a prompt's tokens count once."""
    joined: dict[str, object] = {**answers[0]}
    for name, join in (("usage", _usage), ("sglext", _extension)):
        values = [parse(answer[name], _OBJECT) for answer in answers if answer.get(name, _NULL) != _NULL]
        if values:
            joined[name] = join(values)
    return joined


def _usage(usages: list[dict[str, Any]]) -> dict[str, Any]:
    first = usages[0]
    joined = _sum(usages) | {name: value for name, value in first.items() if name.startswith("prompt_tokens")}
    return joined | {"total_tokens": _sum([joined.get("prompt_tokens"), joined.get("completion_tokens")])}


def _sum(values: Iterable[Any]) -> Any:
    """Of numbers, or of each number of objects; null counts as nothing."""
    counted = [value for value in values if value is not None]
    if counted and all(isinstance(value, dict) for value in counted):
        objects = cast("list[dict[str, Any]]", counted)
        return {name: _sum(value.get(name) for value in objects) for name in dict.fromkeys(chain(*objects))}
    if not all(isinstance(value, int) for value in counted):
        raise RemoteProtocolError("usage", "has something else than numbers")
    return sum(counted) if counted else None


def _extension(extensions: list[dict[str, Any]]) -> dict[str, Any]:
    """SGLang's own fields: these two are lists of all choices, the others are of the prompt."""
    lists = {
        "output_ids": [ids for extension in extensions for ids in extension.get("output_ids") or ()],
        "spec_tokens_details": [extension.get("spec_tokens_details") for extension in extensions],
    }
    return extensions[0] | {name: values for name, values in lists.items() if any(values)}


def _in_turn(of_choices: list[list[dict[str, Raw]]]) -> list[dict[str, Raw]]:
    """All choices of the first prompt, then those of the next one. Each list has one choice of every prompt."""
    if len({len(of_prompts) for of_prompts in of_choices}) > 1:
        raise RemoteProtocolError("answers", f"have {', '.join(str(len(answer)) for answer in of_choices)} prompts")
    return [*chain(*zip(*of_choices, strict=True))]


def _listed(answer: dict[str, Raw] | list[dict[str, Raw]]) -> list[dict[str, Raw]]:
    return answer if isinstance(answer, list) else [answer]


def _event(content: Mapping[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + EVENT_END


def _bound(kept: bytes | bytearray) -> None:
    if len(kept) > HTTP_BODY_BYTES_MAX:
        raise RemoteProtocolError("answer", f"larger than {HTTP_BODY_BYTES_MAX} bytes")
