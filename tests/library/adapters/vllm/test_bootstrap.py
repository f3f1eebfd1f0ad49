"""The name of a prefill engine, as a proxy gets it by HTTP and hands it to decode."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from urllib.error import HTTPError

import pytest

from pdtransfer.adapters.kit.peers import Reachable, RequestError
from pdtransfer.adapters.vllm.bootstrap import Bootstrap, name_of, params_of
from pdtransfer.adapters.vllm.params import ReceiveFrom, parse
from pdtransfer.bus.keys import AllowList, generate_pair
from tests.support.waiting import PATIENCE_S

RANKS = ("tcp://127.0.0.1:7801", "tcp://127.0.0.1:7802")
NAME = name_of("p0", RANKS, 2)
ASKED = {
    "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "xfer-1", "remote_engine_id": NAME,
    "remote_bootstrap_addr": "http://127.0.0.1:8998",
}  # fmt: skip


@pytest.fixture
def bootstrap() -> Iterator[Bootstrap]:
    listening = Bootstrap("127.0.0.1:0", NAME)
    yield listening
    listening.close()


def queried(port: int) -> object:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/query", timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_decode_finds_all_ranks_by_the_name() -> None:
    assert parse(ASKED, Reachable()) == ReceiveFrom("xfer-1", RANKS)
    six = params_of(name_of("a@b", ["tcp://[::1]:7801"], 1))
    assert (six["remote_engine_id"], six["remote_host"], six["remote_port"]) == ("a@b", "::1", 7801)
    key = generate_pair().public
    listed = Reachable(AllowList({key: "p0"}))
    named = ASKED | {"remote_engine_id": name_of("p0", [f"{key}@tcp://10.0.0.1:7801"], 1)}
    assert parse(named, listed) == ReceiveFrom("xfer-1", (f"{key}@tcp://10.0.0.1:7801",))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"remote_engine_id": "0f8fad5b_dp0"}, "remote_engine_id: '0f8fad5b_dp0': the prefill engine has a different"),
        ({"remote_engine_id": None}, "remote_engine_id: missing"),
        ({"transfer_id": None}, "transfer_id: missing"),
        ({"remote_engine_id": "p0@10.0.0.1:7801/1x1"}, "remote_host: 10.0.0.1 is another host"),
        ({"remote_engine_id": "p0@127.0.0.1:70000/1x1"}, "remote_port: 70000"),
        ({"remote_engine_id": "p0@127.0.0.1:7801/0x1"}, "tp_size: 0"),
        ({"remote_engine_id": "p0@127.0.0.1:7801/1x1/"}, "a different connector"),
    ],
)
def test_a_name_of_another_kind_fails_its_request(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(ASKED | wrong, Reachable())
    assert text in str(caught.value)


def test_a_proxy_gets_the_name_for_the_first_data_parallel_rank(bootstrap: Bootstrap) -> None:
    assert queried(bootstrap.port) == {"0": {"engine_id": NAME}}
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{bootstrap.port}/register", timeout=PATIENCE_S)


def test_who_asks_nothing_keeps_nobody_else_out(bootstrap: Bootstrap) -> None:
    with socket.create_connection(("127.0.0.1", bootstrap.port)) as silent:
        silent.sendall(b"GET /qu")
        assert queried(bootstrap.port) == {"0": {"engine_id": NAME}}


def test_its_port_is_free_when_it_has_ended() -> None:
    first = Bootstrap("127.0.0.1:0", NAME)
    port = first.port
    assert queried(port)
    first.close()
    again = Bootstrap(f"127.0.0.1:{port}", NAME)
    assert queried(port)
    again.close()
