"""Memory with an address: sealed memfd arenas, mappings of received ones, and private pools.

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
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError, TransportError, WorldError
from ..kernels.registered import RegisteredMemory, Registrar
from .available_memory import HUGE_PAGE_BYTES, available_memory, huge_pages_free

if TYPE_CHECKING:
    from .hbm import Hbm

HugePages = Literal["auto", "never", "always"]
Progress = Callable[[int], None]
"""Called in the thread that prefaults, with the number of bytes that are ready so far."""

# fcntl's own names for these come with Python 3.13.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = {"SEAL": 1, "SHRINK": 2, "GROW": 4}
_SEALS_OF_WRITES = {"WRITE": 8, "FUTURE_WRITE": 16}
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_CHUNK_BYTES = 64 << 20  # prefaulted at a time: some 35 ms with pages of 4 KiB
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
        self.registered: RegisteredMemory | None = None  # what a card may reach of it
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
        for start in range(first, last, _CHUNK_BYTES):
            if stop():
                return False
            end = min(start + _CHUNK_BYTES, last)
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

    def register(self, card: Registrar, end: int) -> int:
        """Lets a card, the same one in each call, access the chunks that end below `end`; these must be backed. Returns
        the number of first bytes that it can access by now. Raises WorldError if the card refuses more.
        """
        if self.registered is None:
            self.registered = RegisteredMemory(card, self.address, self.byte_count)
        return self.registered.grow(end)

    def bind(self, node: int) -> bool:
        """Prefers this NUMA node for memory that is not backed yet; False if the kernel refuses."""
        mask = ctypes.c_ulong(1 << node) if node < _NODES_MAX else None
        number = _SYS_MBIND.get(os.uname().machine)
        if mask is None or number is None:
            return False
        arguments = self.address, self.byte_count, _MPOL_PREFERRED, ctypes.addressof(mask), _NODES_MAX + 1, 0
        return not _libc.syscall(number, *map(ctypes.c_size_t, arguments))

    def close(self) -> None:
        """Unregisters it from the card and unmaps it; idempotent. Raises BufferError while a view of it exists. Raises
        WorldError, and leaves it mapped, if the card cannot unregister it.
        """
        if self.registered is not None:
            self.registered.close()
            self.registered = None
        self._map.close()


class ArenaMemory:
    """Decode's memory that prefill writes into: one memfd, mapped here, whose size is sealed."""

    __slots__ = ("_use", "bytes_ready", "card", "fd", "hbm", "huge", "mapping")

    def __init__(self, fd: int, mapping: Mapping, *, huge: bool) -> None:
        self.fd, self.mapping, self.huge = fd, mapping, huge
        self._use: Literal["", "served", "exported"] = ""
        self.card: Registrar | None = None  # a card that has to access it
        self.hbm: Hbm | None = None  # where its HBM components are, unless that is here
        self.bytes_ready = 0  # prefaulted, and reached by the card if there is one, from 0

    @classmethod
    def create(cls, byte_count: int, *, huge_pages: HugePages = "auto", name: str = "pdtransfer-arena") -> ArenaMemory:
        """An arena of at least `byte_count` bytes, rounded up to whole pages, all zero and not yet backed by memory.

        `auto` takes huge pages if enough are free. Raises WorldError, with both numbers, if the host or a cgroup cannot
        back it; without that check a later access would raise SIGBUS, or have some process killed.
        """
        assert byte_count > 0
        if huge_pages != "never":
            wanted, free = -(-byte_count // HUGE_PAGE_BYTES), huge_pages_free()
            if wanted <= free:
                try:
                    return cls._of(wanted * HUGE_PAGE_BYTES, name, huge=True)
                except WorldError:
                    if huge_pages == "always":
                        raise  # another process was faster, or a cgroup forbids it
            elif huge_pages == "always":
                raise WorldError(
                    f"huge_pages = always: {byte_count} bytes are {wanted} pages of 2 MiB, {free} are free; "
                    f"sysctl vm.nr_hugepages={wanted} sets them aside"
                )
        byte_count = -(-byte_count // mmap.PAGESIZE) * mmap.PAGESIZE
        if (left := available_memory()).bytes < byte_count:
            raise WorldError(f"an arena of {byte_count} bytes: {left.what} is {left.bytes} bytes")
        arena = cls._of(byte_count, name, huge=False)
        if huge_pages == "auto":
            _advise_huge(arena.mapping)
        return arena

    @classmethod
    def _of(cls, byte_count: int, name: str, *, huge: bool) -> ArenaMemory:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge else 0)
        try:
            fd = os.memfd_create(name, flags)
        except OSError as error:
            raise WorldError(f"an arena of {byte_count} bytes: {error.strerror}") from None
        try:
            os.ftruncate(fd, byte_count)
            # Not sealed against writes: peers write into it.
            fcntl.fcntl(fd, _F_ADD_SEALS, sum(_SEALS.values()))
            return cls(fd, Mapping(mmap.mmap(fd, byte_count)), huge=huge)
        except OSError as error:
            os.close(fd)
            raise WorldError(f"an arena of {byte_count} bytes: {error.strerror}") from None

    @property
    def byte_count(self) -> int:
        """Bytes of the memfd and of the mapping."""
        return self.mapping.byte_count

    def prefault(self, progress: Progress | None = None, stop: Callable[[], bool] = lambda: False) -> bool:
        """As Mapping.prefault, from where the last call stopped. `bytes_ready` grows with what is backed, and
        accessible to `card`.

        Raises WorldError also if available memory runs out on the way, before the kernel kills a process for it, and if
        the card refuses.
        """

        def stopped() -> bool:
            unbacked = self.byte_count - os.fstat(self.fd).st_blocks * 512
            if not self.huge and (left := available_memory()).bytes < min(unbacked, _CHUNK_BYTES):
                raise WorldError(f"prefault: {unbacked} bytes are to be backed, {left.what} is {left.bytes} bytes")
            return stop()

        def ready(byte_count: int) -> None:
            if self.card is not None:
                byte_count = self.mapping.register(self.card, byte_count)
            if byte_count > self.bytes_ready:
                self.bytes_ready = byte_count
                if progress is not None:
                    progress(byte_count)

        return self.mapping.prefault(ready, stopped, first=self.bytes_ready)

    def use(self, how: Literal["served", "exported"]) -> None:
        """Declares who else writes: processes that hold a lock each ("served"), or any peer that was given the address
        ("exported"). Raises LocalProtocolError for the second kind: no fence would hold for both."""
        if self._use not in ("", how):
            raise LocalProtocolError(f"arena: it is {self._use}, so it cannot be {how}: no fence would hold")
        self._use = how

    def reopen(self) -> int:
        """A descriptor of another open file description of the same memfd, which the caller closes."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmaps it and closes the memfd; other processes keep their mappings. Idempotent. Raises as Mapping.close and
        Hbm.close."""
        if self.hbm is not None:
            self.hbm.close()
            self.hbm = None
        self.mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_received(fd: int, byte_count: int) -> Mapping:
    """Maps an arena that a peer has handed over; the caller closes `fd`.

    Raises TransportError, with both values, unless its seals keep it at exactly `byte_count` bytes, and its owner has
    begun to prefault it. A file that shrinks would end this process by SIGBUS.
    """
    try:
        found = os.fstat(fd)
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise TransportError(f"arena: the descriptor is no memfd ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size != byte_count:
        raise TransportError(f"arena: {found.st_size} bytes were received, {byte_count} were announced")
    # This process would back what the owner has not, and a sparse file may be of any size.
    if not found.st_blocks and byte_count > UNBACKED_BYTES_MAX:
        raise TransportError(
            f"arena: its owner has not backed {byte_count} of its {byte_count} bytes with memory, "
            f"{UNBACKED_BYTES_MAX} are allowed: it must be prefaulted first"
        )
    if missing := [name for name, seal in _SEALS.items() if not seals & seal]:
        raise TransportError(f"arena: seals {seals:#x}, without {', '.join(missing)}")
    if barred := [name for name, seal in _SEALS_OF_WRITES.items() if seals & seal]:
        raise TransportError(f"arena: seals {seals:#x}, with {', '.join(barred)}: it cannot be written")
    try:
        return Mapping(mmap.mmap(fd, byte_count))
    except OSError as error:
        raise TransportError(f"arena: {byte_count} bytes cannot be mapped ({error.strerror})") from None


def enter_backed(received: Mapping, fd: int, first: int, byte_count_max: int, backed: int = 0) -> tuple[int, int]:
    """Enters in this process's page table the part of a received arena from `first` to the first hole, at most
    `byte_count_max` bytes of it.

    Returns the end of that part, and the hole, which is `backed` of the next call: looking for it takes 30 ns for each
    page before it. Where at most UNBACKED_BYTES_MAX are missing, it backs them itself.
    """
    end = received.byte_count
    if end - first > UNBACKED_BYTES_MAX:
        if backed < min(end, first + byte_count_max):
            backed = os.lseek(fd, first, os.SEEK_HOLE)
        backed = min(backed, os.fstat(fd).st_blocks * 512)
        end = end if end - backed <= UNBACKED_BYTES_MAX else max(first, backed)
    end = min(end, first + byte_count_max)
    received.prefault(first=first, end=end)
    return end, backed


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
        _advise_huge(pool)
    return pool


def _advise_huge(mapping: Mapping) -> None:
    """Asks for transparent huge pages; a kernel without them refuses, which changes nothing."""
    _libc.madvise(mapping.address, mapping.byte_count, mmap.MADV_HUGEPAGE)
