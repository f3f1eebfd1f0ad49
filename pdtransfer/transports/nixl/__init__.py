"""NIXL's agent as a library of engines: its UCX backend, by TCP or RDMA.

Over TCP, UCX checks neither the address nor a key of what a peer writes and reads: SECURITY.md.
"""

from __future__ import annotations

import os

from ...probe import Probe
from ..options import Network
from .host import INSTALL, check, environment, package, why_not


class NixlLibrary:
    """A Library."""

    name, driver = "nixl", os.path.join(os.path.dirname(__file__), "driver.py")
    card = ""  # no memory but the arena, as below
    why_not, check = staticmethod(why_not), staticmethod(check)
    by_name_alone = True  # over TCP, UCX writes and reads any address of the process that a peer names
    dials_itself = True  # each agent has a connection to itself, for copies that nobody here asks for
    open_ports = "can read and write the arena, and run code as this user"

    def reads_pool(self, network: Network) -> bool:
        del network
        return False  # for the same reason: its process has no memory but the arena, or the send ring

    def environment(self, network: Network, *, engines: int, host: str) -> dict[str, str]:
        del engines
        return environment(network, host=host)

    def probe(self) -> Probe:
        return Probe("NIXL", package, INSTALL)
