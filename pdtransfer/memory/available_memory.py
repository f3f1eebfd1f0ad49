"""How much memory this process may still take: of the host, and of every cgroup that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes that may still be taken of `what`, in words for a person."""

    what: str
    bytes: int


def available_memory() -> AvailableMemory:
    """The scarcest of the host's available memory and the limits of the cgroups that this process is in.

    Nothing else bounds a memfd: the size of /dev/shm limits only files that are made there.
    """
    return min([_host(), *_cgroups()], key=lambda memory: memory.bytes)


def huge_pages_free() -> int:
    """Pages of 2 MiB that the kernel has set aside, and no process has taken or reserved."""
    try:
        free, reserved = (int((_HUGE_PAGES / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except OSError:
        return 0
    return free - reserved


def _host() -> AvailableMemory:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return AvailableMemory("available memory of the host", int(line.split()[1]) << 10)
    return AvailableMemory("memory of the host", _UNLIMITED)


def _cgroups() -> Iterator[AvailableMemory]:
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(_CGROUPS, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(_CGROUPS / "memory", path, names)


def _limits(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[AvailableMemory]:
    """One for each cgroup with a limit, from `path` up to the root; a container may see only its own, as the root."""
    limit_name, usage_name, reclaimable_name = names
    inside = root / path.lstrip("/")
    for group in (inside, *inside.parents):
        try:
            limit = (group / limit_name).read_text().strip()
            usage = int((group / usage_name).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:  # not visible in a container, or the root group, which has no limit
            limit, usage, stat = "max", 0, {}
        if limit != "max" and int(limit) < _UNLIMITED:
            left = int(limit) - usage + int(stat.get(reclaimable_name, 0))
            yield AvailableMemory(f"{limit_name} of cgroup {group}", max(0, left))
        if group == root:
            return
