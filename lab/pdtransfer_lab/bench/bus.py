"""What the bus costs: its round trip and echoes a second between two processes, beside bare ZMQ in the same run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

import uvloop
import zmq

from pdtransfer.bus import Bus
from pdtransfer.bus.keys import AllowList, KeyPair, generate_pair
from pdtransfer.errors import RemoteProtocolError
from pdtransfer.wire import VERSION, Hello, Identity, Message, Ping, Pong, Ranks, encode

from .processes import begun
from .report import Figures, Line

LINES = tuple(
    Line(what, f"{{{name}_us_p50:.0f}} us", f"p99 {{{name}_us_p99:.0f}} us; {{{name}_echoes_s:,.0f}} echoes a second")
    for what, name in (("bare sockets, round trip", "raw"), ("bus", "bus"), ("bus with keys", "bus_curve"))
)

_ANY_PORT = "tcp://127.0.0.1:0"


def measure(*, rounds: int = 5, messages: int = 4_000, in_flight: int = 64) -> Figures:
    """Times Ping and Pong of bare sockets (ROUTER/DEALER, blocking), of the bus, and of the bus with CURVE keys.

    Returns microseconds and echoes a second, each the median over `rounds` rounds, which take turns so that a busy
    host is busy for all three. Each round sends `messages` one after the other, then as many with `in_flight` at once.
    """
    client, server = generate_pair(), generate_pair()
    in_flight = min(in_flight, messages)
    runs: dict[str, Callable[[int, int], _Round]] = {
        "raw": _bare,
        "bus": lambda messages, in_flight: _over_bus(messages, in_flight, None, None),
        "bus_curve": lambda messages, in_flight: _over_bus(messages, in_flight, client, server),
    }
    results: dict[str, list[_Round]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            results[name].append(run(messages, in_flight))
    figures: Figures = {"messages": messages, "rounds": rounds, "in_flight": in_flight}
    for name, taken in results.items():
        figures[f"{name}_us_p50"] = median(run.microseconds(0.50) for run in taken)
        figures[f"{name}_us_p99"] = median(run.microseconds(0.99) for run in taken)
        figures[f"{name}_echoes_s"] = median(run.echoes_s for run in taken)
    figures["bus_to_raw_p50"] = float(figures["bus_us_p50"]) / float(figures["raw_us_p50"])
    return figures


class _Round:
    """Round trips in nanoseconds, and the seconds that `messages` took with several in flight."""

    def __init__(self, trips_ns: list[int], messages: int, seconds: float) -> None:
        self._trips_ns = sorted(trips_ns)
        self.echoes_s = messages / seconds

    def microseconds(self, share: float) -> float:
        return self._trips_ns[int(share * (len(self._trips_ns) - 1))] / 1e3


def _bare(messages: int, in_flight: int) -> _Round:
    echo, ours = begun(_bare_echo)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(ours.recv())
    frame = encode(Ping(1))
    for _ in range(200):
        dealer.send(frame)
        dealer.recv()
    trips_ns: list[int] = []
    for _ in range(messages):
        start = time.perf_counter_ns()
        dealer.send(frame)
        dealer.recv()
        trips_ns.append(time.perf_counter_ns() - start)
    start = time.perf_counter()
    for _ in range(in_flight):
        dealer.send(frame)
    for _ in range(messages - in_flight):
        dealer.recv()
        dealer.send(frame)
    for _ in range(in_flight):
        dealer.recv()
    seconds = time.perf_counter() - start
    dealer.send(b"")
    echo.join()
    context.destroy(linger=0)
    return _Round(trips_ns, messages, seconds)


def _bare_echo(parent: Connection) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    parent.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    while True:
        route, frame = router.recv(), router.recv()
        if not frame:
            break
        router.send(route, zmq.SNDMORE)
        router.send(frame)
    context.destroy(linger=0)


def _over_bus(messages: int, in_flight: int, client: KeyPair | None, server: KeyPair | None) -> _Round:
    echo, ours = begun(_bus_echo, client, server)
    endpoint = ours.recv()
    prefix = "" if server is None else server.public + "@"
    result = uvloop.run(_ask(prefix + endpoint, messages, in_flight, client, server))
    ours.send(None)
    echo.join()
    return result


async def _ask(endpoint: str, messages: int, in_flight: int, ours: KeyPair | None, theirs: KeyPair | None) -> _Round:
    answered: Callable[[], None] = lambda: None  # noqa: E731

    def receive(_: str, message: Message) -> None:
        if type(message) is Pong:
            answered()

    bus = Bus(node="ask", keys=ours, allowed=_only(theirs), receive=receive, refused=_refused)
    peer = bus.dial(endpoint, "prefill")
    bus.send(peer, Hello(VERSION, VERSION, Identity("ask", "decode", 1, Ranks(), "", b"", 1)))
    while not bus.send(peer, Ping(0)):  # noqa: ASYNC110 - the connection is made in another thread
        await asyncio.sleep(0.01)

    async def exchange(count: int, at_once: int) -> list[int]:
        """The nanoseconds between one answer and the next: the round trip, if one is in flight at once."""
        nonlocal answered
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gaps_ns: list[int] = []
        last, to_send = time.perf_counter_ns(), count - at_once

        def answer() -> None:
            nonlocal last, to_send
            now = time.perf_counter_ns()
            gaps_ns.append(now - last)
            if to_send > 0:
                to_send -= 1
                last = time.perf_counter_ns()
                bus.send(peer, Ping(1))
            elif len(gaps_ns) == count:
                done.set_result(None)

        answered = answer
        for _ in range(at_once):
            bus.send(peer, Ping(1))
        await done
        return gaps_ns

    await asyncio.sleep(0.05)  # the answers to the first Pings
    await exchange(200, 1)
    trips_ns = await exchange(messages, 1)
    start = time.perf_counter()
    await exchange(messages, in_flight)
    seconds = time.perf_counter() - start
    await bus.close()
    return _Round(trips_ns, messages, seconds)


def _bus_echo(parent: Connection, client: KeyPair | None, server: KeyPair | None) -> None:
    async def serve() -> None:
        bus: Bus

        def receive(peer: str, message: Message) -> None:
            if type(message) is Ping:
                bus.send(peer, Pong(message.incarnation))

        bus = Bus(node="echo", keys=server, allowed=_only(client), receive=receive, refused=_refused)
        parent.send(await bus.bind(_ANY_PORT))
        await asyncio.get_running_loop().run_in_executor(None, parent.recv)
        await bus.close()

    uvloop.run(serve())


def _only(peer: KeyPair | None) -> AllowList | None:
    return None if peer is None else AllowList({peer.public: "peer"})


def _refused(peer: str, error: RemoteProtocolError) -> None:
    raise AssertionError(f"{peer}: {error}")
