"""A card of this host: its primary context, torch's own, kernels loaded there, launches, and memory it may touch."""

from __future__ import annotations

import ctypes
import threading
import time
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import WorldError
from ..layout.geometry import Int64s
from . import UnusableError
from .compiled import machine_code
from .driver import Calls, calls, driver
from .registered import Registered
from .tables import Tables

POLL_SECONDS = 20e-6
_UNWAITED_BYTES = 64 << 10  # of pageable memory, which a copy to the card takes along at once
_PAGE_BYTES = 64 << 10
_WORDS_BYTES = 64  # a line of the core's cache: no two launches' words share one
IPC_HANDLE_BYTES = 64


class Card:
    """Card `ordinal`. Every call may be made from any thread; none waits for the card unless it says so."""

    def __init__(self, ordinal: int, cache: Path | None = None) -> None:
        """Raises WorldError, naming what is missing, where there is no such card."""
        self.ordinal = ordinal
        self.driver = driver()
        self._cache = cache
        self._lock, self._lock_words = threading.Lock(), threading.Lock()
        self._words: list[tuple[int, int]] = []  # pinned, and nobody's yet
        self._aside: int | None = None
        self._kernels: dict[str, Any] = {}
        self.tables = Tables(self)
        self._registrations: dict[int, int] = {}  # address here: address there
        self.borders: Int64s = np.empty(0, np.int64)
        device = self._device = self.call("cuDeviceGet", ordinal)
        self._context = self.call("cuDevicePrimaryCtxRetain", device)
        attributes = self.driver.CUdevice_attribute
        prefix = "CU_DEVICE_ATTRIBUTE_"
        major, minor, self.multiprocessors = (
            int(self.call("cuDeviceGetAttribute", getattr(attributes, prefix + name), device))
            for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
        )
        self.capability = major, minor
        self.architecture = f"sm_{major}{minor}"
        self._follows = self._following() if self.capability >= (9, 0) else []

    def launch(
        self,
        kernel: str,
        arguments: ctypes.Structure,
        *,
        blocks: int,
        threads: int | tuple[int, int],
        stream: int = 0,
        shared_bytes: int = 0,
        function: str | None = None,
    ) -> None:
        """Queues `function` of kernels/`kernel`.cu, of the same name by default, with one struct of arguments.

        `threads` are those of a block, or (across, down); `shared_bytes` is dynamic shared memory. Raises WorldError
        where the card refuses, or nothing can compile it.
        """
        handle = self.load(kernel, function or kernel, shared_bytes)
        slots = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self.enter()
        across, down = (threads, 1) if isinstance(threads, int) else threads
        shape = blocks, 1, 1, across, down, 1, shared_bytes
        if not self._follows:
            self.call("cuLaunchKernel", handle, *shape, stream, ctypes.addressof(slots), 0)
            return
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = shape[3:6]
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        config.attrs, config.numAttrs = self._follows, len(self._follows)
        self.call("cuLaunchKernelEx", config, handle, ctypes.addressof(slots), 0)

    def _following(self) -> list[Any]:
        """Lets a launch be made while the one ahead of it still runs; every kernel of ours waits for it by itself."""
        attribute = self.driver.CUlaunchAttribute()
        attribute.id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = self.driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        return [attribute]

    def function(self, kernel: str) -> int:
        """The handle of kernels/`kernel`.cu's function of the same name, for those who call the driver themselves."""
        return int(self.load(kernel, kernel))

    @cached_property
    def context(self) -> int:
        """Its handle."""
        return int(self._context)

    def calls(self) -> Calls:
        """The driver's functions for those who call them without Python."""
        return calls()

    def status_of(self, number: int) -> str:
        """The driver's word for what a function of it answers."""
        try:
            return self.driver.CUresult(number).name
        except ValueError:  # of a driver that is newer than the bindings
            return f"CUDA error {number}"

    def load(self, kernel: str, function: str, shared_bytes: int = 0) -> Any:
        """The function's handle, compiled and loaded at its first use: some 0.1 s then, unless it is in the cache."""
        name = f"{kernel}.{function}.{shared_bytes}"
        with self._lock:
            if (found := self._kernels.get(name)) is not None:
                return found
            try:
                code = machine_code(kernel, self.architecture, self._cache)
            except UnusableError as error:
                raise WorldError(f"kernel {kernel}: {error}") from None
            self.enter()
            handle = self.call("cuModuleGetFunction", self.call("cuModuleLoadData", code), function.encode())
            if shared_bytes > 48 << 10:  # more than that has to be asked for
                attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self.call("cuFuncSetAttribute", handle, attribute, shared_bytes)
            self._kernels[name] = handle
            return handle

    @property
    def numa_node(self) -> int | None:
        """The node of this host's memory that is nearest to the card; None where nobody says."""
        bus = self.call("cuDeviceGetPCIBusId", 13, self._device).split(b"\0")[0].decode().lower()
        try:
            node = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    # Memory of the card

    def allocate(self, byte_count: int, stream: int | None = None) -> int:
        """Its address; with a `stream`, as of the work queued there so far. All of it is to be freed."""
        self.enter()
        if stream is None:
            return int(self.call("cuMemAlloc", byte_count))
        return int(self.call("cuMemAllocFromPoolAsync", byte_count, self._pool, stream))

    @cached_property
    def _pool(self) -> Any:
        """Memory that comes and goes in the order of streams. It is kept: giving it back at every wait takes 100 us."""
        kinds = self.driver.CUmemAllocationType, self.driver.CUmemLocationType
        asked = self.driver.CUmemPoolProps()
        asked.allocType = kinds[0].CU_MEM_ALLOCATION_TYPE_PINNED
        asked.location.type, asked.location.id = kinds[1].CU_MEM_LOCATION_TYPE_DEVICE, self.ordinal
        pool = self.call("cuMemPoolCreate", asked)
        kept = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self.call("cuMemPoolSetAttribute", pool, kept, self.driver.cuuint64_t(1 << 30))
        # What one stream frees is not to make another wait for it.
        waits = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
        self.call("cuMemPoolSetAttribute", pool, waits, 0)
        return pool

    def free(self, address: int, stream: int | None = None) -> None:
        """At once, which waits for the card; with a `stream`, after the work queued there so far."""
        self.enter()
        if stream is None:
            self.call("cuMemFree", address)
        else:
            self.call("cuMemFreeAsync", address, stream)

    def given(self, content: NDArray[Any], stream: int) -> int:
        """Where the card has `content` for what is queued on `stream` from now on; to be freed there.

        Waits for none but its own upload, and for that only where it is large.
        """
        by = stream if content.nbytes <= _UNWAITED_BYTES else self.aside
        address = self.allocate(content.nbytes, by)
        self.upload(address, content, by)
        if by != stream:
            self.synchronise(by)
        return address

    def upload(self, address: int, content: NDArray[Any], stream: int) -> None:
        """Queues a copy of `content`, which may be changed as soon as this returns; of more than 64 KiB the driver may
        first wait for the stream."""
        assert content.flags.c_contiguous
        self.enter()
        self.call("cuMemcpyHtoDAsync", address, content.ctypes.data, content.nbytes, stream)

    def copy(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Queues one run of bytes for the copy engine, between addresses of either kind of memory."""
        self.enter()
        self.call("cuMemcpyAsync", target, source, byte_count, stream)

    def copy_rows(
        self, target: int, source: int, byte_count: int, *, pitches: tuple[int, int], rows: int, stream: int
    ) -> None:
        """Queues `rows` pieces of so many bytes for the copy engine; `pitches` are from one to the next, the target's
        and the source's."""
        self.enter()
        asked = self.driver.CUDA_MEMCPY2D()
        asked.srcMemoryType = asked.dstMemoryType = self.driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        asked.dstDevice, asked.srcDevice, asked.WidthInBytes, asked.Height = target, source, byte_count, rows
        asked.dstPitch, asked.srcPitch = pitches
        self.call("cuMemcpy2DAsync", asked, stream)

    def clear(self, address: int, byte_count: int) -> None:
        """Zeroes it, and waits for that."""
        self.enter()
        self.call("cuMemsetD8Async", address, 0, byte_count, self.aside)
        self.synchronise(self.aside)

    def synchronise(self, stream: int) -> None:
        """Waits until the work queued there is done; WorldError where it failed."""
        self.enter()
        self.call("cuStreamSynchronize", stream)

    def finish(self) -> None:
        """Waits until all that this process has queued on the card is done; WorldError where it failed.

        For who cannot say any more what was queued on which stream: it waits for everybody's work.
        """
        self.enter()
        self.call("cuCtxSynchronize")

    def stream(self) -> int:
        """A new one, whose blocks go before others' when a multiprocessor is free. It is never destroyed."""
        self.enter()
        status, _, highest = self.driver.cuCtxGetStreamPriorityRange()
        self.check("cuCtxGetStreamPriorityRange", status)
        return int(self.call("cuStreamCreateWithPriority", 1, highest))

    @property
    def aside(self) -> int:
        """A stream for what is waited for at once: on stream 0 that would wait for all that torch has queued."""
        if self._aside is None:
            self._aside = self.stream()
        return self._aside

    def event(self) -> Any:
        """A new one. It is never destroyed."""
        self.enter()
        return self.call("cuEventCreate", int(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def record(self, event: Any, stream: int) -> None:
        """The event is what is queued on the stream so far."""
        self.enter()
        self.call("cuEventRecord", event, stream)

    def follow(self, stream: int, event: Any) -> None:
        """What is queued on the stream from now on starts after the event."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def passed(self, event: Any) -> bool:
        """Whether what it was recorded after is done; WorldError where that failed, or the event can't be asked."""
        self.enter()
        (status,) = self.driver.cuEventQuery(event)
        if int(status) == int(self.driver.CUresult.CUDA_ERROR_NOT_READY):
            return False
        self.check("cuEventQuery", status)
        return True

    def reach(self, event: Any) -> None:
        """Waits until what it was recorded after is done: by looking, since an event that wakes holds up its stream."""
        while not self.passed(event):
            time.sleep(POLL_SECONDS)

    def write(self, address: int, word: int, stream: int) -> None:
        """Queues the store of a 32-bit word, which is seen once everything queued before it is."""
        self.enter()
        self.call("cuStreamWriteValue32", stream, address, word, 0)

    # Memory of the card, for other processes

    @cached_property
    def uuid(self) -> bytes:
        """16 bytes, the same in every process."""
        return bytes(self.call("cuDeviceGetUuid", self._device).bytes)

    def allocation_of(self, address: int) -> int:
        """Where the allocation begins that `address` lies in."""
        return self.range_of(address)[0]

    def range_of(self, address: int) -> tuple[int, int]:
        """Where the allocation begins that `address` lies in, and how many bytes it has."""
        self.enter()
        status, base, byte_count = self.driver.cuMemGetAddressRange(address)
        self.check("cuMemGetAddressRange", status)
        return int(base), int(byte_count)

    def ipc_handle(self, base: int) -> bytes:
        """64 bytes by which another process opens this allocation."""
        self.enter()
        return ctypes.string_at(self.call("cuIpcGetMemHandle", base).getPtr(), IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes, flags: int) -> int:
        """Maps another process's allocation; where it begins here."""
        self.enter()
        named = self.driver.CUipcMemHandle()
        assert len(handle) == IPC_HANDLE_BYTES
        ctypes.memmove(named.getPtr(), handle, IPC_HANDLE_BYTES)
        return int(self.call("cuIpcOpenMemHandle", named, flags))

    def ipc_close(self, base: int) -> None:
        """Undoes ipc_open; the card must have ended with it."""
        self.enter()
        self.call("cuIpcCloseMemHandle", base)

    # Memory of the host

    def pinned(self, byte_count: int) -> tuple[int, int]:
        """Zeroed host memory that the card can reach: (its address here, its address there). It is never freed.

        Words for launches come out of a page that was pinned before, since pinning may wait for the card.
        """
        if byte_count > _WORDS_BYTES:
            return self._pinned(byte_count)
        with self._lock_words:
            if not self._words:
                here, there = self._pinned(_PAGE_BYTES)
                self._words = [(here + at, there + at) for at in range(0, _PAGE_BYTES, _WORDS_BYTES)]
            return self._words.pop()

    def _pinned(self, byte_count: int) -> tuple[int, int]:
        self.enter()
        flags = self.driver.CU_MEMHOSTALLOC_DEVICEMAP | self.driver.CU_MEMHOSTALLOC_PORTABLE
        address = int(self.call("cuMemHostAlloc", byte_count, flags))
        ctypes.memset(address, 0, byte_count)
        return address, int(self.call("cuMemHostGetDevicePointer", address, 0))

    def register(self, address: int, byte_count: int) -> Registered:
        """Lets the card reach all of a mapping of this process; off the loop. Raises WorldError, with nothing
        registered, where the host refuses.
        """
        registered = Registered(self, address, byte_count)
        try:
            registered.grow(byte_count)
        except WorldError:
            registered.close()
            raise
        return registered

    def host_register(self, address: int, byte_count: int) -> int:
        """Lets the card reach these bytes of this process; the address at which it sees them.

        No transfer of the copy engine may cross their start or their end.
        """
        self.enter()
        flags = self.driver.CU_MEMHOSTREGISTER_DEVICEMAP | self.driver.CU_MEMHOSTREGISTER_PORTABLE
        self.call("cuMemHostRegister", address, byte_count, flags)
        try:
            seen = int(self.call("cuMemHostGetDevicePointer", address, 0))
        except WorldError:
            self.call("cuMemHostUnregister", address)
            raise
        with self._lock:
            self._registrations[address] = seen
            self.borders = np.array(sorted(self._registrations.values()), np.int64)
        return seen

    def host_unregister(self, address: int) -> None:
        """Undoes host_register; the card must have ended with it."""
        self.enter()
        self.call("cuMemHostUnregister", address)
        with self._lock:
            self._registrations.pop(address, None)
            self.borders = np.array(sorted(self._registrations.values()), np.int64)

    def enter(self) -> None:
        """Makes the context the calling thread's, which other libraries may have changed."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> Any:
        """A function of the driver, by name; WorldError, with its own word for it, where it fails."""
        status, *values = getattr(self.driver, name)(*arguments)
        self.check(name, status)
        return values[0] if values else None

    def check(self, name: str, status: Any) -> None:
        """WorldError, with the driver's own word for it, where `status` of that function is no success."""
        if int(status):
            raise WorldError(f"card {self.ordinal}: {name}: {status.name}")


@cache
def card(ordinal: int) -> Card:
    """The one Card of this number in this process; WorldError where there is none."""
    return Card(ordinal)


def words(address: int, count: int) -> NDArray[np.uint32]:
    """uint32 (count,) at an address of this process, which has to stay."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))
