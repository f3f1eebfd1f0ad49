"""What a router's process loads, from the command line to its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

LINES_MAX = 12_400
BACKENDS = "pdtransfer.serve.router.backends"
SCRIPT = """
import sys
from pdtransfer.__main__ import main

sys.argv = ["pdtransfer", "router", "--json", "--listen", "127.0.0.1:0", *sys.argv[1:]]
status = main()
loaded = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "pdtransfer"}
import json
print(json.dumps(loaded))
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("flags", "other"),
    [([], BACKENDS + ".servers"), (["--engine", "vllm"], BACKENDS + ".daemons")],
    ids=["daemons", "vllm"],
)
def test_a_router_loads_its_backend_alone_and_nothing_that_moves_kv(flags: list[str], other: str) -> None:
    command = [sys.executable, "-c", SCRIPT, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"] is True
        process.send_signal(signal.SIGTERM)
        loaded: dict[str, str] = json.loads(process.stdout.readline())
        assert process.wait(timeout=PATIENCE_S) == 0
    packages = "transports kernels memory hisparse serve.worker serve.engine_api serve.firewall"
    for package in packages.split():
        assert not [name for name in loaded if f"{name}.".startswith(f"pdtransfer.{package}.")], package
    assert not [name for name in loaded if f"{name}.".startswith(f"{other}.")]
    lines = sum(len(Path(path).read_bytes().splitlines()) for path in loaded.values())
    assert lines <= LINES_MAX, f"{lines} lines of the package are loaded"
