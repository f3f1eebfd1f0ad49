"""The place of a process in its group: valid settings, and how the router names a group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from pdtransfer.bus.keys import generate
from pdtransfer.errors import ConfigError
from pdtransfer.handoff.peers import Send
from pdtransfer.limits import Limits
from pdtransfer.serve.engines.stamp.factory import create
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.serve.settings.ranks import advertised, group_endpoint
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.worker.group.meeting import common, rank_configs
from pdtransfer.wire import Begin, Load, Member, Welcome
from tests.support.routing_world import LIMITS, identity, request

GROUP = "127.0.0.1:7100"
KEY = "bB<^>b]T&ncT)k#p?RRdw@gKR9<g&@=K7ynK0gc5"  # a Z85 key may hold an @ itself
KEYED = {"key": Path("k"), "allow": Path("a")}


def test_a_wildcard_is_accepted_alone_or_with_advertise() -> None:
    wild = {"bind": "tcp://*:7101", "insecure": True}
    assert PrefillConfig(**wild).advertise == ""  # alone: the router's config has its endpoint
    assert PrefillConfig(**wild, tp_size=2, group=GROUP).leads  # also for a leader that starts no ranks
    for bind, advertise, expected in (
        ("tcp://0.0.0.0:7101", "node-7", "tcp://node-7:7101"),
        ("tcp://[::]:7101", "2001:db8::7", "tcp://[2001:db8::7]:7101"),
        ("tcp://10.0.0.7:7101", "", "tcp://10.0.0.7:7101"),
    ):
        assert advertised(bind, advertise) == expected
        leader = PrefillConfig(tp_size=2, bind=bind, advertise=advertise, insecure=True)
        (rank,) = rank_configs(leader, GROUP)
        assert (rank.advertise, rank.bind.rpartition(":")[2], rank.tp_rank) == (advertise, "0", 1)


@pytest.mark.parametrize(
    ("device", "devices"),
    [
        ("cpu", ["cpu"] * 4),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:1", ["cuda:1"] * 4),
        ("cuda:1,cuda:0", ["cuda:1", "cuda:0"] * 2),
        ("cuda:3,cuda:1,cuda:0,cuda:2", ["cuda:3", "cuda:1", "cuda:0", "cuda:2"]),
    ],
)
def test_each_rank_computes_on_its_own_card_unless_one_is_given(device: str, devices: list[str]) -> None:
    leader = PrefillConfig(tp_size=2, pp_size=2, device=device)
    ranks = [leader, *rank_configs(leader, GROUP)]
    assert [rank.engine_config.device for rank in ranks] == devices
    assert [rank.device_index for rank in ranks] == [None if device == "cpu" else int(device[5:]) for device in devices]


SPARSE = {"enable_hisparse": True}


@pytest.mark.parametrize(
    ("usual", "more", "name"),
    [
        ({}, {"verify": True}, "verify"),
        ({}, SPARSE, "enable_hisparse"),
        *((SPARSE, SPARSE | {name: 512}, name) for name in ("device_slots", "hot_tokens", "dense_slots")),
        ({}, {"prefix_cache": False}, "prefix_cache"),
        *(({}, {"limits": Limits(**{name: 32})}, name) for name in ("turn_tokens_max", "prefix_block_tokens")),
    ],
)
def test_ranks_differ_by_the_one_setting_that_is_anothers(usual: dict, more: dict, name: str) -> None:
    description = SimpleNamespace(model="m", weights=b"w")
    own, other = common(DecodeConfig(**usual), description), common(DecodeConfig(**more), description)
    assert {each for each in own if own[each] != other[each]} == {name}


def test_a_follower_takes_free_ports_unless_others_are_given() -> None:
    follower = DecodeConfig(tp_size=2, tp_rank=1, group=GROUP)
    assert (follower.bind, follower.listen, follower.leads) == ("tcp://127.0.0.1:0", "", False)
    config = DecodeConfig(tp_size=2, tp_rank=1, group=GROUP, bind="tcp://127.0.0.1:7301", listen="127.0.0.1:7302")
    assert (config.bind, config.listen) == ("tcp://127.0.0.1:7301", "127.0.0.1:7302")
    leader = DecodeConfig(tp_size=2)
    assert (leader.bind, leader.listen, leader.leads) == ("tcp://127.0.0.1:7201", "127.0.0.1:7202", True)


def test_settings_common_to_all_ranks_include_the_weights_and_the_sizes() -> None:
    config = PrefillConfig(engine_option=("layers=1",), slots=256)
    described = common(config, create(config.engine_config).description)
    assert described["slots"] == "256"
    assert described["chunk_tokens"] == "512"
    assert len(described["weights"]) == 32
    other = PrefillConfig(engine_option=("layers=1", "seed=1"), slots=256)
    assert common(other, create(other.engine_config).description)["weights"] != described["weights"]


def test_the_router_names_decode_ranks_by_key() -> None:
    p, d, d1 = (f"{letter * 40}@tcp://h:{port}" for port, letter in enumerate("pde", 1))
    routing = Routing(identity("r", "router"), prefill=[p], decode=[d], limits=LIMITS, mint=lambda: 7)
    routing.start(0.0)
    decode = replace(identity("d0", "decode"), group=(Member("d0", ""), Member("d0-tp1", d1)))
    for peer, who in ((p, identity("p0", "prefill")), (d, decode)):
        routing.receive(peer, Welcome(1, who), 0.0)
        routing.receive(peer, Load(True, False, 0, 0, 1_000, 1_000), 0.0)
    _, effects = routing.submit(request(), 0.0)
    begins = {e.peer: e.message.peers for e in effects if isinstance(e, Send) and isinstance(e.message, Begin)}
    assert begins == {d: (p,), p: ("d" * 40, "e" * 40)}


def test_a_group_is_reached_from_other_hosts_where_peers_are_with_keys_or_insecure() -> None:
    far = {"tp_size": 2, "bind": "tcp://192.0.2.1:7101", "listen": ""}
    for more in ({"insecure": True, "group": "192.0.2.1:7100"}, KEYED | {"group": f"{KEY}@192.0.2.1:7100"}):
        for rank in (0, 1):
            config = PrefillConfig(**far, tp_rank=rank, **more)
            assert group_endpoint(config.group).address == "tcp://192.0.2.1:7100"
    assert group_endpoint(f"{KEY}@host:1").server_key == KEY


@pytest.mark.parametrize(("listed", "missing"), [(("p-tp1",), "this rank"), (("p",), "rank tp1")])
def test_a_leader_that_starts_ranks_wants_them_and_itself_on_their_list(
    listed: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    lines = {name: generate(tmp_path / name) for name in ("p", "p-tp1")}
    (allow := tmp_path / "allow").write_text("".join(f"{lines[name]} prefill\n" for name in listed))
    leader = PrefillConfig(tp_size=2, key=tmp_path / "p.key", allow=allow)
    with pytest.raises(ConfigError, match=f"{missing} is not on it as prefill; the ranks of a worker list each other"):
        rank_configs(leader, f"{KEY}@{GROUP}")
    allow.write_text("".join(f"{line}\n" for line in lines.values()))
    (rank,) = rank_configs(leader, f"{KEY}@{GROUP}")
    assert rank.key == tmp_path / "p-tp1.key"
