"""The cache of a hybrid model's requests as one list of components, for a GPU pool or a host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..errors import LocalProtocolError
from .layout import Component, Span
from .layout_builders import C4_PARTS, DSA_INDEX_PARTS, PagePart, item_layout

C4, C128 = 4, 128  # tokens of a compressed row
PAGE_TOKENS = 256  # a page of C4 then has 64 rows
WINDOW_TOKENS = 128
_BASE_ALIGN = 4_096  # bytes: registered memory begins with a host page

# State of an incomplete compressed row: keys and scores of its tokens in float32, of 512 values, the index's of 128.
# C4's rows overlap, so eight tokens are kept, for each of the two rows that they belong to.
_C4_STATE = (PagePart("state", "float32", 8 * 2 * 2 * 512 * 4),)
_INDEX_STATE = (PagePart("state", "float32", 8 * 2 * 2 * 128 * 4),)
_C128_STATE = (PagePart("state", "float32", 128 * 2 * 512 * 4),)


class _Pool(NamedTuple):
    name: str
    layers: Sequence[int]
    parts: Sequence[PagePart]
    span: Span
    rows: int
    tokens_per_row: int = 1
    page_size: int = 1
    page_align: int = 1
    memory: Literal["dram", "hbm"] = "dram"


def deepseek_v4(
    host_layout: str,
    *,
    ratios: Sequence[int],
    tokens: int,
    requests: int,
    page_tokens: int = PAGE_TOKENS,
    page_align: int = 576,
    window_tokens: int = WINDOW_TOKENS,
    window_page_size: int = 64,
    first_layer: int = 0,
    index_memory: Literal["dram", "hbm"] = "dram",
    base: int = 0,
) -> tuple[Component, ...]:
    """The components of a DeepSeek V4, one behind the other from `base` on, but for those that no layer here has. An
    index in HBM is from 0 on, in a memory of its own.

    `ratios` has what each layer from `first_layer` on keeps beside its window: a row for 4 tokens or for 128, or (0)
    nothing. c4 and c128 are these rows, of `tokens` tokens in all. window is the last `window_tokens` tokens of each of
    `requests` requests. c4_state, index_state and c128_state are what is not yet a whole row, one row a request. index
    is the index keys of c4's rows, in `index_memory`. A prompt's last row counts also where its tokens are too few; row
    0 of a window is the first of the tokens that are in it.

    `host_layout` is one of ITEM_LAYOUTS. A page is of `page_tokens` tokens, or of one row where that is more; a
    window's of `window_page_size`. Pages of c4, c128 and window are multiples of `page_align` bytes. So page_tokens 1,
    window_page_size 1 and page_align 8 make pools at token granularity. Raises LocalProtocolError for a layout that a
    component does not have and for other ratios, and ValueError as Layout does.
    """
    layers: dict[int, list[int]] = {0: [], C4: [], C128: []}
    for layer, ratio in enumerate(ratios, first_layer):
        if ratio not in layers:
            raise LocalProtocolError(f"ratios: {ratio} of layer {layer} must be one of 0, {C4}, {C128}")
        layers[ratio].append(layer)
    of_c4, of_c128, every = layers[C4], layers[C128], range(first_layer, first_layer + len(ratios))
    c4_rows, c128_rows = -(-tokens // C4), -(-tokens // C128)
    window_rows = requests * _up(window_tokens, window_page_size)
    whole, window, once = Span(), Span("last", window_tokens), Span("once")
    pools = (
        _Pool("c4", of_c4, C4_PARTS, whole, c4_rows, C4, page_tokens // C4, page_align),
        _Pool("c128", of_c128, C4_PARTS, whole, c128_rows, C128, page_tokens // C128, page_align),
        _Pool("window", every, C4_PARTS, window, window_rows, 1, window_page_size, page_align),
        _Pool("c4_state", of_c4, _C4_STATE, once, requests),
        _Pool("index_state", of_c4, _INDEX_STATE, once, requests),
        _Pool("c128_state", of_c128, _C128_STATE, once, requests),
        _Pool("index", of_c4, DSA_INDEX_PARTS, whole, c4_rows, C4, page_tokens // C4, memory=index_memory),
    )
    components: list[Component] = []
    for pool in pools:
        if pool.layers:
            components.append(_component(pool, host_layout, _up(base, _BASE_ALIGN) if pool.memory == "dram" else 0))
            base = components[-1].layout.end + pool.page_align  # after the padding of its last page
    return tuple(components)


def _component(pool: _Pool, host_layout: str, base: int) -> Component:
    page_size = max(1, pool.page_size)
    row_bytes = sum(part.row_bytes for part in pool.parts)
    try:
        layout = item_layout(
            host_layout,
            parts=pool.parts,
            layers=pool.layers,
            slots=_up(pool.rows, page_size),
            page_size=page_size,
            item_bytes=_up(page_size * row_bytes, pool.page_align),
            base=base,
        )
    except LocalProtocolError as error:
        raise LocalProtocolError(f"component {pool.name!r}: {error}") from None
    return Component(
        name=pool.name, memory=pool.memory, tokens_per_row=pool.tokens_per_row, span=pool.span, layout=layout
    )


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
