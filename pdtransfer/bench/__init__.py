"""What each part costs on this host: `pdtransfer bench PART` runs one of these, prints it, and answers with a status.

A part's `measure` returns figures and says in its docstring how they are come by. Whatever is compared, a bare round
trip or a memcpy, is timed in the same run, in turn with what it is compared with: a busy host is busy for both.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..config.config import Attention, BenchModel
from .report import show


def run_transfer(*, tokens: int | None, rooms: int | None, model: BenchModel, transport: str, json: bool) -> int:
    """Whole rooms from one process's pool into another's arena."""
    from benchmarks import crossing

    from . import transfer

    if transport == "mooncake":
        figures = crossing.measure(tokens=tokens or 8_192, rooms=rooms or 8, model=model)
        return show(figures, crossing.LINES, json=json)
    tokens, rooms = tokens or 4_096, rooms or 32

    return show(transfer.measure(tokens=tokens, rooms=rooms, model=model), transfer.LINES, json=json)


def run_handoff(*, tokens: int, rooms: int, concurrency: int, json: bool) -> int:
    """Small rooms between two processes."""
    from . import handoff

    return show(handoff.measure(tokens=tokens, rooms=rooms, concurrency=concurrency), handoff.LINES, json=json)


def run_copy(*, tokens: int, json: bool) -> int:
    """The CPU copy."""
    from . import copy

    return show(copy.measure(tokens=tokens), copy.LINES, json=json)


def run_kernels(*, json: bool) -> int:
    """The kernels on a card."""
    from . import kernels, pushes, steps

    figures = kernels.measure() | pushes.measure() | steps.measure()
    return show(figures, (*kernels.LINES, *pushes.LINES, *steps.LINES), json=json)


def run_hisparse(*, json: bool) -> int:
    """Steps whose KV lies in host memory."""
    from . import hisparse

    return show(hisparse.measure(), hisparse.LINES, json=json)


def run_stall(*, tokens: int, rooms: int, json: bool) -> int:
    """The embedded client beside a scheduler."""
    from benchmarks import stall

    return show(stall.measure(tokens=tokens, rooms=rooms), stall.LINES, json=json)


def run_pages(*, gib: float, json: bool) -> int:
    """Small pages against large ones."""
    from benchmarks import pages

    figures = pages.measure(gib=gib)
    return show(figures, pages.lines(figures), json=json)


def run_pd(
    *,
    tokens: tuple[int, ...],
    attentions: tuple[Attention, ...],
    rounds: int,
    chunk_tokens: int,
    engine_option: tuple[str, ...],
    hisparse: bool,
    devices: tuple[str, str],
    report: Path | None,
    json: bool,
) -> int:
    """Prompts from one card to another; says on standard error how far it is."""
    from . import pd, pd_report, pd_tell

    given = tuple(own or other for own, other in zip(devices, pd.devices(), strict=True))
    result = pd.measure(
        tokens=tokens, attentions=attentions, rounds=rounds, chunk_tokens=chunk_tokens, engine_option=engine_option,
        hisparse=hisparse, on=(given[0], given[1]), say=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    if report is not None:
        for path in pd_report.write_report(result, report):
            print(f"written: {path}", file=sys.stderr)
    return pd_tell.show(result, json=json)


def run_plan(*, tokens: int, planes: int, json: bool) -> int:
    """The planner."""
    from benchmarks import plan

    return show(plan.measure(tokens=tokens, layers=planes), plan.LINES, json=json)


def run_verify(*, tokens: int, rooms: int, json: bool) -> int:
    """Checksums."""
    from benchmarks import verify

    return show(verify.measure(tokens=tokens, rooms=rooms), verify.LINES, json=json)


def run_prefix(*, tokens: int, rooms: int, json: bool) -> int:
    """Prompts that decode remembers."""
    from benchmarks import prefix

    return show(prefix.measure(tokens=tokens, rooms=rooms), prefix.LINES, json=json)


def run_bus(*, rounds: int, json: bool) -> int:
    """Messages between two processes."""
    from benchmarks import bus

    return show(bus.measure(messages=max(1, rounds // 5), rounds=5), bus.LINES, json=json)


def run_idle(*, seconds: int, json: bool) -> int:
    """Daemons that have nothing to do."""
    from benchmarks import idle

    return show(idle.measure(seconds=seconds), idle.LINES, json=json)


def run_load(*, rooms: int, memory_rooms: int, seconds: int, concurrency: int, json: bool) -> int:
    """Many peers, and very many rooms."""
    from benchmarks import load

    figures = load.measure(rooms=rooms, memory_rooms=memory_rooms, idle_seconds=seconds, concurrency=concurrency)
    return show(figures, load.LINES, json=json)


def run_siege(*, rooms: int, rounds: int, connections: int, json: bool) -> int:
    """Hand-offs beside attackers."""
    from benchmarks import siege

    return show(siege.measure(rooms=rooms, rounds=rounds, connections=connections), siege.LINES, json=json)


def run_faults(*, rooms: int, aborts: int, rounds: int, json: bool) -> int:
    """Aborts, and a frozen peer beside a healthy one."""
    from benchmarks import faults

    return show(faults.measure(rooms=rooms, aborts=aborts, rounds=rounds), faults.LINES, json=json)
