"""What the transports of a node are given: one object for a prefill rank, one for a decode rank."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from .port_guard import PortGuard

Protocol = Literal["tcp", "rdma"]

KeepLine = Callable[[int, socket.socket], None]
"""Gets a session, and the connection over which its arena was handed over: it is the session's line, or is closed.
Where it raises, its caller closes the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How peers on other hosts reach the transports of a node."""

    host: str = ""  # the name or IPv4 address that peers dial; by default this host's address on the way to the peer
    ports: tuple[int, int] = (21_000, 21_999)  # [first, last], to listen on
    protocol: Protocol = "tcp"
    bind: str = ""  # where peers reach the node itself, tcp://host:port; empty: not known here
    # True if all peers of this node are on its own host: auto then skips transports that listen on other interfaces.
    loopback: bool = False
    guard: PortGuard | None = None  # opens their ports to peers with a session alone; NodeSettings bring it
    keep_line: KeepLine | None = None  # on the loop's thread; a node brings it. None: hand-overs leave no line
    streams: int = 0  # parallel connections of a session, at most; 0: as this host's cores allow


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Where the pool of a prefill rank lies, and how its rows are copied and sent."""

    pool_address: int = 0  # what the components' bases are offsets from; 0: the bases are addresses
    pool_fd: int = -1  # the memfd that the pool is mapped from; -1: none
    copy_threads: int = 2  # that copy rows of a pool in host memory
    device: int | None = None  # the CUDA ordinal of the GPU whose memory the pool is: this GPU copies the rows
    transport: str = "auto"  # a name in the registry; auto: all that this host can use
    network: Network = field(default_factory=Network)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaOptions:
    """How writers reach the arena of a decode rank."""

    transport: str = "auto"  # a name in the registry; auto: for each writer the first that reaches it
    network: Network = field(default_factory=Network)
    socket_directory: Path | None = None  # for the socket that hands the arena over; None: an abstract socket


_Options = TypeVar("_Options", WriterOptions, ArenaOptions)


def of_node(options: _Options, guard: PortGuard | None, keep_line: KeepLine) -> _Options:
    """The same options, with this guard before the ports of transports, and a place for the lines of sessions."""
    network = options.network if guard is None else replace(options.network, guard=guard)
    return replace(options, network=replace(network, keep_line=keep_line))
