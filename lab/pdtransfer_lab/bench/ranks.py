"""Prefill and decode ranks in two processes, driven from a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pdtransfer.client.settings import NodeSettings
from pdtransfer.layout.layout import Component

from .processes import Processes, answer
from .rank import DecodeProcess, Fragment, Memcpy, PrefillProcess, Rank, RoomBatch

_ANSWER_SECONDS = 120.0
rank_answer = partial(answer, who="a rank", within_s=_ANSWER_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stamps:
    """When each room of a batch got somewhere: CLOCK_MONOTONIC in ns, int64 (rooms,) each, in the order of rooms."""

    expected: NDArray[np.int64]
    written: NDArray[np.int64]  # its last cell
    ready: NDArray[np.int64]
    prefill_cpu_ns: int  # of all threads, over the whole batch
    decode_cpu_ns: int

    @property
    def seconds(self) -> float:
        """From the first room expected to the last one READY."""
        return float(self.ready.max() - self.expected.min()) / 1e9


class RankPair(Processes):
    """Both processes: nodes on a loop each, no engine. `source` is what prefill's pool holds, `target` an arena.

    Rooms go to each side's nodes in turn. A failure in one of the processes is raised here as WorldError.
    """

    def __init__(
        self,
        source: Component,
        target: Component,
        *,
        copy_threads: int = 2,
        transport: str = "auto",
        prefill: Sequence[NodeSettings] = (),
        decode: Sequence[NodeSettings] = (),
        kinds: tuple[type[Rank], type[Rank]] = (PrefillProcess, DecodeProcess),
        options: Sequence[object] = (),
    ) -> None:
        """`prefill` and `decode` are the nodes, by default one each; `kinds` are those of the processes, and
        `options` decode's further arguments."""
        super().__init__()
        self._next_room = 1
        prefill = prefill or (node_settings("prefill-0"),)
        self._prefill = self._start(kinds[0], source, copy_threads, prefill, transport)
        bound = rank_answer(self._prefill)
        self.endpoints: list[str] = [
            address if settings.keys is None else f"{settings.keys.public}@{address}"
            for address, settings in zip(bound, prefill, strict=True)
        ]
        decode = decode or (node_settings("decode-0"),)
        self._decode = self._start(kinds[1], target, self.endpoints, decode, transport, *options)

    def hand_off(self, rooms: int, *, tokens: int, at_once: int = 1) -> Stamps:
        """Moves `rooms` rooms of `tokens` tokens, `at_once` of them under way at any time."""
        batch = self._batch(rooms, tokens, at_once)
        return self._stamps(batch, batch)

    def memcpy(self, byte_count: int) -> int:
        """Nanoseconds of one memcpy in the prefill process, from the pool into shared memory."""
        self._prefill.send(Memcpy(byte_count))
        return rank_answer(self._prefill)

    def fragment(self, run: int = 1) -> int:
        """From here on half of the arena is free, in runs of `run` slots; returns how many the longest one has."""
        self._decode.send(Fragment(run))
        return rank_answer(self._decode)

    def _batch(self, rooms: int, tokens: int, at_once: int) -> RoomBatch:
        first, self._next_room = self._next_room, self._next_room + rooms
        return RoomBatch(first, rooms, tokens, at_once)

    def _stamps(self, prefill: object, decode: object, *, then: object = None) -> Stamps:
        """Of a batch that these orders begin; prefill gets the order `then` once decode has ended."""
        self._prefill.send(prefill)
        self._decode.send(decode)
        expected, ready, decode_cpu_ns = rank_answer(self._decode)
        if then is not None:
            self._prefill.send(then)
        written, prefill_cpu_ns = rank_answer(self._prefill)
        return Stamps(
            expected=expected,
            written=written,
            ready=ready,
            prefill_cpu_ns=prefill_cpu_ns,
            decode_cpu_ns=decode_cpu_ns,
        )


def node_settings(name: str) -> NodeSettings:
    """Of a node without keys."""
    return NodeSettings(node=name, model="bench", weights=b"")
