"""Writes whose source is a GPU's memory: launches, at most two in flight, in turn between grants.

The thread here waits for a write's gate, asleep. No launch is queued before its gate is open, but it is prepared by
then. A launch looks at its write's cancel word between rows, or between slots where it goes by a ring. A write has
ended only when the GPU has passed the event behind its last launch. Where the GPU cannot report that any more, the
outcome is unknown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from ..errors import PDTransferError, WorldError
from ..handoff.effects import Outcome, Write
from ..handoff.events import Spans
from ..handoff.ready_gate import ReadyGate
from ..kernels import checksum_copy
from ..kernels.pools import PinnedCancel, Pool, State
from ..kernels.ring.lanes import NEVER_NS
from ..layout.checksum import Lines, lines_of, runs_of
from ..layout.geometry import Int64s
from ..layout.layout import Layout, Plane
from ..threads import in_thread
from .copier import CANCELLED, attempt
from .gpu_launcher import IN_FLIGHT_MAX, GpuLauncher
from .turns import Turns
from .works import OpenWorks, Turn, Work

PIECE_BYTES = 16 << 20  # of one launch to the host: some 0.3 ms of the bus
PEER_PIECE_BYTES = 128 << 20  # of one to another GPU: no shorter than the CPU takes to make the next
WITHIN_PIECE_BYTES = 1 << 30  # of one within a GPU: it takes less than a millisecond
HINT_NS = 500_000  # between two hints of one write: a thread that has slept for a millisecond is slow to wake
HINTS_MAX = 32  # reports of one write: an engine may have a single event for all that it computes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged:
    """Where rows of a GPU's `pool` are put side by side, to be summed in this process: `lines` are of `layout`."""

    pool: Pool
    layout: Layout
    lines: Lines

    @classmethod
    def of(cls, component: str, pool: Pool) -> Staged:
        """For all planes of `pool`."""
        planes, base, row = list[Plane](), 0, pool.layout.row_bytes
        for plane in pool.layout.planes:
            planes.append(msgspec.structs.replace(plane, base=base, page_stride=row, row_stride=row))
            base += plane.row_bytes
        layout = Layout(tuple(planes), 1, max(1, PIECE_BYTES // row))
        return cls(pool, layout, lines_of(component, layout))


@dataclass(slots=True, eq=False, kw_only=True)
class GpuWrite(Work):
    """One write from a pool of a GPU to registered memory."""

    turn: Turn = field(init=False)
    order: Write
    source: Pool
    target: Pool
    then: Callable[[], object] = lambda: None  # in the writer's thread, once all has landed; what it raises fails it
    staged: Staged | None = None  # where a checksum is wanted
    apart: bool = False  # its target is memory of another GPU
    # For the GpuWriter alone:
    rows_taken: int = 0
    running: int = 0
    spare: bool = False
    hints: int = 0  # that were given
    woken: Callable[[], None] = lambda: None
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the next two
    stopped: bool = False
    word: PinnedCancel | None = None  # that its launches look at

    def __post_init__(self) -> None:
        self.turn = self.order.session, self.order.grant

    @property
    def row_bytes(self) -> int:
        """Of all its planes."""
        return self.target.layout.row_bytes

    def stop(self) -> None:
        """Never waits for the GPU."""
        with self.lock:
            self.stopped = True
            if self.word is not None:
                self.word.set()
        self.woken()

    @property
    def gate(self) -> ReadyGate | None:
        """The gate that it still waits for; None once it is stopped."""
        gate = self.order.after
        return None if gate is None or gate.opened_ns or gate.broken or self.stopped else gate

    @property
    def refusal(self) -> str:
        """Why no more of it is launched; empty where more may be."""
        return CANCELLED if self.stopped else self.order.after.broken if self.order.after is not None else ""

    @property
    def piece_end(self) -> int:
        """The end of the rows that are launched next."""
        byte_count = PEER_PIECE_BYTES if self.apart else WITHIN_PIECE_BYTES
        if self.target.host or self.staged is not None:
            byte_count = PIECE_BYTES
        rows = max(1, byte_count // max(1, self.row_bytes))
        return min(self.rows_taken + rows, len(self.order.source_slots))

    @property
    def exhausted(self) -> bool:
        """True if nothing of it is left to launch."""
        return self.outcome is not Outcome.LANDED or self.rows_taken == len(self.order.source_slots)


@dataclass(slots=True, kw_only=True)
class _Launch:
    """Rows [first, end) of a write, as launch `slot`: prepared, then queued."""

    write: GpuWrite
    slot: int
    first: int
    end: int
    queue: Callable[[], None]
    begun_s: float = 0.0  # when it was queued; 0 without spans


class GpuWriter:
    """One thread that launches and waits, and makes its launcher by `launcher`. Made and used on the loop's thread.

    `spans` gets each launch. `wake_hint` gets, on the loop, an urgent write that waited for its rows. It gets it
    repeatedly: while it waits for the last of them alone, and while it is in flight.
    """

    def __init__(
        self,
        launcher: Callable[[], GpuLauncher],
        spans: Spans | None = None,
        wake_hint: Callable[[Write], None] = lambda _: None,
    ) -> None:
        self._make, self._spans, self._wake_hint = launcher, spans, wake_hint
        self._works = OpenWorks()
        self._hint_ns = 0  # when the next hint is due
        self._landed_s = 0.0  # when the latest launch had ended
        self._changed = threading.Condition()
        self._turns: Turns[GpuWrite] = Turns()
        self._closing = False
        self._launcher: GpuLauncher | None = None
        self._prepared: _Launch | None = None  # it only waits for its gate
        self._broken = ""  # why the GPU cannot report any more
        self._thread = threading.Thread(target=self._work, name="pdtransfer-push", daemon=True)
        self._thread.start()

    def add(self, write: GpuWrite) -> None:
        """Queues a write behind those of its own grant."""
        self._works.add(write)
        with self._changed:
            assert not self._closing
            write.woken = self._wake
            self._turns.add(write.turn, write)
        self._wake()

    def stop(self, session: int, grant: int) -> None:
        """Stops this grant's writes at their next rows; each is reported all the same."""
        self._works.stop(session, grant)

    def _wake(self) -> None:
        """Has the thread look again what there is to do."""
        with self._changed:
            self._changed.notify()
        if self._launcher is not None:
            self._launcher.wake()

    async def close(self) -> None:
        """Carries out what is queued, and joins the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await in_thread(self._thread.join)

    def _work(self) -> None:
        try:
            self._launcher = self._make()
        except Exception as error:  # noqa: BLE001 (it becomes every write's outcome)
            self._broken = str(error) or type(error).__name__
        launcher = self._launcher
        flying: deque[_Launch] = deque()
        while True:
            while len(flying) < IN_FLIGHT_MAX and (write := self._next()) is not None:
                if (launch := self._launch(launcher, write, self._slot(flying))) is not None:
                    flying.append(launch)
            gated = self._gated()
            if not flying and not gated:
                if not self._sleep():
                    return
                continue
            assert launcher is not None
            room = len(flying) < IN_FLIGHT_MAX
            if gated and room and not self._prepare_ahead(launcher, gated[0], self._slot(flying)):
                continue
            self._wait(launcher, flying, gated)

    def _sleep(self) -> bool:
        """Until there is something to do; False once the writer is closed."""
        with self._changed:
            while not self._turns and not self._closing:
                self._changed.wait()
            return bool(self._turns)

    def _next(self) -> GpuWrite | None:
        """The write whose turn it is; None where every one waits for a gate."""
        with self._changed:
            if self._broken:
                return next(self._turns.heads, None)
            queue = self._turns.take(lambda write: write.gate is None)
            if queue is None:
                return None
            self._turns.put_back(queue)
            return queue.items[0]

    def _gated(self) -> list[GpuWrite]:
        """The first writes of the grants that wait for a gate, the earliest first."""
        with self._changed:
            return [write for write in self._turns.heads if write.gate is not None]

    def _slot(self, flying: deque[_Launch]) -> int:
        """The launcher's slot for the next launch."""
        if flying:
            return 1 - flying[-1].slot
        return 0 if self._prepared is None else self._prepared.slot

    def _launch(self, launcher: GpuLauncher | None, write: GpuWrite, slot: int) -> _Launch | None:
        """Launches the next rows of a write; None where none of them are in flight."""
        end, begun_s = write.piece_end, 0.0 if self._spans is None else time.monotonic()
        try:
            launch = self._prepare(launcher, write, slot)
        except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
            self._refuse(launcher, write, Outcome.FAILED, _text(error))
            return None
        if launch is not None:
            try:
                launch.queue()
            except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
                self._refuse(launcher, write, self._drain(launcher), _text(error))
                return None
            launch.begun_s = begun_s
        over = False
        with self._changed:
            write.rows_taken = end
            write.running += launch is not None
            if write.exhausted:
                self._turns.remove(write.turn, write)
                over = not write.running
        if over:
            self._end(launcher, write)
        return launch

    def _prepare(self, launcher: GpuLauncher | None, write: GpuWrite, slot: int) -> _Launch | None:
        """The launch of the next rows of a write; None where they have no bytes. Raises where no more are launched."""
        if launcher is None or self._broken:
            raise WorldError(self._broken)
        word = write.word or launcher.word()
        with write.lock:
            write.word, refusal = word, write.refusal
        if refusal:
            raise WorldError(refusal)
        ahead, self._prepared = self._prepared, None
        if ahead is not None and ahead.write is write:
            assert ahead.slot == slot, "another launch was made since, and another slot is free"
            return ahead
        first, end = write.rows_taken, write.piece_end
        if not write.row_bytes or end == first:
            return None
        ours, theirs = _slots(write.order.target_slots[first:end]), _slots(write.order.source_slots[first:end])
        if not first:  # where a write came before its rows, the engine computes them meanwhile
            write.spare = write.gate is not None and not write.order.urgent
        rows, spare = end - first, write.spare or write.apart
        queue = launcher.prepare(slot, write.target, write.source, ours, theirs, rows, word, spare=spare)
        return _Launch(write=write, slot=slot, first=first, end=end, queue=queue)

    def _prepare_ahead(self, launcher: GpuLauncher, write: GpuWrite, slot: int) -> bool:
        """Prepares the first rows of a write that waits for its gate; False where it need not wait."""
        if self._prepared is not None and self._prepared.write is write:
            return True
        try:
            if (gate := write.gate) is not None:
                launcher.look(gate)
            if write.gate is None:
                return False
            self._prepared = self._prepare(launcher, write, slot)
        except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
            self._refuse(launcher, write, Outcome.FAILED, _text(error))
            return False
        return True

    def _drain(self, launcher: GpuLauncher | None) -> Outcome:
        """How a write ends that has failed when a launch of it may have been queued: known only once all has ended."""
        assert launcher is not None
        try:
            launcher.drain()
        except Exception as lost:  # noqa: BLE001 (whatever it is, what has ended is unknown)
            self._broken = str(lost) or type(lost).__name__
            return Outcome.UNKNOWN
        return Outcome.FAILED

    def _refuse(self, launcher: GpuLauncher | None, write: GpuWrite, outcome: Outcome, text: str) -> None:
        """Launches no more of a write: it has failed once all that was queued of it has ended."""
        with self._changed:
            write.fail(text, outcome)
            self._turns.remove(write.turn, write)
            over = not write.running
        if over:
            self._end(launcher, write)

    def _wait(self, launcher: GpuLauncher, flying: deque[_Launch], gated: list[GpuWrite]) -> None:
        """Until the oldest launch has ended, or a gate has opened, or there is something else to do."""
        gates = [gate for write in gated if (gate := write.gate) is not None]
        if len(gates) < len(gated):
            return  # one has been opened meanwhile, by another thread
        try:
            if not launcher.wait(flying[0].slot if flying else None, gates, self._report_hint(flying, gated)):
                return
        except Exception as error:  # noqa: BLE001 (whatever it is, what has ended is unknown)
            text = str(error) or type(error).__name__
            self._broken = self._broken or text
            log.critical("no launch can be waited for any more: %s", text)
            if flying:
                self._landed(launcher, flying.popleft(), Outcome.UNKNOWN, text)
            return
        launch = flying.popleft()
        if self._spans is not None:
            self._report_span(self._spans, launch)
        self._landed(launcher, launch, *self._outcome_of(launcher, launch))

    def _report_hint(self, flying: deque[_Launch], gated: list[GpuWrite]) -> int:
        """Gives a hint of a write that may land soon, if a hint is due; returns when the next one is."""
        for write in (*(launch.write for launch in flying), *gated[:1]):
            gate = write.order.after
            if write.order.urgent and gate is not None and gate.nearly and write.hints < HINTS_MAX:
                if (now_ns := time.monotonic_ns()) >= self._hint_ns:
                    self._hint_ns, write.hints = now_ns + HINT_NS, write.hints + 1
                    self._works.call(write, partial(self._wake_hint, write.order))
                return self._hint_ns
        return NEVER_NS

    def _outcome_of(self, launcher: GpuLauncher, launch: _Launch) -> tuple[Outcome, str]:
        """The outcome of a launch that the GPU has passed, and why it is no other."""
        match launcher.ended(launch.slot):
            case State.COMPLETE, 0:
                return self._sum(launcher, launch)
            case State.COMPLETE, left_out:
                return Outcome.FAILED, f"{left_out} rows lie outside their pool"
            case State.CANCELLED, _:
                return Outcome.FAILED, CANCELLED
            case _:
                return Outcome.UNKNOWN, "the GPU has passed a launch that never reported its end"

    def _landed(self, launcher: GpuLauncher, launch: _Launch, outcome: Outcome, text: str) -> None:
        write = launch.write
        write.running -= 1
        if outcome is not Outcome.LANDED:
            self._refuse(launcher, write, outcome, text)
        elif write.exhausted and not write.running:
            self._end(launcher, write)

    def _report_span(self, spans: Spans, launch: _Launch) -> None:
        """From its launch, or from the end of the one that it waited for."""
        begin_s, self._landed_s = max(launch.begun_s, self._landed_s), time.monotonic()
        order, rows = launch.write.order, range(launch.first, launch.end)
        first_row = order.first_row + launch.first
        name = f"rows {first_row}-{first_row + len(rows)}, layers {order.layers[0]}-{order.layers[1]}"
        spans(
            "launch", name, begin_s, self._landed_s, room=order.room, layer=order.layers[0],
            byte_count=len(rows) * launch.write.row_bytes,
        )  # fmt: skip

    def _sum(self, launcher: GpuLauncher, launch: _Launch) -> tuple[Outcome, str]:
        """Adds the checksum of a launch's rows as they lie in the pool, where one is wanted."""
        write, staged = launch.write, launch.write.staged
        if staged is None:
            return Outcome.LANDED, ""
        try:
            for first in range(launch.first, launch.end, staged.layout.slots):
                slots = write.order.source_slots[first : min(first + staged.layout.slots, launch.end)]
                address = launcher.fetch(staged.pool, staged.layout, _slots(slots), len(slots))
                runs = runs_of(np.array([0]), np.array([len(slots)]), write.order.first_row + first)
                checksum = checksum_copy.checksum(staged.lines, runs, address)
                assert checksum is not None
                write.add(checksum)
        except Exception as error:  # noqa: BLE001 (nothing writes the rows any more)
            return Outcome.FAILED, str(error) or type(error).__name__
        return Outcome.LANDED, ""

    def _end(self, launcher: GpuLauncher | None, write: GpuWrite) -> None:
        with write.lock:
            word, write.word = write.word, None
        if word is not None and launcher is not None and write.outcome is not Outcome.UNKNOWN:
            launcher.reuse(word)
        if write.outcome is Outcome.LANDED and (text := attempt(write.then)[1]):
            write.fail(text)
        self._works.end(write)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PDTransferError) else f"{type(error).__name__}: {error}"


def _slots(slots: Int64s) -> range | Int64s:
    """One run of slots becomes a range: a range needs no list on the GPU."""
    first, count = int(slots[0]), len(slots)
    whole = int(slots[-1]) - first == count - 1 and bool((slots[1:] - slots[:-1] == 1).all())
    return range(first, first + count) if whole else slots
