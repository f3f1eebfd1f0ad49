"""Who belongs to a fleet: workers named by flags, by a file, and by an operator at run time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from ....errors import ConfigError, PDTransferError, WorldError
from ....limits import WORKERS_MAX
from ....wire import split_key
from ...settings.router import RouterConfig
from .roles import Departure, Role
from .status import WorkerStatus


class WorkerSite(Protocol):
    """A router that takes workers in and lets them go. Addresses are as in --prefill and --decode."""

    def roles(self) -> dict[str, Role]:
        """The workers that are here, by address."""
        ...

    def add_worker(self, role: Role, address: str) -> None:
        """Takes a worker in, or keeps one that was drained or removed. Raises ConfigError and WorldError."""
        ...

    def depart_worker(self, address: str, departure: Departure) -> None:
        """Gives a worker nothing new. One that leaves is forgotten once all of it has ended, whatever comes later."""
        ...

    def workers_status(self) -> list[WorkerStatus]:
        """What is known of each worker."""
        ...


log = logging.getLogger(__name__)

ROLES = ("prefill", "decode")
FILE_BYTES_MAX = 4 << 20


@dataclass(slots=True)
class ListedWorkers:
    """The workers that a source names, and why its other entries are not used."""

    workers: dict[str, Role] = field(default_factory=dict[str, Role])
    refused: list[str] = field(default_factory=list[str])


class Membership:
    """Checks changes, and passes them to the router."""

    def __init__(self, config: RouterConfig, site: WorkerSite) -> None:
        self._config, self.site = config, site
        # By source, a file or a name in DNS: what it lists and was taken in, and why the rest was not.
        self._followed: dict[str, dict[str, Role]] = {}
        self._refused: dict[str, dict[str, str]] = {}

    def add(self, role: str, address: str) -> None:
        """Takes a worker in. Raises ConfigError for an invalid one, WorldError for one too many."""
        self.check(role, address)
        self._take(cast("Role", role), address, self.site.roles())

    def _take(self, role: Role, address: str, roles: dict[str, Role]) -> None:
        """`roles` are the site's, as of now."""
        name = split_key(address)[1]
        if roles.get(address, role) != role:
            raise ConfigError(f"worker = {name!r}: is already a {roles[address]} worker of this router")
        if address not in roles and len(roles) >= WORKERS_MAX:
            raise WorldError(f"worker = {name!r}: this router has {len(roles)} workers, which is the limit")
        self.site.add_worker(role, address)
        roles[address] = role
        log.info("%s %s was added", role, name)

    def check(self, role: str, address: str) -> None:
        """Raises ConfigError for a worker that may not be added. It may wait for the resolver of names."""
        if role not in ROLES:
            raise ConfigError(f"role = {role!r}: must be prefill or decode")
        self._config.check_worker(role, address)

    def check_listed(self, source: str, listed: ListedWorkers) -> None:
        """Refuses those that may not be added. It may wait for the resolver of names: a worker that the source has
        brought already is not checked again."""
        before = self._followed.get(source, {})
        for address, role in list(listed.workers.items()):
            try:
                if before.get(address) != role:
                    self.check(role, address)
            except ConfigError as error:
                listed.refused.append(str(error))
                del listed.workers[address]

    def find(self, name: str) -> str:
        """Returns the address of the one worker with this address, with or without its key, or of this node. Raises
        ConfigError where there is none, or more than one."""
        nodes = {worker.address: worker.node for worker in self.site.workers_status()}
        matching = [
            address
            for address in self.site.roles()
            if name in (address, split_key(address)[1], nodes.get(split_key(address)[1]))
        ]
        if len(matching) != 1:
            raise ConfigError(f"worker = {name!r}: {len(matching) or 'no'} workers have this address or name")
        return matching[0]

    def depart(self, name: str, departure: Departure) -> None:
        """Gives a worker no new rooms; one that leaves is forgotten once its rooms have ended. Raises as `find`."""
        self._depart(self.find(name), departure)

    def listed(self, source: str, workers: Mapping[str, Role]) -> bool:
        """Follows a source: takes in what it lists now and did not before, and removes what it lists no more, unless a
        flag or another source names it. Returns whether all of it is followed: else call it again later.

        What was refused is tried again each time. What an operator drained or removed stays so until the source has
        listed it no more. The reason of a refusal is logged once.
        """
        followed, refused = self._followed.get(source, {}), self._refused.get(source, {})
        roles, kept = self.site.roles(), {*self._config.prefill, *self._config.decode}
        kept.update(*(addresses for other, addresses in self._followed.items() if other != source))
        for address, role in followed.items():
            if workers.get(address) != role and address in roles and address not in kept:
                self._depart(address, Departure.LEAVES)
        roles, now, why = self.site.roles(), dict[str, Role](), dict[str, str]()
        for address, role in workers.items():
            if followed.get(address) != role:
                try:
                    self._take(role, address, roles)
                except (ConfigError, WorldError) as error:
                    why[address] = str(error)
                    if refused.get(address) != why[address]:
                        log.error("%s: %s", source, error)
                    continue
            now[address] = role
        self._followed[source], self._refused[source] = now, why
        return not why

    def _depart(self, address: str, departure: Departure) -> None:
        how = "is removed once its rooms have ended" if departure is Departure.LEAVES else "gets no new rooms"
        log.info("worker %s %s", split_key(address)[1], how)
        self.site.depart_worker(address, departure)

    def read(self, path: Path) -> dict[str, Role]:
        """Reads a file of workers: a line each, of a role and an address. Raises ConfigError, with the line. It may
        wait for the resolver of names."""
        try:
            with path.open("rb") as file:
                text = (content := file.read(FILE_BYTES_MAX + 1)).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"workers_file = '{path}': {getattr(error, 'strerror', None) or error}") from None
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"workers_file = '{path}': longer than {FILE_BYTES_MAX} bytes")
        workers: dict[str, Role] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                if len(words) != 2:
                    raise ConfigError("must be a role and an endpoint")
                self.check(*words)
                if words[1] in workers:
                    raise ConfigError(f"{split_key(words[1])[1]!r} is listed twice")
            except ConfigError as error:
                raise ConfigError(f"workers_file = '{path}': line {number}: {error}") from None
            workers[words[1]] = cast("Role", words[0])
        return workers


def log_unchanged(error: Exception, logged: str, source: str = "") -> str:
    """Logs why a source could not be followed, unless that is what was `logged` last; with the traceback where it is
    our bug. Returns it."""
    bug = None if isinstance(error, PDTransferError) else error
    why = f"{source}the workers are unchanged: {error if bug is None else f'{type(error).__name__}: {error}'}"
    if why != logged:
        log.error("%s", why, exc_info=bug)
    return why
