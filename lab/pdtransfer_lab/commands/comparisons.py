"""More parts of `pdtransfer bench`, which attack this project's own parts, and compare them with others."""

from __future__ import annotations

from pathlib import Path
from shlex import split
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from pdtransfer.serve.settings.node import Json, counted

from ..bench.fleets.requests import option
from ..bench.report import show
from .bench import bench, progress

COMPARISONS = Group("Comparisons and attacks", help="Attack this project's own parts, or compare them with others.")


@bench.command(group=COMPARISONS)
def engines(
    model: Annotated[str, Parameter(help="A model's directory, or dimensions with random weights: qwen3-8b, tiny.")],
    /,
    *options: Annotated[str, Parameter(help="For all servers, behind --.", allow_leading_hyphen=True)],
    engine: Annotated[Literal["vllm", "sglang"], Parameter(help="Whose servers these are.")] = "vllm",
    python: Annotated[Path | None, Parameter(help="An interpreter that has it; by default .venv-vllm's or so.")] = None,
    fleet: Annotated[
        tuple[str, ...],
        Parameter(help="'one engine', or a connector or backend; repeated. By default one engine, and pdtransfer's."),
    ] = (),
    prefill_options: Annotated[
        str, Parameter(help="For prefill servers, as in a shell.", allow_leading_hyphen=True)
    ] = "",
    decode_options: Annotated[str, Parameter(help="For decode servers.", allow_leading_hyphen=True)] = "",
    hisparse_gib: Annotated[
        float, Parameter(help="vLLM: HiSparse on one engine and on decode, with a host pool of this many GiB.")
    ] = 0.0,
    card: Annotated[tuple[str, ...], Parameter(help="Of the first and second server; repeated. None on CPUs.")] = (),
    first: Annotated[int, counted("The first requests of a fresh fleet, one after the other.")] = 50,
    prompt: Annotated[tuple[int, ...], counted("Tokens of a prompt; may be repeated.")] = (1_024,),
    clients: Annotated[tuple[int, ...], counted("Requests under way at once; may be repeated.")] = (1, 8),
    requests: Annotated[int, counted("Requests of each client.")] = 2,
    tokens: Annotated[int, counted("Tokens to generate.")] = 64,
    at_once: Annotated[int, counted("Tokens of prompts at once; cells with more are left out.")] = 300_000,
    beside: Annotated[tuple[int, ...], counted("Tokens of prompts beside decode's streams; may be repeated.")] = (),
    setting: Annotated[tuple[str, ...], Parameter(help="name=JSON of our connector's or backend's; repeated.")] = (),
    environment: Annotated[tuple[str, ...], Parameter(help="NAME=value for the servers; may be repeated.")] = (),
    logs: Annotated[Path, Parameter(help="Where the servers' logs and rows.jsonl are written.")] = Path(
        "build/engines"
    ),
    json: Json = False,
) -> int:
    """Real vLLM or SGLang: one engine, beside prefill and decode with pdtransfer and with the engine's connectors."""
    from ..bench.fleets import engines as part

    setup = part.setup_of(
        model, options, python or Path(f".venv-{engine}/bin/python"), card, setting, environment, logs,
        prefill_options=split(prefill_options), decode_options=split(decode_options), hisparse_gib=hisparse_gib,
    )  # fmt: skip
    servers = part.ENGINES[engine]
    result = part.measure(
        setup, engine=servers, fleets=fleet or (part.ONE, servers.our_link), first=first,
        cells=part.cells(prompt, clients, requests, at_once), tokens=tokens, beside=beside,
        out=setup.logs / "rows.jsonl", progress=progress,
    )  # fmt: skip
    return part.show(result, as_json=json)


