"""A hot pool beside what it must amount to: pools of any layout, requests that come, grow and go, and every byte known.

Contents are hashed of (kind, layer, head, token): an arena slot's first token is its own number, later ones are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pdtransfer.hisparse.hot_pool import HotPool
from pdtransfer.kernels.pools import Pool
from tests.support.layout_tensors import CANARY, Model, content, mha, mla
from tests.support.layout_tensors import Pool as Tensors
from tests.support.on_card import OnCard


class Place:
    """A pool's bytes: this process's, or such as a GPU sees, whose tensors are a copy of them."""

    def __init__(self, tensors: Tensors, *, on_gpu: bool, host: bool) -> None:
        self.tensors, self._there = tensors, OnCard(host=host) if on_gpu else None
        address = tensors.memory.ctypes.data if self._there is None else self._there.put(tensors.memory)
        self.pool = Pool(layout=tensors.layout, address=address, device=0 if on_gpu else None, host=on_gpu and host)

    def look(self) -> None:
        """Brings the tensors up to date."""
        if self._there is not None:
            self.tensors.memory[:] = self._there.get(len(self.tensors.memory))

    def change(self) -> None:
        """Sends the tensors' bytes."""
        if self._there is not None:
            self._there.replace(self.tensors.memory)

    def write(self, slots: Any, tokens: Any) -> None:
        """Gives slots the rows of tokens, in every plane."""
        self.look()
        self.tensors.land(np.asarray(tokens, np.int64), np.asarray(slots, np.int64))
        self.change()

    def check(self, slots: Any, tokens: Any, layers: Sequence[int]) -> None:
        """Every plane of these layers has the rows of tokens at slots."""
        slots, tokens = np.asarray(slots, np.int64), np.asarray(tokens, np.int64)
        for kind, layer, head in self.tensors.model.rows():
            if layer in layers:
                wanted = content(kind, layer, head, tokens, self.tensors.model.head_bytes(kind))
                assert np.array_equal(self.tensors.read(kind, layer, head, slots), wanted), (kind, layer, head)

    def close(self) -> None:
        if self._there is not None:
            self._there.close()


