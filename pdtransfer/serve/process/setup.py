"""Process-wide settings that every command makes before it serves."""

from __future__ import annotations

import ctypes
import resource

from ...environment import share_the_interpreter

_libc = ctypes.CDLL(None)
_PR_SET_TIMERSLACK = 29  # of this thread and the threads that it starts, in ns: the default adds 50 us to each sleep


def prepare() -> None:
    """Sets a short switch interval, a minimal timer slack, and the highest limit of descriptors.

    Many hosts set a low soft limit of descriptors for the sake of select(), which this package does not use. A flood of
    connections would use them up and lock out legitimate peers.
    """
    share_the_interpreter()
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), ctypes.c_ulong(), ctypes.c_ulong(), ctypes.c_ulong())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
