"""No assertion may check what a peer sent: `python -O` leaves them out, and a peer's mistake is not a bug here."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache

from .sources import FUNCTIONS, REPO, Source

OUR_OWN = {"pdtransfer/wire/codec.py:encode"}  # gets what this process is about to send


@cache
def _received() -> frozenset[str]:
    """Types of what a peer sends."""
    tree = ast.parse((REPO / "pdtransfer/wire/messages.py").read_text())
    return frozenset({"Message", "Frame"} | {node.name for node in tree.body if isinstance(node, ast.ClassDef)})


def _names(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, context)}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The parameters whose annotation names a message, a part of one, or a frame."""
    arguments = function.args
    names: set[str] = set()
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None and not ast.unparse(argument.annotation).startswith(("type[", "Callable[")):
            words = {node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)}
            words |= {node.attr for node in ast.walk(argument.annotation) if isinstance(node, ast.Attribute)}
            if words & _received():
                names.add(argument.arg)
    return names


def _computed_from(function: ast.AST, received: set[str]) -> set[str]:
    """These names, and every local name whose value is computed from one of them."""
    names, before = set(received), set[str]()
    while names != before:
        before = set(names)
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=targets, value=value) if _names(value) & names:
                    names |= {name for target in targets for name in _names(target, ast.Store)}
                case ast.AnnAssign(target=target, value=ast.expr() as value) if _names(value) & names:
                    names |= _names(target, ast.Store)
                case ast.NamedExpr(target=target, value=value) if _names(value) & names:
                    names |= _names(target, ast.Store)
                case ast.For(target=target, iter=iterated) | ast.comprehension(target=target, iter=iterated) if (
                    _names(iterated) & names
                ):
                    names |= _names(target, ast.Store)
                case ast.Match(subject=subject, cases=cases) if _names(subject) & names:
                    patterns = [pattern for case in cases for pattern in ast.walk(case.pattern)]
                    names |= {
                        pattern.name
                        for pattern in patterns
                        if isinstance(pattern, (ast.MatchAs, ast.MatchStar)) and pattern.name
                    }
                case _:
                    pass
    return names


def checks_of_peers(files: Iterable[Source]) -> Iterator[str]:
    """No function asserts anything about what it received, or what was computed from that."""
    for source in files:
        for function in source.nodes(*FUNCTIONS):
            parameters = _parameters(function)
            if not parameters or f"{source.path}:{function.name}" in OUR_OWN:
                continue
            received = _computed_from(function, parameters)
            for node in ast.walk(function):
                if isinstance(node, ast.Assert) and _names(node.test) & received:
                    yield source.complaint(node, f"an assertion checks what a peer sent: {ast.unparse(node.test)}")
