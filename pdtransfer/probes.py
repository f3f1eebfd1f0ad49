"""What doctor tries on this host: each probe does in small what a daemon does, and says what it saw."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import importlib.util
import mmap
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .config import DecodeConfig, PrefillConfig, RouterConfig, cache_directory
from .headroom import headroom, huge_pages_free
from .kernels import UnusableError, load
from .kernels.card import card, count
from .kernels.compiled import compiler
from .keys import Address
from .memory import Arena, map_received

State = Literal["ok", "warn", "missing"]

MIB = 1 << 20
DESCRIPTORS_MIN = 4_096  # of one daemon: sockets, and a descriptor and a lock for each session
MEMLOCK_BYTES_MIN = 1 << 30  # a small arena; Docker's default is 8 MiB
STEADY_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
SHM = "/dev/shm"  # noqa: S108 (asked for its size, nothing is put there)

VENV = "make venv"
KERNEL = "a Linux kernel from 5.10 on, and a container that lets its calls through"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one probe saw: ok, a warning (slower, or for fewer), or missing (pdtransfer does not run without it)."""

    state: State
    found: str
    mend: str = ""  # the command that changes it


def ok(found: str) -> Seen:
    """Nothing is amiss."""
    return Seen("ok", found)


def warn(found: str, mend: str) -> Seen:
    """It works all the same."""
    return Seen("warn", found, mend)


def missing(found: str, mend: str) -> Seen:
    """It is required."""
    return Seen("missing", found, mend)


