"""The decode side of the reference model: continuous batching, with keys read from the arena or the device pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.errors import CapacityError, ConfigError
from pdtransfer.hisparse.hot_requests import HotRequests
from pdtransfer.kernels.plane_views import device_tensor
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.stream import DeviceSpans, Download, span_of
from pdtransfer.layout.layout import Layout, check_slots
from pdtransfer.serve.engine_api import (
    Broken,
    CardMemory,
    EngineConfig,
    EngineDescription,
    Finished,
    HotFigures,
    Request,
    Token,
)
from pdtransfer.serve.sampling import Picked, chain, pick, tokens_digest

from .architecture import EngineOptions
from .attention import KEY_BLOCK
from .cache import Cache
from .description import COMPONENT, INDEX, check_request, describe
from .hot import HotResidency, reference_capacity
from .indexer import IndexCache
from .model import Transformer
from .numerics import first_product
from .sampling import Handoff
from .steps import AllResident, Step, StepPart


@dataclass(slots=True, eq=False)
class _DecodingRoom:
    """A landed request. The arena has the keys of rows [0, position), without the last id's."""

    request: Request
    landed: Cache  # with its KV
    rows: Tensor  # int64 cache rows by position, growth included, whole key blocks
    indexed: Tensor | None  # rows of the index cache, (2, whole key blocks)
    hot: bool  # whether it decodes with HiSparse, from the device pool
    logits_digest: bytes
    last: Picked
    ids: list[int] = field(default_factory=list[int])
    reported: bool = False  # whether step() has returned the first id, which came with aux

    @property
    def position(self) -> int:
        return len(self.request.prompt) + len(self.ids) - 1

    def end(self, eos: int) -> Literal["stop", "length"] | None:
        """The reason why the last id ends the request, or None."""
        if self.ids[-1] == eos and not self.request.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.ids) == self.request.sampling.max_tokens else None


