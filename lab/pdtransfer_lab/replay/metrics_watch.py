"""The high water of decode workers' arenas, read from their /metrics while a replay runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import aiohttp

EVERY_S = 0.5
_SAMPLE = re.compile(r"^pdtransfer_slots(_free)?\{([^}]*)\} ([0-9.eE+-]+)$", re.MULTILINE)


def slots_taken(text: str) -> dict[str, tuple[float, float]]:
    """Slots taken and slots, by the labels of a component, from a page of metrics."""
    counts: dict[str, dict[bool, float]] = {}
    for free, labels, value in _SAMPLE.findall(text):
        counts.setdefault(labels, {})[bool(free)] = float(value)
    return {
        labels: (slots[False] - slots[True], slots[False])
        for labels, slots in counts.items()
        if len(slots) == 2 and slots[False]
    }


class MetricsWatch:
    """`high_water` is of the component of one worker that was fullest, None where no worker has been read."""

    def __init__(self, session: aiohttp.ClientSession, endpoints: Sequence[str]) -> None:
        self._session, self._endpoints = session, endpoints
        self.high_water: dict[str, float] | None = None

    async def run(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Reads all workers once; one that does not answer is left out."""
        for endpoint in self._endpoints:
            try:
                async with self._session.get(
                    f"http://{endpoint}/metrics", timeout=aiohttp.ClientTimeout(5)
                ) as response:
                    text = (await response.read()).decode(errors="replace")
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
            for taken, slots in slots_taken(text).values():
                share = round(taken / slots, 4)
                if self.high_water is None or share > self.high_water["share"]:
                    self.high_water = {"tokens": taken, "share": share}
