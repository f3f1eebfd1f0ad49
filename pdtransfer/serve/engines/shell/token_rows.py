"""Which tokens own which rows of a component: every token, every few tokens, the last ones, or all together one."""

from __future__ import annotations

import numpy as np

from ....layout.geometry import Int64s
from ....layout.layout import Component


def last_tokens(component: Component, tokens: int, rows: tuple[int, int] | None = None) -> Int64s:
    """The last token of each row of `tokens` tokens, or of rows [first, end) alone: int64 (rows,), ascending."""
    first, end = (0, component.rows(tokens)) if rows is None else rows
    match component.span.kind:
        case "all":
            return np.minimum(np.arange(first + 1, end + 1) * component.tokens_per_row, tokens) - 1
        case "last":
            return np.arange(first, end) + (tokens - component.rows(tokens))
        case "once":
            return np.array([tokens - 1])


def numbers(component: Component, tokens: int, rows: tuple[int, int] | None = None) -> Int64s:
    """What rows are numbered by in a digest: a row of a window by its token, since a ring turns."""
    if component.span.kind == "last":
        return last_tokens(component, tokens, rows)
    return np.arange(*((0, component.rows(tokens)) if rows is None else rows))


def row_of(component: Component, position: int, prompt_tokens: int) -> int:
    """The row of the token at `position`. A window is a ring whose row 0 is the first token that the prompt left in
    it."""
    match component.span.kind:
        case "all":
            return position // component.tokens_per_row
        case "last":
            return (position - max(0, prompt_tokens - component.span.tokens)) % component.span.tokens
        case "once":
            return 0


def whole_rows(component: Component, first: int, end: int, tokens: int) -> tuple[int, int] | None:
    """The rows of a prompt of `tokens` tokens that tokens [first, end) complete. Windows, states, and a last row with
    too few tokens are complete with the prompt."""
    if component.span.kind != "all":
        return (0, component.rows(tokens)) if end == tokens else None
    rows = first // component.tokens_per_row, end // component.tokens_per_row
    if end == tokens:
        rows = rows[0], component.rows(tokens)
    return rows if rows[0] < rows[1] else None
