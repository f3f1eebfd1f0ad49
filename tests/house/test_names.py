"""One name for one thing: no class name stands twice in the package, and no method is named by who hears it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import REPO

PACKAGE = REPO / "pdtransfer"


def nodes(package: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every node of every module, with where it stands."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield f"{path.relative_to(package)}:{getattr(node, 'lineno', 0)}", node


def classes_named_twice(package: Path) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for where, node in nodes(package):
        if isinstance(node, ast.ClassDef):
            places[node.name].append(where)
    return {name: found for name, found in places.items() if len(found) > 1}


def vague_names(package: Path) -> list[str]:
    vague = {"_told", "_heard", "told", "heard"}
    return [
        f"{where} {node.name}"
        for where, node in nodes(package)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in vague
    ]


def test_no_class_name_stands_twice() -> None:
    assert classes_named_twice(PACKAGE) == {}


def test_no_method_has_a_name_that_means_many_things() -> None:
    assert vague_names(PACKAGE) == []


@pytest.mark.parametrize(
    "line", ["class A: ...", "class B:\n    class A: ...", "def _told(): ...", "async def heard(): ..."]
)
def test_what_is_forbidden_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class A: ...\n")
    (tmp_path / "two.py").write_text(line + "\n")
    assert classes_named_twice(tmp_path) or vague_names(tmp_path)
