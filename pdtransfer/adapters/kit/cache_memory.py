"""Where an engine's KV cache lies, and how writers get there.

On the CPU the engine's cache is allocated inside a memfd arena. On a card decode names the engine's own allocation to
the writers of its host. Where neither is possible, rows land in host memory and are copied once more, to the engine's
cache. The arena has a staging buffer for that, which takes no memory until the first writer comes that needs it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...errors import ConfigError, WorldError
from ...kernels.gpu import gpu_at
from ...layout.engine_pools import GpuMemory
from ...limits import HOST_BUFFER_GIB
from ...memory import cuda_ipc
from ...memory.arena_memory import ArenaMemory
from ...memory.hbm import Hbm, staging_bytes
from .kinds import Memory
from .torch_memory import PooledTensors, arena_tensor, pooled_bytes

log = logging.getLogger(__name__)

GAP_BYTES_MAX = 1 << 30  # between allocations that are taken for one range
_MENDED_BY = (
    "Memory of torch's expandable segments cannot be shared: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, "
    "leave expandable_segments out of PYTORCH_ALLOC_CONF, and leave the engine's sleep mode off"
)
T = TypeVar("T")
COPIED_UP = "what lands is copied once more, from host memory to the engine's KV cache"


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [first, end) that an engine's KV cache lies in, on a card or in this process's memory."""

    first: int
    end: int
    device: int | None = None

    def holds(self, part: Extent) -> bool:
        """True if all of `part` lies in it."""
        return self.device == part.device and self.first <= part.first and part.end <= self.end


@dataclass(frozen=True, slots=True)
class Target:
    """Decode: an arena, and the memory of it that the components are in. Their bases count from `base`."""

    arena: ArenaMemory
    base: int
    memory: Memory
    copied_up: bool

    def locate(self, address: int) -> tuple[int, Memory]:
        """As Locate. Raises ConfigError for a buffer that is in neither memory."""
        start, hbm = self.arena.mapping.address, self.arena.hbm
        if start <= address < start + self.arena.byte_count:
            return start, "dram"
        if hbm is None or not hbm.address <= address < hbm.address + hbm.byte_count:
            raise ConfigError(f"KV cache: a buffer at {address:#x} is where no peer can write: {_MENDED_BY}")
        return self.base, self.memory


class CacheMemory:
    """The memory of one worker's KV cache, of which the engine allocates tensors of `sizes` bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._arena: ArenaMemory | None = None
        self._landing: tuple[ArenaMemory, Extent] | None = None
        self._target: Target | None = None
        self._pooled: PooledTensors | None = None

    def pooled(self) -> PooledTensors:
        """A context in which the engine allocates its cache on the CPU: inside the arena. Raises WorldError where
        the host cannot back it."""
        arena = self._arena = ArenaMemory.create(pooled_bytes(self._sizes), name="engine-kv-cache")
        arena.prefault()
        self._pooled = PooledTensors(arena_tensor(arena), self._sizes.__contains__)
        return self._pooled

    def pooled_on(self, device: torch.device) -> PooledTensors:
        """A context in which the engine allocates its cache on a card: in one allocation for all tensors."""
        backing = torch.zeros(pooled_bytes(self._sizes), dtype=torch.uint8, device=device)
        self._pooled = PooledTensors(backing, self._sizes.__contains__)
        return self._pooled

    @property
    def pooled_extent(self) -> Extent | None:
        """Where the engine's tensors of these `sizes` are, if they are in one allocation."""
        if self._pooled is None:
            return None
        backing, first = self._pooled.backing, self._pooled.backing.data_ptr()
        return Extent(first, first + len(backing), backing.device.index)

    def pooled_later(self) -> AbstractContextManager[object]:
        """A context in which the engine allocates the rest of the `sizes`: in the same allocation, if there is one."""
        return self._pooled or nullcontext()

    @contextmanager
    def pooled_beside(self, device: torch.device, byte_count: int, *, host_buffer_gib: float) -> Generator[None]:
        """A context in which the engine allocates its cache on a card in one allocation. One tensor of `byte_count`
        bytes is on the CPU `beside` it, which it registers with the card itself. It is backed at the end: the engine
        may look first whether there is memory for it. Raises as `beside`."""
        on_card, extent = self.pooled_on(device), self.pooled_extent
        assert extent is not None
        host = self.beside(extent, byte_count, host_buffer_gib=host_buffer_gib, registered_by_engine=True)
        with on_card, PooledTensors(host, [byte_count].__contains__):
            yield
        assert self._landing is not None
        self._landing[0].prefault()

    def has_beside(self, address: int | None = None) -> bool:
        """True if `beside` was called, and returned memory with this address; a card can access it."""
        if self._landing is None or address is None:
            return self._landing is not None
        mapping = self._landing[0].mapping
        return mapping.address <= address < mapping.address + mapping.byte_count

    def beside(
        self,
        extent: Extent,
        byte_count: int,
        *,
        host_buffer_gib: float = HOST_BUFFER_GIB,
        registered_by_engine: bool = False,
    ) -> torch.Tensor:
        """Memory of the host for the engine, uint8 (byte_count,) and all zero, in one arena with the staging buffer for
        the cache in `extent`. It is backed, and registered with the card of that, unless the engine itself does so.
        Raises WorldError where the host cannot back it."""
        assert self._landing is None
        arena = _arena(
            extent, host_buffer_gib, beside=pooled_bytes([byte_count]), name="engine-host-pool",
            registered_by_engine=registered_by_engine,
        )  # fmt: skip
        self._landing = arena, extent
        return arena_tensor(arena)[:byte_count]

    def pool_fd(self, extent: Extent) -> int:
        """The memfd that the cache lies in, by which writers on other hosts read it; -1 if there is none."""
        return -1 if (arena := self._arena_of(extent)) is None else arena.fd

    def base(self, extent: Extent) -> int:
        """The address from which the planes of a pool count: where the memfd is mapped, or where the cache begins."""
        return extent.first if (arena := self._arena_of(extent)) is None else arena.mapping.address

    def target(self, extent: Extent, *, host_buffer_gib: float = HOST_BUFFER_GIB) -> Target:
        """What decode offers to writers, with a staging buffer of this size unless `beside` has made one. Raises
        ConfigError for a cache in too many places, WorldError for memory that the host does not have."""
        if (arena := self._arena_of(extent)) is not None:
            self._target = Target(arena, arena.mapping.address, "dram", copied_up=False)
            return self._target
        byte_count = extent.end - extent.first
        if byte_count > 2 * sum(self._sizes) + GAP_BYTES_MAX:
            raise ConfigError(f"KV cache: {sum(self._sizes)} bytes are spread over a range of {byte_count}")
        if self._landing is not None:
            if not self._landing[1].holds(extent):
                raise ConfigError("KV cache: it is not where it was when host memory was set aside beside it")
            extent = self._landing[1]
        arena = self._landing[0] if self._landing else _arena(extent, host_buffer_gib, name="engine-landing")
        assert arena.hbm is not None
        copied_up = not arena.hbm.handle
        if copied_up:
            on_cpu, on_card = "the engine allocated its KV cache elsewhere", "no peer can write to this GPU"
            log.warning("%s: %s", on_cpu if extent.device is None else on_card, COPIED_UP)
        self._target = Target(arena, extent.first - arena.hbm.base, "hbm", copied_up)
        return self._target

    def close(self) -> None:
        """Unmaps what is ours, unless the engine's tensors still lie there: then it ends with the process."""
        self._pooled = None  # which holds a tensor of all of it
        arenas = self._arena, self._landing and self._landing[0], self._target and self._target.arena
        for arena in {id(arena): arena for arena in arenas if arena}.values():
            with suppress(BufferError):
                arena.close()

    def _arena_of(self, extent: Extent) -> ArenaMemory | None:
        """The arena that the cache was allocated in; None for one elsewhere."""
        if (arena := self._arena) is None:
            return None
        start = arena.mapping.address
        return arena if Extent(start, start + arena.byte_count).holds(extent) else None


