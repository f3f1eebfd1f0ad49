"""No dataclass compares arrays: `==` of two arrays is an array, which has no truth value."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import REPO

PACKAGE = REPO / "pdtransfer"
ARRAYS = {"NDArray", "ndarray", "Tensor"}


@cache
def trees(package: Path) -> dict[Path, ast.Module]:
    return {path.relative_to(package): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}


def of_arrays(annotation: ast.expr, names: set[str]) -> bool:
    """Whether a value of this type holds one; a function over arrays does not, and no digits of a Literal do."""
    text = re.sub(r"\b(Callable|Literal)\[(\[.*?\], )?[^\]]*\]*", "", ast.unparse(annotation))
    return bool(names & set(re.findall(r"\w+", text)))


def aliases(tree: ast.Module) -> set[str]:
    """Names of array types that a module defines, as Int64s."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name) and of_arrays(node.value, ARRAYS)
    }


def array_names(tree: ast.Module, package: Path) -> set[str]:
    """Names of array types that a module defines or imports from a module of the package."""
    theirs = {path.stem: aliases(each) for path, each in trees(package).items()}
    imported = {
        name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
        if name.name in theirs.get(node.module.rpartition(".")[2], ())
    }
    return ARRAYS | aliases(tree) | imported


def that_compare_arrays(package: Path) -> list[str]:
    """Dataclasses with a field of arrays and an `__eq__` that dataclass makes."""
    found: list[str] = []
    for path, tree in trees(package).items():
        names = array_names(tree, package)
        for each in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            made = [text for text in map(ast.unparse, each.decorator_list) if "dataclass" in text]
            own = any(isinstance(line, ast.FunctionDef) and line.name == "__eq__" for line in each.body)
            fields = [line.annotation for line in each.body if isinstance(line, ast.AnnAssign)]
            if made and not own and "eq=False" not in made[0] and any(of_arrays(field, names) for field in fields):
                found.append(f"{path}:{each.lineno} {each.name}")
    return found


def test_no_dataclass_compares_arrays() -> None:
    assert that_compare_arrays(PACKAGE) == []


@pytest.mark.parametrize("field", ["NDArray[np.int64]", "dict[str, Tensor] | None", "Words", "np.ndarray"])
def test_a_dataclass_that_compares_arrays_is_found(field: str, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("Words = NDArray[np.uint64]\n")
    (tmp_path / "one.py").write_text(
        f"from .words import Words\n@dataclass\nclass One:\n    a: {field}\n"
        f"\n@dataclass(eq=False)\nclass Two:\n    a: {field}\n"
        "\n@dataclass\nclass Three:\n    a: Callable[[Tensor], Tensor]\n"
    )
    assert that_compare_arrays(tmp_path) == ["one.py:3 One"]
