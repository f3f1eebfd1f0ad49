"""Two prefills and two decodes on hosts of their own, rooms between them, and what must be true of every one of them.

Each side of a room ends once, as far as its process lives to report it; what is found wrong is kept in `wrong`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.support.bus_peers import pair
from tests.support.kv_host import PAGE_SIZE, PORT
from tests.support.networks import Network
from tests.support.paths import REPO
from tests.support.processes import children, deliver
from tests.support.waiting import PATIENCE_S, until

PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1")
PAIRS = tuple(itertools.product(PREFILLS, DECODES))
SMALL, LARGE = PAGE_SIZE, 2_048  # tokens: 288 KiB, and 36 MiB
MEGABITS = 600  # a large room takes half a second: whatever happens to it happens in its midst

Pair = tuple[str, str]


@dataclass(eq=False)
class Side:
    """The events of one side of a room."""

    host: str
    life: int
    events: list[str] = field(default_factory=list[str])
    void: bool = False  # its process has been killed

    def __post_init__(self) -> None:
        self.ends = {"ready", "failed"} if self.host in DECODES else {"drained"}

    @property
    def ended(self) -> bool:
        return self.void or not self.ends.isdisjoint(self.events)

    @property
    def over(self) -> bool:
        """Ended, and what it held is given back."""
        return self.ended and ("ready" not in self.events or "released" in self.events or self.void)


@dataclass(eq=False)
class Room:
    """One of them, from its beginning to its ends."""

    number: int
    prefill: Side
    decode: Side
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: float = 0.0  # until it was ready
    detail: str = ""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    @property
    def pair(self) -> Pair:
        return self.prefill.host, self.decode.host

    @property
    def over(self) -> bool:
        return self.prefill.over and self.decode.over

    @property
    def landed(self) -> bool:
        return "ready" in self.decode.events


@dataclass(eq=False)
class Host:
    """A process, or the one that will take its place."""

    name: str
    process: asyncio.subprocess.Process
    life: int
    endpoint: str
    up: asyncio.Event = field(default_factory=asyncio.Event)
    dead: bool = False
    reading: asyncio.Task[None] | None = None

    def write(self, *what: Any) -> None:
        assert self.process.stdin is not None
        if not self.dead:
            self.process.stdin.write(json.dumps(what).encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        deliver([self.process.pid], number)

    def engines(self) -> list[int]:
        """Its engines' processes."""
        return children(self.process.pid)


