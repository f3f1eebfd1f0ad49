"""The states of layers that keep no KV: linear attention, Mamba, gated delta nets, convolutions. Needs no vLLM.

vLLM packs a layer's states into one page: first what a convolution still needs of the last tokens, channel by channel
or token by token, then the recurrent states, head by head. Tensor parallel ranks share heads and channels out, those of
each section of a convolution apart. So a page is planes of as many equal shares as all of its parts can be cut into.
Engines of other sizes take these as they take heads of KV. What is not known in this detail is one share for each rank,
and a peer must have as many ranks.

An engine that drafts has room in a convolution for one more token for each that it drafts. Behind a prompt only the
first tokens are in use, so engines that draft unequal numbers of tokens exchange these, where tokens lie apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from ..kit.state_parts import StatePart

Sections = tuple[tuple[str, int], ...]  # of a convolution: names and channels
Shape = Sequence[int]

_ROOM_FOR_DRAFTS = {"SHORT_CONV", "MAMBA2", "GDN_ATTN"}  # the kinds whose convolutions are known to have it


def parts_of(
    kind: str, shapes: Sequence[Shape], item_bytes: Sequence[int], *, channels_first: bool, drafts: int = 0
) -> list[StatePart]:
    """The parts of a page, in order. `kind` is vLLM's name of what keeps the state; `shapes` and `item_bytes` are of
    each of the states, of this rank; with `channels_first` a convolution's is [channels, tokens]. The engine drafts
    this many tokens in a step."""
    channels, tokens = (shapes[0] if channels_first else shapes[0][::-1]) if len(shapes[0]) == 2 else (0, 0)
    sections = _sections(kind, channels, shapes[1:])
    if not sections:
        return [StatePart("state", 1, sum(prod(shape) * size for shape, size in zip(shapes, item_bytes, strict=True)))]
    shares = gcd(*(count for _, count in sections), *(shape[0] for shape in shapes[1:]))
    if channels_first:
        sizes = [(name, count * tokens * item_bytes[0]) for name, count in sections]
    else:
        sizes = [(f"{name}{token}", count * item_bytes[0]) for token in range(tokens) for name, count in sections]
    room = drafts * len(sections) if kind in _ROOM_FOR_DRAFTS and not channels_first else 0
    crossing = len(sizes) - room
    sizes += [(f"state{i}", prod(shapes[i]) * item_bytes[i]) for i in range(1, len(shapes))]
    return [
        StatePart(name, shares, byte_count // shares, crosses=not crossing <= index < crossing + room)
        for index, (name, byte_count) in enumerate(sizes)
    ]


def _sections(kind: str, channels: int, states: Sequence[Shape]) -> Sections:
    """Of a convolution that is known; empty for another one."""
    match kind, states:
        case ("SHORT_CONV", []) | ("MAMBA1", [_]):
            return (("x", channels),)
        case "MAMBA2", [(heads, head_size, _)] if (rest := channels - heads * head_size) > 0 and rest % 2 == 0:
            return ("x", heads * head_size), ("b", rest // 2), ("c", rest // 2)
        case "GDN_ATTN", [(heads, size, _)] if (rest := channels - heads * size) > 0 and rest % 2 == 0:
            return ("q", rest // 2), ("k", rest // 2), ("v", heads * size)
        case _:
            return ()
