"""Lines of each room against its ceiling in tools/ceilings.toml: `python -m tools.lint.ceilings` prints the table. With
`--lower` it first takes each ceiling down to the lines, or to the goal where it is reached."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .sources import REPO, Source, product, sources

TABLE = "tools/ceilings.toml"


@dataclass(frozen=True, slots=True)
class Room:
    """Folders whose lines count together, or a part of the tree, which has the lines of its rooms."""

    part: str
    ceiling: int
    goal: int
    paths: tuple[str, ...] = ()
    role: str = ""


def rooms(text: str) -> dict[str, Room]:
    """The rooms of a table and its parts, by name."""
    parts = tomllib.loads(text)
    totals = parts.pop("parts")
    found = {name: Room(part, **row) for part, rows in parts.items() for name, row in rows.items()}
    return found | {name: Room(name, role="all of its rooms", **row) for name, row in totals.items()}


def lines(files: Iterable[Source], table: Mapping[str, Room]) -> Counter[str]:
    """Lines of each room and part."""
    by_path = sorted(((path + "/", name) for name, room in table.items() for path in room.paths), reverse=True)
    counted: Counter[str] = Counter()
    for source in files:
        name = next((name for path, name in by_path if source.path.startswith(path)), "")
        count = source.text.count("\n")
        for row in {name, table[name].part} if name else {source.path}:
            counted[row] += count
    return counted


def above(files: Iterable[Source], table: Mapping[str, Room]) -> Iterator[str]:
    """No room has more lines than its ceiling, and every file is in a room."""
    for name, count in lines(files, table).items():
        if name not in table:
            yield f"{name}:1: no room of {TABLE} has this file: add its folder to the paths of one"
        elif count > (ceiling := table[name].ceiling):
            yield (
                f"{TABLE}:1: {name} has {count:,} lines, {count - ceiling:,} above its ceiling of {ceiling:,}: "
                "make room; a commit that raises it says what a user gets for it and what was tried to make room"
            )


def lowered(text: str, counted: Mapping[str, int]) -> str:
    """The table with no ceiling above the lines and the goal."""
    for name, room in rooms(text).items():
        ceiling = min(room.ceiling, max(counted[name], room.goal))
        text = re.sub(rf"(?m)^({name} = .*?\bceiling = )[\d_]+", rf"\g<1>{ceiling:_}", text)
    return text


def ours() -> dict[str, Room]:
    return rooms((REPO / TABLE).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lint.ceilings", description=__doc__)
    parser.add_argument("--lower", action="store_true", help="take each ceiling down to the lines, or to the goal")
    options = parser.parse_args()
    counted = lines((*product(), *sources("tests")), ours())
    if options.lower:
        (REPO / TABLE).write_text(lowered((REPO / TABLE).read_text(), counted))
    table = ours()
    for name, room in table.items():
        print(f"{name:16}{counted[name]:8,}{room.ceiling:8,}{room.goal:8,}  {room.role}")


if __name__ == "__main__":
    main()
