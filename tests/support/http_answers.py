"""HTTP servers of this process at loopback, each of which answers by a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, bytes], tuple[int, bytes]]
"""From a path and a body to a status and a body."""


@contextmanager
def answering(answer: Answer, key: str = "") -> Generator[str]:
    """Yields the URL of a server, which asks for the API key if given."""

    class Server(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            keyed = not key or self.headers.get("Authorization") == f"Bearer {key}"
            status, text = answer(self.path, body) if keyed else (401, b"{}")
            if body and self.headers.get("Content-Type") != "application/json":  # as vLLM's servers
                status, text = 415, b"{}"
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Site:
    """Several of them, until `ended` is closed."""

    def __init__(self, ended: ExitStack) -> None:
        self._ended = ended

    def url(self, answer: Answer, key: str = "") -> str:
        return self._ended.enter_context(answering(answer, key))
