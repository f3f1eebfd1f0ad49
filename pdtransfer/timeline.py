"""Where the time goes: spans that the parts of a process report while somebody wants them, and files of them.

Whoever may report a span is given None where nobody asks, and then does nothing for it, not even read a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .errors import ConfigError

SPANS_MAX = 1 << 18  # that a process keeps, the latest: some 60 MiB


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that one process did; seconds of CLOCK_MONOTONIC, so that those of one host's processes compare."""

    process: str
    lane: str  # what does one thing after another there: compute, push, control, admission, step, ...
    name: str
    begin_s: float
    end_s: float
    room: int = 0
    layer: int = -1  # the first of those that it is about
    byte_count: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class Timeline:
    """What one process has to tell: an engine.base.Spans, from any thread."""

    def __init__(self, process: str, *, spans_max: int = SPANS_MAX) -> None:
        self._process = process
        self._spans: deque[Span] = deque(maxlen=spans_max)

    def __call__(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        """Keeps one span; the oldest goes where there are too many."""
        self._spans.append(
            Span(
                process=self._process, lane=lane, name=name, begin_s=begin_s, end_s=end_s, room=room, layer=layer,
                byte_count=byte_count,
            )
        )  # fmt: skip

    def take(self) -> list[Span]:
        """What was kept since the last time."""
        taken: list[Span] = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken


def write(path: Path, spans: Iterable[Span]) -> None:
    """One JSON object a line, behind what is there already."""
    encode = msgspec.json.Encoder().encode
    with path.open("ab") as file:
        file.writelines(encode(span) + b"\n" for span in spans)


def read(path: Path) -> list[Span]:
    """As `write` wrote them. Raises ConfigError, naming the line, for what is no span."""
    decode, spans = msgspec.json.Decoder(Span).decode, list[Span]()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            spans.append(decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    return spans
