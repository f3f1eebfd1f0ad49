"""A process's place in a worker of several: what may be said of it, and what follows."""

from __future__ import annotations

from pathlib import Path

from ..bus.keys import Address, Endpoint, is_literal, is_loopback
from ..errors import ConfigError
from ..wire import Ranks
from .bounds import match

SIZE_MAX = 64  # along one axis: beyond it no model is split
FREE = {"bind": "tcp://127.0.0.1:0", "http": ""}  # what a rank that does not lead listens on by default


def label(ranks: Ranks) -> str:
    """A rank's place, as part of a name."""
    return f"pp{ranks.pp_rank}-tp{ranks.tp_rank}" if ranks.pp_size > 1 else f"tp{ranks.tp_rank}"


def place_of(ranks: Ranks) -> int:
    """A rank's number in its group; the leader's is 0."""
    return ranks.pp_rank * ranks.tp_size + ranks.tp_rank


def ranks_of(tp_size: int, pp_size: int) -> list[Ranks]:
    """All ranks of a group, by their numbers."""
    return [Ranks(place % tp_size, tp_size, place // tp_size, pp_size) for place in range(tp_size * pp_size)]


def key_of(leaders: Path, ranks: Ranks) -> Path:
    """Where the key of another rank lies, beside its leader's: each is a peer, and a peer is its key."""
    return leaders.with_name(f"{leaders.name.removesuffix('.key')}-{label(ranks)}.key")


def device_of(device: str, ranks: Ranks) -> str:
    """What of a worker's device is this rank's: `cuda` is the card of its own number, of a list its entry, and where
    ranks are more than entries, as on several hosts of equal cards, these begin anew."""
    names = device.split(",")
    return f"cuda:{place_of(ranks)}" if device == "cuda" else names[place_of(ranks) % len(names)]


def check_device(device: str, ranks: Ranks, name: str = "device") -> None:
    """Raises ConfigError for what is no device, and for cards that no rank would compute on."""
    match(name, device, r"cpu|cuda|cuda:\d+(,cuda:\d+)*", "cpu, cuda, cuda:N, or for a card a rank cuda:N,cuda:M,...")
    if (cards := device.count(",") + 1) > (size := ranks.tp_size * ranks.pp_size):
        raise ConfigError(f"{name} = {device!r}: {cards} cards, and this worker has {size} ranks")


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


def check_advertise(advertise: str, bind: str, *, told: bool) -> None:
    """Raises ConfigError for an `advertise` that is no host; where peers are `told` of this rank, also for a `bind`
    that nobody can dial."""
    if advertise:
        try:
            Endpoint.parse(_at(advertise, 1) if is_literal(advertise) else f"tcp://{advertise}:1")
        except ConfigError as error:
            raise ConfigError(f"advertise = {advertise!r}: must be a host to dial, without a port ({error})") from None
    elif told and Address.parse(bind).wildcard:
        raise ConfigError(
            f"bind = {bind!r}: nobody can dial that, and peers are told where each rank is: bind an address of this "
            "host, or name as advertise the one that they are to dial"
        )


def advertised(bound: str, advertise: str) -> str:
    """The endpoint to tell peers of, where `bound` is what was bound."""
    return _at(advertise, Address.parse(bound).port_first) if advertise else bound


def _at(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def group_address(group: str) -> tuple[str, int]:
    """Where the ranks meet; any free port of this host where nothing is said."""
    host, _, port = (group or "127.0.0.1:0").rpartition(":")
    return host.strip("[]"), int(port)
