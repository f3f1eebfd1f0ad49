"""What a writer uses of the GPU whose memory its pool is: registered memory, and launches to wait for and to stop."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from time import monotonic_ns

import numpy as np

from ..errors import WorldError
from ..handoff.events import Spans
from ..handoff.ready_gate import ReadyGate
from ..kernels import checksum_copy, native
from ..kernels import push as pushing
from ..kernels.gpu import CudaEvent, Gpu, gpu_at
from ..kernels.kv_copy import check_copy, kv_copy, prepare
from ..kernels.pools import PinnedCancel, Pool, Progress, Slots, State
from ..kernels.ring import lanes
from ..kernels.staging import Staging
from ..layout.engine_pools import GpuMemory
from ..layout.geometry import Int64s
from ..layout.layout import Layout, Plane
from ..memory.cuda_ipc import Handle, Opened, export

RUN_BYTES_MIN = 1 << 20  # of target slots, on average: where they are shorter nothing is planned
COPY_BLOCKS = 64  # of a copy within a GPU that a room waits for: half of the multiprocessors
COPY_BLOCKS_SPARE = 16  # of one that has time, or goes to another GPU
IN_FLIGHT_MAX = 2  # one runs, one waits behind it: more would only delay a cancel


class GpuLauncher:
    """Launches of a GPU for one thread, which calls everything but `word`, `reuse` and `wake`.

    A copy that a ring may carry has a stream for each slot, so that it gathers while the launch before drains. The
    launches of the copy kernel share one stream: two at once would hold twice the multiprocessors.
    """

    def __init__(self, here: Gpu) -> None:
        self._gpu, self._streams = here, [here.stream() for _ in range(IN_FLIGHT_MAX)]
        self._events = [CudaEvent(here) for _ in range(IN_FLIGHT_MAX)]
        self._progress = [Progress(here.ordinal) for _ in range(IN_FLIGHT_MAX)]
        self._stagings = [Staging(here.event()) for _ in range(IN_FLIGHT_MAX)]
        self._called = ctypes.c_uint32()
        self._words: list[PinnedCancel] = []  # free ones: pinned memory is never given back
        self._fetched = (0, 0, 0)  # bytes that fetch may use, their address here and on the GPU

    def word(self) -> PinnedCancel:
        """A cancel word that launches can look at, not set, for one write at a time."""
        return self._words.pop() if self._words else PinnedCancel(self._gpu.ordinal)

    def reuse(self, word: PinnedCancel) -> None:
        """Takes back a word that no launch looks at any more."""
        word.clear()
        self._words.append(word)

    def prepare(
        self, slot: int, target: Pool, source: Pool, target_slots: range | Int64s, source_slots: Slots, rows: int,
        cancel: PinnedCancel, *, spare: bool,
    ) -> Callable[[], None]:  # fmt: skip
        """Prepares a copy as launch `slot`, one of IN_FLIGHT_MAX; it replaces a copy that was prepared there and not
        queued. Returns what queues it; where that raises, the copy may have been queued. `spare`: the copy has time,
        and the model needs the GPU more."""
        progress, staging, stream = self._progress[slot], self._stagings[slot], self._streams[0]
        self._gpu.enter()
        if not target.host:  # a GPU's memory: there is no bus to fill
            queue = prepare(
                check_copy(target, source, target_slots, source_slots, rows), rows,
                progress=progress, cancel=cancel, blocks=COPY_BLOCKS_SPARE if spare else COPY_BLOCKS, stream=stream,
                staging=staging,
            )  # fmt: skip
        else:
            byte_count = rows * target.layout.row_bytes
            ringed = byte_count >= pushing.PLANNED_BYTES_MIN and in_runs(target_slots, byte_count)
            stream = self._streams[slot if ringed else 0]
            queue = pushing.prepare(
                target, source, target_slots, source_slots, rows,
                backend="spare" if spare else "auto" if ringed else "kernel",
                progress=progress, cancel=cancel, stream=stream, staging=staging,
            )  # fmt: skip

        def go() -> None:
            queue()
            self._events[slot].record(stream)

        return go

    def wait(self, slot: int | None, gates: Sequence[ReadyGate], until_ns: int) -> bool:
        """Sleeps until launch `slot` has ended, and returns True. Returns False before that when one of `gates`, which
        wait for CUDA events, has come further. So it does when `wake` was called since the last time, or at `until_ns`
        by CLOCK_MONOTONIC. Raises WorldError where the GPU cannot report on the launch."""
        flying = [] if slot is None else [self._events[slot].cuda_event]
        asked = [(gate, found) for gate in gates if (found := gate.next) is not None]
        # Gates first: where launches end as fast as they are made, a gate would never be reported.
        at, failed = lanes.wait_any(self._gpu, [*(event for _, (_, event) in asked), *flying], self._called, until_ns)
        self._called.value = 0
        if 0 <= at < len(asked):
            gate, (number, _) = asked[at]
            _update(gate, number, failed)
            self.look(gate)
            return False
        if failed:
            raise WorldError(failed)
        return at >= 0

    def look(self, gate: ReadyGate) -> None:
        """Tells a gate which of its events have fired."""
        while (found := gate.next) is not None and not gate.broken:
            at, failed = lanes.wait_any(self._gpu, [found[1]], None)
            if at < 0:
                return
            _update(gate, found[0], failed)

    def wake(self) -> None:
        """Ends a `wait`, from any thread."""
        self._called.value = 1

    def ended(self, slot: int) -> tuple[State, int]:
        """How launch `slot`, which was waited for, has ended, and how many rows it left out."""
        return self._progress[slot].state, self._progress[slot].refused

    def fetch(self, source: Pool, layout: Layout, slots: Slots, rows: int) -> int:
        """Copies rows of the GPU to rows 0 to rows - 1 of `layout`, and waits. Returns their address in this process,
        valid until the next fetch. Raises WorldError where it fails."""
        if self._fetched[0] < layout.end:
            self._fetched = (layout.end, *self._gpu.pinned(layout.end))
        _, here, there = self._fetched
        target = Pool(layout=layout, address=there, device=self._gpu.ordinal, host=True)
        kv_copy(target, source, range(rows), slots, rows, stream=self._streams[0])
        self._gpu.synchronise(self._streams[0])
        return here

    def drain(self) -> None:
        """Sleeps until all that was ever queued has ended. Raises WorldError where the GPU cannot report it."""
        self._gpu.finish()  # a ring's own streams as well

    def try_out(self) -> None:
        """Copies a row within the GPU and waits for it: compiles and loads what a launch needs. Raises WorldError where
        no launch is possible."""
        layout = Layout((Plane(0, "kv", "uint8", 0, 1, 0, 256, 256, 256),), 1, 1)
        addresses = [self._gpu.allocate(layout.end) for _ in range(2)]
        source, target = (Pool(layout=layout, address=address, device=self._gpu.ordinal) for address in addresses)
        word = self.word()
        self.prepare(0, target, source, range(1), range(1), 1, word, spare=False)()
        self._gpu.synchronise(self._streams[0])
        self.reuse(word)
        for address in addresses:
            self._gpu.free(address)


def _update(gate: ReadyGate, number: int, failed: str) -> None:
    if failed:
        gate.broken = failed
    else:
        gate.fired(number, monotonic_ns())


def in_runs(slots: range | Int64s, byte_count: int) -> bool:
    """True if this many bytes lie in runs of slots that are long enough to consider a ring."""
    runs = 1 if isinstance(slots, range) else 1 + int(np.count_nonzero(np.diff(slots) != 1))
    return byte_count >= RUN_BYTES_MIN * runs


class WriterGpu:
    """GPU `ordinal` of this host, for a writer whose pool is in its memory: a Registrar. Called in worker threads;
    nothing here waits for what the GPU computes."""

    def __init__(self, ordinal: int, spans: Spans | None = None) -> None:
        """`spans` gets each launch. Raises WorldError where there is no such GPU."""
        self.ordinal, self._gpu, self.spans = ordinal, gpu_at(ordinal), spans
        self._lock, self._prepared = threading.Lock(), False
        self._spare: GpuLauncher | None = None  # it has carried a copy, and is not taken yet

    def host_register(self, address: int, byte_count: int) -> int:
        return self._gpu.host_register(address, byte_count)

    def host_unregister(self, address: int) -> None:
        self._gpu.host_unregister(address)

    def export(self, address: int, byte_count: int) -> Handle:
        """Names this GPU's memory to a process of ours that reads it. Raises WorldError where it has no handle."""
        return export(GpuMemory(device=self.ordinal, address=address, byte_count=byte_count))

    def open(self, handle: bytes) -> Opened:
        """Opens another process's memory of a GPU, for this GPU to write. Raises TransportError where it cannot."""
        return Opened(Handle.unpack(handle), self.ordinal)

    def prepare(self) -> None:
        """Does now what the first launch would have to wait for. Raises WorldError where no launch is possible."""
        with self._lock:
            if self._prepared:
                return
            self._gpu.load("kv_copy", "kv_copy")  # may compile; where it cannot, no launcher has been made
            lanes.native()
            launcher = GpuLauncher(self._gpu)
            launcher.try_out()
            self._spare, self._prepared = launcher, True

    def launcher(self) -> GpuLauncher:
        """A new one, for one thread."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare or GpuLauncher(self._gpu)


def prepare_copies(gpu: WriterGpu | None) -> None:
    """Compiles and loads, once a process, what copies and sums rows: of a pool in this process's memory, or of this
    GPU's. Slow at first: call it outside the event loop. Raises WorldError where the GPU can carry no launch."""
    checksum_copy.native()
    if gpu is None:
        native()
    else:
        gpu.prepare()