class ReferenceDecode:
    """A DecodeEngine. Rooms beyond batch_max take turns. HiSparse rooms first wait for a place on the device."""

    def __init__(self, config: EngineConfig, options: EngineOptions, model: Transformer) -> None:
        if config.group.ranks.pp_size > 1:
            raise ConfigError(f"pp_size = {config.group.ranks.pp_size}: only prefill is split into stages")
        self._config, self._options, self._model = config, options, model
        hisparse = config.hisparse
        self._capacity = reference_capacity(config, hisparse, options.top_k) if hisparse is not None else None
        self._description = describe(config, model, options)
        # If a component has two variants, the second, in HBM, is for requests without HiSparse.
        self._layouts = {component.name: component.layout for component in self._description.components}
        self._sparse = self._layouts | {COMPONENT: self._description.components[0].layout}
        self._index: IndexCache | None = None
        self._resident: AllResident | None = None
        self._hot_rows: HotResidency | None = None
        self._hot: HotRequests | None = None
        self._rooms: dict[int, _DecodingRoom] = {}
        self._spans = DeviceSpans(config.spans, model.device)

    @property
    def card(self) -> EngineDescription:
        return self._description

    def warm_up(self) -> None:
        self._model.enter()
        first_product(self._model.device)

    @property
    def idle(self) -> bool:
        return not self._rooms and (self._hot is None or self._hot.idle)

    @property
    def figures(self) -> HotFigures:
        return HotFigures() if self._hot is None else self._hot.figures

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | CardMemory | None = None) -> None:
        description, device = self._description, self._model.device
        if arena.nbytes < description.memory_bytes or arena.readonly:
            kind = "read-only" if arena.readonly else "writable"
            raise ValueError(f"arena: {arena.nbytes} {kind} bytes, expected {description.memory_bytes} writable ones")
        on_card = device.type == "cuda"
        if on_card and not device_address:
            raise ValueError(f"arena: it was not registered with {device}")
        if on_card:
            flat = device_tensor(device_address, description.memory_bytes, device)
        else:
            flat = torch.frombuffer(arena, dtype=torch.float32, count=description.memory_bytes // 4)
        self.take(flat, None if hbm is None else _flat(hbm, description.hbm_bytes, device))
        if self._config.hisparse is not None and self._capacity is not None:
            number = flat.get_device() if on_card else None
            host = Pool(layout=self._sparse[COMPONENT], address=flat.data_ptr(), card=number, host=on_card)
            hot_cache = Cache(flat, host.layout, self._model.architecture, self._model.shard.kv_heads)
            hisparse, capacity = self._config.hisparse, self._capacity
            self._hot_rows = HotResidency(
                self._config, hisparse, capacity, self._model, host, hot_cache, self._spans
            )  # fmt: skip
            self._hot = self._hot_rows.requests

    def take(self, flat: Tensor, hbm: Tensor | None = None) -> None:
        """Decodes from this memory, which the model's device reads and writes."""
        assert self._resident is None, "attach is called once"
        near = flat if hbm is None else hbm
        sizes, heads = self._model.architecture, self._model.shard.kv_heads
        self._resident = AllResident(Cache(near, self._layouts[COMPONENT], sizes, heads))
        if INDEX in self._layouts:
            self._index = IndexCache(near, self._layouts[INDEX])

    def check(self, request: Request) -> None:
        check_request(request, self._model.architecture)
        tokens = len(request.prompt) + request.sampling.max_tokens
        slots = self._layouts_of(request)[COMPONENT].slots
        if tokens > slots:
            raise ValueError(f"{tokens} tokens, the arena has {slots} slots")
        if request.enable_hisparse and self._capacity is not None:
            try:
                self._capacity.check(tokens=len(request.prompt), growth=request.sampling.max_tokens)
            except CapacityError as error:
                raise ValueError(str(error)) from error

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        assert self._resident is not None, "attach comes before admit"
        self.check(request)
        if request.room in self._rooms:
            raise ValueError(f"room {request.room:016x} exists already")
        handoff = Handoff.unpack(aux, len(request.prompt))
        self._check_slots(request, slots)
        hot = self._hot_rows if request.enable_hisparse else None
        landed = self._resident.cache if hot is None else hot.arena
        if hot is not None:
            tokens, growth = len(request.prompt), request.sampling.max_tokens
            hot.requests.offer(request.room, slots[COMPONENT], tokens=tokens, growth=growth)
        self._rooms[request.room] = _DecodingRoom(
            request=request,
            landed=landed,
            rows=landed.index(slots[COMPONENT], KEY_BLOCK),
            indexed=self._index.index(slots[INDEX], KEY_BLOCK) if self._index else None,
            hot=hot is not None,
            logits_digest=handoff.logits_digest,
            last=handoff.first(request.sampling),
            ids=[handoff.first_token],
        )

    @torch.inference_mode()
    def step(self) -> list[Token | Finished | Broken]:
        self._model.enter()
        if self._rooms:
            self._spans.anchor()
        if self._hot is not None:
            self._hot.turn()
        events: list[Token | Finished | Broken] = []
        running: list[_DecodingRoom] = []
        ready = (number for number, room in self._rooms.items() if not room.reported or self._placed(room))
        for number in list(islice(ready, self._config.batch_max)):
            # Moved to the end of the queue, so that rooms take turns.
            room = self._rooms[number] = self._rooms.pop(number)
            if (room.reported or not self._report(room, events)) and self._placed(room):
                running.append(room)
        if running:
            running.sort(key=lambda room: (room.hot, room.position))
            name, alone = span_of([room.request.room for room in running])
            with self._spans.span("step", name, room=alone):
                logits = self._forward(running)
            refused = self._hot.refused() if self._hot is not None else ()
            for room, row in zip(running, logits, strict=True):
                self._advance(room, row, events, refused=room.request.room in refused)
        self._spans.report()
        if self._hot is not None:
            self._hot.count(exact=any(isinstance(each, Finished | Broken) for each in events))
        return events

    def cancel(self, room: int) -> None:
        self._release(room, drop=True)

    def _placed(self, room: _DecodingRoom) -> bool:
        """Whether a step may run the room."""
        return not room.hot or (self._hot is not None and self._hot.placed(room.request.room))

    def _release(self, room: int, *, drop: bool) -> None:
        """Ends the room. When this returns, nothing reads or writes its slots."""
        if self._rooms.pop(room, None) is None:
            return
        if self._hot is not None:
            self._hot.release(room, drop=drop)

    def _check_slots(self, request: Request, slots: dict[str, NDArray[np.int64]]) -> None:
        layouts = self._layouts_of(request)
        if slots.keys() != layouts.keys():
            raise ValueError(f"slots: of components {sorted(slots)}, expected {sorted(layouts)}")
        tokens = len(request.prompt) + request.sampling.max_tokens
        for name, own in slots.items():
            if own.shape != (tokens,) or own.dtype != np.int64:
                raise ValueError(f"slots of {name}: {own.dtype} of shape {own.shape}, expected int64 of {(tokens,)}")
            check_slots(own, layouts[name].slots, f"slots of {name}")

    def _layouts_of(self, request: Request) -> dict[str, Layout]:
        """The layouts of the components in which this request has rows."""
        return self._sparse if request.enable_hisparse else self._layouts

    def _forward(self, rooms: list[_DecodingRoom]) -> NDArray[np.float32]:
        """Logits (rooms, vocabulary) of each room's last id at its position."""
        parts = [
            StepPart(
                residency=residency,
                rooms=[room.request.room for room in own],
                positions=[room.position for room in own],
                rows=[room.rows for room in own],
                index=[room.indexed for room in own if room.indexed is not None],
            )
            for residency in (self._resident, self._hot_rows)
            if residency is not None and (own := [room for room in rooms if room.hot == (residency is self._hot_rows)])
        ]
        ids = [room.ids[-1] for room in rooms]
        logits = self._model.step(Step(ids=ids, parts=parts, index=self._index, spans=self._spans))
        if self._hot is not None and any(room.hot for room in rooms):
            self._hot.back_up()
            self._hot.stepped()
        return Download(logits).get().numpy()

    def _advance(
        self,
        room: _DecodingRoom,
        logits: NDArray[np.float32],
        events: list[Token | Finished | Broken],
        *,
        refused: bool,
    ) -> None:
        error = "the device has no place for its picks" if refused else ""
        if not np.isfinite(logits).all():
            error = "the logits are not finite"
        if error:
            self._release(room.request.room, drop=True)
            events.append(Broken(room=room.request.room, detail=f"at position {room.position}: {error}"))
            return
        room.logits_digest = chain(room.logits_digest, logits)
        request = room.request
        room.last = pick(logits, request.sampling, prompt=request.prompt, ids=room.ids, eos=(self._options.eos,))
        room.ids.append(room.last.id)
        self._report(room, events)

    def _report(self, room: _DecodingRoom, events: list[Token | Finished | Broken]) -> bool:
        """Reports the last id, and the end if it ends the request. Returns whether it does."""
        room.reported = True
        number = room.request.room
        events.append(Token(room=number, index=len(room.ids) - 1, id=room.ids[-1], logprobs=room.last.logprobs))
        reason = room.end(self._options.eos)
        if reason is None:
            return False
        kv_digest = self._model.whole_digest(self._digests(room)) if self._model.digests else b""
        events.append(Finished(
            room=number, reason=reason, tokens_digest=tokens_digest(room.ids), logits_digest=room.logits_digest,
            kv_digest=kv_digest,
        ))  # fmt: skip
        self._release(number, drop=False)
        return True

    def _digests(self, room: _DecodingRoom) -> NDArray[np.uint8]:
        """Digests of the room's rows: by head, then of the index."""
        heads = room.landed.digests(room.rows[: room.position])
        if self._index is None or room.indexed is None:
            return heads
        return np.concatenate((heads, self._index.digest(room.indexed[:, : room.position])[np.newaxis]))


def _flat(memory: memoryview | CardMemory, byte_count: int, device: torch.device) -> Tensor:
    """The memory as a flat float32 tensor. Raises ValueError for memory of another device."""
    if isinstance(memory, CardMemory) != (device.type == "cuda"):
        raise ValueError(f"hbm: {type(memory).__name__}, the engine computes on {device}")
    if isinstance(memory, CardMemory):
        return device_tensor(memory.address, byte_count, device)
    return torch.frombuffer(memory, dtype=torch.float32, count=byte_count // 4)
