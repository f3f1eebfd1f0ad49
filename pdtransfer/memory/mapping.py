"""Memory with an address: mappings of this process, of received arenas, and private pools.

A mapping's address is valid until close. Prefaulting and registering take long: call them off the loop.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import TransportError, WorldError
from ..kernels.registered import RegisteredMemory, Registrar
from .available_memory import available_memory

HugePages = Literal["auto", "never", "always"]
Progress = Callable[[int], None]
"""Called in the thread that prefaults, with the number of bytes that are ready so far."""

F_GET_SEALS = 1034  # fcntl's own name for it comes with Python 3.13
SEALS = {"SEAL": 1, "SHRINK": 2, "GROW": 4}
_SEALS_OF_WRITES = {"WRITE": 8, "FUTURE_WRITE": 16}
_MADV_POPULATE_WRITE = 23  # Linux 5.14
CHUNK_BYTES = 64 << 20  # prefaulted at a time: some 35 ms with pages of 4 KiB
UNBACKED_BYTES_MAX = 64 << 20  # of an arena that a peer hands over

_MPOL_PREFERRED = 1  # not MPOL_BIND: a full node must not end this process
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES_MAX = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """Bytes that are mapped into this process until `close`, at `address`."""

    __slots__ = ("_map", "address", "byte_count", "registered")

    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self.registered: RegisteredMemory | None = None  # what a GPU may reach of it
        self.byte_count = len(mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    @property
    def view(self) -> memoryview:
        """The bytes, writable; close refuses while a view lives."""
        return memoryview(self._map)

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes as uint8 (byte_count,); close refuses while it lives."""
        return np.frombuffer(self._map, np.uint8)

    def prefault(
        self,
        progress: Progress | None = None,
        stop: Callable[[], bool] = lambda: False,
        *,
        first: int = 0,
        end: int | None = None,
    ) -> bool:
        """Backs bytes [first, end), by default all, with memory, and enters them in this process's page table. The
        contents stay. Both bounds are multiples of the page size, or the end of the mapping.

        Works in bounded chunks without the GIL, and returns False if `stop` returned True before the end. Raises
        WorldError if the kernel has no memory left.
        """
        last = self.byte_count if end is None else end
        for start in range(first, last, CHUNK_BYTES):
            if stop():
                return False
            end = min(start + CHUNK_BYTES, last)
            self._populate(start, end - start)
            if progress is not None:
                progress(end)
        return True

    def _populate(self, start: int, byte_count: int) -> None:
        while _libc.madvise(self.address + start, byte_count, _MADV_POPULATE_WRITE):
            match ctypes.get_errno():
                case errno.EINTR | errno.EAGAIN:
                    continue
                case errno.EINVAL:  # an older kernel. Another process may write here, so this must be a read.
                    self.array[start : start + byte_count : mmap.PAGESIZE].max()
                    return
                case number:
                    left = available_memory()
                    raise WorldError(
                        f"prefault: {byte_count} bytes at {start} of {self.byte_count}: {os.strerror(number)}; "
                        f"{left.what}: {left.bytes} bytes"
                    )

    def register(self, gpu: Registrar, end: int, *, first: int = 0, rest: bool = False) -> int:
        """Lets a GPU, the same one in each call, access the chunks that end below `end`; these must be backed. With
        `rest` no more follows at once, and all below `end` is registered. What lies before `first`, which is the same
        in each call, others register. Returns the number of first bytes that it can access by now. Raises WorldError if
        the GPU refuses more.
        """
        return self._registered_with(gpu).grow(end, first=first, rest=rest)

    def register_part(self, gpu: Registrar, first: int, end: int) -> None:
        """Lets a GPU, the same one in each call, access bytes [first, end), which are backed and not registered yet.
        Raises WorldError if the GPU refuses."""
        self._registered_with(gpu).add(first, end)

    def _registered_with(self, gpu: Registrar) -> RegisteredMemory:
        if self.registered is None:
            self.registered = RegisteredMemory(gpu, self.address, self.byte_count)
        return self.registered

    def bind(self, node: int) -> bool:
        """Prefers this NUMA node for memory that is not backed yet; False if the kernel refuses."""
        mask = ctypes.c_ulong(1 << node) if node < _NODES_MAX else None
        number = _SYS_MBIND.get(os.uname().machine)
        if mask is None or number is None:
            return False
        arguments = self.address, self.byte_count, _MPOL_PREFERRED, ctypes.addressof(mask), _NODES_MAX + 1, 0
        return not _libc.syscall(number, *map(ctypes.c_size_t, arguments))

    def close(self) -> None:
        """Unregisters it from the GPU and unmaps it; idempotent. Raises BufferError while a view of it exists. Raises
        WorldError, and leaves it mapped, if the GPU cannot unregister it.
        """
        if self.registered is not None:
            self.registered.close()
            self.registered = None
        self._map.close()


