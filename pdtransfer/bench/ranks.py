"""Prefill and decode ranks in two processes, seen from the bench that drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..bus.keys import AllowList, KeyPair, generate_pair
from ..layout.layout import Component
from ..node import NodeSettings
from ..transports.network import Transport
from .orders import Batch, Echoes, Fragment, GiveUp, Memcpy, Stall, answer, begun
from .rank import run_decode, run_prefill

_ANSWER_SECONDS = 120.0
_answer = partial(answer, who="a rank", within_s=_ANSWER_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
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


class Ranks:
    """Both processes: nodes on a loop each, no engine. `source` is what prefill's pool holds, `target` an arena.

    A room goes to each side's nodes in turn. A `bystander` is one more prefill process, for rooms that stall. With
    `keys` they talk over CURVE, and `guest` is one more key that prefill lets in. Whatever fails in one of them is
    raised here as WorldError.
    """

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
        transport: Transport = "auto",
    ) -> None:
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        sources = [(f"prefill-{n}", generate_pair() if keys else None) for n in range(prefill_nodes)]
        targets = [(f"decode-{n}", generate_pair() if keys else None) for n in range(decode_nodes)]
        known = _allowed([*sources, *targets, ("guest", guest)]) if keys else None
        self._prefill = self._start(run_prefill, source, copy_threads, _settings(sources, known), transport)
        bound, bare = _answer(self._prefill)
        self.endpoints: list[str] = [
            each if pair is None else f"{pair.public}@{each}" for each, (_, pair) in zip(bound, sources, strict=True)
        ]
        self._decode = self._start(
            run_decode, target, self.endpoints, bare, _settings(targets, known), verify, transport
        )
        self._next_room = 1
        if bystander:
            self._bystander = self._start(run_prefill, source, 1, _settings([("bystander", None)], None), transport)
            (self._stalling,), _ = _answer(self._bystander)

    @property
    def prefill_pid(self) -> int:
        """The process of all prefill nodes."""
        return self._processes[0].pid or 0

    @property
    def decode_pid(self) -> int:
        """The process of all decode nodes."""
        return self._processes[1].pid or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends them
        for process in self._processes:
            process.join(10.0)
            process.kill()

    @property
    def bystander_pid(self) -> int:
        """The process of the bystander."""
        return self._processes[2].pid or 0

    def stall(self, rooms: int, *, tokens: int) -> None:
        """Has the bystander hold so many grants, and write nothing."""
        order = Stall(rooms, tokens, self._stalling)
        self._bystander.send(order)
        self._decode.send(order)
        _answer(self._bystander)

    def abort(self, abort_s: Sequence[float], *, tokens: int) -> NDArray[np.int64]:
        """Expects rooms, one at a time, and aborts each after so long; nanoseconds from there until its slots are free,
        for those that were not READY before."""
        stamps = self._hand_off(len(abort_s), tokens, 1, tuple(abort_s))
        return (stamps.ready - stamps.expected)[stamps.expected > 0]

    def hand_off(self, rooms: int, *, tokens: int, at_once: int = 1, shared: int = -1) -> Stamps:
        """Moves `rooms` rooms of `tokens` tokens, `at_once` of them under way at any time.

        Of each prompt `shared` tokens are those of every other; -1: decode knows none, and keeps nothing.
        """
        return self._hand_off(rooms, tokens, at_once, (), shared)

    def _hand_off(self, rooms: int, tokens: int, at_once: int, abort_s: tuple[float, ...], shared: int = -1) -> Stamps:
        batch = Batch(self._next_room, rooms, tokens, at_once, abort_s, shared)
        self._next_room += rooms
        self._prefill.send(batch)
        self._decode.send(batch)
        expected, ready, decode_cpu_ns = _answer(self._decode)
        if abort_s:
            self._prefill.send(GiveUp())
        written, prefill_cpu_ns = _answer(self._prefill)
        return Stamps(
            expected=expected,
            written=written,
            ready=ready,
            prefill_cpu_ns=prefill_cpu_ns,
            decode_cpu_ns=decode_cpu_ns,
        )

    def echo(self, trips: int, *, blocking: bool) -> NDArray[np.int64]:
        """Nanoseconds of `trips` bare ROUTER/DEALER round trips between the two processes, one after the other.

        The sockets are blocking ones, or drained by the same two loops that the nodes run on, as their buses are.
        """
        order = Echoes(trips, blocking)
        if blocking:
            self._prefill.send(order)
            _answer(self._prefill)
        self._decode.send(order)
        trips_ns = _answer(self._decode)
        if blocking:
            _answer(self._prefill)
        return trips_ns

    def memcpy(self, byte_count: int) -> int:
        """Nanoseconds of one memcpy in the prefill process, from the pool into shared memory."""
        self._prefill.send(Memcpy(byte_count))
        return _answer(self._prefill)

    def fragment(self, run: int = 1) -> int:
        """From here on half of the arena is free, in runs of `run` slots; returns how many the longest one has."""
        self._decode.send(Fragment(run))
        return _answer(self._decode)

    def _start(self, run: Callable[..., None], *arguments: object) -> Connection:
        process, ours = begun(run, *arguments)
        self._processes.append(process)
        self._pipes.append(ours)
        return ours


def _settings(nodes: Sequence[tuple[str, KeyPair | None]], allowed: AllowList | None) -> tuple[NodeSettings, ...]:
    return tuple(
        NodeSettings(node=name, model="bench", weights=b"", keys=pair, allowed=allowed) for name, pair in nodes
    )


def _allowed(nodes: Sequence[tuple[str, KeyPair | None]]) -> AllowList:
    return AllowList({pair.public: name for name, pair in nodes if pair is not None})
