"""A prefill pool in memory that transports to other hosts read without a copy."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from contextlib import suppress

from ..errors import WorldError
from ..layout.engine_pools import SharedMemory
from .available_memory import available_memory

# fcntl has names for these from Python 3.13 on.
_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4 | 0x10  # further seals, shrinking, growing, writing by later mappings


def shared_memory(byte_count: int, owner: object) -> SharedMemory:
    """A memfd of zeroes, not yet backed, that lives as long as `owner`.

    It is sealed: other processes can neither map it for writing nor change its size, which could end this process with
    SIGBUS. Raises WorldError if the host has too little memory.
    """
    if (left := available_memory()).bytes < byte_count:
        raise WorldError(f"a pool of {byte_count} bytes: {left.what} is {left.bytes} bytes")
    fd = os.memfd_create("pdtransfer-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    weakref.finalize(owner, os.close, fd)
    os.ftruncate(fd, byte_count)
    mapped = mmap.mmap(fd, byte_count)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    with suppress(OSError):  # the kernel may not support huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return SharedMemory(fd=fd, view=memoryview(mapped))
