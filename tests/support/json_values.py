"""A value of every JSON type, at the edges of each: what may stand in any field of an answer from outside."""

from __future__ import annotations

from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(10**30), 0.0, 1.5, -1e300, 1e300,
    "", "x", "1", "\n", "x" * 100_000, "\u2028",
    [], [1], ["x"], [[]], [None], {}, {"x": 1}, {"": None}, {"x": {"x": []}},
)  # fmt: skip


def spoiled(right: dict[str, Any]) -> list[tuple[str, Any]]:
    """The answer with each field missing, and with each value in its place; then each value instead of the answer. A
    name says which."""
    cases: list[tuple[str, Any]] = [("right", right)]
    for field in right:
        cases.append((f"{field} missing", {name: value for name, value in right.items() if name != field}))
        cases += [(f"{field} = {_short(value)}", right | {field: value}) for value in VALUES]
    cases += [(f"unknown = {_short(value)}", right | {"unknown": value}) for value in VALUES]
    return cases + [(f"answer = {_short(value)}", value) for value in VALUES]


def _short(value: Any) -> str:
    return repr(value)[:40]