@bench.command(group=COMPARISONS)
def chaos(
    model: Annotated[str, Parameter(help="A model's directory, or dimensions with random weights: qwen3-8b, tiny.")],
    /,
    *options: Annotated[str, Parameter(help="For both servers, behind --.", allow_leading_hyphen=True)],
    python: Annotated[Path, Parameter(help="An interpreter that has vLLM.")] = Path(".venv-vllm/bin/python"),
    connector: Annotated[tuple[str, ...], Parameter(help="Of these servers; repeated.")] = ("PDTransferConnector",),
    fault: Annotated[tuple[str, ...], Parameter(help="Only these; repeated.")] = (),
    rounds: Annotated[int, counted("How often each fault strikes.")] = 1,
    card: Annotated[tuple[str, ...], Parameter(help="Of prefill and of decode; repeated. None on CPUs.")] = (),
    environment: Annotated[tuple[str, ...], Parameter(help="NAME=value for the servers; may be repeated.")] = (),
    logs: Annotated[Path, Parameter(help="Where the servers' logs are written.")] = Path("build/chaos"),
    json: Json = False,
) -> int:
    """Two vLLM engines whose requests are given up, and that are killed and restarted under load. Prints blocks that
    stay, and seconds until answers are right, with our connector and with vLLM's own."""
    from ..bench.fleets import chaos as part
    from ..bench.fleets.engines import setup_of

    setup = setup_of(model, options, python, card, (), environment, logs)
    outcomes = part.measure(
        setup, links=connector, faults=fault or tuple(part.FAULTS), rounds=rounds, progress=progress
    )
    part.show(outcomes, as_json=json)
    return int(part.failed(outcomes))


@bench.command(group=COMPARISONS)
def checkpoints(
    model: Annotated[
        str, Parameter(help="A checkpoint's directory, or of which shape random weights are: qwen3-8b, ...")
    ],
    /,
    *,
    device: Annotated[tuple[str, ...], Parameter(help="Prefill's and decode's; once for both.")] = ("cpu",),
    prompt: Annotated[tuple[int, ...], counted("Tokens of a prompt; may be repeated.")] = (1_024,),
    clients: Annotated[tuple[int, ...], counted("Requests under way at once; may be repeated.")] = (1, 8, 64),
    requests: Annotated[int, counted("Requests of each client.")] = 2,
    tokens: Annotated[int, counted("Tokens to generate.")] = 128,
    chunk_tokens: Annotated[int, counted("Tokens that prefill computes at a time.")] = 8_192,
    slots: Annotated[int, counted("Tokens that each side's memory holds.")] = 131_072,
    check: Annotated[int, counted("Prompts of each length whose tokens are compared with those of generate.")] = 4,
    engine_option: Annotated[tuple[str, ...], Parameter(help="name=value for both engines; may be repeated.")] = (),
    logs: Annotated[Path, Parameter(help="Where logs and timelines are written.")] = Path("build/checkpoints"),
    json: Json = False,
) -> int:
    """A checkpoint behind the daemons, beside transformers' generate: TTFT, ITL, tokens/s, exposed transfer."""
    from ..bench.fleets import checkpoints as part

    logs.mkdir(parents=True, exist_ok=True)
    given = dict(map(option, engine_option))
    wanted = part.Measured(
        model=part.model_of(model, logs), devices=(device[0], device[-1]), logs=logs.resolve(), prompts=prompt,
        clients=clients, requests=requests, tokens=tokens, chunk_tokens=chunk_tokens, slots=slots, check=check,
        options=given if Path(model).is_dir() else {"weights": "random"} | given,
    )  # fmt: skip
    return part.show(part.measure(wanted, progress=progress), as_json=json)


@bench.command(group=COMPARISONS)
def load(
    *,
    rooms: Annotated[int, counted("Rooms against each number of peers.")] = 6_000,
    memory_rooms: Annotated[int, counted("Rooms over which memory is watched.")] = 200_000,
    seconds: Annotated[int, counted("How long to watch idle peers.")] = 20,
    concurrency: Annotated[int, counted("Rooms under way at once.")] = 64,
    json: Json = False,
) -> int:
    """Hand-offs against 1, 10 and 100 peers, what 100 idle ones cost, and memory over very many rooms."""
    from ..bench.fleets import load as part

    figures = part.measure(rooms=rooms, memory_rooms=memory_rooms, idle_seconds=seconds, concurrency=concurrency)
    return show(figures, part.LINES, part.measure, json=json)


