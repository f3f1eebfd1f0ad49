"""Ranks in two processes, or three, as the package's benchmarks have them, with keys, faults, and bare round trips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pdtransfer.bus.keys import AllowList, KeyPair, generate_pair
from pdtransfer.client.settings import NodeSettings
from pdtransfer.layout.layout import Component
from pdtransfer.limits import Limits

from .faulty_rank import Aborts, Connect, Echoes, FaultyDecodeRank, FaultyPrefillRank, GiveUp, Listen, Share, Stall
from .ranks import RankPair, Stamps, node_settings, rank_answer


class FaultyRankPair(RankPair):
    """Any number of nodes on either side. A `bystander` is one more prefill process, for rooms that stall. With `keys`
    they use CURVE, and `guest` is one more key that prefill lets in. With `verify` decode checks what landed.
    `limits` are those of all nodes."""

    def __init__(
        self,
        source: Component,
        target: Component,
        *,
        copy_threads: int = 2,
        prefill_nodes: int = 1,
        decode_nodes: int = 1,
        bystander: bool = False,
        keys: bool = False,
        guest: KeyPair | None = None,
        verify: bool = False,
        limits: Limits | None = None,
    ) -> None:
        pairs = {
            f"{role}-{number}": generate_pair() if keys else None
            for role, count in (("prefill", prefill_nodes), ("decode", decode_nodes))
            for number in range(count)
        }
        nodes = [replace(setting, limits=limits or setting.limits) for setting in _settings(pairs, guest)]
        super().__init__(
            source,
            target,
            copy_threads=copy_threads,
            prefill=nodes[:prefill_nodes],
            decode=nodes[prefill_nodes:],
            kinds=(FaultyPrefillRank, FaultyDecodeRank),
            options=(verify,),
        )
        self._echoing = False
        if bystander:
            self._bystander = self._start(FaultyPrefillRank, source, 1, (node_settings("bystander"),), "auto")
            (self._stalling,) = rank_answer(self._bystander)

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

    def stall(self, rooms: int, *, tokens: int) -> None:
        """Has the bystander hold this many grants, and write nothing."""
        order = Stall(rooms, tokens, self._stalling)
        self._bystander.send(order)
        self._decode.send(order)
        rank_answer(self._bystander)

    def abort(self, after_s: Sequence[float], *, tokens: int) -> NDArray[np.int64]:
        """Expects rooms, one at a time, and aborts each after this time; nanoseconds from there until its slots are
        free, for those that were not READY before."""
        order = Aborts(self._batch(len(after_s), tokens, 1), tuple(after_s))
        stamps = self._stamps(order, order, then=GiveUp())
        return (stamps.ready - stamps.expected)[stamps.expected > 0]

    def hand_off_prompts(self, rooms: int, *, tokens: int, shared: int) -> Stamps:
        """As `hand_off`, one at a time, of prompts that share their first `shared` tokens; -1: decode keeps none."""
        order = Share(self._batch(rooms, tokens, 1), shared)
        return self._stamps(order, order)

    def echo(self, trips: int, *, blocking: bool) -> NDArray[np.int64]:
        """Nanoseconds of `trips` bare ROUTER/DEALER round trips between the two processes, one after the other.

        The sockets are blocking ones, or drained by the same two loops that the nodes run on, as their buses are.
        """
        if not self._echoing:
            self._prefill.send(Listen())
            self._decode.send(Connect(rank_answer(self._prefill)))
            self._echoing = True
        order = Echoes(trips, blocking)
        if blocking:
            self._prefill.send(order)
            rank_answer(self._prefill)
        self._decode.send(order)
        trips_ns = rank_answer(self._decode)
        if blocking:
            rank_answer(self._prefill)
        return trips_ns


def _settings(pairs: dict[str, KeyPair | None], guest: KeyPair | None) -> list[NodeSettings]:
    names = {pair.public: name for name, pair in {**pairs, "guest": guest}.items() if pair is not None}
    plain = {name: node_settings(name) for name in pairs}
    if not any(pairs.values()):
        return list(plain.values())
    return [replace(settings, keys=pairs[name], allowed=AllowList(names)) for name, settings in plain.items()]
