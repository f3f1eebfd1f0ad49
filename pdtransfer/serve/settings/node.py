"""The settings of each process: TOML < environment PDTRANSFER_* < flags; here, what all of them have.

The dataclasses check their own values, so a program that embeds a node builds them directly. The command line binds the
same classes to its flags; `commands.cli` reads the lower two levels. A wrong value is a ConfigError of one line.
"""

# Annotations are evaluated here: the command line reads those of a subclass with the names of the subclass's module.

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from ...bounds import check_limits, match
from ...bus.keys import BY_KEYS, Address, check_exposure
from ...errors import ConfigError
from ...limits import NAME_LENGTH_MAX, Limits

STAMP, REFERENCE = "stamp", "reference"  # models that need no checkpoint; their ids are bytes
BUILT_IN = {  # engines by model; that of the reference model comes with pdtransfer-lab
    STAMP: "pdtransfer.serve.engines.stamp.factory:create",
    REFERENCE: "pdtransfer_lab.models.factory:create",
}
FACTORY = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"  # of an engine

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def node_name(role: str) -> str:
    """Returns a name that is unique on this host."""
    return f"{role}-{socket.gethostname()[:64]}-{os.getpid()}"


def flag(text: str) -> Parameter:
    """A flag with this help text."""
    return Parameter(help=text)


def counted(text: str) -> Parameter:
    """A flag that counts something; `text` is its help."""
    return Parameter(help=text, validator=Number(gte=1, lte=1 << 30))


FLAT = Parameter(name="*")
Json = Annotated[bool, Parameter(help="Print one JSON object.")]
_LIMITS = Group("Limits", help="Meanings: docs/flags.md#limits; reasons: proto/v1/README.md.")
NODE_NAME = Parameter(help="Name among peers; by default role-host-pid.", show_default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of every daemon. Peers on other hosts need keys, unless `insecure` is set."""

    role: ClassVar[Literal["prefill", "decode", "router"]]

    node: Annotated[str, NODE_NAME]
    key: Annotated[Path | None, flag("This node's secret key, as `pdtransfer keygen` writes it.")] = None
    allow: Annotated[Path | None, flag("A file with the names and public keys of the peers that may connect.")] = None
    insecure: Annotated[bool, flag("Allow other hosts without keys: anyone may then read and write.")] = False
    log_level: Annotated[LogLevel, flag("How much is logged.")] = "info"
    log_format: Annotated[LogFormat, flag("A line of text, or one JSON object a line.")] = "text"
    log_file: Annotated[Path | None, flag("Log here; by default to standard error.")] = None
    timeline: Annotated[
        Path | None, flag("Write a timeline into this directory, as NODE.json, for `pdtransfer timeline`.")
    ] = None
    otlp: Annotated[
        str, flag("OpenTelemetry collector that gets spans of requests, http://host:port; needs pip install '.[otel]'.")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        flag("Name that HTTP clients may call this server by, or *.NAME, or *, besides addresses; may be repeated."),
    ] = ()
    json: Annotated[bool, flag("Print one JSON object a line on standard output: ready, and the addresses.")] = False
    limits: Annotated[Limits, Parameter(group=_LIMITS)] = field(default_factory=Limits)

    def __post_init__(self) -> None:
        match("node", self.node, rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}", "letters, digits, . _ -")
        if self.key is not None and self.allow is None:
            raise ConfigError(f"key = '{self.key}': useless without a list of peers: set allow")
        if self.allow is not None and self.key is None:
            raise ConfigError(f"allow = '{self.allow}': useless without keys: set key to this node's own")
        for host in self.allowed_hosts:
            match("allowed_hosts", host, r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", "a host name, *.NAME or *")
        if self.otlp:
            match("otlp", self.otlp, r"https?://[A-Za-z0-9._\[\]:-]+(/[!-~]*)?", "http://host:port")
        check_limits(self.limits)

    def _check_bind(
        self, name: str, value: str, *, scheme: str = "", keyed: bool = False, remedy: str = BY_KEYS
    ) -> None:
        """Checks an address to bind, scheme + host:port; one that other hosts can reach needs keys, or `keyed`."""
        named, address = f"{name} = {value!r}", "tcp://" + value.removeprefix(scheme)
        try:
            Address.parse(address if value.startswith(scheme) else value)
        except ConfigError:
            form = f"{scheme}host:port, IPv6 as {scheme}[::1]:port, port below 65536"
            raise ConfigError(f"{named}: must be {form}") from None
        keyed = keyed or self.key is not None
        check_exposure(address, named=named, keyed=keyed, insecure=self.insecure, remedy=remedy)
