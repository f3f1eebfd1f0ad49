"""Where a process's log goes: one line a record whatever peers put into it, and no flood of one kind of line."""

from __future__ import annotations

import logging
import logging.handlers
import time
from pathlib import Path

BURST = 50  # lines of one kind in PERIOD_S; peers bring about most of them
PERIOD_S = 10.0
KINDS_MAX = 1_024


def printable(text: str) -> str:
    """The text with every character escaped that is not printed: line ends above all, and what steers a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Lines(logging.Formatter):
    """Escapes messages: a peer's names and reasons are in them. A traceback keeps its lines, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        text: str = super().formatException(ei)  # pyright: ignore[reportArgumentType]
        return "\n".join("  " + printable(line) for line in text.split("\n"))


class Seldom(logging.Filter):
    """Lets BURST lines of one kind through in PERIOD_S; the first one after that says how many were held back.

    A kind is a line's text before its arguments are put in, so nothing that a peer says makes a new one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}  # when its period ends, and how many came in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; it may grow by a remark."""
        now, kind = time.monotonic(), (record.name, record.levelno, str(record.msg))
        ends, count = self._kinds.get(kind, (0.0, 0))
        if now >= ends:
            if count > BURST:
                record.msg = f"{record.getMessage()} (and {count - BURST} more like it)"
                record.args = ()
            if len(self._kinds) >= KINDS_MAX:
                self._kinds.clear()
            ends, count = now + PERIOD_S, 0
        self._kinds[kind] = ends, count + 1
        return count < BURST


def start(*, node: str, level: str, file: Path | None) -> None:
    """Logs go to the file, or to standard error, from now on."""
    # A watched file is opened anew once log rotation has moved it.
    handler = logging.handlers.WatchedFileHandler(file) if file else logging.StreamHandler()
    handler.setFormatter(Lines(f"%(asctime)s %(levelname)s {node} %(name)s: %(message)s"))
    handler.addFilter(Seldom())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
