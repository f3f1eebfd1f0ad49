"""A GPU's memory in an engine's process, which loads this module by its path: CUDA's driver, called by ctypes.

It imports nothing of this package. All is in the GPU's primary context, which the runtime of a library uses as well.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections.abc import Sequence
from typing import Any

_HANDLE_BYTES, _UUID_BYTES = 64, 16
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_FREE_BYTES_MIN = 512 << 20  # of the GPU, once this context is there: an engine beside it may need some
_TRIES = 8  # of a mapping that lies where it may not
_MAP_NORESERVE = 0x4000
_STEP = 2 << 20
_PLACES = 1 << 22  # of this step, 8 TiB: by how much the first free address differs from process to process


class _IpcHandle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaCard:
    """The GPU with this UUID. A call that fails raises RuntimeError with a text for people."""

    def __init__(self, uuid: bytes) -> None:
        _skip_addresses()
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"no CUDA driver: {error}") from None
        self._call("cuInit", 0)
        self._gpu, context = self._device(uuid), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._gpu)
        try:
            self._call("cuCtxSetCurrent", context)
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            if free.value < _FREE_BYTES_MIN:
                raise RuntimeError(f"the GPU has {free.value >> 20} MiB left, {_FREE_BYTES_MIN >> 20} are to stay free")
        except RuntimeError:
            self.close()  # the process goes on without the GPU
            raise

    def close(self) -> None:
        """Gives the context back, with all that was opened in it."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._gpu)

    def open(self, handle: bytes, offset: int, byte_count: int, used: Sequence[tuple[int, int]]) -> int:
        """The address here of another process's memory: `byte_count` bytes from `offset` of what the handle names, at
        none of the addresses `used`, first and end each. All copies to it are over once the call that copies returns:
        else a small one from memory that is not pinned may still be under way."""
        for _ in range(_TRIES):
            base = ctypes.c_uint64()
            named = _IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), named, ctypes.c_uint(_PEER_ACCESS))
            address = base.value + offset
            if all(end <= address or address + byte_count <= first for first, end in used):
                flag = ctypes.c_uint(1)
                self._call("cuPointerSetAttribute", ctypes.byref(flag), _SYNC_MEMOPS, ctypes.c_uint64(base.value))
                return address
            self._call("cuIpcCloseMemHandle", base)
            self._hold(base.value, offset + byte_count)
        raise RuntimeError("the GPU's memory is mapped where it was for an earlier session")

    def allocate(self, byte_count: int) -> int:
        """The address of memory of the GPU that stays until this process ends, for copies as `open`'s."""
        address, flag = ctypes.c_uint64(), ctypes.c_uint(1)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(byte_count))
        self._call("cuPointerSetAttribute", ctypes.byref(flag), _SYNC_MEMOPS, address)
        return address.value

    def upload(self, address: int, content: bytes) -> None:
        """Writes memory of the GPU."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))

    def download(self, address: int, byte_count: int) -> bytes:
        """Reads memory of the GPU."""
        content = ctypes.create_string_buffer(byte_count)
        self._call("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(byte_count))
        return content.raw

    def _device(self, uuid: bytes) -> ctypes.c_int:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(_UUID_BYTES)
            self._call("cuDeviceGet", ctypes.byref(device), ordinal)
            self._call("cuDeviceGetUuid", name, device)
            if name.raw == uuid:
                return device
        raise RuntimeError(f"GPU {uuid.hex()} is not one of the {count.value} that the engine's process sees")

    def _hold(self, address: int, byte_count: int) -> None:
        """Takes these addresses, so that the driver maps the memory elsewhere; where it cannot, the next try shows."""
        size, held = -(-byte_count // _STEP) * _STEP, ctypes.c_uint64()
        self._cuda.cuMemAddressReserve(
            ctypes.byref(held), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(address), ctypes.c_uint64(0)
        )

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name.partition('_')[0]} answers {status} ({(text.value or b'').decode()})")


def _skip_addresses() -> None:
    """Takes some of the highest addresses, so that two processes have the GPU's memory at different ones."""
    try:
        size = (1 + secrets.randbelow(_PLACES)) * _STEP
        held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=0)
    except (OSError, ValueError):  # a limit of the process: open() looks where the memory is all the same
        return
    _skipped.append(held)


_skipped: list[mmap.mmap] = []
CARD = CudaCard
