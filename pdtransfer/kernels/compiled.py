"""Compiles CUDA kernels with NVRTC, or with nvcc, and caches the machine code. Needs neither a GPU nor a driver.

The cache key holds source, headers, options, architecture and compiler.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..environment import pip_install
from . import UnusableError, private_directory, run_compiler, source_directory, write_once

HEADERS = ("device.h", "rows.h", "kv_copy.h", "set_mla.h", "swap_plan.h", "newest.h", "hot_row.h")
KERNELS = ("kv_copy", "set_mla", "swap_plan", "newest", "hot_row")
ARCHITECTURES = ("sm_90", "sm_100")  # the tests compile for these; any other that the compiler knows works, too
_OPTIONS = ("--std=c++17",)


class Compiler(NamedTuple):
    """Compiles a source in kernels/ to machine code; `version` is part of the cache key."""

    version: str
    compile: Callable[[str, str], bytes]  # (kernel, architecture)


def machine_code(kernel: str, architecture: str, cache: Path | None = None) -> bytes:
    """The cubin of kernels/`kernel`.cu for `architecture`, such as sm_90, from `cache` or compiled.

    Raises UnusableError, naming what to install, if it is not cached and cannot be compiled.
    """
    stem = _stem(kernel, architecture)
    try:
        directory = private_directory(cache)
    except UnusableError:
        return compiler().compile(kernel, architecture)
    try:
        version, compile_ = compiler()
    except UnusableError:
        if cached := sorted(directory.glob(f"{stem}-*.cubin")):
            return cached[0].read_bytes()
        raise
    path = directory / f"{stem}-{hashlib.sha256(version.encode()).hexdigest()[:12]}.cubin"
    write_once(path, lambda output: output.write_bytes(compile_(kernel, architecture)))
    return path.read_bytes()


def is_cached(kernel: str, architecture: str, cache: Path | None = None) -> bool:
    """True if the cache holds the current sources, compiled. Raises UnusableError without a cache or a source."""
    return any(private_directory(cache).glob(f"{_stem(kernel, architecture)}-*.cubin"))


def _stem(kernel: str, architecture: str) -> str:
    sources = {name: _read(name) for name in (*HEADERS, f"{kernel}.cu")}
    key = hashlib.sha256(repr((sources, _OPTIONS, architecture)).encode()).hexdigest()[:20]
    return f"{kernel}-{architecture}-{key}"


def compiler() -> Compiler:
    """NVRTC, or else nvcc. Raises UnusableError if neither is installed."""
    try:
        return _nvrtc()
    except UnusableError as error:
        if (nvcc := shutil.which("nvcc")) is None:
            raise UnusableError(f"{error}; and no nvcc") from None
        return _nvcc(nvcc)


def _nvrtc() -> Compiler:
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the bindings load their library at the first call
        reason = str(error).partition("\n")[0][:200]
        raise UnusableError(f"no NVRTC ({reason}): {pip_install('cuda')}") from None

    def compile_(kernel: str, architecture: str) -> bytes:
        headers = [_read(name).encode() for name in HEADERS]
        names = [name.encode() for name in HEADERS]
        source = _read(f"{kernel}.cu").encode()
        _, program = nvrtc.nvrtcCreateProgram(source, f"{kernel}.cu".encode(), len(headers), headers, names)
        try:
            options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture={architecture}")]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            if int(status):
                raise UnusableError(f"{kernel}.cu for {architecture}: {_log_of(nvrtc, program) or status.name}")
            _, size = nvrtc.nvrtcGetCUBINSize(program)
            code = b" " * size
            nvrtc.nvrtcGetCUBIN(program, code)
            return code
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    return Compiler(f"NVRTC {major}.{minor}", compile_)


def _log_of(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    lines = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
    return lines[0][:300] if lines else ""


def _nvcc(path: str) -> Compiler:
    def compile_(kernel: str, architecture: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="pdtransfer-") as scratch:
            cubin = Path(scratch) / "kernel.cubin"
            source = source_directory() / f"{kernel}.cu"
            run_compiler([path, *_OPTIONS, f"-arch={architecture}", "-cubin", "-o", str(cubin), str(source)])
            return cubin.read_bytes()

    return Compiler(run_compiler([path, "--version"]), compile_)


def _read(name: str) -> str:
    path = source_directory() / name
    try:
        return path.read_text()
    except OSError as error:
        raise UnusableError(f"{path} cannot be read ({error.strerror})") from None
