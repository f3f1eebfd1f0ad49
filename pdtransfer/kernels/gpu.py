"""A CUDA GPU of this host: its primary context (shared with torch), kernels, launches, streams, events and memory."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import WorldError
from ..layout.geometry import Int64s
from . import UnusableError
from .compiled import machine_code
from .driver import Calls, calls, driver

POLL_SECONDS = 20e-6
_PAGE_BYTES = 64 << 10
_WORDS_BYTES = 64  # a cache line of the CPU: the words of two launches never share one
IPC_HANDLE_BYTES = 64
TABLES_MAX = 1_024  # unused tables that stay: a request that loads layer by layer has one for each layer


@dataclass(slots=True)
class _Table:
    address: int
    users: int = 0
    launched: dict[int, Any] = field(default_factory=dict[int, Any])  # by stream, the event after its last launch


class DeviceTables:
    """Uploaded tables by key. Any thread may call it; it does not wait for other work on the GPU."""

    def __init__(self, gpu: Gpu, *, most: int = TABLES_MAX) -> None:
        self._gpu, self._most = gpu, most
        self._lock = threading.Lock()
        self._tables: dict[object, _Table] = {}  # the most recently used table is last
        self._events: list[Any] = []  # of evicted tables, for reuse

    def acquire(self, key: object, content: NDArray[np.int64]) -> int:
        """Returns the device address of the table `key`, which stays until `release` was called as often as this.

        Uploads `content` and waits for the upload if the GPU does not have the table.
        """
        with self._lock:
            table = self._tables.pop(key, None)
            if table is None:
                self._evict()
                stream = self._gpu.side_stream
                table = _Table(self._gpu.allocate(content.nbytes, stream))
                self._gpu.upload(table.address, content, stream)
                self._gpu.synchronise(stream)
            table.users += 1
            self._tables[key] = table
            return table.address

    def release(self, key: object, stream: int | None = None) -> None:
        """Ends one use: all its launches are queued on `stream`, or have ended if `stream` is None.

        Raises WorldError if the GPU cannot record an event; then the table is never evicted.
        """
        with self._lock:
            table = self._tables[key]
            if stream is not None:
                event = table.launched.get(stream)
                if event is None:
                    event = table.launched[stream] = self._events.pop() if self._events else self._gpu.event()
                self._gpu.record(event, stream)
            table.users -= 1

    def _evict(self) -> None:
        """Frees the oldest unused tables above the limit. Tables that a launch may still read stay, above it too."""
        if (over := len(self._tables) + 1 - self._most) > 0:
            for key in list(islice((key for key, table in self._tables.items() if self._is_unused(table)), over)):
                table = self._tables.pop(key)
                self._events += table.launched.values()
                self._gpu.free(table.address, self._gpu.side_stream)

    def _is_unused(self, table: _Table) -> bool:
        """True if no launch reads the table now or later. A captured graph may repeat a launch; its event cannot be
        queried, and its table stays."""
        try:
            return not table.users and all(self._gpu.passed(event) for event in table.launched.values())
        except WorldError:
            return False


class Gpu:
    """GPU `ordinal`. Any thread may call any method. A method waits for the GPU only where its docstring names that."""

    def __init__(self, ordinal: int, cache: Path | None = None) -> None:
        """Raises WorldError, naming what is missing, if this GPU does not exist."""
        self.ordinal = ordinal
        self.driver = driver()
        self._cache = cache
        self._lock, self._lock_words = threading.Lock(), threading.Lock()
        self._words: list[tuple[int, int]] = []  # free pinned words: host address, device address
        self._side_stream: int | None = None
        self._kernels: dict[str, Any] = {}
        self.tables = DeviceTables(self)
        self._registrations: dict[int, int] = {}  # host address: device address
        self.borders: Int64s = np.empty(0, np.int64)  # device addresses at which registrations begin
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
        self._attributes = self._launch_attributes() if self.capability >= (9, 0) else []

    def launch(
        self, kernel: str, arguments: ctypes.Structure, *, blocks: int, threads: int | tuple[int, int],
        stream: int = 0, shared_bytes: int = 0, function: str | None = None,
    ) -> None:  # fmt: skip
        """Queues `function` (by default `kernel`) of kernels/`kernel`.cu with one struct of arguments.

        `threads` is the block's size, or (x, y). `shared_bytes` is dynamic shared memory. Raises WorldError if the
        driver refuses the launch or the kernel cannot be compiled.
        """
        handle = self.load(kernel, function or kernel, shared_bytes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self.enter()
        x, y = (threads, 1) if isinstance(threads, int) else threads
        shape = blocks, 1, 1, x, y, 1, shared_bytes
        if not self._attributes:
            self.call("cuLaunchKernel", handle, *shape, stream, ctypes.addressof(pointers), 0)
            return
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = shape[3:6]
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        config.attrs, config.numAttrs = self._attributes, len(self._attributes)
        self.call("cuLaunchKernelEx", config, handle, ctypes.addressof(pointers), 0)

    def _launch_attributes(self) -> list[Any]:
        """Lets a kernel start before the previous one ends. Each of our kernels waits for the previous one itself."""
        attribute = self.driver.CUlaunchAttribute()
        attribute.id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = self.driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        return [attribute]

    def function(self, kernel: str) -> int:
        """The handle of the function `kernel` in kernels/`kernel`.cu, for native code that calls the driver."""
        return int(self.load(kernel, kernel))

    @cached_property
    def context(self) -> int:
        """The handle of the primary context."""
        return int(self._context)

    def calls(self) -> Calls:
        """The driver's functions, for native code."""
        return calls()

    def status_of(self, number: int) -> str:
        """The driver's name of a status code."""
        try:
            return self.driver.CUresult(number).name
        except ValueError:  # the driver is newer than the bindings
            return f"CUDA error {number}"

    def load(self, kernel: str, function: str, shared_bytes: int = 0) -> Any:
        """The function's handle. The first call loads the module, and compiles it unless it is cached."""
        name = f"{kernel}.{function}.{shared_bytes}"
        with self._lock:
            if (handle := self._kernels.get(name)) is not None:
                return handle
            try:
                code = machine_code(kernel, self.architecture, self._cache)
            except UnusableError as error:
                raise WorldError(f"kernel {kernel}: {error}") from None
            self.enter()
            handle = self.call("cuModuleGetFunction", self.call("cuModuleLoadData", code), function.encode())
            if shared_bytes > 48 << 10:  # CUDA requires an attribute above this size
                attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self.call("cuFuncSetAttribute", handle, attribute, shared_bytes)
            self._kernels[name] = handle
            return handle

    @property
    def numa_node(self) -> int | None:
        """The NUMA node nearest to the GPU, or None if the system does not report it."""
        bus = self.call("cuDeviceGetPCIBusId", 13, self._device).split(b"\0")[0].decode().lower()
        try:
            node = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    # Memory of the GPU

    def allocate(self, byte_count: int, stream: int | None = None) -> int:
        """Allocates memory; the caller frees it. With `stream`, later work on that stream may use the memory."""
        self.enter()
        if stream is None:
            return int(self.call("cuMemAlloc", byte_count))
        return int(self.call("cuMemAllocFromPoolAsync", byte_count, self._pool, stream))

    @cached_property
    def _pool(self) -> Any:
        """Stream-ordered memory. The pool keeps what is freed, since returning it at every wait is slow."""
        kinds = self.driver.CUmemAllocationType, self.driver.CUmemLocationType
        properties = self.driver.CUmemPoolProps()
        properties.allocType = kinds[0].CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type, properties.location.id = kinds[1].CU_MEM_LOCATION_TYPE_DEVICE, self.ordinal
        pool = self.call("cuMemPoolCreate", properties)
        threshold = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self.call("cuMemPoolSetAttribute", pool, threshold, self.driver.cuuint64_t(1 << 30))
        # Memory that one stream frees must not make another stream wait.
        reuse = self.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
        self.call("cuMemPoolSetAttribute", pool, reuse, 0)
        return pool

    def free(self, address: int, stream: int | None = None) -> None:
        """Frees memory after the work queued on `stream` so far. Without a stream it waits for the GPU."""
        self.enter()
        if stream is None:
            self.call("cuMemFree", address)
        else:
            self.call("cuMemFreeAsync", address, stream)

    def upload(self, address: int, content: NDArray[Any], stream: int) -> None:
        """Queues a copy of `content`, which the caller may change afterwards.

        If `content` is larger than 64 KiB, the driver may wait for the stream.
        """
        assert content.flags.c_contiguous
        self.enter()
        self.call("cuMemcpyHtoDAsync", address, content.ctypes.data, content.nbytes, stream)

    def copy(self, target: int, source: int, byte_count: int, stream: int) -> None:
        """Queues one contiguous transfer by the copy engine, between device memory and registered host memory."""
        self.enter()
        self.call("cuMemcpyAsync", target, source, byte_count, stream)

    def copy_rows(
        self, target: int, source: int, byte_count: int, *, pitches: tuple[int, int], rows: int, stream: int
    ) -> None:
        """Queues one transfer of `rows` rows of `byte_count` bytes; `pitches` are the target's and the source's."""
        self.enter()
        copy = self.driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = self.driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy.dstDevice, copy.srcDevice, copy.WidthInBytes, copy.Height = target, source, byte_count, rows
        copy.dstPitch, copy.srcPitch = pitches
        self.call("cuMemcpy2DAsync", copy, stream)

    def clear(self, address: int, byte_count: int) -> None:
        """Zeroes memory and waits until it is zero."""
        self.enter()
        self.call("cuMemsetD8Async", address, 0, byte_count, self.side_stream)
        self.synchronise(self.side_stream)

    # Streams and events

    def synchronise(self, stream: int) -> None:
        """Waits for the work queued on the stream. Raises WorldError if it failed."""
        self.enter()
        self.call("cuStreamSynchronize", stream)

    def finish(self) -> None:
        """Waits for all work that this process has queued on the GPU. Raises WorldError if it failed.

        For a caller that no longer knows which streams hold its work.
        """
        self.enter()
        self.call("cuCtxSynchronize")

    def stream(self) -> int:
        """A new stream of the highest priority. It is never destroyed."""
        self.enter()
        status, _, highest = self.driver.cuCtxGetStreamPriorityRange()
        self.check("cuCtxGetStreamPriorityRange", status)
        return int(self.call("cuStreamCreateWithPriority", 1, highest))

    @property
    def side_stream(self) -> int:
        """A stream for work that a caller waits for at once. On stream 0 it would wait for torch's work, too."""
        if self._side_stream is None:
            self._side_stream = self.stream()
        return self._side_stream

    def event(self) -> Any:
        """A new event. It is never destroyed unless its owner does."""
        self.enter()
        return self.call("cuEventCreate", int(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def record(self, event: Any, stream: int) -> None:
        """Records the event after the work queued on the stream so far."""
        self.enter()
        self.call("cuEventRecord", event, stream)

    def follow(self, stream: int, event: Any) -> None:
        """Makes later work on the stream wait for the event, on the GPU."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def passed(self, event: Any) -> bool:
        """True if the work before the event is done. Raises WorldError if it failed or the query is refused."""
        self.enter()
        (status,) = self.driver.cuEventQuery(event)
        if int(status) == int(self.driver.CUresult.CUDA_ERROR_NOT_READY):
            return False
        self.check("cuEventQuery", status)
        return True

    def reach(self, event: Any) -> None:
        """Waits for the event by polling, since an event that wakes its waiter delays its stream."""
        while not self.passed(event):
            time.sleep(POLL_SECONDS)

    def write(self, address: int, word: int, stream: int) -> None:
        """Queues a store of a 32-bit word, visible after all stores queued before it."""
        self.enter()
        self.call("cuStreamWriteValue32", stream, address, word, 0)

    # Memory of the GPU that other processes open

    @cached_property
    def uuid(self) -> bytes:
        """The GPU's UUID, 16 bytes, equal in every process."""
        return bytes(self.call("cuDeviceGetUuid", self._device).bytes)

    def range_of(self, address: int) -> tuple[int, int]:
        """The allocation that contains `address`: its first address and its size in bytes."""
        self.enter()
        status, base, byte_count = self.driver.cuMemGetAddressRange(address)
        self.check("cuMemGetAddressRange", status)
        return int(base), int(byte_count)

    def ipc_handle(self, base: int) -> bytes:
        """The handle (64 bytes) with which another process opens this allocation."""
        self.enter()
        return ctypes.string_at(self.call("cuIpcGetMemHandle", base).getPtr(), IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes, flags: int) -> int:
        """Maps another process's allocation and returns its first address."""
        self.enter()
        ipc_handle = self.driver.CUipcMemHandle()
        assert len(handle) == IPC_HANDLE_BYTES
        ctypes.memmove(ipc_handle.getPtr(), handle, IPC_HANDLE_BYTES)
        return int(self.call("cuIpcOpenMemHandle", ipc_handle, flags))

    def ipc_close(self, base: int) -> None:
        """Undoes ipc_open. No work on the GPU may use the allocation any more."""
        self.enter()
        self.call("cuIpcCloseMemHandle", base)

    # Memory of the host

    def pinned(self, byte_count: int) -> tuple[int, int]:
        """Pins zeroed host memory and returns (host address, device address). It is never freed.

        Small sizes come from a page pinned before, since pinning may wait for the GPU.
        """
        if byte_count > _WORDS_BYTES:
            return self._pinned(byte_count)
        with self._lock_words:
            if not self._words:
                host, device = self._pinned(_PAGE_BYTES)
                self._words = [(host + offset, device + offset) for offset in range(0, _PAGE_BYTES, _WORDS_BYTES)]
            return self._words.pop()

    def _pinned(self, byte_count: int) -> tuple[int, int]:
        self.enter()
        flags = self.driver.CU_MEMHOSTALLOC_DEVICEMAP | self.driver.CU_MEMHOSTALLOC_PORTABLE
        address = int(self.call("cuMemHostAlloc", byte_count, flags))
        ctypes.memset(address, 0, byte_count)
        return address, int(self.call("cuMemHostGetDevicePointer", address, 0))

    def host_register(self, address: int, byte_count: int) -> int:
        """Registers host memory with the GPU and returns its device address.

        A transfer by the copy engine must not cross the start or the end of a registration.
        """
        self.enter()
        flags = self.driver.CU_MEMHOSTREGISTER_DEVICEMAP | self.driver.CU_MEMHOSTREGISTER_PORTABLE
        self.call("cuMemHostRegister", address, byte_count, flags)
        try:
            device_address = int(self.call("cuMemHostGetDevicePointer", address, 0))
        except WorldError:
            self.call("cuMemHostUnregister", address)
            raise
        with self._lock:
            self._registrations[address] = device_address
            self.borders = np.insert(self.borders, np.searchsorted(self.borders, device_address), device_address)
        return device_address

    def host_unregister(self, address: int) -> None:
        """Undoes host_register. No work on the GPU may use the memory any more."""
        self.enter()
        self.call("cuMemHostUnregister", address)
        with self._lock:
            device_address = self._registrations.pop(address)
            self.borders = np.delete(self.borders, np.searchsorted(self.borders, device_address))

    # Calls into the driver

    def enter(self) -> None:
        """Makes this GPU's context current in the calling thread; other libraries may have changed it."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function by name. Raises WorldError, with the driver's status name, if it fails."""
        status, *values = getattr(self.driver, name)(*arguments)
        self.check(name, status)
        return values[0] if values else None

    def check(self, name: str, status: Any) -> None:
        """Raises WorldError, with the driver's status name, unless `status` is success."""
        if int(status):
            raise WorldError(f"GPU {self.ordinal}: {name}: {status.name}")


@cache
def gpu_at(ordinal: int) -> Gpu:
    """This process's only GPU for `ordinal`. Raises WorldError if the GPU does not exist."""
    return Gpu(ordinal)


class CudaEvent:
    """A point in a stream. An event that was never recorded counts as passed."""

    __slots__ = ("_gpu", "_handle")

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._handle = gpu, gpu.event()

    @property
    def cuda_event(self) -> int:
        """The event's handle."""
        return int(self._handle)

    def record(self, stream: int) -> None:
        """Moves the event behind the work queued on `stream` so far."""
        self._gpu.record(self._handle, stream)

    def query(self) -> bool:
        """True if the GPU has passed the event; returns at once. Raises WorldError if work before it failed."""
        return self._gpu.passed(self._handle)

    def wait(self) -> None:
        """Sleeps until the GPU has passed the event. Raises WorldError if work before it failed."""
        self._gpu.reach(self._handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._gpu.driver.cuEventDestroy(self._handle)  # fails only if the context is gone


def words(address: int, count: int) -> NDArray[np.uint32]:
    """uint32 (count,) at an address of this process. The caller keeps the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))
