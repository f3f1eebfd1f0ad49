"""Generates docs/flags.md and docs/metrics.md from the code, and the table of versions in a page of an adapter.

`python -m tools.docs_generator` writes what is stale; with `--check` it only reports it, with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from cyclopts import App
from pdtransfer_lab.bench.models import components
from prometheus_client import CollectorRegistry

from pdtransfer.adapters.kit.versions import SGLANG, SGLANG_SINCE, VLLM, VLLM_SINCE, Since, Version
from pdtransfer.client.decode_node import DecodeNode
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.client.settings import NodeSettings
from pdtransfer.environment import PREFIX
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.commands.cli import app
from pdtransfer.serve.commands.installed import add_installed
from pdtransfer.serve.commands.settings_sources import COMMANDS, settings_of
from pdtransfer.serve.engine_api import HotFigures
from pdtransfer.serve.process.process_metrics import http_counter, process_registry
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import HTTP_ENGINES, RouterConfig
from pdtransfer.serve.worker.daemon_metrics import DecodeMetrics, PrefillMetrics
from pdtransfer.serve.worker.worker_times import DecodeTimes, PrefillTimes

from .proto_generator.schema import choices

_ROOT = Path(__file__).parent.parent / "docs"
_GENERATED = "<!-- Written by `python -m tools.docs_generator`: change the code, and run it. -->"
_TABLE_END = "<!-- The end of what is written. -->"
_FLAGS = f"""{_GENERATED}
# Flags

Each flag of a daemon, the router and `demo` may stand in the environment instead, or as a key in the file that
`--config` names: above all tables, or in the command's own, such as `[decode]`. A flag wins over the environment, and
the environment over the file. The table `[limits]`, or `[decode.limits]`, holds the limits; they are listed at the end.
`listen` of a daemon was `http`, and still may be until 0.3, in all three places. Of one environment, or above a file's
tables, a daemon takes `http` before `listen`, which may be the router's; from 0.3 on it takes `listen` alone.
`bench`, `plan` and `replay` come with pdtransfer-lab: `pip install ./lab`.
"""
_METRICS = f"""{_GENERATED}
# Metrics

Each process serves these at `/metrics`, in the format of Prometheus, at the address that `--listen` gives.
The name of a histogram is followed by `_bucket`, `_sum` or `_count`.
"""


def flags_page() -> str:
    """Each command's flags, and the limits."""
    add_installed(app, ())
    sections = [_FLAGS, _section((), app.meta)]
    sections += [_section(path, command) for path, command in _commands(app, ())]
    limits = [
        (
            f"`--limits.{name.replace('_', '-')}`",
            f"`{PREFIX}LIMITS_{name.upper()}`",
            f"`limits.{name}`",
            default,
            reason,
        )
        for name, default, reason in choices()
    ]
    sections.append(f"## Limits\n\n{_table(('flag', 'environment', 'key', 'default', 'what it bounds'), limits)}")
    return "\n".join(sections)


def _section(path: tuple[str, ...], command: App) -> str:
    arguments = [
        argument
        for argument in command.assemble_argument_collection()
        if argument.show and argument.keys[:1] != ("limits",)
    ]
    head, rows = ("flag", "type", "default", "meaning"), [_flag(argument) for argument in arguments]
    if path and path[0] in COMMANDS:
        keys = {field.name for field in fields(settings_of(path[0]))}
        head = (head[0], "environment", "key", *head[1:])
        rows = [
            (row[0], f"`{PREFIX}{key.upper()}`", f"`{key}`" if key in keys else "", *row[1:])
            for row, key in zip(rows, (argument.field_info.name for argument in arguments), strict=True)
        ]
    return f"## {' '.join(('pdtransfer', *path))}\n\n{_table(head, rows)}"


