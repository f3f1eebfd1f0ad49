"""Pages for docs/figures: the tables of one measurement and what belongs to them, made of what `--json` printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdtransfer.errors import ConfigError


def write(results: Path, directory: Path) -> list[Path]:
    """Writes a page, PART.md, for each line of the file into `directory`, which is made. Returns their paths."""
    try:
        documents = [json.loads(line) for line in results.read_text().splitlines()]
        pages = {directory / f"{figures['part']}.md": page(figures) for figures in documents}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{results}: is not what a benchmark prints with --json: {error!r}") from None
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        path.write_text(text)
    return list(pages)


def page(figures: dict[str, Any]) -> str:
    """Markdown of one measurement."""
    facts = [f"- {name}: {figures[name.lower()]}" for name in ("Host", "Date", "Commit")]
    facts.append(f"- Load of the host at the end: {figures['load_1min']}")
    tables = "\n\n".join(_table(rows) for rows in figures["tables"])
    source = "Written by `pdtransfer bench figures` from what this part printed with `--json`."
    title = f"# {figures['part']}"
    parts = [title, figures["title"], "\n".join(facts), tables, "## Method", figures["method"], source]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    head, *others = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others])
