"""A client's request for HTTP servers, as a router reads it."""

from __future__ import annotations

import json

from pdtransfer.serve.router.backends.servers.dialects import read_for_servers
from pdtransfer.serve.router.backends.servers.server_request import ServerRequest
from pdtransfer.serve.router.front.text import BytesText


def relayed(
    body: object, *, path: str = "/v1/completions", engine: str = "vllm", block_tokens: int = 0
) -> ServerRequest:
    """The request of this body: bytes, or what is to be JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    read = read_for_servers(raw, text=BytesText(), engine=engine, block_tokens=block_tokens, path=path)
    read.body, read.path, read.request_id, read.headers = raw, path, "r", {"X-Request-Id": "r"}
    return read
