"""What changes a fleet while its router runs: the watched file of workers, names in DNS, and the admin API."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...settings.router import RouterConfig
from .membership import Membership, WorkerSite, log_unchanged

if TYPE_CHECKING:
    from .admin import AdminApi
    from .dns_workers import DnsFollower

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the file is looked at
RETRY_S = 10.0  # until what could not be followed is tried again

_Signature = tuple[int, int, int, int] | None


class FleetChanges:
    """Runs beside a router: `open` once it serves, then `close`."""

    def __init__(self, config: RouterConfig, site: WorkerSite) -> None:
        """Raises ConfigError for a file of workers, a name in DNS or a token that is invalid now."""
        self._config, self._membership = config, Membership(config, site)
        self._admin: AdminApi | None = None
        if config.admin_token is not None:
            from .admin import AdminApi

            self._admin = AdminApi(self._membership, config.admin_token, allowed_hosts=config.allowed_hosts)
        if config.workers_file is not None:
            self._membership.read(config.workers_file)
        self._dns: DnsFollower | None = None
        if config.prefill_dns or config.decode_dns:
            from .dns_workers import DnsFollower

            self._dns = DnsFollower(config, self._membership)
        self._watching: list[asyncio.Task[None]] = []

    async def open(self) -> str:
        """Takes in the workers of the file, follows it and DNS; returns where the admin API listens, empty for nowhere.
        Raises WorldError."""
        if self._config.workers_file is not None:
            path = self._config.workers_file
            seen = _signature(path)
            followed = self._membership.listed(str(path), await asyncio.to_thread(self._membership.read, path))
            self._watching.append(asyncio.create_task(self._watch(path, seen, followed)))
        if self._dns is not None:
            self._watching += self._dns.start()
        if self._admin is None:
            return ""
        address = await self._admin.open(self._config.admin)
        log.info("the admin API listens on %s", address)
        return address

    async def close(self) -> None:
        """Changes nothing more."""
        for task in self._watching:
            task.cancel()
        if self._admin is not None:
            await self._admin.close()

    async def _watch(self, path: Path, seen: _Signature, followed: bool) -> None:
        """Follows the file. One that cannot be read changes nothing. What could not be followed is tried again, since
        names begin to resolve and places become free."""
        logged, retry_at = "", _later(followed)
        while True:
            await asyncio.sleep(LOOK_S)
            now = _signature(path)
            if now == seen and time.monotonic() < retry_at:
                continue
            changed, seen, why = now != seen, now, ""
            try:
                workers = await asyncio.to_thread(self._membership.read, path)
                followed = self._membership.listed(str(path), workers)
                if changed:
                    log.info("%s: %d workers", path, len(workers))
            except Exception as error:  # noqa: BLE001 (it is followed for as long as the router runs)
                why, followed = log_unchanged(error, logged), False
            logged, retry_at = why, _later(followed)


def _later(followed: bool) -> float:
    return math.inf if followed else time.monotonic() + RETRY_S


def _signature(path: Path) -> _Signature:
    """What differs between two versions of a file, also where another one takes its place; None without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size
