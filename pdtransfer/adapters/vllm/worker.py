"""A worker's side of an engine: the clients, and the requests whose rooms they carry.

vLLM calls it in every step of the model, from one thread. It never waits, except where blocks are about to be reused
that may still be read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ...client.api import (
    Cause,
    DecodeClient,
    Event,
    LocalProtocolError,
    PrefillClient,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomReady,
    room_id,
)
from ...layout.cell_sizes import is_full
from ..kit.ends import FailuresInARow, Quiescence
from . import figures
from .orders import Chunk, Open, Orders, Receive, Refuse, Withdraw
from .pools import BlockRows, Pools

log = logging.getLogger(__name__)

# Smallest cell of a large chunk: each one takes the interpreter from vLLM's own thread.
CELL_BYTES_MIN = 64 << 20
FACT_LENGTH_MAX = 128  # of a label
SHARE_MAX = 0.1  # of requests that decode may compute itself before that is a warning
SHARE_OF, SHARE_OF_MIN = 100, 10  # requests that are looked at, and fewest of them
SHARE_PAUSE_S = 60.0  # between two warnings


def differing(detail: str, facts: Mapping[str, str]) -> list[str]:
    """The facts of this engine, name=value, that a refusal names. A peer's own words are not labels of metrics."""
    return [f"{name}={value}"[:FACT_LENGTH_MAX] for name, value in facts.items() if f" {name}: " in f" {detail}"]


