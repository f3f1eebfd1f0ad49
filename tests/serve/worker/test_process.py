"""What a daemon's process loads, from the command line to its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S

SCRIPT = """
import gc, json, sys, threading
from pdtransfer.__main__ import main
from pdtransfer.transports.select import PrefillTransports

def noted(transports, prepare=PrefillTransports.prepare):
    prepare(transports)
    print(json.dumps({"beside_the_loop": threading.current_thread() is not threading.main_thread()}), flush=True)

PrefillTransports.prepare = noted

sys.argv = ["pdtransfer", *sys.argv[1:], "--json", "--bind", "tcp://127.0.0.1:0", "--listen", "127.0.0.1:0"]
status = main()
print(json.dumps({"loaded": list(sys.modules), "collects": gc.isenabled(), "frozen": gc.get_freeze_count() > 0}))
sys.exit(status)
"""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_daemon_of_our_own_engine_loads_nothing_that_it_does_not_use(role: str) -> None:
    command = [sys.executable, "-c", SCRIPT, role]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if role == "prefill":  # what copies rows is loaded before a session could have to wait for it
                assert json.loads(process.stdout.readline()) == {"beside_the_loop": True}
            assert json.loads(process.stdout.readline())["ready"] is True
            process.send_signal(signal.SIGTERM)
            document = json.loads(process.stdout.readline())
            assert process.wait(timeout=PATIENCE_S) == 0
        finally:
            process.kill()
    unused = {"torch", "pdtransfer.hisparse.hot_requests"}
    if role == "prefill":  # on loopback; decode may dial a prefill of another host
        unused |= {"mooncake", "pdtransfer.transports.engines.child"}
    assert not unused.intersection(document.pop("loaded"))
    assert document == {"collects": True, "frozen": True}
