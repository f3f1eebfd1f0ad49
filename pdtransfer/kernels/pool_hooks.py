"""What an engine's pools call: a request's rows up to the card layer by layer, or down to the host all at once.

Both queue their work and return; with pools of this process they do it at once, and their events have fired.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from .card import Card, card
from .event import Event
from .kv_copy import Asked, checked, kv_copy, listed
from .pools import Pool, Slots
from .push import Backend, push

_POOLS_MAX = 64  # an engine has a few


class Fence(Protocol):
    """When a layer's rows are there: kernels.event.Event, or what has fired already."""

    def query(self) -> bool:
        """Whether they are; returns at once."""
        ...

    def wait(self) -> None:
        """Sleeps until they are."""
        ...

    def hold(self, stream: int) -> None:
        """Has what is queued there from now on wait for them, on the card."""
        ...


class Fired:
    """An event of work that was done when it was asked for."""

    __slots__ = ()

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def hold(self, stream: int) -> None:
        pass


def load_to_device_per_layer(
    device: Pool, host: Pool, device_slots: Slots, host_slots: Slots, count: int, *, stream: int = 0
) -> dict[int, Fence]:
    """Decode: copies rows host_slots[i] to device_slots[i], one layer after the other; by layer, in their order, the
    event that fires when its rows are there.

    So the first layers compute while the others are on their way: let a layer's stream `hold` for its event. The host
    rows stay until the last event has fired. Arguments and errors are kv_copy's; where the card refuses a layer, this
    raises once no layer is under way any more.
    """
    asked = checked(device, host, device_slots, host_slots, count)
    parts = zip(_by_layer(device).items(), _by_layer(host).values(), strict=True)
    if device.card is None:
        for (_, target), source in parts:
            kv_copy(target, source, device_slots, host_slots, count)
        return dict.fromkeys(_by_layer(device), Fired())
    here, events = card(device.card), dict[int, Fence]()
    sides = asked.target, asked.source
    known = None if not count or any(side.at for side in sides) else _Uploaded(here, asked, stream)
    ours, theirs = (device_slots, host_slots) if known is None else (known.targets, known.sources)
    try:
        for (layer, target), source in parts:
            kv_copy(target, source, ours, theirs, count, stream=stream)
            event = events[layer] = Event(here)
            event.record(stream)
    except BaseException:
        here.synchronise(stream)  # who gets no event can wait for none
        raise
    finally:
        if known is not None:
            here.free(known.address, stream)
    return events


def backup_from_device_all_layer(
    host: Pool, device: Pool, host_slots: Slots, device_slots: Slots, count: int, *, backend: Backend = "auto",
    stream: int = 0,
) -> Fence:  # fmt: skip
    """Prefill: copies rows device_slots[i] to host_slots[i], all layers together; the event that fires when they are
    there, until when the device's rows have to stay. Arguments and errors are push's."""
    event = None if device.card is None else Event(card(device.card))  # before there is anything to wait for
    push(host, device, host_slots, device_slots, count, backend=backend, stream=stream)
    if event is None:
        return Fired()
    event.record(stream)
    return event


@lru_cache(_POOLS_MAX)
def _by_layer(pool: Pool) -> dict[int, Pool]:
    layers = sorted({plane.layer for plane in pool.layout.planes})
    return {
        layer: Pool(layout=pool.layout.layers(layer, layer + 1), address=pool.address, card=pool.card, host=pool.host)
        for layer in layers
    }


class _OnCard:
    """int64 (n,) in a card's memory."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i8", "data": (address, True), "strides": None, "version": 3,
        }  # fmt: skip


class _Uploaded:
    """Both sides' slots, sent to the card once for all layers."""

    def __init__(self, here: Card, asked: Asked, stream: int) -> None:
        targets, sources = listed(asked.target, asked.rows), listed(asked.source, asked.rows)
        both = np.concatenate((targets, sources))
        self.address = here.given(both, stream)
        self.targets = _OnCard(self.address, len(targets))
        self.sources = _OnCard(self.address + targets.nbytes, len(sources))
