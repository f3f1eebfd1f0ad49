"""Writes what is stale in proto/v1, or with --check reports it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import checksums, golang, tables, vectors
from .schema import schema

_ROOT = Path(__file__).parent.parent.parent / "proto" / "v1"


def generated(root: Path) -> dict[Path, str]:
    """Each generated file under `root` (a proto/v1) with the text that it should have."""
    table = schema()
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(root.glob("*.md"))}
    files = {**tables.filled(pages, table), root / "schema.json": json.dumps(table, indent=1) + "\n"}
    for name, cases in (("valid", vectors.valid()), ("invalid", vectors.invalid())):
        file = root / "vectors" / f"{name}.jsonl"
        old = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        files[file] = "".join(line + "\n" for line in vectors.appended(old, cases))
    file = root / "vectors" / "checksums.jsonl"
    old = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    files[file] = "".join(line + "\n" for line in vectors.appended(old, checksums.cases(), key="heads"))
    return files


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.proto_generator", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a file is stale")
    parser.add_argument("--root", type=Path, default=_ROOT, help="the proto/v1 to write (default: this repository's)")
    parser.add_argument("--go", type=Path, metavar="DIR", help="write a Go package of the messages there, and no more")
    options = parser.parse_args(argv)
    if options.go is not None:
        options.go.mkdir(parents=True, exist_ok=True)
        for name, text in golang.package(json.loads((options.root / "schema.json").read_text("utf-8"))).items():
            (options.go / name).write_text(text, encoding="utf-8")
        return 0
    stale = {
        file: text
        for file, text in generated(options.root).items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    }
    for file, text in stale.items():
        print(f"{'stale' if options.check else 'wrote'} {file}")
        if not options.check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