@bench.command(group=COMPARISONS)
def siege(
    *,
    rooms: Annotated[int, counted("Rooms in quiet, and as many under each attack.")] = 500,
    rounds: Annotated[int, counted("How often that is done.")] = 5,
    connections: Annotated[int, counted("Junk connections to hold open.")] = 10_000,
    json: Json = False,
) -> int:
    """Healthy hand-offs while strangers and hostile peers attack: p99 over p99 in quiet, for each attack."""
    from ..bench.fleets import siege as part

    figures = part.measure(rooms=rooms, rounds=rounds, connections=connections)
    return show(figures, part.LINES, part.measure, json=json)


@bench.command(group=COMPARISONS)
def floods(
    *attacks: Annotated[str, Parameter(help="Only these, by name.")],
    seconds: Annotated[float, Parameter(help="In quiet, and as long under each attack.")] = 8.0,
    rounds: Annotated[int, counted("How often that is done.")] = 3,
    clients: Annotated[int, counted("Requests under way at once.")] = 8,
    attackers: Annotated[int, counted("Processes that attack each listener.")] = 1,
    json: Json = False,
) -> int:
    """Requests to a whole fleet while strangers and hostile peers flood its listeners: goodput over that in quiet."""
    from json import dumps

    from ..bench.fleets import floods as part
    from ..bench.report import about

    given = part.FloodMeasure(seconds=seconds, rounds=rounds, clients=clients, attackers=attackers)
    rows = part.measure(given, attacks=attacks, progress=progress)
    if json:
        print(dumps({"tables": [[part.HEAD, *rows]]} | about(part.measure)))
    else:
        part.show(rows)
    return 0


@bench.command(group=COMPARISONS)
def faults(
    *,
    rooms: Annotated[int, counted("Rooms in quiet.")] = 1_000,
    aborts: Annotated[int, counted("Rooms to abort.")] = 1_000,
    rounds: Annotated[int, counted("How often a peer is frozen.")] = 5,
    json: Json = False,
) -> int:
    """How soon aborted slots are free, and healthy hand-offs beside a peer that is frozen."""
    from ..bench.fleets import faults as part

    return show(part.measure(rooms=rooms, aborts=aborts, rounds=rounds), part.LINES, part.measure, json=json)


@bench.command(group=COMPARISONS)
def storms(
    *kinds: Annotated[str, Parameter(help="Only these fleets, by name.")],
    storms: Annotated[int, counted("Storms over each fleet.")] = 4,
    seed: Annotated[int, counted("Of the first storm; each next one has the next.")] = 1,
    json: Json = False,
) -> int:
    """Whole fleets in storms of SIGKILL and SIGSTOP: no answer wrong, no request hung, and how soon all is right."""
    from json import dumps

    from ..bench.fleets import storms as part
    from ..bench.report import about

    outcomes = part.measure(storms=storms, seed=seed, kinds=kinds, progress=progress)
    if json:
        print(dumps({"tables": [[part.HEAD, *part.rows(outcomes)]]} | about(part.measure)))
    else:
        part.show(outcomes)
    return int(part.failed(outcomes))


@bench.command(group=COMPARISONS)
def figures(
    *results: Annotated[Path, Parameter(help="Files of what parts have printed with --json, an object a line.")],
    directory: Annotated[Path, Parameter(help="Where the pages are written.")] = Path("docs/figures/runs"),
) -> int:
    """Writes a page for each result, of pdtransfer bench too: its tables, host, date, method and commit."""
    from ..bench.figures import write

    for path in (path for result in results for path in write(result, directory)):
        print(path)
    return 0
