"""The Python files of the tree, each parsed once."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

REPO = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A file: its path below the root of the tree, its dotted name, its text, and its syntax tree.

    `by_type` has the nodes of each type with the class and function that they stand in, as `.Class.function`.
    """

    path: str
    module: str
    text: str
    tree: ast.Module
    by_type: Mapping[type[ast.AST], list[tuple[str, ast.AST]]]

    def nodes(self, *types: type[Node]) -> Iterator[Node]:
        for _, node in self.scoped(*types):
            yield node

    def scoped(self, *types: type[Node]) -> Iterator[tuple[str, Node]]:
        for node_type in types:
            for scope, node in self.by_type.get(node_type, ()):
                assert isinstance(node, node_type)
                yield scope, node

    def complaint(self, node: ast.AST, text: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {text}"


def parsed(text: str, path: str = "x.py") -> Source:
    module = path.removesuffix(".py").removesuffix("/__init__").removeprefix("lab/").replace("/", ".")
    tree = ast.parse(text)
    by_type: dict[type[ast.AST], list[tuple[str, ast.AST]]] = defaultdict(list)
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        scope, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            by_type[type(node)].append((scope, node))
            inside = f"{scope}.{node.name}" if isinstance(node, DEFINITIONS) else scope
            pending.append((inside, node))
    return Source(path, module, text, tree, by_type)


@cache
def sources(folder: str) -> tuple[Source, ...]:
    """Every file of a folder below the root of the tree."""
    paths = sorted((REPO / folder).rglob("*.py"))
    return tuple(parsed(path.read_text(), path.relative_to(REPO).as_posix()) for path in paths)


def product() -> Iterator[Source]:
    """The package and the lab."""
    yield from sources("pdtransfer")
    yield from sources("lab/pdtransfer_lab")
