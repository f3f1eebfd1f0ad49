"""What a daemon reports of itself in each Pong to its routers, for people who watch the fleet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...client.decode_node import DecodeNode
from ...client.prefill_node import PrefillNode
from ...errors import SUCCESSES, Cause
from ...handoff.tables import Word
from ...limits import TALLIES_MAX
from ...wire import End, Tally, WorkerFigures
from ..engine_api import HotFigures


@dataclass(slots=True, eq=False)
class DaemonTotals:
    """Counts since the start of one daemon."""

    began_s: float = field(default_factory=time.monotonic)
    rooms_done: int = 0
    rooms_failed: int = 0
    rooms_cancelled: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    copy_us: int = 0

    def ended(self, end: End) -> None:
        """Counts a room that has ended."""
        if end.reason in SUCCESSES:
            self.rooms_done += 1
        elif end.reason == Cause.ABORTED.value:
            self.rooms_cancelled += 1
        else:
            self.rooms_failed += 1

    def landed(self, kv_bytes: int, *, tokens: int = 0, copy_us: int = 0) -> None:
        """Counts what one rank wrote or received of a room that has landed there."""
        self.kv_bytes += kv_bytes
        self.tokens += tokens
        self.copy_us += copy_us

    def _figures(self, node: PrefillNode | DecodeNode, states: Iterable[Word]) -> WorkerFigures:
        rooms = Counter(str(state.value) for state in states)
        sessions = {name: count for name, count in node.transport.counts.items() if count}
        return WorkerFigures(
            uptime_ms=int((time.monotonic() - self.began_s) * 1e3),
            rooms=_tallies(rooms),
            sessions=_tallies(sessions),
            rooms_done=self.rooms_done,
            rooms_failed=self.rooms_failed,
            rooms_cancelled=self.rooms_cancelled,
            tokens=self.tokens,
            kv_bytes=self.kv_bytes,
            copy_us=self.copy_us,
        )

    def prefill_figures(self, node: PrefillNode) -> WorkerFigures:
        """The figures of a prefill daemon now."""
        return self._figures(node, (room.state for room in node.core.rooms.values()))

    def decode_figures(self, node: DecodeNode, hot: HotFigures | None) -> WorkerFigures:
        """The figures of a decode daemon now; `hot` is None where it takes no HiSparse requests."""
        core, hot = node.core, hot or HotFigures()
        return replace(
            self._figures(node, (room.state for room in core.rooms.values())),
            quarantined_bytes=core.leases.quarantined_bytes,
            prefix_queried_tokens=core.cache.queried_tokens,
            prefix_hit_tokens=core.cache.hit_tokens,
            hot_hits=hot.hits,
            hot_misses=hot.misses,
            swapped_bytes=hot.swapped_bytes,
            hisparse_running=hot.running,
            hisparse_waiting=hot.waiting,
        )


def _tallies(counts: dict[str, int]) -> tuple[Tally, ...]:
    return tuple(Tally(name, count) for name, count in sorted(counts.items())[:TALLIES_MAX])
