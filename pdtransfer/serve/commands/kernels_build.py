"""`pdtransfer kernels build`: compiles all kernels ahead of time, so that no transfer waits for a compiler."""

from __future__ import annotations

from json import dumps
from time import perf_counter
from typing import Annotated

from cyclopts import App, Parameter

from ...errors import WorldError
from ...kernels import UnusableError, checksum_copy, native, private_directory
from ...kernels.compiled import KERNELS, compiler, machine_code
from ...kernels.driver import count
from ...kernels.gpu import gpu_at
from ...kernels.ring import lanes
from ..settings.node import Json

kernels = App(name="kernels", help="The kernels that run on a GPU.")


@kernels.command
def build(
    *,
    arch: Annotated[tuple[str, ...], Parameter(help="Architectures such as sm_90; by default the GPUs' own.")] = (),
    json: Json = False,
) -> int:
    """Compiles every kernel into the cache ahead of time; with --arch also on a host without a GPU."""
    names = list(arch) or sorted({gpu_at(ordinal).architecture for ordinal in range(count())})
    if not names:
        raise WorldError("this host has no GPU: name an architecture with --arch, such as sm_90")
    try:
        version, directory = compiler().version, private_directory(None)
        rows: list[dict[str, str | int | float]] = []
        for architecture in names:
            for kernel in KERNELS:
                start = perf_counter()
                size = len(machine_code(kernel, architecture))
                took = round(perf_counter() - start, 3)
                rows.append({"kernel": kernel, "architecture": architecture, "bytes": size, "seconds": took})
    except UnusableError as error:
        raise WorldError(str(error)) from None
    host = [native().text, checksum_copy.native().text, lanes.native().text]
    if json:
        print(dumps({"compiler": version.splitlines()[-1], "directory": str(directory), "built": rows, "host": host}))
    else:
        for row in rows:
            print("{kernel} for {architecture}: {bytes} bytes, {seconds} s".format(**row))
        print(*host, f"in {directory}, by {version.splitlines()[-1]}", sep="\n")
    return 0
