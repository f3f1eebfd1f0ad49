"""The hot tokens of the requests that decode at once, in a pool of the device: what a step asks for is swapped in.

The whole KV stays in the host pool. A step never waits for the card: plans, their counts and copies stay there. On the
CPU the device is any other memory of this process, and the same calls do the same at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import LocalProtocolError
from ..layout.geometry import Int64s, bounds_of
from .card import card
from .event import Event
from .hot_tables import Tables, seen
from .kv_copy import kv_copy
from .newest import newest_slots
from .pool_hooks import Fence, Fired
from .pools import Pool
from .standing import StandingCopy
from .swap import HotBuffers, SwapPlan, Told, check_sizes, swap_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Since the pool was made. Hits and misses are those of requests that are longer than their buffer."""

    hits: int
    misses: int
    swapped_bytes: int  # from the host pool, for misses
    preloaded_bytes: int  # from the host pool, for prompts that fit
    staging_copies: int  # copies of a prompt that went anywhere but from the host pool to a request's own places


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Layers that share a plan."""

    buffers: HotBuffers
    copy: StandingCopy
    row_bytes: int


class HotPool:
    """Rows of requests, each with at most `hot` places and a slot of its own in the device pool.

    In every call that a step makes `lengths` int32 (requests,) is how many tokens each request has had before this
    step, so that the step computes position `lengths[i]`; `rows` int32 (requests,) is each one's row, none of them
    twice; `real` int32 (1,), if given, how many are no padding, and a row of -1 is padding as well. int64 will do, if
    its values fit int32, at the price of a copy. On a card all of them are there, and everything is queued on torch's
    current stream: a graph may capture `swap_in`, `newest` and `store`, which allocate nothing and wait for nothing.

    A position outside its request, or one that has no slot, gets slot -1 and adds to the row's `refused`, int32
    (rows,) where the pool is, zero at `start`: whoever runs steps reads it once a step, together with the tokens, and
    ends the requests whose rows are not zero. Nobody else's slots or bytes are touched by them.
    """

    def __init__(
        self, host: Pool, device: Pool, *, groups: Sequence[range], rows: int, hot: int, top: int, tokens_max: int,
        spare: int = -1,
    ) -> None:  # fmt: skip
        """`device` has the planes of `host` in any layout; `groups` are the layers that share a plan, each once. At
        most `top` positions a request are asked for at a time. `spare` is the device slot that `newest` answers for
        who has none. Raises LocalProtocolError, with both values, for sizes that do not fit together, and where the
        device can't reach the host pool: nothing here goes by way of other memory."""
        import torch

        if min(rows, hot, top, tokens_max) < 1:
            raise LocalProtocolError(f"rows {rows}, hot {hot}, top {top}, tokens_max {tokens_max}: one is below 1")
        if hot < top:
            raise LocalProtocolError(f"hot: {hot} places are below the {top} positions that a step may ask for")
        check_sizes(top=top, hot=hot)
        if host.card != device.card:
            raise LocalProtocolError(f"pools: the device's is of card {device.card}, the host's of card {host.card}")
        if not -1 <= spare < device.layout.slots:
            raise LocalProtocolError(f"spare: {spare} is outside 0..{device.layout.slots - 1}")
        for name, pool in (("host", host), ("device", device)):
            if pool.layout.slots > np.iinfo(np.int32).max:
                raise LocalProtocolError(f"{name}: {pool.layout.slots} slots are more than int32 can name")
        _check_groups(groups, device)
        self.host, self.device, self.hot, self.top, self._spare = host, device, hot, top, spare
        self._tables = Tables(device.card, groups=len(groups), rows=rows, hot=hot, tokens_max=tokens_max)
        where = self._tables.where

        def made(*shape: int, dtype: Any = torch.int32) -> Any:
            return torch.zeros(shape, dtype=dtype, device=where)

        self.refused = self._tables.refused
        self._slots, self._sources, self._targets = (made(rows * top) for _ in range(3))
        self._counts, self._tally = made(5), made(len(groups), 2, dtype=torch.int64)
        self._positions, self._small = made(rows * top), made(3, rows)
        self._newest, self._stored = made(2, rows), made(2, rows)
        self._groups = [
            _Group(
                self._tables.of(at),
                StandingCopy(
                    _layers(device, layers), _layers(host, layers), seen(self._targets), seen(self._sources),
                    counts=seen(self._counts),
                ),
                device.layout.row_bytes_of(layers.start, layers.stop),
            )
            for at, layers in enumerate(groups)
        ]  # fmt: skip
        self._store = StandingCopy(host, device, seen(self._stored[1]), seen(self._stored[0]))
        self._preloaded_bytes = self._staging_copies = 0

    # A request comes and goes

    def start(
        self, row: int, host_slots: Int64s, tokens: int, device_slots: Int64s, preload: bool | None = None
    ) -> None:
        """A request of `tokens` tokens gets `row`, which nobody has.

        `host_slots` int64 (n,) are its slots for as many tokens as it may ever have. `device_slots` int64 (places + 1,)
        are its places and, last, the slot for tokens that have none: `hot` places, or fewer for one that never has more
        tokens. Tokens that fit the buffer are all brought over, in one launch for all layers, since position p is in
        place p then; of more nothing is. `preload` says which of these is meant, if anything. Raises
        LocalProtocolError, having done nothing.
        """
        host_slots, device_slots = np.asarray(host_slots, np.int64), np.asarray(device_slots, np.int64)
        self._check_start(row, host_slots, tokens, device_slots, preload)
        fits, places = tokens <= self.hot, len(device_slots) - 1
        host_slots = host_slots[: places if places < self.hot else self._tables.tokens_max]
        self._tables.begin(row, host_slots, device_slots, direct=fits, stream=self._stream)
        if fits:
            targets, sources = (
                seen(table[row, :tokens]) for table in (self._tables.hot_slots, self._tables.host_slots)
            )
            self._count_copy(self.device, self.host)
            kv_copy(self.device, self.host, targets, sources, tokens, stream=self._stream)
            self._preloaded_bytes += tokens * self.device.layout.row_bytes

    def stop(self, row: int) -> None:
        """Nobody has the row any more; its slots are the caller's again once a `fence` made after this has fired.

        The host's slots keep every token that was stored, so that `start` may begin anew from them. Idempotent.
        """
        self._tables.end(row, self._stream)

    # A step

    def swap_in(self, group: int, positions: Any, lengths: Any, rows: Any, *, real: Any = None) -> Any:
        """Brings over what the group's layers lack of `positions` (requests, at most top), and says where all are:
        device slots int32 (requests, top), of -1 for -1, good until the group's next call, and the array until any.

        A position may be there twice. Raises LocalProtocolError for shapes that do not fit.
        """
        slots = self.plan(group, positions, lengths, rows, real=real)
        self.bring(group)
        return slots

    def plan(self, group: int, positions: Any, lengths: Any, rows: Any, *, real: Any = None) -> Any:
        """The first half of `swap_in`: decides what goes where, and on a card brings what is little. `bring` has to
        follow before anything else is asked."""
        requests, top = self._check_step(positions, lengths, rows)
        slots = self._slots[: requests * top].view(requests, top)
        plan = SwapPlan(
            slots=seen(slots), sources=seen(self._sources), targets=seen(self._targets), counts=seen(self._counts)
        )
        asked = self._as_int32(positions, self._positions)
        lengths, rows = self._as_int32(lengths, self._small[0]), self._as_int32(rows, self._small[1])
        told, stream = Told(refused=seen(self.refused), tally=seen(self._tally[group])), self._stream
        swap_plan(
            self._groups[group].buffers, asked, lengths, rows, plan,
            real=self._real(real), told=told, bring=self._groups[group].copy, stream=stream,
        )  # fmt: skip
        return slots

    def bring(self, group: int) -> None:
        """The other half: copies what the last plan, which was this group's, found missing and left."""
        self._groups[group].copy.queue(self._slots.numel(), stream=self._stream)

    def newest(self, rows: Any, lengths: Any, *, real: Any = None) -> Any:
        """Device slots int32 (requests,) for this step's token of each request, in all layers: its place where it has
        one, else the row's own slot; `spare` for padding, and for who has no slot left. Good until the next call."""
        return self._find_newest(rows, lengths, self._newest, real)

    def store(self, rows: Any, positions: Any, *, real: Any = None) -> None:
        """Queues the copy of the tokens that `newest` gave slots for, all layers in one launch, to their host slots."""
        self._find_newest(rows, positions, self._stored, real)
        self._store.queue(int(positions.shape[0]), stream=self._stream)

    def back_up(self, rows: Any, positions: Any, *, real: Any = None) -> Fence:
        """`store`, and the `fence` after it; `positions` are the step's `lengths`."""
        self.store(rows, positions, real=real)
        return self.fence()

    def fence(self) -> Fence:
        """Fires when all that has been queued so far is done; who replays a graph asks for it after that."""
        if self.device.card is None:
            return Fired()
        event = Event(card(self.device.card))
        event.record(self._stream)
        return event

    # What has happened

    @property
    def table_bytes(self) -> int:
        """Of the device's memory, beside the device pool: tables, plans and counts."""
        made = (
            self._slots, self._sources, self._targets, self._counts, self._tally, self._positions, self._small,
            self._newest, self._stored,
        )  # fmt: skip
        return self._tables.bytes + sum(each.numel() * each.element_size() for each in made)

    def counters(self) -> Counters:
        """Waits for the card."""
        tally: Any = self._tally.cpu().numpy()
        swapped = sum(int(misses) * group.row_bytes for misses, group in zip(tally[:, 1], self._groups, strict=True))
        return Counters(
            hits=int(tally[:, 0].sum()),
            misses=int(tally[:, 1].sum()),
            swapped_bytes=swapped,
            preloaded_bytes=self._preloaded_bytes,
            staging_copies=self._staging_copies,
        )

    def close(self) -> None:
        """Lets go of what copies keep on the card, once all has ended there. Idempotent."""
        for copy in (self._store, *(group.copy for group in self._groups)):
            copy.close()

    @property
    def _stream(self) -> int:
        if self.device.card is None:
            return 0
        import torch

        return torch.cuda.current_stream(self.device.card).cuda_stream

    def _count_copy(self, target: Pool, source: Pool) -> None:
        if target.address != self.device.address or source.address != self.host.address:
            self._staging_copies += 1

    def _find_newest(self, rows: Any, positions: Any, out: Any, real: Any) -> Any:
        count = self._check_rows(positions, rows)
        device, host = out[0, :count], out[1, :count]
        newest_slots(
            self._groups[0].buffers, seen(self._tables.own_slots), self._as_int32(positions, self._small[0]),
            self._as_int32(rows, self._small[1]), device=seen(device), host=seen(host), refused=seen(self.refused),
            spare=self._spare, real=self._real(real), stream=self._stream,
        )  # fmt: skip
        return device

    def _real(self, real: Any) -> Any:
        return None if real is None else self._as_int32(real, self._small[2])

    def _as_int32(self, given: Any, room: Any) -> Any:
        """As the kernels take it; in `room` where it is something else yet."""
        import torch

        array: Any = torch.as_tensor(given)
        if array.dtype == torch.int32 and array.is_contiguous() and array.device == room.device:
            return seen(array)
        return seen(room[: array.numel()].view(array.shape).copy_(array))

    def _check_start(
        self, row: int, host_slots: Int64s, tokens: int, device_slots: Int64s, preload: bool | None
    ) -> None:
        self._tables.check_free(row)
        if not 1 <= tokens <= min(len(host_slots), self._tables.tokens_max):
            most = self._tables.tokens_max
            raise LocalProtocolError(f"tokens: {tokens}, and {len(host_slots)} host slots of at most {most}")
        places = len(device_slots) - 1
        if not min(tokens, self.hot) <= places <= self.hot:
            raise LocalProtocolError(f"device_slots: {places + 1} for {tokens} tokens and {self.hot} places")
        if preload is not None and preload and tokens > self.hot:
            raise LocalProtocolError(f"preload: {tokens} tokens do not fit {self.hot} places")
        for name, slots, pool in (("host_slots", host_slots, self.host), ("device_slots", device_slots, self.device)):
            if int(slots.view(np.uint64).max()) >= pool.layout.slots:  # a negative one is beyond every slot, too
                low, high = bounds_of(slots)
                raise LocalProtocolError(f"{name}: {low if low < 0 else high} is outside 0..{pool.layout.slots - 1}")
        if tokens <= self.hot and len(np.unique(device_slots)) < len(device_slots):
            raise LocalProtocolError("device_slots: one is there twice")

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


def _layers(pool: Pool, layers: range) -> Pool:
    """The planes of these layers."""
    layout = pool.layout.layers(layers.start, layers.stop)
    return Pool(layout=layout, address=pool.address, card=pool.card, host=pool.host)


def _check_groups(groups: Sequence[range], device: Pool) -> None:
    planned = sorted(layer for group in groups for layer in group)
    held = sorted({plane.layer for plane in device.layout.planes})
    if planned != held or any(group.step != 1 for group in groups):
        raise LocalProtocolError(f"groups: {list(groups)} are not the layers {held[0]}..{held[-1]}, each once")