class Fleet:
    """Hosts that can be killed and frozen, on a network that can be cut."""

    def __init__(self, network: Network, logs: Path, *, planted: str = "") -> None:
        """`planted`, of tests.support.planted: the defence that every host of it lacks."""
        self.network, self._logs, self._planted = network, logs, [planted] if planted else []
        self._keys = {name: pair() for name in (*PREFILLS, *DECODES)}
        self.hosts: dict[str, Host] = {}
        self.rooms: dict[int, Room] = {}  # that are not over
        self.wrong: list[str] = []
        self.on_over: Callable[[Room], None] = lambda _: None  # of each that is over
        self.begun = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lives, self._numbers = itertools.count(), itertools.count(1)

    async def __aenter__(self) -> Self:
        await asyncio.gather(*map(self.start, self._keys))
        return self

    async def __aexit__(self, *_: object) -> None:
        for host in self.hosts.values():
            if host.process.returncode is None:
                host.signal(signal.SIGCONT)
                host.process.kill()
            await host.process.wait()
            assert host.reading is not None
            await host.reading

    # Hosts

    async def start(self, name: str, *, advertise: str = "") -> None:
        """A process on that host, at the address and port of any before it."""
        with (self._logs / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.network.on(name), sys.executable, "-m", "tests.support.kv_host", *self._planted, cwd=REPO,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=1 << 20,
            )  # fmt: skip
        own = self._keys[name]
        endpoint = f"{own.public}@tcp://{self.network.address(name)}:{PORT}"
        host = self.hosts[name] = Host(name, process, next(self._lives), endpoint)
        others = {key.public: other for other, key in self._keys.items() if other != name}
        role = "prefill" if name in PREFILLS else "decode"
        keys = {"public": own.public, "secret": own.secret}
        host.write(role, name, keys, others, self.network.address(name), advertise)
        host.reading = asyncio.ensure_future(self._read(host))
        await asyncio.wait_for(host.up.wait(), PATIENCE_S)

    async def kill(self, name: str) -> None:
        """SIGKILL; the other sides of its rooms are asked to give up, as by a router."""
        host = self.hosts[name]
        host.dead = True
        host.process.kill()
        await host.process.wait()
        assert host.reading is not None
        await host.reading
        for room in list(self.rooms.values()):
            for side, other in itertools.permutations(room.sides):
                if side.host == name and side.life == host.life and not side.void:
                    side.void = True
                    if not other.ended:
                        self.hosts[other.host].write("abort", room.number)
                    self._look(room)

    async def _read(self, host: Host) -> None:
        assert host.process.stdout is not None
        async for line in host.process.stdout:
            self._receive(host, json.loads(line))

    def _receive(self, host: Host, message: dict[str, Any]) -> None:
        kind, number = message["kind"], message["room"]
        if kind == "up":
            host.up.set()
        elif kind in ("rest", "seen"):
            if (answer := self._answers.pop(number, None)) is not None and not answer.done():
                answer.set_result(message)
        else:
            self._happened(host, kind, number, message)

    def _happened(self, host: Host, kind: str, number: int, message: dict[str, Any]) -> None:
        room = self.rooms.get(number)
        if room is None:
            self.wrong.append(f"{host.name}: room {number} is over, and yet {kind}")
            return
        side, other = room.sides if host.name in PREFILLS else room.sides[::-1]
        if kind in side.events or (kind in side.ends and side.ended):
            self.wrong.append(f"{host.name}: room {number} was {', '.join(side.events)}, and now {kind}")
        side.events.append(kind)
        if wrong := message.get("wrong"):
            self.wrong.append(f"{host.name}: room {number}, {kind}: {wrong}")
        if kind == "ready":
            room.seconds = message["seconds"]
        if kind == "failed":
            room.detail = room.detail or f"{host.name}: {message['cause']}: {message['detail']}"
            if not other.ended:
                self.hosts[other.host].write("abort", number)
        self._look(room)

    def _look(self, room: Room) -> None:
        room.changed.set()
        if room.over and self.rooms.pop(room.number, None):
            self.on_over(room)

    # Rooms

    def begin(self, between: Pair, tokens: int = SMALL, *, push: str = "all", hold_s: float = 0.0) -> Room:
        """Both sides learn it; one that is dead reports nothing. `push`: all, some (but its last cell), none."""
        prefill, decode = (self.hosts[name] for name in between)
        sides = [Side(host.name, host.life, void=host.dead) for host in (prefill, decode)]
        room = Room(next(self._numbers), *sides)
        self.rooms[room.number] = room
        self.begun += 1
        decode.write("expect", room.number, tokens, prefill.endpoint, hold_s)
        prefill.write("open", room.number, tokens, push)
        self._look(room)
        return room

    def push(self, room: Room) -> None:
        self.hosts[room.prefill.host].write("push", room.number)

    def abort(self, room: Room) -> None:
        """As a client's leaving does."""
        for side in room.sides:
            if not side.ended:
                self.hosts[side.host].write("abort", room.number)

    async def until(self, room: Room, condition: Callable[[], object], what: str) -> None:
        """Waits for events of the room's sides."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    room.changed.clear()
                    await room.changed.wait()
        except TimeoutError:
            raise AssertionError(f"room {room.number} of {room.pair} is not {what}: {self.events(room)}") from None

    def events(self, room: Room) -> str:
        """For a person."""
        each = (f"{side.host} {'(killed) ' * side.void}{side.events}" for side in room.sides)
        return f"{'; '.join(each)}; {room.detail}"

    async def over(self, room: Room) -> Room:
        await self.until(room, lambda: room.over, "over")
        return room

    async def lands(self, between: Pair) -> bool:
        return (await self.over(self.begin(between))).landed

    async def land_again(self, pairs: Iterable[Pair] = PAIRS) -> float:
        """Seconds until a room of each pair has landed."""
        begun = time.monotonic()

        async def again(between: Pair) -> None:
            while not await self.lands(between):
                assert time.monotonic() < begun + PATIENCE_S, f"no room of {between} lands"
                await asyncio.sleep(0.05)

        await asyncio.gather(*map(again, pairs))
        return time.monotonic() - begun

    async def halfway(self, room: Room) -> None:
        """Some of it has come, and some has not."""

        async def some() -> bool:
            assert not room.decode.ended, self.events(room)
            return await self.rows(room) > 0

        await until(some, f"nothing of room {room.number} comes", PATIENCE_S)

    async def rows(self, room: Room) -> int:
        """How many rows of decode's arena begin as this room's do."""
        return (await self._asked(room.decode.host, "seen", room.number))["rows"]

    def let_go(self, room: Room) -> None:
        """Decode looks at it for the last time now, however long it was to be held."""
        self.hosts[room.decode.host].write("let_go", room.number)

    # Rest

    async def _asked(self, name: str, what: str, *more: int) -> dict[str, Any]:
        number = more[0] if more else -next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.hosts[name].write(what, number)
        return await asyncio.wait_for(answer, PATIENCE_S)

    async def rest(self, name: str) -> dict[str, Any]:
        """What a host holds and has open now."""
        return await self._asked(name, "rest")

    async def idle(self, *names: str) -> None:
        """Nothing is held on these hosts."""
        for name in names:
            seen: dict[str, Any] = {}

            async def nothing(name: str = name, seen: dict[str, Any] = seen) -> bool:
                seen.update(await self.rest(name))
                return seen["idle"] and not seen["used"]

            await until(nothing, f"{name} still holds {seen}", PATIENCE_S)

    async def at_rest(self, before: dict[str, int] | None = None) -> dict[str, int]:
        """Files of each host, once nothing is held, every pair has one session, and no host has more than `before`."""
        await self.idle(*self.hosts)
        found: dict[str, int] = {}

        async def settled() -> bool:
            engines = set[int]()
            for name in self.hosts:
                rest = await self.rest(name)
                found[name] = rest["files"]
                engines.add(rest["engines"])
            return engines == {len(PAIRS) // 2} and all(found[name] <= most for name, most in (before or {}).items())

        await until(settled, f"engines, or files, of sessions that are over; before: {before}", PATIENCE_S)
        return found
