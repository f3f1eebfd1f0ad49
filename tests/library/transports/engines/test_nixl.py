"""What is NIXL's own: its environment, its ports, its handshake, and what doctor reports of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdtransfer.errors import ConfigError
from pdtransfer.handoff.effects import Outcome
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.settings.worker import DecodeConfig
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.nixl import NixlLibrary
from pdtransfer.transports.nixl import host as nixl
from pdtransfer.transports.options import Network
from tests.library.transports.engines.engine_pair import LARGE, SESSION, both, mapped_by
from tests.support.internals import sessions_of
from tests.support.waiting import until

IDLE_TICKS = 10  # of 10 ms

installed = pytest.mark.skipif(bool(nixl.why_not()), reason=nixl.why_not())


def test_the_environment_names_wires_and_the_interface_to_the_peer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setenv("UCX_TLS", "all")
    for name in ("NIXL_ETCD_ENDPOINTS", "UCX_TCP_PORT_RANGE"):
        monkeypatch.setenv(name, "of other programs")
    network = Network()
    made = nixl.environment(network, host="127.0.0.1")
    assert made["UCX_TLS"] == "tcp", "shared memory is no choice"
    assert "NIXL_ETCD_ENDPOINTS" not in made, "agents are announced to nobody"
    assert "UCX_TCP_PORT_RANGE" not in made, "an engine has held its port already"
    assert made["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in nixl.environment(network, host="a-name.invalid")
    rdma = nixl.environment(Network(protocol="rdma"), host="127.0.0.1")
    assert rdma["UCX_TLS"] == "ib"
    assert "UCX_NET_DEVICES" not in rdma
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert nixl.environment(network, host="127.0.0.1")["UCX_NET_DEVICES"] == "eth7"


def test_rdma_without_a_device_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for devices in (tmp_path / "none", tmp_path):
        monkeypatch.setattr(nixl, "RDMA_DEVICES", str(devices))
        with pytest.raises(ConfigError, match=r"transport_protocol = 'rdma': transport nixl finds no device.*: set"):
            DecodeConfig(transport="nixl", transport_protocol="rdma")
    (tmp_path / "mlx5_0").touch()
    DecodeConfig(transport="nixl", transport_protocol="rdma")


def test_a_host_without_it_gets_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda _: None)
    assert nixl.why_not.__wrapped__().endswith(": pip install --no-deps nixl-cu12")
    monkeypatch.setattr(nixl, "why_not", nixl.why_not.__wrapped__)
    seen = nixl.package(Path("/"))
    assert (seen.state, "not installed" in seen.found) == ("ok", True), "nobody needs it who does not name it"


@pytest.mark.slow
@installed
def test_doctor_names_the_package_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nixl.package(Path("/")).found.endswith("(UCX)")
    monkeypatch.setattr(nixl, "_TRY", "raise SystemExit('a library is missing')")
    seen = nixl.package(Path("/"))
    assert seen.state == "warn"
    assert "a library is missing" in seen.found


@pytest.mark.slow
@installed
async def test_every_port_is_within_the_range_and_the_pool_is_nowhere() -> None:
    async with both(NixlLibrary(), shared=True) as it:
        it.owner._network = it.writer._network = Network(streams=2, ports=(24_000, 24_063))
        await it.map()
        for pid in (it.ours(), it.theirs()):
            ports = listening_ports(pid)
            assert len(ports) == 4, "an agent and UCX, twice"
            assert all(24_000 <= port <= 24_063 for port in ports)
        assert os.fstat(it.pool.fd).st_ino not in [inode for inode, _ in mapped_by(it.ours())]
        it.write(1, 0, LARGE)
        await until(lambda: it.ended)
        assert it.ended[1] == (Outcome.LANDED, "")


def listening_ports(pid: int) -> list[int]:
    inodes = {os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")}
    ports: list[int] = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return sorted(ports)


@pytest.mark.slow
@installed
async def test_an_idle_engine_takes_next_to_no_time_of_the_cpu() -> None:
    """By itself NIXL's thread looks without a pause: one core for each engine."""
    memory = ArenaMemory.create(1 << 20, huge_pages="never")
    owner = EngineArena(NixlLibrary(), memory, Network(streams=1))
    await owner.offer(SESSION)
    pid = sessions_of(owner)[SESSION].process.pid

    async def ticks_of_a_second() -> int:
        before = ticks_of(pid)
        await asyncio.sleep(1.0)
        return ticks_of(pid) - before

    while await ticks_of_a_second() > IDLE_TICKS:  # it may still be starting
        pass
    await owner.close()
    memory.close()


def ticks_of(pid: int) -> int:
    """The time of the CPU that it has had, in ticks."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def test_the_driver_imports_nothing_of_the_package() -> None:
    """An engine's process starts by it, and nobody waits there for this package's imports."""
    lines = (
        "import runpy, sys\nrunpy.run_path(sys.argv[1])\nprint([name for name in sys.modules if 'pdtransfer' in name])"
    )
    command = [sys.executable, "-c", lines, NixlLibrary().driver]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
