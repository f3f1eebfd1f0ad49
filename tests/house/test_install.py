"""`pip install .` into an environment of its own: what it brings is enough for all that needs no torch."""

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


@pytest.mark.slow
def test_pip_install_without_extras_runs_clients_router_keygen_and_doctor(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    programs = tmp_path / "venv" / "bin"
    python, pdtransfer = programs / "python", programs / "pdtransfer"

    installed = run(python, "-m", "pip", "install", REPO, cwd=tmp_path, environment=environment)
    if installed.returncode and (found := UNREACHABLE.search(installed.stdout + installed.stderr)):
        pytest.skip(f"no package index can be reached: {found[0]}")
    lines(installed)
    where = "import importlib.util as u, pdtransfer; print(pdtransfer.__file__, u.find_spec('torch'))"
    (found_at,) = lines(run(python, "-c", where, cwd=tmp_path, environment=environment))
    assert found_at.startswith(str(tmp_path))
    assert found_at.endswith(" None"), "torch has come along"

    landed = lines(run(python, REPO / "examples" / "embed.py", cwd=tmp_path, environment=environment))
    assert landed[-1].endswith("every byte is where it belongs")

    assert lines(run(pdtransfer, "--help", cwd=tmp_path, environment=environment))
    lines(run(pdtransfer, "keygen", "d0", cwd=tmp_path, environment=environment))
    assert (tmp_path / "d0.key").exists()
    (said,) = lines(run(pdtransfer, "doctor", "--json", cwd=tmp_path, environment=environment))
    states = {each["name"]: each["state"] for each in json.loads(said)["findings"]}
    assert (states["packages"], states["torch"], states["Mooncake"]) == ("ok", "warn", "warn")

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
