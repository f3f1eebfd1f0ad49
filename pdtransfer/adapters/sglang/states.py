"""The states of linear attention and of convolutions, as tensor parallel ranks of SGLang share them out.

Each buffer has an item a request. Ranks share one axis of an item out: heads, or the channels of a convolution, whose
sections are shared out apart. SGLang's KVArgs name the axis of each buffer. They name the sections of some models;
those of others follow from the model's configuration. So an item is parts of as many equal shares as all items can be
cut into. Engines of other sizes take these as they take heads of KV. What is not known in this detail is one share for
each rank, and a peer must have as many ranks.

A pipeline stage may have no such layer. Then it has no component of them, and what peers compare is that of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from math import gcd
from typing import Any

from ..kit.kinds import StatePart, described

LINEAR = "mamba"  # SGLang's name for these states
Sections = tuple[int, ...]  # the channels of each section of a convolution, of all ranks together
_LISTS = (  # of SGLang's KVArgs, with an item for each state
    "state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_dim_per_tensor",
    "state_conv_shard_groups", "state_slice_outer_counts", "state_layer_ids",
)  # fmt: skip

# Models of Mamba 2: their convolutions have what enters the state, and what writes it and reads it.
_MAMBA2 = {"falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "nemotron_h_puzzle"}


def conv_sections(config: Any) -> Sections | None:
    """The sections of the convolutions of a model, by its configuration; none without convolutions, None where they
    are not known."""
    shape: Any = getattr(getattr(config, "mamba2_cache_params", None), "shape", None)
    if not hasattr(shape, "conv_dim") or len(shape.conv) != 1:
        return None
    entering, rest = shape.intermediate_size, shape.conv_dim - shape.intermediate_size
    if not rest:
        return (entering,) if entering else ()
    return (entering, rest // 2, rest // 2) if config.model_type in _MAMBA2 else None


def item_parts(args: Any, index: int, tp_size: int, of_model: Sections | None) -> list[list[StatePart]]:
    """The parts of each buffer's item, of this rank. `args` are SGLang's KVArgs, and `index` the state's there;
    `of_model` are the sections of convolutions whose KVArgs name none."""
    item_bytes = args.state_item_lens[index]
    whole = [[StatePart("whole", 1, count)] for count in item_bytes]
    axes, rows, named = (
        _of(args, name, index)
        for name in ("state_dim_per_tensor", "state_slice_outer_counts", "state_conv_shard_groups")
    )
    if len(axes) != len(item_bytes) or 0 in axes:  # 0 is an item that all ranks have
        return whole
    rows = rows or [1] * len(axes)
    if not any(named):
        if of_model is None or (of_model and sum(of_model) not in [axis * tp_size for axis in axes]):
            return whole
        named = [of_model if sum(of_model) == axis * tp_size else None for axis in axes]
    sections = [groups or (axis * tp_size,) for axis, groups in zip(axes, named, strict=True)]
    shares, rest = divmod(gcd(*chain(*sections)), tp_size)
    if rest or any(sum(of_item) != axis * tp_size for of_item, axis in zip(sections, axes, strict=True)):
        return whole
    divided = [
        [
            StatePart(str(number), shares, count // tp_size * (item // (axis * outer)) // shares)
            for number, count in enumerate(list(of_item) * outer)
        ]
        for item, axis, outer, of_item in zip(item_bytes, axes, rows, sections, strict=True)
    ]
    counts = [sum(part.shares * part.share_bytes for part in parts) for parts in divided]
    return divided if counts == list(item_bytes) else whole


def drop_empty_states(args: Any) -> None:
    """Takes out of SGLang's KVArgs the states that no layer of this pipeline stage has: SGLang lists them without
    buffers. It then names no indices of them either."""
    kept = [index for index, addresses in enumerate(args.state_data_ptrs) if addresses]
    for name in _LISTS:
        if values := getattr(args, name, None):
            values[:] = [values[index] for index in kept]


def states_fact(
    args: Any, tp_size: int, of_model: Sections | None, of_all_stages: Callable[[list[str]], Iterable[list[str]]]
) -> dict[str, str]:
    """The fact that names the items, for `item_parts`; none of a model without these states. `of_all_stages`
    has what each pipeline stage passes to it."""
    of_this_stage = [
        described(parts, tp_size)
        for index, kind in enumerate(args.state_types)
        if str(getattr(kind, "value", kind)) == LINEAR
        for parts in item_parts(args, index, tp_size, of_model)
    ]
    texts = sorted(set(chain(*of_all_stages(of_this_stage))))
    return {"states": ", ".join(texts)} if texts else {}


def _of(args: Any, name: str, index: int) -> list[Any]:
    """A list of one state in SGLang's KVArgs; empty in versions that have none."""
    lists: list[Any] = getattr(args, name, None) or []
    return list(lists[index]) if index < len(lists) else []
