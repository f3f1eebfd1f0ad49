"""Settings of an adapter: a wrong setting is an error at the start that names it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.adapters.kit.settings import Settings
from pdtransfer.adapters.vllm.settings import ConnectorSettings
from pdtransfer.bus.keys import generate
from pdtransfer.errors import ConfigError
from pdtransfer.wire import Ranks
from tests.support.paths import REPO

WHERE = "kv_connector_extra_config"


def test_settings_come_as_json_writes_them() -> None:
    written = {"bind": "tcp://127.0.0.1:7801", "time_left_s": 30, "verify": True, "copy_threads": 3, "key": None}
    settings = Settings.of(written, WHERE)
    assert (settings.bind, settings.time_left_s, settings.verify, settings.copy_threads) == (
        "tcp://127.0.0.1:7801", 30.0, True, 3,
    )  # fmt: skip
    assert isinstance(settings.time_left_s, float)
    assert settings.host == "127.0.0.1"
    assert Settings.of({}, WHERE) == Settings()


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"bnid": "tcp://127.0.0.1:1"}, "kv_connector_extra_config: 'bnid' must be one of advertise, allow, bind, "),
        ({"bind": "127.0.0.1:7801"}, "bind = '127.0.0.1:7801': must be tcp://host:port"),
        ({"bind": "tcp://127.0.0.1:7801-7805"}, "bind = 'tcp://127.0.0.1:7801-7805': must be tcp://host:port"),
        ({"bind": 7801}, "bind = 7801: must be a text"),
        ({"bind": "tcp://10.0.0.1:7801"}, "bind = 'tcp://10.0.0.1:7801': other hosts could reach it"),
        ({"bind": "tcp://*:7801", "insecure": True}, "bind = 'tcp://*:7801': peers cannot dial that: set advertise"),
        ({"advertise": "a b"}, "advertise = 'a b': must be a host"),
        ({"advertise": "host:7801"}, "advertise = 'host:7801': must be a host that peers can dial, without a port"),
        ({"advertise": "0.0.0.0"}, "advertise = '0.0.0.0': must be a host that peers can dial, without a port"),
        ({"advertise": "::1", "transport": "mooncake"}, "advertise = '::1': transport mooncake is reached by a name"),
        ({"bind": "tcp://[::1]:0", "transport": "nixl"}, "bind = 'tcp://[::1]:0': transport nixl is reached by IPv4"),
        ({"key": "p.key"}, "key = 'p.key': useless without allow"),
        ({"allow": "peers"}, "allow = 'peers': useless without key"),
        ({"key": 3, "allow": "peers"}, "key = 3: must be a path"),
        ({"verify": "yes"}, "verify = 'yes': must be true or false"),
        ({"insecure": 1}, "insecure = 1: must be true or false"),
        ({"time_left_s": 0}, "time_left_s = 0.0: must be from 1.0 to 86400.0"),
        ({"time_left_s": True}, "time_left_s = True: must be a number"),
        ({"copy_threads": 2.5}, "copy_threads = 2.5: must be an integer"),
        ({"transport": "carrier pigeon"}, "transport = 'carrier pigeon': must be auto or one of"),
        ({"transport_protocol": "udp"}, "transport_protocol = 'udp': must be one of tcp, rdma"),
        ({"transport_ports": "9"}, "transport_ports = '9': must be first-last"),
        ({"model": "x" * 129}, "must be at most 128 printable ASCII characters"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.of(extra, WHERE)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_rank_has_a_port_of_its_own() -> None:
    settings = Settings.of({"bind": "tcp://127.0.0.1:7801"}, WHERE)
    assert [settings.bind_of(rank) for rank in range(3)] == [f"tcp://127.0.0.1:{port}" for port in (7801, 7802, 7803)]
    assert Settings().bind_of(5) == "tcp://127.0.0.1:0"
    assert Settings.of({"bind": "tcp://[::1]:9"}, WHERE).bind_of(1) == "tcp://[::1]:10"
    with pytest.raises(ConfigError, match="rank 1 has no port"):
        Settings.of({"bind": "tcp://127.0.0.1:65535"}, WHERE).bind_of(1)


def test_each_rank_has_a_key_of_its_own(tmp_path: Path) -> None:
    lines = [generate(tmp_path / name) for name in ("p0", "p0-tp1")]
    (tmp_path / "peers").write_text("\n".join(lines))
    settings = Settings.of({"key": str(tmp_path / "p0.key"), "allow": str(tmp_path / "peers")}, WHERE)
    keys = [settings.keys_of(Ranks(rank, 2))[0] for rank in range(2)]
    assert [key.public for key in keys if key] == [line.split()[1] for line in lines]
    assert Settings().keys_of(Ranks()) == (None, None)


def test_each_setting_is_in_the_documents_table() -> None:
    text = (REPO / "docs" / "vllm.md").read_text(encoding="utf-8").partition("| setting | default | meaning |")[2]
    first = [row.split("|")[1] for row in text.partition("\n\n")[0].splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", "".join(first))) == sorted(field.name for field in fields(ConnectorSettings))
