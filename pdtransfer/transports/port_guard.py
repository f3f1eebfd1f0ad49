"""What closes the ports of a node's transports to all but the peer of each session; None where nothing does.

A transport whose engines check no keys listens before it can report its ports. So a session's engines first report
their ports, then the ports are closed to all but the session's peer, and only then do they serve memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol


class GuardedPorts(Protocol):
    """Ports that are open to one peer alone, until `release`."""

    @property
    def release(self) -> Callable[[], None]:
        """To be called once the engines behind the ports are dead."""
        ...

    @property
    def opened(self) -> Callable[[], Awaitable[None]]:
        """To be called once the engines serve: from then on those that dial themselves do so no more. Raises
        TransportError where the ports stay open to this host."""
        ...


class PortGuard(Protocol):
    """Used on the loop's thread. A peer has its name on the bus; the address of its connection is admitted."""

    @property
    def peers_only(self) -> bool:
        """True if only hosts of peers are admitted, and a session whose peer may come from another address than that of
        its connection is to be spared."""
        ...

    def meet(self, address_of: Callable[[str], str]) -> None:
        """Takes the function that returns the address of a peer's connection, empty for none."""
        ...

    def moved(self, peer: str) -> None:
        """A peer has connected, perhaps from another address than before."""
        ...

    def expect(self, session: int, peer: str, *, spared: str = "") -> None:
        """The session belongs to this peer, and its engines are going to listen. `spared`: why its ports stay open to
        every host."""
        ...

    def forget(self, session: int) -> None:
        """No more engines of the session are going to listen."""
        ...

    async def guard(
        self, session: int, ports: Sequence[int], end: Callable[[], None], *, dials_itself: bool = False
    ) -> GuardedPorts:
        """Closes these ports to all but the session's peer, and until `opened` this host, where an engine
        `dials_itself`; `end` is called where the rules are lost. Raises TransportError where that cannot be done:
        nothing may be served then."""
        ...