def _python() -> Seen:
    return ok(f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def _packages() -> Seen:
    lacking = [name for name in ("aiohttp", "prometheus_client", "uvloop") if importlib.util.find_spec(name) is None]
    if lacking:
        return missing(f"no {', '.join(lacking)}", VENV)
    return ok(f"all there; uvloop {importlib.import_module('uvloop').__version__}")


def _torch() -> Seen:
    """The build and the card; importing it is the only proof that it loads."""
    if importlib.util.find_spec("torch") is None:
        return missing("none: prefill and decode need it", VENV)
    torch = importlib.import_module("torch")
    version = str(torch.__version__)
    card = next((str(path) for path in (Path("/dev/nvidia0"), Path("/dev/kfd")) if path.exists()), None)
    if torch.cuda.is_available():
        return ok(f"{version}, {torch.cuda.get_device_name(0)}")
    if card is not None:
        mend = ".venv/bin/python -m uv pip install --reinstall --torch-backend=auto torch"
        return warn(f"{version} does not see the card at {card}", mend)
    return ok(f"{version}, CPU (this host has no GPU)")


def _copy() -> Seen:
    native = load()
    if native.used:
        return ok(native.text)
    return warn(native.text, "apt-get install -y g++")


def _cards() -> Seen:
    """Whether kernels can run: a host with a card needs the bindings, and something that compiles."""
    cards = count()
    if not cards:
        return ok("no card that the bindings see: copies run on the CPU")
    named = ", ".join(sorted({card(ordinal).architecture for ordinal in range(cards)}))
    try:
        return ok(f"{cards} x {named}, {compiler().version.splitlines()[-1]}")
    except UnusableError as error:
        return warn(f"{cards} x {named}, and {error}", "pip install nvidia-cuda-nvrtc")


def _cache() -> Seen:
    directory = cache_directory()
    above = next(path for path in (directory, *directory.parents) if path.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return ok(str(directory))
    mend = "export PDTRANSFER_CACHE=<a directory of this user>"
    return warn(f"{above} cannot be written", mend)


def _memfd() -> Seen:
    """An arena in small: its sealed size must hold, or a peer's mapping could end in SIGBUS."""
    arena = Arena.create(mmap.PAGESIZE, huge_pages="never")
    try:
        map_received(arena.fd, arena.byte_count).close()
        os.ftruncate(arena.fd, 0)
    except PermissionError:
        return ok("made and mapped, and shrinking is refused")
    finally:
        arena.close()
    return missing("a sealed memfd could be shrunk", KERNEL)


def _lock() -> Seen:
    """The fence in small: a lock on a reopened descriptor is kept by a mapping alone, and free once that has gone."""
    arena = Arena.create(mmap.PAGESIZE, huge_pages="never")
    try:
        again = arena.reopen()
        try:
            fcntl.fcntl(again, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
            address = _map(again)
        finally:
            os.close(again)
        kept = _is_locked(arena.fd)
        _unmap(address)
        freed = not _is_locked(arena.fd)
    finally:
        arena.close()
    if kept and freed:
        return ok("kept by a mapping alone, free after it")
    return missing(f"kept by the mapping: {kept}, freed after it: {freed}", KERNEL)


def _map(descriptor: int) -> int:
    """A shared mapping that, unlike Python's own, keeps no descriptor besides."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype, function.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long),
    )
    address: int = function(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def _unmap(address: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))


def _flock(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)


def _is_locked(descriptor: int) -> bool:
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    return bool(struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK)


def _unix_socket() -> Seen:
    """A descriptor sent over a Unix socket must arrive as the same file."""
    descriptor = os.memfd_create("pdtransfer-doctor", os.MFD_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with ours, theirs:
            socket.send_fds(ours, [b"x"], [descriptor])
            _, received, _, _ = socket.recv_fds(theirs, 1, 1)
        same = [os.fstat(each).st_ino == os.fstat(descriptor).st_ino for each in received]
        for each in received:
            os.close(each)
    finally:
        os.close(descriptor)
    if same == [True]:
        return ok("over a Unix socket")
    return missing("a descriptor did not arrive", KERNEL)


def _boot_id() -> Seen:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ok(boot)


def _memory() -> Seen:
    """What may still be allocated, against the pool and the arena of default daemons."""
    free = headroom()
    needed = 0
    for config in (PrefillConfig(), DecodeConfig()):
        module, _, attribute = config.engine.partition(":")
        # A small pool is enough to learn what a token takes.
        small = replace(config.engine_config, slots=4_096)
        card = getattr(importlib.import_module(module), attribute)(small).card
        needed += int(card.memory_bytes) * config.slots // small.slots
    found = f"{free.bytes / MIB:,.0f} MiB ({free.what}); by default prefill and decode take {needed / MIB:,.0f}"
    if free.bytes < needed:
        slots = DecodeConfig().slots * free.bytes // (2 * needed) // 64 * 64
        return warn(found, f"pdtransfer decode --slots {slots} and pdtransfer prefill --slots {slots // 128 * 64}")
    return ok(found)


def _huge_pages() -> Seen:
    shmem = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = shmem.read_text().split("[")[1].split("]")[0] if shmem.exists() else "none"
    free = huge_pages_free()
    found = f"{free} of 2 MiB set aside and free; transparent ones for shared memory: {chosen}"
    if free or chosen in ("always", "within_size", "advise", "force"):
        return ok(found)
    mend = f"echo advise > {shmem}" if shmem.exists() else "sysctl -w vm.nr_hugepages=1024"
    return warn(found + ": prefault and registration are slower", mend)


def _shm() -> Seen:
    status = os.statvfs(SHM)
    size = status.f_blocks * status.f_frsize
    found = f"{size / MIB:,.0f} MiB (torch and NCCL use it; arenas do not)"
    if size < 64 * MIB:
        return warn(found, "docker run --shm-size=1g, or mount -o remount")
    return ok(found)


def _memlock() -> Seen:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pins = Path("/dev/infiniband").exists()  # a card that pins what it registers
    if soft == resource.RLIM_INFINITY or soft >= MEMLOCK_BYTES_MIN or not pins:
        return ok(_limit(soft) + ("" if pins else ", and no card here that pins memory"))
    return warn(f"{_limit(soft)} bytes: too little to register an arena with the card", "ulimit -l unlimited")


def _descriptors() -> Seen:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, may be raised to {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS_MIN:
        return ok(found)
    return warn(found, "ulimit -n 65536")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _curve() -> Seen:
    zmq = importlib.import_module("zmq")
    version = f"libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        return ok(version)
    mend = ".venv/bin/python -m pip install --force-reinstall --only-binary pyzmq pyzmq"
    return warn(f"{version} without it: loopback only", mend)


def _clock() -> Seen:
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = path.read_text().strip() if path.exists() else "unknown"
    if source in STEADY_CLOCKS:
        return ok(source)
    found = f"{source}: reading the time is a system call"
    return warn(found, f"echo tsc > {path}, where the host has it")


def _ports() -> Seen:
    prefill, decode, router = PrefillConfig(), DecodeConfig(), RouterConfig()
    taken: list[str] = []
    for name, address in (
        ("prefill --bind", prefill.bind),
        ("prefill --http", prefill.http),
        ("decode --bind", decode.bind),
        ("decode --http", decode.http),
        ("router --listen", router.listen),
    ):
        at = Address.parse("tcp://" + address.removeprefix("tcp://"))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((at.host, at.port_first))
            except OSError as error:
                taken.append(f"{at.port_first} ({name}, {errno.errorcode[error.errno or 0]})")
    if taken:
        found = f"not free: {', '.join(taken)}"
        return warn(found, "ss -ltnp says who has it; or name another port")
    return ok("the default ones are free")


# Each probe, and what to do where it cannot even be tried.
PROBES: dict[str, tuple[Callable[[], Seen], str]] = {
    "python": (_python, ""),
    "packages": (_packages, VENV),
    "torch": (_torch, VENV),
    "native copy": (_copy, VENV),
    "cards": (_cards, ""),
    "kernel cache": (_cache, ""),
    "sealed memfd": (_memfd, KERNEL),
    "fence lock": (_lock, KERNEL),
    "descriptor passing": (_unix_socket, KERNEL),
    "boot id": (_boot_id, "mount -t proc proc /proc"),
    "memory": (_memory, VENV),
    "huge pages": (_huge_pages, ""),
    "shared memory mount": (_shm, f"mount -t tmpfs tmpfs {SHM}"),
    "memlock limit": (_memlock, ""),
    "open files limit": (_descriptors, ""),
    "CURVE": (_curve, VENV),
    "clock": (_clock, ""),
    "ports": (_ports, ""),
}
