"""Workers found by a name in DNS: dns://NAME:PORT, a worker at each address, and srv://NAME, one for each SRV record.

With keys a worker is what it proves to be, so DNS is not trusted. The first label of an SRV record's target is the
worker's name on this node's allow-list. The key of that name has to be at the other end. An address has no such name.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ....bus.keys import AllowList, address_of, is_literal
from ....errors import ConfigError, WorldError, missing_extra
from ....limits import WORKERS_MAX
from ...settings.router import RouterConfig
from .membership import ListedWorkers, Membership, log_unchanged
from .roles import Role

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.resolver import Answer

log = logging.getLogger(__name__)

ASK_S = 5.0  # how long a question may take, with all its repetitions
TTL_S_MIN, TTL_S_MAX = 5.0, 60.0  # bounds of the time until the next question, whatever the answer's TTL
_PORT = 53
_TARGET = re.compile(r"[0-9A-Za-z._-]{1,253}")


@dataclass(frozen=True, slots=True)
class DnsName:
    """What is asked for: addresses of a host, whose workers listen on `port`, or SRV records where that is 0."""

    role: Role
    name: str
    port: int = 0

    @classmethod
    def parse(cls, role: Role, text: str) -> DnsName:
        """Parses dns://NAME:PORT or srv://NAME. Raises ConfigError."""
        if match := re.fullmatch(r"srv://([0-9A-Za-z._-]{1,253})", text):
            return cls(role, match[1])
        match = re.fullmatch(r"dns://([0-9A-Za-z._-]{1,253}):([1-9][0-9]{0,4})", text)
        if match is None or int(match[2]) > 0xFFFF:
            raise ConfigError(f"{role}_dns = {text[:300]!r}: must be dns://NAME:PORT or srv://NAME")
        return cls(role, match[1], int(match[2]))

    def __str__(self) -> str:
        return f"dns://{self.name}:{self.port}" if self.port else f"srv://{self.name}"


HostPort: TypeAlias = tuple[str, int]
"""Where a worker listens, by one record: an address or an SRV record's target, and a port."""


def workers_of(
    name: DnsName, targets: Sequence[HostPort], *, allowed: AllowList | None, scheme: str = "tcp"
) -> ListedWorkers:
    """The workers with these addresses, as --prefill and --decode name them; with an allow-list each with its key."""
    result, keys = ListedWorkers(), {} if allowed is None else {of: key for key, of in allowed.names.items()}
    for host, port in targets[:WORKERS_MAX]:
        if not _TARGET.fullmatch(host) and not is_literal(host):
            result.refused.append(f"{host[:64]!r} is not a host name")
            continue
        address = address_of(host, port).replace("tcp", scheme, 1)
        if allowed is not None:
            label = host.partition(".")[0]
            if (key := keys.get(label)) is None or allowed.why_not(key, name.role):
                result.refused.append(f"{address}: the allow-list has no {name.role} named {label!r}")
                continue
            address = f"{key}@{address}"
        result.workers[address] = name.role
    if len(targets) > WORKERS_MAX:
        result.refused.append(f"{len(targets)} records, at most {WORKERS_MAX} workers")
    return result


