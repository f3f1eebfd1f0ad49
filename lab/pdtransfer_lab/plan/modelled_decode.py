"""A decode worker of the model: the project's own admission and prefix cache in front of an engine that is a rate.

All requests of a batch get a token each step. So a step is counted once for all of them: a request ends at the step
whose number was known when it joined.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil

from pdtransfer.handoff.admission import Admission
from pdtransfer.handoff.prefix import PrefixCache
from pdtransfer.handoff.slot_allocator import SlotAllocator
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.limits import Limits

from .modelled_request import ModelledRequest
from .rates import Rates

_EPSILON = 1e-9  # of a step: times are sums of floats


def arena_component(*, slots: int, page_size: int, bytes_per_token: int) -> Component:
    """One component with a row for each token, as wide as all layers together."""
    layout = host_layout(
        "page_first", kinds=("latent",), layers=1, heads=1, head_bytes=bytes_per_token, dtype="uint8",
        slots=slots // page_size * page_size, page_size=page_size,
    )  # fmt: skip
    return Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=layout)


class ModelledDecode:
    """`on_steps` counts tokens; `on_end` takes each request that is answered, with the time."""

    def __init__(
        self, peer: str, component: Component, rates: Rates, limits: Limits, *, batch_max: int, prefix_cache: bool,
        on_steps: Callable[[float, int], None], on_end: Callable[[ModelledRequest, float], None],
    ) -> None:  # fmt: skip
        self.peer, self._rates, self._batch_max = peer, rates, batch_max
        self.arena = SlotAllocator([component])
        self.cache = PrefixCache(self.arena, limits, model="model", weights=b"", enabled=prefix_cache)
        self.admission = Admission(self.cache, limits)
        self._on_steps, self._on_end = on_steps, on_end
        self.queued: dict[int, ModelledRequest] = {}  # that wait for slots, by room
        self.slots = self.arena.free[0].slots
        self.slots_taken_max = self.rooms = self.batch_high = 0
        self.link_free_s = self.busy_s = 0.0
        self.received_bytes = 0
        self._steps = 0  # that have ended
        self._batch: list[tuple[int, int, ModelledRequest]] = []  # a heap: the step at which it ends, its room
        self._size = self._context = self._fresh = (
            0  # requests of the batch, their tokens, and how many are in their first step
        )
        self._joining: list[ModelledRequest] = []
        self._since_s = 0.0  # when step `_steps` ended, while there is a batch
        self._step_s = 0.0
        self.due_s = -1.0  # when `advance` is due; below 0: never

    @property
    def slots_taken(self) -> int:
        """Slots of rooms; those of blocks that nobody uses are free."""
        return self.slots - self.cache.free_slots[0]

    def join(self, request: ModelledRequest, now: float) -> float:
        """The room has landed: it joins the batch at the end of the step under way. Returns when `advance` is due."""
        self._joining.append(request)
        if not self._size:
            self._since_s, self.due_s = now, now
        else:
            ended = ceil((now - self._since_s) / self._step_s - _EPSILON)
            self.due_s = min(self.due_s, self._since_s + max(0, ended) * self._step_s)
        return self.due_s

    def advance(self, now: float) -> float:
        """Steps have ended by now, the time that was due: requests end and join. Returns when it is due next, or -1."""
        if self._size:
            done = round((now - self._since_s) / self._step_s)
            if done:
                self._on_steps(self._step_s, done * self._size - self._fresh)
                self._fresh = 0
                self._steps += done
                self._context += done * self._size
                self.busy_s += done * self._step_s
            self._since_s = now
        while self._batch and self._batch[0][0] <= self._steps:
            request = heappop(self._batch)[2]
            self._size -= 1
            self._context -= request.tokens + request.output_tokens
            self._on_end(request, now)
        joined, self._joining = self._joining, []
        for request in joined:
            self._size += 1
            self._context += request.tokens + self._rates.first_step_tokens - 1
            ends_at = self._steps + max(1, request.output_tokens - self._rates.first_step_tokens + 1)
            heappush(self._batch, (ends_at, request.room, request))
        self._fresh += len(joined)
        self.batch_high = max(self.batch_high, self._size)
        if not self._size:
            self.due_s = -1.0
            return self.due_s
        at_once = min(self._size, self._batch_max)
        steps = self._batch[0][0] - self._steps  # until the batch changes, unless a room joins: contexts grow by half
        # Beyond the largest batch requests take turns: each waits for the others' steps, too.
        turns = self._size / at_once
        context = (self._context / self._size + steps / 2) * at_once
        self._step_s = turns * (self._rates.decode(at_once) + self._rates.context_s * context)
        for request in joined:
            request.first_token_s = now + self._step_s
        self.due_s = now + steps * self._step_s
        return self.due_s
