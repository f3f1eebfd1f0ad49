"""Compiles, caches and loads the sources in kernels/, and copies plans with the compiled copy or with numpy.

A library selects its instructions at run time, so the cache key holds only source, flags, compiler and platform.
The cache directory must belong to this user, and no other user may write to it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from ..environment import cache_directory
from ..layout.plan import Plan
from . import numpy_copy
from .cancel import CancelWord

_FLAGS = ("-O3", "-fPIC", "-shared", "-fvisibility=hidden")
_COMPILERS = {  # C first: more hosts have a C compiler than a C++ compiler
    **dict.fromkeys(("cc", "gcc", "clang"), ("-x", "c", "-std=c11")),
    **dict.fromkeys(("c++", "g++", "clang++"), ("-x", "c++", "-std=c++11")),
}
_COMPILE_SECONDS_MAX = 120.0
_STREAMS = ("ordinary stores", "SSE2 streaming stores", "AVX streaming stores", "AVX-512 streaming stores")
_STREAM_BYTES_MIN = 1 << 20  # a smaller copy stays in the CPU's cache, where ordinary stores are faster

_Copy = Callable[[int, int, int, int, int, int, int, int, int, int], int]
Library = TypeVar("Library")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativeCopy:
    """This process's copy: the compiled library at `path`, or numpy (None). `text` describes it for a person."""

    path: Path | None
    text: str
    streams: int = 0  # the widest streaming stores, numbered as in kernels/host_copy.c
    copy: _Copy | None = None
    address: int = 0  # of the function, so that other kernels can call it

    @property
    def used(self) -> bool:
        """True if copies use the compiled function."""
        return self.copy is not None


class UnusableError(Exception):
    """A library or the cache cannot be used; the text gives the reason."""


def source_directory() -> Path:
    """The kernels/ folder of the installed package, or of the checkout."""
    package = Path(__file__).resolve().parent.parent
    shared = package / "_share" / "kernels"
    return shared if shared.is_dir() else package.parent / "kernels"


