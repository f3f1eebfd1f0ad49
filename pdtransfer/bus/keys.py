"""CURVE key pairs, the allow-list of peers, endpoints with a pinned key, and the check of binds without keys.

Files are parsed strictly: every error is a ConfigError of one line that names file, line and field.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq
from zmq.utils import z85

from ..errors import Cause, ConfigError
from ..limits import ADDRESS_LENGTH_MAX, NAME_LENGTH_MAX
from ..wire import KEY_LENGTH, Message, Ranks, Reject, split_key
from ..wire.ranks import label

REVOKED = "its key was revoked, or its role"
ROLES = frozenset({"prefill", "decode", "router"})
BY_KEYS = "make keys (pdtransfer keygen NAME) and set key and allow"
FILE_BYTES_MAX = 1 << 20  # an allow-list of some 10,000 peers

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}")
_ADDRESS = re.compile(r"tcp://(\[[0-9A-Za-z:.%_-]+\]|\*|[0-9A-Za-z._-]+):(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One node's CURVE keys, Z85 text of 40 characters each; the secret key is not part of the repr."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads NAME.key. Raises ConfigError where the file is malformed, or accessible to other users."""
        text = read_guarded(path, forbidden=0o077, advice=f"others may read or change it: chmod 600 {path}")
        keys: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or words[0] not in ("public", "secret") or words[0] in keys:
                raise ConfigError(f"{path}:{number}: a key file has one line 'public KEY' and one line 'secret KEY'")
            keys[words[0]] = _checked_key(words[1], f"{path}:{number}: {words[0]}")
        for missing in sorted({"public", "secret"} - keys.keys()):
            raise ConfigError(f"{path}: {missing}: line missing; is this the .pub file?")
        if zmq.curve_public(keys["secret"].encode()).decode() != keys["public"]:
            raise ConfigError(f"{path}: public: not the public key of this secret key")
        return cls(public=keys["public"], secret=keys["secret"])


def generate_pair() -> KeyPair:
    """Returns a new pair; writes no file."""
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        # At the start, "-" would make KEY@tcp://... look like a flag, and "#" an allow-list line like a comment.
        if public[0] not in "-#":
            return KeyPair(public=public, secret=secret)


def generate(path: str | Path) -> str:
    """Writes NAME.key (both keys, mode 0600) and NAME.pub; returns the line in NAME.pub, ready for an allow-list.

    `path` is NAME, optionally with a directory. Raises ConfigError if either file exists.
    """
    stem = Path(str(path).removesuffix(".key"))
    if not _NAME.fullmatch(stem.name):
        raise ConfigError(f"{path}: name: {stem.name!r} is not letters, digits, '.', '_', '-'")
    pair = generate_pair()
    public, secret = pair.public, pair.secret
    line = f"{stem.name} {public}"
    key_path, pub_path = stem.with_name(stem.name + ".key"), stem.with_name(stem.name + ".pub")
    _create(key_path, f"# CURVE key pair of {stem.name}: keep it secret\npublic {public}\nsecret {secret}\n", 0o600)
    try:
        _create(pub_path, line + "\n", 0o644)
    except ConfigError:
        key_path.unlink()
        raise
    return line


@dataclass(frozen=True, slots=True)
class AllowList:
    """The peers of this node, whether it dials them or they dial it: `names` maps each public key to the peer's name.

    `roles` maps a public key to the roles that the peer may have; a key without an entry may have any role.
    """

    names: Mapping[str, str]
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def entry(self, public: str) -> tuple[str | None, frozenset[str] | None]:
        """Returns the name and the roles listed for a public key."""
        return self.names.get(public), self.roles.get(public)

    def why_not(self, public: str, role: str) -> str:
        """Why this node may not meet the key's peer in that role, as dialler or as listener; empty where it may."""
        name, roles = self.entry(public)
        if name is None:
            return "not on the allow-list"
        if roles is not None and role not in roles:
            return f"the allow-list lets {name} be {', '.join(sorted(roles))}, not {role}"
        return ""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads an allow-list from a file; see `parse`."""
        text = read_guarded(path, forbidden=0o002, advice=f"anyone may change it: chmod o-w {path}")
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, *, source: str) -> Self:
        """Parses one line a peer, `name Z85-public-key [role[,role]] [# comment]`. Raises ConfigError."""
        names: dict[str, str] = {}
        roles: dict[str, frozenset[str]] = {}
        lines: dict[str, int] = {}  # line numbers by name
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            where = f"{source}:{number}"
            if not _NAME.fullmatch(words[0]):
                raise ConfigError(f"{where}: name: {words[0][:64]!r} is not letters, digits, '.', '_', '-'")
            if len(words) < 2:
                raise ConfigError(f"{where}: key: missing; a line is 'name Z85-public-key [role[,role]] [# comment]'")
            key = _checked_key(words[1], f"{where}: key")
            if len(words) > 2 and not words[2].startswith("#"):
                roles[key] = _checked_roles(words[2], where)
                if len(words) > 3 and not words[3].startswith("#"):
                    raise ConfigError(f"{where}: comment: {words[3][:64]!r} does not start with #")
            if key in names:
                raise ConfigError(f"{where}: key: also listed for {names[key]!r} in line {lines[names[key]]}")
            if words[0] in lines:
                raise ConfigError(f"{where}: name: {words[0]!r} is already in line {lines[words[0]]}")
            names[key], lines[words[0]] = words[0], number
        return cls(names, roles)


@dataclass(frozen=True, slots=True)
class Address:
    """`tcp://host:port` or `tcp://host:first-last`. IPv6 hosts have brackets in the text, and none in `host`."""

    host: str  # a name, an address, or "*" for every interface
    port_first: int
    port_last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text. Raises ConfigError with the expected form."""
        match = _ADDRESS.fullmatch(text) if len(text) <= ADDRESS_LENGTH_MAX else None
        if match is None:
            raise ConfigError(f"endpoint {text[:64]!r}: is not tcp://host:port (IPv6 as tcp://[::1]:port)")
        first, last = int(match[2]), int(match[3] or match[2])
        if not first <= last <= 0xFFFF or (first == 0 and last > 0):
            ports = f"{match[2]} to {match[3]}" if match[3] else match[2]
            raise ConfigError(f"endpoint {text!r}: port: {ports} is not within 1 to 65535")
        return cls(host=match[1].strip("[]"), port_first=first, port_last=last)

    @property
    def wildcard(self) -> bool:
        """True if the address can be bound but not dialled."""
        return self.host == "*" or (is_literal(self.host) and ipaddress.ip_address(self.host).is_unspecified)


