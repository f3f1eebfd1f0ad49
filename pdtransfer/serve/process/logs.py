"""Formats and limits log records: one line a record whatever peers send, and no flood of one kind of line."""

from __future__ import annotations

import logging
import logging.handlers
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, missing_extra

if TYPE_CHECKING:
    from ..settings.node import NodeConfig

BURST = 50  # lines of one kind in PERIOD_S; most are caused by peers
TRACEBACKS = 3  # the same of lines with a traceback, which are long
PERIOD_S = 10.0
KINDS_MAX = 1_024
HELD_BACK = "held_back"  # the field of a report
FIELDS, BURST_OF = "fields", "burst"  # attributes of records: what a line states by name, and another limit of its kind


def printable(text: str) -> str:
    """Returns the text with every unprintable character escaped, above all line ends and terminal control codes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What a record states by name, given as `extra={FIELDS: ...}`."""
    return getattr(record, FIELDS, {})


class LineFormatter(logging.Formatter):
    """Escapes messages, since they contain names and reasons sent by peers. A traceback keeps its lines, indented.

    Fields follow the message as name=value, in quotes where a value has spaces.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        pairs = (f" {name}={_value(value)}" for name, value in fields_of(record).items())
        record.message = printable(record.message + "".join(pairs))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        text: str = super().formatException(ei)  # pyright: ignore[reportArgumentType]
        return "\n".join("  " + printable(line) for line in text.split("\n"))


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    text = str(value)
    if text and not any(character in ' "=' for character in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def json_formatter(*, node: str, role: str) -> logging.Formatter:
    """One JSON object a record: its fields beside time, level, node, role, logger and message. Raises ConfigError where
    the library is missing."""
    try:
        from pythonjsonlogger.json import JsonFormatter
    except ImportError as error:
        raise missing_extra(error) or error from None

    class FieldsFormatter(JsonFormatter):
        def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
            fields: dict[str, Any] = log_data.pop(FIELDS, {})
            log_data.pop(BURST_OF, None)
            return {"time": log_data.pop("time", None), **log_data, **fields}

    return FieldsFormatter(
        ["levelname", "name", "message"],
        timestamp="time",
        rename_fields={"levelname": "level", "name": "logger"},
        static_fields={"node": node, "role": role},
    )


@dataclass(slots=True)
class _Kind:
    """Lines of one kind since its period began."""

    ends: float
    burst: int
    count: int = 0

    @property
    def held_back(self) -> int:
        return max(0, self.count - self.burst)


class LogRateLimit(logging.Filter):
    """Passes BURST lines of one kind in each PERIOD_S, TRACEBACKS of those with a traceback. Reports how many it held
    back when the period is over.

    The kind is the record's format string, so arguments that a peer sends never create a new kind. `emit` gets the
    reports, from any thread.
    """

    def __init__(self, emit: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._emit, self._lock, self._armed = emit, threading.Lock(), False
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record is to be logged."""
        if HELD_BACK in fields_of(record):
            return True
        now, name = time.monotonic(), (record.name, record.levelno, str(record.msg))
        burst = TRACEBACKS if record.exc_info else BURST
        with self._lock:
            kind, reports = self._kinds.get(name), list[logging.LogRecord]()
            if kind is not None and now >= kind.ends:
                reports, kind = self._take([name]), None
            if kind is None:
                if len(self._kinds) >= KINDS_MAX:
                    reports += self._take(list(self._kinds))
                kind = self._kinds[name] = _Kind(now + PERIOD_S, getattr(record, BURST_OF, burst))
            kind.count += 1
            passes = not kind.held_back
            if not passes:
                self._arm()
        self._report(reports)
        return passes

    def report(self) -> None:
        """Reports what was held back in periods that are over."""
        with self._lock:
            self._armed, now = False, time.monotonic()
            reports = self._take([name for name, kind in self._kinds.items() if now >= kind.ends])
            if any(kind.held_back for kind in self._kinds.values()):
                self._arm()
        self._report(reports)

    def _arm(self) -> None:
        """Has `report` called when the latest period is over, though no further line comes."""
        if not self._armed:
            self._armed = True
            timer = threading.Timer(PERIOD_S, self.report)
            timer.daemon = True
            timer.start()

    def _take(self, names: list[tuple[str, int, str]]) -> list[logging.LogRecord]:
        """Forgets these kinds; returns the reports of what they held back."""
        kinds = [(name, self._kinds.pop(name).held_back) for name in names]
        return [_report_of(*name, held_back) for name, held_back in kinds if held_back]

    def _report(self, reports: list[logging.LogRecord]) -> None:
        for report in reports:
            self._emit(report)


def _report_of(name: str, level: int, text: str, held_back: int) -> logging.LogRecord:
    args = (held_back, PERIOD_S, text)
    record = logging.LogRecord(name, level, "", 0, "%d more lines like this one in %g s were held back: %s", args, None)
    setattr(record, FIELDS, {HELD_BACK: held_back})
    return record


class LogFile(logging.handlers.WatchedFileHandler):
    """Log rotation may move the file: it is opened again then. A line that cannot be written is lost, and the process
    goes on: the first such line is reported on standard error."""

    _reported = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening it again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            with suppress(OSError):
                text = f"{self.baseFilename}: {error.strerror or error}: lines are lost while it cannot be written"
                print(f"pdtransfer: log_file: {printable(text)}", file=sys.stderr)


def start(config: NodeConfig) -> None:
    """Sends the logs of a process where its settings choose. Raises ConfigError for a file that cannot be written, and
    where the format lacks its library."""
    if config.log_format == "json":
        formatter = json_formatter(node=config.node, role=config.role)
    else:
        formatter = LineFormatter(f"%(asctime)s %(levelname)s {config.node} %(name)s: %(message)s")
    try:
        handler = LogFile(config.log_file) if config.log_file else logging.StreamHandler()
    except OSError as error:
        raise ConfigError(f"log_file = '{config.log_file}': {error.strerror}") from None
    handler.setFormatter(formatter)
    handler.addFilter(LogRateLimit(logging.root.handle))  # whose handler may be another one when a report is due
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
