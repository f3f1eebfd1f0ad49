"""A GPU's memory as it is given to a process of engines, and whether a library's engines can send and receive it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from ...memory.cuda_ipc import Handle
from ..options import Network
from . import card_probe, child
from .library import Library

_PROBE_SECONDS = 30.0  # a CUDA context takes seconds on a host of many GPUs
_TEXT_BYTES_MAX = 300
_USED_BYTES_MAX = 4 << 40  # of addresses that are not used again: those of the last sessions

log = logging.getLogger(__name__)

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """Memory of a GPU that a process of engines opens. `place` is its first byte as offsets of components count it;
    `used` are the addresses where no process may have it, first and end each."""

    handle: Handle
    place: int = 0
    used: tuple[Span, ...] = ()

    @property
    def packet(self) -> bytes:
        """As the process reads it."""
        handle = self.handle
        named = child.CARD.pack(handle.gpu, handle.handle, handle.offset, handle.byte_count, self.place)
        return named + b"".join(child.SPAN.pack(*span) for span in self.used)

    @property
    def environment(self) -> dict[str, str]:
        """What its process needs besides: a library's runtime is to have a context of this GPU alone."""
        return {"CUDA_VISIBLE_DEVICES": f"GPU-{UUID(bytes=self.handle.gpu)}"}


class CardUse:
    """Decides if engines get a GPU's memory: it is tried out once, from now on, off the loop. Make it on the loop's
    thread."""

    def __init__(self, library: Library, network: Network, find: Callable[[], Handle | None], *, what: str) -> None:
        """`find` is called in a worker thread, and returns None for no such memory. `what` is said of the memory where
        it is not reached, and how its rows go then."""
        self._library, self._network, self._find, self._what = library, network, find, what
        self._found = asyncio.get_running_loop().run_in_executor(None, self._tried) if library.card else None

    async def handle(self) -> Handle | None:
        """The memory that engines read and write; None for none."""
        if self._found is None:
            return None
        try:
            return await asyncio.wait_for(asyncio.shield(self._found), 2 * _PROBE_SECONDS)
        except TimeoutError:  # a process that waits for a GPU that is lost cannot be ended
            self._found = None
            self.report(f"a trial could not be ended within {2 * _PROBE_SECONDS:g} s")
            return None

    def report(self, reason: str) -> None:
        """Logs why it is not reached."""
        log.warning("%s: engines of %s cannot reach the GPU's memory: %s", self._what, self._library.name, reason)

    def _tried(self) -> Handle | None:
        try:
            handle = self._find()
            if handle is None or handle.kind != "gpu":
                return None
            if not (reason := why_no_card(self._library, self._network, handle)):
                log.info("engines of %s reach the memory of GPU %s", self._library.name, UUID(bytes=handle.gpu))
                return handle
        except Exception as error:  # noqa: BLE001 (whatever it is, rows go the other way)
            reason = str(error) or type(error).__name__
        self.report(reason)
        return None


def why_no_card(library: Library, network: Network, handle: Handle) -> str:
    """Why engines of this library cannot read and write the memory of that GPU. Two of them show it by some bytes, in a
    process of their own. A build without CUDA may crash. Empty where they can."""
    command = [sys.executable, "-P", card_probe.__file__, library.driver, library.card, handle.gpu.hex()]
    environment = library.environment(network, engines=1, host="127.0.0.1")
    try:
        tried = subprocess.run(  # noqa: S603 (our own file)
            [*command, network.protocol, *map(str, network.ports)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS,
            env=environment | CardMemory(handle=handle).environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"a trial did not end within {_PROBE_SECONDS:g} s"
    if not tried.returncode:
        return ""
    *before, last = tried.stderr.strip().splitlines() or [f"a trial ended with status {tried.returncode}"]
    logged = [words for line in before if (words := line.partition("] ")[2])]
    return (f"{last} ({logged[-1]})" if logged else last)[:_TEXT_BYTES_MAX]


def remembered(used: list[Span], span: Span) -> list[Span]:
    """The addresses that are not to be used again, with those of one more session: the oldest ones go."""
    kept, left = [span], _USED_BYTES_MAX - (span[1] - span[0])
    for older in reversed(used):
        left -= older[1] - older[0]
        if left < 0 or len(kept) * child.SPAN.size + child.CARD.size >= child.CARD_PACKET_BYTES_MAX:
            break
        kept.insert(0, older)
    return kept
