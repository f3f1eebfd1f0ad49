"""Memory of HBM components outside the arena: a GPU's, which peers of this host may open.

Rows of writers that cannot write the GPU land in the arena's staging buffer, and are copied up from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import PDTransferError, WorldError
from ..kernels.gpu import gpu_at
from ..kernels.pools import Pool
from ..layout.engine_pools import GpuMemory
from ..layout.layout import Layout
from . import cuda_ipc, mapping

log = logging.getLogger(__name__)


def staging_bytes(host_buffer_gib: float, hbm_bytes: int) -> int:
    """The size of a staging buffer: no larger than what it is for."""
    return min(int(host_buffer_gib * (1 << 30)), hbm_bytes)


class Hbm:
    """The memory of HBM components until `close`: `byte_count` bytes at `address` of GPU `device`, None: this process.

    Bases of the components count from `base`. `handle` opens the memory in another process; it is empty if no other
    process can.
    """

    def __init__(
        self, *, base: int, byte_count: int, address: int, device: int | None, handle: bytes, free: Callable[[], None]
    ) -> None:
        self.base, self.byte_count, self.address, self.device, self.handle = base, byte_count, address, device, handle
        self._free: Callable[[], None] | None = free
        self._quiet: Callable[[], bool] = lambda: True

    @classmethod
    def of_gpu(cls, device: int, *, base: int, byte_count: int) -> Hbm:
        """Zeroed memory of a GPU, by its CUDA ordinal. Raises WorldError if the GPU has too little."""
        gpu = gpu_at(device)
        address = gpu.allocate(byte_count)
        gpu.clear(address, byte_count)
        try:
            handle = cuda_ipc.export(GpuMemory(device=device, address=address, byte_count=byte_count)).packed
        except PDTransferError as error:
            log.warning("HBM components: no other process can write to them, so rows are copied up: %s", error)
            handle = b""
        return cls(
            base=base, byte_count=byte_count, address=address, device=device, handle=handle,
            free=lambda: gpu.free(address),
        )  # fmt: skip

    @classmethod
    def of_process(cls, *, base: int, byte_count: int) -> Hbm:
        """Zeroed memory of this process in place of a GPU's; no other process can open it."""
        mapped = mapping.allocate(byte_count)
        address = mapped.address
        return cls(base=base, byte_count=byte_count, address=address, device=None, handle=b"", free=mapped.close)

    def watch(self, quiet: Callable[[], bool]) -> None:
        """Has `close` call `quiet`: whether no process that was sent the handle can still write."""
        self._quiet = quiet

    def pool(self, layout: Layout) -> Pool:
        """The memory as a target of copies; `layout` is that of a component in Register."""
        return Pool(layout=layout, address=self.address - self.base, device=self.device)

    @property
    def engine_memory(self) -> GpuMemory:
        """The GPU's memory as an engine takes it."""
        assert self.device is not None
        return GpuMemory(device=self.device, address=self.address, byte_count=self.byte_count)

    def close(self) -> None:
        """Frees it, unless another process may still write it: then it stays until this process ends. Idempotent.

        Raises WorldError if the GPU cannot free it.
        """
        if self._free is None:
            return
        if not self._quiet():
            log.warning("HBM components stay allocated until this process ends: a prefill may still write to them")
            self._free = None
            return
        free, self._free = self._free, None
        try:
            free()
        except WorldError:
            log.critical("HBM components stay allocated until this process ends: the GPU cannot free them")
            raise
