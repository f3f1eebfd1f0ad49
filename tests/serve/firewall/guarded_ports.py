"""A firewall's table at work on plain listeners, in a network namespace of its own.

`python -m tests.serve.firewall.guarded_ports` prints what reached what as a line of JSON. All hosts are addresses of
this namespace's loopback interface: rules know addresses alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from typing import Any

from pdtransfer.errors import TransportError
from pdtransfer.serve.firewall import Firewall
from pdtransfer.serve.firewall.ruleset import HostNetwork, admit_networks
from pdtransfer.serve.firewall.table import strangers
from tests.support.waiting import until

OWN, PEER, OTHER, STRANGER, ADMITTED = (f"10.213.83.{last}" for last in (1, 2, 3, 7, 99))
OWN6, PEER6, STRANGER6 = (f"fd83::{last}" for last in (1, 2, 7))


def reached(source: str, port: int) -> bool:
    """Whether a new connection from `source` is let in."""
    target = OWN6 if ":" in source else OWN
    try:
        socket.create_connection((target, port), timeout=10, source_address=(source, 0)).close()
    except ConnectionRefusedError:
        return False
    return True


def tables() -> list[str]:
    text = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in text.splitlines()]


def rules() -> str:
    return subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout


def flush() -> None:
    subprocess.run(["nft", "flush", "ruleset"], check=True)


def listen(stack: ExitStack) -> tuple[socket.socket, int]:
    made = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
    return made, made.getsockname()[1]


async def main() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    networks: tuple[HostNetwork, ...] = admit_networks("firewall_admit", [f"{ADMITTED}/32", "fd99::/16"])
    at = {"key:p": PEER, "key:six": f"{PEER6}%lo", "key:mapped": f"::ffff:{OTHER}"}
    ended: list[str] = []
    with ExitStack() as stack:
        firewall = await Firewall.open("d.0_1", mode="on", networks=networks)
        firewall.meet(lambda peer: at.get(peer, ""))
        listeners = [listen(stack) for _ in range(4)]
        (server, first), (_, second), (_, third), (_, free) = listeners
        for session, peer in enumerate(at):
            firewall.expect(session, peer)
        guards = [
            await firewall.guard(session, [port], lambda peer=peer: ended.append(peer))
            for session, (peer, port) in enumerate(zip(at, (first, second, third), strict=True))
        ]
        sources = (PEER, OTHER, STRANGER, ADMITTED, "127.0.0.1", PEER6, STRANGER6)
        seen["own port"] = [source for source in sources if reached(source, first)]
        seen["of IPv6"] = [source for source in sources if reached(source, second)]
        seen["of mapped"] = [source for source in sources if reached(source, third)]
        seen["nobody's"] = [source for source in sources if reached(source, free)]
        assert firewall.keeper is not None
        seen["refused"] = strangers(firewall.table, firewall.keeper.ask)
        seen["report"] = firewall.report["admits"]

        old = socket.create_connection((OWN, first), timeout=10, source_address=(PEER, 0))
        accepted, of = server.accept()
        while of[1] != old.getsockname()[1]:  # those before it were closed at once
            accepted, of = server.accept()
        at["key:p"] = OTHER
        firewall.moved("key:p")
        await until(lambda: _true(reached(OTHER, first)), "the peer's new address is admitted")
        seen["moved"] = [source for source in sources if reached(source, first)]
        old.sendall(b"written after it had moved")
        accepted.settimeout(1.0)
        try:
            seen["old connection"] = accepted.recv(100).decode()
        except OSError as error:
            seen["old connection"] = type(error).__name__

        guards[0].release()
        await until(lambda: _true(reached(STRANGER, first)), "the port is nobody's again")
        firewall.forget(1)
        for session, port in ((1, first), (9, first)):
            try:
                await firewall.guard(session, [port], lambda: None)
            except TransportError as error:
                seen.setdefault("no session", []).append(str(error))
        firewall.expect(10, "key:unknown")
        try:
            await firewall.guard(10, [first], lambda: None)
        except TransportError as error:
            seen["no address"] = str(error)

        firewall.expect(12, "key:mapped")
        starting = await firewall.guard(12, [free], lambda: None, dials_itself=True)
        seen["starting"] = [source for source in sources if reached(source, free)]
        await starting.opened()
        seen["started"] = [source for source in sources if reached(source, free)]
        starting.release()
        await until(lambda: _true(reached(STRANGER, free)), "the port is nobody's again")
        given_up = await firewall.guard(12, [free], lambda: None, dials_itself=True)
        given_up.release()  # before it was opened
        await until(lambda: _true(str(free) not in rules()), "the port is in no set")

        flush()
        seen["after a flush"] = [source for source in sources if reached(source, second)]
        other = await Firewall.open("another", mode="on")
        seen["tables"] = sorted(name.rpartition("-")[0] for name in tables())
        keeper = firewall.keeper.process.pid
        os.kill(keeper, signal.SIGTERM)  # as a service manager sends it to all processes at once
        seen["after SIGTERM"] = reached(STRANGER, second)
        os.kill(keeper, signal.SIGKILL)
        await until(lambda: _true(len(ended) == 2), "what was guarded ends")
        seen["ended"] = sorted(ended)
        seen["tables without its process"] = sorted(name.rpartition("-")[0] for name in tables())
        firewall.expect(11, "key:p")
        again = await firewall.guard(11, [second], lambda: None)
        seen["again"] = [source for source in sources if reached(source, second)]
        again.release()
        await firewall.close()
        await other.close()
        seen["closed"] = tables()
    return seen


async def _true(value: bool) -> bool:
    return value


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for host in (OWN, PEER, OTHER, STRANGER, ADMITTED):
        subprocess.run(["ip", "address", "add", f"{host}/24", "dev", "lo"], check=True)
    for host in (OWN6, PEER6, STRANGER6):
        subprocess.run(["ip", "address", "add", f"{host}/64", "dev", "lo", "nodad"], check=True)
    print(json.dumps(asyncio.run(main())))
