"""Two hosts as two network namespaces of this kernel, and a link between them that can lose everything.

`python -m tests.support.two_hosts FILES` is decode's host, run in a namespace of its own; it starts prefill's, and
prints what became of rooms and connections as a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtransfer.bus.keys import AllowList, KeyPair
from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.handoff.effects import RoomFailed, RoomReady
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.options import ArenaOptions, WriterOptions
from tests.support.bus_peers import pair
from tests.support.client_pair import component, settings
from tests.support.internals import connections_of, dialled_by, node_of, sessions_of
from tests.support.layout_tensors import Pool, mla
from tests.support.networks import OWN_SYS
from tests.support.processes import deliver
from tests.support.waiting import wait_for

HERE, THERE = "10.213.77.1", "10.213.77.2"
NOBODY = "02:00:00:00:00:99"
PATIENCE_S = 40.0  # TCP alone would notice after a quarter of an hour, keep-alives after a minute
TOKENS = 64


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Link:
    """This host's end. Cut, its frames go to nobody, as do those of a host whose peer has lost its power."""

    def __init__(self, device: str, here: str, there: str) -> None:
        self._device, self._there = device, there
        ip("address", "add", f"{here}/24", "dev", device)
        ip("link", "set", device, "up")

    def cut(self) -> None:
        """The kernel has it once the command returns; no frame is sent on the way of before."""
        ip("neighbour", "replace", self._there, "lladdr", NOBODY, "dev", self._device, "nud", "permanent")

    def heal(self) -> None:
        ip("neighbour", "delete", self._there, "dev", self._device)


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
        writer=WriterOptions(pool_address=source.memory.ctypes.data, transport=keys.get("transport", "auto")),
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
            ["unshare", "--net", *OWN_SYS, sys.executable, "-m", "tests.support.two_hosts"],
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


def decode_host(files: Path) -> dict[str, Any]:
    p, d = pair(), pair()
    far = Far()
    ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(far.process.pid))
    link = Link("near", HERE, THERE)
    bound = far.ask({"own": {"public": p.public, "secret": p.secret}, "other": d.public})
    endpoint, arena = (
        f"{p.public}@{bound}",
        ArenaMemory.create(len(pool("page_first", 1, TOKENS).memory), huge_pages="never"),
    )
    client = DecodeClient(
        settings("d", Limits(), keys=d, allowed=known(p=p)), [component(pool("page_first", 1, TOKENS))], arena,
        options=ArenaOptions(socket_directory=files), prefix_cache=False,
    )  # fmt: skip
    events: dict[int, RoomReady | RoomFailed] = {}

    def ended(room: int) -> RoomReady | RoomFailed:
        def has_ended() -> bool:
            events.update((each.room, each) for each in client.poll())
            return room in events

        wait_for(has_ended, f"room {room} has not ended", PATIENCE_S)
        return events[room]

    def lands(room: int) -> bool:
        client.expect(room, tokens=TOKENS, sources=[endpoint])
        far.ask(["send", room])
        ready = isinstance(ended(room), RoomReady)
        if ready:
            client.release(room)
        else:
            far.ask(["abort", room])  # decode holds its peer for lost until it has received a message of it
        far.ask(["Drained", room])
        return ready

    with client:
        assert lands(1)
        client.expect(2, tokens=TOKENS, sources=[endpoint])  # every slot of the arena
        far.ask(["open", 2])
        dialled = dialled_by(node_of(client).bus)[endpoint]
        far.ask(["Leased", 2])
        link.cut()
        far.ask(["cut"])
        cut = time.monotonic()
        failed = ended(2)
        failed_s = time.monotonic() - cut
        wait_for(lambda: not dialled.connected, "decode keeps the connection", PATIENCE_S)
        far.ask(["hung up"])
        link.heal()
        far.ask(["heal"])
        rooms = itertools.count(3)
        wait_for(lambda: lands(next(rooms)), "no room lands in the slots of room 2", PATIENCE_S)
    far.process.communicate(timeout=30)
    assert isinstance(failed, RoomFailed)
    return {"cause": failed.cause, "detail": failed.detail, "failed_s": failed_s}


if __name__ == "__main__":
    ip("link", "set", "lo", "up")
    if sys.argv[1:]:
        print(json.dumps(decode_host(Path(sys.argv[1]))))
    else:
        prefill_host()