def map_received(fd: int, byte_count: int) -> Mapping:
    """Maps an arena that a peer has handed over; the caller closes `fd`.

    Raises TransportError, with both values, unless its seals keep it at exactly `byte_count` bytes, and its owner has
    begun to prefault it. A file that shrinks would end this process by SIGBUS.
    """
    try:
        stat_result = os.fstat(fd)
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        raise TransportError(f"arena: the descriptor is not a memfd ({error.strerror})") from None
    if not stat.S_ISREG(stat_result.st_mode) or stat_result.st_size != byte_count:
        raise TransportError(f"arena: {stat_result.st_size} bytes were received, {byte_count} were announced")
    # This process would back what the owner has not, and a sparse file may be of any size.
    if not stat_result.st_blocks and byte_count > UNBACKED_BYTES_MAX:
        raise TransportError(
            f"arena: its owner has not backed {byte_count} of its {byte_count} bytes with memory, "
            f"{UNBACKED_BYTES_MAX} are allowed: it must be prefaulted first"
        )
    if missing := [name for name, seal in SEALS.items() if not seals & seal]:
        raise TransportError(f"arena: seals {seals:#x}, without {', '.join(missing)}")
    if barred := [name for name, seal in _SEALS_OF_WRITES.items() if seals & seal]:
        raise TransportError(f"arena: seals {seals:#x}, with {', '.join(barred)}: it cannot be written")
    try:
        return Mapping(mmap.mmap(fd, byte_count))
    except OSError as error:
        raise TransportError(f"arena: {byte_count} bytes cannot be mapped ({error.strerror})") from None


def backed_end(fd: int, needed: int, backed: int = 0) -> int:
    """How many of the first `needed` bytes of a received arena its owner has backed. `backed` of them were by an
    earlier call: looking for a hole takes 30 ns for each page before it.

    All of them where at most UNBACKED_BYTES_MAX fewer are backed, anywhere: whoever enters the bytes that are missing
    backs them. What may be backed behind them does not count.
    """
    stat_result = os.fstat(fd)
    there, behind = stat_result.st_blocks * 512, stat_result.st_size - needed
    if needed - max(0, there - behind) <= UNBACKED_BYTES_MAX:
        return needed
    if backed < min(there, needed):
        backed = os.lseek(fd, backed, os.SEEK_HOLE)
    return min(backed, there, needed)


def allocate(byte_count: int, *, huge_pages: HugePages = "auto") -> Mapping:
    """Private zeroed memory for a prefill engine's pool, page-aligned, in transparent huge pages if there are some.

    Raises WorldError if the host or a cgroup cannot back it.
    """
    assert byte_count > 0
    if (left := available_memory()).bytes < byte_count:
        raise WorldError(f"a pool of {byte_count} bytes: {left.what} is {left.bytes} bytes")
    try:
        pool = Mapping(mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise WorldError(f"a pool of {byte_count} bytes: {error.strerror}") from None
    if huge_pages != "never":
        advise_huge(pool)
    return pool


def advise_huge(mapping: Mapping) -> None:
    """Asks for transparent huge pages; a kernel without them refuses, which changes nothing."""
    _libc.madvise(mapping.address, mapping.byte_count, mmap.MADV_HUGEPAGE)