def _arena(
    extent: Extent, host_buffer_gib: float, *, beside: int = 0, name: str, registered_by_engine: bool = False
) -> ArenaMemory:
    """An arena of `beside` bytes that are backed, and behind them the staging buffer for rows of the cache in `extent`.
    That is backed only where no other process can write the cache."""
    handle, byte_count = b"" if extent.device is None else exported(extent, extent.device), extent.end - extent.first
    arena = ArenaMemory.create(beside, name=name, staging_bytes=staging_bytes(host_buffer_gib, byte_count))
    arena.hbm = Hbm(
        base=beside, byte_count=byte_count, address=extent.first, device=extent.device, handle=handle, free=lambda: None
    )
    if extent.device is not None:
        arena.gpu = gpu_at(extent.device)
        arena.registered_by_engine = beside if registered_by_engine else 0
    if not handle:
        arena.need_all()
    if not registered_by_engine:
        arena.prefault()
    return arena


def made_in_one_piece(
    make: Callable[[], T],
    device: torch.device,
    *,
    has_beside: bool = False,
    make_later: Callable[[T], object] = lambda _: None,
) -> tuple[CacheMemory, T]:
    """What an engine makes, with its tensors on this device in one allocation, and their memory.

    `make` is called twice, for an engine whose sizes are not known before: what it makes first is measured and dropped.
    On the CPU no memory backs that one yet; on a card it is freed first, so that one cache at a time is there. On the
    CPU they are in the arena, unless host memory will be set `beside` them. `make_later` makes, of the same, what the
    engine allocates afterwards: it is measured as well, for `pooled_later`.
    """
    with PooledTensors(torch.empty(0, dtype=torch.uint8, device=device), lambda _: True) as measured:
        make_later(make())
    memory = CacheMemory(measured.sizes)
    if device.type == "cpu" and not has_beside:
        with memory.pooled():
            return memory, make()
    gc.collect()
    torch.cuda.empty_cache()
    try:
        pooled = memory.pooled_on(device)
    except torch.OutOfMemoryError as error:
        log.warning("KV cache: is not in one allocation: %s", error)
        return memory, make()
    with pooled:
        return memory, make()


def exported(extent: Extent, device: int) -> bytes:
    """The handle by which processes of this host write a card's memory; empty, with the reason in the log, where they
    cannot."""
    memory = GpuMemory(device=device, address=extent.first, byte_count=extent.end - extent.first)
    try:
        return cuda_ipc.export(memory).packed
    except WorldError as error:
        log.warning("KV cache on GPU %d: no other process can write to it: %s. %s", device, error, _MENDED_BY)
        return b""
