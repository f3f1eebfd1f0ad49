"""Planted bugs, one for each defence: without it the simulator has to fail within a number of seeds, in the words of
the checker that is for it.

Each is a paragraph of planted/*.txt: its name, the kind of worlds, the number of their seeds (`36 from 48`: the first
one is 48), and words of the failure; then functions of pdtransfer, each with lines that go (-) and come (+). Lines that
come where none goes are the function's first ones. planted/replaced.py has those that an edit would not say.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent
from types import CodeType, FunctionType

from .planted import replaced
from .planted.replaced import Patch


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines of one function that go, and those that come in their place."""

    where: str  # module:function, below pdtransfer
    minus: list[str]
    plus: list[str]

    def made(self, lines: list[str]) -> list[str]:
        """The function's lines with it. Raises LookupError unless those that go stand in one place, comments aside."""
        text, minus = ([line.split("  # ")[0].strip() for line in each] for each in (lines, self.minus))
        places = [at for at in range(len(text)) if minus and text[at : at + len(minus)] == minus]
        if not minus:
            (function,) = ast.parse(dedent("\n".join(lines))).body
            assert isinstance(function, ast.FunctionDef), self.where
            places = [function.body[ast.get_docstring(function) is not None].lineno - 1]
        if len(places) != 1:
            raise LookupError(f"{self.where} has these lines in {len(places)} places, not in one: {minus}")
        at = places[0]
        indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
        return lines[:at] + [indent + line for line in self.plus] + lines[at + len(minus) :]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug; to be caught within this many seeds of worlds of that kind, about three times what it took, by a
    checker whose failure has these words. One that few worlds show begins at its `first` seed."""

    plant: Callable[[Patch], None]
    kind: str
    seeds: int
    words: str
    first: int = 0


def plant_edits(edits: Sequence[Edit], patch: Patch) -> None:
    """Gives each function the code of its edited source, which is compiled with its module."""
    for where in dict.fromkeys(edit.where for edit in edits):
        found = resolve_name(f"pdtransfer.{where}")
        function = found.fget if isinstance(found, property) else found
        assert isinstance(function, FunctionType), where
        path, start = Path(function.__code__.co_filename), function.__code__.co_firstlineno - 1
        lines, body = path.read_text().splitlines(), inspect.getsource(function).splitlines()
        end = start + len(body)
        for edit in edits:
            body = edit.made(body) if edit.where == where else body
        module = compile("\n".join([*lines[:start], *body, *lines[end:]]), path, "exec", dont_inherit=True)
        (code,) = [each for each in _codes(module) if each.co_qualname == function.__qualname__]
        patch(function, "__code__", code)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def read(paragraph: str) -> tuple[str, Mutant]:
    """A bug by its name. Raises for a line of another form."""
    head, *lines = [line for line in paragraph.splitlines() if not line.startswith("# ")]
    name, kind, bound, words = head.split(" | ")
    seeds, _, first = bound.partition(" from ")
    edits: list[Edit] = []
    for line in lines:
        sign, text = line.split(" ", 1)
        if sign == "in" or (sign == "-" and edits[-1].plus):
            edits.append(Edit(text if sign == "in" else edits[-1].where, [], []))
        if sign != "in":
            {"-": edits[-1].minus, "+": edits[-1].plus}[sign].append(text)
    return name, Mutant(partial(plant_edits, edits), kind, int(seeds), words, int(first or 0))


MUTANTS = {
    "a late message revives a room": Mutant(
        replaced.late_message_revives_a_room, "quiet", 3, "fails on decode after it has ended"
    ),
    "a copy reported before the card has passed it": Mutant(
        replaced.reported_before_it_is_copied, "apart", 9, "and the former are free"
    ),
    "a window slot given up between pieces": Mutant(
        replaced.window_slot_given_up, "staged", 60, "waited on prefill for its deadline, and for nothing else"
    ),
} | dict(
    read(paragraph)
    for file in sorted(Path(__file__).with_name("planted").glob("*.txt"))
    for paragraph in file.read_text().strip().split("\n\n")[1:]  # the first says what they are
)
