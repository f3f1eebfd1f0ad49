"""A prefill or decode client in a process of its own, that does what lines tell it and says what happened in lines.

Every byte that crosses says which room, layer and row it is of. Decode looks at a landed room's rows, gives them
another content, which says whose they are, keeps them for a while, and looks again before it releases them: a write
that comes too late, into slots that somebody else holds by then, is seen by either look.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import sys
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtransfer.bus.keys import AllowList, KeyPair
from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.client.settings import NodeSettings
from pdtransfer.handoff.effects import RoomAsked, RoomDrained, RoomFailed, RoomLanded, RoomLeased, RoomReady
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import allocate
from pdtransfer.transports.options import ArenaOptions, Network, WriterOptions
from tests.support.internals import core_of
from tests.support.networks import DATA_PORTS
from tests.support.planted import plant
from tests.support.processes import children, open_files

LAYERS, ROW_WORDS = 16, 144  # 18 KiB a token
PAGE_SIZE, SOURCE_SLOTS, SLOTS = 16, 6_144, 4_096
LIMITS = Limits(silence_ms=3_000, session_silence_ms=10_000, ping_ms=250, fence_poll_ms=20)
PORT = 7_101  # of a prefill
ROOM_S = 20.0  # until a room's deadline
_HELD = 1 << 31  # in place of a room's number: its rows, as their holder has written them
_ROWS = 256  # looked at in one piece

Words = NDArray[np.uint64]


def component(name: str, *, page_size: int, slots: int) -> Component:
    """A pool in host memory of that layout, at 0."""
    layout = host_layout(
        name, kinds=["latent"], layers=range(LAYERS), heads=range(1), head_bytes=8 * ROW_WORDS, dtype="bfloat16",
        slots=slots, page_size=page_size, base=0,
    )  # fmt: skip
    return Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=layout)


def pattern(room: int, first_row: int, end_row: int) -> Words:
    """What those rows of a room hold, u64 (rows, layers, words): room, layer, row and place of each word."""
    row = np.arange(first_row, end_row, dtype=np.uint64)[:, None, None] << np.uint64(8)
    layer = np.arange(LAYERS, dtype=np.uint64)[None, :, None] << np.uint64(24)
    return np.uint64(room << 32) + layer + row + np.arange(ROW_WORDS, dtype=np.uint64)


def difference(rows: Words, expected: Words, slots: NDArray[np.int64]) -> str:
    """What a person has to know about the first word that is not as expected; empty where all are."""
    wrong = np.argwhere(rows != expected)
    if not len(wrong):
        return ""
    at = tuple(wrong[0])
    held, word = int(rows[at]), int(expected[at])
    text = [
        f"room {each >> 32 & ~_HELD:d}{' as held' if each >> 63 else ''} {each & 0xFFFFFFFF:#x}"
        for each in (held, word)
    ]
    return f"slot {slots[at[0]]}: {text[0]} in place of {text[1]}; {len(wrong)} words"


class Host:
    """What both roles share: lines in, lines out, and a client between them."""

    client: PrefillClient | DecodeClient

    def __init__(self, node: str, keys: dict[str, str], allowed: dict[str, str]) -> None:
        self.settings = NodeSettings(
            node=node, model="m", weights=b"w", limits=LIMITS, keys=KeyPair(**keys), allowed=AllowList(allowed)
        )
        self._partial = b""

    def report(self, kind: str, room: int = 0, **more: Any) -> None:
        print(json.dumps({"kind": kind, "room": room, **more}), flush=True)

    def serve(self) -> None:
        """Until nobody tells it anything any more."""
        with self.client:
            self.report("up")
            while True:
                timeout = self.late()
                readable = select.select([0, self.client.fileno()], [], [], timeout)[0]
                if 0 in readable and not self._receive():
                    return
                for event in self.client.poll():
                    self.happened(event)

    def _receive(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            name, *arguments = json.loads(line)
            getattr(self, f"do_{name}")(*arguments)
        return bool(data)

    def do_abort(self, room: int) -> None:
        self.client.abort(room)

    def do_rest(self, number: int) -> None:
        """What it holds, and what it has open."""
        files, engines = open_files(), len(children(os.getpid()))
        self.report("rest", number, files=files, engines=engines, **self.held())

    def late(self) -> float | None:
        """Seconds until something is to be done."""
        return None

    def happened(self, event: Any) -> None:
        raise NotImplementedError

    def held(self) -> dict[str, Any]:
        raise NotImplementedError


class PrefillHost(Host):
    """Computes nothing: a room's pages hold what its number says, and other rooms' as soon as it has drained."""

    client: PrefillClient

    def __init__(self, node: str, keys: dict[str, str], allowed: dict[str, str], address: str, advertise: str) -> None:
        super().__init__(node, keys, allowed)
        pool = component("layer_first", page_size=PAGE_SIZE, slots=SOURCE_SLOTS)
        self._memory = allocate(pool.layout.end)
        self._rows = self._memory.array[: pool.layout.end].view(np.uint64).reshape(LAYERS, SOURCE_SLOTS, ROW_WORDS)
        self._free = list(range(SOURCE_SLOTS // PAGE_SIZE))
        self._waiting: deque[tuple[int, int, str]] = deque()
        self._pages: dict[int, list[int]] = {}
        self._tokens: dict[int, int] = {}
        self._pushed: dict[int, int] = {}
        self.client = PrefillClient(
            self.settings, [pool], bind=f"tcp://{address}:{PORT}",
            writer=WriterOptions(
                pool_address=self._memory.address, transport="mooncake",
                network=Network(host=advertise, ports=DATA_PORTS),
            ),
        )  # fmt: skip

    def do_open(self, room: int, tokens: int, push: str) -> None:
        self._waiting.append((room, tokens, push))
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._free) >= -(-self._waiting[0][1] // PAGE_SIZE):
            room, tokens, push = self._waiting.popleft()
            self._pages[room] = [self._free.pop() for _ in range(-(-tokens // PAGE_SIZE))]
            self._tokens[room] = tokens
            self.client.open(room, tokens=tokens, time_left_s=ROOM_S)
            self._pushed[room] = 0
            if push != "none":
                self.do_push(room, whole=push == "all")

    def do_push(self, room: int, whole: bool = True) -> None:
        """What is not yet pushed of it, and finish; or all but its last cell."""
        if room not in self._pages:
            return  # it has failed already
        pages, tokens = np.array(self._pages[room]), self._tokens[room]
        slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[:tokens]
        for first in range(self._pushed[room], tokens if whole else tokens - _ROWS, _ROWS):
            end = self._pushed[room] = min(first + _ROWS, tokens)
            self._rows[:, slots[first:end]] = pattern(room, first, end).transpose(1, 0, 2)
            self.client.push(room, pages, rows=(first, end))
        if whole:
            self.client.finish(room, aux=b"%d" % room)

    def do_abort(self, room: int) -> None:
        waiting = [each for each in self._waiting if each[0] == room]
        for each in waiting:
            self._waiting.remove(each)
            self.report("drained", room)
        if not waiting:
            super().do_abort(room)

    def happened(self, event: RoomAsked | RoomLeased | RoomLanded | RoomFailed | RoomDrained) -> None:
        match event:
            case RoomAsked():
                pass  # it is opened by a line, or was given up before
            case RoomFailed(room, cause, detail):
                self.report("failed", room, cause=cause.value, detail=detail)
            case RoomDrained(room):
                self._free += self._pages.pop(room)
                del self._tokens[room], self._pushed[room]
                self._admit()
                self.report("drained", room)
            case _:
                self.report(type(event).__name__.removeprefix("Room").lower(), event.room)

    def held(self) -> dict[str, Any]:
        core = core_of(self.client)
        return {"idle": core.idle and not self._pages, "used": SOURCE_SLOTS // PAGE_SIZE - len(self._free)}


class DecodeHost(Host):
    """Decodes nothing: holds what has landed for a while."""

    client: DecodeClient

    def __init__(self, node: str, keys: dict[str, str], allowed: dict[str, str], address: str, advertise: str) -> None:
        super().__init__(node, keys, allowed)
        pool = component("page_first", page_size=1, slots=SLOTS)
        arena = ArenaMemory.create(pool.layout.end, huge_pages="never")
        self._rows = arena.mapping.array[: pool.layout.end].view(np.uint64).reshape(SLOTS, LAYERS, ROW_WORDS)
        self._begun: dict[int, tuple[int, float, float]] = {}  # tokens, when, held for so long
        self._holding: list[tuple[float, int]] = []
        self._slots: dict[int, NDArray[np.int64]] = {}
        self.client = DecodeClient(
            self.settings, [pool], arena, prefix_cache=False,
            options=ArenaOptions(transport="mooncake", network=Network(host=advertise, ports=DATA_PORTS)),
        )  # fmt: skip

    def do_expect(self, room: int, tokens: int, source: str, hold_s: float) -> None:
        self._begun[room] = tokens, time.monotonic(), hold_s
        self.client.expect(room, tokens=tokens, sources=[source], time_left_s=ROOM_S)

    def do_seen(self, room: int) -> None:
        """Reports whether a row of it has come."""
        self.report("seen", room, rows=int(np.count_nonzero(self._rows[:, :, 0] >> np.uint64(32) == room)))

    def do_let_go(self, room: int) -> None:
        """It is held no longer."""
        self._holding = [(0.0 if each == room else when, each) for when, each in self._holding]
        heapq.heapify(self._holding)

    def happened(self, event: RoomReady | RoomFailed) -> None:
        tokens, begun, hold_s = self._begun.pop(event.room)
        if isinstance(event, RoomFailed):
            self.report("failed", event.room, cause=event.cause.value, detail=event.detail)
            return
        taken_s = time.monotonic() - begun
        slots = event.slots["kv"]
        wrong = self._looked_at(slots, event.room)
        if len(slots) != tokens or event.aux != b"%d" % event.room:
            wrong = f"{len(slots)} slots, aux {event.aux!r}"
        for first in range(0, tokens, _ROWS):
            end = min(first + _ROWS, tokens)
            self._rows[slots[first:end]] = pattern(event.room | _HELD, first, end)
        self._slots[event.room] = slots
        heapq.heappush(self._holding, (time.monotonic() + hold_s, event.room))
        self.report("ready", event.room, wrong=wrong, seconds=taken_s)

    def late(self) -> float | None:
        while self._holding:
            left = self._holding[0][0] - time.monotonic()
            if left > 0:
                return left
            _, room = heapq.heappop(self._holding)
            wrong = self._looked_at(self._slots.pop(room), room | _HELD)
            self.client.release(room)
            self.report("released", room, wrong=wrong)
        return None

    def _looked_at(self, slots: NDArray[np.int64], room: int) -> str:
        for first in range(0, len(slots), _ROWS):
            some = slots[first : first + _ROWS]
            if wrong := difference(self._rows[some], pattern(room, first, first + len(some)), some):
                return wrong
        return ""

    def held(self) -> dict[str, Any]:
        core = core_of(self.client)
        return {"idle": core.idle, "used": SLOTS - core.arena.free[0].free_slots}


def main() -> None:
    for name in sys.argv[1:]:
        plant(name)
    role, *arguments = json.loads(sys.stdin.buffer.raw.readline())
    prefill_host = PrefillHost(*arguments) if role == "prefill" else DecodeHost(*arguments)
    prefill_host.serve()


if __name__ == "__main__":
    main()