class ComputedShare:
    """How many of the latest requests decode computed itself, though their KV was to come from a peer. Each of them
    costs what a prefill engine was there for, and answers its client all the same: so it is logged."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latest: deque[bool] = deque(maxlen=SHARE_OF)
        self._logged_at = float("-inf")

    def add(self, why: str) -> str | None:
        """A request ended: `why` its prompt was computed here, empty if its KV has landed. Returns a warning where one
        is due."""
        self._latest.append(bool(why))
        computed, count = sum(self._latest), len(self._latest)
        if not why or count < SHARE_OF_MIN or computed <= SHARE_MAX * count:
            return None
        if (now := self._clock()) - self._logged_at < SHARE_PAUSE_S:
            return None
        self._logged_at = now
        return f"{computed} of the last {count} requests were computed here, since their KV was not received: {why}"


@dataclass(slots=True)
class Results:
    """Requests whose blocks vLLM has back; of those received, which failed."""

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    failed_blocks: set[int] = field(default_factory=set[int])  # of those in `failed`, by their first group


@dataclass(slots=True)
class _SentRoom:
    request_id: str
    room: int
    tokens: int
    drained: bool = False


@dataclass(slots=True)
class _ReceivedRoom:
    request_id: str
    room: int
    began: float
    blocks: tuple[int, ...]  # that did not hold anything before
    awaited: bool
    aborted: bool = False


@dataclass(slots=True, eq=False)
class _Cell:
    """Rows of one component that a step computes, and their layers [first, end) that are computed and not pushed."""

    chunk: Chunk
    block_rows: BlockRows
    rows: tuple[int, int]  # those behind the prompt included, in its last block
    pages: NDArray[np.int64]
    layers: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """Its rows."""
        return self.rows[1] - self.rows[0]


class WorkerSide:
    """Carries out orders on one rank.

    `pools` describe the KV cache: what becomes of blocks, and after which layer's name each layer is complete. A side
    without clients has none, and reports each request that it were to send as sent.
    `recomputes`: vLLM itself computes a prompt whose load has failed. `facts` are what peers compare.
    """

    def __init__(
        self,
        *,
        pools: Pools,
        prefill: PrefillClient | None,
        decode: DecodeClient | None,
        time_left_s: float,
        recomputes: bool = False,
        facts: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows, self._layers, self._complete_after = pools.rows, pools.layers, pools.complete_after
        self._prefill, self._decode = prefill, decode
        self._time_left_s, self._clock = time_left_s, clock
        self._quiescence = None if prefill is None else Quiescence(prefill, clock)
        self._recomputes, self._share, self._facts = recomputes, ComputedShare(clock), facts or {}
        self._send_failures, self._receive_failures = FailuresInARow(), FailuresInARow()
        self._sending: dict[str, _SentRoom] = {}
        self._receiving: dict[str, _ReceivedRoom] = {}
        self._sent_rooms: dict[int, _SentRoom] = {}
        self._received_rooms: dict[int, _ReceivedRoom] = {}
        self._finished: set[str] = set()  # requests that have ended and wait for their rooms
        self._results = Results()
        self._chunks: list[Chunk] = []  # of this step
        self._cells: list[_Cell] = []  # of these chunks
        self._computed: set[tuple[int, int]] = set()  # (group, layer) of this step
        self._launched: list[tuple[_Cell, tuple[int, int], Event]] = []  # cells that leave at the step's end
        self._data = figures.empty()
        self._copied_bytes = 0  # of copied_up_bytes, that were taken

    # A step, in this order

    def quiesce(self, orders: Orders) -> None:
        """Before blocks are overwritten: waits until nothing reads those of preempted requests."""
        requests = [(name, self._sending.pop(name)) for name in orders.quiesce if name in self._sending]
        if self._quiescence is not None:
            self._quiescence.wait(
                (request.room, f"request {name}") for name, request in requests if not request.drained
            )

    def begin(self, orders: Orders) -> None:
        """Before the model runs."""
        for opening in orders.opens:
            self._open(opening)
        for receive in orders.receives:
            self._receive(receive)
        for refusal in orders.refusals:
            self._refuse(refusal)
        for request_id in orders.aborts:
            self._abort(request_id)
        for withdrawal in orders.withdrawals:
            self._withdraw(withdrawal)
        self._chunks = list(orders.chunks)
        self._cells = [
            _Cell(chunk, block_rows, (first, end), block_rows.pages(rows.blocks))
            for chunk in orders.chunks
            for rows in chunk.rows
            for block_rows in self._rows
            if block_rows.group == rows.group
            for first, end in [block_rows.rows_of(rows.first, rows.end)]
            if first < end
        ]
        self._computed, self._launched = set(), []

    def save(self, layer_name: str, event: Callable[[], Event | None]) -> None:
        """A layer's rows of this step are computed once what `event` makes has fired; it is made only where layers
        leave, several of a small one together."""
        key = self._complete_after.get(layer_name) if self._chunks else None
        if key is not None and key not in self._computed:
            self._compute(key, cache(event))

    def end(self, event: Callable[[], Event | None]) -> None:
        """After the model has run: what has not left yet leaves now, and rooms are finished.

        `event` makes the event of all that was computed.
        """
        if not self._chunks or self._prefill is None:
            return
        event = cache(event)
        for group, layers in enumerate(self._layers):
            for layer in layers:
                if (group, layer) not in self._computed:
                    self._compute((group, layer), event)
        for cell in self._cells:
            self._push(cell, event)
        for cell, layers, after in self._launched:
            self._send(cell, layers, after)
        for chunk in self._chunks:
            if chunk.last and (sending := self._sending.get(chunk.request_id)) is not None and not sending.drained:
                self._prefill.finish(sending.room)
        self._chunks = []

    def results(self, finished: Collection[str]) -> Results:
        """After the model has run: what is known of rooms by now. `finished` have ended since the last step."""
        if self._prefill is not None:
            for event in self._prefill.poll():
                self._on_prefill_event(event)
        if self._decode is not None:
            for event in self._decode.poll():
                self._on_decode_event(event)
        self._finished |= self._sending.keys() & set(finished)
        for request_id in [ended for ended in self._finished if self._sending[ended].drained]:
            self._finished.discard(request_id)
            del self._sending[request_id]
            self._results.sent.add(request_id)
        results, self._results = self._results, Results()
        return results

    def take_figures(self) -> figures.Data | None:
        """What was counted since the last call; None for nothing."""
        if self._decode is not None:
            copied_bytes = self._decode.copied_up_bytes
            self._data["copied_up_bytes"], self._copied_bytes = copied_bytes - self._copied_bytes, copied_bytes
        if figures.is_empty(self._data):
            return None
        data, self._data = self._data, figures.empty()
        return data

    def close(self) -> None:
        """Ends the clients: rooms under way fail."""
        for client in (self._prefill, self._decode):
            if client is not None:
                client.close()

    # Orders

    def _open(self, order: Open) -> None:
        room = room_id(order.label)
        sending = _SentRoom(order.request_id, room, order.tokens, drained=self._prefill is None)
        self._sending[order.request_id] = sending
        if self._prefill is None:
            return  # another rank has the same KV, and sends it
        try:
            self._prefill.open(room, tokens=order.tokens, time_left_s=self._time_left_s, grants=None)
        except LocalProtocolError as error:
            log.warning("request %s: its hand-off is refused: %s", order.request_id, error)
            self._count_failure(Cause.REFUSED)
            sending.drained = True
        else:
            self._sent_rooms[room] = sending

    def _receive(self, order: Receive) -> None:
        assert self._decode is not None
        room = order.room
        # Requests that run may have the prefix as well: its blocks are -1 here, and do not fail.
        blocks = tuple(slot for slot in order.slots[0] if slot >= 0) if order.awaited else ()
        try:
            self._decode.expect(
                room, tokens=order.tokens, prefix=order.prefix, sources=order.sources, time_left_s=self._time_left_s,
                slots={
                    rows.component.name: rows.slots(order.slots[rows.group], order.tokens) for rows in self._rows
                },
            )  # fmt: skip
        except LocalProtocolError as error:
            if order.awaited:  # else prefill's room is over, or ends with the load that was asked for before
                log.warning("request %s: its hand-off is refused: %s", order.request_id, error)
                self._refuse(Refuse(order.request_id, blocks))
            return
        received = _ReceivedRoom(order.request_id, room, self._clock(), blocks, order.awaited)
        self._receiving[order.request_id] = self._received_rooms[room] = received

    def _refuse(self, order: Refuse) -> None:
        self._count_failure(Cause.REFUSED)
        self._fail_load(order.request_id, order.blocks, Cause.REFUSED, "its parameters are wrong")
        self._results.received.add(order.request_id)

    def _abort(self, request_id: str) -> None:
        if (sending := self._sending.get(request_id)) is not None and not sending.drained:
            assert self._prefill is not None
            self._prefill.abort(sending.room, f"request {request_id} was given up")
        receiving = self._receiving.get(request_id)
        if receiving is not None:
            assert self._decode is not None
            receiving.aborted = True
            self._decode.abort(receiving.room, f"request {request_id} was given up")

    def _withdraw(self, order: Withdraw) -> None:
        detail = f"request {order.request_id} was given up"
        if not order.sources:
            if self._prefill is not None:
                self._prefill.abort(order.room, detail)
        elif self._decode is not None:
            log.info("request %s: has ended before its KV was asked for; prefill is notified", order.request_id)
            self._decode.withdraw(order.room, sources=order.sources, detail=detail)

    def _compute(self, key: tuple[int, int], event: Callable[[], Event | None]) -> None:
        """Adds a layer to the cells of its group, and pushes those that are large enough."""
        self._computed.add(key)
        group, layer = key
        for cell in self._cells:
            if cell.block_rows.group != group:
                continue
            layout = cell.block_rows.component.layout
            if not layout.row_bytes_of(layer, layer + 1):
                continue  # a component of the group that this layer has no part in
            if cell.layers is not None and (cell.layers[1] > layer or layout.row_bytes_of(cell.layers[1], layer)):
                self._push(cell, event)  # a layer between them is not computed yet
            cell.layers = cell.layers[0] if cell.layers is not None else layer, layer + 1
            if is_full(layout, cell.layers, cell.count, cell_bytes_min=CELL_BYTES_MIN):
                self._push(cell, event)

    def _push(self, cell: _Cell, event: Callable[[], Event | None]) -> None:
        """Sends a cell, at the end of the step if a GPU computes it: the thread that launches would lose time to it."""
        layers, cell.layers = cell.layers, None
        if layers is not None and (after := event()) is not None:
            self._launched.append((cell, layers, after))
        elif layers is not None:
            self._send(cell, layers, None)

    def _send(self, cell: _Cell, layers: tuple[int, int], after: Event | None) -> None:
        assert self._prefill is not None
        sending = self._sending.get(cell.chunk.request_id)
        if sending is not None and not sending.drained:
            component = cell.block_rows.component
            rows = cell.rows[0], min(cell.rows[1], component.rows(sending.tokens))
            self._prefill.push(
                sending.room, cell.pages, rows=rows, layers=layers, component=component.name, after=after
            )  # fmt: skip

    # Events

    def _on_prefill_event(self, event: object) -> None:
        match event:
            case RoomLanded(_, kv_bytes):
                self._send_failures.landed()
                figures.count(self._data, "rooms", "sent")
                figures.count(self._data, "bytes", "sent", kv_bytes)
            case RoomFailed(room, cause, detail):
                level = logging.INFO if cause is Cause.ABORTED else logging.WARNING
                text, request_id = "request %s: its KV was not handed over: %s: %s", self._sent_rooms[room].request_id
                log.log(level, text, request_id, cause.value, detail)
                self._count_failure(cause)
                self._send_failures.failed(cause, detail)
            case RoomDrained(room):
                self._sent_rooms.pop(room).drained = True
            case _:  # whether decode has asked, and has slots, changes nothing here
                pass

    def _on_decode_event(self, event: object) -> None:
        match event:
            case RoomReady(room):
                received = self._received_rooms[room]
                if received.awaited:
                    self._share.add("")
                    self._receive_failures.landed()
                figures.count(self._data, "rooms", "received")
                figures.count(self._data, "bytes", "received", event.kv_bytes)
                if len(self._data["seconds"]) < figures.SECONDS_MAX:
                    self._data["seconds"].append(self._clock() - received.began)
            case RoomFailed(room, cause, detail):
                received = self._received_rooms[room]
                request_id, wanted = received.request_id, received.awaited and not received.aborted
                level = logging.WARNING if wanted else logging.INFO
                log.log(level, "request %s: its KV was not received: %s: %s", request_id, cause.value, detail)
                self._count_failure(cause)
                if cause is Cause.REFUSED:
                    for fact in differing(detail, self._facts):
                        figures.count(self._data, "refusals", fact)
                if wanted:
                    self._fail_load(request_id, received.blocks, cause, detail)
            case RoomDrained(room):
                received = self._received_rooms.pop(room)
                del self._receiving[received.request_id]
                if received.awaited:
                    self._results.received.add(received.request_id)
            case _:
                pass

    def _fail_load(self, request_id: str, blocks: tuple[int, ...], cause: Cause, detail: str) -> None:
        self._results.failed.add(request_id)
        self._results.failed_blocks.update(blocks)
        self._receive_failures.failed(cause, detail)
        if self._recomputes:
            self._data["computed"] += 1
            log.info("request %s: its prompt is computed here", request_id)
            if (text := self._share.add(f"{cause.value}: {detail}")) is not None:
                log.warning("%s", text)

    def _count_failure(self, cause: Cause) -> None:
        figures.count(self._data, "rooms", "failed")
        figures.count(self._data, "causes", cause.value)
