"""What changes a fleet while its router runs: the watched file of workers, and the admin API."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from pathlib import Path

from ..config.config import RouterConfig
from ..errors import ConfigError
from .admin import AdminApi
from .membership import Membership, WorkerSite

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the file is looked at
RETRY_S = 10.0  # until what could not be followed is tried again

_Signature = tuple[int, int, int, int] | None


class FleetChanges:
    """Runs beside a router: `open` once it serves, then `close`."""

    def __init__(self, config: RouterConfig, site: WorkerSite) -> None:
        """Raises ConfigError for a file of workers or a token that is invalid now."""
        self._config, self._membership = config, Membership(config, site)
        self._admin: AdminApi | None = None
        if config.admin_token is not None:
            self._admin = AdminApi(self._membership, config.admin_token)
        if config.workers_file is not None:
            self._membership.read(config.workers_file)
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> str:
        """Takes in the workers of the file, and watches it; returns where the admin API listens, empty without one.
        Raises WorldError."""
        if self._config.workers_file is not None:
            path = self._config.workers_file
            seen = _signature(path)
            followed = self._membership.listed(str(path), await asyncio.to_thread(self._membership.read, path))
            self._watching = asyncio.create_task(self._watch(path, seen, followed))
        if self._admin is None:
            return ""
        address = await self._admin.open(self._config.admin)
        log.info("the admin API listens on %s", address)
        return address

    async def close(self) -> None:
        """Changes nothing more."""
        if self._watching is not None:
            self._watching.cancel()
        if self._admin is not None:
            await self._admin.close()

    async def _watch(self, path: Path, seen: _Signature, followed: bool) -> None:
        """Follows the file. One that cannot be read changes nothing: the reason is logged once. What could not be
        followed is tried again, since names begin to resolve and places become free."""
        said, retry_at = "", _later(followed)
        while True:
            await asyncio.sleep(LOOK_S)
            now = _signature(path)
            if now == seen and time.monotonic() < retry_at:
                continue
            why, changed, seen = "", now != seen, now
            try:
                workers = await asyncio.to_thread(self._membership.read, path)
                followed = self._membership.listed(str(path), workers)
                if changed:
                    log.info("%s: %d workers", path, len(workers))
            except ConfigError as error:
                why, followed = str(error), False
            except Exception as error:  # the file must be followed for as long as the router runs
                why, followed = f"{type(error).__name__}: {error}", False
                if why != said:
                    log.exception("%s: not followed", path)
            if why and why != said:
                log.error("the workers are unchanged: %s", why)
            said, retry_at = why, _later(followed)


def _later(followed: bool) -> float:
    return math.inf if followed else time.monotonic() + RETRY_S


def _signature(path: Path) -> _Signature:
    """What differs between two versions of a file, also where another one takes its place; None without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size
