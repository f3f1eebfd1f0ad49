"""What changes a fleet while its router runs: the watched file of workers, and the admin API."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from ..config.config import RouterConfig
from ..errors import ConfigError
from .admin import AdminApi
from .membership import Membership, WorkerSite

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the file is looked at

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
            seen = _signature(self._config.workers_file)
            self._membership.listed(self._membership.read(self._config.workers_file))
            self._watching = asyncio.create_task(self._watch(self._config.workers_file, seen))
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

    async def _watch(self, path: Path, seen: _Signature) -> None:
        """Follows the file. One that cannot be read changes nothing: the reason is logged once."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = _signature(path)
            if now == seen:
                continue
            seen = now
            try:
                workers = self._membership.read(path)
            except ConfigError as error:
                log.error("the workers are unchanged: %s", error)
                continue
            self._membership.listed(workers)
            log.info("%s: %d workers", path, len(workers))


def _signature(path: Path) -> _Signature:
    """What differs between two versions of a file, also where another one takes its place; None without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size
