"""What a vLLM decode server reports of its hand-offs: in its metrics, and in its answers.

A server that computes the prompts which prefill should have sent answers its clients all the same, only later. No I/O.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import cast

import msgspec
from msgspec import Struct

from .....errors import RemoteProtocolError
from .....schema import parse
from .server_pool import HandOffs

AMOUNT_MAX = float(1 << 62)
WHYS_MAX = 16  # reasons that are kept of one server
ANSWER_TAIL_BYTES = 2_048  # of a whole answer: vLLM writes kv_transfer_params behind the choices
SHARE_MAX = 0.1  # of requests that decode may compute itself before that is a warning
SHARE_OF, SHARE_OF_MIN = 100, 10  # requests that are looked at, and fewest of them

_LINE = re.compile(
    rb"^vllm:pdtransfer_(rooms|computed|bytes|refusals)_total\{([^\n]*)\} ([0-9.e+]{1,32})$", re.MULTILINE
)
_LABEL = re.compile(rb'\b(end|direction|fact)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {rb"\n": b"\n", rb"\"": b'"', rb"\\": b"\\"}
_PARAMS = re.compile(rb'"kv_transfer_params":\s*(\{[^{}]*\})')
# Objects of an answer, of ANSWER_TAIL_BYTES at most, and figures in them that decode has of the hand-off: KV that it
# received counts as cached, and the prompt's queue and computation lie before its own. A text cannot pass for these.
_OF_PROMPT = re.compile(
    rb'"(?:prompt_tokens_details|metrics)":\s{0,8}\{[^{}]{0,256}(?:\{[^{}]{0,512}\}[^{}]{0,256}){0,2}\}'
)
_FIGURE = re.compile(
    rb'"(cached_tokens|created_cache_tokens|time_to_first_token_ms|queue_time_ms|tokens_per_second)":'
    rb"\s{0,8}([0-9.eE+-]+|null)"
)
_CACHED = re.compile(rb'"remote_prefill_cached_tokens":\s{0,8}(\d+)')


def hand_offs_of(metrics: bytes) -> HandOffs | None:
    """Reads an engine's metrics; None where it has no pdtransfer connector."""
    counts = {"received": 0.0, "computed": 0.0, "bytes": 0.0}
    refusals: list[str] = []
    lines = _LINE.findall(metrics)
    for name, labels, value in lines:
        try:
            amount = float(value)
        except ValueError:
            continue
        if amount > AMOUNT_MAX:  # infinity as well
            continue
        shown: dict[bytes, bytes] = dict(_LABEL.findall(labels))
        if name == b"computed":
            counts["computed"] += amount
        elif name == b"refusals":
            if amount and len(refusals) < WHYS_MAX:
                refusals.append(_unescaped(shown.get(b"fact", b"")))
        elif b"received" in (shown.get(b"end"), shown.get(b"direction")):
            counts["received" if name == b"rooms" else "bytes"] += amount
    received, computed, kv_bytes = map(int, counts.values())
    return HandOffs(received, computed, kv_bytes, tuple(refusals)) if lines else None


def differences(decode: str, counted: HandOffs | None, prefills: Mapping[str, object]) -> list[str]:
    """A line for each fact in which a decode server differs from a prefill server, with both values, by what decode has
    `counted`. `prefills` are facts by the server's URL, as it reported them."""
    lines: list[str] = []
    for refusal in () if counted is None else counted.refusals:
        name, _, value = refusal.partition("=")
        for url, facts in prefills.items():
            theirs = cast("dict[object, object]", facts).get(name) if isinstance(facts, dict) else None
            if isinstance(theirs, str) and theirs != value:
                lines.append(f"{name}: {url} has {theirs[:96]!r}, {decode} {value!r}")
    return lines


class Received(Struct):
    """What an answer reports of its KV."""

    kv_bytes: int = 0
    kv_lost: bool = False


_RECEIVED = msgspec.json.Decoder(Received)


def received_of(tail: bytes) -> Received | None:
    """Reads the end of a whole answer; None where it has nothing. A text in it cannot pass for that: its quotes are
    escaped."""
    matches = _PARAMS.findall(tail)
    try:
        return parse(matches[-1], _RECEIVED) if matches and b'"kv_lost"' in matches[-1] else None
    except RemoteProtocolError:
        return None


def has_prompt_figures(piece: bytes) -> bool:
    """True if a piece of decode's answer has figures that are prefill's to tell."""
    return _OF_PROMPT.search(piece) is not None


def prompt_figures(answer: bytes) -> dict[bytes, bytes]:
    """What prefill's answer tells of the prompt, in JSON by name. vLLM's connectors return the cached tokens too."""
    reported = dict(_FIGURE.findall(b"".join(_OF_PROMPT.findall(answer))))
    reported.pop(b"tokens_per_second", None)  # of its one token
    cached = _CACHED.search(answer)
    return reported if cached is None else reported | {b"cached_tokens": cached[1]}


def with_prompt_figures(piece: bytes, reported: Mapping[bytes, bytes]) -> bytes:
    """A piece of decode's answer with prefill's figures of the prompt, null for what prefill has not reported."""

    def figure(match: re.Match[bytes]) -> bytes:
        return b'"%s":%s' % (match[1], reported.get(match[1], b"null"))

    return _OF_PROMPT.sub(lambda match: _FIGURE.sub(figure, match[0]), piece)


class ComputedHandOffs:
    """How many of the latest hand-offs of a decode server were computed there."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=SHARE_OF)
        self._last: HandOffs | None = None

    def take(self, now: HandOffs) -> str | None:
        """Adds what a server has counted since the last call; returns a warning where one is due."""
        last, self._last = self._last, now
        if last is None or now.received < last.received or now.computed < last.computed:
            self._latest.clear()  # another process
            return None
        computed = min(now.computed - last.computed, SHARE_OF)
        self._latest.extend([False] * min(now.received - last.received, SHARE_OF) + [True] * computed)
        count, share = len(self._latest), sum(self._latest)
        if not computed or count < SHARE_OF_MIN or share <= SHARE_MAX * count:
            return None
        self._latest.clear()  # the next warning is of other requests
        why = f": {now.refusals[-1]}" if now.refusals else ""
        return f"{share} of its last {count} requests were computed there, since their KV was not received{why}"


def _unescaped(text: bytes) -> str:
    return re.sub(rb"\\.", lambda match: _ESCAPES.get(match[0], match[0]), text).decode(errors="replace")[:256]
