"""The first second of a daemon: a taken port, a factory that fails, and SIGHUP end or change nothing by surprise."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdtransfer.bus.listening import address_bound
from pdtransfer.serve.commands.cli import main
from pdtransfer.serve.worker import daemon as daemon_module
from tests.support.paths import REPO
from tests.support.waiting import wait_for


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("flag", ["--bind", "--listen"])
def test_a_taken_port_is_refused_before_an_engine_is_made(
    role: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the engine was made first")

    monkeypatch.setattr(daemon_module, "create_engine", never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = address_bound(taken)
        flags = {"--bind": "tcp://127.0.0.1:0", "--listen": "127.0.0.1:0"}
        flags[flag] = address if flag == "--bind" else address.removeprefix("tcp://")
        assert main([role, *(word for pair in flags.items() for word in pair)]) == 1
    printed = capsys.readouterr().err
    assert address.removeprefix("tcp://") in printed
    assert "in use" in printed


def test_a_hangup_without_a_file_to_read_again_ends_nothing_and_changes_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdtransfer", "router", "--listen", "127.0.0.1:0"], stderr=stderr, cwd=REPO
        )
    try:
        wait_for(lambda: "listens on" in log.read_text())
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: "nothing has changed" in log.read_text() or process.poll() is not None)
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_a_hangup_during_the_imports_ends_no_daemon() -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "pdtransfer", "router", "--listen", "nonsense"],
        stderr=subprocess.PIPE, cwd=REPO, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "cyclopts" in line:  # far from the end of the imports
            process.send_signal(signal.SIGHUP)
            break
    process.stderr.read()
    assert process.wait(60) == 2
