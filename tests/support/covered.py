"""Whether the ranks of a prefill engine have all that those of a decode engine need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdtransfer import Component
from pdtransfer.handoff.component_variants import used_with
from pdtransfer.handoff.sharing import holds_of, share_of, uncovered
from pdtransfer.wire import Ranks


def check_covered(
    made: Callable[[int, int], Any], prefill: int, decode: int
) -> list[tuple[Any, dict[int, tuple[Component, ...]]]]:
    """Asserts that each rank of decode gets each of its heads and layers from one rank of prefill. `made(rank, size)`
    has an adapter's pools. Returns those of decode, each with what it gets of every rank of prefill."""
    sources = [made(rank, prefill) for rank in range(prefill)]
    holds = [holds_of(source.components, Ranks(rank, prefill), source.replicas) for rank, source in enumerate(sources)]
    found: list[tuple[Any, dict[int, tuple[Component, ...]]]] = []
    for rank in range(decode):
        pools = made(rank, decode)
        names = {held.component for held in holds[0]}
        target = used_with(pools.components, names, getattr(pools, "stand_ins", {}))
        shares = {number: share_of(target, held, rank) for number, held in enumerate(holds)}
        assert uncovered(target, {str(number): share for number, share in shares.items()}) == ""
        found.append((pools, shares))
    return found
