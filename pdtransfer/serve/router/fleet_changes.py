"""What changes a fleet while its router runs: the watched file of workers, names in DNS, and the admin API."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from pathlib import Path

from ...bus.keys import AllowList
from ...errors import ConfigError, PDTransferError
from ..settings.config import RouterConfig
from . import dns_workers
from .admin import AdminApi
from .dns_workers import Answered, Answers, DnsName, DnsResolver, Found, workers_of
from .membership import Membership, WorkerSite

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
            self._admin = AdminApi(self._membership, config.admin_token, allowed_hosts=config.allowed_hosts)
        if config.workers_file is not None:
            self._membership.read(config.workers_file)
        self._names = [DnsName.parse("prefill", each) for each in config.prefill_dns]
        self._names += [DnsName.parse("decode", each) for each in config.decode_dns]
        for name in self._names:
            if name.port and config.key is not None:
                raise ConfigError(
                    f"{name.role}_dns = '{name}': an address names no worker, and with keys a worker's key is that of "
                    "its name on the allow-list: take srv://NAME, whose targets begin with those names"
                )
        self._answers: Answers | None = DnsResolver(config.dns_server) if self._names else None
        self._watching: list[asyncio.Task[None]] = []

    async def open(self) -> str:
        """Takes in the workers of the file, follows it and DNS; returns where the admin API listens, empty for nowhere.
        Raises WorldError."""
        if self._config.workers_file is not None:
            path = self._config.workers_file
            seen = _signature(path)
            followed = self._membership.listed(str(path), await asyncio.to_thread(self._membership.read, path))
            self._watching.append(asyncio.create_task(self._watch(path, seen, followed)))
        if self._answers is not None:
            self._watching += [asyncio.create_task(self._follow(each, self._answers)) for each in self._names]
        if self._admin is None:
            return ""
        address = await self._admin.open(self._config.admin)
        log.info("the admin API listens on %s", address)
        return address

    async def close(self) -> None:
        """Changes nothing more."""
        for each in self._watching:
            each.cancel()
        if self._admin is not None:
            await self._admin.close()

    async def _watch(self, path: Path, seen: _Signature, followed: bool) -> None:
        """Follows the file. One that cannot be read changes nothing. What could not be followed is tried again, since
        names begin to resolve and places become free."""
        said, retry_at = "", _later(followed)
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
                why, followed = _unchanged(error), False
                _say(why, said, error)
            said, retry_at = why, _later(followed)

    async def _follow(self, name: DnsName, answers: Answers) -> None:
        """Follows a name in DNS. Where no resolver answers, the workers stay as they are."""
        source, said = f"{name.role} {name}", ""
        while True:
            wait_s, why = dns_workers.TTL_S_MIN, ""
            try:
                answered = await answers.ask(name)
                found = await asyncio.to_thread(self._found, name, answered)
                self._membership.listed(source, found.workers)
                wait_s, why = answered.ttl_s, "; ".join(found.refused)
                if why and why != said:
                    log.error("%s: %s", source, why)
                elif said and not why:
                    log.info("%s: %d workers", source, len(found.workers))
            except Exception as error:  # noqa: BLE001 (it is followed for as long as the router runs)
                why = f"{source}: {_unchanged(error)}"
                _say(why, said, error)
            said = why
            await asyncio.sleep(wait_s)

    def _found(self, name: DnsName, answered: Answered) -> Found:
        """Reads the allow-list anew: a key that the router has not yet read by itself is refused, and tried again."""
        config = self._config
        allowed = AllowList.read(config.allow) if config.allow is not None and config.key is not None else None
        found = workers_of(name, answered.places, allowed=allowed, scheme="http" if config.relays else "tcp")
        return self._membership.checked(f"{name.role} {name}", found)


def _unchanged(error: Exception) -> str:
    named = str(error) if isinstance(error, PDTransferError) else f"{type(error).__name__}: {error}"
    return f"the workers are unchanged: {named}"


def _say(why: str, said: str, error: Exception) -> None:
    """Logs a reason once; with its traceback where it is our bug."""
    if why != said:
        log.error("%s", why, exc_info=None if isinstance(error, PDTransferError) else error)


def _later(followed: bool) -> float:
    return math.inf if followed else time.monotonic() + RETRY_S


def _signature(path: Path) -> _Signature:
    """What differs between two versions of a file, also where another one takes its place; None without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size
