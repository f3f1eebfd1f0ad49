"""What a library of engines brings: an engine in a module that its process loads, and what that process needs."""

from __future__ import annotations

from typing import Protocol

from ...probe import Probe
from ..options import Network


class Library(Protocol):
    """One library, on either side of a session."""

    @property
    def name(self) -> str:
        """That of the transport: Transport.name."""
        ...

    @property
    def driver(self) -> str:
        """The path of a module whose `ENGINE` is a class as `child.Engine`. It may import the library and the standard
        library, and nothing of this package."""
        ...

    @property
    def card(self) -> str:
        """The path of a module whose `CARD` opens a GPU's memory for an engine, as `card.CudaCard` does; empty where no
        engine of this library is given one. As the driver's module it imports nothing of this package."""
        ...

    @property
    def by_name_alone(self) -> bool:
        """As Transport.by_name_alone."""
        ...

    @property
    def open_ports(self) -> str:
        """What a host can do that reaches decode's ports, for a warning: "can ..."."""
        ...

    @property
    def dials_itself(self) -> bool:
        """True if an engine connects to its own ports as it starts to serve: a firewall has to let it."""
        ...

    def reads_pool(self, network: Network) -> bool:
        """True if an engine that writes may have the pool mapped, and send from it. No host can read through the
        engine's ports what is not registered, and it sends from what is not."""
        ...

    def why_not(self) -> str:
        """As Transport.why_not."""
        ...

    def check(self, network: Network) -> None:
        """Raises ConfigError where no engine of it could start under these options, though `why_not` is empty."""
        ...

    def environment(self, network: Network, *, engines: int, host: str) -> dict[str, str]:
        """The whole environment of a process of this many engines. `host` is where its peer dials it, for a sender
        where it dials its peer."""
        ...

    def probe(self) -> Probe:
        """What doctor tries: whether it is installed, and loads."""
        ...
