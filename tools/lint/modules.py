"""Names and modules: one name for one thing, an opening sentence, no I/O in the core that an import hides."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

from .sources import FUNCTIONS, REPO, Source

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _core() -> tuple[str, ...]:
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(tuple(contract["source_modules"]) for contract in contracts if contract["id"] == "core")


def is_core(module: str) -> bool:
    return any(module == core or module.startswith(core + ".") for core in _core())


def class_names(files: Iterable[Source]) -> Iterator[str]:
    """No class name stands twice."""
    first: dict[str, str] = {}
    for source in files:
        for node in source.nodes(ast.ClassDef):
            where = f"{source.path}:{node.lineno}"
            if (earlier := first.setdefault(node.name, where)) != where:
                yield source.complaint(node, f"a second class is named {node.name}, the first is {earlier}")


def opening_sentences(files: Iterable[Source]) -> Iterator[str]:
    """Every module opens with a sentence."""
    for source in files:
        if not (ast.get_docstring(source.tree) or "").split("\n\n")[0].endswith((".", ":")):
            yield source.complaint(source.tree, "a module opens with a sentence")


def core_without_io(files: Iterable[Source]) -> Iterator[str]:
    """The core draws no numpy randomness, and opens and prints nothing: import contracts cannot see these."""
    for source in files:
        if is_core(source.module):
            for node in source.nodes(ast.Attribute):
                if node.attr == "random":
                    yield source.complaint(node, "the core draws no random number")
            for node in source.nodes(ast.Name):
                if node.id in {"open", "print", "input"}:
                    yield source.complaint(node, f"the core does no I/O: {node.id}")


def environment_readers(files: Iterable[Source]) -> Iterator[str]:
    """Only pdtransfer.environment reads the environment."""
    text = "only pdtransfer.environment reads the environment"
    for source in files:
        if source.module == "pdtransfer.environment":
            continue
        for node in source.nodes(ast.Attribute):
            if node.attr in ENVIRONMENT:
                yield source.complaint(node, text)
        for node in source.nodes(ast.ImportFrom):
            if node.module == "os" and ENVIRONMENT & {imported.name for imported in node.names}:
                yield source.complaint(node, text)


def circles(files: Iterable[Source]) -> Iterator[str]:
    """No file imports one that imports it, itself or by others. Reports one circle at a time.

    Imports within functions and for types alone count too: a reader of either file needs the other as well. An import
    of a module is not one of the package around it.
    """
    modules = {source.module: source for source in files}
    imports = {module: dict(_imported(source, modules)) for module, source in modules.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        # Each file is imported by the next.
        circle = list(reversed(error.args[1]))
        node = imports[circle[0]][circle[1]]
        yield modules[circle[0]].complaint(node, f"files import each other in a circle: {', '.join(circle)}")


def _imported(source: Source, modules: Collection[str]) -> Iterator[tuple[str, ast.AST]]:
    names = [(name.name, "", node) for node in source.nodes(ast.Import) for name in node.names]
    for node in source.nodes(ast.ImportFrom):
        # The first dot is the package itself, which a module's own name is not.
        parents = source.module.split(".")
        parents = parents[: len(parents) - node.level + source.path.endswith("/__init__.py")] if node.level else []
        base = ".".join((*parents, *filter(None, [node.module])))
        names += [(f"{base}.{name.name}", base, node) for name in node.names]
    for name, base, node in names:
        module = name if name in modules else base
        if module in modules and module != source.module:
            yield module, node


def duplicate_functions(files: Iterable[Source], size_min: int) -> Iterator[str]:
    """No two functions do the same. `size_min`: characters of a syntax tree, below which likeness means nothing."""
    functions: dict[tuple[str, ...], list[tuple[Source, Function]]] = defaultdict(list)
    for source in files:
        for node in source.nodes(*FUNCTIONS):
            functions[_outline(node)].append((source, node))
    for candidates in functions.values():
        if len(candidates) == 1:
            continue
        first: dict[str, str] = {}
        for source, node in candidates:
            where = f"{source.path}:{node.lineno} {node.name}"
            does = shape(node)
            if len(does) >= size_min and (earlier := first.setdefault(does, where)) != where:
                yield source.complaint(node, f"{node.name} does what {earlier} does")


def _outline(node: Function) -> tuple[str, ...]:
    """What two functions that do the same have in common: cheap, where their shapes are not."""
    statements = node.body[1:] if ast.get_docstring(node) else node.body
    nodes = (part for statement in statements for part in (statement, *ast.iter_child_nodes(statement)))
    return tuple(type(part).__name__ for part in (node, *nodes))


def shape(node: Function) -> str:
    """What it does, whatever it is called; without docstring and annotations."""
    copy = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(copy, FUNCTIONS)
    copy.name, copy.returns = "", None
    if ast.get_docstring(copy):
        del copy.body[0]
    for argument in ast.walk(copy):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.dump(copy)
