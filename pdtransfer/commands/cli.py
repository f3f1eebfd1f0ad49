"""The command pdtransfer: binds flags, environment and file to a config, and calls what does the work.

Every command imports its own implementation when it runs, so that --help and the router never wait for torch. Exit
status: 0 done, 1 failed, 2 misused, 130 interrupted; what went wrong is one line on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env

from .. import __version__
from ..config.bounds import port_range
from ..config.config import DecodeConfig, PrefillConfig, RouterConfig
from ..environment import PREFIX
from ..errors import ConfigError, PDTransferError
from ..process import logs
from .bench_commands import Json, bench, counted
from .config_sources import sources
from .demo_config import DemoConfig

FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141

_FLAT = Parameter(name="*")


app = App(
    name="pdtransfer",
    help="Carries the KV cache of a prefill worker straight into a decode worker's host DRAM.",
    help_epilogue="Any flag of a command may stand in the environment instead, as PDTRANSFER_FLAG_NAME, or in the file "
    "that --config names; a flag wins over the environment, and the environment over the file.",
    version=__version__,
    default_parameter=Parameter(negative=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.meta.suppress_keyboard_interrupt = False
app.command(bench)
kernels = App(name="kernels", help="The kernels that run on a card.")
app.command(kernels)


@app.command
def prefill(config: Annotated[PrefillConfig | None, _FLAT] = None) -> int:
    """Runs a prefill daemon: computes prompts and writes their KV into decode's memory."""
    from ..worker.daemon import run_prefill

    config = config or PrefillConfig()
    logs.start(node=config.node, level=config.log_level, file=config.log_file)
    return run_prefill(config)


@app.command
def decode(config: Annotated[DecodeConfig | None, _FLAT] = None) -> int:
    """Runs a decode daemon: owns the arena, and generates from it."""
    from ..worker.daemon import run_decode

    config = config or DecodeConfig()
    logs.start(node=config.node, level=config.log_level, file=config.log_file)
    return run_decode(config)


@app.command
def router(config: Annotated[RouterConfig | None, _FLAT] = None) -> int:
    """Runs the router: /v1/completions in front of prefill and decode daemons."""
    from ..router.router import run

    config = config or RouterConfig()
    logs.start(node=config.node, level=config.log_level, file=config.log_file)
    return run(config)


@app.command
def demo(
    config: Annotated[DemoConfig | None, _FLAT] = None,
    *,
    router: Annotated[str, Parameter(help="Asks the router at this URL, and starts nothing.")] = "",
    metrics: Annotated[
        tuple[str, ...], Parameter(help="host:port of a decode daemon behind it; may be repeated.")
    ] = (),
) -> int:
    """Starts everything on this host, sends prompts, and checks each answer against a single process."""
    from .demo import run

    config = config or DemoConfig()
    if metrics and not router:
        raise ConfigError(f"metrics = {metrics[0]!r}: only where --router names a fleet that runs")
    return run(config, router=router, metrics=metrics) if router else run(config)


@app.command
def timeline(
    *files: Annotated[Path, Parameter(help="Files, or directories of them, that processes wrote by --timeline.")],
    output: Annotated[Path | None, Parameter(help="Writes all of them as one file, for ui.perfetto.dev.")] = None,
    json: Json = False,
) -> int:
    """Says what the time to each room's first token went into, by what prefill, decode and router have written."""
    from ..tracing.merge_traces import run

    return run(files, output=output, json=json)


@app.command
def doctor(
    *,
    transport_ports: Annotated[
        tuple[str, ...], Parameter(help="What daemons of this host are told, first-last; may be repeated.")
    ] = (),
    json: Json = False,
) -> int:
    """Says what this host has and lacks, and the command that mends each; status 1 if something required is missing."""
    from .doctor import run

    for each in transport_ports:
        port_range("transport_ports", each)
    return run(json=json, transport_ports=transport_ports)


@app.command
def keygen(
    name: Annotated[str, Parameter(help="The node's name, after a directory if need be.")],
    /,
    *,
    tp_size: Annotated[
        int, counted("Ranks of a worker that share the heads: a key for each, beside its leader's.")
    ] = 1,
    pp_size: Annotated[int, counted("Stages of a worker that share the layers: the same.")] = 1,
    json: Json = False,
) -> int:
    """Makes NAME.key, which stays secret, and NAME.pub, whose line goes into the allow-list of every peer."""
    from ..bus.keys import generate
    from ..config.ranks import key_of, ranks_of

    others = ranks_of(tp_size, pp_size)[1:]
    for path in (Path(name), *(key_of(Path(name), ranks) for ranks in others)):
        line = generate(path)
        print(dumps({"name": line.split()[0], "public": line.split()[1]}) if json else line)
    return 0


@kernels.command(name="build")
def kernels_build(
    *,
    arch: Annotated[tuple[str, ...], Parameter(help="Architectures such as sm_90; by default the cards' own.")] = (),
    json: Json = False,
) -> int:
    """Compiles every kernel into the cache ahead of time; with --arch on a host without a card, too."""
    from ..kernels.build import run

    return run(arch, json=json)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(help="A TOML file of settings.")] = None,
    debug: Annotated[bool, Parameter(help="Show the traceback of a failure.")] = False,
) -> int:
    """Binds what stands below the flags, runs the command, and answers with its status."""
    try:
        app.config = sources(config)
        return app(tokens, exit_on_error=False, print_error=False, verbose=False) or 0
    except (CycloptsError, ConfigError):
        raise
    except BrokenPipeError:
        # Whoever read our output has gone: nothing is left to say, at interpreter exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:  # the last place that can turn a failure into one line
        if debug:
            raise
        return _complain(_line(error), FAILED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit status; never raises but under --debug."""
    app.meta.config = [Env(PREFIX, command=False, show=False)]
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        return app.meta(given, exit_on_error=False, print_error=False, verbose=False) or 0
    except (CycloptsError, ConfigError) as error:
        return _complain(str(error), MISUSED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _line(error: Exception) -> str:
    match error:
        case PDTransferError():
            return str(error)
        case OSError():
            return f"{error.filename or type(error).__name__}: {error.strerror or error}"
        case _:
            return f"a bug, not a misuse: {type(error).__name__}: {error}; --debug shows where"


def _complain(text: str, status: int) -> int:
    print("pdtransfer: " + logs.printable(" ".join(text.split())), file=sys.stderr)
    return status
