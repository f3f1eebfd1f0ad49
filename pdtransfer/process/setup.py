"""What every process of ours settles before it serves."""

from __future__ import annotations

import ctypes
import resource

from ..environment import share_the_interpreter

_libc = ctypes.CDLL(None)
_PR_SET_TIMERSLACK = 29  # of this thread and of those that it starts, in ns: the system adds 50 us to each nap


def prepare() -> None:
    """Short turns between threads, naps that last as long as is said, and as many descriptors as may be had.

    The soft limit is 1,024 on many hosts, for the sake of select(), which nothing here uses. A flood of connections
    would use them up, and the listeners would have none left for the peers that mean well.
    """
    share_the_interpreter()
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), ctypes.c_ulong(), ctypes.c_ulong(), ctypes.c_ulong())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
