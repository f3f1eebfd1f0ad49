"""KV that crosses between two hosts, as two network namespaces, over TCP; and every fault that is to be had.

`python -m tests.serve.integration.far_arena FILES TRANSPORT` is decode's host, run in a namespace of its own; it
starts prefill's (two_hosts), and prints what became of rooms, by fault, as a line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pdtransfer.client.clients import DecodeClient
from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.kernels import checksum_copy
from pdtransfer.layout.checksum import lines_of, runs_of
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.options import ArenaOptions
from tests.support.bus_peers import pair
from tests.support.client_pair import component, settings
from tests.support.internals import core_of, node_of, sessions_of
from tests.support.processes import deliver
from tests.support.two_hosts import HERE, PATIENCE_S, THERE, TOKENS, Far, Link, ip, known, pages_of, pool
from tests.support.waiting import wait_for


class Decode:
    """Decode's host: rooms of half the arena, one of which is held while the next fault happens."""

    def __init__(self, files: Path, transport: str) -> None:
        p, d = pair(), pair()
        self.far = Far()
        ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(self.far.process.pid))
        self.link = Link("near", HERE, THERE)
        bound = self.far.ask(
            {"own": {"public": p.public, "secret": p.secret}, "other": d.public, "transport": transport}
        )
        self.endpoint, self.target = f"{p.public}@{bound}", pool("page_first", 1, 2 * TOKENS)
        self.source = pool("layer_first", 16, 128)
        self.source.fill(np.arange(self.source.slots))
        self.arena = ArenaMemory.create(len(self.target.memory), huge_pages="never")
        self.client = DecodeClient(
            settings("d", Limits(), keys=d, allowed=known(p=p)), [component(self.target)], self.arena,
            options=ArenaOptions(socket_directory=files, transport=transport), prefix_cache=False,
        )  # fmt: skip
        self.events: list[RoomReady | RoomFailed] = []
        self.rooms = 0
        self.held: RoomReady | None = None

    def ended(self, room: int) -> RoomReady | RoomFailed:
        def found() -> list[RoomReady | RoomFailed]:
            self.events += self.client.poll()
            return [event for event in self.events if event.room == room]

        wait_for(found, f"room {room} has not ended", PATIENCE_S)
        return found()[0]

    def begin(self) -> int:
        self.rooms += 1
        self.client.expect(self.rooms, tokens=TOKENS, sources=[self.endpoint])
        return self.rooms

    def over(self, room: int) -> RoomReady | RoomFailed:
        """It has ended on either side."""
        event = self.ended(room)
        if isinstance(event, RoomFailed):
            self.far.ask(["abort", room])
        self.far.ask(["Drained", room])
        return event

    def lands(self) -> bool:
        """Whether one more room lands, which is held from then on."""
        room = self.begin()
        self.far.ask(["send", room])
        event = self.over(room)
        if isinstance(event, RoomReady):
            self.check(event)
            if self.held is not None:
                self.check(self.held)  # what earlier rooms had on its way has not come into its slots
                self.client.release(self.held.room)
            self.held = event
        return isinstance(event, RoomReady)

    def check(self, event: RoomReady) -> None:
        """Each row of it is in its place, and this room's."""
        own = expand(pages_of(event.room), 16)
        wanted = total(self.source, own, self.source.memory.ctypes.data)
        found = total(self.target, event.slots["kv"], self.arena.mapping.address)
        if wanted != found:
            raise SystemExit(f"room {event.room} has other bytes than were sent")

    def suffers(self, fault: Callable[[], Any], heal: Callable[[Any], object]) -> dict[str, Any]:
        """A room that has its slots when a fault begins; then the next one that lands. `fault` returns once nothing of
        a room can cross any more; `heal` gets what it returned."""
        room = self.begin()
        self.far.ask(["open", room])
        self.far.ask(["Leased", room])
        struck = fault()
        self.far.ask(["push", room])
        event = self.ended(room)
        heal(struck)
        healed = time.monotonic()
        self.over(room)
        if isinstance(event, RoomReady):
            self.check(event)
            self.client.release(room)
        wait_for(self.lands, "no room lands after it", PATIENCE_S)
        return {"ready": isinstance(event, RoomReady), "recovered_s": round(time.monotonic() - healed, 2)}

    def engine(self, number: signal.Signals) -> int:
        """The signal is in force once this returns the process's id."""
        transports = node_of(self.client).transport
        (over,) = (transports._made[name] for name, count in transports.counts.items() if count)
        offered = [each for each in sessions_of(over).values() if not each.revoked and not each.process.dead]
        [pid] = [each.process.pid for each in offered]  # a room that has its slots has an engine that lands it
        deliver([pid], number)
        return pid

    def both(self, what: str) -> None:
        getattr(self.link, what)()
        self.far.ask([what])


def expand(pages: Any, page_size: int) -> Any:
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)


def total(of: Any, slots: Any, address: int) -> int:
    runs = runs_of(np.asarray(slots, np.int64), np.ones(len(slots), np.int64), 0)
    checksum = checksum_copy.checksum(lines_of("kv", of.layout), runs, address)
    assert checksum is not None
    return checksum


def faults(files: Path, transport: str) -> dict[str, Any]:
    it, outcome = Decode(files, transport), dict[str, Any]()
    far, link, nothing = it.far, it.link, lambda _: None
    with it.client:
        wait_for(it.lands, "the first room does not land", PATIENCE_S)
        counts = node_of(it.client).transport.counts
        outcome["over"] = {name: count for name, count in counts.items() if count}
        outcome["faults"] = {
            "decode's engine killed": it.suffers(lambda: it.engine(signal.SIGKILL), nothing),
            "prefill's engine killed": it.suffers(lambda: far.ask(["engine", signal.SIGKILL]), nothing),
            "decode's engine stopped": it.suffers(
                lambda: it.engine(signal.SIGSTOP), lambda pid: deliver([pid], signal.SIGCONT)
            ),
            "cut in both directions": it.suffers(lambda: it.both("cut"), lambda _: it.both("heal")),
            "cut from decode to prefill": it.suffers(link.cut, lambda _: link.heal()),
            "cut from prefill to decode": it.suffers(lambda: far.ask(["cut"]), lambda _: far.ask(["heal"])),
        }
        it.client.release(it.held.room)  # pyright: ignore
        wait_for(lambda: it.client.poll() is None or core_of(it.client).idle, "leases are left", PATIENCE_S)
        rooms = [event.room for event in it.events]
        outcome["ended once"] = sorted(rooms) == list(range(1, it.rooms + 1))
        outcome["free"] = core_of(it.client).arena.free[0].free_slots
    far.process.communicate(timeout=30)
    return outcome


if __name__ == "__main__":
    ip("link", "set", "lo", "up")
    print(json.dumps(faults(Path(sys.argv[1]), sys.argv[2])))
