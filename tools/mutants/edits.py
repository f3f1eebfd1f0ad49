"""The mutants of a file: each replaces the text of one node of its syntax tree."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

_PAIRS = ("<", "<="), (">", ">="), ("==", "!="), ("+", "-"), ("and", "or"), ("is", "is not"), ("in", "not in")
_TURNED = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_OPERATOR = re.compile(r"\b(?:is\s+not|not\s+in|is|in|and|or)\b|[<>]=?|[!=]=|[-+]")
_SWAPPED = {"fullmatch": "match", "min": "max", "max": "min", "any": "all", "all": "any"}
_LEAVES = (ast.Raise, ast.Return, ast.Continue, ast.Break)
_UNTOUCHED = {"__repr__", "__str__"}  # texts for people
_UNTOUCHED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}
_UNTOUCHED_KEYWORDS = {"strict", "frozen", "kw_only", "slots", "eq", "repr", "compare"}  # as assertions are
_SHOWN = 40  # characters before what changes, and half of those behind


@dataclass(frozen=True, slots=True)
class Mutant:
    """`start` and `end` are bytes of the file; `name` stays the same while the code around it changes."""

    name: str
    file: str
    line: int
    start: int
    end: int
    new: str


def mutants(file: str, source: str) -> list[Mutant]:
    """Those of a file, by their places. Texts of errors and logs, assertions and annotations are left as they are."""
    tree = _Tree(source)
    found: dict[tuple[int, int, str], Mutant] = {}
    names: Counter[str] = Counter()
    for function, node, new in tree.edits(tree.root, ""):
        start, end = tree.span(node)
        if (start, end, new) not in found:
            name = f"{file} {function}: {_change(*tree.change(start, end, new))}"
            names[name] += 1
            name += f" #{names[name]}" if names[name] > 1 else ""
            found[start, end, new] = Mutant(name, file, node.lineno, start, end, new)
    return list(found.values())


class _Tree:
    def __init__(self, source: str) -> None:
        self.root = ast.parse(source)
        self._bytes = source.encode()
        self._lines = [0]  # where each begins
        for line in self._bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self._bytes[start:end].decode()

    def change(self, start: int, end: int, new: str) -> tuple[str, str]:
        """What stands there before and after; with the rest of its line, if it is short."""
        first, last = start, end
        if end - start < _SHOWN // 2:
            first = self._bytes.rfind(b"\n", 0, start) + 1
            last = self._bytes.find(b"\n", end)
        before, old, after = self._bytes[first:start], self._bytes[start:end], self._bytes[end:last]
        return (before + old + after).decode(), (before + new.encode() + after).decode()

    def edits(self, parent: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
        """The function, a node in it, and the text in the node's place."""
        for node in _children(parent):
            inner = function
            match node:
                case ast.keyword(arg=name) if name in _UNTOUCHED_KEYWORDS:
                    continue
                case ast.Raise() | ast.Assert() | ast.JoinedStr():
                    continue
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"))):
                    continue
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    if name in _UNTOUCHED:
                        continue
                    inner = f"{function}.{name}".lstrip(".")
                    yield from ((inner, *edit) for edit in self._results(node))
                case ast.Dict() if not function:
                    yield from (("", *edit) for edit in self._states(node))
                case _ if function:
                    yield from ((function, *edit) for edit in self._edits(node, parent, function))
                case _:
                    pass
            yield from self.edits(node, inner)

    def _edits(self, node: ast.AST, parent: ast.AST, function: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        yield from self._expression(node, parent)
        yield from self._statement(node, function)
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.comprehension):
            for test in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
                if isinstance(test, ast.UnaryOp):
                    yield test, f"({self.text(test.operand)})"
                elif not isinstance(test, ast.Compare | ast.BoolOp):
                    yield test, f"not ({self.text(test)})"

    def _expression(self, node: ast.AST, parent: ast.AST) -> Iterator[tuple[ast.expr, str]]:
        text = self.text
        match node:
            case ast.Compare():
                for pair in pairwise((node.left, *node.comparators)):
                    yield node, self._turned(node, [pair])
            case ast.BoolOp():
                yield node, self._turned(node, list(pairwise(node.values)))
            case ast.BinOp(left=left, right=right, op=ast.Add() | ast.Sub()) if not _is_sequence(left, right):
                yield node, self._turned(node, [(left, right)])
            case ast.Constant(value=bool() as value):
                yield node, str(not value)
            case ast.Constant(value=int() as value) if not _is_tuned(parent, value):
                yield node, str(value + 1)
            case ast.Attribute(ctx=ast.Load(), attr=name) if name.endswith("_max") and not isinstance(parent, ast.Call):
                yield node, f"({text(node)} - 1)"
            case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper)) if lower or upper:
                yield node, f"({text(value)})"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _SWAPPED:
                yield node.func, text(node.func).removesuffix(name) + _SWAPPED[name]
            case _:
                pass

    def _statement(self, node: ast.AST, function: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        text = self.text
        match node:
            case ast.AugAssign(target=target, value=value, op=op):
                if isinstance(op, ast.Add | ast.Sub) and not _is_sequence(value):
                    yield node, self._turned(node, [(target, value)])
                if isinstance(target, ast.Attribute):
                    yield node, "pass"
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call()) as call) if not text(call).startswith("log."):
                yield node, "pass"
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"))]) if not function.endswith("__init__"):
                yield node, "pass"
            case ast.If(test=test, body=[*_, last], orelse=[]) if isinstance(last, _LEAVES):
                yield test, "False"
            case ast.ExceptHandler(type=ast.Tuple(elts=caught) as whole):
                for left_out in caught:
                    yield whole, f"({''.join(f'{text(each)}, ' for each in caught if each is not left_out)})"
            case ast.ExceptHandler(type=ast.expr() as caught):
                yield caught, "()"
            case _:
                pass

    def _results(self, node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        """Each result of a function that returns a bool, negated."""
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and isinstance(node.returns, ast.Name) and node.returns.id == "bool":
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and each.value and not isinstance(each.value, ast.Constant):
                    yield each.value, f"not ({self.text(each.value)})"

    def _states(self, table: ast.Dict) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        """Each state of a table of states, as the next one that is there."""
        states = [value for value in table.values if isinstance(value, ast.Attribute)]
        distinct = list(dict.fromkeys(map(self.text, states)))
        if len(states) == len(table.values) and len(distinct) > 1:
            for state in states:
                yield state, distinct[(distinct.index(self.text(state)) + 1) % len(distinct)]

    def _turned(self, node: ast.expr | ast.stmt, pairs: list[tuple[ast.expr, ast.expr]]) -> str:
        """The node's text, with the operator between each of these pairs turned."""
        first, last = self.span(node)
        text = ""
        for left, right in pairs:
            start, end = self.span(left)[1], self.span(right)[0]
            between = self._bytes[start:end].decode()
            text += self._bytes[first:start].decode()
            text += _OPERATOR.sub(lambda found: _TURNED[" ".join(found[0].split())], between, count=1)
            first = end
        return text + self._bytes[first:last].decode()


def _children(parent: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(parent):
        if name not in _UNTOUCHED_FIELDS:
            children = cast("list[object]", value) if isinstance(value, list) else [value]
            yield from (child for child in children if isinstance(child, ast.AST))


def _is_tuned(parent: ast.AST, value: int) -> bool:
    """Whether this number is a size that somebody chose, and not a limit that something has."""
    shifted = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.LShift)
    return shifted or (isinstance(parent, ast.AnnAssign) and value > 1)


def _is_sequence(*nodes: ast.expr) -> bool:
    sequences = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    return any(
        isinstance(node, sequences) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )


def _change(old: str, new: str) -> str:
    """Both texts on one line, from a little before their difference on."""
    old, new = " ".join(old.split()), " ".join(new.split())
    same = next((at for at, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1), 0)
    start = max(0, same - _SHOWN)
    return f"{old[start:][: 3 * _SHOWN]} -> {new[start:][: 3 * _SHOWN]}"
