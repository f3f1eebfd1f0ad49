"""Mooncake's TransferEngine as a library of engines: P2P handshakes, TCP or RDMA."""

from __future__ import annotations

import os

from ...environment import pip_install
from ...probe import Probe
from ..engines import card
from ..options import Network
from .host import environment, wheel, why_not


class MooncakeLibrary:
    """A Library."""

    name, driver = "mooncake", os.path.join(os.path.dirname(__file__), "driver.py")
    card = card.__file__
    why_not = staticmethod(why_not)
    by_name_alone, dials_itself, open_ports = False, False, "can read and write the arena"

    def reads_pool(self, network: Network) -> bool:
        return network.protocol == "tcp"  # else what is read has to be registered

    def check(self, network: Network) -> None:
        del network  # without an RDMA device its engines use TCP

    def environment(self, network: Network, *, engines: int, host: str) -> dict[str, str]:
        del host
        return environment(network, engines)

    def probe(self) -> Probe:
        return Probe("Mooncake", wheel, pip_install("mooncake"))
