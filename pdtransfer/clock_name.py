"""The name of this process's CLOCK_MONOTONIC. Only times of clocks of one name may be subtracted from each other."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")  # missing before Linux 5.6, which had one clock for all
DIGEST_BYTES = 16


@cache
def clock_name() -> str:
    """The boot of the kernel, and the time namespace: processes that share both read the same CLOCK_MONOTONIC. Empty
    where the boot is unknown."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        return ""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink(_NAMESPACE)
    return f"{boot} {namespace}".strip()


def clock_digest() -> bytes:
    """The name as messages carry it, of 16 bytes; empty where it is unknown."""
    name = clock_name()
    return blake2b(name.encode(), digest_size=DIGEST_BYTES).digest() if name else b""
