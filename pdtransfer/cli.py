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
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env
from cyclopts.validators import Number

from . import __version__, logs
from .bounds import port_range
from .config import PREFIX, Attention, BenchModel, DecodeConfig, PrefillConfig, RouterConfig
from .config_sources import sources
from .demo_config import DemoConfig
from .errors import ConfigError, PDTransferError

FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141

_FLAT = Parameter(name="*")
Json = Annotated[bool, Parameter(help="Print one JSON object.")]


def _count(text: str) -> Parameter:
    return Parameter(help=text, validator=Number(gte=1, lte=1 << 30))


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
bench = App(name="bench", help="Measures one part on this host.")
app.command(bench)
kernels = App(name="kernels", help="The kernels that run on a card.")
app.command(kernels)


@app.command
def prefill(config: Annotated[PrefillConfig | None, _FLAT] = None) -> int:
    """Runs a prefill daemon: computes prompts and writes their KV into decode's memory."""
    from .daemon import run_prefill

    config = config or PrefillConfig()
    logs.start(node=config.node, level=config.log_level, file=config.log_file)
    return run_prefill(config)


@app.command
def decode(config: Annotated[DecodeConfig | None, _FLAT] = None) -> int:
    """Runs a decode daemon: owns the arena, and generates from it."""
    from .daemon import run_decode

    config = config or DecodeConfig()
    logs.start(node=config.node, level=config.log_level, file=config.log_file)
    return run_decode(config)


@app.command
def router(config: Annotated[RouterConfig | None, _FLAT] = None) -> int:
    """Runs the router: /v1/completions in front of prefill and decode daemons."""
    from .router import run

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
    from .timelines import run

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
    tp_size: Annotated[int, _count("Ranks of a worker that share the heads: a key for each, beside its leader's.")] = 1,
    pp_size: Annotated[int, _count("Stages of a worker that share the layers: the same.")] = 1,
    json: Json = False,
) -> int:
    """Makes NAME.key, which stays secret, and NAME.pub, whose line goes into the allow-list of every peer."""
    from .keys import generate
    from .ranks import key_of, ranks_of

    others = ranks_of(tp_size, pp_size)[1:]
    for path in (Path(name), *(key_of(Path(name), ranks) for ranks in others)):
        line = generate(path)
        print(dumps({"name": line.split()[0], "public": line.split()[1]}) if json else line)
    return 0


@bench.command(name="transfer")
def bench_transfer(
    *,
    tokens: Annotated[int | None, _count("Tokens of one room; by default 4,096, over Mooncake 8,192.")] = None,
    rooms: Annotated[int | None, _count("Rooms to move; by default 32, over Mooncake 8 in each arena.")] = None,
    model: Annotated[BenchModel, Parameter(help="Whose KV: DeepSeek V3's, or the reference model's.")] = "deepseek",
    transport: Annotated[Literal["shm", "mooncake"], Parameter(help="How it gets there.")] = "shm",
    json: Json = False,
) -> int:
    """Whole rooms from one process's pool into another's arena, without an engine: GB/s, beside memcpy, or beside one
    synchronous write and a raw socket."""
    from .bench import run_transfer

    return run_transfer(tokens=tokens, rooms=rooms, model=model, transport=transport, json=json)


@bench.command(name="handoff")
def bench_handoff(
    *,
    tokens: Annotated[int, _count("Tokens of one room.")] = 16,
    rooms: Annotated[int, _count("Rooms to move.")] = 2_000,
    concurrency: Annotated[int, _count("Rooms under way at once.")] = 64,
    json: Json = False,
) -> int:
    """Small rooms between two processes: latency beside a raw ZMQ round trip, and hand-offs a second."""
    from .bench import run_handoff

    return run_handoff(tokens=tokens, rooms=rooms, concurrency=concurrency, json=json)


@bench.command(name="copy")
def bench_copy(*, tokens: Annotated[int, _count("Tokens of one room.")] = 4_096, json: Json = False) -> int:
    """The CPU copy against one memcpy of the same bytes, pages in a row and rows scattered, on one thread and two."""
    from .bench import run_copy

    return run_copy(tokens=tokens, json=json)


@bench.command(name="kernels")
def bench_kernels(*, json: Json = False) -> int:
    """The kernels on card 0, as shares of what its copy engine does with the same bytes."""
    from .bench import run_kernels

    return run_kernels(json=json)


@bench.command(name="hisparse")
def bench_hisparse(*, json: Json = False) -> int:
    """Decode steps whose KV lies in host memory: hits, bytes, time by part, and how many requests that carries."""
    from .bench import run_hisparse

    return run_hisparse(json=json)


@bench.command(name="stall")
def bench_stall(
    *,
    tokens: Annotated[int, _count("Tokens of one room.")] = 4_096,
    rooms: Annotated[int, _count("Rooms to move.")] = 96,
    json: Json = False,
) -> int:
    """What an embedded client takes of its scheduler's thread while large rooms move."""
    from .bench import run_stall

    return run_stall(tokens=tokens, rooms=rooms, json=json)


@bench.command(name="pages")
def bench_pages(
    *, gib: Annotated[float, Parameter(help="GiB of each of two arenas.")] = 1.0, json: Json = False
) -> int:
    """An arena in pages of 4 KiB against one in what `--huge-pages auto` finds: backing, registering, copies."""
    from .bench import run_pages

    return run_pages(gib=gib, json=json)


