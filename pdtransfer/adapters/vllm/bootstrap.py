"""Answers proxies that send a request to both engines at once, and ask the prefill engine for its name before.

They do what vLLM's Mooncake connector wants: GET /query returns a name for each data parallel rank, and decode's
requests have that name as `remote_engine_id`, unchanged. So the name here has all that decode has to know.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from ...bus.keys import Address, Endpoint
from ..kit.peers import RequestError

READ_S = 2.0  # that a client has for its request: one is answered after another
_NAME = re.compile(r"(?P<engine_id>.+)@(?P<host>[^@/]+):(?P<port>\d{1,5})/(?P<tp>\d{1,4})x(?P<pp>\d{1,4})")


def name_of(engine_id: str, endpoints: Sequence[str], tp_size: int) -> str:
    """The name of a prefill engine: rank r listens on the port of its first rank + r."""
    address = Endpoint.parse(endpoints[0]).address.removeprefix("tcp://")
    return f"{engine_id}@{address}/{tp_size}x{len(endpoints) // tp_size}"


def params_of(name: str) -> dict[str, Any]:
    """The fields of kv_transfer_params that a name stands for. Raises RequestError."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise RequestError(f"remote_engine_id: {name!r}: the prefill engine has a different connector")
    return {
        "remote_engine_id": parts["engine_id"], "remote_host": parts["host"].strip("[]"),
        "remote_port": int(parts["port"]), "tp_size": int(parts["tp"]), "pp_size": int(parts["pp"]),
    }  # fmt: skip


class Bootstrap:
    """Listens at `address`, host:port, until `close`. OSError where that is not possible."""

    def __init__(self, address: str, name: str) -> None:
        content = json.dumps({"0": {"engine_id": name}}).encode()

        class Query(BaseHTTPRequestHandler):
            timeout = READ_S

            def do_GET(self) -> None:
                if self.path != "/query":
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Nothing: vLLM's log is not for what anybody asks."""

        parsed = Address.parse(f"tcp://{address}")

        class Listener(HTTPServer):
            address_family = socket.AF_INET6 if ":" in parsed.host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Nothing: a client has left, or was too slow."""

        self._server = Listener(("" if parsed.host == "*" else parsed.host, parsed.port_first), Query)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="pdtransfer-bootstrap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
