"""Tables of the requests that decode at once: each request has one row. On a GPU, or on the CPU.

`newest_slots` finds the slots of a step's new tokens in these tables.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError
from ..kernels.gpu import CudaEvent, gpu_at, words
from ..layout.geometry import Int64s
from .swap import HotBuffers, address_of

_ROW_BLOCKS, _ROW_THREADS = 64, 256
_NEWEST_THREADS = 128


class HotTables:
    """int32 arrays of numpy, or tensors on a GPU: `hot_slots` (rows, hot), `host_slots` (rows, tokens_max) and
    `own_slots` (rows,) for all groups. `held` and `order` (groups, rows, hot) are for each group. A free row is -1
    everywhere.

    Rows are written in the stream's order from pinned memory of their own. `begin` waits only if the row's previous
    launch has not ended. `argument` is that of the kernel.
    """

    def __init__(self, ordinal: int | None, *, groups: int, rows: int, hot: int, tokens_max: int) -> None:
        self.tokens_max = tokens_max

        def empty(*shape: int) -> Any:
            return filled(ordinal, shape, -1)

        self.hot_slots, self.host_slots, self.own_slots = empty(rows, hot), empty(rows, tokens_max), empty(rows)
        self.held, self.order = empty(groups, rows, hot), empty(groups, rows, hot)
        self.refused = filled(ordinal, (rows,), 0)
        self.argument = HotRowArgument(
            host_slots=address_of("host_slots", self.host_slots), hot_slots=address_of("hot_slots", self.hot_slots),
            own_slots=address_of("own_slots", self.own_slots), held=address_of("held", self.held),
            order=address_of("order", self.order), refused=address_of("refused", self.refused),
            host_stride=tokens_max, groups=groups, rows=rows, hot=hot,
        )  # fmt: skip
        width = tokens_max + hot
        self._gpu = None if ordinal is None else gpu_at(ordinal)
        self._events: list[CudaEvent] = []
        self._device_address = 0  # of `_input`
        if self._gpu is None:
            self._input: NDArray[np.int32] = np.empty((rows, width), np.int32)
        else:
            self._gpu.load("hot_row", "hot_row")  # compile now, so that the first request need not wait
            address, self._device_address = self._gpu.pinned(4 * rows * width)
            self._input = words(address, rows * width).view(np.int32).reshape(rows, width)
            self._events = [CudaEvent(self._gpu) for _ in range(rows)]
        self._used: set[int] = set()

    @property
    def bytes(self) -> int:
        """The tables' size in the device's memory."""
        tables = self.hot_slots, self.host_slots, self.own_slots, self.held, self.order, self.refused
        return sum(table.nbytes for table in tables)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.own_slots.shape[0])

    def of(self, group: int) -> HotBuffers:
        """One group's tables, for the kernels."""
        return HotBuffers(
            held=self.held[group], order=self.order[group], hot_slots=self.hot_slots, host_slots=self.host_slots
        )

    def check_free(self, row: int) -> None:
        """Raises LocalProtocolError for a row that does not exist or is in use."""
        if not 0 <= row < self.rows:
            raise LocalProtocolError(f"row: {row} is outside 0..{self.rows - 1}")
        if row in self._used:
            raise LocalProtocolError(f"row: {row} is in use: it has to be stopped first")

    def begin(self, row: int, host_slots: Int64s, device_slots: Int64s, *, direct: bool, stream: int) -> None:
        """Assigns a free row to a request. The last device slot is the request's own slot.

        With `direct`, position p is in place p, as far as there are places; otherwise the buffer is empty.
        """
        if self._events:
            self._events[row].wait()
        count, places = len(host_slots), len(device_slots) - 1
        slots = self._input[row]
        slots[:count] = host_slots
        slots[count : count + places] = device_slots[:-1]
        self._used.add(row)
        source: Any = self._device_address + row * slots.nbytes if self._device_address else slots
        own_slot = int(device_slots[-1])
        self.assign(row, source, host_count=count, places=places, own_slot=own_slot, direct=direct, stream=stream)
        if self._events:
            self._events[row].record(stream)

    def end(self, row: int, stream: int) -> None:
        """Frees the row. Later requests for its positions are refused."""
        if row in self._used:
            self._used.discard(row)
            source: Any = self._device_address or self._input[row]
            self.assign(row, source, host_count=0, places=0, own_slot=-1, direct=False, stream=stream)

    def assign(
        self, row: int, source: Any, *, host_count: int, places: int, own_slot: int, direct: bool, stream: int = 0
    ) -> None:
        """Assigns `row` to a request, or frees it if `host_count` is 0, which keeps `held` and `refused`.

        `source` holds `host_count` arena slots and `places` device slots, int32. It is a numpy array, or the device
        address of host memory that must not change until the launch has ended. With `direct`, position p is in place p;
        otherwise the buffer is empty.
        """
        if self._gpu is None:
            self._assign_on_cpu(row, source, host_count, places, own_slot, direct)
            return
        argument = self.argument
        argument.row, argument.sent, argument.host_count, argument.places = row, source, host_count, places
        argument.own, argument.direct = own_slot, direct
        self._gpu.launch("hot_row", argument, blocks=_ROW_BLOCKS, threads=_ROW_THREADS, stream=stream)

    def _assign_on_cpu(self, row: int, source: Any, host_count: int, places: int, own_slot: int, direct: bool) -> None:
        self.host_slots[row, :host_count] = source[:host_count]
        self.host_slots[row, host_count:] = -1
        self.hot_slots[row, :places] = source[host_count : host_count + places]
        self.hot_slots[row, places:] = -1
        self.own_slots[row] = own_slot
        if not host_count:
            return
        self.refused[row] = 0
        self.order[:, row] = range(self.order.shape[2])
        self.held[:, row] = -1
        if direct:
            self.held[:, row, :places] = range(places)


