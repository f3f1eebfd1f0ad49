"""No assertion may check what a peer sent: `python -O` leaves them out, and a peer's mistake is not a bug of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.paths import REPO

OUR_OWN = {"pdtransfer/wire/codec.py:encode"}  # gets what this process is about to send
RECEIVED = {"Message", "Frame"} | {
    node.name
    for node in ast.parse((REPO / "pdtransfer/wire/messages.py").read_text()).body
    if isinstance(node, ast.ClassDef)
}


def names(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


def given(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The parameters whose annotation names a message, a part of one, or a frame."""
    args = function.args
    annotated = {each.arg: each.annotation for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    found: set[str] = set()
    for name, annotation in annotated.items():
        if annotation is not None and not ast.unparse(annotation).startswith(("type[", "Callable[")):
            words = {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}
            words |= {each.attr for each in ast.walk(annotation) if isinstance(each, ast.Attribute)}
            if words & RECEIVED:
                found.add(name)
    return found


def taken_from(function: ast.AST, received: set[str]) -> set[str]:
    """These names, and every local name whose value is computed from one of them."""
    found, before = set(received), set[str]()
    while found != before:
        before = set(found)
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=targets, value=value) if names(value) & found:
                    found |= {name for target in targets for name in names(target, ast.Store)}
                case ast.AnnAssign(target=target, value=ast.expr() as value) if names(value) & found:
                    found |= names(target, ast.Store)
                case ast.NamedExpr(target=target, value=value) if names(value) & found:
                    found |= names(target, ast.Store)
                case ast.For(target=target, iter=iterated) | ast.comprehension(target=target, iter=iterated) if (
                    names(iterated) & found
                ):
                    found |= names(target, ast.Store)
                case ast.Match(subject=subject, cases=cases) if names(subject) & found:
                    patterns = [each for case in cases for each in ast.walk(case.pattern)]
                    found |= {
                        each.name for each in patterns if isinstance(each, (ast.MatchAs, ast.MatchStar)) and each.name
                    }
                case _:
                    pass
    return found


def checks_of_peers(place: str, source: str) -> Iterator[str]:
    """Each assertion in a function that gets something received, about that or what was computed from it."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and f"{place}:{function.name}" not in OUR_OWN:
            received = taken_from(function, given(function))
            for node in ast.walk(function):
                if isinstance(node, ast.Assert) and names(node.test) & received:
                    yield f"{place}:{node.lineno}: {ast.unparse(node.test)}"


def test_no_assertion_checks_what_a_peer_sent() -> None:
    sources = {path.relative_to(REPO).as_posix(): path.read_text() for path in (REPO / "pdtransfer").rglob("*.py")}
    assert [found for place, source in sources.items() for found in checks_of_peers(place, source)] == []


@pytest.mark.parametrize(
    "lines",
    [
        "def hello(peer: str, message: Hello) -> None:\n    assert message.identity.role == 'router'",
        "def hello(message: Hello) -> None:\n    theirs = message.identity\n    assert theirs.role == 'router'",
        "def take(m: Message) -> None:\n    match m:\n        case Grant(grant=n):\n            assert n > 0",
        "def take(grant: Grant) -> None:\n    for part in grant.parts:\n        assert part.extents",
        "async def take(*, frame: zmq.Frame) -> None:\n    if (size := len(frame)) > 3:\n        assert size < 9",
    ],
)
def test_such_an_assertion_is_seen(lines: str) -> None:
    (found,) = checks_of_peers("x.py", lines)
    assert found.startswith(f"x.py:{lines.count(chr(10)) + 1}: ")


def test_assertions_about_our_own_state_are_ours_to_make() -> None:
    assert not list(checks_of_peers("x.py", "def take(self, m: Message) -> None:\n    assert self.room is not None"))
