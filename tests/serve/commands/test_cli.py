"""The command line: one-line errors, exit statuses, and no torch where none is needed."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pdtransfer_lab.bench import pd
from pdtransfer_lab.commands import bench as bench_commands

import pdtransfer
from pdtransfer.bus.keys import KeyPair
from pdtransfer.environment import PREFIX
from pdtransfer.errors import TransportError
from pdtransfer.serve.commands import cli
from pdtransfer.serve.settings.worker import DecodeConfig
from pdtransfer.serve.worker.group.meeting import rank_configs

BENCHES = {  # of each part its flags that count, and what the part is called with by default
    "transfer": {"tokens": 4_096, "rooms": 32, "model": "deepseek"},
    "handoff": {"tokens": 16, "rooms": 2_000, "concurrency": 64, "beside_zmq": False},
    "copy": {"tokens": 4_096},
    "hisparse": {},
    "pd": {
        "tokens": (), "attentions": ("mla", "gqa"), "rounds": 3, "chunk_tokens": 8_192, "engine_option": (),
        "hisparse": False, "on": ("", ""), "progress": bench_commands.progress,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the settings of the test's environment, and restores the log afterwards."""
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def put(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., int]) -> None:
    """Replaces a command's implementation by functions."""
    monkeypatch.setitem(sys.modules, f"pdtransfer.serve.{module}", SimpleNamespace(**functions))


