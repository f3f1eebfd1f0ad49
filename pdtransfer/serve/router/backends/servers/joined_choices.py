"""Answers to requests for one choice each, joined to the answer for all of them, as SGLang writes it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import Meta, Raw

from .....errors import RemoteProtocolError
from .....limits import HTTP_BODY_BYTES_MAX
from .....schema import parse
from ...front.json_bodies import EVENT_END
from .server_request import EITHER, LIST, OBJECT, OBJECTS

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
_INDEX = msgspec.json.Decoder(_Count)
_Usage: TypeAlias = dict[str, _Count | dict[str, _Count | None] | None]
_USAGE: msgspec.json.Decoder[_Usage] = msgspec.json.Decoder(_Usage)
_DONE, _ZERO, _NULL = b"data: [DONE]" + EVENT_END, Raw(b"0"), Raw(b"null")
_OF_ALL = ("sglext", "usage")  # what an answer has once for all its choices; a stream's last events, in this order


class JoinedAnswers:
    """Whole answers. Choice i of a prompt follows choice i - 1, then come those of the next prompt."""

    failed = False

    def __init__(self, count: int) -> None:
        self._bodies = [bytearray() for _ in range(count)]
        self.kept_bytes = 0  # of all of them

    def take(self, number: int, piece: bytes) -> bytes:
        """Takes a piece of the answer with this number; returns what the client gets by now. Raises
        RemoteProtocolError."""
        self._bodies[number] += piece
        self.kept_bytes += len(piece)
        _bound(self.kept_bytes)
        return b""

    def end(self) -> bytes:
        """Returns the rest, once all answers have ended. Raises RemoteProtocolError."""
        answers = [parse(bytes(body), EITHER) for body in self._bodies]
        first = answers[0]
        if isinstance(first, list) or "choices" not in first:  # of /generate: an answer, or one for each prompt
            return msgspec.json.encode(_in_turn([_listed(answer) for answer in answers]))
        if any(isinstance(answer, list) or "choices" not in answer for answer in answers):
            raise RemoteProtocolError("answers", "differ in their form")
        objects = cast("list[dict[str, Raw]]", answers)
        choices = _in_turn([parse(answer["choices"], OBJECTS) for answer in objects])
        numbered = [choice | {"index": index} for index, choice in enumerate(choices)]
        return msgspec.json.encode(_of_all(objects) | {"choices": numbered})


class JoinedEvents:
    """Streams, event by event. As SGLang does, an error ends all of them."""

    def __init__(self, count: int) -> None:
        self._count, self.failed = count, False
        self._rests = [b""] * count  # the begin of the next event of each stream
        self._last: dict[str, list[tuple[int, dict[str, Raw]]]] = {name: [] for name in _OF_ALL}
        self._last_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Of all of them."""
        return self._last_bytes + sum(map(len, self._rests))

    def take(self, number: int, piece: bytes) -> bytes:
        """As JoinedAnswers.take; an empty piece ends a stream."""
        *events, rest = (self._rests[number] + piece).split(EVENT_END)
        if rest and not piece:
            raise RemoteProtocolError("stream", "ends within an event")
        self._rests[number] = rest
        _bound(self.kept_bytes)
        return b"".join(self._event(number, event + EVENT_END) for event in events)

    def end(self) -> bytes:
        """As JoinedAnswers.end; also behind an error, which is `failed`."""
        in_turn = [sorted(chunks, key=itemgetter(0)) for chunks in self._last.values() if chunks]
        last = [] if self.failed else [_event(_of_all([chunk for _, chunk in chunks])) for chunks in in_turn]
        return b"".join((*last, _DONE))

    def _event(self, number: int, event: bytes) -> bytes:
        if event == _DONE:
            return b""
        read = parse(event.removeprefix(b"data: "), OBJECT)
        if "error" in read:
            self.failed = True
            return event
        if "choices" not in read:  # of /generate
            return _event(self._numbered(number, read))
        if choices := parse(read["choices"], OBJECTS):
            return _event(read | {"choices": [self._numbered(number, choice) for choice in choices]})
        for name in _OF_ALL:
            if read.get(name, _NULL) != _NULL:
                self._last[name].append((number, read))
                self._last_bytes += len(event)
                _bound(self.kept_bytes)
        return b""

    def _numbered(self, number: int, choice: dict[str, Raw]) -> Mapping[str, object]:
        return choice | {"index": parse(choice.get("index", _ZERO), _INDEX) * self._count + number}


def _of_all(answers: Sequence[dict[str, Raw]]) -> dict[str, object]:
    """The first answer, with what is of all choices: a prompt's tokens count once."""
    joined: dict[str, object] = {**answers[0]}
    if usages := _values(answers, "usage"):
        joined["usage"] = _usage([parse(usage, _USAGE) for usage in usages])
    if extensions := _values(answers, "sglext"):
        joined["sglext"] = _extension([parse(extension, OBJECT) for extension in extensions])
    return joined


def _values(objects: Sequence[dict[str, Raw]], name: str) -> list[Raw]:
    return [content[name] for content in objects if content.get(name, _NULL) != _NULL]


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


def _extension(extensions: list[dict[str, Raw]]) -> dict[str, object]:
    """SGLang's own fields: these two are lists of all choices, the others are of the prompt. With several prompts each
    answer's details are a list that may lack some: they are left out."""
    joined: dict[str, object] = {**extensions[0]}
    if of_choices := _values(extensions, "output_ids"):
        joined["output_ids"] = [*chain.from_iterable(parse(ids, LIST) for ids in of_choices)]
    if details := _values(extensions, "spec_tokens_details"):
        joined["spec_tokens_details"] = details
        if any(bytes(value).startswith(b"[") for value in details):
            del joined["spec_tokens_details"]
    return joined


def _in_turn(of_choices: list[list[dict[str, Raw]]]) -> list[dict[str, Raw]]:
    """All choices of the first prompt, then those of the next one. Each list has one choice of every prompt."""
    if len({len(of_prompts) for of_prompts in of_choices}) > 1:
        raise RemoteProtocolError("answers", f"have {', '.join(str(len(answer)) for answer in of_choices)} prompts")
    return [*chain(*zip(*of_choices, strict=True))]


def _listed(answer: dict[str, Raw] | list[dict[str, Raw]]) -> list[dict[str, Raw]]:
    return answer if isinstance(answer, list) else [answer]


def _event(content: Mapping[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + EVENT_END


def _bound(kept_bytes: int) -> None:
    if kept_bytes > HTTP_BODY_BYTES_MAX:
        raise RemoteProtocolError("answers", f"larger than {HTTP_BODY_BYTES_MAX} bytes together")
