"""Reads scenarios, which are texts of what something is given, step by step, and of all that it then does.

A paragraph of a text is a scenario: its title, remarks that begin with #, then steps. A step is a verb with arguments,
`=>`, and every effect in its order; an indented line goes on with the one above. The paragraph `before each` is played
at the beginning of all scenarios of its text; a step that makes what is played stands for the one before it. A step
behind | begins another scenario: the steps above the paragraph's first | come before it. Behind the effects is what of
the player's state is not as it was before the step.

With REWRITE_SCENARIOS=1 in the environment, pytest writes what has happened behind each `=>`. A commit that changes
such lines gives the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

_REWRITE = "REWRITE_SCENARIOS"
_WIDTH = 120
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')


class ScenarioError(Exception):
    """A text that is not understood, by its file and line."""


@dataclass(slots=True)
class Step:
    line: int
    does: str
    then: str


@dataclass(slots=True)
class Scenario:
    """`steps` are its own, `before` those of others that it begins with."""

    path: Path
    title: str
    before: list[Step]
    steps: list[Step] = field(default_factory=list[Step])

    def played(self, player: type[Player]) -> Iterator[tuple[Step, str]]:
        """Each of its own steps, and what that has led to."""
        makers = [step for step in [*self.before, *self.steps] if step.does.split()[0] == player.makes]
        order = makers[-1:] + [step for step in [*self.before, *self.steps] if step not in makers]
        plays = player()
        for step in order:
            try:
                happened = plays.play(step.does)
            except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise ScenarioError(f"{self.path}:{step.line}: {step.does}: {error!r}") from error
            if step not in self.before:
                yield step, happened


def read(path: Path) -> dict[str, Scenario]:
    """The scenarios of a text by their titles."""
    before, found, common, scenario = list[Step](), dict[str, Scenario](), None, None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        does, _, then = (part.strip() for part in line.partition(" =>"))
        if not line:
            scenario = common = None
        elif line.startswith("#"):
            continue
        elif (scenario is None and (line in found or then or line[0] in " |")) or (
            line[0] == " " and not scenario.steps
        ):
            raise ScenarioError(f"{path}:{number}: expected a title that no other scenario has: {line}")
        elif scenario is None:
            scenario = found[line] = Scenario(path, line, [] if line == "before each" else before)
        elif line[0] == " ":
            scenario.steps[-1].then = f"{scenario.steps[-1].then} {line.strip()}".removeprefix(" => ")
        elif line[0] == "|":
            common = common or found[scenario.title]
            title = f"{common.title} {does}"
            if title in found:
                raise ScenarioError(f"{path}:{number}: expected a step that no other scenario begins with: {line}")
            scenario = found[title] = Scenario(path, title, [*common.before, *common.steps], [Step(number, does, then)])
        else:
            scenario.steps.append(Step(number, does, then))
            if scenario.title == "before each":
                before.append(scenario.steps[-1])
    return {title: each for title, each in found.items() if each.steps}


def rewrite(path: Path, player: type[Player]) -> None:
    """Writes into the text what happens now."""
    played = [each for scenario in read(path).values() for each in scenario.played(player)]
    happened = {step.line: (step.does, then) for step, then in played}
    lines = list[str]()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if number in happened:
            lines += _wrapped(*happened[number])
        elif not line.startswith(" "):
            lines.append(line)
    path.write_text("\n".join(lines) + "\n")


def _wrapped(does: str, then: str) -> Iterator[str]:
    line = f"{does:<20} =>"
    if len(line) > _WIDTH // 2:
        yield does
        line = "    =>"
    for effect in then.split("; "):
        if len(line) + len(effect) + 2 > _WIDTH and not line.endswith("=>"):
            yield line
            line = "   "
        line += f" {effect};"
    yield line.removesuffix(";")


class Player:
    """What plays the steps of a text."""

    makes: ClassVar[str]  # the verb that makes what is played

    def __init__(self) -> None:
        self._state: dict[str, str] = {}
        self.play(self.makes)

    def effects(self, verb: str, words: list[str]) -> Iterable[str]:
        """Does a step; what it has led to."""
        raise NotImplementedError

    def state(self) -> dict[str, str]:
        """What is shown where it changes."""
        raise NotImplementedError

    def play(self, line: str) -> str:
        """Does a step; what is behind its =>."""
        verb, *words = _WORD.findall(line.removeprefix("| "))
        effects = list(self.effects(verb, words))
        before, self._state = self._state, self.state()
        changed = [f"{name} gone" for name in before if name not in self._state]
        changed += [f"{name} {text}".strip() for name, text in self._state.items() if before.get(name) != text]
        return "; ".join([*effects, *changed]) or "nothing"


def plays(players: Mapping[Path, type[Player]]) -> Callable[..., None]:
    """A test of each scenario of these texts, by folder, text and title."""
    if _REWRITE in os.environ:
        for path, player in players.items():
            rewrite(path, player)
    found = {
        f"{path.parent.name}/{path.stem}: {each.title}": (each, player)
        for path, player in players.items()
        for each in read(path).values()
    }

    @pytest.mark.parametrize(("scenario", "player"), found.values(), ids=found)
    def test(scenario: Scenario, player: type[Player]) -> None:
        for step, happened in scenario.played(player):
            assert happened == step.then, f"{scenario.path}:{step.line}: {step.does}"

    return test
