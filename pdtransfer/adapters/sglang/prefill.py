"""Prefill's requests: each waits for decode to ask for it, pushes its pages as they are computed, and is reported once
nothing reads them any more.

SGLang's scheduler calls it from one thread. It never waits, except where pages are about to be reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...client.api import (
    Event,
    KVPoll,
    LocalProtocolError,
    PrefillClient,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
)
from ..kit.ends import FailuresInARow, Quiescence
from .pools import OF_KV, PAGE_SIZE_MAX, CachePart, KVPools
from .rooms import Change, Meetings

Indices = NDArray[np.integer]


@dataclass(slots=True)
class Sent:
    """What is known of a request's hand-off, until the request is given up or reported."""

    began: float
    room: int | None = None
    tokens: int = 0  # that decode expects: whole pages of its own
    prefix: int = 0  # of these, that decode has
    leased_s: float | None = None  # after which decode had its memory
    pushed: bool = False
    offered: int = 0  # of its tokens' KV, from the first on
    kv_bytes: int = 0  # that were transferred
    end: Change | None = None


class SendingSide:
    """The requests of one rank, by their bootstrap_room.

    A request that begins is BOOTSTRAPPING; it is WAITING_FOR_INPUT once decode has memory for it, and ends as SUCCESS
    or FAILED when its pages may be reused.
    """

    def __init__(
        self, client: PrefillClient, pools: KVPools, *, time_left_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._pools, self._page_size = client, pools, pools.page_size
        self._time_left_s, self._clock = time_left_s, clock
        self._quiescence = Quiescence(client, clock)
        self.failures = FailuresInARow()
        self._meetings = Meetings(self._open, self._refuse, kept_s=time_left_s, clock=clock)
        self._sent: dict[int, Sent] = {}  # by bootstrap_room
        self._rooms: dict[int, int] = {}  # bootstrap_room by room
        self._changes: list[Change] = []

    def begin(self, bootstrap_room: int) -> Sent:
        """A request that will be handed over; an earlier one of the same number is given up."""
        self.give_up(bootstrap_room)
        sent = self._sent[bootstrap_room] = Sent(self._clock())
        self._meetings.wait(bootstrap_room)
        return sent

    def prefix(self, bootstrap_room: int) -> int:
        """The first tokens that decode has: whole pages of this side."""
        sent = self._sent.get(bootstrap_room)
        return 0 if sent is None else sent.prefix // self._page_size * self._page_size

    def push(
        self,
        bootstrap_room: int,
        pages: Indices,
        *,
        first_page: int,
        aux: bytes | None = None,
        states: Sequence[Indices | None] | None = None,
        after: Event | None = None,
    ) -> None:
        """Pages of the KV cache are computed, `first_page` is the place of the first behind the prefix.

        With `aux` they are the last ones: then `states` has the indices of each state. A request that has ended is left
        alone.
        """
        if (sent := self._open_room(bootstrap_room)) is None:
            return
        first = self.prefix(bootstrap_room) + first_page * self._page_size
        self._push_kv(sent, pages, first, after, last=aux is not None)
        if aux is None:
            return
        end = first + len(pages) * self._page_size
        for part, indices in zip(self._pools.states, states or [None] * len(self._pools.states), strict=True):
            if indices is not None:
                slots = part.kind.expand(indices)
                rows = end if part.kind.tail == "filled" else part.kind.rows(sent.tokens)
                self._push(sent, part, rows - len(slots), slots, after, last=True)
        assert sent.room is not None
        self._client.finish(sent.room, aux=aux)

    def push_ahead(self, bootstrap_room: int, pages: Indices, *, start: int, after: Event | None, last: bool) -> None:
        """Pages of the KV cache, from token `start` on, are computed once `after` has fired; `last` of its prompt.
        `push` leaves them out. A request that has ended, or waits for decode, is left alone."""
        if (sent := self._open_room(bootstrap_room)) is not None and sent.leased_s is not None:
            self._push_kv(sent, pages, start, after, last=last)

    def give_up(self, bootstrap_room: int) -> None:
        """The request has ended, and SGLang reuses its pages now: returns when nothing reads them any more."""
        sent = self._sent.pop(bootstrap_room, None)
        if sent is None:
            return
        if sent.room is None:
            self._meetings.give_up(bootstrap_room)
            return
        self._meetings.met(bootstrap_room)
        if self._rooms.pop(sent.room, None) is None:
            return
        if not sent.pushed:
            self._client.abort(sent.room, f"bootstrap_room {bootstrap_room} was given up")
        else:
            self._quiescence.wait([(sent.room, f"room {bootstrap_room}")])

    def turn(self) -> list[Change]:
        """What has changed since the last call."""
        for event in self._client.poll():
            self._on_event(event)
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """Ends the client: requests under way fail."""
        self._client.close()

    def _open(self, bootstrap_room: int, room: int) -> None:
        sent = self._sent[bootstrap_room]
        if sent.room is not None and self._rooms.pop(sent.room, None) is not None:
            self._client.abort(sent.room)
        sent.room = room
        try:
            self._client.open(room, tokens=None, grants=None, time_left_s=self._time_left_s)
        except LocalProtocolError as error:
            self._changes.append(Change(bootstrap_room, KVPoll.FAILED, str(error)))
        else:
            self._rooms[room] = bootstrap_room

    def _refuse(self, room: int) -> None:
        """Decode asked after the request was given up."""
        with suppress(LocalProtocolError):
            self._client.open(room, tokens=None, grants=None, time_left_s=self._time_left_s)
            self._client.abort(room, "its request was given up before")

    def _open_room(self, bootstrap_room: int) -> Sent | None:
        sent = self._sent.get(bootstrap_room)
        return None if sent is None or sent.room is None or sent.end is not None else sent

    def _push_kv(self, sent: Sent, pages: Indices, first: int, after: Event | None, *, last: bool) -> None:
        """Offers what was not offered yet of the KV cache, whose token `first` is the first of these pages."""
        sent.pushed, skipped = True, max(0, sent.offered - first) // self._page_size
        pages, first = pages[skipped:], first + skipped * self._page_size
        sent.offered = max(sent.offered, first + len(pages) * self._page_size)
        for kv in self._pools.kv:
            self._push(sent, kv, first // kv.component.tokens_per_row, kv.kind.expand(pages), after, last=last)

    def _push(
        self, sent: Sent, part: CachePart, first: int, slots: NDArray[np.int64], after: Event | None, *, last: bool
    ) -> None:
        """Offers the rows from `first` on. The two sides' pages may end at other tokens. Rows that only decode's pages
        have are filled with a copy of the row beside them, and nobody reads them."""
        rows, is_filled = part.kind.rows(sent.tokens), part.kind.tail == "filled"
        slots = slots[max(0, -first) : max(0, rows - first)]
        first = max(0, first)
        if not len(slots):
            return
        if last and is_filled and 0 < rows - first - len(slots) < PAGE_SIZE_MAX:
            slots = np.append(slots, np.repeat(slots[-1:], rows - first - len(slots)))
        if part.name not in OF_KV and is_filled and first > 0:
            lead = min(first, PAGE_SIZE_MAX - 1)
            slots, first = np.append(np.repeat(slots[:1], lead), slots), first - lead
        unused = np.zeros(first, np.int64)
        assert sent.room is not None
        self._client.push(
            sent.room, np.append(unused, slots), rows=(first, first + len(slots)), component=part.name, after=after
        )

    def _on_event(self, event: object) -> None:
        match event:
            case RoomAsked(room):
                self._meetings.ask(room)
            case RoomLeased(room, tokens, prefix) if (number := self._rooms.get(room)) is not None:
                sent = self._sent[number]
                sent.tokens, sent.prefix, sent.leased_s = tokens, prefix, self._clock() - sent.began
                self._meetings.met(number)
                self._changes.append(Change(number, KVPoll.WAITING_FOR_INPUT))
            case RoomLanded(room, kv_bytes) if (number := self._rooms.get(room)) is not None:
                sent = self._sent[number]
                sent.kv_bytes, sent.end = kv_bytes, Change(number, KVPoll.SUCCESS)
                self.failures.landed()
            case RoomFailed(room, cause, detail) if (number := self._rooms.get(room)) is not None:
                self.failures.failed(cause, detail)
                self._sent[number].end = Change(number, KVPoll.FAILED, f"{cause.value}: {detail}")
            case RoomDrained(room) if (number := self._rooms.pop(room, None)) is not None:
                self._meetings.met(number)
                end = self._sent[number].end
                assert end is not None
                self._changes.append(end)
            case _:
                pass
