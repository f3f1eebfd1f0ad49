"""The rows that each rank sends: prefill ranks name what they hold, decode cuts each one's share.

A share is what both hold, layers times heads. Where n ranks hold the same, replica r of them sends it to the decode
ranks whose tp_rank % n is r. So every row has one sender, and every rank sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError
from ..layout import geometry
from ..layout.layout import Component, Layout, Plane, head_keys
from ..layout.mismatch import Range, joined, text_of
from ..layout.pairing import Pairing, pair
from ..wire import Holds, Identity, Ranks

_HEADS, _KIND_BIT = 1 << 17, 33  # head_keys: more heads a layer than any plane can name; the bit at which kinds begin
Replicas = Mapping[str, tuple[int, int]]
"""By component name: the number of this rank among the equal holders, and how many there are."""


def holds_of(components: Sequence[Component], ranks: Ranks, replicas: Replicas) -> tuple[Holds, ...]:
    """What a prefill rank with these pools holds, for its identity. Raises LocalProtocolError for an impossible
    group."""
    names = [component.name for component in components]
    if stray := sorted(replicas.keys() - set(names)):
        raise LocalProtocolError(f"replicas: {stray} are not among the components {names} of this rank")
    holds = tuple(
        Holds(name, *layout.layer_range, *_heads(layout), *replicas.get(name, (0, 1)))
        for name, layout in [(component.name, component.layout) for component in components]
    )
    if wrong := [*_wrong_ranks(ranks), *_wrong_holds(holds, ranks)]:
        raise LocalProtocolError("; ".join(f"{field}: {text}" for field, text in wrong))
    return holds


def wrong_fields(theirs: Identity, ours: Identity, components: Sequence[Component]) -> list[tuple[str, str]]:
    """The impossible claims of a prefill rank's identity as (field, text), as a decode rank of `components` sees
    them."""
    wrong = [*_wrong_ranks(theirs.ranks), *_wrong_holds(theirs.holds, theirs.ranks)]
    layouts = {component.name: component.layout for component in components}
    for index, claim in enumerate(theirs.holds):
        layout = layouts.get(claim.component)
        if layout is None:
            continue
        bounds: list[tuple[str, Range, Range]] = []
        if ours.ranks.pp_size == 1:  # it holds every layer
            bounds.append(("layer", (claim.layer_first, claim.layer_end), layout.layer_range))
        if ours.ranks.tp_size == 1:
            bounds.append(("head", (claim.head_first, claim.head_end), _heads(layout)))
        wrong += [
            (
                f"holds[{index}].{axis}_end",
                f"{axis}s {text_of([claimed])} of {claim.component!r}, which has {text_of([actual])}",
            )
            for axis, claimed, actual in bounds
            if claimed[0] < actual[0] or claimed[1] > actual[1]
        ]
    return wrong


def share_of(components: Sequence[Component], holds: Sequence[Holds], tp_rank: int) -> tuple[Component, ...]:
    """What a source that holds `holds` sends to the decode rank `tp_rank` of `components`, in their order.

    A component of which it sends nothing is left out; one that it sends whole is the same object.
    """
    if not holds:
        return tuple(components)
    holds_of_name = {holding.component: holding for holding in holds}
    shares: list[Component] = []
    for component in components:
        theirs = holds_of_name.get(component.name)
        if theirs is None or tp_rank % theirs.replicas != theirs.replica:
            continue
        layers, heads = (theirs.layer_first, theirs.layer_end), (theirs.head_first, theirs.head_end)
        if _inside(component.layout.layer_range, layers) and _inside(_heads(component.layout), heads):
            shares.append(component)
            continue
        try:
            layout = component.layout.layers(*layers).heads(*heads)
        except LocalProtocolError:
            continue  # The rank holds none of these planes.
        shares.append(msgspec.structs.replace(component, layout=layout))
    return tuple(shares)


def uncovered(components: Sequence[Component], shares: Mapping[str, Sequence[Component]]) -> str:
    """Empty if the shares, by source, hold every plane of `components` exactly once. Else a line that names the
    component, what no source or several sources send, and those sources."""
    for component in components:
        layouts = {
            name: share.layout
            for name, theirs in shares.items()
            for share in theirs
            if (share.name, share.memory) == (component.name, component.memory)
        }
        if list(layouts.values()) == [component.layout]:
            continue
        if text := _uncovered(component, layouts, list(shares)):
            return text
    return ""


def _uncovered(component: Component, layouts: Mapping[str, Layout], names: list[str]) -> str:
    kinds = {kind: index for index, kind in enumerate(sorted({plane.kind for plane in component.layout.planes}))}
    our_keys, their_keys = head_keys(component.layout, kinds), [head_keys(layout, kinds) for layout in layouts.values()]
    cuts = geometry.distinct(np.concatenate([end for keys in (our_keys, *their_keys) for end in keys]))
    ours = _held(cuts, *our_keys)
    sent = np.array([_held(cuts, *keys) for keys in their_keys], dtype=np.bool_).reshape(len(their_keys), len(cuts) - 1)
    wrong = ours & (sent.sum(axis=0) != 1)
    if not wrong.any():
        return ""
    first = int(wrong.argmax())
    alike = wrong & (sent == sent[:, [first]]).all(axis=0) & (cuts[:-1] >> _KIND_BIT == cuts[first] >> _KIND_BIT)
    heads: dict[int, list[Range]] = defaultdict(list)  # by layer, of one kind that is sent as the first wrong one is
    for start, end in zip(cuts[:-1][alike].tolist(), cuts[1:][alike].tolist(), strict=True):
        heads[start // _HEADS % (1 << 16)].append((start % _HEADS, (end - 1) % _HEADS + 1))
    first_heads = next(iter(heads.values()))
    layers = sorted({layer for layer, same in heads.items() if same == first_heads})
    where = f"layers {text_of(joined([(layer, layer + 1) for layer in layers]))} heads {text_of(joined(first_heads))}"
    senders = [name for name, sends in zip(layouts, sent[:, first], strict=True) if sends]
    if senders:
        return f"component {component.name!r} {where}: more than one rank sends it: {', '.join(senders)}"
    return f"component {component.name!r} {where}: no rank of {', '.join(names)} sends it"


def _held(cuts: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True for each [cuts[i], cuts[i + 1]) that lies in one of [starts, ends), which do not overlap."""
    steps = np.zeros(len(cuts), dtype=np.int64)
    np.add.at(steps, np.searchsorted(cuts, starts), 1)
    np.subtract.at(steps, np.searchsorted(cuts, ends), 1)
    return steps.cumsum()[:-1] > 0


