"""Engines of a library, for arenas of other hosts: a process of engines for each session, on either side.

No return code of an engine proves that a write has stopped. The death of decode's process does: it alone has the arena
registered, and what it has not copied by then is in sockets that are gone with it. A Library brings what is specific to
one, above all the `ENGINE` of its driver; two sides of a session have the same library.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...memory.arena_memory import ArenaMemory
from ...probe import Probe
from ..base import ArenaTransport, Components, LostArena, WriterCalls, WriterTransport
from ..gpu_launcher import WriterGpu
from ..options import ArenaOptions, Network, WriterOptions
from .library import Library
from .settings import check_host


class EngineTransport:
    """A Transport."""

    any_host, listens_everywhere = True, True

    def __init__(self, library: Library) -> None:
        self.name, self.by_name_alone, self._library = library.name, library.by_name_alone, library

    def why_not(self) -> str:
        return self._library.why_not()

    def check(self, network: Network) -> None:
        check_host(self.name, network)
        self._library.check(network)

    def arena(self, memory: ArenaMemory, options: ArenaOptions, *, hbm_direct: bool, lost: LostArena) -> ArenaTransport:
        from .arena import EngineArena

        return EngineArena(self._library, memory, options.network, hbm_direct=hbm_direct, lost=lost)

    def writer(
        self, components: Components, options: WriterOptions, gpu: WriterGpu | None, calls: WriterCalls
    ) -> WriterTransport:
        from .writer import EngineWriter

        # No wake_hint: its writes wait for no gate.
        return EngineWriter(self._library, components, options, calls.wrote, gpu=gpu, lost=calls.lost)

    def probes(self, ports: Sequence[tuple[int, int]]) -> Sequence[Probe]:
        from .probes import engine_ports

        look = partial(engine_ports, ranges=ports)
        return self._library.probe(), Probe("engine ports", look, "sysctl net.ipv4.ip_local_port_range")
