"""Probes of this host's memory, limits and clock."""

from __future__ import annotations

import importlib
import mmap
import os
import re
import resource
import time
from dataclasses import replace
from pathlib import Path

from ....memory.arena_memory import ArenaMemory
from ....memory.available_memory import available_memory
from ....probe import MIB, Seen, names, ok, read, warn, within
from ...settings.worker import DecodeConfig, PrefillConfig

DESCRIPTORS_MIN = 4_096  # for one daemon: its sockets, and a descriptor and a lock for each session
MEMLOCK_BYTES_MIN = 1 << 30  # a small arena; Docker's default is far less
STEADY_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
CLOCK_STEP_S_MAX = 1e-3  # with coarser steps, deadlines in milliseconds are meaningless
_CAP_IPC_LOCK = 1 << 14
_SHM = "/dev/shm"  # noqa: S108 (asked for its size, nothing is put there)
_HUGE = "/sys/kernel/mm/hugepages/hugepages-2048kB"
_THP = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
_NODES = "/sys/devices/system/node"


def memory(_root: Path) -> Seen:
    """Available memory, against the pool and the arena of default daemons."""
    free = available_memory()
    needed = 0
    for config in (PrefillConfig(), DecodeConfig()):
        module, _, attribute = config.factory.partition(":")
        # A small pool is enough to measure the bytes of a token.
        small = replace(config.engine_config, slots=4_096)
        description = getattr(importlib.import_module(module), attribute)(small).description
        needed += int(description.memory_bytes) * config.slots // small.slots
    text = f"{free.bytes / MIB:,.0f} MiB ({free.what}); by default prefill and decode take {needed / MIB:,.0f}"
    if free.bytes < needed:
        slots = DecodeConfig().slots * free.bytes // (2 * needed) // 64 * 64
        return warn(text, f"pdtransfer decode --slots {slots} and pdtransfer prefill --slots {slots // 128 * 64}")
    return ok(text)


def huge_pages(root: Path) -> Seen:
    """Huge pages, reserved or transparent, speed up prefaulting and registering an arena."""
    counts = [read(within(root, f"{_HUGE}/{name}")) for name in ("free_hugepages", "resv_hugepages")]
    free = int(counts[0]) - int(counts[1]) if all(count.isdecimal() for count in counts) else 0
    shmem = read(within(root, _THP))
    chosen = shmem.split("[")[1].split("]")[0] if "[" in shmem and "]" in shmem else "none"
    text = f"{free} of 2 MiB set aside and free; transparent ones for shared memory: {chosen}"
    if free or chosen in ("always", "within_size", "advise", "force"):
        return ok(text)
    mend = f"echo advise > {_THP}" if shmem else "sysctl -w vm.nr_hugepages=1024"
    return warn(text + ": prefault and registration are slower", mend)


def numa(root: Path) -> Seen:
    """Reports if an arena can be bound to a GPU's NUMA node, which needs the kernel's permission."""
    nodes = [name for name in names(within(root, _NODES)) if re.fullmatch(r"node\d+", name)]
    if len(nodes) < 2:
        return ok("one node: all memory is equally near")
    free: list[str] = []
    for node in nodes:
        text = read(within(root, f"{_NODES}/{node}/meminfo"))
        match = re.search(r"MemFree:\s+(\d+) kB", text)
        free.append(f"{node} {int(match[1]) >> 10:,} MiB free" if match else node)
    arena = ArenaMemory.create(mmap.PAGESIZE, huge_pages="never")
    try:
        bound = arena.mapping.bind(0)
    finally:
        arena.close()
    if bound:
        return ok("; ".join(free))
    mend = "in a container: docker run --cap-add SYS_NICE, or a seccomp profile that lets mbind through"
    return warn(f"{'; '.join(free)}; no memory can be bound to one, so that arenas may lie far from their GPU", mend)


def shm(root: Path) -> Seen:
    """The size of /dev/shm: torch and NCCL use it, arenas do not."""
    status = os.statvfs(within(root, _SHM))
    size = status.f_blocks * status.f_frsize
    text = f"{size / MIB:,.0f} MiB (torch and NCCL use it; arenas do not)"
    if size < 64 * MIB:
        return warn(text, f"mount -o remount,size=1g {_SHM}, or docker run --shm-size=1g")
    return ok(text)


def memlock(root: Path) -> Seen:
    """The limit of memory that a device may pin; CAP_IPC_LOCK lifts it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pins = bool(names(within(root, "/dev/infiniband")))  # a device that pins registered memory
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)", read(within(root, "/proc/self/status")), re.MULTILINE)
    free = bool(capable and int(capable[1], 16) & _CAP_IPC_LOCK)
    text = f"{_limit(soft)} bytes" if soft != resource.RLIM_INFINITY else _limit(soft)
    if soft == resource.RLIM_INFINITY or soft >= MEMLOCK_BYTES_MIN:
        return ok(text)
    if free:
        return ok(f"{text}, which CAP_IPC_LOCK lifts")
    if not pins:
        return ok(f"{text}, and no RDMA device here that pins memory")
    mend = "ulimit -l unlimited; in a unit LimitMEMLOCK=infinity; docker run --ulimit memlock=-1:-1"
    return warn(f"{text}: too little to register an arena with the RDMA device", mend)


def descriptors(_root: Path) -> Seen:
    """The hard limit of descriptors; a daemon raises its soft limit to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)}, may be raised to {_limit(hard)}"
    if hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS_MIN:
        return ok(text)
    return warn(text, "ulimit -Hn 65536; in a unit LimitNOFILE=65536; docker run --ulimit nofile=65536:65536")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def clock(root: Path) -> Seen:
    """The clock of deadlines. Under some hypervisors, reading it is a system call."""
    source = read(within(root, _CLOCK)) or "unknown"
    guest = re.search(r"^(flags|Features)\s*:.*\bhypervisor\b", read(within(root, "/proc/cpuinfo")), re.MULTILINE)
    step_s = time.clock_getres(time.CLOCK_MONOTONIC)
    text = f"CLOCK_MONOTONIC by {source}, in steps of {step_s * 1e9:,.0f} ns{', under a hypervisor' if guest else ''}"
    mend = f"echo tsc > {_CLOCK}, where {_CLOCK.replace('current', 'available')} has it"
    if step_s > CLOCK_STEP_S_MAX:
        return warn(f"{text}: too coarse for deadlines in milliseconds", mend)
    if source not in STEADY_CLOCKS:
        return warn(f"{text}: reading it is a system call", mend)
    return ok(text)
