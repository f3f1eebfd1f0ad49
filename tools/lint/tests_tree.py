"""What holds for the tests themselves: where they stand, what they import, and that each helper is there once."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .modules import duplicate_functions
from .sources import FUNCTIONS, REPO, Source

HOUSES = {"library": "pdtransfer", "serve": "pdtransfer/serve", "lab": "lab/pdtransfer_lab"}
# Not packages: whole processes, the simulator, peers written from the protocol's text, two GPUs.
OTHERS = {"comparisons", "integration", "sim", "stranger", "two_gpu"}
# Names that only these modules define: anything that waits, asks the kernel of a process, or sets up a namespace.
GENERAL = tuple(f"tests/support/{name}.py" for name in ("networks", "paths", "processes", "waiting"))
# Characters of a syntax tree: below it, likeness of two functions means nothing.
ALIKE_MIN = 500
# Mutants read and replace what no test of behaviour may.
MUTANTS = ("tests/library/sim/planted", "tests/support/planted.py")
# Lower it as reads go; a new one has to find a public way.
PRIVATE_READS_MAX = 261
PUBLIC = {"_replace", "_exit"}  # of named tuples and of os: documented names


def folders() -> Iterator[str]:
    """Every folder of tests is that of a package."""
    for house, root in HOUSES.items():
        tested = REPO / "tests" / house
        names = {path.name for path in tested.iterdir() if path.is_dir() and path.name != "__pycache__"}
        packages = {path.parent.name for path in (REPO / root).glob("*/__init__.py")}
        for name in sorted(names - OTHERS - packages):
            yield f"tests/{house}/{name}:1: {root} has no such package"


def imports(files: Iterable[Source]) -> Iterator[str]:
    """No test imports from another test."""
    for source in files:
        whole = ((node, name.name) for node in source.nodes(ast.Import) for name in node.names)
        parts_of = (
            (node, f"{node.module}.{name.name}") for node in source.nodes(ast.ImportFrom) for name in node.names
        )
        for node, module in (*whole, *parts_of):
            parts = module.split(".")
            if parts[0] == "tests" and any(part.startswith(("test_", "conftest")) for part in parts):
                yield source.complaint(node, f"a test imports from another, {module}")


def general_helpers(files: Iterable[Source]) -> Iterator[str]:
    """Helpers of general use are defined once."""
    files = list(files)
    functions = [(source, node) for source in files for node in source.tree.body if isinstance(node, FUNCTIONS)]
    general = {node.name: source.path for source, node in functions if source.path in GENERAL} | {"why_not": ""}
    for source, node in functions:
        if source.path not in GENERAL and general.get(node.name):
            yield source.complaint(node, f"{node.name} is in {general[node.name]}")


def functions(files: Iterable[Source]) -> Iterator[str]:
    """No function of the tests stands in two places."""
    yield from duplicate_functions(
        (source for source in files if not source.path.startswith(MUTANTS)), size_min=ALIKE_MIN
    )


def private_reads(files: Iterable[Source], reads_max: int = PRIVATE_READS_MAX) -> Iterator[str]:
    """Fewer and fewer tests read what another object keeps to itself: each read, where there are too many."""
    reads = [
        source.complaint(node, f"reads what is private, {ast.unparse(node)}; {reads_max} reads may be")
        for source in files
        if not source.path.startswith(MUTANTS)
        for node in source.nodes(ast.Attribute)
        if node.attr.startswith("_")
        and not node.attr.endswith("__")
        and node.attr not in PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    if len(reads) > reads_max:
        yield from reads
