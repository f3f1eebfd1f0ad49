"""Registers host memory with a GPU, part by part, and unregisters it before it is unmapped."""

from __future__ import annotations

from typing import Protocol

from ..errors import WorldError

CHUNK_BYTES = 256 << 20  # one registration; a small one keeps each call short


class Registrar(Protocol):
    """The part of a GPU that registers memory. Both methods raise WorldError if the driver refuses."""

    def host_register(self, address: int, byte_count: int) -> int:
        """Registers host memory with the GPU and returns its device address."""
        ...

    def host_unregister(self, address: int) -> None:
        """Undoes host_register. No work on the GPU may use the memory any more."""
        ...


class RegisteredMemory:
    """Memory of this process of which parts are registered: its byte n, where it is, lies at `device_address` + n.

    `grow` registers it from the beginning on, `bytes_ready` bytes by now, in chunks of CHUNK_BYTES; `add` any part. A
    kernel may cross the border of two registrations; one transfer of the copy engine must not. Not thread-safe.
    """

    __slots__ = ("_chunks", "_gpu", "address", "byte_count", "bytes_ready", "device_address")

    def __init__(self, gpu: Registrar, address: int, byte_count: int) -> None:
        self._gpu, self.address, self.byte_count = gpu, address, byte_count
        self._chunks: list[int] = []
        self.bytes_ready = self.device_address = 0

    def add(self, first: int, end: int) -> None:
        """Registers bytes [first, end), none of which is registered. Slow: call it outside the event loop.

        Raises WorldError if the GPU refuses, or sees them apart from the others; those stay registered.
        """
        address = self.address + first
        try:
            device_address = self._gpu.host_register(address, end - first)
        except WorldError as error:
            text = f"host memory: bytes {first} to {end} of {self.byte_count} cannot be registered: {error}"
            raise WorldError(text) from None
        self._chunks.append(address)
        if len(self._chunks) == 1:
            self.device_address = device_address - first
        elif device_address != self.device_address + first:
            raise WorldError(f"registered memory is not contiguous: {device_address:#x} at {first}")

    def grow(self, end: int, *, first: int = 0, rest: bool = False) -> int:
        """Registers all chunks below `end` and returns bytes_ready; with `rest` a smaller one as well, up to `end`.
        What lies before `first` is registered by others. Raises as `add`."""
        self.bytes_ready = max(self.bytes_ready, min(first, end))
        while self.bytes_ready < end:
            size = min(CHUNK_BYTES, (end if rest else self.byte_count) - self.bytes_ready)
            if self.bytes_ready + size > end:
                break
            self.add(self.bytes_ready, self.bytes_ready + size)
            self.bytes_ready += size
        return self.bytes_ready

    def close(self) -> None:
        """Unregisters everything. No work on the GPU may use the memory any more. Idempotent.

        Raises WorldError if the driver refuses: the memory that stays registered must stay mapped.
        """
        self.bytes_ready = 0
        refused, text = list[int](), ""
        while self._chunks:
            try:
                self._gpu.host_unregister(self._chunks[-1])
            except WorldError as error:
                refused.append(self._chunks[-1])
                text = text or str(error)
            self._chunks.pop()
        self._chunks = refused[::-1]
        if refused:
            raise WorldError(f"{len(refused)} chunks of host memory stay registered: {text}")
