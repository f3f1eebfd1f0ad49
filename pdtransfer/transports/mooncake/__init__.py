"""Mooncake's TransferEngine, for arenas of other hosts: a process of engines for each session, on either side.

No return code of the engine proves that a write has stopped. The death of decode's process does: it alone has the arena
registered, and what it has not copied by then is in sockets that are gone with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...memory.arena_memory import ArenaMemory
from ...probe import Probe
from ..base import ArenaTransport, Components, LostArena, LostWriter, WakeHint, WriterTransport, Wrote
from ..options import ArenaOptions, Network, WriterOptions
from .settings import check_host, why_not

if TYPE_CHECKING:
    from ..gpu_launcher import WriterGpu


class MooncakeTransport:
    """A Transport."""

    name, any_host, listens_everywhere = "mooncake", True, True

    def why_not(self) -> str:
        return why_not()

    def check(self, network: Network) -> None:
        check_host(network.host)

    def arena(self, memory: ArenaMemory, options: ArenaOptions, *, hbm_direct: bool, lost: LostArena) -> ArenaTransport:
        from .arena import MooncakeArena

        del hbm_direct  # all rows land in the arena
        return MooncakeArena(memory, options.network, lost=lost)

    def writer(
        self,
        components: Components,
        options: WriterOptions,
        *,
        gpu: WriterGpu | None,
        wrote: Wrote,
        lost: LostWriter,
        wake_hint: WakeHint,
    ) -> WriterTransport:
        from .writer import MooncakeWriter

        del wake_hint  # its writes wait for no gate
        return MooncakeWriter(components, options, wrote, gpu=gpu, lost=lost)

    def probes(self, ports: Sequence[tuple[int, int]]) -> Sequence[Probe]:
        from .probes import probes

        return probes(ports)
