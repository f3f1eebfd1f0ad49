"""Memory that another process of this host may map: a card's, for components that live in HBM, or a memfd's.

Whoever maps a handle writes what it names: hand it to nobody else. What was exported stays until all who mapped it have
closed it; a card's memory is theirs no more once its owner has ended. No fence proves that they have: an arena whose
slots are leased to writers is never exported.
"""

from __future__ import annotations

import os
import threading
from typing import Literal

import msgspec

from ..engine_api import CardMemory
from ..errors import TransportError, WorldError
from ..kernels import card as cards
from ..kernels import driver
from .arena_memory import Arena, Mapping, map_received

_UUID_BYTES = 16
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What names exported memory to another process. `packed` is what travels."""

    kind: Literal["card", "memfd"]
    byte_count: int
    offset: int = 0  # in the allocation whose handle it is
    card: bytes = b""  # its UUID: ordinals differ between processes
    handle: bytes = b""  # the driver's
    process: int = 0  # of a memfd: whose it is,
    descriptor: int = 0  # under which number
    inode: int = 0  # and that it is this very file

    @property
    def packed(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes) -> Handle:
        """TransportError for what is none."""
        try:
            handle = msgspec.msgpack.decode(packed, type=cls)
        except msgspec.MsgspecError as error:
            raise TransportError(f"handle of exported memory: {error}") from None
        whole = handle.kind == "memfd" or (len(handle.card), len(handle.handle)) == (
            _UUID_BYTES,
            cards.IPC_HANDLE_BYTES,
        )
        if not whole or handle.byte_count < 1 or handle.offset < 0:
            raise TransportError(f"handle of exported memory: {handle}")
        return handle


def export(memory: CardMemory | Arena) -> Handle:
    """Names memory of this process to others. Raises WorldError where the card's was not plainly allocated: an
    allocator that maps its memory piece by piece (torch with expandable_segments) has no handles. LocalProtocolError
    for an arena that a node serves."""
    if isinstance(memory, Arena):
        memory.use("exported")
        inode = os.fstat(memory.fd).st_ino
        return Handle("memfd", memory.byte_count, process=os.getpid(), descriptor=memory.fd, inode=inode)
    here = cards.card(memory.card)
    base = here.allocation_of(memory.address)
    return Handle("card", memory.byte_count, memory.address - base, here.uuid, here.ipc_handle(base))


class Opened:
    """Memory of another process, until `close`: at `address`, a card's own where `card` is one."""

    __slots__ = ("_close", "address", "byte_count", "card")

    def __init__(self, handle: Handle, *, on: int | None = None) -> None:
        """For card `on` to reach, by default for the very card that it is of. Raises TransportError where nobody has
        such memory, or not so much, or not on a card that this process sees; with `on` for what is no card's."""
        self.byte_count = handle.byte_count
        if handle.kind == "memfd":
            if on is not None:
                # Whoever sent the handle would choose which descriptor of which process a card writes through.
                raise TransportError(f"handle of exported memory: {handle.kind}, expected a card's")
            mapping = _mapped(handle)
            self.card, self.address, self._close = None, mapping.address, mapping.close
            return
        ordinal = driver.ordinal_of(handle.card)
        if ordinal is None:
            raise TransportError(f"exported memory is on card {handle.card.hex()}, which this process does not see")
        here = self.card = ordinal if on is None else on
        base = _take(here, handle.handle)
        self.address = base + handle.offset
        self._close = lambda: _give_back(here, handle.handle)
        try:
            _, whole = cards.card(here).range_of(base)
        except WorldError as error:
            self.close()
            raise TransportError(f"exported memory: {error}") from None
        if handle.offset + handle.byte_count > whole:
            self.close()
            text = f"bytes {handle.offset}+{handle.byte_count} of an allocation of {whole}"
            raise TransportError(f"exported memory: {text}")

    def close(self) -> None:
        """Lets it go, once nothing here reads or writes it any more; idempotent."""
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
            raise TransportError(f"exported memory: {path} is another file by now")
        return map_received(fd, handle.byte_count)
    finally:
        os.close(fd)


_lock = threading.Lock()
_opened: dict[tuple[int, bytes], tuple[int, int]] = {}  # (where, how often): the driver opens a handle once


def _take(ordinal: int, handle: bytes) -> int:
    with _lock:
        address, users = _opened.get((ordinal, handle), (0, 0))
        if not users:
            try:
                address = cards.card(ordinal).ipc_open(handle, _PEER_ACCESS)
            except WorldError as error:
                raise TransportError(f"exported memory: {error}") from None
        _opened[ordinal, handle] = address, users + 1
        return address


def _give_back(ordinal: int, handle: bytes) -> None:
    with _lock:
        address, users = _opened.pop((ordinal, handle))
        if users > 1:
            _opened[ordinal, handle] = address, users - 1
        else:
            cards.card(ordinal).ipc_close(address)
