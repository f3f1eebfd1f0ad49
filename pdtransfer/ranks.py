"""A process's place in a worker of several: what may be said of it, and what follows."""

from __future__ import annotations

from .errors import ConfigError
from .keys import Endpoint, is_loopback
from .wire import Ranks

SIZE_MAX = 64  # along one axis: beyond it no model is split
FREE = {"bind": "tcp://127.0.0.1:0", "http": ""}  # what a rank that does not lead listens on by default


def check_ranks(ranks: Ranks, group: str, *, insecure: bool) -> None:
    """Raises ConfigError for ranks that cannot be, and for a `group` that they cannot meet at."""
    for axis, rank, size in (("tp", ranks.tp_rank, ranks.tp_size), ("pp", ranks.pp_rank, ranks.pp_size)):
        if not 1 <= size <= SIZE_MAX:
            raise ConfigError(f"{axis}_size = {size}: must be from 1 to {SIZE_MAX}")
        if not 0 <= rank < size:
            raise ConfigError(f"{axis}_rank = {rank}: must be from 0 to {size - 1}, {axis}_size is {size}")
    if group:
        _check_group(group, alone=ranks.tp_size * ranks.pp_size == 1, insecure=insecure)
    elif ranks.tp_rank or ranks.pp_rank:
        raise ConfigError("group = '': a rank that does not lead has to know where its leader waits, host:port")


def _check_group(group: str, *, alone: bool, insecure: bool) -> None:
    if alone:
        raise ConfigError(f"group = {group!r}: for one rank there is none, tp_size is 1")
    try:
        address = Endpoint.parse("tcp://" + group).address
        guarded = insecure or is_loopback(address)
    except ConfigError as error:
        raise ConfigError(f"group = {group!r}: must be host:port ({error})") from None
    if not guarded:
        raise ConfigError(
            f"group = {group!r}: other hosts could reach it, and torch.distributed knows no keys: say insecure"
        )


def group_address(group: str) -> tuple[str, int]:
    """Where the ranks meet; any free port of this host where nothing is said."""
    host, _, port = (group or "127.0.0.1:0").rpartition(":")
    return host.strip("[]"), int(port)
