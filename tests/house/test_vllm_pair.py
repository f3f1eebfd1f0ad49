"""examples/vllm_pair.py without vLLM: stand-ins answer as its two servers and the router do."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Server(BaseHTTPRequestHandler):
    """A server's /health and /metrics."""

    def do_GET(self) -> None:
        body = {"/health": "", "/metrics": METRICS}[self.path].encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


METRICS = """\
vllm:pdtransfer_rooms_total{end="failed",engine="0"} 7.0
vllm:pdtransfer_rooms_total{end="received",engine="0"} 3.0
vllm:pdtransfer_bytes_total{direction="received",engine="0"} 8.8e+06
"""


@contextmanager
def serving() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def client_that_answers(texts: dict[str, str]) -> type:
    """openai's client: the text is the one of its server, which its address names."""

    def of(url: str, prompt: str) -> Any:
        text = f"{prompt}: {texts[url]}"
        return SimpleNamespace(choices=[SimpleNamespace(text=text, message=SimpleNamespace(content=text))])

    class Client:
        def __init__(self, *, base_url: str, **_: Any) -> None:
            url = base_url.removesuffix("/v1")
            create = lambda **how: of(url, str(how.get("prompt") or how["messages"]))  # noqa: E731
            self.completions = SimpleNamespace(create=create)
            self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))

    return Client


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=None))
    monkeypatch.delitem(sys.modules, "examples.vllm_pair", raising=False)
    from examples import vllm_pair

    return vllm_pair


@pytest.mark.parametrize(("alone", "equal"), [("the same", True), ("something else", False)])
def test_answers_are_held_against_decode_alone(
    alone: str, equal: bool, pair: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as decode:
        monkeypatch.setattr(pair, "OpenAI", client_that_answers({"http://router": "the same", decode: alone}))
        assert pair.show("http://router", decode, "demo") is equal
    out = capsys.readouterr().out
    assert out.count(" -> ") == 3
    assert f"3 hand-offs, 8.8 MB of KV; {'equal' if equal else 'NOT EQUAL'} to decode alone" in out


def test_a_process_ends_with_its_scope_and_one_that_ends_early_is_named(pair: ModuleType, tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with serving() as url, pair.running(sleeper, tmp_path / "sleeper.log") as process:
        pair.wait_healthy(url, [process], tmp_path)
        assert process.poll() is None
    assert process.poll() is not None
    with pair.running([sys.executable, "-c", ""], tmp_path / "short.log") as short:
        short.wait(60)
        with pytest.raises(SystemExit, match="a server did not start"):
            pair.wait_healthy("http://127.0.0.1:9", [short], tmp_path)


def test_the_servers_and_the_router_are_started_as_in_the_documents(
    pair: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = tmp_path / "vllm"
    vllm.touch()
    commands: list[list[str]] = []

    @contextmanager
    def running(command: list[Any], log: Path) -> Iterator[None]:
        commands.append([str(word) for word in command])
        yield

    monkeypatch.setattr(pair, "running", running)
    monkeypatch.setattr(pair, "wait_healthy", lambda *_: None)
    monkeypatch.setattr(pair, "show", lambda *_: True)
    given = ["vllm_pair.py", "MODEL", "--vllm", str(vllm), "--logs", str(tmp_path / "logs"), "--enforce-eager"]
    monkeypatch.setattr(sys, "argv", given)
    assert pair.main() == 0
    *servers, router = commands
    transfers = [json.loads(server[server.index("--kv-transfer-config") + 1]) for server in servers]
    assert [transfer["kv_role"] for transfer in transfers] == ["kv_producer", "kv_consumer"]
    assert {transfer["kv_connector_module_path"] for transfer in transfers} == {"pdtransfer.adapters.vllm"}
    assert all(server[-1] == "--enforce-eager" for server in servers)
    ports = [server[server.index("--port") + 1] for server in servers]
    assert [router[router.index(flag) + 1] for flag in ("--prefill", "--decode")] == [
        f"http://127.0.0.1:{port}" for port in ports
    ]
