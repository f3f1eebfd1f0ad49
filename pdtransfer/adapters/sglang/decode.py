"""Decode's requests: each lands in the pages that SGLang's scheduler chose. They are free once there is a proof that
nobody writes them any more.

SGLang's scheduler calls it, and nothing of it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...client.api import Cause, DecodeClient, KVPoll, RoomDrained, RoomFailed, RoomReady
from ...errors import LocalProtocolError
from ..kit.ends import FailuresInARow
from .pools import KV, CachePart, KVPools
from .rooms import Change, Uses

Indices = NDArray[np.integer]


@dataclass(slots=True)
class _Received:
    bootstrap_room: int
    aux_index: int


class ReceivingSide:
    """The requests of one rank, by their bootstrap_room.

    `put_aux(index, bytes)` stores what prefill sent beside the KV, of `aux_bytes` bytes. A request ends as SUCCESS or
    FAILED. After FAILED its pages may still be written, until `is_drained`.
    """

    def __init__(
        self,
        client: DecodeClient,
        pools: KVPools,
        uses: Uses,
        *,
        put_aux: Callable[[int, bytes], None],
        aux_bytes: int,
        time_left_s: float,
    ) -> None:
        self._client, self._pools, self._uses = client, pools, uses
        self._put_aux, self._aux_bytes, self._time_left_s = put_aux, aux_bytes, time_left_s
        self.failures = FailuresInARow()
        self._rooms: dict[int, _Received] = {}  # that are not drained
        self._current: dict[int, int] = {}  # the room of a bootstrap_room that has not ended

    def expect(
        self,
        bootstrap_room: int,
        pages: Indices,
        *,
        prefix: int,
        states: Sequence[Indices | None],
        aux_index: int,
        sources: Sequence[str],
        host: bool = False,
        device_pages: Indices | None = None,
    ) -> None:
        """Asks the prefill ranks at `sources` for the tokens behind `prefix`, into `pages` and the indices of each
        state; with `host` into those of the host pools. With HiSparse `pages` are the host's, and `device_pages` those
        of all KV but the first component. Raises LocalProtocolError for what does not fit: the request fails at these
        ranks as well."""
        room = self._uses.room(bootstrap_room)
        of_device = pages if device_pages is None else device_pages
        tokens = prefix + len(of_device) * self._pools.page_size
        try:
            # A page of a few tokens without a compressed row has no host page.
            if (missing := len(of_device) - len(pages)) not in (0, 1):
                raise LocalProtocolError(f"{KV}: {len(pages)} host pages, beside {len(of_device)} pages of the device")
            pages = np.append(pages, np.full(missing, -1))
            slots = {
                part.name: self._rows(part, tokens, pages if part.name == KV else of_device) for part in self._pools.kv
            }
            slots |= {
                part.name: self._rows(part, tokens, np.empty(0, np.int64) if indices is None else indices)
                for part, indices in zip(self._pools.states, states, strict=True)
            }
            self._client.expect(
                room, tokens=tokens, prefix=prefix, slots=slots, sources=sources, time_left_s=self._time_left_s,
                enable_hisparse=host,
            )  # fmt: skip
        except LocalProtocolError as error:
            self._withdraw(room, bootstrap_room, sources, str(error))
            raise
        self._rooms[room] = _Received(bootstrap_room, aux_index)
        self._current[bootstrap_room] = room

    def give_up(self, bootstrap_room: int) -> None:
        """SGLang does not want the request any more. Idempotent."""
        if (room := self._current.pop(bootstrap_room, None)) is not None:
            self._client.abort(room, f"bootstrap_room {bootstrap_room} was given up")

    def withdraw(self, bootstrap_room: int, sources: Sequence[str], why: str) -> None:
        """SGLang does not want a request that was not expected yet: it fails at the prefill ranks at `sources`. There
        may be none: this counts as a use of the number all the same, as it does at the ranks that know some."""
        self._withdraw(self._uses.room(bootstrap_room), bootstrap_room, sources, why)

    def _withdraw(self, room: int, bootstrap_room: int, sources: Sequence[str], why: str) -> None:
        self._client.withdraw(room, sources=sources, detail=f"bootstrap_room {bootstrap_room}: {why}")

    def is_drained(self, bootstrap_room: int) -> bool:
        """True if nobody can write the pages of a request any more."""
        return all(received.bootstrap_room != bootstrap_room for received in self._rooms.values())

    def turn(self) -> list[Change]:
        """What has changed since the last call."""
        changes: list[Change] = []
        for event in self._client.poll():
            match event:
                case RoomReady(room) if (received := self._rooms.get(room)) is not None:
                    if len(event.aux) == self._aux_bytes:
                        self._put_aux(received.aux_index, event.aux)
                        self.failures.landed()
                    else:
                        text = f"{len(event.aux)} bytes were sent, this engine takes {self._aux_bytes}"
                        text = f"metadata of the request: {text}"
                        self.failures.failed(Cause.REFUSED, text)
                        self._end(changes, room, KVPoll.FAILED, text)
                case RoomFailed(room, cause, detail):
                    if self._is_wanted(room):
                        self.failures.failed(cause, detail)
                    self._end(changes, room, KVPoll.FAILED, f"{cause.value}: {detail}")
                case RoomDrained(room):
                    self._end(changes, room, KVPoll.SUCCESS)  # unless it has failed
                    del self._rooms[room]
                case _:
                    pass
        return changes

    def close(self) -> None:
        """Ends the client: requests under way fail."""
        self._client.close()

    def _end(self, changes: list[Change], room: int, state: KVPoll, reason: str = "") -> None:
        """A request has ended, unless SGLang gave it up: then it knows."""
        number = self._rooms[room].bootstrap_room
        if self._is_wanted(room):
            del self._current[number]
            changes.append(Change(number, state, reason))

    def _is_wanted(self, room: int) -> bool:
        """True if its request has not ended here."""
        return self._current.get(self._rooms[room].bootstrap_room) == room

    @staticmethod
    def _rows(part: CachePart, tokens: int, indices: Indices) -> NDArray[np.int64]:
        """One slot a row: SGLang names those of the last rows, and the first ones are not transferred."""
        slots, rows = part.kind.slots(indices, tokens), part.kind.rows(tokens)
        if len(slots) > rows:
            raise LocalProtocolError(f"{part.name}: {len(slots)} rows, expected {rows} for {tokens} tokens")
        return np.pad(slots, (rows - len(slots), 0), constant_values=-1)
