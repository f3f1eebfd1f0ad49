"""Draws the status document as lines of text: workers with trouble first, as much as the terminal holds.

Every name and reason was sent by another process: it is cut to its column, and what cannot be printed is escaped. No
meaning is in a colour alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import set_cell_size
from rich.text import Text

from ..process.logs import printable
from ..router.fleet.status import FailureStatus, FleetStatus, RouterStatus, SlotsStatus, TotalsStatus, WorkerStatus

FAILURES_MIN = 4  # lines kept for failures where workers would take them all
STYLES = {"ready": "green", "draining": "yellow", "starting": "cyan", "connecting": "bold red", "unusable": "bold red"}
BAR, BAR_ASCII = "█▒·", "#x."  # used, in quarantine, free
BAR_WIDTH = 10
Figure = TypeVar("Figure", int, float)


def view(
    status: FleetStatus | None, url: str, why: str, *, width: int, height: int | None, ascii_only: bool = False
) -> Text:
    """Returns the picture, of at most `height` lines if given. `why` is the reason why no newer document came."""
    lines = [Text(f"{printable(why)}; asked again, q or Ctrl-C ends", style="bold red")] if why else []
    if status is not None:
        lines += [_title(status, url), *_figures(status.router, status.totals), Text()]
        left = None if height is None else height - len(lines)
        failures = _failures(status.failures, width)
        kept = min(len(failures), FAILURES_MIN)
        workers = worker_lines(status.workers, width, None if left is None else left - 1 - kept, ascii_only=ascii_only)
        lines += [*workers, Text(), *failures]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines[:height])


def _title(status: FleetStatus, url: str) -> Text:
    router = status.router
    state, style = ("ready", "green") if router.ready else ("not ready", "bold red")
    if router.draining or router.overloaded:
        state, style = "draining" if router.draining else "overloaded", "yellow"
    line = Text.assemble((printable(router.node), "bold"), "  ", (state, style), "  ", printable(url))
    clock_time = time.strftime("%H:%M:%S", time.localtime(status.time))
    parts = [clock_time, f"up {duration(router.uptime_s)}", printable(router.version)]
    if router.engine != "pdtransfer":
        parts.append(f"in front of {printable(router.engine)}")
    parts += [printable(model) for model in router.models]
    line.append("  " + "  ".join(parts), style="dim")
    return line


def _figures(router: RouterStatus, totals: TotalsStatus) -> list[Text]:
    """The router's requests, its answers by HTTP status once there are any, and what all workers do together."""
    rooms = _counts(router.rooms)
    requests = [f"{router.requests_open} open" + (f" ({rooms})" if rooms else "")]
    if router.requests_s is not None:
        requests.append(f"{number(router.requests_s)}/s")
    if router.first_token_ms is not None:
        times = (f"{printable(name)} {milliseconds(value)}" for name, value in router.first_token_ms.items())
        requests.append("TTFT " + ", ".join(times))
    answers = [f"{count} x {printable(code)}" for code, count in sorted(router.answers.items())]
    answers += [f"{router.retries} tried again"] if router.retries else []
    fleet = [
        f"KV {number(totals.kv_gb_s)} GB/s",
        f"prompts {number(totals.prompt_tokens_s)} tok/s",
        f"generated {number(totals.generated_tokens_s)} tok/s",
    ]
    rows = ("requests", requests), ("answers", answers), ("fleet", fleet)
    lines = [Text.assemble((f"{name:10}", "dim"), "  ".join(parts)) for name, parts in rows if parts]
    if totals.quarantined_bytes is not None:
        style = "yellow" if totals.quarantined_bytes else ""
        lines[-1].append("  ").append(f"quarantine {byte_count(totals.quarantined_bytes)}", style=style)
    return lines


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of workers. `text` returns an empty text where the worker does not report it."""

    name: str
    width: int
    text: Callable[[WorkerStatus], str]
    left: bool = False
    from_width: int = 0  # of the terminal
    always: bool = False  # also where no worker reports it


def _columns(width: int, *, ascii_only: bool) -> list[Column]:
    columns = [
        Column("ROOMS", 7, _rooms, always=True),
        Column("SLOTS", BAR_WIDTH + 5, lambda worker: slots_bar(worker.slots, ascii_only=ascii_only), left=True),
        Column("GB/S", 6, lambda worker: _known(worker.kv_gb_s, number)),
        Column("TOK/S", 6, lambda worker: _known(worker.tokens_s, number)),
        Column("HOT", 5, lambda worker: _known(worker.hot_hit_ratio, percent)),
        Column("QUAR", 7, lambda worker: _known(worker.quarantined_bytes, byte_count)),
        Column("PREFIX", 6, lambda worker: _known(worker.prefix_hit_ratio, percent), from_width=100),
        Column("DONE", 7, lambda worker: _known(worker.rooms_done, number), from_width=100),
        Column("FAILED", 6, lambda worker: _known(worker.rooms_failed, number), from_width=100),
        Column("UP", 8, lambda worker: _known(worker.uptime_s, duration), from_width=120),
        Column("BY STATE", 30, lambda worker: _counts(worker.rooms or {}), left=True, from_width=150),
        Column("SESSIONS", 14, lambda worker: _counts(worker.sessions or {}), left=True, from_width=180),
        Column("ADDRESS", 28, lambda worker: printable(worker.address) * bool(worker.node), left=True, from_width=180),
    ]
    return [column for column in columns if width >= column.from_width]


def worker_lines(
    workers: list[WorkerStatus], width: int, height: int | None = None, *, ascii_only: bool = False
) -> list[Text]:
    """One line a worker below a head. Where not all fit, those with trouble come first, and a line counts the rest."""
    if not workers:
        return [Text("the router has no worker: name some with --prefill, --decode or --workers-file", style="yellow")]
    columns = _columns(width, ascii_only=ascii_only)
    columns = [column for column in columns if column.always or any(column.text(worker) for worker in workers)]
    taken = sum(1 + column.width for column in columns)
    name_width = max(12, min(26, width - taken - 14, max(len(_name(worker)) for worker in workers) + 2))
    head = Text(style="dim").append(set_cell_size("WORKER", name_width)).append(" STATE     ")
    for column in columns:
        head.append(" " + _fit(column.name, column.width, left=column.left))
    shown = workers
    if height is not None and len(workers) > height - 1:
        ordered = sorted(workers, key=lambda worker: (worker.state == "ready", not worker.quarantined_bytes))
        shown = ordered[: max(1, height - 2)]
    lines = [head, *(_worker(worker, columns, name_width) for worker in shown)]
    if len(shown) < len(workers):
        ready = sum(worker.state == "ready" for worker in workers)
        lines.append(Text(f"{len(workers) - len(shown)} more, {ready} of {len(workers)} ready", style="dim"))
    return lines


def _worker(worker: WorkerStatus, columns: Iterable[Column], name_width: int) -> Text:
    line = Text(set_cell_size(_name(worker), name_width), style="" if worker.state == "ready" else "bold")
    line.append(" ").append(f"{worker.state:10}", style=STYLES.get(worker.state, ""))
    if worker.state in ("connecting", "unusable"):
        return line.append(" " + printable(worker.why or ""), style="red")
    for column in columns:
        style = "yellow" if column.name == "QUAR" and worker.quarantined_bytes else ""
        line.append(" ").append(_fit(column.text(worker) or "-", column.width, left=column.left), style=style)
    return line


def _name(worker: WorkerStatus) -> str:
    return f"{worker.role[0]} {printable(worker.node or worker.address.partition('://')[2])}"


def _rooms(worker: WorkerStatus) -> str:
    if worker.rooms_running is None:
        return str(worker.rooms_here)
    return f"{worker.rooms_running}+{worker.rooms_queued}" if worker.rooms_queued else str(worker.rooms_running)


def _known(figure: Figure | None, form: Callable[[Figure], str]) -> str:
    return "" if figure is None else form(figure)


def _failures(failures: list[FailureStatus], width: int) -> list[Text]:
    if not failures:
        return [Text("no request has failed since the router started", style="dim")]
    lines = [Text("LAST FAILURES", style="dim")]
    for failure in failures:
        clock_time = time.strftime("%H:%M:%S", time.localtime(failure.time))
        how = "retried" if failure.retried else str(failure.status or "-")
        cause = f"{printable(failure.cause):14} ", "yellow" if failure.retried else "red"
        line = Text.assemble((clock_time, "dim"), " ", cause, f"{how:7} ")
        if width >= 120:
            line.append(f"{printable(failure.room or '-'):16} ").append(
                f"{printable(failure.prefill or '-')} -> {printable(failure.decode or '-')}  ", style="dim"
            )
        if failure.count > 1:
            line.append(f"{failure.count} times: ", style="bold")
        lines.append(line.append(printable(failure.detail)))
    return lines


def slots_bar(slots: SlotsStatus | None, *, ascii_only: bool = False) -> str:
    """Returns a bar of what is used and what is in quarantine, and their share in percent."""
    if slots is None or not slots.total:
        return ""
    used, held_mark, free = BAR_ASCII if ascii_only else BAR
    taken = max(0, min(slots.total, slots.total - slots.free))
    cells = -(-taken * BAR_WIDTH // slots.total)  # what is used at all is seen
    held_cells = min(cells, -(-slots.quarantined * BAR_WIDTH // slots.total))
    bar = used * (cells - held_cells) + held_mark * held_cells + free * (BAR_WIDTH - cells)
    return f"{bar} {100 * taken // slots.total:3}%"


def _fit(text: str, width: int, *, left: bool) -> str:
    return set_cell_size(text, width) if left or len(text) > width else text.rjust(width)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {printable(name)}" for name, count in counts.items() if count)


def number(value: float | None) -> str:
    """Returns a number in at most six characters: 0, <0.001, 0.012, 3.45, 56.7, 890, 1.2k, 345M."""
    if value is None:
        return "-"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    digits = 0 if value == int(value) or value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f}" if digits < 3 or value >= 0.001 else "<0.001"


def byte_count(value: int) -> str:
    """Returns bytes in decimal units."""
    return number(value) + ("B" if value else "")


def percent(value: float) -> str:
    """Returns a ratio as a percentage."""
    return f"{value * 100:.0f}%"


def milliseconds(value: float) -> str:
    """Returns a time in ms, or in s from one second on."""
    return f"{value:.0f} ms" if value < 1_000 else f"{value / 1e3:.2f} s"


def duration(seconds: float) -> str:
    """Returns a time in its two largest units."""
    rest = max(0, int(seconds))
    for unit, size, lower, lower_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if rest >= size:
            return f"{rest // size}{unit}{rest % size // lower_size:02}{lower}"
    return f"{rest}s"
