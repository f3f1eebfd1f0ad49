"""Shared memory on one host: prefill maps decode's arena and copies into it; the fence is a lock its mapping holds.

For each writer the arena's memfd is reopened, an open-file-description lock is taken on a byte of that writer's own.
That descriptor is handed over and closed here. The kernel drops the lock with the last mapping and descriptor of it,
whichever process forked, froze or was killed. Only from then on no process can write.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...memory.arena_memory import ArenaMemory
from ...probe import Probe
from ..base import ArenaTransport, Components, LostArena, WriterCalls, WriterTransport
from ..gpu_launcher import WriterGpu
from ..options import ArenaOptions, Network, WriterOptions
from .arena import ShmArena
from .writer import ShmWriter


class ShmTransport:
    """A Transport. Every host has it; doctor's probes of the kernel are about it."""

    name, any_host, listens_everywhere, by_name_alone = "shm", False, False, False

    def why_not(self) -> str:
        return ""

    def check(self, network: Network) -> None:
        pass

    def arena(self, memory: ArenaMemory, options: ArenaOptions, *, hbm_direct: bool, lost: LostArena) -> ArenaTransport:
        del lost  # a hand-over ends with its lock alone
        return ShmArena(
            memory, directory=options.socket_directory, hbm_direct=hbm_direct, keep_line=options.network.keep_line
        )

    def writer(
        self, components: Components, options: WriterOptions, gpu: WriterGpu | None, calls: WriterCalls
    ) -> WriterTransport:
        # No session is lost: this process is the only writer.
        return ShmWriter(components, options, calls.wrote, gpu=gpu, wake_hint=calls.wake_hint)

    def probes(self, ports: Sequence[tuple[int, int]]) -> Sequence[Probe]:
        del ports
        return ()
