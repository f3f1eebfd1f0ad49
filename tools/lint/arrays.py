"""No dataclass compares arrays: `==` of two arrays is an array, which has no truth value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from .sources import Source

ARRAYS = {"NDArray", "ndarray", "Tensor"}


def _of_arrays(annotation: ast.expr, names: set[str]) -> bool:
    """Whether a value of this type holds one; a function over arrays does not, and no digits of a Literal do."""
    text = re.sub(r"\b(Callable|Literal)\[(\[.*?\], )?[^\]]*\]*", "", ast.unparse(annotation))
    return bool(names & set(re.findall(r"\w+", text)))


def _aliases(tree: ast.Module) -> set[str]:
    """Names of array types that a module defines, as Int64s."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name) and _of_arrays(node.value, ARRAYS)
    }


def comparing_dataclasses(files: Iterable[Source]) -> Iterator[str]:
    """No dataclass with a field of arrays has an `__eq__` that dataclass makes."""
    files = list(files)
    aliases = {source.module.rpartition(".")[2]: _aliases(source.tree) for source in files}
    for source in files:
        names = ARRAYS | _aliases(source.tree)
        for node in source.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                theirs = aliases.get(node.module.rpartition(".")[2], set())
                names |= theirs & {imported.name for imported in node.names}
        for node in source.nodes(ast.ClassDef):
            decorators = [text for text in map(ast.unparse, node.decorator_list) if "dataclass" in text]
            if not decorators or "eq=False" in decorators[0]:
                continue
            has_eq = any(isinstance(line, ast.FunctionDef) and line.name == "__eq__" for line in node.body)
            fields = [line.annotation for line in node.body if isinstance(line, ast.AnnAssign)]
            if not has_eq and any(_of_arrays(field, names) for field in fields):
                yield source.complaint(node, f"dataclass {node.name} compares arrays: eq=False")
