"""Hooks for an engine's pools: load a request's rows to the GPU layer by layer, or back them up to the host at once.

Both queue their work and return. With pools of this process they copy at once, and their events have fired.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from .gpu import CudaEvent, Gpu, gpu_at
from .kv_copy import CheckedCopy, check_copy, kv_copy
from .pools import GpuArray, Pool, Slots
from .push import Backend, push

_POOLS_MAX = 64  # an engine has a few


class LayerFence(Protocol):
    """Fires when the rows are copied: a CudaEvent, or Fired."""

    def query(self) -> bool:
        """Whether it has fired; returns at once."""
        ...

    def wait(self) -> None:
        """Sleeps until it has fired."""
        ...

    def hold(self, stream: int) -> None:
        """Makes later work on `stream` wait for it, on the GPU."""
        ...


class Fired:
    """The event of finished work."""

    __slots__ = ()

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def hold(self, stream: int) -> None:
        pass


def load_to_device_per_layer(
    device_pool: Pool, host_pool: Pool, device_slots: Slots, host_slots: Slots, count: int, *, stream: int = 0
) -> dict[int, LayerFence]:
    """Copies rows host_slots[i] to device_slots[i] for decode, layer by layer. Returns each layer's event, in order.

    The first layers compute while later layers are copied: call `hold` on the layer's event for the compute stream. The
    host rows must stay until the last event has fired. Arguments and errors are kv_copy's. If the driver refuses a
    layer, this raises after all queued layers have ended.
    """
    copy = check_copy(device_pool, host_pool, device_slots, host_slots, count)
    parts = zip(_by_layer(device_pool).items(), _by_layer(host_pool).values(), strict=True)
    if device_pool.device is None:
        for (_, target), source in parts:
            kv_copy(target, source, device_slots, host_slots, count)
        return dict.fromkeys(_by_layer(device_pool), Fired())
    gpu, events = gpu_at(device_pool.device), dict[int, LayerFence]()
    count_known = copy.known
    uploaded = None if not count or not count_known else _UploadedSlots(gpu, copy, stream)
    target_slots, source_slots = (device_slots, host_slots) if uploaded is None else (uploaded.target, uploaded.source)
    try:
        for (layer, target), source in parts:
            kv_copy(target, source, target_slots, source_slots, count, stream=stream)
            event = events[layer] = CudaEvent(gpu)
            event.record(stream)
    except BaseException:
        gpu.synchronise(stream)  # the caller gets no event to wait for
        raise
    finally:
        if uploaded is not None:
            gpu.free(uploaded.address, stream)
    return events


def backup_from_device_all_layer(
    host_pool: Pool, device_pool: Pool, host_slots: Slots, device_slots: Slots, count: int, *,
    backend: Backend = "auto", stream: int = 0,
) -> LayerFence:  # fmt: skip
    """Copies rows device_slots[i] to host_slots[i] for prefill, all layers at once. Returns the event of its end.

    The device's rows must stay until the event has fired. Arguments and errors are push's.
    """
    event = None if device_pool.device is None else CudaEvent(gpu_at(device_pool.device))  # before anything is queued
    push(host_pool, device_pool, host_slots, device_slots, count, backend=backend, stream=stream)
    if event is None:
        return Fired()
    event.record(stream)
    return event


@lru_cache(_POOLS_MAX)
def _by_layer(pool: Pool) -> dict[int, Pool]:
    layers = sorted({plane.layer for plane in pool.layout.planes})
    return {layer: pool.layers(layer, layer + 1) for layer in layers}


class _UploadedSlots:
    """Both sides' slots in the GPU's memory, uploaded once for all layers."""

    def __init__(self, gpu: Gpu, copy: CheckedCopy, stream: int) -> None:
        target, source = copy.target_slots, copy.source_slots
        self.address = gpu.upload_new(np.concatenate((target, source)), stream)
        self.target = GpuArray(self.address, len(target))
        self.source = GpuArray(self.address + target.nbytes, len(source))