def pair_share(source: Layout, target: Layout) -> Pairing:
    """Pairs what `target` holds with the same of `source`, which may hold more layers and heads.

    Raises LayoutMismatchError where the source lacks a part of the target, holds it in another form, or holds another
    kind in one of the target's layers.
    """
    return pair(facing(source, target), target)


def facing(source: Layout, target: Layout) -> Layout:
    """The planes of `source` cut to the target's layers and, in each (kind, layer), to its heads. Where it lacks one of
    these, all of them, so that the error shows the whole difference."""
    layers: set[int] = set()
    heads: dict[tuple[str, int], Range] = {}
    for plane in target.planes:
        first, end = heads.get((plane.kind, plane.layer), (plane.head_start, 0))
        span = min(first, plane.head_start), max(end, plane.head_start + plane.head_count)
        heads[plane.kind, plane.layer] = span
        layers.add(plane.layer)
    if not heads.keys() <= {(plane.kind, plane.layer) for plane in source.planes}:
        return source
    planes: list[Plane] = []
    for plane in source.planes:
        if plane.layer in layers:
            planes += plane.heads(*heads.get((plane.kind, plane.layer), (0, _HEADS)))
    if not planes or tuple(planes) == source.planes:
        return source
    return Layout(tuple(planes), source.page_size, source.slots)


def _heads(layout: Layout) -> Range:
    starts, counts = layout.table[:, 1], layout.table[:, 2]
    return int(starts.min()), int((starts + counts).max())


def _inside(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _wrong_ranks(ranks: Ranks) -> list[tuple[str, str]]:
    axes = {
        "tp": (ranks.tp_rank, ranks.tp_size),
        "pp": (ranks.pp_rank, ranks.pp_size),
        "dp": (ranks.dp_rank, ranks.dp_size),
    }
    return [
        (f"ranks.{axis}_rank", f"{rank}, must be below {axis}_size {size}")
        for axis, (rank, size) in axes.items()
        if rank >= size
    ]


def _wrong_holds(holds: Sequence[Holds], ranks: Ranks) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    names: set[str] = set()
    for index, claim in enumerate(holds):
        where = f"holds[{index}]"
        if claim.component in names:
            wrong.append((f"{where}.component", f"{claim.component!r} twice"))
        names.add(claim.component)
        if claim.layer_first >= claim.layer_end:
            wrong.append((f"{where}.layer_end", f"layers [{claim.layer_first}, {claim.layer_end}), an empty range"))
        if claim.head_first >= claim.head_end:
            wrong.append((f"{where}.head_end", f"heads [{claim.head_first}, {claim.head_end}), an empty range"))
        if claim.replica >= claim.replicas:
            wrong.append((f"{where}.replica", f"{claim.replica}, must be below replicas {claim.replicas}"))
        if claim.replicas > ranks.tp_size:
            wrong.append((f"{where}.replicas", f"{claim.replicas}, must be at most tp_size {ranks.tp_size}"))
    return wrong