class Once(Generic[Library]):
    """Calls `load` once per process. The first call may compile for a second: make it outside the event loop."""

    def __init__(self, load: Callable[[], Library]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._library: Library | None = None

    def __call__(self) -> Library:
        with self._lock:
            if self._library is None:
                self._library = self._load()
            return self._library


def load(cache: Path | None = None) -> NativeCopy:
    """Loads the compiled copy. Without a compiler it returns numpy's, and `text` names what to install.

    `cache` is the folder of compiled kernels, by default the configured one.
    """
    try:
        return load_library("host_copy", cache, _open)
    except UnusableError as error:
        return NativeCopy(path=None, text=f"numpy copies: {error}")


native = Once(load)
"""Returns this process's copy."""


def load_library(name: str, cache: Path | None, open_library: Callable[[Path], Library]) -> Library:
    """Compiles kernels/`name`.c unless it is cached, and opens it. Raises UnusableError if either fails."""
    source = source_directory() / f"{name}.c"
    try:
        key = hashlib.sha256(source.read_bytes())
    except OSError as error:
        raise UnusableError(f"{source} cannot be read ({error.strerror})") from None
    key.update(repr((_FLAGS, _COMPILERS, sysconfig.get_config_var("SOABI"))).encode())
    stem = f"{name}-{key.hexdigest()[:20]}"
    try:
        directory = private_directory(cache)
    except UnusableError:
        # A cache on a root that is read-only serves what it has.
        with suppress(UnusableError):
            return open_library(_cached(private_directory(cache, writable=False), stem))
        # Without a cache the file is temporary: a loaded library outlives its file.
        with tempfile.TemporaryDirectory(prefix="pdtransfer-") as scratch:
            return open_library(_compile(source, Path(scratch), stem))
    path = _compile(source, directory, stem)
    try:
        return open_library(path)
    except UnusableError:
        path.unlink(missing_ok=True)  # damaged: compile again
        return open_library(_compile(source, directory, stem))


def private_directory(cache: Path | None, *, writable: bool = True) -> Path:
    """The folder of compiled kernels below `cache`. Raises UnusableError where others can write to it, or where it
    has to be `writable` and this user cannot."""
    if cache is None:
        cache = cache_directory()
    directory = cache / "kernels"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise UnusableError(f"{directory}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UnusableError(f"{directory} is not private to this user")
    if writable and not os.access(directory, os.W_OK | os.X_OK):
        raise UnusableError(f"{directory} cannot be written")
    return directory


def write_once(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary name and renames the file to `path`, unless `path` exists."""
    if path.exists():
        return
    temporary = path.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _compile(source: Path, directory: Path, stem: str) -> Path:
    """The library in `directory`, compiled if missing. Without a compiler, any cached build of this source serves."""
    compiler = next((name for name in _COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return _cached(directory, stem)
    version = run_compiler([compiler, "--version"])
    path = directory / f"{stem}-{hashlib.sha256(f'{compiler} {version}'.encode()).hexdigest()[:12]}.so"
    command = [compiler, *_COMPILERS[compiler], *_FLAGS, str(source), "-o"]
    write_once(path, lambda output: run_compiler([*command, str(output)]))
    return path


def _cached(directory: Path, stem: str) -> Path:
    """Any build of this source in `directory`. Raises UnusableError if there is none."""
    if cached := sorted(directory.glob(f"{stem}-*.so")):
        return cached[0]
    raise UnusableError(f"no C or C++ compiler ({', '.join(_COMPILERS)}): install gcc or clang")


def run_compiler(command: list[str]) -> str:
    """Returns the compiler's output. Raises UnusableError with its first error message."""
    try:
        done = subprocess.run(  # noqa: S603 (a compiler from this host's PATH, on our own source)
            command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnusableError(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "fatal" in line]
        raise UnusableError(f"{' '.join(command)}: {lines[0][:300] if lines else f'status {done.returncode}'}")
    return done.stdout


def library_at(path: Path) -> ctypes.CDLL:
    """Opens a compiled library. Raises UnusableError if it cannot be opened."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnusableError(f"{path}: {error}") from None


def _open(path: Path) -> NativeCopy:
    library = library_at(path)
    streams: int = library.pdtransfer_streams()
    function = library.pdtransfer_copy
    address, count = ctypes.c_uint64, ctypes.c_int64
    function.argtypes = (address, count, address, count, count, count, address, address, ctypes.c_int32, address)
    function.restype = ctypes.c_int32
    text, address = f"compiled copy, {_STREAMS[streams]}: {path}", ctypes.cast(function, ctypes.c_void_p).value or 0
    return NativeCopy(path=path, text=text, streams=streams, copy=function, address=address)


def copy(
    plan: Plan, source_address: int, target_address: int, *, cancel: CancelWord | None = None,
    by: NativeCopy | None = None,
) -> bool:  # fmt: skip
    """Copies `plan` between two mappings, whose addresses are added to its bases. Returns False if cancelled.

    No store is pending when it returns. Copying does not hold the GIL. Tests and benchmarks select a copy with `by`.
    """
    by, cancel = by or native(), cancel or CancelWord()
    if by.copy is None:
        return numpy_copy.copy(plan, source_address, target_address, cancel)
    table, runs = plan.pairing.table, plan.runs
    assert table.flags.c_contiguous
    assert runs.flags.c_contiguous
    assert table.dtype == runs.dtype == np.int64
    sizes = plan.pairing.source_page_size, plan.pairing.target_page_size
    sides = table.ctypes.data, len(table), runs.ctypes.data, len(runs)
    return bool(by.copy(*sides, *sizes, source_address, target_address, streams_for(plan, by), cancel.address))


def streams_for(plan: Plan, by: NativeCopy) -> int:
    """The kind of streaming stores for a plan of this size; 0 is ordinary stores."""
    return by.streams if plan.bytes >= _STREAM_BYTES_MIN else 0
