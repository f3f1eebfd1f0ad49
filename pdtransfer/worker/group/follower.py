"""A follower's side of a group: it joins its leader, and ends when the leader says so or is gone."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from ...errors import ConfigError, WorldError
from .frames import Frame, Join, Joined, Quit, Refuse
from .link import Link, LinkLostError

log = logging.getLogger(__name__)

PATIENCE_S = 1e6  # ranks are started by hand, or load a model: the leader's going is what ends a wait
PAUSE_S, PAUSE_S_MAX = 0.05, 2.0  # between two looks for a leader that is not there yet


async def join(address: tuple[str, int], words: Join, stop: asyncio.Event) -> tuple[Link, Joined] | None:
    """Joins as soon as the leader and all other ranks are there; None when `stop`, or the leader's end, comes first.

    Raises ConfigError when the leader refuses, WorldError when it goes.
    """
    link = await _connect(address, stop)
    if link is None:
        return None
    link.send(words)
    answer = asyncio.create_task(link.read(PATIENCE_S))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((answer, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not answer.done():
        answer.cancel()
        await link.close()
        return None
    joined = _joined(address, answer)
    return None if joined is None else (link, joined)


def _joined(address: tuple[str, int], answer: asyncio.Task[Frame]) -> Joined | None:
    try:
        said = answer.result()
    except LinkLostError as lost:
        raise WorldError(f"the leader at {address[0]}:{address[1]}: {lost}") from None
    if isinstance(said, Refuse):
        raise ConfigError(f"the leader refuses this rank: {said.detail}")
    if isinstance(said, Quit):
        return None
    if not isinstance(said, Joined):
        raise WorldError(f"the leader at {address[0]}:{address[1]} says {type(said).__name__}")
    return said


async def _connect(address: tuple[str, int], stop: asyncio.Event) -> Link | None:
    pause_s = PAUSE_S
    while not stop.is_set():
        try:
            return Link(*await asyncio.open_connection(*address))
        except OSError as error:
            if pause_s == PAUSE_S_MAX:
                log.info("waiting for the leader at %s:%d: %s", *address, error.strerror or error)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
    return None
