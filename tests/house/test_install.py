"""`pip install` into a fresh environment: the base is what the clients need, `daemons` all that needs no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import REPO

CLIENT_NEEDS = {"msgpack", "msgspec", "numpy", "pdtransfer", "pyzmq", "uvloop"}
UNREACHABLE = re.compile(
    r"name resolution|Name or service not known|Network is unreachable|No route to host|[Cc]onnection refused"
    r"|NewConnectionError|ConnectTimeout|ReadTimeout"
)


def run(*command: str | Path, cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )  # fmt: skip


def lines(done: subprocess.CompletedProcess[str]) -> Sequence[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_pip_install_runs_the_clients_and_with_daemons_router_keygen_and_doctor(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    programs = tmp_path / "venv" / "bin"
    python, pdtransfer = programs / "python", programs / "pdtransfer"

    def install(requirement: str | Path) -> None:
        installed = run(python, "-m", "pip", "install", requirement, cwd=tmp_path, environment=environment)
        if installed.returncode and (found := UNREACHABLE.search(installed.stdout + installed.stderr)):
            pytest.skip(f"no package index can be reached: {found[0]}")
        lines(installed)

    install(REPO)
    frozen = lines(run(python, "-m", "pip", "freeze", cwd=tmp_path, environment=environment))
    assert {re.split("==| @ ", each)[0] for each in frozen} == CLIENT_NEEDS
    (found_at,) = lines(
        run(python, "-c", "import pdtransfer; print(pdtransfer.__file__)", cwd=tmp_path, environment=environment)
    )
    assert found_at.startswith(str(tmp_path))

    landed = lines(run(python, REPO / "examples" / "embed.py", cwd=tmp_path, environment=environment))
    assert landed[-1].endswith("every byte is where it belongs")

    refused = run(pdtransfer, "router", cwd=tmp_path, environment=environment)
    assert refused.stderr == "pdtransfer: cyclopts is not installed: pip install '.[daemons]'\n"
    assert (refused.returncode, refused.stdout) == (2, "")

    install(f"{REPO}[daemons]")
    frozen = lines(run(python, "-m", "pip", "freeze", cwd=tmp_path, environment=environment))
    assert not any(each.startswith("torch") for each in frozen), "torch has come along"
    assert lines(run(pdtransfer, "--help", cwd=tmp_path, environment=environment))
    lines(run(pdtransfer, "keygen", "d0", cwd=tmp_path, environment=environment))
    assert (tmp_path / "d0.key").exists()
    (line,) = lines(run(pdtransfer, "doctor", "--json", cwd=tmp_path, environment=environment))
    states = {each["name"]: each["state"] for each in json.loads(line)["findings"]}
    assert (states["torch"], states["Mooncake"]) == ("warn", "warn")

    command = [pdtransfer, "router", "--listen", "127.0.0.1:0", "--json"]
    router = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert router.stdout is not None
        assert json.loads(router.stdout.readline())["role"] == "router"
        router.send_signal(signal.SIGTERM)
        assert router.wait(timeout=60) == 0
    finally:
        router.kill()
        router.wait()