@bench.command(name="pd")
def bench_pd(
    *,
    tokens: Annotated[tuple[int, ...], _count("Of a prompt; may be repeated. By default 128 to 32,768.")] = (),
    attention: Annotated[tuple[Attention, ...], Parameter(help="Whose KV; may be repeated.")] = ("mla", "gqa"),
    rounds: Annotated[int, _count("Prompts of each size and way that are counted.")] = 3,
    chunk_tokens: Annotated[int, _count("Tokens that prefill computes at a time.")] = 8_192,
    engine_option: Annotated[tuple[str, ...], Parameter(help="name=value for both engines; may be repeated.")] = (),
    hisparse: Annotated[bool, Parameter(help="Decode from the arena, with the hot tokens on the card.")] = False,
    prefill_device: Annotated[str, Parameter(help="Where prefill computes; by default the first card, if any.")] = "",
    decode_device: Annotated[str, Parameter(help="Where decode does; by default the second card, if any.")] = "",
    report: Annotated[Path | None, Parameter(help="Writes report.html and its pictures into this directory.")] = None,
    json: Json = False,
) -> int:
    """Prompts from a prefill on one card to a decode on another, a model of real dimensions: what the time to the first
    token goes into, how much of the transfer is hidden behind the computing, and whether the aims are met. Without a
    card both compute a tiny model on the CPU, which shows that all of it works, and nothing about speed."""
    from .bench import run_pd

    devices = prefill_device, decode_device
    return run_pd(
        tokens=tokens, attentions=attention, rounds=rounds, chunk_tokens=chunk_tokens, engine_option=engine_option,
        hisparse=hisparse, devices=devices, report=report, json=json,
    )  # fmt: skip


@kernels.command(name="build")
def kernels_build(
    *,
    arch: Annotated[tuple[str, ...], Parameter(help="Architectures such as sm_90; by default the cards' own.")] = (),
    json: Json = False,
) -> int:
    """Compiles every kernel into the cache ahead of time; with --arch on a host without a card, too."""
    from .kernels.build import run

    return run(arch, json=json)


@bench.command(name="plan")
def bench_plan(
    *,
    tokens: Annotated[int, _count("Tokens of one room.")] = 131_072,
    planes: Annotated[int, _count("Planes that each token has.")] = 61,
    json: Json = False,
) -> int:
    """The planner: slots and two layouts to slot runs, pages in a row and rows scattered."""
    from .bench import run_plan

    return run_plan(tokens=tokens, planes=planes, json=json)


@bench.command(name="verify")
def bench_verify(
    *,
    tokens: Annotated[int, _count("Tokens of one large room.")] = 4_096,
    rooms: Annotated[int, _count("Small rooms to move, each way.")] = 1_000,
    json: Json = False,
) -> int:
    """What --verify costs: the checksum beside a memcpy, and hand-offs and rooms with and without it."""
    from .bench import run_verify

    return run_verify(tokens=tokens, rooms=rooms, json=json)


@bench.command(name="prefix")
def bench_prefix(
    *,
    tokens: Annotated[int, _count("Tokens of one room.")] = 80,
    rooms: Annotated[int, _count("Rooms to move, each way.")] = 500,
    json: Json = False,
) -> int:
    """What the prefix cache costs rooms that share nothing, and what it spares those that do."""
    from .bench import run_prefix

    return run_prefix(tokens=tokens, rooms=rooms, json=json)


@bench.command(name="bus")
def bench_bus(*, rounds: Annotated[int, _count("Messages to send.")] = 20_000, json: Json = False) -> int:
    """Messages between two processes: round trip, and echoes a second."""
    from .bench import run_bus

    return run_bus(rounds=rounds, json=json)


@bench.command(name="idle")
def bench_idle(*, seconds: Annotated[int, _count("How long to watch.")] = 10, json: Json = False) -> int:
    """What an idle daemon costs in CPU and memory."""
    from .bench import run_idle

    return run_idle(seconds=seconds, json=json)


@bench.command(name="load")
def bench_load(
    *,
    rooms: Annotated[int, _count("Rooms against each number of peers.")] = 6_000,
    memory_rooms: Annotated[int, _count("Rooms over which memory is watched.")] = 200_000,
    seconds: Annotated[int, _count("How long to watch idle peers.")] = 20,
    concurrency: Annotated[int, _count("Rooms under way at once.")] = 64,
    json: Json = False,
) -> int:
    """Hand-offs against 1, 10 and 100 peers, what 100 idle ones cost, and memory over very many rooms."""
    from .bench import run_load

    return run_load(rooms=rooms, memory_rooms=memory_rooms, seconds=seconds, concurrency=concurrency, json=json)


@bench.command(name="siege")
def bench_siege(
    *,
    rooms: Annotated[int, _count("Rooms in quiet, and as many under each attack.")] = 500,
    rounds: Annotated[int, _count("How often that is done.")] = 5,
    connections: Annotated[int, _count("Junk connections to hold open.")] = 10_000,
    json: Json = False,
) -> int:
    """Healthy hand-offs while strangers and hostile peers attack: p99 over p99 in quiet, for each attack."""
    from .bench import run_siege

    return run_siege(rooms=rooms, rounds=rounds, connections=connections, json=json)


@bench.command(name="faults")
def bench_faults(
    *,
    rooms: Annotated[int, _count("Rooms in quiet.")] = 1_000,
    aborts: Annotated[int, _count("Rooms to abort.")] = 1_000,
    rounds: Annotated[int, _count("How often a peer is frozen.")] = 5,
    json: Json = False,
) -> int:
    """How soon aborted slots are free, and healthy hand-offs beside a peer that is frozen."""
    from .bench import run_faults

    return run_faults(rooms=rooms, aborts=aborts, rounds=rounds, json=json)


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
