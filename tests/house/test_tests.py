"""What holds for the tests themselves: where they stand, what they import, and that each helper is there once."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache

import pytest

from tests.support.effort import VARIABLE, Effort, is_picked, some
from tests.support.paths import REPO

TESTS = REPO / "tests"
HOUSES = {"library": "pdtransfer", "serve": "pdtransfer/serve", "lab": "lab/pdtransfer_lab"}
# Not packages: whole processes, the simulator, peers written from the protocol's text, two GPUs.
OTHERS = {"comparisons", "integration", "sim", "stranger", "two_gpu"}
# Names that only these modules define: anything that waits, asks the kernel of a process, or sets up a namespace.
GENERAL = ("networks", "paths", "processes", "waiting")
# Characters of a syntax tree: below it, two functions alike say nothing.
ALIKE_MIN = 500
# Mutants read and replace what no test of behaviour may.
MUTANTS = ("library/sim/planted", "support/planted.py")
PRIVATE_READS_MAX = 261
PUBLIC = {"_replace", "_exit"}  # of named tuples and of os: documented names


@cache
def files() -> dict[str, ast.Module]:
    """Every module of the tests, by its path."""
    return {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}


def imported(tree: ast.Module) -> set[str]:
    """The modules that it imports, and whatever it imports from them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{each.name}" for each in node.names} | {node.module or ""}
    return found


def shape(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """What it does, whatever it is called; without docstring and annotations."""
    made = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef)
    made.name, made.returns = "", None
    if ast.get_docstring(made):
        del made.body[0]
    for each in ast.walk(made):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.dump(made)


def private_reads(tree: ast.Module) -> list[str]:
    """Where it reads what another object keeps to itself."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and node.attr not in PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_every_folder_of_tests_is_that_of_a_package() -> None:
    for house, root in HOUSES.items():
        folders = {path.name for path in (TESTS / house).iterdir() if path.is_dir() and path.name != "__pycache__"}
        packages = {path.parent.name for path in (REPO / root).glob("*/__init__.py")}
        assert folders - OTHERS <= packages, house


def test_no_test_imports_from_another_test() -> None:
    taken = {
        (name, module)
        for name, tree in files().items()
        for module in imported(tree)
        if module.startswith("tests.") and any(part.startswith(("test_", "conftest")) for part in module.split("."))
    }
    assert taken == set()


def test_helpers_of_general_use_are_defined_once() -> None:
    general = {
        node.name
        for module in GENERAL
        for node in files()[f"support/{module}.py"].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    } - {"why_not"}
    again = {
        (name, node.name)
        for name, tree in files().items()
        if name.removeprefix("support/").removesuffix(".py") not in GENERAL
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in general
    }
    assert "until" in general
    assert again == set()


def test_no_function_stands_in_two_places() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in files().items():
        if name.startswith(MUTANTS):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(does := shape(node)) >= ALIKE_MIN:
                places[does].append(f"{name}:{node.lineno} {node.name}")
    assert [each for each in places.values() if len(each) > 1] == []


def test_fewer_and_fewer_tests_read_what_is_private() -> None:
    """Lower the bound as reads go; a new one has to find a public way."""
    reads = {name: private_reads(tree) for name, tree in files().items() if not name.startswith(MUTANTS)}
    count = sum(map(len, reads.values()))
    assert count <= PRIVATE_READS_MAX, {name: len(each) for name, each in reads.items() if each}


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ("def f(x: int) -> int:\n '''A.'''\n return x + 1", "def g(x):\n return x + 1", True),
        ("def f(x):\n return x + 1", "def f(x):\n return x + 2", False),
        ("def f(x):\n return x + 1", "async def f(x):\n return x + 1", False),
    ],
)
def test_functions_that_do_the_same_are_seen_as_one(first: str, second: str, alike: bool) -> None:
    one, other = (shape(ast.parse(text).body[0]) for text in (first, second))  # type: ignore[arg-type]
    assert (one == other) == alike


def test_a_private_read_is_seen_and_ones_own_is_none() -> None:
    assert private_reads(ast.parse("a.b._c; self._d; cls._e; f.__class__; self.g._h")) == ["a.b._c", "self.g._h"]


def test_continuous_integration_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = (REPO / ".ci" / "run").read_text()
    assert "make test ARGS=--full" in run
    assert "for engine in vllm sglang; do" in run
    assert "make test-$engine" in run
    monkeypatch.setenv(VARIABLE, Effort.FULL)
    assert some(100) == 100
    assert all(is_picked(f"test[{number}]") for number in range(100))


def test_without_it_a_part_of_grids_and_examples_runs_and_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (some(100), some(3)) == (25, 1)
    assert 150 < sum(is_picked(f"test[{number}]") for number in range(1_000)) < 350
