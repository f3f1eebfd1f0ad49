"""llm-d's routing sidecar: its own program where PDTRANSFER_TEST_SIDECAR names one, else played after its
`pkg/sidecar/proxy`, as far as that decides what two servers are sent.

It runs beside a decode server. Its proxy names the prefill server in a header, and it sends a request to both.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlsplit
from uuid import uuid1

from tests.support.sglang_engine import free_port
from tests.support.vllm_server import HttpProcess

PROGRAM = os.environ.get("PDTRANSFER_TEST_SIDECAR")
PREFILLER = "x-prefiller-host-port"
ANSWER_S = 240.0
# As null, so that vLLM's own connector finds the names that it reads.
NIXL_V2: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
Headers = list[tuple[str, str]]
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")  # of completions and of chats


@dataclass(frozen=True)
class Answered:
    """A status, and a body or a stream as it came."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def streamed(self) -> list[Any]:
        """The events of a stream, which must be whole."""
        *events, done, rest = self.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", ""), self.text
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Sidecar(Protocol):
    """One that stands before a decode server, with `--kv-connector` `connector`."""

    @property
    def connector(self) -> str: ...

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answered:
        """Its answer to a request."""
        ...


@contextmanager
def sidecar(decoder: str, connector: str, bootstrap_port: int, log: Path) -> Generator[Sidecar]:
    """One before the server at `decoder`, with `--kv-connector` `connector`. llm-d's own listens on every interface."""
    if PROGRAM is None:
        yield PlayedSidecar(decoder, connector, bootstrap_port)
        return
    port = free_port()
    command: list[str | Path] = [
        PROGRAM, f"--port={port}", f"--model-server-port={urlsplit(decoder).port}", "--secure-proxy=false",
        f"--kv-connector={connector}", f"--mooncake-bootstrap-port={bootstrap_port}",
    ]  # fmt: skip
    with HttpProcess(command, port, log, {"SGLANG_BOOTSTRAP_PORT": str(bootstrap_port)}) as process:
        yield RunningSidecar(process.ready().url, connector)


@dataclass(frozen=True)
class RunningSidecar:
    """llm-d's own, which listens at `url`."""

    url: str
    connector: str

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answered:
        content = json.dumps(body).encode()
        return _ask("POST", self.url + path, [*headers.items(), ("Content-Type", "application/json")], content)


@dataclass(frozen=True)
class PlayedSidecar:
    """One before the server at `decoder`."""

    decoder: str
    connector: str
    bootstrap_port: int  # of prefill

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answered:
        """Answers a request as the sidecar does."""
        request = _decoded(json.dumps(body))
        kept = [(name, value) for name, value in headers.items() if name.lower() != PREFILLER]
        prefillers = [value for name, value in headers.items() if name.lower() == PREFILLER]
        if not prefillers:
            return _send(self.decoder + path, request, kept)
        prefiller = prefillers[0].split(",")[0].strip()
        protocol = {"nixlv2": self._nixl_v2, "mooncake": self._mooncake, "sglang": self._sglang}[self.connector]
        return protocol(f"http://{prefiller}", path, request, kept)

    def _nixl_v2(self, prefiller: str, path: str, request: dict[str, Any], headers: Headers) -> Answered:
        """Prefill first. Decode gets what prefill has returned, whatever that is. Where the client has sent an
        X-Request-Id, both requests have two."""
        headers = [*headers, ("X-Request-Id", str(uuid1()))]
        alone = request | {"kv_transfer_params": NIXL_V2, "stream": False} | dict.fromkeys(_LIMITS, 1)
        alone.pop("stream_options", None)
        prefilled = _send(prefiller + path, alone, headers)
        if prefilled.status >= 400:
            return prefilled
        params = _decoded(prefilled.text).get("kv_transfer_params")
        return _send(self.decoder + path, request | {"kv_transfer_params": params}, headers)

    def _mooncake(self, prefiller: str, path: str, request: dict[str, Any], headers: Headers) -> Answered:
        """Both at once, after a question to prefill's bootstrap server. Nobody looks at prefill's answer."""
        bootstrap = f"{prefiller.rpartition(':')[0]}:{self.bootstrap_port}"
        ranks = _decoded(_ask("GET", f"{bootstrap}/query", []).text)
        rank, engine = next(iter(ranks.items()))
        shared = {"transfer_id": f"xfer-{uuid1()}"}
        sends = {"do_remote_prefill": False, "do_remote_decode": True} | shared
        receives = {"do_remote_prefill": True, "do_remote_decode": False} | shared
        receives |= {"remote_bootstrap_addr": bootstrap, "remote_engine_id": engine["engine_id"]}
        alone = request | {"kv_transfer_params": sends, "max_tokens": 1, "stream": False}
        alone |= {"max_completion_tokens": 1} if "max_completion_tokens" in request else {}
        alone.pop("stream_options", None)
        to_prefill = (prefiller + path, alone, [*headers, ("X-data-parallel-rank", rank)])
        threading.Thread(target=_send, args=to_prefill, daemon=True).start()
        return _send(self.decoder + path, request | {"kv_transfer_params": receives}, headers)

    def _sglang(self, prefiller: str, path: str, request: dict[str, Any], headers: Headers) -> Answered:
        """The same to both at once. Nobody looks at prefill's answer."""
        both = request | {"bootstrap_host": urlsplit(prefiller).hostname, "bootstrap_port": self.bootstrap_port}
        both["bootstrap_room"] = time.time_ns()
        threading.Thread(target=_send, args=(prefiller + path, both, headers), daemon=True).start()
        return _send(self.decoder + path, both, headers)


def _decoded(text: str | bytes) -> dict[str, Any]:
    """As Go decodes JSON into any: each number is a float of 64 bits."""
    return json.loads(text, parse_int=float)


def _encoded(value: Any) -> Any:
    """As Go encodes such a float: without a point where it has no fraction."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _encoded(fields[name]) for name in sorted(fields)}
    if isinstance(value, list):
        return [_encoded(member) for member in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value


def _send(url: str, body: dict[str, Any], headers: Headers) -> Answered:
    content = json.dumps(_encoded(body)).encode()
    return _ask("POST", url, [*headers, ("Content-Type", "application/json")], content)


def _ask(method: str, url: str, headers: Headers, content: bytes = b"") -> Answered:
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.netloc, timeout=ANSWER_S)) as connection:
        connection.putrequest(method, parts.path)
        for name, value in [*headers, ("Content-Length", str(len(content)))]:
            connection.putheader(name, value)
        connection.endheaders(content)
        response = connection.getresponse()
        return Answered(response.status, response.read().decode(errors="replace"))
