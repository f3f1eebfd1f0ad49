"""The place of a process in its worker's group, and the settings that follow from it."""

from __future__ import annotations

from collections.abc import Mapping

from ...bounds import match
from ...bus.keys import Address, Endpoint, address_of, check_dialled, check_exposure
from ...environment import AGENT_STORE
from ...errors import ConfigError
from ...wire import KEY_LENGTH, Ranks
from ...wire.ranks import SIZE_MAX, rank_index

FREE = {"bind": "tcp://127.0.0.1:0", "listen": ""}  # what a follower listens on by default


def device_of(device: str, ranks: Ranks) -> str:
    """Returns the part of a worker's device that this rank uses.

    `cuda` is the GPU with the rank's number, and a list gives each rank an entry. A list shorter than the ranks is
    repeated, as for several hosts with equal GPUs.
    """
    names = device.split(",")
    return f"cuda:{rank_index(ranks)}" if device == "cuda" else names[rank_index(ranks) % len(names)]


def check_device(device: str, ranks: Ranks, name: str = "device") -> None:
    """Raises ConfigError for an invalid device, and for GPUs that no rank would use."""
    match(name, device, r"cpu|cuda|cuda:\d+(,cuda:\d+)*", "cpu, cuda, cuda:N, or for a GPU a rank cuda:N,cuda:M,...")
    if (cards := device.count(",") + 1) > (size := ranks.tp_size * ranks.pp_size):
        raise ConfigError(f"{name} = {device!r}: {cards} GPUs, and this worker has {size} ranks")


def check_ranks(ranks: Ranks, group: str, *, keyed: bool, insecure: bool) -> None:
    """Raises ConfigError for ranks that cannot be, and for a `group` that they cannot meet at."""
    for axis, rank, size in (("tp", ranks.tp_rank, ranks.tp_size), ("pp", ranks.pp_rank, ranks.pp_size)):
        if not 1 <= size <= SIZE_MAX:
            raise ConfigError(f"{axis}_size = {size}: must be from 1 to {SIZE_MAX}")
        if not 0 <= rank < size:
            raise ConfigError(f"{axis}_rank = {rank}: must be from 0 to {size - 1}, {axis}_size is {size}")
    leads, alone = rank_index(ranks) == 0, ranks.tp_size * ranks.pp_size == 1
    if not group:
        if not leads:
            raise ConfigError("group = '': a rank that does not lead has to know where its leader waits, host:port")
        return
    named = f"group = {group!r}"
    if alone:
        raise ConfigError(f"{named}: a group needs more than one rank: tp_size is 1")
    try:
        endpoint = group_endpoint(group)
    except ConfigError:
        raise ConfigError(f"{named}: must be [KEY@]host:port, which ranks can dial, IPv6 as [::1]:port") from None
    check_exposure(endpoint.address, named=named, keyed=keyed, insecure=insecure)
    if keyed and not leads and endpoint.server_key is None:
        raise ConfigError(f"{named}: with keys on it is KEY@host:port, KEY the public key of the leader")
    if not keyed and endpoint.server_key is not None:
        raise ConfigError(f"{named}: key: this rank has no key of its own to talk to its leader with")


def group_endpoint(group: str) -> Endpoint:
    """Where the ranks meet, of [KEY@]host:port. Raises ConfigError."""
    key_end = KEY_LENGTH + 1 if group[KEY_LENGTH : KEY_LENGTH + 1] == "@" else 0
    return Endpoint.parse(f"{group[:key_end]}tcp://{group[key_end:]}")


def launched(variables: Mapping[str, str], given: Mapping[str, str], *, stages: bool) -> dict[str, str]:
    """The rank flags that torchrun's variables stand for, below those that are `given`, by their fields' names.

    Nothing where a rank is given, or for a world of one. `stages`: whether the role has pipeline stages. Raises
    ConfigError for a variable that makes no sense.
    """
    if not {"RANK", "WORLD_SIZE"} & variables.keys() or {"tp_rank", "pp_rank"} & given.keys():
        return {}
    world = _variable(variables, "WORLD_SIZE", 1, SIZE_MAX**2)
    rank = _variable(variables, "RANK", 0, world - 1)
    if world == 1:
        return {}
    tp_size, pp_size = (int(given[name]) if given.get(name, "").isdigit() else 0 for name in ("tp_size", "pp_size"))
    pp_size = pp_size or (world // tp_size if stages and tp_size else 1)
    tp_size = tp_size or world // pp_size
    if tp_size * pp_size != world:
        raise ConfigError(f"WORLD_SIZE = {world}: tp_size is {tp_size}, pp_size is {pp_size}")
    flags = {"tp_size": tp_size, "tp_rank": rank % tp_size}
    if stages:
        flags |= {"pp_size": pp_size, "pp_rank": rank // tp_size}
    settings = {name: str(value) for name, value in flags.items() if name not in given}
    if "group" not in given:
        settings["group"] = _launched_group(variables)
    if given.get("device") == "cuda" and "LOCAL_RANK" in variables:
        settings["device"] = f"cuda:{_variable(variables, 'LOCAL_RANK', 0, world - 1)}"
    return settings


def _launched_group(variables: Mapping[str, str]) -> str:
    """MASTER_ADDR:MASTER_PORT, or the port behind it where torchrun's own store has that one."""
    port = _variable(variables, "MASTER_PORT", 1, 0xFFFE) + (variables.get(AGENT_STORE) == "True")
    host = variables.get("MASTER_ADDR", "")
    group = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        group_endpoint(group)
    except ConfigError:
        text = f"MASTER_ADDR = {host!r}: must be the leader's host, since RANK is set and group is not"
        raise ConfigError(text) from None
    return group


def _variable(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = variables.get(name, "")
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        others = ", ".join(f"{name} is {variables[name]!r}" for name in ("RANK", "WORLD_SIZE") if name in variables)
        raise ConfigError(f"{name} = {text!r}: must be a number from {least} to {most}; {others}")
    return int(text)


def check_advertise(advertise: str, bind: str, *, shared: bool) -> None:
    """Raises ConfigError for an `advertise` that is not a host, and a `bind` that peers cannot dial but are given."""
    if advertise:
        check_dialled("advertise", advertise)
    elif shared and Address.parse(bind).wildcard:
        raise ConfigError(
            f"bind = {bind!r}: peers cannot dial that, and each rank's address is sent to them: bind an address of "
            "this host, or set advertise to the host that they dial"
        )


def advertised(bound: str, advertise: str) -> str:
    """Returns the endpoint to send to peers, for the bound endpoint."""
    return address_of(advertise, Address.parse(bound).port_first) if advertise else bound
