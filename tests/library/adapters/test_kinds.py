"""Rows of a prompt by the kind of a component, against the component's own rule, which all peers share."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pdtransfer.adapters.kit.kinds import CacheKind
from tests.support.layout_tensors import plane

PAGE, PAGES = 4, 9
PAGED = CacheKind("page", "whole", "heads")
KINDS = [
    *(CacheKind("token", tail, "heads").of(PAGE) for tail in ("exact", "filled")),
    *(
        PAGED.of(PAGE, tail=tail, **reach)
        for tail, reach in product(("whole", "open"), ({}, {"window": 6}, {"chunk": 8}))
    ),
    CacheKind("request", "whole", "own").of(PAGE),
]
AROUND = sorted({max(0, pages * PAGE + more) for pages in (0, 1, 2, 3, 7) for more in (-1, 0, 1)})


@pytest.mark.parametrize("tokens", AROUND)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.row}-{kind.tail}-{kind.window}-{kind.chunk}")
def test_a_prompt_has_the_rows_that_its_component_has(kind: CacheKind, tokens: int) -> None:
    if kind.tail == "filled":  # decode asks for whole pages
        tokens = -(-tokens // PAGE) * PAGE
    planes = [plane(row_bytes=8, row_stride=8, page_stride=8)]
    rows = kind.component("kv", "dram", planes, PAGES * kind.of_page).rows(tokens)
    assert kind.rows(tokens) == rows
    part = tokens > 0 if kind.row == "request" else tokens % kind.tokens_per_row > 0
    assert 0 <= kind.needed_from(tokens) <= kind.whole_rows(tokens) == rows - part

    order = np.random.default_rng(tokens).permutation(PAGES)[: -(-rows // kind.of_page)]
    slots = [int(page) * kind.of_page + row for page in order for row in range(kind.of_page)]
    assert kind.slots(order, tokens).tolist() == slots[:rows]
    if kind.tail == "open":  # another rank has the last page
        assert kind.slots(order[:-1], tokens).tolist() == [*slots[:-1], *[-1] * (rows > 0)]
    elif rows:  # decode has the first page, and nobody the last one
        first = [-1] * kind.of_page
        assert kind.slots([-1, *order[1:]], tokens).tolist() == (first + slots[kind.of_page :])[:rows]
        assert len(kind.slots(order[:-1], tokens)) < rows


@pytest.mark.parametrize(
    ("reach", "tokens", "row"),
    [
        ({}, 700, 0),
        ({"window": 64}, 700, 39),
        ({"window": 64}, 63, 0),
        ({"chunk": 128}, 700, 40),
        ({"chunk": 128}, 128, 8),
    ],
)
def test_a_window_needs_its_last_rows(reach: dict[str, int], tokens: int, row: int) -> None:
    """Of 700 tokens the next one sees those from 637 on."""
    assert PAGED.of(16, **reach).needed_from(tokens) == row
