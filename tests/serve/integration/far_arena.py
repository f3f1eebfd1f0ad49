"""KV that crosses between two hosts, as two network namespaces, over TCP; and every fault that is to be had.

`python -m tests.serve.integration.far_arena FILES TRANSPORT` is decode's host, run in a namespace of its own; it
starts prefill's, and prints what became of rooms, by fault, as a line of JSON.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtransfer.bus.keys import AllowList, KeyPair
from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.kernels import checksum_copy
from pdtransfer.layout.checksum import lines_of, runs_of
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.options import ArenaOptions, WriterOptions
from tests.support.bus_peers import pair
from tests.support.client_pair import component, settings, slots_of_pages
from tests.support.internals import connections_of, core_of, dialled_by, node_of, sessions_of
from tests.support.layout_tensors import Pool, mla
from tests.support.networks import OWN_SYS, execute
from tests.support.processes import deliver
from tests.support.waiting import wait_for

HERE, THERE = "10.213.77.1", "10.213.77.2"
NOBODY = "02:00:00:00:00:99"
PATIENCE_S = 40.0  # TCP alone would notice after a quarter of an hour, keep-alives after a minute
TOKENS = 64


class Link:
    """This host's end. Cut, its frames go to nobody, as do those of a host whose peer has lost its power."""

    def __init__(self, device: str, here: str, there: str) -> None:
        self._device, self._there = device, there
        execute("ip", "address", "add", f"{here}/24", "dev", device)
        execute("ip", "link", "set", device, "up")

    def cut(self) -> None:
        """The kernel has it once the command returns; no frame is sent on the way of before."""
        execute("ip", "neighbour", "replace", self._there, "lladdr", NOBODY, "dev", self._device, "nud", "permanent")

    def heal(self) -> None:
        execute("ip", "neighbour", "delete", self._there, "dev", self._device)


def pool(name: str, page_size: int, slots: int) -> Pool:
    return Pool(name=name, model=mla(layers=range(2)), page_size=page_size, slots=slots)


def pages_of(room: int) -> NDArray[np.int64]:
    """Rooms that follow each other have other bytes: what lands late in another's slots shows."""
    return np.arange(TOKENS // 16) + TOKENS // 16 * (room % 2)


def known(**keys: KeyPair) -> AllowList:
    return AllowList({key.public: name for name, key in keys.items()})


def prefill_host() -> None:
    """Does what lines ask for, and reports it."""
    print(json.dumps("apart"), flush=True)  # in the namespace that the link's end goes to
    keys = json.loads(sys.stdin.readline())
    source = pool("layer_first", 16, 128)
    source.fill(np.arange(source.slots))
    link = Link("far", THERE, HERE)
    key_pair, allowed = KeyPair(**keys["own"]), AllowList({keys["other"]: "d"})
    client = PrefillClient(
        settings("p", Limits(), keys=key_pair, allowed=allowed), [component(source)], bind=f"tcp://{THERE}:0",
        writer=WriterOptions(pool_address=source.memory.ctypes.data, transport=keys["transport"]),
    )  # fmt: skip
    with client:
        print(json.dumps(client.endpoint), flush=True)
        events: set[tuple[str, int]] = set()

        def has_event(kind: str, room: int) -> bool:
            events.update((type(each).__name__.removeprefix("Room"), each.room) for each in client.poll())
            return (kind, room) in events

        for line in sys.stdin:
            match json.loads(line):
                case ["open", room]:
                    client.open(room, tokens=TOKENS)
                case ["send" | "push" as what, room]:
                    if what == "send":
                        client.open(room, tokens=TOKENS)
                    client.push(room, pages_of(room), rows=(0, TOKENS))
                    client.finish(room)
                case ["engine", number]:
                    (engines,) = node_of(client).transport._made.values()
                    (mapped,) = sessions_of(engines).values()
                    deliver([mapped.process.pid], signal.Signals(number))
                case ["abort", room]:
                    client.abort(room)
                case ["cut" | "heal" as what]:
                    getattr(link, what)()
                case ["hung up"]:
                    [wire] = [each.tcp for each in connections_of(node_of(client).bus)]
                    assert wire is not None
                    wait_for(lambda wire=wire: not wire.is_open, "prefill keeps the connection", PATIENCE_S)
                case [kind, room]:
                    wait_for(
                        lambda kind=kind, room=room: has_event(kind, room), f"room {room} is not {kind}", PATIENCE_S
                    )
            print(json.dumps("done"), flush=True)


class Far:
    """Prefill's host, from here."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["unshare", "--net", *OWN_SYS, sys.executable, "-m", "tests.serve.integration.far_arena"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._receive()

    def ask(self, what: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


class Decode:
    """Decode's host: rooms of half the arena, one of which is held while the next fault happens."""

    def __init__(self, files: Path, transport: str) -> None:
        p, d = pair(), pair()
        self.far = Far()
        execute("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(self.far.process.pid))
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
        own = slots_of_pages(pages_of(event.room), 16, TOKENS)
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
        cause = {} if isinstance(event, RoomReady) else {"cause": event.cause, "detail": event.detail}
        return cause | {"ready": isinstance(event, RoomReady), "recovered_s": round(time.monotonic() - healed, 2)}

    def engine(self, number: signal.Signals) -> int:
        """The signal is in force once this returns the process's id."""
        transports = node_of(self.client).transport
        (over,) = (transports._made[name] for name, count in transports.counts.items() if count)
        offered = [each for each in sessions_of(over).values() if not each.revoked and not each.process.dead]
        [pid] = [each.process.pid for each in offered]  # a room that has its slots has an engine that lands it
        deliver([pid], number)
        return pid

    def cut(self) -> Any:
        """In both directions; the connection that decode has dialled."""
        dialled = dialled_by(node_of(self.client).bus)[self.endpoint]
        self.link.cut()
        self.far.ask(["cut"])
        return dialled

    def heal(self, dialled: Any) -> None:
        """Once neither end keeps the connection: no reset and no end has ever come."""
        wait_for(lambda: not dialled.connected, "decode keeps the connection", PATIENCE_S)
        self.far.ask(["hung up"])
        self.link.heal()
        self.far.ask(["heal"])


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
            "cut in both directions": it.suffers(it.cut, it.heal),
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
    execute("ip", "link", "set", "lo", "up")
    if sys.argv[1:]:
        print(json.dumps(faults(Path(sys.argv[1]) / "s", sys.argv[2])))
    else:
        prefill_host()
