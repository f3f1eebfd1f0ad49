"""Host memory that a card may reach: registered chunk by chunk, as it is backed, and let go before it is unmapped."""

from __future__ import annotations

from typing import Protocol

from ..errors import WorldError

CHUNK_BYTES = 256 << 20  # registered at a time: some 10 ms of pages that are there


class Registrar(Protocol):
    """What registering takes of a card. Both raise WorldError, with the driver's own word, where it refuses."""

    def host_register(self, address: int, byte_count: int) -> int:
        """Lets the card reach these bytes; the address at which it sees them."""
        ...

    def host_unregister(self, address: int) -> None:
        """Undoes host_register; the card must have ended with them."""
        ...


class Registered:
    """Of `byte_count` bytes at `address` of this process the first `bytes_ready`, which a card sees side by side from
    `device_address` on.

    Chunks begin at multiples of CHUNK_BYTES from `address` on: no single copy of the copy engine may cross one. Not for
    several threads at once.
    """

    __slots__ = ("_card", "_chunks", "address", "byte_count", "bytes_ready", "device_address")

    def __init__(self, card: Registrar, address: int, byte_count: int) -> None:
        self._card, self.address, self.byte_count = card, address, byte_count
        self._chunks: list[int] = []
        self.bytes_ready = self.device_address = 0

    def grow(self, end: int) -> int:
        """Registers every chunk that lies below `end`; returns bytes_ready. Takes 40 ms a GiB: call it off the loop.

        Raises WorldError where the card refuses; what was ready is ready still.
        """
        while self.bytes_ready < end:
            size = min(CHUNK_BYTES, self.byte_count - self.bytes_ready)
            if self.bytes_ready + size > end:
                break
            address = self.address + self.bytes_ready
            try:
                seen = self._card.host_register(address, size)
            except WorldError as error:
                done = f"{self.bytes_ready} of {self.byte_count} bytes of host memory are registered"
                raise WorldError(f"{done}, the next {size} are refused: {error}") from None
            self._chunks.append(address)
            if self.bytes_ready == 0:
                self.device_address = seen
            elif seen != self.device_address + self.bytes_ready:
                raise WorldError(f"chunks of host memory are not seen side by side: {seen:#x} at {self.bytes_ready}")
            self.bytes_ready += size
        return self.bytes_ready

    def close(self) -> None:
        """The card can reach nothing of it any more: call it once no launch may. Idempotent.

        Raises WorldError where the card does not let go: what it may still reach must stay mapped.
        """
        self.bytes_ready = 0
        kept, text = list[int](), ""
        while self._chunks:
            try:
                self._card.host_unregister(self._chunks[-1])
            except WorldError as error:
                kept.append(self._chunks[-1])
                text = text or str(error)
            self._chunks.pop()
        self._chunks = kept[::-1]
        if kept:
            raise WorldError(f"{len(kept)} chunks of host memory stay registered: {text}")
