"""The differences of two layouts for people: a line names a field and both values, and layers that share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..limits import FIELDS_MAX

_LINE_LENGTH_MAX = 500  # below limits.TEXT_LENGTH_MAX: a Reject carries every line whole
_VALUE_LENGTH_MAX = 200  # two fit a line


class Held(NamedTuple):
    """The content of one plane: heads [head_start, head_end) of one kind in one layer."""

    kind: str
    layer: int
    head_start: int
    head_end: int
    dtype: str
    head_bytes: int


Range = tuple[int, int]
_ByLayer = dict[tuple[str, int], list[Held]]
_Difference = tuple[str, str, str]  # field, source's value, target's value


def differences(source: Iterable[Held], target: Iterable[Held]) -> list[str]:
    """Each field that differs, with both values, in at most FIELDS_MAX lines of 500 characters; empty if none does.

    On either side no two items hold the same head of one (kind, layer).
    """
    sides = _by_layer(source), _by_layer(target)
    lines = [*_kind_and_layer_lines(*sides), *_plane_lines(*sides)]
    if len(lines) > FIELDS_MAX:
        lines[FIELDS_MAX - 1 :] = [f"and {len(lines) - FIELDS_MAX + 1} more differences"]
    return [line[:_LINE_LENGTH_MAX] for line in lines]


def _by_layer(planes: Iterable[Held]) -> _ByLayer:
    by_layer: _ByLayer = defaultdict(list)
    for plane in sorted(planes):
        by_layer[plane.kind, plane.layer].append(plane)
    return by_layer


def _kind_and_layer_lines(source: _ByLayer, target: _ByLayer) -> Iterator[str]:
    source_layers, target_layers = _layers_by_kind(source), _layers_by_kind(target)
    if source_layers.keys() != target_layers.keys():
        yield _line("kinds", ", ".join(source_layers), ", ".join(target_layers))
    common = [kind for kind in source_layers if kind in target_layers]
    kinds: dict[_Difference, list[str]] = defaultdict(list)
    for kind in common:
        if source_layers[kind] != target_layers[kind]:
            kinds["layers", text_of(source_layers[kind]), text_of(target_layers[kind])].append(kind)
    for difference, differing in kinds.items():
        where = "" if differing == common else f"kind {_short(', '.join(differing))} "
        yield where + _line(*difference)


def _layers_by_kind(planes: _ByLayer) -> dict[str, list[Range]]:
    layers: dict[str, list[Range]] = defaultdict(list)
    for kind, layer in planes:
        layers[kind].append((layer, layer + 1))
    return {kind: joined(ranges) for kind, ranges in layers.items()}


def _plane_lines(source: _ByLayer, target: _ByLayer) -> Iterator[str]:
    layers: dict[tuple[str, _Difference], list[Range]] = defaultdict(list)
    for (kind, layer), planes in source.items():
        if (kind, layer) in target:
            for difference in _differences_at(planes, target[kind, layer]):
                layers[kind, difference].append((layer, layer + 1))
    for (kind, difference), ranges in layers.items():
        noun = "layer" if len(ranges) == 1 else "layers"
        yield f"kind {kind} {noun} {_short(text_of(joined(ranges)))} {_line(*difference)}"


def _differences_at(source: list[Held], target: list[Held]) -> Iterator[_Difference]:
    """The differences in one (kind, layer), each once."""
    source_heads, target_heads = (
        joined([(plane.head_start, plane.head_end) for plane in side]) for side in (source, target)
    )
    if source_heads != target_heads:
        yield "heads", text_of(source_heads), text_of(target_heads)
    bytes_field = "row_bytes" if source_heads == target_heads == [(0, 1)] else "head_bytes"
    differing: dict[_Difference, None] = {}
    ours, theirs = 0, 0
    while ours < len(source) and theirs < len(target):
        our_plane, their_plane = source[ours], target[theirs]
        if max(our_plane.head_start, their_plane.head_start) < min(our_plane.head_end, their_plane.head_end):
            if our_plane.dtype != their_plane.dtype:
                differing["dtype", our_plane.dtype, their_plane.dtype] = None
            if our_plane.head_bytes != their_plane.head_bytes:
                differing[bytes_field, str(our_plane.head_bytes), str(their_plane.head_bytes)] = None
        end = min(our_plane.head_end, their_plane.head_end)
        ours, theirs = ours + (our_plane.head_end == end), theirs + (their_plane.head_end == end)
    yield from differing


def joined(ranges: list[Range]) -> list[Range]:
    """Ascending ranges [first, end) with neighbours joined."""
    joined = ranges[:1]
    for first, end in ranges[1:]:
        if joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined


def text_of(ranges: list[Range]) -> str:
    """The ranges of joined() for people, as in "0..3, 7"."""
    return ", ".join(str(first) if first == end - 1 else f"{first}..{end - 1}" for first, end in ranges)


def _line(field: str, source: str, target: str) -> str:
    return f"{field}: source {_short(source)}, target {_short(target)}"


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_LENGTH_MAX else text[: _VALUE_LENGTH_MAX - 3] + "..."