def filled(ordinal: int | None, shape: tuple[int, ...], value: int, kind: Literal["int32", "int64"] = "int32") -> Any:
    """An array full of a value: numpy's, or a tensor in the memory of GPU `ordinal`."""
    if ordinal is None:
        return np.full(shape, value, kind)
    import torch

    return torch.full(shape, value, dtype=getattr(torch, kind), device=torch.device("cuda", ordinal))


class HotRowArgument(ctypes.Structure):
    """HotRow of kernels/hot_row.h."""

    _fields_ = (
        ("sent", ctypes.c_uint64), ("host_slots", ctypes.c_uint64), ("hot_slots", ctypes.c_uint64),
        ("own_slots", ctypes.c_uint64), ("held", ctypes.c_uint64), ("order", ctypes.c_uint64),
        ("refused", ctypes.c_uint64), ("host_stride", ctypes.c_int64), ("groups", ctypes.c_int32),
        ("rows", ctypes.c_int32), ("hot", ctypes.c_int32), ("row", ctypes.c_int32), ("host_count", ctypes.c_int32),
        ("places", ctypes.c_int32), ("own", ctypes.c_int32), ("direct", ctypes.c_int32),
    )  # fmt: skip


class NewestArgument(ctypes.Structure):
    """Newest of kernels/newest.h."""

    _fields_ = (
        ("positions", ctypes.c_uint64), ("rows", ctypes.c_uint64), ("real", ctypes.c_uint64),
        ("host_slots", ctypes.c_uint64), ("hot_slots", ctypes.c_uint64), ("own_slots", ctypes.c_uint64),
        ("device", ctypes.c_uint64), ("host", ctypes.c_uint64), ("refused", ctypes.c_uint64),
        ("host_stride", ctypes.c_int64), ("requests", ctypes.c_int32), ("hot", ctypes.c_int32),
        ("row_count", ctypes.c_int32), ("spare", ctypes.c_int32),
    )  # fmt: skip


def newest_slots(
    hot: HotBuffers, own_slots: Any, positions: Any, rows: Any, *, device: Any, host: Any, refused: Any, spare: int,
    real: Any = None, stream: int = 0,
) -> None:  # fmt: skip
    """Writes the slots of each request's token at `positions` (requests,) to `device` and `host` (requests,), int32.

    A position below the buffer's size uses its own place, any other the row's slot in `own_slots` (rows,). A request
    without a slot on either side gets `spare` and -1 and adds to its row of `refused` (rows,); padding gets the same
    slots but adds nothing. All arrays are numpy, or all in a GPU's memory, where this queues one launch.
    """
    requests = int(positions.shape[0])
    if not getattr(positions, "is_cuda", False):
        count = requests if real is None else int(real[0])
        _newest_on_cpu(hot, own_slots, positions, rows, device, host, refused, spare, count)
    elif requests:
        argument = newest_argument_of(hot, own_slots, positions, rows, device, host, refused, spare, real)
        blocks = -(-requests // _NEWEST_THREADS)
        gpu_at(positions.device.index).launch("newest", argument, blocks=blocks, threads=_NEWEST_THREADS, stream=stream)


def newest_argument_of(
    hot: HotBuffers, own_slots: Any, positions: Any, rows: Any, device: Any, host: Any, refused: Any, spare: int,
    real: Any,
) -> NewestArgument:  # fmt: skip
    """The kernel's argument."""
    return NewestArgument(
        positions=address_of("positions", positions), rows=address_of("rows", rows),
        real=0 if real is None else address_of("real", real), host_slots=address_of("host_slots", hot.host_slots),
        hot_slots=address_of("hot_slots", hot.hot_slots), own_slots=address_of("own_slots", own_slots),
        device=address_of("device", device), host=address_of("host", host), refused=address_of("refused", refused),
        host_stride=hot.host_slots.shape[1], requests=positions.shape[0], hot=hot.hot_slots.shape[1],
        row_count=hot.hot_slots.shape[0], spare=spare,
    )  # fmt: skip


def _newest_on_cpu(
    hot: HotBuffers, own_slots: Any, positions: Any, rows: Any, device: Any, host: Any, refused: Any, spare: int,
    real: int,
) -> None:  # fmt: skip
    row_count, length = hot.host_slots.shape
    device[:], host[:] = spare, -1
    requests = np.arange(len(positions))
    requested = requests[(requests < real) & (rows >= 0) & (rows < row_count)]
    row, position = rows[requested], positions[requested]
    inside = (position >= 0) & (position < length)
    host_slots = np.where(inside, hot.host_slots[row, np.where(inside, position, 0)], -1)
    placed = inside & (position < hot.hot_slots.shape[1])
    device_slots = own_slots[row]
    device_slots[placed] = hot.hot_slots[row[placed], position[placed]]
    valid = inside & (host_slots >= 0) & (device_slots >= 0)
    device[requested[valid]], host[requested[valid]] = device_slots[valid], host_slots[valid]
    np.add.at(refused, row[~valid], 1)
