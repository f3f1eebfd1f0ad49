"""What a writer takes of the card that its pool is of: registered memory, launches that it can wait for and stop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Protocol

import numpy as np

from ..engine_api import Spans
from ..errors import WorldError
from ..handoff.ready_gate import Gate
from ..kernels import lanes
from ..kernels import push as pushing
from ..kernels.cancel import Cancel
from ..kernels.card import Card, card
from ..kernels.event import Event
from ..kernels.kv_copy import checked, kv_copy, prepared
from ..kernels.lanes import Staging
from ..kernels.pools import PinnedCancel, Pool, Progress, Slots, State
from ..kernels.registered import Registrar
from ..layout.geometry import Int64s
from ..layout.layout import Layout
from ..memory.cuda_ipc import Handle, Opened

RUN_BYTES_MIN = 1 << 20  # of target slots, on average: where they are shorter nothing is planned
PEER_BLOCKS = 16  # of a copy between cards, or within one
IN_FLIGHT_MAX = 2  # one runs, one waits behind it: more would only delay who cancels


class Lane(Protocol):
    """What pushing takes of a card. All but `word`, `reuse` and `wake` are called in one thread."""

    def word(self) -> Cancel:
        """A cancel word that launches look at, not set, for one write at a time."""
        ...

    def reuse(self, word: Cancel) -> None:
        """No launch looks at it any more."""
        ...

    def prepare(
        self, place: int, target: Pool, source: Pool, target_slots: range | Int64s, source_slots: Slots, rows: int,
        cancel: Cancel, *, spare: bool,
    ) -> Callable[[], None]:  # fmt: skip
        """Prepares a copy as launch `place`, one of IN_FLIGHT_MAX, in the stead of what was prepared there and not
        queued. What it returns queues it; where that raises, the copy may have been queued. `spare`: there is time, and
        the model needs the card more."""
        ...

    def wait(self, place: int | None, gates: Sequence[Gate], until_ns: int) -> bool:
        """Sleeps until launch `place` has ended: True; or before that one of `gates`, which wait for CUDA events, has
        got on, or `wake` was called since the last time, or it is `until_ns` by CLOCK_MONOTONIC. WorldError where none
        can say of the launch."""
        ...

    def look(self, gate: Gate) -> None:
        """Sees to it that a gate knows how far it has got."""
        ...

    def wake(self) -> None:
        """Ends a `wait`, from any thread."""
        ...

    def ended(self, place: int) -> tuple[State, int]:
        """How launch `place`, which has been waited for, has ended, and how many rows it left out."""
        ...

    def fetch(self, source: Pool, layout: Layout, slots: Slots, rows: int) -> int:
        """Copies rows of the card's to rows 0 to rows - 1 of `layout`, and waits: the address of that in this process,
        good until the next fetch. WorldError where it fails."""
        ...

    def drain(self) -> None:
        """Sleeps until all that was ever queued has ended. WorldError where none can say."""
        ...


class CardLane:
    """Streams of a card, its launches' words and events.

    What a ring may carry has a stream a place, so that it gathers while the launch before drains. The kernel's launches
    share one: two at once would hold twice the multiprocessors.
    """

    def __init__(self, here: Card) -> None:
        self._card, self._streams = here, [here.stream() for _ in range(IN_FLIGHT_MAX)]
        self._events = [Event(here) for _ in range(IN_FLIGHT_MAX)]
        self._progress = [Progress(here.ordinal) for _ in range(IN_FLIGHT_MAX)]
        self._lists = [Staging(here.event()) for _ in range(IN_FLIGHT_MAX)]
        self._called = ctypes.c_uint32()
        self._words: list[PinnedCancel] = []  # that are free: pinned memory is never given back
        self._fetched = (0, 0, 0)  # bytes that fetch may use, their address here and on the card

    def word(self) -> Cancel:
        return self._words.pop() if self._words else PinnedCancel(self._card.ordinal)

    def reuse(self, word: Cancel) -> None:
        assert isinstance(word, PinnedCancel)
        word.clear()
        self._words.append(word)

    def prepare(
        self, place: int, target: Pool, source: Pool, target_slots: range | Int64s, source_slots: Slots, rows: int,
        cancel: Cancel, *, spare: bool,
    ) -> Callable[[], None]:  # fmt: skip
        progress, lists, stream = self._progress[place], self._lists[place], self._streams[0]
        self._card.enter()
        if not target.host:  # a card's memory: there is no bus to fill, and the model needs the multiprocessors
            queue = prepared(
                target, source, checked(target, source, target_slots, source_slots, rows), rows,
                progress=progress, cancel=cancel, blocks=PEER_BLOCKS, stream=stream, lists=lists,
            )  # fmt: skip
        else:
            byte_count = rows * target.layout.row_bytes
            ringed = byte_count >= pushing.PLANNED_BYTES_MIN and in_runs(target_slots, byte_count)
            stream = self._streams[place if ringed else 0]
            queue = pushing.prepared(
                target, source, target_slots, source_slots, rows,
                backend="spare" if spare else "auto" if ringed else "kernel",
                progress=progress, cancel=cancel, stream=stream, lists=lists,
            )  # fmt: skip

        def go() -> None:
            queue()
            self._events[place].record(stream)

        return go

    def wait(self, place: int | None, gates: Sequence[Gate], until_ns: int) -> bool:
        flying = [] if place is None else [self._events[place].cuda_event]
        asked = [(gate, found) for gate in gates if (found := gate.next) is not None]
        # Gates first: where launches end as fast as they are made, nobody else would hear of one.
        at, failed = lanes.wait_any(self._card, [*(event for _, (_, event) in asked), *flying], self._called, until_ns)
        self._called.value = 0
        if 0 <= at < len(asked):
            gate, (number, _) = asked[at]
            _tell(gate, number, failed)
            self.look(gate)
            return False
        if failed:
            raise WorldError(failed)
        return at >= 0

    def look(self, gate: Gate) -> None:
        while (found := gate.next) is not None and not gate.broken:
            at, failed = lanes.wait_any(self._card, [found[1]], None)
            if at < 0:
                return
            _tell(gate, found[0], failed)

    def wake(self) -> None:
        self._called.value = 1

    def ended(self, place: int) -> tuple[State, int]:
        return self._progress[place].state, self._progress[place].refused

    def fetch(self, source: Pool, layout: Layout, slots: Slots, rows: int) -> int:
        if self._fetched[0] < layout.end:
            self._fetched = (layout.end, *self._card.pinned(layout.end))
        _, here, there = self._fetched
        target = Pool(layout=layout, address=there, card=self._card.ordinal, host=True)
        kv_copy(target, source, range(rows), slots, rows, stream=self._streams[0])
        self._card.synchronise(self._streams[0])
        return here

    def drain(self) -> None:
        self._card.finish()  # a ring's own streams as well


def _tell(gate: Gate, number: int, failed: str) -> None:
    if failed:
        gate.broken = failed
    else:
        gate.fired(number, monotonic_ns())


def in_runs(slots: range | Int64s, byte_count: int) -> bool:
    """Whether so many bytes lie in runs of slots that are long enough for a ring to be looked into."""
    runs = 1 if isinstance(slots, range) else 1 + int(np.count_nonzero(np.diff(slots) != 1))
    return byte_count >= RUN_BYTES_MIN * runs


class Exported(Protocol):
    """Memory of another process that a card reaches at `address`, until `close`, before which all writes have ended."""

    @property
    def address(self) -> int: ...

    @property
    def byte_count(self) -> int: ...

    def close(self) -> None:
        """WorldError where the card does not let go of it."""
        ...


class WriterCard(Registrar, Protocol):
    """A card, as a writer sees it. Called in worker threads; none of it waits for what the card computes."""

    @property
    def ordinal(self) -> int: ...

    @property
    def spans(self) -> Spans | None:
        """What hears of each launch, if anything does."""
        ...

    def open(self, handle: bytes) -> Exported:
        """Another process's memory of a card, for this one to write. TransportError where it cannot be reached."""
        ...

    def prepare(self) -> None:
        """Does now what the first launch would have to wait for; WorldError where there can be none."""
        ...

    def lane(self) -> Lane:
        """A fresh one, for one thread."""
        ...


class PoolCard:
    """Card `ordinal` of this host, a WriterCard. Raises WorldError where there is none."""

    def __init__(self, ordinal: int, spans: Spans | None = None) -> None:
        self.ordinal, self._card, self.spans = ordinal, card(ordinal), spans

    def host_register(self, address: int, byte_count: int) -> int:
        return self._card.host_register(address, byte_count)

    def host_unregister(self, address: int) -> None:
        self._card.host_unregister(address)

    def open(self, handle: bytes) -> Exported:
        return Opened(Handle.unpack(handle), on=self.ordinal)

    def prepare(self) -> None:
        self._card.load("kv_copy", "kv_copy")  # may compile
        lanes.native()

    def lane(self) -> Lane:
        return CardLane(self._card)
