"""The commands `pdtransfer replay` and `pdtransfer plan`. Each imports its implementation when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pdtransfer.errors import ConfigError
from pdtransfer.serve.settings.node import FLAT, Json, counted

from ..replay.prompts import VOCABULARY, PromptKind
from .replay_config import FleetConfig, TraceConfig, target_of


def replay(
    trace: Annotated[Path, Parameter(help="Mooncake's JSON lines or BurstGPT's CSV.")],
    /,
    requests: Annotated[TraceConfig | None, FLAT] = None,
    *,
    router: Annotated[str, Parameter(help="URL of a router, or of any OpenAI-compatible endpoint.")] = "",
    simulate: Annotated[
        bool, Parameter(help="Replay against a model of a fleet; the flags below describe it.")
    ] = False,
    fleet: Annotated[FleetConfig | None, FLAT] = None,
    prefill: Annotated[int, counted("Prefill workers of the model.")] = 1,
    decode: Annotated[int, counted("Decode workers of the model.")] = 1,
    users: Annotated[int, counted("Copies of the trace for the model, each with other users.")] = 1,
    served_model: Annotated[str, Parameter(help="Model to ask for; by default the first of /v1/models.")] = "",
    api_key: Annotated[Path | None, Parameter(help="A file with the endpoint's API key.")] = None,
    prompts: Annotated[PromptKind, Parameter(help="Prompts as token ids, or as words where ids are refused.")] = "ids",
    vocabulary: Annotated[int, counted("Token ids of prompts are below this, and at least 32.")] = VOCABULARY,
    timeout_s: Annotated[float, Parameter(help="A request fails after this.")] = 600.0,
    in_flight_max: Annotated[int, counted("Requests under way at once; more are counted as not sent.")] = 4_096,
    metrics: Annotated[
        tuple[str, ...], Parameter(help="host:port of a decode worker's metrics, for its arena; may be repeated.")
    ] = (),
    plot: Annotated[Path | None, Parameter(help="Draws the figures to this .png or .svg.")] = None,
    json: Json = False,
) -> int:
    """Replays a trace of requests: first-token and inter-token times, goodput under an SLO, prefix hits, errors."""
    from .replay_runs import run_replay

    if bool(router) == simulate:
        raise ConfigError("router, simulate: a replay needs one of --router URL and --simulate")
    requests = requests or TraceConfig()
    if simulate:
        modelled = fleet or FleetConfig(), prefill, decode
        return run_replay(trace, requests, target=None, fleet=modelled, users=users, plot=plot, as_json=json)
    target = target_of(
        router, model=served_model, api_key=api_key, prompts=prompts, vocabulary=vocabulary,
        timeout_s=timeout_s, in_flight_max=in_flight_max, metrics=metrics,
    )  # fmt: skip
    return run_replay(trace, requests, target=target, users=users, plot=plot, as_json=json)


def plan(
    trace: Annotated[Path, Parameter(help="Mooncake's JSON lines or BurstGPT's CSV.")],
    /,
    requests: Annotated[TraceConfig | None, FLAT] = None,
    *,
    fleet: Annotated[FleetConfig | None, FLAT] = None,
    users: Annotated[int, counted("Copies of the trace, each with other users.")] = 1,
    share: Annotated[float, Parameter(help="Of the requests that must keep the SLO.")] = 0.95,
    jobs: Annotated[int, counted("Fleets that are tried at once, a core each.")] = 2,
    json: Json = False,
) -> int:
    """Finds how many prefill and decode workers a trace takes under an SLO, with their slots, ports and GB/s."""
    from .replay_runs import run_plan

    return run_plan(
        trace, requests or TraceConfig(), fleet or FleetConfig(), users=users, share=share, jobs=jobs, as_json=json
    )