def address_of(host: str, port: int) -> str:
    """Returns the address text of one host and port in ZMQ's form."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A peer to dial: `[KEY@]tcp://host:port`; KEY is the listener's public key, Z85 text of 40 characters."""

    address: str
    server_key: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text. Raises ConfigError."""
        server_key, address = split_key(text)
        if server_key:
            _checked_key(server_key, f"endpoint {text[:64]!r}: key")
        parsed = Address.parse(address)
        if parsed.port_first != parsed.port_last or parsed.port_first == 0:
            raise ConfigError(f"endpoint {text!r}: port: dialling needs exactly one port, not 0")
        if parsed.wildcard:
            raise ConfigError(f"endpoint {text!r}: host: {parsed.host} can be bound, but not dialled")
        return cls(address=address, server_key=server_key or None)


def is_literal(host: str) -> bool:
    """True if `host` is an IPv4 or IPv6 address, not a name to resolve."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """True if only this host can reach `tcp://host:port`. A name counts if all its addresses are loopback addresses.

    Raises ConfigError for a name that does not resolve.
    """
    host = Address.parse(address).host
    if host == "*":
        return False
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"endpoint {address!r}: host: {host} does not resolve: {error}") from None
    return all(is_loopback_host(str(answer[4][0])) for answer in addresses)


def check_dialled(name: str, host: str) -> None:
    """Raises ConfigError for a setting that is not a host to dial."""
    try:
        Endpoint.parse(address_of(host, 1) if is_literal(host) else f"tcp://{host}:1")
    except ConfigError:
        raise ConfigError(f"{name} = {host!r}: must be a host that peers can dial, without a port") from None


def check_exposure(address: str, *, named: str, keyed: bool, insecure: bool, remedy: str = BY_KEYS) -> None:
    """Raises ConfigError where binding `address` would admit other hosts without keys and without `insecure`."""
    if not keyed and not insecure and not is_loopback(address):
        raise ConfigError(f"{named}: other hosts could reach it without authentication: {remedy}, or set insecure")


def is_loopback_host(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _checked_key(text: str, where: str) -> str:
    if len(text) != KEY_LENGTH:
        raise ConfigError(f"{where}: {len(text)} characters, a Z85 key has {KEY_LENGTH}")
    try:
        exact = z85.encode(z85.decode(text.encode("ascii"))).decode() == text
    except (KeyError, ValueError, struct.error):
        exact = False
    if not exact:
        raise ConfigError(f"{where}: {text[:8]!r}... is not Z85")
    return text


def _checked_roles(text: str, where: str) -> frozenset[str]:
    roles = frozenset(text.split(","))
    if wrong := sorted(roles - ROLES):
        raise ConfigError(
            f"{where}: role: {wrong[0][:64]!r} must be one of {', '.join(sorted(ROLES))}, or begin a # comment"
        )
    return roles


def _create(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise ConfigError(f"{path}: exists; a key is never overwritten") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def read_guarded(path: str | Path, *, forbidden: int, advice: str) -> str:
    """A file's text, without its byte order mark. ConfigError for a mode with any `forbidden` bit, with this advice."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: is not a regular file")
            if status.st_mode & forbidden:
                raise ConfigError(f"{path}: mode {stat.S_IMODE(status.st_mode):o}: {advice}")
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8") from None


def key_of(leaders: Path, ranks: Ranks) -> Path:
    """Returns the path of another rank's key, beside its leader's. Each rank is a peer with a key of its own."""
    return leaders.with_name(f"{leaders.name.removesuffix('.key')}-{label(ranks)}.key")


def revoked() -> Message:
    """The message of a peer that refuses this node for good: the node never dials it again."""
    return Reject(0, Cause.REFUSED.value, (REVOKED,))
