"""Memory that another process of this host may map: a GPU's, for components that live in HBM, or a memfd's.

Every process that has a handle can write the memory: give it only to those that should. Exported memory stays until all
that mapped it have closed it; a GPU's ends with its owner. No fence proves that they have closed it, so an arena whose
slots are leased to writers is never exported.
"""

from __future__ import annotations

import os
import threading
from typing import Literal

import msgspec

from ..errors import TransportError, WorldError
from ..kernels import driver
from ..kernels import gpu as gpus
from ..layout.engine_pools import GpuMemory
from .mapping import Mapping, map_received

_UUID_BYTES = 16
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names exported memory to another process, which gets `packed`."""

    kind: Literal["gpu", "memfd"]
    byte_count: int
    offset: int = 0  # in the allocation of `handle`
    gpu: bytes = b""  # its UUID: ordinals differ between processes
    handle: bytes = b""  # the driver's
    process: int = 0  # of a memfd: the process that has it open,
    descriptor: int = 0  # the descriptor there,
    inode: int = 0  # and the file that it has to be

    @property
    def packed(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes) -> Handle:
        """Raises TransportError for bytes that are no handle."""
        try:
            handle = msgspec.msgpack.decode(packed, type=cls)
        except msgspec.MsgspecError as error:
            raise TransportError(f"handle of exported memory: {error}") from None
        whole = handle.kind == "memfd" or (len(handle.gpu), len(handle.handle)) == (
            _UUID_BYTES,
            gpus.IPC_HANDLE_BYTES,
        )
        if not whole or handle.byte_count < 1 or handle.offset < 0:
            raise TransportError(f"handle of exported memory: {handle}")
        return handle


def export(memory: GpuMemory) -> Handle:
    """Names a GPU's memory to other processes. Raises WorldError for memory in several allocations, and for such as
    has no handle, as that of an allocator which maps it piece by piece (torch with expandable_segments)."""
    here = gpus.gpu_at(memory.device)
    base, whole = here.range_of(memory.address)
    if memory.address - base + memory.byte_count > whole:
        raise WorldError(f"it lies in several allocations, the first has {whole} bytes")
    return Handle("gpu", memory.byte_count, memory.address - base, here.uuid, here.ipc_handle(base))


class Opened:
    """Memory of another process, until `close`. `address` is the GPU's own where `device` is not None; `same_gpu` is
    whether it is memory of that GPU."""

    __slots__ = ("_close", "address", "byte_count", "device", "same_gpu")

    def __init__(self, handle: Handle, *, on: int | None = None) -> None:
        """For GPU `on`, by default for the GPU whose memory it is.

        With `on` this process need not see the other GPU: engines of one host see one GPU each. Raises TransportError
        where there is no such memory, or less of it, and where no GPU here can reach it; with `on` also for memory
        that is no GPU's.
        """
        self.byte_count, self.same_gpu = handle.byte_count, False
        if handle.kind == "memfd":
            if on is not None:
                # The sender of the handle would choose which file of which process a GPU writes.
                raise TransportError(f"handle of exported memory: {handle.kind}, expected GPU memory")
            mapping = _mapped(handle)
            self.device, self.address, self._close = None, mapping.address, mapping.close
            return
        ordinal = driver.ordinal_of(handle.gpu) if on is None else on
        if ordinal is None:
            raise TransportError(f"exported memory is on GPU {handle.gpu.hex()}, which this process does not see")
        here = self.device = ordinal
        self.same_gpu = handle.gpu == gpus.gpu_at(here).uuid
        base = _take(here, handle.handle)
        self.address = base + handle.offset
        self._close = lambda: _release(here, handle.handle)
        try:
            _, whole = gpus.gpu_at(here).range_of(base)
        except WorldError as error:
            self.close()
            raise TransportError(f"exported memory: {error}") from None
        if handle.offset + handle.byte_count > whole:
            self.close()
            text = f"bytes {handle.offset}+{handle.byte_count} of an allocation of {whole}"
            raise TransportError(f"exported memory: {text}")

    def close(self) -> None:
        """Closes it, once nothing here reads or writes it any more; idempotent."""
        close, self._close = self._close, lambda: None
        close()


def _mapped(handle: Handle) -> Mapping:
    path = f"/proc/{handle.process}/fd/{handle.descriptor}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"exported memory: {path}: {error.strerror}") from None
    try:
        if os.fstat(fd).st_ino != handle.inode:
            raise TransportError(f"exported memory: {path} is another file now")
        return map_received(fd, handle.byte_count)
    finally:
        os.close(fd)


_lock = threading.Lock()
_opened: dict[tuple[int, bytes], tuple[int, int]] = {}  # (address, users): the driver opens a handle once


def _take(ordinal: int, handle: bytes) -> int:
    with _lock:
        address, users = _opened.get((ordinal, handle), (0, 0))
        if not users:
            try:
                address = gpus.gpu_at(ordinal).ipc_open(handle, _PEER_ACCESS)
            except WorldError as error:
                raise TransportError(f"exported memory: {error}") from None
        _opened[ordinal, handle] = address, users + 1
        return address


def _release(ordinal: int, handle: bytes) -> None:
    with _lock:
        address, users = _opened.pop((ordinal, handle))
        if users > 1:
            _opened[ordinal, handle] = address, users - 1
        else:
            gpus.gpu_at(ordinal).ipc_close(address)
