"""Probes of this host's GPUs: driver, kernels, PCIe links and MPS."""

from __future__ import annotations

import shutil
from pathlib import Path

from ....environment import pip_install
from ....kernels import UnusableError
from ....kernels.compiled import KERNELS, compiler, is_cached
from ....kernels.driver import count
from ....kernels.gpu import gpu_at
from ....probe import Seen, missing, names, ok, read, warn, within

_PCI = "/sys/bus/pci/devices"
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")  # a VGA or a 3D controller
_MPS = "nvidia-cuda-mps"  # /proc truncates a process's name to 15 characters
_MPS_PIPE = "/tmp/nvidia-mps/control"  # noqa: S108 (looked for, not made)
_NO_CARD = "the CUDA bindings see no GPU: copies run on the CPU"


def cards(_root: Path) -> Seen:
    """Reports if kernels can run: a GPU needs the bindings and a compiler."""
    number = count()
    if not number:
        return ok(_NO_CARD)
    named = ", ".join(_architectures(number))
    try:
        return ok(f"{number} x {named}, {compiler().version.splitlines()[-1]}")
    except UnusableError as error:
        return warn(f"{number} x {named}, and {error}", pip_install("cuda"))


def kernels(_root: Path) -> Seen:
    """Reports if a first transfer has to wait for a compiler."""
    number = count()
    if not number:
        return ok("no GPU: none is needed")
    wanted = [(kernel, architecture) for architecture in _architectures(number) for kernel in KERNELS]
    lacking = [f"{kernel} for {architecture}" for kernel, architecture in wanted if not is_cached(kernel, architecture)]
    if not lacking:
        return ok(f"{len(wanted)} in the cache")
    return warn(f"to be compiled at their first use: {', '.join(lacking)}", "pdtransfer kernels build")


def _architectures(number: int) -> list[str]:
    return sorted({gpu_at(ordinal).architecture for ordinal in range(number)})


def links(root: Path) -> Seen:
    """Each GPU's PCIe width, speed and NUMA node, which limit the rate of KV."""
    gpus: list[str] = []
    narrow: list[str] = []
    for address in names(within(root, _PCI)):
        folder = within(root, f"{_PCI}/{address}")
        if read(folder / "vendor") != _NVIDIA or not read(folder / "class").startswith(_DISPLAYS):
            continue
        width, most = read(folder / "current_link_width"), read(folder / "max_link_width")
        speed = read(folder / "current_link_speed").removesuffix(" PCIe")
        node = read(folder / "numa_node")
        gpus.append(
            f"{address} {speed or 'unknown speed'} x{width or '?'} (of x{most or '?'})"
            + (f", node {node}" if node.isdecimal() else "")
        )
        if width.isdecimal() and most.isdecimal() and int(width) < int(most):
            narrow.append(address)
    if not gpus:
        return ok("no NVIDIA GPU on the PCIe bus" if names(within(root, _PCI)) else "no PCIe bus visible")
    if narrow:
        text = f"{'; '.join(gpus)}: fewer lanes than supported"
        return warn(text, f"lspci -vv -s {narrow[0]} | grep LnkSta; then another slot, or the riser")
    return ok("; ".join(gpus))


def mps(root: Path) -> Seen:
    """MPS must not run: there, a dead process's launches continue in the server, so its death proves nothing."""
    running = [
        pid
        for pid in names(within(root, "/proc"))
        if pid.isdecimal() and read(within(root, f"/proc/{pid}/comm")).startswith(_MPS)
    ]
    pipe = within(root, _MPS_PIPE)
    if running or pipe.exists():
        where = f"process {', '.join(running)}" if running else f"its pipe is at {_MPS_PIPE}"
        text = f"runs ({where}): a writer's death no longer proves that its GPU has stopped"
        return missing(text, "echo quit | nvidia-cuda-mps-control")
    return ok("does not run" if shutil.which("nvidia-cuda-mps-control") else "not installed")