def _commands(of: App, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    """The commands themselves, then those of their groups."""
    named = {name: of[name] for name in of if not name.startswith("-")}
    groups = {name: group for name, group in named.items() if any(not name.startswith("-") for name in group)}
    yield from (((*path, name), command) for name, command in named.items() if name not in groups)
    for name, group in groups.items():
        yield from _commands(group, (*path, name))


def _flag(argument: Any) -> tuple[str, ...]:
    parameter, default = argument.parameter, argument.field_info.default
    if parameter.show_default is False or default in (None, "", (), argument.field_info.empty):
        shown = ""
    elif isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = ", ".join(map(str, cast("tuple[object, ...]", default if isinstance(default, tuple) else (default,))))
    names = ", ".join(f"`{name}`" for name in (argument.names[0], *(parameter.negative or ())))
    return names, _type(argument.hint), f"`{shown}`" if shown else "", parameter.help or ""


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    of = [choice for choice in get_args(hint) if choice not in (type(None), ...)]
    if of:  # an optional value, or one that may be repeated
        return _type(of[0])
    return {"bool": "switch", "str": "text", "int": "integer", "float": "number", "Path": "path"}[hint.__name__]


def metrics_page() -> str:
    """The metrics of each kind of process."""
    head = "metric", "type", "labels", "meaning"
    tables = asyncio.run(_metrics())
    return "\n".join([_METRICS, *(f"## {title}\n\n{_table(head, rows)}" for title, rows in tables.items())])


async def _metrics() -> dict[str, list[tuple[str, ...]]]:
    """Of processes without peers."""
    source, target = components("deepseek", source_slots=64, target_slots=64)
    settings = NodeSettings(node="docs", model="docs", weights=b"")
    registries = {name: process_registry(role=name.lower(), node="docs") for name in ("Prefill", "Decode")}
    for registry in registries.values():
        http_counter(registry)
    arena = ArenaMemory.create(target.layout.end)
    prefill = PrefillNode(settings, (source,), lambda _: None)
    decode = DecodeNode(settings, (target,), arena, lambda _: None)
    router, server_router = router_of(RouterConfig()), router_of(RouterConfig(engine=HTTP_ENGINES[0]))
    PrefillMetrics(prefill, registries["Prefill"])
    PrefillTimes(registries["Prefill"])
    DecodeMetrics(decode, registries["Decode"], HotFigures)
    DecodeTimes(registries["Decode"])
    registries["Router"] = router.metrics.registry
    registries[f"Router with --engine {' or '.join(HTTP_ENGINES)}"] = server_router.metrics.registry
    tables = {title: sorted(_of(registry), key=lambda row: row[0].strip("`")) for title, registry in registries.items()}
    for part in (prefill, decode, router, server_router):
        await part.close()
    arena.close()
    return tables


def _of(registry: CollectorRegistry) -> Iterator[tuple[str, ...]]:
    collectors: Iterable[Any] = getattr(registry, "_collector_to_names", {})
    for collector in collectors:
        for metric in collector.describe() if getattr(collector, "_labelnames", ()) else collector.collect():
            yield _metric(collector, metric)


def _metric(collector: Any, metric: Any) -> tuple[str, ...]:
    labels: Sequence[str] = getattr(metric, "_labelnames", getattr(collector, "_labelnames", ()))
    if metric.type == "info":
        labels = tuple(metric.samples[0].labels)
    name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
    return f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation


def versions_table(versions: Sequence[Version], since: Mapping[str, Since]) -> str:
    """What users of earlier versions meet."""
    names = [".".join(map(str, version)) for version in versions]
    rows = [(f"{names[0]} to {names[names.index(first) - 1]}", lacks) for first, _, lacks in since.values() if lacks]
    return _table(("not in", "refused at the start, or different"), rows)


def _with_table(page: Path, table: str) -> str:
    """The text of a page, with this table in the place that it has for one."""
    before, begin, behind = page.read_text(encoding="utf-8").partition(f"{_GENERATED}\n")
    _, end, after = behind.partition(_TABLE_END)
    if not (begin and end):
        raise SystemExit(f"{page}: has no place for a table, between {_GENERATED} and {_TABLE_END}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Writes the pages that are stale, or with --check only names them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs_generator", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is stale")
    parser.add_argument(
        "--root", type=Path, default=_ROOT, help="where the pages are (default: this repository's docs)"
    )
    options = parser.parse_args(arguments)
    stale, root = False, options.root
    pages = {
        "flags.md": flags_page(),
        "metrics.md": metrics_page(),
        "vllm.md": _with_table(root / "vllm.md", versions_table(VLLM, VLLM_SINCE)),
        "sglang.md": _with_table(root / "sglang.md", versions_table(SGLANG, SGLANG_SINCE)),
    }
    for name, text in pages.items():
        page = root / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            stale = True
            print(f"{'stale' if options.check else 'wrote'} {page}")
            if not options.check:
                page.write_text(text, encoding="utf-8")
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
