"""Decode's memory that prefill writes into: a memfd of sealed size, mapped here."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from ..errors import WorldError
from ..kernels.registered import Registrar
from .available_memory import HUGE_PAGE_BYTES, available_memory, huge_pages_free
from .hbm import Hbm
from .mapping import CHUNK_BYTES, SEALS, HugePages, Mapping, Progress, advise_huge

_F_ADD_SEALS = 1033  # fcntl's own name for it comes with Python 3.13


class ArenaMemory:
    """Decode's memory that prefill writes into: one memfd, mapped here, whose size is sealed."""

    __slots__ = (
        "_backing", "bytes_ready", "fd", "gpu", "hbm", "huge", "mapping", "needed", "registered_by_engine",
        "staging_base",
    )  # fmt: skip

    def __init__(self, fd: int, mapping: Mapping, *, huge: bool, needed: int, staging_base: int) -> None:
        self.fd, self.mapping, self.huge = fd, mapping, huge
        self.staging_base = staging_base  # where the staging buffer begins, which ends with the arena
        self.needed = needed  # how many of its first bytes are backed by `prefault`
        self._backing = threading.Lock()
        self.gpu: Registrar | None = None  # a GPU that has to access it
        self.registered_by_engine = 0  # of its first bytes: the engine that has them registers them with that GPU
        self.hbm: Hbm | None = None  # where its HBM components are, unless that is here
        self.bytes_ready = 0  # prefaulted, and reached by the GPU if there is one, from 0

    @classmethod
    def create(
        cls, byte_count: int, *, huge_pages: HugePages = "auto", name: str = "pdtransfer-arena", staging_bytes: int = 0
    ) -> ArenaMemory:
        """An arena of at least `byte_count` bytes, rounded up to whole pages, all zero and not yet backed by memory.

        Behind them lies a staging buffer of `staging_bytes`, for rows of HBM components whose writer does not reach the
        GPU. It is backed after `need_all`.

        `auto` takes huge pages if enough are free and there is no buffer. Raises WorldError, with both numbers, if the
        host or a cgroup cannot back what is needed. Without that check a later access would raise SIGBUS, or have some
        process killed.
        """
        assert byte_count + staging_bytes > 0
        page = mmap.PAGESIZE
        staging_base, staging_bytes = -(-byte_count // page) * page, -(-staging_bytes // page) * page
        byte_count = staging_base + staging_bytes
        if huge_pages == "always" or (huge_pages == "auto" and not staging_bytes):
            wanted, free = -(-byte_count // HUGE_PAGE_BYTES), huge_pages_free()
            if wanted <= free:
                try:
                    return cls._of(wanted * HUGE_PAGE_BYTES, name, huge=True, staging_base=staging_base)
                except WorldError:
                    if huge_pages == "always":
                        raise  # another process was faster, or a cgroup forbids it
            elif huge_pages == "always":
                raise WorldError(
                    f"huge_pages = always: {byte_count} bytes are {wanted} pages of 2 MiB, {free} are free; "
                    f"sysctl vm.nr_hugepages={wanted} sets them aside"
                )
        if (left := available_memory()).bytes < max(staging_base, page):
            raise WorldError(f"an arena of {staging_base} bytes: {left.what} is {left.bytes} bytes")
        arena = cls._of(byte_count, name, huge=False, staging_base=staging_base)
        if huge_pages == "auto":
            advise_huge(arena.mapping)
        return arena

    @classmethod
    def _of(cls, byte_count: int, name: str, *, huge: bool, staging_base: int) -> ArenaMemory:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge else 0)
        try:
            fd = os.memfd_create(name, flags)
        except OSError as error:
            raise WorldError(f"an arena of {byte_count} bytes: {error.strerror}") from None
        try:
            os.ftruncate(fd, byte_count)
            # Not sealed against writes: peers write into it.
            fcntl.fcntl(fd, _F_ADD_SEALS, sum(SEALS.values()))
            page = HUGE_PAGE_BYTES if huge else mmap.PAGESIZE
            needed = min(byte_count, -(-max(1, staging_base) // page) * page)
            return cls(fd, Mapping(mmap.mmap(fd, byte_count)), huge=huge, needed=needed, staging_base=staging_base)
        except OSError as error:
            os.close(fd)
            raise WorldError(f"an arena of {byte_count} bytes: {error.strerror}") from None

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffer; 0 without one."""
        return self.byte_count - self.staging_base if self.hbm is not None else 0

    @property
    def byte_count(self) -> int:
        """Bytes of the memfd and of the mapping."""
        return self.mapping.byte_count

    def need_all(self) -> None:
        """Rows will land in all of it: `prefault` backs the rest as well."""
        self.needed = self.byte_count

    def prefault(self, progress: Progress | None = None, stop: Callable[[], bool] = lambda: False) -> bool:
        """As Mapping.prefault, of what is needed, from where the last call stopped. `bytes_ready` grows with what is
        backed, and accessible to `gpu`. From any thread: a call that meets another one waits for it.

        Raises WorldError also if available memory runs out on the way, before the kernel kills a process for it, and if
        the GPU refuses.
        """
        with self._backing:
            return self._prefault(self.needed, progress, stop)

    def _prefault(self, needed: int, progress: Progress | None, stop: Callable[[], bool]) -> bool:
        def stopped() -> bool:
            unbacked = needed - os.fstat(self.fd).st_blocks * 512
            if not self.huge and (left := available_memory()).bytes < min(unbacked, CHUNK_BYTES):
                raise WorldError(f"prefault: {unbacked} bytes are to be backed, {left.what} is {left.bytes} bytes")
            return stop()

        def ready(byte_count: int) -> None:
            if self.gpu is not None:
                byte_count = self.mapping.register(
                    self.gpu, byte_count, first=self.registered_by_engine, rest=byte_count == needed
                )
            if byte_count > self.bytes_ready:
                self.bytes_ready = byte_count
                if progress is not None:
                    progress(byte_count)

        return self.mapping.prefault(ready, stopped, first=self.bytes_ready, end=needed)

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
