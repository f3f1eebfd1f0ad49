"""Where a pool that an engine allocated lies, if it is not plain memory of this process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """A pool in the memory of GPU `device` of this host, at the GPU's `address`; it lives as long as its engine."""

    device: int
    address: int
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """A pool in memory that other processes may map: `view` holds the bytes of the memfd `fd` from its start. Both live
    as long as the engine. A transport to other hosts reads the pool there without a copy."""

    fd: int
    view: memoryview
