"""A device pool with the hot tokens of the requests that decode at once. A step swaps in the tokens that it reads.

All KV stays in the host pool. A step never waits for the GPU: plans, counts and copies stay there. On the CPU the
device pool is other memory of this process, and each call completes before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import LocalProtocolError
from ..kernels.gpu import CudaEvent, gpu_at
from ..kernels.kv_copy import PlannedCopy, kv_copy
from ..kernels.pools import Pool
from ..layout.geometry import Int64s, bounds_of
from .hot_tables import HotTables, filled, newest_slots
from .swap import HotBuffers, SwapCounts, SwapPlan, check_sizes, swap_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the pool was created. Hits and misses count only requests longer than their buffer."""

    hits: int
    misses: int
    swapped_bytes: int  # from the host pool, for misses


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Layers that share a plan."""

    buffers: HotBuffers
    copy: PlannedCopy
    row_bytes: int


class Fired:
    """The event of finished work."""

    __slots__ = ()

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HotPool:
    """Rows of requests, each with at most `hot` places and one slot of its own in the device pool.

    Arguments of a step: `lengths` int32 (requests,) is each request's tokens before the step, which computes position
    `lengths[i]`. `rows` int32 (requests,) are distinct rows. `real` int32 (1,) is the number of requests that are not
    padding; a row of -1 is padding, too. int64 arrays are copied to int32. Without a GPU results are numpy arrays, and
    torch is not imported. On a GPU all arrays are tensors in its memory, and all work is queued on torch's current
    stream. A graph may capture `swap_in`, `newest` and `store`, which neither allocate nor wait.

    A position outside its request or without a slot gets slot -1 and adds to the row's `refused`, int32 (rows,), which
    `start` zeroes. The engine reads `refused` once a step and ends the requests whose rows are not zero. Such a
    position never changes the slots or bytes of other requests.
    """

    def __init__(
        self, host_pool: Pool, device_pool: Pool, *, groups: Sequence[range], rows: int, hot: int, top: int,
        tokens_max: int, spare: int = -1,
    ) -> None:  # fmt: skip
        """`device_pool` has the planes of `host_pool` in any layout. `groups` divide the layers into those that share a
        plan. A step reads at most `top` positions of a request. `newest` returns the device slot `spare` for a request
        without a slot. Raises LocalProtocolError, with both values, for sizes that do not match, and if the device
        cannot reach the host pool."""
        if min(rows, hot, top, tokens_max) < 1:
            raise LocalProtocolError(f"rows {rows}, hot {hot}, top {top}, tokens_max {tokens_max}: one is below 1")
        if hot < top:
            raise LocalProtocolError(f"hot: {hot}, must be at least the {top} positions that a step may ask for")
        check_sizes(top=top, hot=hot)
        if host_pool.device != device_pool.device:
            raise LocalProtocolError(
                f"pools: the device's is of GPU {device_pool.device}, the host's of GPU {host_pool.device}"
            )
        if not -1 <= spare < device_pool.layout.slots:
            raise LocalProtocolError(f"spare: {spare} is outside 0..{device_pool.layout.slots - 1}")
        for name, pool in (("host", host_pool), ("device", device_pool)):
            if pool.layout.slots > np.iinfo(np.int32).max:
                raise LocalProtocolError(f"{name}: {pool.layout.slots} slots are more than int32 can name")
        _check_groups(groups, device_pool)
        self.host_pool, self.device_pool, self.hot, self.top, self._spare = host_pool, device_pool, hot, top, spare
        self._tables = HotTables(device_pool.device, groups=len(groups), rows=rows, hot=hot, tokens_max=tokens_max)

        def zeros(*shape: int) -> Any:
            return filled(device_pool.device, shape, 0)

        self.refused = self._tables.refused
        self._slots, self._sources, self._targets = (zeros(rows * top) for _ in range(3))
        self._counts, self._tally = zeros(5), filled(device_pool.device, (len(groups), 2), 0, "int64")
        self._positions, self._small = zeros(rows * top), zeros(3, rows)
        self._newest, self._stored = zeros(2, rows), zeros(2, rows)
        self._groups = [
            _Group(
                self._tables.of(index),
                PlannedCopy(
                    device_pool.layers(layers.start, layers.stop), host_pool.layers(layers.start, layers.stop),
                    self._targets, self._sources, counts=self._counts,
                ),
                device_pool.layout.row_bytes_of(layers.start, layers.stop),
            )
            for index, layers in enumerate(groups)
        ]  # fmt: skip
        self._store = PlannedCopy(host_pool, device_pool, self._stored[1], self._stored[0])
        self.admission_bytes = 0  # that copies of `start` wrote, to whatever memory

    # Start and stop of a request

    def start(self, row: int, host_slots: Int64s, tokens: int, device_slots: Int64s) -> None:
        """Assigns the free `row` to a request of `tokens` tokens.

        `host_slots` int64 (n,) are its slots for as many tokens as it may ever have. `device_slots` int64 (places + 1,)
        are its places, and last the slot for tokens without a place. There are `hot` places, or fewer for a request
        that never has more tokens. If the tokens fit the buffer, one launch loads them all, with position p in place p;
        otherwise nothing is loaded. Raises LocalProtocolError without any effect.
        """
        host_slots, device_slots = np.asarray(host_slots, np.int64), np.asarray(device_slots, np.int64)
        self._check_start(row, host_slots, tokens, device_slots)
        fits, places = tokens <= self.hot, len(device_slots) - 1
        host_slots = host_slots[: places if places < self.hot else self._tables.tokens_max]
        self._tables.begin(row, host_slots, device_slots, direct=fits, stream=self._stream)
        if fits:
            tables = self._tables.hot_slots, self._tables.host_slots
            targets, sources = (table[row, :tokens] for table in tables)
            self._admit(self.device_pool, self.host_pool, targets, sources, tokens)

    def stop(self, row: int) -> None:
        """Frees the row. The caller may reuse its slots once a `fence` made after this has fired.

        The host slots keep all stored tokens, so `start` may resume from them. Idempotent.
        """
        self._tables.end(row, self._stream)

    # A step

    def swap_in(self, group: int, positions: Any, lengths: Any, rows: Any, *, real: Any = None) -> Any:
        """Loads the missing rows of `positions` (requests, at most top) for the group's layers.

        Returns device slots int32 (requests, top), with -1 for -1. They are valid until the group's next call, the
        array until the next call of any group. Positions may repeat. Raises LocalProtocolError for wrong shapes.
        """
        slots = self.plan(group, positions, lengths, rows, real=real)
        self.bring(group)
        return slots

    def plan(self, group: int, positions: Any, lengths: Any, rows: Any, *, real: Any = None) -> Any:
        """The first half of `swap_in`: plans, and on a GPU copies the rows of requests with few misses.

        `bring` must follow before any other call of a step.
        """
        requests, top = self._check_step(positions, lengths, rows)
        slots = self._slots[: requests * top].reshape(requests, top)
        plan = SwapPlan(slots=slots, sources=self._sources, targets=self._targets, counts=self._counts)
        positions = self._as_int32(positions, self._positions)
        lengths, rows = self._as_int32(lengths, self._small[0]), self._as_int32(rows, self._small[1])
        totals = SwapCounts(refused=self.refused, tally=self._tally[group])
        swap_plan(
            self._groups[group].buffers, positions, lengths, rows, plan,
            real=self._real(real), totals=totals, bring=self._groups[group].copy, stream=self._stream,
        )  # fmt: skip
        return slots

    def bring(self, group: int) -> None:
        """The second half: copies the rows that the last plan, of this group, has listed."""
        self._groups[group].copy.queue(len(self._slots), stream=self._stream)

    def newest(self, rows: Any, lengths: Any, *, real: Any = None) -> Any:
        """Device slots int32 (requests,) for each request's token of this step, in all layers.

        A token's slot is its place, or the row's own slot; `spare` for padding and for requests without a slot. Valid
        until the next call.
        """
        return self._find_newest(rows, lengths, self._newest, real)

    def store(self, rows: Any, positions: Any, *, real: Any = None) -> None:
        """Queues one copy, for all layers, of the tokens from `newest` to their host slots."""
        self._find_newest(rows, positions, self._stored, real)
        self._store.queue(int(positions.shape[0]), stream=self._stream)

    def back_up(self, rows: Any, positions: Any, *, real: Any = None) -> CudaEvent | Fired:
        """Calls `store` and returns the `fence` after it. `positions` are the step's `lengths`."""
        self.store(rows, positions, real=real)
        return self.fence()

    def fence(self) -> CudaEvent | Fired:
        """Fires when all work queued so far is done. After a replayed graph, call it behind the replay."""
        if self.device_pool.device is None:
            return Fired()
        event = CudaEvent(gpu_at(self.device_pool.device))
        event.record(self._stream)
        return event

    # Counters

    @property
    def table_bytes(self) -> int:
        """The device memory of tables, plans and counts, without the device pool."""
        tensors = (
            self._slots, self._sources, self._targets, self._counts, self._tally, self._positions, self._small,
            self._newest, self._stored,
        )  # fmt: skip
        return self._tables.bytes + sum(tensor.nbytes for tensor in tensors)

    def counters(self) -> Counters:
        """Reads the counters. Waits for the GPU."""
        tally: Any = self._tally if self.device_pool.device is None else self._tally.cpu().numpy()
        swapped = sum(int(misses) * group.row_bytes for misses, group in zip(tally[:, 1], self._groups, strict=True))
        return Counters(hits=int(tally[:, 0].sum()), misses=int(tally[:, 1].sum()), swapped_bytes=swapped)

    def close(self) -> None:
        """Releases the copies' tables on the GPU. All work there must have ended. Idempotent."""
        for copy in (self._store, *(group.copy for group in self._groups)):
            copy.close()

    @property
    def _stream(self) -> int:
        if self.device_pool.device is None:
            return 0
        import torch

        return torch.cuda.current_stream(self.device_pool.device).cuda_stream

    def _admit(self, target: Pool, source: Pool, target_slots: Any, source_slots: Any, rows: int) -> None:
        """Copies rows of a request that is placed, and counts them."""
        kv_copy(target, source, target_slots, source_slots, rows, stream=self._stream)
        self.admission_bytes += rows * target.layout.row_bytes

    def _find_newest(self, rows: Any, positions: Any, out: Any, real: Any) -> Any:
        count = self._check_rows(positions, rows)
        device, host = out[0, :count], out[1, :count]
        newest_slots(
            self._groups[0].buffers, self._tables.own_slots, self._as_int32(positions, self._small[0]),
            self._as_int32(rows, self._small[1]), device=device, host=host, refused=self.refused, spare=self._spare,
            real=self._real(real), stream=self._stream,
        )  # fmt: skip
        return device

    def _real(self, real: Any) -> Any:
        return None if real is None else self._as_int32(real, self._small[2])

    def _as_int32(self, array: Any, buffer: Any) -> Any:
        """The array as the kernels take it, copied to `buffer` unless it is contiguous int32 on the device."""
        if self.device_pool.device is None:
            return np.ascontiguousarray(array, np.int32)
        import torch

        tensor: Any = torch.as_tensor(array)
        if tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device == buffer.device:
            return tensor
        return buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    def _check_start(self, row: int, host_slots: Int64s, tokens: int, device_slots: Int64s) -> None:
        self._tables.check_free(row)
        if not 1 <= tokens <= min(len(host_slots), self._tables.tokens_max):
            most = self._tables.tokens_max
            raise LocalProtocolError(f"tokens: {tokens}, and {len(host_slots)} host slots of at most {most}")
        places = len(device_slots) - 1
        if not min(tokens, self.hot) <= places <= self.hot:
            raise LocalProtocolError(f"device_slots: {places + 1} for {tokens} tokens and a buffer of {self.hot}")
        for name, slots, pool in (
            ("host_slots", host_slots, self.host_pool),
            ("device_slots", device_slots, self.device_pool),
        ):
            if int(slots.view(np.uint64).max()) >= pool.layout.slots:  # as uint64 a negative slot is too large, too
                low, high = bounds_of(slots)
                raise LocalProtocolError(f"{name}: {low if low < 0 else high} is outside 0..{pool.layout.slots - 1}")
        if tokens <= self.hot and len(np.unique(device_slots)) < len(device_slots):
            raise LocalProtocolError("device_slots: a slot is repeated")

    def _check_step(self, positions: Any, lengths: Any, rows: Any) -> tuple[int, int]:
        requests, top = (int(size) for size in positions.shape)
        if not 1 <= top <= self.top:
            raise LocalProtocolError(f"positions: {top} of each request, not 1..{self.top}")
        if requests != self._check_rows(lengths, rows):
            raise LocalProtocolError(f"positions: of {requests} requests, and {int(lengths.shape[0])} lengths")
        return requests, top

    def _check_rows(self, lengths: Any, rows: Any) -> int:
        requests = int(rows.shape[0])
        if requests > self._tables.rows or int(lengths.shape[0]) != requests:
            raise LocalProtocolError(
                f"rows: {requests} of {self._tables.rows}, and {int(lengths.shape[0])} lengths or positions"
            )
        return requests


def _check_groups(groups: Sequence[range], device: Pool) -> None:
    planned = sorted(layer for group in groups for layer in group)
    layers = sorted({plane.layer for plane in device.layout.planes})
    if planned != layers or any(group.step != 1 for group in groups):
        raise LocalProtocolError(f"groups: {list(groups)} are not the layers {layers[0]}..{layers[-1]}, each once")
