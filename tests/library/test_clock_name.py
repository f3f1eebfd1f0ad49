"""Processes know whose CLOCK_MONOTONIC they share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdtransfer.clock_name import DIGEST_BYTES, clock_digest, clock_name
from tests.support.paths import REPO

SHIFTED = ("unshare", "--time", "--boottime", "100", "--monotonic", "5000")
PRINT_CLOCK = "import time; from pdtransfer.clock_name import clock_name; print(time.monotonic()); print(clock_name())"


def _clock(*within: str) -> tuple[float, str]:
    ran = subprocess.run(
        [*within, sys.executable, "-c", PRINT_CLOCK], capture_output=True, text=True, cwd=REPO, check=True
    )
    seconds, name = ran.stdout.splitlines()
    return float(seconds), name


def test_processes_of_one_boot_and_time_namespace_name_their_clock_alike() -> None:
    assert _clock()[1] == clock_name()
    assert len(clock_digest()) == DIGEST_BYTES


def test_a_time_namespace_of_its_own_is_another_clock() -> None:
    if subprocess.run([*SHIFTED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no time namespace can be made here: that takes util-linux 2.38 or later, and CAP_SYS_ADMIN")
    (ours_s, ours), (theirs_s, theirs) = _clock(), _clock(*SHIFTED)
    assert theirs_s - ours_s > 4_900, "the offset is in force"
    assert theirs != ours
