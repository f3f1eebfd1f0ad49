"""Prefill and decode ranks in two processes, or three, driven from a benchmark: batches, faults, bare round trips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pdtransfer.bus.keys import AllowList, KeyPair, generate_pair
from pdtransfer.client.settings import NodeSettings
from pdtransfer.layout.layout import Component
from pdtransfer.limits import Limits

from .processes import Processes, answer
from .rank import DecodeProcess, PrefillProcess, RoomBatch

_ANSWER_SECONDS = 120.0
_rank_answer = partial(answer, who="a rank", within_s=_ANSWER_SECONDS)


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
        prefill_nodes: int = 1,
        decode_nodes: int = 1,
        bystander: bool = False,
        keys: bool = False,
        guest: KeyPair | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Any number of nodes on either side, with these limits. A `bystander` is one more prefill process, for rooms
        that stall. With `keys` nodes use CURVE, and `guest` is one more key that prefill lets in."""
        super().__init__()
        self._next_room, self._echoing = 1, False
        names = [
            *(f"prefill-{number}" for number in range(prefill_nodes)),
            *(f"decode-{number}" for number in range(decode_nodes)),
        ]
        pairs = [generate_pair() if keys else None for _ in names]
        public = {pair.public: name for name, pair in zip((*names, "guest"), (*pairs, guest), strict=True) if pair}
        nodes = [
            NodeSettings(
                node=name, model="bench", weights=b"", limits=limits or Limits(), keys=pair,
                allowed=AllowList(public) if keys else None,
            )
            for name, pair in zip(names, pairs, strict=True)
        ]  # fmt: skip
        self._prefill = self._start(PrefillProcess, source, copy_threads, nodes[:prefill_nodes], transport)
        self.endpoints: list[str] = [
            address if pair is None else f"{pair.public}@{address}"
            for address, pair in zip(_rank_answer(self._prefill), pairs[:prefill_nodes], strict=True)
        ]
        self._decode = self._start(DecodeProcess, target, self.endpoints, nodes[prefill_nodes:], transport)
        if bystander:
            node = NodeSettings(node="bystander", model="bench", weights=b"")
            self._bystander = self._start(PrefillProcess, source, 1, (node,), "auto")
            (self._stalling,) = _rank_answer(self._bystander)

    @property
    def prefill_pid(self) -> int:
        """The process of all prefill nodes."""
        return self._processes[0].pid or 0

    @property
    def decode_pid(self) -> int:
        """The process of all decode nodes."""
        return self._processes[1].pid or 0

    @property
    def bystander_pid(self) -> int:
        """The process of the bystander."""
        return self._processes[2].pid or 0

    def hand_off(self, rooms: int, *, tokens: int, at_once: int = 1) -> Stamps:
        """Moves `rooms` rooms of `tokens` tokens, `at_once` of them under way at any time."""
        return self._stamps(RoomBatch(self._next_room, rooms, tokens, at_once))

    def abort(self, after_s: Sequence[float], *, tokens: int) -> NDArray[np.int64]:
        """Expects rooms, one at a time, and aborts each after this time; nanoseconds from there until its slots are
        free, for those that were not READY before."""
        stamps = self._stamps(RoomBatch(self._next_room, len(after_s), tokens, 1, tuple(after_s)))
        return (stamps.ready - stamps.expected)[stamps.expected > 0]

    def stall(self, rooms: int, *, tokens: int) -> None:
        """Has the bystander hold this many grants, and write nothing."""
        self._bystander.send(("stall", rooms, tokens))
        self._decode.send(("stall", rooms, tokens, self._stalling))
        _rank_answer(self._bystander)

    def memcpy(self, byte_count: int) -> int:
        """Nanoseconds of one memcpy in the prefill process, from the pool into shared memory."""
        self._prefill.send(("memcpy", byte_count))
        return _rank_answer(self._prefill)

    def fragment(self, run: int = 1) -> int:
        """From here on half of the arena is free, in runs of `run` slots; returns how many the longest one has."""
        self._decode.send(("fragment", run))
        return _rank_answer(self._decode)

    def echo(self, trips: int, *, blocking: bool) -> NDArray[np.int64]:
        """Nanoseconds of `trips` bare ROUTER/DEALER round trips between the two processes, one after the other.

        The sockets are blocking ones, or drained by the same two loops that the nodes run on, as their buses are.
        """
        if not self._echoing:
            self._prefill.send(("listen",))
            self._decode.send(("connect", _rank_answer(self._prefill)))
            self._echoing = True
        if blocking:
            self._prefill.send(("echo", trips))
            _rank_answer(self._prefill)
        self._decode.send(("echo", trips, blocking))
        trips_ns = _rank_answer(self._decode)
        if blocking:
            _rank_answer(self._prefill)
        return trips_ns

    def _stamps(self, batch: RoomBatch) -> Stamps:
        self._next_room += batch.rooms
        self._prefill.send(("move", batch))
        self._decode.send(("move", batch))
        expected, ready, decode_cpu_ns = _rank_answer(self._decode)
        if batch.after_s:
            self._prefill.send(("give_up",))
        written, prefill_cpu_ns = _rank_answer(self._prefill)
        return Stamps(
            expected=expected, written=written, ready=ready, prefill_cpu_ns=prefill_cpu_ns, decode_cpu_ns=decode_cpu_ns
        )