def fails(error: BaseException) -> Callable[..., int]:
    def run(*_: object, **__: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TransportError("arena gone"), ["arena gone"]),
        (FileNotFoundError(2, "No such file or directory", "/etc/x"), ["/etc/x", "No such file"]),
        (OSError("address in use"), ["address in use"]),
        (ZeroDivisionError("division by zero"), ["bug", "ZeroDivisionError", "--debug"]),
        (ValueError("two\nlines"), ["two lines"]),
    ],
)
def test_failure_is_one_line_and_status_1(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, "commands.demo", run=fails(error))
    assert cli.main(["demo"]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for word in words:
        assert word in line


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "commands.demo", run=fails(ZeroDivisionError("x")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo", "--debug"])


def test_interrupt_is_status_130_without_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, "commands.demo", run=fails(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("status", [0, 1, 7])
def test_exit_status_is_what_the_command_returns(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "commands.demo", run=lambda _: status)
    assert cli.main(["demo"]) == status


def test_a_demo_of_a_running_router_gets_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    put(monkeypatch, "commands.demo", run=lambda given: seen.append((given.requests, given.router, given.metrics)) or 0)
    given = ["--router", "http://r:8000", "--metrics", "d0:7202", "--metrics", "d1:7202"]
    assert cli.main(["demo", "--requests", "3", *given]) == 0
    assert seen == [(3, "http://r:8000", ("d0:7202", "d1:7202"))]


@pytest.mark.parametrize("name", BENCHES)
def test_bench_passes_its_flags_on(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults, seen = BENCHES[name], list[dict[str, object]]()
    part = importlib.import_module(f"pdtransfer_lab.bench.{name}")
    measured = pd.Result(devices=("cpu", "cpu"), chunk_tokens=1, rounds=1) if name == "pd" else {}
    monkeypatch.setattr(part, "measure", lambda **given: seen.append(given) or measured)
    monkeypatch.setattr(part, "LINES", (), raising=False)
    assert cli.main(["bench", name]) == 0
    given = {key: 5 + index for index, (key, value) in enumerate(defaults.items()) if type(value) is int}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    capsys.readouterr()
    assert cli.main(["bench", name, *flags, "--json"]) == 0
    assert seen == [defaults, {**defaults, **given}]
    assert {"host", "date", "method", "commit", "tables"} <= set(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    "command",
    [
        [], ["prefill"], ["decode"], ["router"], ["demo"], ["doctor"], ["keygen"], ["bench"],
        *(["bench", name] for name in BENCHES),
    ],
)  # fmt: skip
def test_help_describes_every_command_and_each_flag(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert cli.main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {' '.join(['pdtransfer', *command])} ")
    silent = [
        line
        for line in out.splitlines()
        if re.match(r"│ --(?!limits|help|version)[a-z-]+( [A-Z]+(\.\.\.)?)? *(\[|│)", line)
    ]
    assert silent == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == pdtransfer.__version__ + "\n"


def test_keygen_writes_each_ranks_key_beside_its_leaders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen", str(tmp_path / "d0"), "--tp-size", "2"]) == 0
    lines = capsys.readouterr().out
    assert [line.split()[0] for line in lines.splitlines()] == ["d0", "d0-tp1"]
    (allow := tmp_path / "allow").write_text(lines)
    key = lines.split()[1]
    (rank,) = rank_configs(DecodeConfig(tp_size=2, key=tmp_path / "d0.key", allow=allow), f"{key}@127.0.0.1:7100")
    assert KeyPair.read(rank.key).public == (tmp_path / "d0-tp1.pub").read_text().split()[1]
    assert cli.main(["keygen", str(tmp_path / "p0"), "--tp-size", "2", "--pp-size", "2"]) == 0
    assert len({path.name for path in tmp_path.glob("p0-pp?-tp?.key")}) == 3


def test_keygen_writes_a_private_key_and_prints_the_line_for_the_allow_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["keygen", str(tmp_path / "p0")]) == 0
    assert capsys.readouterr().out == (tmp_path / "p0.pub").read_text()
    assert (tmp_path / "p0.key").stat().st_mode & 0o777 == 0o600
    assert cli.main(["keygen", str(tmp_path / "p1"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (tmp_path / "p1.pub").read_text() == f"{document['name']} {document['public']}\n"
    assert cli.main(["keygen", str(tmp_path / "p0")]) == 2
    assert "exists" in capsys.readouterr().err


def test_daemon_logs_to_its_file_at_its_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        logging.getLogger("pdtransfer.test").debug("quiet")
        logging.getLogger("pdtransfer.test").warning("loud")
        return 0

    put(monkeypatch, "router.process", run=run)
    log = tmp_path / "router.log"
    assert cli.main(["router", "--node", "r0", "--log-file", str(log), "--log-level", "info"]) == 0
    (line,) = log.read_text().splitlines()
    assert "WARNING r0 pdtransfer.test: loud" in line
    assert cli.main(["router", "--log-file", str(log), "--log-level", "debug"]) == 0
    assert "quiet" in log.read_text()


def test_help_config_and_the_router_do_not_import_torch() -> None:
    script = (
        "import sys; from pdtransfer.serve.commands import cli; cli.main(['prefill', '--help']); "
        "cli.main(['router', '--slotz']); import pdtransfer.serve.router.backends.daemons.backend; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "pdtransfer: Unknown option: --slotz.\n")


@pytest.mark.parametrize("prints", ["print", "__import__('rich').get_console().print"])
def test_a_reader_that_closes_early_is_no_error(prints: str) -> None:
    script = (
        "import sys, types; from pdtransfer.serve.commands import cli; "
        f"fake = types.SimpleNamespace(run=lambda _: [{prints}('x' * 77) for _ in range(10_000)] and 0); "
        "sys.modules['pdtransfer.serve.commands.demo'] = fake; sys.exit(cli.main(['demo']))"
    )
    command = [f"'{sys.executable}' -c \"$SCRIPT\" | head -n 1; echo ${{PIPESTATUS[0]}}"]
    environment, outputs = {**os.environ, "SCRIPT": script}, {"capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", *command], env=environment, timeout=120, check=False, **outputs)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["x" * 77, "141"]


def test_interrupted_process_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    script = (
        "import sys, time, types; from pdtransfer.serve.commands import cli; fake = types.SimpleNamespace("
        "run=lambda _: (print('up', flush=True), time.sleep(60)));"
        "sys.modules['pdtransfer.serve.commands.demo'] = fake; "
        "sys.exit(cli.main(['demo']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests that run in the background ignore it
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(0.1)
    process.send_signal(2)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")


def test_an_interrupt_during_the_imports_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "cyclopts.py").write_text("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(60)\n")
    done = subprocess.run(
        [sys.executable, "-m", "pdtransfer", "router"], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_module_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "pdtransfer", "prefill", "--slotz", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
