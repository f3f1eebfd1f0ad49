"""`pdtransfer doctor PREFILL DECODE`: compares two engines by what their servers report before the first request.

An SGLang server reports it in /server_info, a daemon in /health. A vLLM server does in the answer to a request of one
token, since vLLM has no page that a connector can write to. How long a request may be is what a router would read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...errors import ConfigError, RemoteProtocolError, WorldError
from ...handoff.identity_check import ShownIdentity, differences
from ...limits import TOKENS_MAX
from ...schema import parse
from ..process.logs import printable
from ..router.backends.servers.dialects import DIALECTS
from ..router.fleet.roles import longest_request
from .http_client import HttpClient, read_api_key

WAIT_S = 60.0  # for one answer: an engine on a CPU compiles at its first request
ENGINES_MAX = 4_096  # of one SGLang server: its data parallel ranks
ENGINE = "engine"  # the fact that names the engine's version, which people want to see and nothing depends on
LONGEST = "longest request"  # the tokens of a prompt and its answer: two that differ in it fit
State = Literal["equal", "differs", "may differ"]
STYLES: dict[State, str] = {"equal": "", "differs": "bold red", "may differ": "dim"}


class _SchedulerState(Struct, frozen=True):
    pdtransfer: ShownIdentity | None = None


class _ServerInfo(Struct, frozen=True):
    disaggregation_mode: str | None
    internal_states: Annotated[list[_SchedulerState], Meta(max_length=ENGINES_MAX)] = []


class _AnswerParams(Struct, frozen=True):
    identity: ShownIdentity | None = None


class _Answer(Struct, frozen=True):
    kv_transfer_params: _AnswerParams | None = None


class _DaemonHealth(Struct, frozen=True):
    ready: bool
    identity: ShownIdentity | None = None


_SERVER_INFO = msgspec.json.Decoder(_ServerInfo)
_ANSWER = msgspec.json.Decoder(_Answer)
_DAEMON_HEALTH = msgspec.json.Decoder(_DaemonHealth)
_REQUEST = dumps({"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"identify": True}}).encode()


@dataclass(frozen=True, slots=True)
class Row:
    """One fact of both engines; None where an engine does not have it."""

    name: str
    prefill: str | None
    decode: str | None
    state: State


def run(prefill: str, decode: str, *, api_key: Path | None, json: bool) -> int:
    """Prints a table of facts, or one JSON object; returns 1 if the engines do not fit. Raises ConfigError for what is
    not a URL, and WorldError for a server that does not tell its facts."""
    if not decode:
        raise ConfigError("decode_url: missing: name a prefill and a decode server, or none")
    key = read_api_key(api_key)
    ours = _Server("prefill_url", prefill, key, wait_s=WAIT_S)
    theirs = _Server("decode_url", decode, key, wait_s=WAIT_S)
    first, second = ours.identity(), theirs.identity()
    if first.role == "decode":
        misfits = [f"role: {ours.url} has 'decode', must be 'prefill'"]
    else:  # the lines that both engines would log at their first connection
        misfits = differences(second.in_role("decode", theirs.url), first.in_role("prefill", ours.url), role="decode")
    longest = longest_request([first], [second], lambda shown: shown.context_tokens or TOKENS_MAX)
    longest = None if misfits or longest >= TOKENS_MAX else longest
    rows = compare(first, second)
    if json:
        facts = [asdict(row) for row in rows]
        print(dumps({"ok": not misfits, "differences": misfits, "facts": facts, "longest_request": longest}))
    else:
        _show([f"prefill {ours.url}", f"decode {theirs.url}"], rows, misfits, longest)
    return int(bool(misfits))


def compare(prefill: ShownIdentity, decode: ShownIdentity) -> list[Row]:
    """A row for each fact, in the engines' order. Facts are equal where their digests are; then others may differ."""
    equal = prefill.weights == decode.weights
    names = dict.fromkeys([*prefill.facts, *decode.facts])
    pairs = [("model", prefill.model, decode.model)]
    pairs += [(name, prefill.facts.get(name), decode.facts.get(name)) for name in names]
    if not equal and all(first == second for name, first, second in pairs[1:] if name != ENGINE):
        pairs.append(("weights", prefill.weights, decode.weights))
    ours, theirs = [str(shown.context_tokens) if shown.context_tokens else None for shown in (prefill, decode)]
    if ours or theirs:
        pairs.append((LONGEST, ours, theirs))

    def state(name: str, first: str | None, second: str | None) -> State:
        if first == second:
            return "equal"
        return "may differ" if name in (ENGINE, LONGEST) or (equal and name != "model") else "differs"

    return [Row(name, ours, theirs, state(name, ours, theirs)) for name, ours, theirs in pairs]


class _Server(HttpClient):
    """One engine's server."""

    def identity(self) -> ShownIdentity:
        """The facts that it reports. Raises WorldError."""
        try:
            for ask in (self._of_sglang, self._of_daemon, self._of_vllm):
                if (shown := ask()) is not None:
                    return shown
        except RemoteProtocolError as error:
            raise WorldError(f"{self.url}: {printable(str(error))}") from None
        finally:
            self.close()
        raise WorldError(
            f"{self.url} reports no facts: it must be a vLLM server with PDTransferConnector, an SGLang server with "
            "--disaggregation-transfer-backend pdtransfer, or the HTTP address of a daemon"
        )

    def _of_sglang(self) -> ShownIdentity | None:
        status, body = self.ask("GET", "/server_info")
        if status != 200 or b'"disaggregation_mode"' not in body:
            return None
        states = parse(body, _SERVER_INFO).internal_states
        shown = next((state.pdtransfer for state in states if state.pdtransfer is not None), None)
        return shown and replace(shown, context_tokens=DIALECTS["sglang"].longest(body) or 0)

    def _of_daemon(self) -> ShownIdentity | None:
        status, body = self.ask("GET", "/health")
        if not body.startswith(b'{"ready":'):
            return None
        health = parse(body, _DAEMON_HEALTH)
        if status == 503 and not health.ready:
            raise WorldError(f"{self.url} is not ready yet")
        return health.identity

    def _of_vllm(self) -> ShownIdentity | None:
        status, body = self.ask("POST", "/v1/completions", _REQUEST)
        if status != 200:
            return None
        params = parse(body, _ANSWER).kv_transfer_params
        if params is None or params.identity is None:
            return None
        _, models = self.ask("GET", DIALECTS["vllm"].longest_path)
        return replace(params.identity, context_tokens=DIALECTS["vllm"].longest(models) or 0)


def _show(heads: list[str], rows: list[Row], misfits: list[str], longest: int | None) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("fact", *heads, ""):
        table.add_column(head, overflow="fold")
    for row in rows:
        values = (printable("-" if value is None else value) for value in (row.prefill, row.decode))
        table.add_row(*map(Text, (row.name, *values, row.state)), style=STYLES[row.state])
    console.print(table)
    for line in misfits:
        if line.startswith("role: "):  # no fact
            console.print(Text(printable(line)), soft_wrap=True)
    if longest is not None:
        console.print(f"The longest request has {longest} tokens, of its prompt and answer together.", soft_wrap=True)
    names = ", ".join(row.name for row in rows if row.state == "differs")
    console.print(f"The engines do not fit{names and ': '}{names}." if misfits else "The engines fit.", soft_wrap=True)
