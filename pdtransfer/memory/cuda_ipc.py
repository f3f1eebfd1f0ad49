"""Memory of a GPU that another process of this host may map, for components that live in HBM.

Every process that has a handle can write the memory: give it only to those that should. It ends with its owner.
"""

from __future__ import annotations

import threading
from typing import Literal

import msgspec

from ..errors import TransportError, WorldError
from ..kernels import gpu as gpus
from ..layout.engine_pools import GpuMemory

_UUID_BYTES = 16
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Names exported memory to another process, which gets `packed`."""

    kind: Literal["gpu"]  # older releases named other memory as well, in fields behind these
    byte_count: int
    offset: int  # in the allocation of `handle`
    gpu: bytes  # its UUID: ordinals differ between processes
    handle: bytes  # the driver's

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
        whole = (len(handle.gpu), len(handle.handle)) == (_UUID_BYTES, gpus.IPC_HANDLE_BYTES)
        if not whole or handle.byte_count < 1 or handle.offset < 0:
            raise TransportError(f"handle of exported memory: {handle}")
        return handle


def export(memory: GpuMemory) -> Handle:
    """Names a GPU's memory to other processes. Raises WorldError for memory in several allocations, and for such as
    has no handle, as that of an allocator which maps it piece by piece (torch with expandable_segments)."""
    gpu = gpus.gpu_at(memory.device)
    base, whole = gpu.range_of(memory.address)
    if memory.address - base + memory.byte_count > whole:
        raise WorldError(f"it lies in several allocations, the first has {whole} bytes")
    return Handle("gpu", memory.byte_count, memory.address - base, gpu.uuid, gpu.ipc_handle(base))


class Opened:
    """Memory of another process that a GPU reaches at its `address`, until `close`. All writes have ended by then.
    `same_gpu` is whether it is memory of that GPU."""

    __slots__ = ("_close", "address", "byte_count", "same_gpu")

    def __init__(self, handle: Handle, on: int) -> None:
        """For GPU `on`. This process need not see the other GPU: engines of one host see one GPU each. Raises
        TransportError where there is no such memory, or less of it, and where the GPU cannot reach it."""
        gpu = gpus.gpu_at(on)
        self.byte_count, self.same_gpu = handle.byte_count, handle.gpu == gpu.uuid
        base = _take(on, handle.handle)
        self.address = base + handle.offset
        self._close = lambda: _release(on, handle.handle)
        try:
            _, whole = gpu.range_of(base)
        except WorldError as error:
            self.close()
            raise TransportError(f"exported memory: {error}") from None
        if handle.offset + handle.byte_count > whole:
            self.close()
            text = f"bytes {handle.offset}+{handle.byte_count} of an allocation of {whole}"
            raise TransportError(f"exported memory: {text}")

    def close(self) -> None:
        """Closes it, once nothing here reads or writes it any more; idempotent. Raises WorldError where the GPU does
        not release it."""
        close, self._close = self._close, lambda: None
        close()


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
