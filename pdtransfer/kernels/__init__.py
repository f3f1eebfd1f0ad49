"""Finds, compiles, caches and loads what is in kernels/, and carries out plans with its copy; without one, with numpy.

A library is built for no particular CPU, since it picks its way when it runs: its cache is keyed by source, flags,
compiler and platform alone. The cache directory belongs to this user and nobody else may write there.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from ..layout.geometry import read_only
from ..layout.plan import Plan
from . import numpy_copy
from .cancel import Cancel

_ABI = 1  # of kernels/host_copy.c
_FLAGS = ("-O3", "-fPIC", "-shared", "-fvisibility=hidden")
_COMPILERS = {  # C first: there is more often a C compiler than one of C++
    **dict.fromkeys(("cc", "gcc", "clang"), ("-x", "c", "-std=c11")),
    **dict.fromkeys(("c++", "g++", "clang++"), ("-x", "c++", "-std=c++11")),
}
_COMPILE_SECONDS_MAX = 120.0
_STREAMS = ("ordinary stores", "SSE2 streaming stores", "AVX streaming stores", "AVX-512 streaming stores")
_STREAM_BYTES_MIN = 1 << 20  # below, the reader finds the rows in a cache, and the writer ends sooner

_Copy = Callable[[int, int, int, int, int, int, int, int, int, int], int]
Library = TypeVar("Library")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Native:
    """Which copy this process has: the compiled one at `path`, or numpy (None); `text` tells a person which, or why."""

    path: Path | None
    text: str
    streams: int = 0  # the widest streaming stores, as kernels/host_copy.c numbers them
    copy: _Copy | None = None
    address: int = 0  # of the function, for other kernels to call

    @property
    def used(self) -> bool:
        """Whether the compiled copy is used."""
        return self.copy is not None


class UnusableError(Exception):
    """Why there is no library, or no cache; its text is for a person."""


def source_directory() -> Path:
    """kernels/ of the installed package, or of the checkout."""
    package = Path(__file__).resolve().parent.parent
    shared = package / "_share" / "kernels"
    return shared if shared.is_dir() else package.parent / "kernels"


class Once(Generic[Library]):
    """What `load` finds, found once a process: the first call may compile for a second, so make it off the loop."""

    def __init__(self, load: Callable[[], Library]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._found: Library | None = None

    def __call__(self) -> Library:
        with self._lock:
            if self._found is None:
                self._found = self._load()
            return self._found


def load(cache: Path | None = None) -> Native:
    """The copy that there is. Where there is no compiler it is numpy's, and `text` says what to install.

    `cache` is where compiled kernels are kept, by default config's.
    """
    try:
        return loaded("host_copy", cache, _opened)
    except UnusableError as error:
        return Native(path=None, text=f"numpy copies: {error}")


native = Once(load)
"""The copy of this process."""


def loaded(name: str, cache: Path | None, opened: Callable[[Path], Library]) -> Library:
    """kernels/`name`.c compiled, unless it was before, and `opened`, which raises UnusableError where it cannot be."""
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
        # Nothing is kept then: a loaded library outlives its file.
        with tempfile.TemporaryDirectory(prefix="pdtransfer-") as aside:
            return opened(_compiled(source, Path(aside), stem))
    path = _compiled(source, directory, stem)
    try:
        return opened(path)
    except UnusableError:
        path.unlink(missing_ok=True)  # damaged: once more from the source
        return opened(_compiled(source, directory, stem))


def private_directory(cache: Path | None) -> Path:
    """Where compiled kernels are kept below `cache`, by default config's; UnusableError unless it is ours alone."""
    if cache is None:
        from ..environment import cache_directory  # the only reader of the environment

        cache = cache_directory()
    directory = cache / "kernels"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise UnusableError(f"{directory}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UnusableError(f"{directory} is not this user's alone")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UnusableError(f"{directory} cannot be written")
    return directory


def _compiled(source: Path, directory: Path, stem: str) -> Path:
    """The library in `directory`, compiled if it is not there; without a compiler any one of this source will do."""
    compiler = next((name for name in _COMPILERS if shutil.which(name)), None)
    if compiler is None:
        if kept := sorted(directory.glob(f"{stem}-*.so")):
            return kept[0]
        raise UnusableError(f"no C or C++ compiler ({', '.join(_COMPILERS)}): install gcc or clang")
    version = run_compiler([compiler, "--version"])
    path = directory / f"{stem}-{hashlib.sha256(f'{compiler} {version}'.encode()).hexdigest()[:12]}.so"
    if not path.exists():
        aside = directory / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
        try:
            run_compiler([compiler, *_COMPILERS[compiler], *_FLAGS, "-o", str(aside), str(source)])
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return path


def run_compiler(command: list[str]) -> str:
    """What it prints; UnusableError with its first error where it fails."""
    try:
        done = subprocess.run(  # noqa: S603 (a compiler of this host's PATH, on our own source)
            command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnusableError(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
        raise UnusableError(f"{' '.join(command)}: {lines[0][:300]}")
    return done.stdout


def library_at(path: Path, *, abi_name: str, abi: int) -> ctypes.CDLL:
    """A compiled library; UnusableError where it cannot be opened, or its function `abi_name` says another `abi`."""
    try:
        library = ctypes.CDLL(str(path))
        found = library[abi_name]()
    except (OSError, AttributeError) as error:
        raise UnusableError(f"{path}: {error}") from None
    if found != abi:
        raise UnusableError(f"{path}: its interface is {found}, not {abi}")
    return library


def _opened(path: Path) -> Native:
    library = library_at(path, abi_name="pdtransfer_abi", abi=_ABI)
    streams: int = library.pdtransfer_streams()
    function = library.pdtransfer_copy
    address, count = ctypes.c_uint64, ctypes.c_int64
    function.argtypes = (address, count, address, count, count, count, address, address, ctypes.c_int32, address)
    function.restype = ctypes.c_int32
    text, at = f"compiled copy, {_STREAMS[streams]}: {path}", ctypes.cast(function, ctypes.c_void_p).value or 0
    return Native(path=path, text=text, streams=streams, copy=function, address=at)


def copy(
    plan: Plan,
    source_address: int,
    target_address: int,
    *,
    threads: int = 1,
    cancel: Cancel | None = None,
    by: Native | None = None,
) -> bool:
    """Carries out `plan` between two mappings, whose addresses are added to its bases; False when `cancel` stopped it.

    Returns when no store of it is pending any more. It holds the GIL for no copied byte. `by` is for those who compare.
    """
    by, cancel = by or native(), cancel or Cancel()
    streams = streams_for(plan, by)
    if threads == 1:
        return _carry(plan, source_address, target_address, cancel, by, streams)
    parts, ended = list(_shares(plan, threads)), list[bool]()

    def carry(part: Plan) -> None:
        ended.append(_carry(part, source_address, target_address, cancel, by, streams))

    others = [threading.Thread(target=carry, args=(part,), name="pdtransfer-copy") for part in parts[1:]]
    for other in others:
        other.start()
    for part in parts[:1]:
        carry(part)
    for other in others:
        other.join()
    assert len(ended) == len(parts), "a copy thread has died"
    return all(ended)


def streams_for(plan: Plan, by: Native) -> int:
    """Which streaming stores a copy of so many bytes takes."""
    return by.streams if plan.bytes >= _STREAM_BYTES_MIN else 0


def _carry(plan: Plan, source_address: int, target_address: int, cancel: Cancel, by: Native, streams: int) -> bool:
    if by.copy is None:
        return numpy_copy.copy(plan, source_address, target_address, cancel)
    table, runs = plan.pairing.table, plan.runs
    assert table.flags.c_contiguous
    assert runs.flags.c_contiguous
    assert table.dtype == runs.dtype == np.int64
    sizes = plan.pairing.source_page_size, plan.pairing.target_page_size
    sides = table.ctypes.data, len(table), runs.ctypes.data, len(runs)
    return bool(by.copy(*sides, *sizes, source_address, target_address, streams, cancel.address))


def _shares(plan: Plan, threads: int) -> Iterator[Plan]:
    """At most `threads` plans of about equal bytes, together `plan`: by rows, or by planes where rows are few."""
    if plan.rows >= 4 * threads:
        yield from plan.pieces(-(-plan.rows // threads) * plan.pairing.row_bytes)
        return
    pairing = plan.pairing
    ends = np.cumsum(pairing.table[:, 6])
    cuts = np.searchsorted(ends, np.arange(1, threads) * (pairing.row_bytes / threads), side="right")
    for low, high in zip((0, *cuts), (*cuts, len(ends)), strict=True):
        if low < high:
            part = slice(int(low), int(high))
            table, layers = read_only(pairing.table[part]), read_only(pairing.layers[part])
            yield Plan(pairing=replace(pairing, table=table, layers=layers), runs=plan.runs, rows=plan.rows)