class DnsResolver:
    """Answers of DNS by dnspython: from the host's resolvers, or from `server`, an address with or without a port."""

    def __init__(self, server: str = "") -> None:
        """Raises ConfigError where dnspython is not installed, or this host names no resolver."""
        try:
            import dns.asyncresolver
            import dns.resolver
        except ImportError as error:
            raise missing_extra(error) or error from None
        try:
            self._resolver: Resolver = dns.asyncresolver.Resolver(configure=not server)
        except dns.resolver.NoResolverConfiguration as error:
            raise ConfigError(f"dns_server = '': this host names no resolver: {error}") from None
        if server:
            host, port = dns_server(server)
            self._resolver.nameservers, self._resolver.port = [host], port
        self._resolver.lifetime = ASK_S

    async def ask(self, name: DnsName) -> tuple[tuple[HostPort, ...], float]:
        """Returns the records of a name, and for how many seconds they are valid. Raises WorldError where no resolver
        answers. A name that does not exist has no workers."""
        if not name.port:
            answers = await self._ask(name.name, "SRV")
            targets = [
                (record.target.to_text(omit_final_dot=True), record.port)
                for answer in answers
                for record in answer
                if record.port and record.target.to_text() != "."  # the service is not to be had there
            ]
        else:
            answers = await self._ask(name.name, "A") + await self._ask(name.name, "AAAA")
            targets = [(record.address, name.port) for answer in answers for record in answer]
        ttl_s = min((answer.rrset.ttl for answer in answers if answer.rrset is not None), default=TTL_S_MIN)
        return tuple(dict.fromkeys(targets)), min(max(float(ttl_s), TTL_S_MIN), TTL_S_MAX)

    async def _ask(self, name: str, kind: str) -> list[Answer]:
        import dns.exception
        import dns.resolver

        try:
            answer = await self._resolver.resolve(name, kind, search=True, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return []
        except (dns.exception.DNSException, OSError) as error:
            raise WorldError(f"{kind} of {name}: {type(error).__name__}: {error}") from None
        return [answer] if answer.rrset is not None else []


def dns_server(text: str) -> tuple[str, int]:
    """The address and the port of a resolver: 10.0.0.2, 10.0.0.2:53, [fd00::2]:53. Raises ConfigError."""
    match = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::([1-9][0-9]{0,4}))?|([0-9.]+)(?::([1-9][0-9]{0,4}))?", text)
    host = "" if match is None else match[1] or match[3]
    if match is None or not is_literal(host):
        raise ConfigError(f"dns_server = {text[:100]!r}: must be an address with or without a port")
    return host, int(match[2] or match[4] or _PORT)


class DnsFollower:
    """Follows the names of a config, each by a task of its own."""

    def __init__(self, config: RouterConfig, membership: Membership) -> None:
        """Raises ConfigError for a name that is invalid, or that cannot be followed with keys."""
        self._config, self._membership = config, membership
        self._names = [DnsName.parse("prefill", name) for name in config.prefill_dns]
        self._names += [DnsName.parse("decode", name) for name in config.decode_dns]
        for name in self._names:
            if name.port and config.key is not None:
                raise ConfigError(
                    f"{name.role}_dns = '{name}': an address names no worker, and with keys a worker's key is that of "
                    "its name on the allow-list: take srv://NAME, whose targets begin with those names"
                )
        self._resolver = DnsResolver(config.dns_server)

    def start(self) -> list[asyncio.Task[None]]:
        """Returns the tasks, to be cancelled at the end."""
        return [asyncio.create_task(self._follow(name)) for name in self._names]

    async def _follow(self, name: DnsName) -> None:
        """Where no resolver answers, the workers stay as they are."""
        source, logged = f"{name.role} {name}", ""
        while True:
            wait_s, why = TTL_S_MIN, ""
            try:
                targets, ttl_s = await self._resolver.ask(name)
                listed = await asyncio.to_thread(self._listed, name, targets)
                self._membership.listed(source, listed.workers)
                wait_s, why = ttl_s, "; ".join(listed.refused)
                if why and why != logged:
                    log.error("%s: %s", source, why)
                elif logged and not why:
                    log.info("%s: %d workers", source, len(listed.workers))
            except Exception as error:  # noqa: BLE001 (it is followed for as long as the router runs)
                why = log_unchanged(error, logged, f"{source}: ")
            logged = why
            await asyncio.sleep(wait_s)

    def _listed(self, name: DnsName, targets: Sequence[HostPort]) -> ListedWorkers:
        """Reads the allow-list anew: a key that the router has not yet read by itself is refused, and tried again."""
        config = self._config
        allowed = AllowList.read(config.allow) if config.allow is not None and config.key is not None else None
        listed = workers_of(name, targets, allowed=allowed, scheme="http" if config.relays else "tcp")
        self._membership.check_listed(f"{name.role} {name}", listed)
        return listed
