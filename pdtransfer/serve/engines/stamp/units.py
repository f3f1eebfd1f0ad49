"""What the ranks of a worker know together: digests of all heads, and the positions that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b, shake_128

import numpy as np

from ....layout.geometry import Int64s
from ....wire import Ranks
from ...engine_api import Group
from ...sampling import DIGEST_BYTES
from .options import KV, StampOptions, StampShard
from .stamps import Words

Unit = tuple[str, int]  # a head of a component


class Units:
    """The heads of each component that each tensor-parallel rank keeps, in the order of the rank's totals."""

    def __init__(self, options: StampOptions, names: Iterable[str], group: Group) -> None:
        self._group, size = group, group.ranks.tp_size
        heads = [StampShard.of(options, Ranks(tp_rank=rank, tp_size=size)).heads for rank in range(size)]
        names = list(names)
        self._all = [
            [(name, head) for name in names for head in (rank_heads if name == KV else range(1))]
            for rank_heads in heads
        ]
        self._kv = [[unit for unit in units if unit[0] == KV] for units in self._all]

    def together(self, totals: Words, *, kv_alone: bool = False) -> list[bytes]:
        """One digest for each room, the same on every rank, of this rank's `totals` uint64 (rooms, its heads).
        `kv_alone`: of the heads of the KV. Every rank must call this for the same rooms."""
        units = self._kv if kv_alone else self._all
        parts = [totals] if len(units) == 1 else self._group.gather(totals)
        return [_digest(units, [part[index] for part in parts]) for index in range(len(totals))]

    def gather(self, part: Int64s) -> list[Int64s]:
        """The parts of all ranks."""
        return [part] if len(self._all) == 1 else self._group.gather(part)


def picked(digest: bytes, group: int, position: int, top: int) -> Int64s:
    """The positions below `position` that a step reads for a group of layers, ascending. All if they are at most `top`,
    else the newest ones and others by the digest, half and half at most."""
    if position <= top:
        return np.arange(position)
    near = top // 2
    drawn = np.frombuffer(shake_128(digest + group.to_bytes(2, "little")).digest(8 * (top - near)), "<u8")
    others = (drawn % np.uint64(position - near)).astype(np.int64)
    return np.concatenate((np.unique(others), np.arange(position - near, position)))


def _digest(units: Sequence[Sequence[Unit]], parts: Sequence[Words]) -> bytes:
    values: dict[Unit, set[int]] = {}  # replicas that differ change the result
    for rank_units, part in zip(units, parts, strict=True):
        for unit, value in zip(rank_units, part.tolist(), strict=True):
            values.setdefault(unit, set()).add(value)
    ordered = [value for unit in sorted(values) for value in sorted(values[unit])]
    return blake2b(np.array(ordered, "<u8").tobytes(), digest_size=DIGEST_BYTES).digest()
