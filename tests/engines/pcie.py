"""What a GPU has read over PCIe, by the counters of its driver: NVML, by ctypes, without rights to a profiler."""

from __future__ import annotations

import ctypes
from typing import Any

PCIE_COUNT_RX_BYTES = 198  # NVML_FI_DEV_PCIE_COUNT_RX_BYTES, from the start of the driver
WRAPS = 1 << 32  # the counter may have 32 bits


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t"""

    _fields_ = [
        ("field", ctypes.c_uint32), ("scope", ctypes.c_uint32), ("timestamp", ctypes.c_int64),
        ("latency_us", ctypes.c_int64), ("type", ctypes.c_int32), ("status", ctypes.c_int32),
        ("value", ctypes.c_uint64),
    ]  # fmt: skip


class UnsupportedError(Exception):
    """No such counter here, and why."""


class PcieReads:
    """Counts the bytes that the first GPU receives. Raises UnsupportedError where it has no such counter."""

    def __init__(self) -> None:
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise UnsupportedError(str(error)) from None
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._device))
        self._last = self._read()

    def since_last(self) -> int:
        """Bytes received since the last call, or since this object was made: fewer than WRAPS."""
        last, self._last = self._last, self._read()
        return (self._last - last) % WRAPS

    def _read(self) -> int:
        value = _FieldValue(field=PCIE_COUNT_RX_BYTES)
        self._call("nvmlDeviceGetFieldValues", self._device, 1, ctypes.byref(value))
        if value.status:
            raise UnsupportedError(f"field {PCIE_COUNT_RX_BYTES}: NVML's status {value.status}")
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._nvml, name)(*arguments):
            raise UnsupportedError(f"{name}: NVML's status {status}")
