"""A prefill and a decode engine with components of any kind, and the copies of a hand-off between their memories."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdtransfer.kernels import copy
from pdtransfer.layout.layout import slots_of_rows
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import plan
from pdtransfer.serve.engine_api import Computed, Prefilled, Request, SharedMemory


class ComponentPair:
    """A prefill and a decode engine, and a copy of each cell between them."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self.prefill, self.decode = prefill, decode
        description = self.decode.description
        self.memories = {
            "dram": np.zeros(description.memory_bytes, np.uint8),
            "hbm": np.zeros(description.hbm_bytes, np.uint8),
        }
        hbm = {"hbm": memoryview(self.memories["hbm"])} if description.hbm_bytes else {}
        self.decode.attach(memoryview(self.memories["dram"]), **hbm)
        self._source = {component.name: component for component in self.prefill.description.components}
        self.target = {component.name: component for component in description.components}
        self._next = dict.fromkeys(self.target, 0)
        self.slots: dict[int, dict[str, Any]] = {}

    def land(self, request: Request) -> bytes:
        """Prefills the prompt into decode's memories. Returns the aux."""
        assert self.prefill.admit(request)
        tokens = len(request.prompt) + request.sampling.max_tokens
        rows = {name: each.rows(tokens) for name, each in self.target.items()}
        self.slots[request.room] = {name: self._next[name] + np.arange(count) for name, count in rows.items()}
        for name, count in rows.items():
            self._next[name] += count
        while True:
            for event in self.prefill.step():
                if isinstance(event, Prefilled):
                    self.prefill.free(request.room)
                    return event.aux
                self._copy(event)

    def hand_over(self, request: Request) -> None:
        aux = self.land(request)
        self.decode.admit(request, self.slots[request.room], aux)

    def _copy(self, cell: Computed) -> None:
        source, target = self._source[cell.component], self.target[cell.component]
        slots = slots_of_rows(cell.pages, source.layout.page_size, cell.rows, skip=cell.skip)
        work = plan(pair(source.layout, target.layout), slots, self.slots[cell.room][cell.component][slice(*cell.rows)])
        assert isinstance(self.prefill.pool, SharedMemory)
        pool = np.frombuffer(self.prefill.pool.view, np.uint8)
        copy(work, pool.ctypes.data, self.memories[target.memory].ctypes.data)

    def run(self) -> dict[int, list[Any]]:
        """Decode's events by room, until nothing is left."""
        events: dict[int, list[Any]] = {}
        while not self.decode.idle:
            for event in self.decode.step():
                events.setdefault(event.room, []).append(event)
        return events
