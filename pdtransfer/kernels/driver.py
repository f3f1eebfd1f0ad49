"""The CUDA driver's bindings, the GPUs that this process sees, and driver functions for native code.

The driver is loaded at the first call: importing this module needs neither a driver nor a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any

from ..environment import pip_install
from ..errors import WorldError


@cache
def driver() -> Any:
    """cuda.bindings.driver, initialised. Raises WorldError, naming what is missing."""
    try:
        bindings: Any = importlib.import_module("cuda.bindings.driver")
        (status,) = bindings.cuInit(0)
    except ImportError as error:
        raise WorldError(f"no CUDA bindings ({error}): {pip_install('cuda')}") from None
    except RuntimeError as error:  # the bindings exist but find no driver
        raise WorldError(f"no CUDA driver: {str(error).partition(chr(10))[0][:200]}") from None
    if int(status):
        raise WorldError(f"cuInit: {status.name}")
    return bindings


def count() -> int:
    """The number of GPUs that this process sees; 0 without a driver."""
    try:
        bindings = driver()
    except WorldError:
        return 0
    status, number = bindings.cuDeviceGetCount()
    return 0 if int(status) else int(number)


def check(ordinal: int) -> None:
    """Raises WorldError, naming what is missing, unless the GPU exists. Touches no GPU."""
    driver()
    if (gpu_count := count()) <= ordinal:
        raise WorldError(f"GPU {ordinal}: this process sees {gpu_count} GPUs")


_CALLS = (  # each with the CUDA release that defines its arguments
    ("cuCtxSetCurrent", 4_000), ("cuLaunchKernel", 4_000), ("cuMemcpyAsync", 4_000), ("cuMemcpyBatchAsync", 12_080),
    ("cuEventRecord", 2_000), ("cuStreamWaitEvent", 3_020), ("cuEventQuery", 2_000),
    ("cuMemcpy2DAsync", 3_020),
)  # fmt: skip


class Calls(ctypes.Structure):
    """Calls of kernels/host_lanes.c: function addresses, or 0 for a function that this driver lacks."""

    _fields_ = tuple((name, ctypes.c_uint64) for name, _ in _CALLS)


@cache
def calls() -> Calls:
    """This driver's functions."""
    addresses = (driver().cuGetProcAddress(name.encode(), since, 0) for name, since in _CALLS)
    return Calls(*(0 if int(status) else int(address) for status, address, _ in addresses))
