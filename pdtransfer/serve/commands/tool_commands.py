"""The commands that run no daemon: top, timeline, doctor, keygen and kernels."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from ...bounds import port_range
from ...errors import ConfigError
from .flags import Json, counted

kernels = App(name="kernels", help="The kernels that run on a GPU.")


def top(
    *,
    router: Annotated[str, Parameter(help="The router's URL.")] = "http://127.0.0.1:8000",
    api_key: Annotated[Path | None, Parameter(help="A file with an API key, for a router that asks for one.")] = None,
    interval: Annotated[float, Parameter(help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print once and end, as when the output is not a terminal.")] = False,
    json: Annotated[bool, Parameter(help="Print the router's status document once.")] = False,
) -> int:
    """Shows a fleet in the terminal, live: workers, rooms, rates, arenas and the last failures. q ends it."""
    from .top import run

    if not 0.1 <= interval <= 3_600:
        raise ConfigError(f"interval = {interval}: must be 0.1 to 3600 seconds")
    return run(router, key=api_key, interval_s=interval, once=once, json=json)


def timeline(
    *files: Annotated[Path, Parameter(help="Files, or directories of them, that processes wrote by --timeline.")],
    output: Annotated[Path | None, Parameter(help="Writes all of them as one file, for ui.perfetto.dev.")] = None,
    json: Json = False,
) -> int:
    """Breaks down the time to each room's first token, from the timelines of prefill, decode and router."""
    from ..tracing.merge_traces import run

    return run(files, output=output, json=json)


def doctor(
    prefill_url: Annotated[str, Parameter(help="The URL of a prefill engine's server, to compare engines.")] = "",
    decode_url: Annotated[str, Parameter(help="The URL of a decode engine's server.")] = "",
    /,
    *,
    transport_ports: Annotated[tuple[str, ...], Parameter(help="Daemons' ports, first-last; may be repeated.")] = (),
    bind: Annotated[str, Parameter(help="A daemon's --bind, for which each transport is asked.")] = "",
    advertise: Annotated[str, Parameter(help="Its --advertise.")] = "",
    api_key: Annotated[Path | None, Parameter(help="A file with an API key, for engines that ask for one.")] = None,
    json: Json = False,
) -> int:
    """Lists what this host has and lacks; with two URLs compares the engines there."""
    if prefill_url or decode_url:
        from . import engine_facts

        return engine_facts.run(prefill_url, decode_url, api_key=api_key, json=json)
    from .doctor import run

    for ports in transport_ports:
        port_range("transport_ports", ports)
    return run(json=json, transport_ports=transport_ports, bind=bind, advertise=advertise)


def keygen(
    name: Annotated[str, Parameter(help="The node's name, optionally with a directory.")],
    /,
    *,
    tp_size: Annotated[int, counted("Ranks that share the heads: a key for each, beside its leader's.")] = 1,
    pp_size: Annotated[int, counted("Stages that share the layers: the same.")] = 1,
    json: Json = False,
) -> int:
    """Writes NAME.key, which stays secret, and NAME.pub, a line for the allow-list of every peer."""
    from ...bus.keys import generate, key_of
    from ...wire.ranks import ranks_of

    others = ranks_of(tp_size, pp_size)[1:]
    for path in (Path(name), *(key_of(Path(name), ranks) for ranks in others)):
        line = generate(path)
        print(dumps({"name": line.split()[0], "public": line.split()[1]}) if json else line)
    return 0


@kernels.command(name="build")
def kernels_build(
    *,
    arch: Annotated[tuple[str, ...], Parameter(help="Architectures such as sm_90; by default the GPUs' own.")] = (),
    json: Json = False,
) -> int:
    """Compiles every kernel into the cache ahead of time; with --arch also on a host without a GPU."""
    from .kernels_build import run

    return run(arch, json=json)
