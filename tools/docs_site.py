"""Copies the documents, and the files that they link to, into one folder, from which mkdocs makes the site.

    python -m tools.docs_site FOLDER

All keep their places in the repository, so that the links between them hold.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")


def linked(page: Path) -> set[Path]:
    """The files of the repository that a page links to."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = {(page.parent / link).resolve() for link in _LINK.findall(text) if "://" not in link}
    return {target for target in targets if target.is_file() and target.is_relative_to(REPO)}


def documents() -> set[Path]:
    """All files of the site: README.md, docs/, and what is linked from them."""
    found: set[Path] = set()
    waiting = {REPO / "README.md", *(REPO / "docs").rglob("*")}
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        if path.suffix == ".md":
            waiting |= linked(path)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs_site", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what it has is deleted first")
    folder = parser.parse_args(arguments).folder
    paths = documents()
    if any(path.is_relative_to(folder.resolve()) for path in paths):
        parser.error(f"{folder} has the documents themselves: name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    for path in paths:
        target = folder / path.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
