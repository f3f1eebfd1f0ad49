"""Hosts that are network namespaces of this kernel, on one switch, each with a firewall of its own.

What has to be done on a host is done with `Network.on`; nothing here needs to be in a namespace itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from tests.support.paths import REPO

DATA_PORTS = (21_000, 21_255)  # of engines, two each, which nobody can take again for a minute
APART = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
VETH = "ip link set lo up && ip link add near type veth peer name far"  # what two hosts take
# Before a command in a namespace: UCX finds interfaces in /sys, which has those of the namespace that mounted it.
OWN_SYS = ["unshare", "--mount", "sh", "-c", 'mount -t sysfs none /sys 2>/dev/null; exec "$@"', "sh"]
MOUNT_SYS = "unshare --mount mount -t sysfs none /sys"
_PREFIX = "10.213.79"
_NOWHERE = f"{_PREFIX}.250"
_CHAIN = "table inet faults { chain input { type filter hook input priority 0; policy accept; }; }\n"


def why_not_apart(trial: str, *tools: str, text: str = "") -> str:
    """Why `trial`, a shell command that reads `text`, fails in a namespace of its own; empty where it does not."""
    if missing := [name for name in ("ip", "unshare", *tools) if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not installed"
    ran = subprocess.run([*APART, "sh", "-c", trial], input=text, capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else f"no network namespaces here: {ran.stderr.strip()}"


def why_not() -> str:
    """Why there can be no hosts of a Network here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces with a firewall need root"
    trial = "ip link add s0 type bridge && ip link add v0 type veth peer name v1 && nft -f - && tc qdisc show"
    return why_not_apart(trial, "tc", "nft", "nsenter", text=_CHAIN)


def execute(*command: str, text: str | None = None) -> None:
    subprocess.run(command, input=text, text=True, check=True)


def apart(module: str, *arguments: str, seconds: int, own_sys: bool = False) -> Any:
    """What a module prints as JSON, run in a namespace of its own with a directory for its files. The directory's path
    is short, for the sockets in it; of its logs a failure shows the ends."""
    with tempfile.TemporaryDirectory(prefix="pdt-") as files:
        command = [*APART, *(OWN_SYS if own_sys else ()), sys.executable, "-m", module, files, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=REPO)
        logs = "".join(f"{log.name}:\n{log.read_text()[-2_000:]}" for log in sorted(Path(files).glob("*.log")))
    assert ran.returncode == 0, ran.stderr + logs
    return json.loads(ran.stdout)


@contextmanager
def linked(*links: tuple[Sequence[str], Sequence[str]]) -> Iterator[tuple[int, list[str]]]:
    """Another host than this process's, until the context is left: the pid of a process there, and what a command line
    begins with to run there. Each of `links` has the addresses of its end here, and of that one."""
    ours = os.readlink("/proc/self/ns/net")
    with ExitStack() as stack:
        far = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        stack.callback(far.wait)
        stack.callback(far.kill)
        while os.readlink(f"/proc/{far.pid}/ns/net") == ours:
            assert far.poll() is None
            time.sleep(0.01)
        there = ["nsenter", f"--net=/proc/{far.pid}/ns/net"]
        for number, (here, away) in enumerate(links):
            near, end = f"near{number}", f"far{number}"
            execute("ip", "link", "add", near, "type", "veth", "peer", "name", end, "netns", str(far.pid))
            for on, device, addresses in (([], near, here), (there, end, away)):
                for address in addresses:
                    execute(*on, "ip", "address", "add", address, "dev", device, *(["nodad"] if ":" in address else []))
                execute(*on, "ip", "link", "set", device, "up")
        for on in ([], there):
            execute(*on, "ip", "link", "set", "lo", "up")
        yield far.pid, there


class Network:
    """One host for each of `hosts`, all of them on one switch, at `megabits` a second each way."""

    def __init__(self, hosts: Sequence[str], *, megabits: int) -> None:
        self._pids: dict[str, int] = {}
        self._at = {host: f"{_PREFIX}.{10 + number}" for number, host in enumerate(hosts)}
        self._rules: dict[str, list[str]] = {host: [] for host in hosts}
        with ExitStack() as stack:
            for host in ("", *hosts):
                keeper = subprocess.Popen(
                    ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                )  # fmt: skip
                stack.callback(_end, keeper)
                assert keeper.stdout is not None
                assert keeper.stdout.readline(), "it says so from within its namespace"
                self._pids[host] = keeper.pid
            self._run("", ["ip", "-batch", "-"], "link add name switch type bridge\nlink set switch up\n")
            for number, host in enumerate(hosts):
                self._plug(f"port{number}", host, megabits)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def nowhere(self) -> str:
        """An address that is nobody's: who dials it is never answered."""
        return _NOWHERE

    def address(self, host: str) -> str:
        return self._at[host]

    def on(self, host: str) -> list[str]:
        """What a command line begins with to run there."""
        return ["nsenter", f"--net=/proc/{self._pids[host]}/ns/net"]

    def cut(self, source: str, target: str, *, data: bool = False) -> None:
        """The target's firewall drops what the source sends; `data`: to engines' ports alone."""
        self._rule(source, target, "drop", data=data)

    def refuse(self, source: str, target: str) -> None:
        """The target's firewall resets what the source sends to engines' ports."""
        self._rule(source, target, "reject with tcp reset", data=True)

    def heal(self) -> None:
        """No firewall does anything."""
        for host, rules in self._rules.items():
            if rules:
                rules.clear()
                self._apply(host)

    def _rule(self, source: str, target: str, verdict: str, *, data: bool) -> None:
        ports = "tcp dport {}-{} ".format(*DATA_PORTS) if data else ""
        self._rules[target].append(f"ip saddr {self._at[source]} {ports}{verdict}")
        self._apply(target)

    def _apply(self, host: str) -> None:
        rules = "".join(f"add rule inet faults input {rule}\n" for rule in self._rules[host])
        self._run(host, ["nft", "-f", "-"], f"flush chain inet faults input\n{rules}")

    def _plug(self, port: str, host: str, megabits: int) -> None:
        pid = self._pids[host]
        link = f"link add {port} type veth peer name wire netns {pid}\nlink set {port} master switch up\n"
        self._run("", ["ip", "-batch", "-"], link)
        own = f"link set lo up\naddress add {self._at[host]}/24 dev wire\nlink set wire up\n"
        # Frames to nobody: an answer that no such host is there would be one.
        nobody = f"neighbour add {_NOWHERE} lladdr 02:00:00:00:00:99 dev wire nud permanent\n"
        self._run(host, ["ip", "-batch", "-"], own + nobody)
        bucket = f"rate {megabits}mbit burst 1mb latency 100ms".split()
        self._run(host, ["tc", "qdisc", "add", "dev", "wire", "root", "tbf", *bucket], "")
        self._run(host, ["nft", "-f", "-"], _CHAIN)

    def _run(self, host: str, command: list[str], text: str) -> None:
        subprocess.run([*self.on(host), *command], input=text, text=True, check=True)


def _end(keeper: subprocess.Popen[bytes]) -> None:
    keeper.kill()
    keeper.communicate()
