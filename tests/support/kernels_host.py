"""The kernels' headers as host code: launches of them run here, thread by thread, under the sanitizer for undefined
behaviour, with addresses of this process."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdtransfer import kernels
from pdtransfer.kernels.kv_copy import Launch, launch_of, pairing_of, side_of
from pdtransfer.kernels.pools import Pool

SOURCE = Path(__file__).parent / "kernels_on_host.cpp"
FLAGS = ["-x", "c++", "-O1", "-Wall", "-Wextra", "-Werror"]
ENDS = "-std=c++17", "-g", "-fno-sanitize-recover=all"  # the process, with the place


def built(target: Path, *flags: str, source: Path = SOURCE) -> None:
    """Compiles a source as C++; skips the test where there is no compiler or no sanitizer."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    command = ["c++", *FLAGS, f"-I{kernels.source_directory()}", *flags, "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in done.stderr:
        pytest.skip("no sanitizer")
    assert not done.returncode, done.stderr


def sanitized(target: Path, name: str, *flags: str) -> Path:
    """A library of one of the product's sources, which reports undefined behaviour on standard error."""
    source = kernels.source_directory() / name
    built(target, "-std=c++11", "-fPIC", "-shared", "-fsanitize=undefined", *flags, source=source)
    return target


@cache
def library(directory: Path) -> ctypes.CDLL:
    """The launches, built once for all processes of this directory; undefined behaviour ends the process."""
    path = directory / "kernels_on_host.so"
    with (directory / "kernels_on_host.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            built(path, *ENDS, "-shared", "-fPIC", "-fsanitize=undefined")
    return ctypes.CDLL(str(path))


class Words:
    """What a GPU's Progress and PinnedCancel are, here."""

    def __init__(self) -> None:
        self.progress, self.tally, self.cancel = np.zeros(2, np.uint32), np.zeros(4, np.uint32), np.zeros(1, np.uint32)


def run(
    lib: ctypes.CDLL, target: Pool, source: Pool, target_slots: Any, source_slots: Any, rows: int, *,
    blocks: int = 2, threads: int = 64, words: Words | None = None, count_at: Any = None, known: bool = True,
) -> Launch:  # fmt: skip
    """kv_copy's launch of these, but for what the CPU checks before."""
    pairing = pairing_of(source.layout, target.layout)
    theirs = side_of("source_slots", source_slots, source, pairing.source_slots)
    ours = side_of("target_slots", target_slots, target, pairing.target_slots)
    launch = launch_of(target, source, ours, theirs, rows, count_known=known)
    argument = launch.argument
    argument.pairs = launch.pairs.ctypes.data
    for side, listed in ((argument.source, launch.source), (argument.target, launch.target)):
        side.entries = 0 if listed is None else listed.ctypes.data
    if words is not None:
        argument.progress, argument.tally = words.progress.ctypes.data, words.tally.ctypes.data
        argument.cancel, argument.ticket = words.cancel.ctypes.data, 5
    if count_at is not None:
        argument.count_at = count_at.ctypes.data
    lib.kv_copy_on_host(ctypes.byref(argument), blocks, threads)
    return launch
