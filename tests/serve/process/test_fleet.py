"""Daemons as child processes: their command line, their first word, their end, and that of whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.serve.process import fleet as fleet_module
from pdtransfer.serve.process.fleet import Daemon, Fleet
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from tests.support.paths import REPO
from tests.support.waiting import wait_for

FAKE = """\
#!/bin/sh
# Stands for `python -m pdtransfer ROLE FLAGS`.
echo "$@" > "{here}/$3.arguments"
echo $$ >> "{here}/pids"
{before}
case $3 in {fails}) echo "no such luck" >&2; exit 3;; esac
echo '{{"ready": true, "role": "'$3'", "endpoint": "tcp://127.0.0.1:'$(($$ % 60000 + 1))'", "http": "127.0.0.1:2"}}'
{after}
"""
SLEEPS = "exec sleep 60"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a script in the place of every daemon."""

    def put(*, fails: str = "nobody", before: str = "", after: str = SLEEPS) -> Path:
        script = tmp_path / "python"
        script.write_text(FAKE.format(here=tmp_path, fails=fails, before=before, after=after))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return tmp_path

    return put


def pids(here: Path) -> list[int]:
    return [int(line) for line in (here / "pids").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


ROUTER = RouterConfig(listen="127.0.0.1:0", node="some.node-7")


async def test_a_router_alone_starts_by_its_own_config_prints_where_it_listens_and_ends_with_status_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LISTEN", "LOG_LEVEL"):
        monkeypatch.setenv(f"PDTRANSFER_{name}", "nonsense")  # settings of this process
    async with Fleet([], [], ROUTER, tmp_path) as fleet:
        async with aiohttp.ClientSession(fleet.url) as http, http.get("/live") as answer:
            assert answer.status == 200
        (router,) = fleet.of("router")
        assert (router.ready["node"], router.ready["role"]) == ("some.node-7", "router")
        assert fleet.of("prefill") == []
    assert router.process.returncode == 0
    log = (tmp_path / "router.log").read_text()
    assert "Traceback" not in log
    assert "name a prefill worker with --prefill tcp://host:port" in log
    assert "name a decode worker with --decode tcp://host:port" in log


async def test_a_daemon_that_fails_is_reported_with_its_status_and_the_end_of_its_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorldError) as caught:
            async with Fleet([], [], replace(ROUTER, listen=listen), tmp_path):
                pytest.fail("it cannot listen")
    text = str(caught.value)
    assert "router daemon did not become ready" in text
    assert f"listen: cannot listen on {listen}" in text
    assert "(status 1)" in text


async def test_the_router_gets_the_workers_addresses(fake: Callable[..., Path], tmp_path: Path) -> None:
    here = fake()
    prefills = [PrefillConfig(node=f"p{index}", bind="tcp://127.0.0.1:0") for index in range(2)]
    async with Fleet(prefills, [DecodeConfig(node="d")], ROUTER, tmp_path) as fleet:
        assert [daemon.role for daemon in fleet.daemons] == ["prefill", "prefill", "decode", "router"]
        flags = (here / "router.arguments").read_text().split()
        assert flags[:3] == ["-m", "pdtransfer", "router"]
        ports = sorted(1 + int(pid) % 60_000 for pid in (here / "pids").read_text().split()[:3])
        workers = [flag.partition("=tcp://127.0.0.1:") for flag in flags if "=tcp://127.0.0.1:" in flag]
        assert sorted(int(port) for _, _, port in workers) == ports
        assert [flag for flag, _, _ in workers] == ["--prefill", "--prefill", "--decode"]
        assert "--json" in flags


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
async def test_where_one_fails_those_that_have_started_are_ended(
    fake: Callable[..., Path], tmp_path: Path, role: str
) -> None:
    here = fake(fails=role)
    with pytest.raises(WorldError, match="no such luck"):
        async with Fleet([PrefillConfig(node="p")], [DecodeConfig(node="d")], ROUTER, tmp_path):
            pytest.fail(f"{role} fails")
    assert pids(here)
    assert not any(is_alive(pid) for pid in pids(here))


async def test_a_daemon_that_prints_nothing_in_time_is_reported_and_ended(
    fake: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fake(before="echo still working >&2; " + SLEEPS)
    monkeypatch.setattr(fleet_module, "READY_S", 0.05)
    start = Daemon.start

    async def at_work(*arguments: Any, **more: Any) -> Daemon:
        daemon = await start(*arguments, **more)
        wait_for(daemon.log.read_text)
        return daemon

    monkeypatch.setattr(Daemon, "start", at_work)
    with pytest.raises(WorldError, match=r"status None\):\nstill working"):
        async with Fleet([], [], ROUTER, tmp_path):
            pytest.fail("it says nothing")
    assert not any(is_alive(pid) for pid in pids(here))


async def test_a_daemon_that_is_deaf_to_sigterm_is_killed(
    fake: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(before="trap '' TERM", after="while :; do sleep 0.05; done")
    monkeypatch.setattr(fleet_module, "STOP_S", 0.2)
    daemon = await Daemon.start(ROUTER, tmp_path / "log")
    await daemon.wait_ready()
    assert await daemon.stop() == -signal.SIGKILL
    assert await daemon.stop() == -signal.SIGKILL


async def test_what_a_daemon_logs_is_appended(fake: Callable[..., Path], tmp_path: Path) -> None:
    fake(before="echo a line >&2")
    for _ in range(2):
        daemon = await Daemon.start(ROUTER, tmp_path / "log")
        await daemon.wait_ready()
        await daemon.stop()
    assert (tmp_path / "log").read_text() == "a line\na line\n"


def test_daemons_end_when_whoever_started_them_is_killed(fake: Callable[..., Path], tmp_path: Path) -> None:
    python = sys.executable
    here = fake()
    program = f"""
        import asyncio, sys
        from pathlib import Path
        from pdtransfer.serve.settings.router import RouterConfig
        from pdtransfer.serve.settings.worker import PrefillConfig
        from pdtransfer.serve.process.fleet import Fleet

        sys.executable = {str(here / "python")!r}

        async def main():
            async with Fleet([PrefillConfig(node="p")], [], RouterConfig(node="r"), Path({str(tmp_path)!r})):
                print(1, flush=True)
                await asyncio.sleep(60)

        asyncio.run(main())
    """
    started = subprocess.Popen(
        [python, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(REPO)}
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == b"1\n"
        assert len(pids(here)) == 2
        assert all(is_alive(pid) for pid in pids(here))
    finally:
        started.kill()
        started.communicate()
    wait_for(lambda: not any(is_alive(pid) for pid in pids(here)))
