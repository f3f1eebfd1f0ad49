"""Formats and limits log records: one line a record whatever peers send, and no flood of one kind of line."""

from __future__ import annotations

import logging
import logging.handlers
import time
from pathlib import Path

BURST = 50  # lines of one kind in PERIOD_S; most are caused by peers
PERIOD_S = 10.0
KINDS_MAX = 1_024


def printable(text: str) -> str:
    """Returns the text with every unprintable character escaped, above all line ends and terminal control codes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class LineFormatter(logging.Formatter):
    """Escapes messages, since they contain names and reasons sent by peers. A traceback keeps its lines, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        text: str = super().formatException(ei)  # pyright: ignore[reportArgumentType]
        return "\n".join("  " + printable(line) for line in text.split("\n"))


class LogRateLimit(logging.Filter):
    """Passes BURST lines of one kind in each PERIOD_S. The next line reports how many were suppressed.

    The kind is the record's format string, so arguments that a peer sends never create a new kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[
            tuple[str, int, str], tuple[float, int]
        ] = {}  # the end of the kind's period, and the count in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; appends the count of suppressed lines."""
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
    """Sends logs to `file`, or to standard error without one."""
    # Log rotation may move the file: it is reopened then.
    handler = logging.handlers.WatchedFileHandler(file) if file else logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s {node} %(name)s: %(message)s"))
    handler.addFilter(LogRateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
