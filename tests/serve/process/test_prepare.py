"""What a process of ours settles before it serves."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from pdtransfer.serve.process.setup import prepare
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
prepare()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(soft == hard)
"""


def test_a_process_takes_all_the_descriptors_that_it_may_have() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "True\n"


NAPS = """
from pathlib import Path
from pdtransfer.serve.process.setup import prepare
prepare()
print(Path("/proc/self/timerslack_ns").read_text().strip())
"""


def test_naps_of_a_process_last_as_long_as_configured() -> None:
    ran = subprocess.run([sys.executable, "-c", NAPS], check=True, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "1\n"
