"""The driver's bindings, the cards that this process sees, and its functions for those who call it without Python.

It is looked for when somebody first asks: importing this needs neither a driver nor a card.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any

from ..errors import WorldError


@cache
def driver() -> Any:
    """cuda.bindings.driver, initialised; WorldError, naming what is missing, where there is none."""
    try:
        found: Any = importlib.import_module("cuda.bindings.driver")
        (status,) = found.cuInit(0)
    except ImportError as error:
        raise WorldError(f"no CUDA bindings ({error}): pip install cuda-bindings") from None
    except RuntimeError as error:  # the bindings are there, and find no driver
        raise WorldError(f"no CUDA driver: {str(error).partition(chr(10))[0][:200]}") from None
    if int(status):
        raise WorldError(f"cuInit: {status.name}")
    return found


def count() -> int:
    """Cards that this process sees: 0 without a driver, too."""
    try:
        found = driver()
    except WorldError:
        return 0
    status, number = found.cuDeviceGetCount()
    return 0 if int(status) else int(number)


def ordinal_of(uuid: bytes) -> int | None:
    """The card's number here, None for one that is not seen. Makes no context there, which takes some hundred MiB."""
    for number in range(count()):
        status, device = driver().cuDeviceGet(number)
        if int(status):
            continue  # it is there no more
        status, found = driver().cuDeviceGetUuid(device)
        if not int(status) and bytes(found.bytes) == uuid:
            return number
    return None


def check(ordinal: int) -> None:
    """WorldError, naming what is missing, unless there is such a card; touches none."""
    driver()
    if (found := count()) <= ordinal:
        raise WorldError(f"card {ordinal}: this process sees {found} cards")


_CALLS = (  # and the release of CUDA whose arguments are meant
    ("cuCtxSetCurrent", 4_000), ("cuLaunchKernel", 4_000), ("cuMemcpyAsync", 4_000), ("cuMemcpyBatchAsync", 12_080),
    ("cuEventRecord", 2_000), ("cuStreamWaitEvent", 3_020), ("cuEventQuery", 2_000),
    ("cuMemcpy2DAsync", 3_020),
)  # fmt: skip


class Calls(ctypes.Structure):
    """Calls of kernels/host_lanes.c; 0 for what this driver has not."""

    _fields_ = tuple((name, ctypes.c_uint64) for name, _ in _CALLS)


@cache
def calls() -> Calls:
    """This driver's."""
    found = (driver().cuGetProcAddress(name.encode(), since, 0) for name, since in _CALLS)
    return Calls(*(0 if int(status) else int(address) for status, address, _ in found))