class World:
    """Requests by row: tokens[row][position] is whose content it must have."""

    def __init__(
        self, model: Model, *, host_layout: str, device_layout: str, groups: Sequence[range], rows: int, hot: int,
        top: int, tokens_max: int, page_size: int = 4, seed: int = 0, on_gpu: bool = False, spare: int = -1,
    ) -> None:  # fmt: skip
        self.random = np.random.default_rng(seed)
        self.groups, self.rows, self.hot, self.top, self.tokens_max = groups, rows, hot, top, tokens_max
        pages = -(-rows * tokens_max // page_size) + 1
        arena = Tensors(name=host_layout, model=model, page_size=page_size, slots=pages * page_size, base=64)
        arena.fill(np.arange(arena.slots))
        pages = -(-rows * (hot + 1) // page_size) + 1
        buffer = Tensors(name=device_layout, model=model, page_size=page_size, slots=pages * page_size)
        self.host, self.device = Place(arena, on_gpu=on_gpu, host=True), Place(buffer, on_gpu=on_gpu, host=False)
        self.pool = HotPool(
            self.host.pool, self.device.pool, groups=groups, rows=rows, hot=hot, top=top, tokens_max=tokens_max,
            spare=spare,
        )  # fmt: skip
        self.where = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self.layers = [layer for group in groups for layer in group]
        self.tokens: dict[int, list[int]] = {}
        self.host_slots: dict[int, Any] = {}
        self.device_slots: dict[int, Any] = {}
        self.free_host = set(range(arena.slots))
        self.free_device = set(range(buffer.slots)) - {spare}
        self.used = set[int]()  # device slots that somebody has had
        self.next_token = 1 << 20
        self.preloaded = 0  # tokens

    def take(self, free: set[int], count: int) -> Any:
        """Slots from anywhere."""
        taken = self.random.permutation(sorted(free))[:count]
        free.difference_update(taken.tolist())
        return taken.astype(np.int64)

    def start(self, row: int, tokens: int, growth: int, *, again: Any = None) -> None:
        """Somebody new with `row`; or `again`, a request that was stopped: (host slots, tokens)."""
        if again is None:
            slots = self.take(self.free_host, tokens + growth)
            held = slots[:tokens].tolist()
            self.host.write(slots[:tokens], held)
        else:
            slots, held = again
        places = self.take(self.free_device, min(len(slots), self.hot) + 1)
        self.used.update(places.tolist())
        self.pool.start(row, slots, len(held), places)
        self.preloaded += len(held) if len(held) <= self.hot else 0
        self.tokens[row], self.host_slots[row], self.device_slots[row] = list(held), slots, places

    def stop(self, row: int, *, drop: bool = True) -> Any:
        """What `start` takes as `again`."""
        self.pool.stop(row)
        self.free_device.update(self.device_slots.pop(row).tolist())
        kept = self.host_slots.pop(row), self.tokens.pop(row)
        if drop:
            self.free_host.update(kept[0].tolist())
        return kept

    def there(self, array: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(np.asarray(array)).to(self.where, dtype)

    def step(self, rows: Sequence[int], *, padding: int = 0, dtype: torch.dtype = torch.int32) -> None:
        """One step of these requests: every group's swap-in, then the newest tokens; all bytes looked at."""
        lengths = [len(self.tokens[row]) for row in rows]
        given = self.there([*rows, *[-1] * padding], dtype), self.there([*lengths, *[7] * padding], dtype)
        real = self.there([len(rows)])
        for index, layers in enumerate(self.groups):
            top = int(self.random.integers(1, self.top + 1))
            picked = np.full((len(rows) + padding, top), 3)
            for request, length in enumerate(lengths):
                window = self.random.integers(1, length + 1)
                picked[request] = length - 1 - self.random.integers(0, window, top)
                picked[request, self.random.random(top) < 0.1] = -1
            slots = _looked_at(self.pool.swap_in(index, self.there(picked, dtype), given[1], given[0], real=real))
            self.device.look()
            assert (slots[len(rows) :] == -1).all()
            for request, row in enumerate(rows):
                named = picked[request] >= 0
                assert (slots[request][~named] == -1).all()
                assert set(slots[request][named].tolist()) <= set(self.device_slots[row].tolist())
                wanted = np.array(self.tokens[row])[picked[request][named]]
                self.device.check(slots[request][named], wanted, layers)
        self.grow(rows, given, real)

    def grow(self, rows: Sequence[int], given: Any, real: Any) -> None:
        """Each request gets a token, as an engine would write it, and it is backed up."""
        slots = _looked_at(self.pool.newest(*given, real=real))[: len(rows)]
        fresh = np.arange(self.next_token, self.next_token + len(rows))
        self.next_token += len(rows)
        for row, slot in zip(rows, slots.tolist(), strict=True):
            length = len(self.tokens[row])
            assert slot == self.device_slots[row][length if length < self.hot else -1]
        self.device.write(slots, fresh)
        self.pool.back_up(*given, real=real).wait()
        self.host.look()
        for row, token in zip(rows, fresh.tolist(), strict=True):
            self.tokens[row].append(token)
            self.host.check(self.host_slots[row][: len(self.tokens[row])], self.tokens[row], self.layers)

    def check_rest(self) -> None:
        """Nobody was refused, no prompt was staged, and around the pools nothing was touched."""
        assert self.pool.refused.tolist() == [0] * self.rows
        assert self.pool.admission_bytes == self.preloaded * self.device.tensors.layout.row_bytes
        for place in (self.host, self.device):
            place.look()
            memory, base = place.tensors.memory, place.tensors.base
            assert (memory[:base] == CANARY).all()
            assert (memory[-64:] == CANARY).all()
        never = np.array(sorted(set(range(self.device.tensors.slots)) - self.used), np.int64)
        for kind, layer, head in self.device.tensors.model.rows():
            assert (self.device.tensors.read(kind, layer, head, never) == CANARY).all()

    def close(self) -> None:
        self.pool.close()
        self.host.close()
        self.device.close()


def _looked_at(array: Any) -> Any:
    """A pool's array, which is a tensor on a GPU, as numpy's."""
    return torch.as_tensor(array).cpu().numpy()


LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MODELS = {
    "mla": (mla(layers=range(3), head_bytes=656), (range(2), range(2, 3))),
    "gqa": (mha(layers=range(2, 6), heads=range(2), head_bytes=8), (range(2, 4), range(4, 6))),
}


def world(name: str = "mla", host: str = "page_first", device: str = "layer_first", **changed: Any) -> World:
    model, groups = MODELS[name]
    sizes: dict[str, Any] = {"rows": 3, "hot": 8, "top": 6, "tokens_max": 32}
    return World(model, host_layout=host, device_layout=device, groups=groups, **(sizes | changed))
