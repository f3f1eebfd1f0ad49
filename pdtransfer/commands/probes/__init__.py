"""What doctor tries on this host, in the order of the house: Python first, the network last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...probe import KERNEL, VENV, Probe
from ...probe import Seen as Seen
from ...probe import State as State
from ...probe import missing as missing
from ...probe import ok as ok
from ...probe import warn as warn
from . import builds, cards, host, kernel, network

PROBES = (
    Probe("python", builds.python, required=True),
    Probe("packages", builds.packages, VENV, required=True),
    Probe("torch", builds.torch, VENV, required=True),
    Probe("native copy", builds.copy, VENV),
    Probe("kernel cache", builds.cache, "export PDTRANSFER_CACHE=<a directory of this user>"),
    Probe("cards", cards.cards, "nvidia-smi says what the driver sees"),
    Probe("card links", cards.links, "lspci -vv"),
    Probe("card kernels", cards.kernels, "pdtransfer kernels build"),
    Probe("MPS", cards.mps, "pgrep -l nvidia-cuda-mps"),
    Probe("sealed memfd", kernel.memfd, KERNEL, required=True),
    Probe("fence lock", kernel.lock, KERNEL, required=True),
    Probe("descriptor passing", kernel.unix_socket, KERNEL, required=True),
    Probe("boot id", kernel.boot_id, "mount -t proc proc /proc", required=True),
    Probe("memory", host.memory, "mount -t proc proc /proc"),
    Probe("huge pages", host.huge_pages, "mount -t sysfs sysfs /sys"),
    Probe("NUMA", host.numa, "mount -t sysfs sysfs /sys"),
    Probe("shared memory mount", host.shm, "mount -t tmpfs tmpfs /dev/shm"),
    Probe("memlock limit", host.memlock, "ulimit -l"),
    Probe("open files limit", host.descriptors, "ulimit -n"),
    Probe("clock", host.clock, "mount -t sysfs sysfs /sys"),
    Probe("CURVE", builds.curve, VENV),
    Probe("Mooncake", builds.mooncake, "pip install 'pdtransfer[mooncake]'"),
    Probe("RDMA", network.rdma, "ibv_devinfo"),
    Probe("addresses", network.addresses, "ip address"),
    Probe("ports", network.ports, "ss -ltnp"),
    Probe("engine ports", network.engine_ports, "sysctl net.ipv4.ip_local_port_range"),
    Probe("transport", network.transport, "pip install 'pdtransfer[mooncake]'"),
)


def told(probes: Sequence[Probe], transport_ports: Sequence[str]) -> list[Probe]:
    """The same with what daemons of this host are told in place of what they do by default."""
    look = partial(network.engine_ports, given=tuple(transport_ports))
    return [replace(each, look=look) if each.look is network.engine_ports else each for each in probes]
