"""A prefill worker of the model: prompts wait for pages, then their chunks are computed one at a time.

As in the project's engines, the oldest prompt and the one with the fewest tokens left take turns.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from pdtransfer.serve.router.fleet.prefixes import KnownPrefixes

from .modelled_request import ModelledRequest
from .rates import Curve


class ModelledPrefill:
    """`slots` tokens of pages; with `cache` its engine keeps prefixes of its own and computes only the rest."""

    def __init__(self, peer: str, curve: Curve, *, slots: int, chunk_tokens: int, cache: KnownPrefixes | None) -> None:
        self.peer = peer
        self._curve, self._slots, self._chunk_tokens, self._cache = curve, slots, chunk_tokens, cache
        self._waiting: deque[ModelledRequest] = deque()
        self._rooms: OrderedDict[int, ModelledRequest] = OrderedDict()
        self._turn = self.announced = 0  # `announced`: the prompts that wait for pages, as routers know it
        self.computing: ModelledRequest | None = None
        self.slots_taken = self.slots_taken_max = 0
        self.busy_s = self.link_free_s = 0.0
        self.sent_bytes = 0

    @property
    def waiting(self) -> int:
        """Prompts that wait for pages."""
        return len(self._waiting)

    def cached(self, request: ModelledRequest, block_tokens: int) -> int:
        """Tokens of the prompt that this engine need not compute; at least one is computed."""
        if self._cache is None:
            return 0
        return min(self._cache.count(request.keys) * block_tokens, request.tokens - 1)

    def fits(self, request: ModelledRequest) -> bool:
        """True if an empty pool could hold it."""
        return request.tokens <= self._slots

    def add(self, request: ModelledRequest) -> None:
        """A room begins here."""
        self._waiting.append(request)

    def begin_chunk(self, now: float, block_tokens: int) -> float | None:
        """Begins the next chunk if none is being computed; returns when it ends, None where there is nothing to do."""
        if self.computing is not None:
            return None
        self._admit(block_tokens)
        while self._rooms:
            room = self._next()
            if room.over:
                del self._rooms[room.room]
                self.free(room)
                self._admit(block_tokens)
                continue
            first, end = room.computed, min(room.tokens, room.computed + self._chunk_tokens)
            seconds = self._curve(end) - (self._curve(first) if first else 0.0)
            room.computed, room.last_chunk = end, end - first
            if room.compute_begins_s < 0:
                room.compute_begins_s = now
            self.computing = room
            self.busy_s += seconds
            return now + seconds
        return None

    def end_chunk(self) -> ModelledRequest | None:
        """The chunk is computed. Returns its prompt if that was the last one."""
        room, self.computing = self.computing, None
        assert room is not None
        if room.computed < room.tokens:
            return None
        del self._rooms[room.room]
        if self._cache is not None:
            self._cache.learn(room.keys)
        return room

    def free(self, request: ModelledRequest) -> None:
        """Its pages may be used again."""
        self.slots_taken -= request.tokens

    def _admit(self, block_tokens: int) -> None:
        while self._waiting:
            room = self._waiting[0]
            if not room.over:
                if self.slots_taken + room.tokens > self._slots:
                    return
                self.slots_taken += room.tokens
                self.slots_taken_max = max(self.slots_taken_max, self.slots_taken)
                room.computed = self.cached(room, block_tokens)
                self._rooms[room.room] = room
            self._waiting.popleft()

    def _next(self) -> ModelledRequest:
        self._turn += 1
        if self._turn % 2 or len(self._rooms) == 1:
            return next(iter(self._rooms.values()))
        return min(self._rooms.values(), key=lambda room: room.tokens - room.computed)
