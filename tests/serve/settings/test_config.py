"""Settings check themselves, name a wrong value, and come from TOML < environment < flags."""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer import environment
from pdtransfer.errors import ConfigError
from pdtransfer.limits import LIMIT_BOUNDS, Limits
from pdtransfer.serve.commands import cli
from pdtransfer.serve.commands.demo_config import DemoConfig
from pdtransfer.serve.commands.settings_sources import COMMANDS, settings_of
from pdtransfer.serve.engine_api import HiSparse
from pdtransfer.serve.settings.config_to_argv import config_to_argv
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.wire import Ranks

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
TARGETS = {"prefill": ("worker.daemon", "run"), "decode": ("worker.daemon", "run"), "router": ("router.process", "run")}


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(environment.PREFIX) or name in environment.LAUNCHER_VARIABLES:
            monkeypatch.delenv(name)


def bound(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Parses a command line to its config; the command itself only records it."""
    seen: list[Any] = []
    modules: dict[str, SimpleNamespace] = {}
    for module, function in [*TARGETS.values(), ("commands.demo", "run")]:
        fake = modules.setdefault(module, SimpleNamespace())
        setattr(fake, function, lambda given: seen.append(given) or 0)
        monkeypatch.setitem(sys.modules, f"pdtransfer.serve.{module}", fake)
    assert cli.main(list(arguments)) == 0
    (only,) = seen
    return only


def test_every_limit_has_a_bound_that_its_default_keeps_and_zero_or_a_huge_value_breaks() -> None:
    assert LIMIT_BOUNDS.keys() <= {field.name for field in dataclasses.fields(Limits)}
    DecodeConfig(limits=Limits())
    for field in dataclasses.fields(Limits):
        with pytest.raises(ConfigError, match=f"limits.{field.name} = "):
            DecodeConfig(limits=dataclasses.replace(Limits(), **{field.name: -1}))
        with pytest.raises(ConfigError, match=f"limits.{field.name} = "):
            DecodeConfig(limits=dataclasses.replace(Limits(), **{field.name: 1 << 60}))


@pytest.mark.parametrize(
    ("kind", "names", "least", "most"),
    [
        (PrefillConfig, "chunk_tokens", 1, 16_777_216),
        (PrefillConfig, "copy_threads tp_size pp_size", 1, 64),
        (partial(DecodeConfig, page_size=1), "slots", 1, 4_294_967_296),
        (DecodeConfig, "batch_max", 1, 65_536),
        (DecodeConfig, "host_buffer_gib", 1 / 1_024, 16_384),
        (partial(DecodeConfig, enable_hisparse=True), "device_slots hot_tokens dense_slots", 1, 4_294_967_296),
        (RouterConfig, "body_readers", 1, 64),
        (DemoConfig, "requests", 1, 1_000_000),
        (DemoConfig, "concurrency", 1, 4_096),
        (DemoConfig, "prompt_bytes_max", 1, 524_288),
        (DemoConfig, "shared_prefix", 0, 262_144),
        (DemoConfig, "max_tokens", 1, 65_536),
        (DemoConfig, "seed", 0, (1 << 63) - 1),
        (DemoConfig, "prefill decode prefill_tp prefill_pp decode_tp", 1, 64),
    ],
)
def test_a_setting_takes_its_bounds_and_nothing_beyond(kind: Any, names: str, least: float, most: float) -> None:
    for name in names.split():
        for value in (least, most):
            assert getattr(kind(**{name: value}), name) == value
        for value in (least - 1, most + 1):
            with pytest.raises(ConfigError) as refused:
                kind(**{name: value})
            assert str(refused.value) == f"{name} = {value}: must be from {least} to {most}"


def test_the_largest_page_the_longest_directory_and_the_outermost_ports_are_taken() -> None:
    longest = Path("/" + "d" * 71)
    assert DecodeConfig(page_size=65_536, socket_directory=longest).socket_directory == longest
    assert [PrefillConfig(transport_ports=ports).network.ports for ports in ("1-2", "65534-65535")] == [
        (1, 2),
        (65_534, 65_535),
    ]
    assert DemoConfig(model="/m").cards == {None}


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize("address", ["0.0.0.0", "[::]", "10.1.2.3", "*"])
def test_bind_that_other_hosts_reach_needs_keys_or_insecure(kind: Any, address: str, tmp_path: Path) -> None:
    bind = f"tcp://{address}:7101"
    with pytest.raises(ConfigError, match=r"bind = .*keygen.*insecure"):
        kind(bind=bind)
    assert kind(bind=bind, insecure=True).bind == bind
    assert kind(bind=bind, key=tmp_path / "a.key", allow=tmp_path / "peers").bind == bind


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://[::1]:7101", "tcp://127.3.2.1:9"])
def test_loopback_bind_goes_without_keys(bind: str) -> None:
    assert PrefillConfig(bind=bind).bind == bind


def test_peer_on_another_host_needs_no_more_than_its_key_and_ours_or_insecure(tmp_path: Path) -> None:
    assert RouterConfig(decode=("tcp://10.0.0.1:7201",), insecure=True).insecure
    keyed = {"key": tmp_path / "r.key", "allow": tmp_path / "peers"}
    assert RouterConfig(decode=(f"{KEY}@tcp://10.0.0.1:7201",), **keyed).decode


def test_default_node_name_has_the_role_and_differs_between_processes() -> None:
    assert PrefillConfig().node.startswith("prefill-")
    assert RouterConfig().node.endswith(f"-{os.getpid()}")


def test_engine_config_carries_role_and_options() -> None:
    prefill = PrefillConfig(engine_option=("seed=1", "layers=4", "seed=a=b"), chunk_tokens=128)
    assert prefill.engine_config.role == "prefill"
    assert prefill.engine_config.options == {"seed": "a=b", "layers": "4"}
    assert prefill.engine_config.chunk_tokens == 128
    decode = DecodeConfig(batch_max=7).engine_config
    assert (decode.role, decode.page_size, decode.host_layout, decode.batch_max) == ("decode", 1, "page_first", 7)
    assert decode.hisparse is None
    sparse = {"device_slots": 8, "hot_tokens": 4, "dense_slots": 2, "retract_policy": "newest"}
    limits = Limits(window=9)
    found = DecodeConfig(enable_hisparse=True, limits=limits, **sparse).engine_config.hisparse
    assert found == HiSparse(device_slots=8, hot_tokens=4, dense_slots=2, policy="newest", limits=limits)


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pd.toml"
    file.write_text("[decode]\nslots = 1\nbatch_max = 1\npage_size = 1\n[decode.limits]\nwindow = 1\nrooms_max = 1\n")
    monkeypatch.setenv("PDTRANSFER_SLOTS", "2")
    monkeypatch.setenv("PDTRANSFER_BATCH_MAX", "2")
    monkeypatch.setenv("PDTRANSFER_LIMITS_WINDOW", "2")
    found = bound(monkeypatch, "decode", "--config", str(file), "--slots", "3")
    assert (found.slots, found.batch_max, found.page_size) == (3, 2, 1)
    assert (found.limits.window, found.limits.rooms_max, found.limits.queue_max) == (2, 1, Limits().queue_max)


def test_the_demos_host_layout_is_that_of_decodes_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(monkeypatch, "demo", "--host-layout", "page_head").decode_layout == "page_head"
    assert bound(monkeypatch, "demo", "--decode-layout", "layer_first").decode_layout == "layer_first"


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pd.toml").write_text("\ufeff[prefill]\nchunk_tokens = 99\n")
    monkeypatch.setenv("PDTRANSFER_CONFIG", str(tmp_path / "pd.toml"))
    assert bound(monkeypatch, "prefill").chunk_tokens == 99


def test_keys_above_all_tables_hold_for_each_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pd.toml"
    file.write_text(
        'log_level = "error"\nhost_layout = "page_head"\n[limits]\nwindow = 9\nqueue_max = 9\n'
        '[prefill]\nhost_layout = "page_first"\n[prefill.limits]\nwindow = 8\n'
        '[router]\nprefill = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]\n'
    )
    prefill = bound(monkeypatch, "prefill", "--config", str(file))
    assert (prefill.host_layout, prefill.log_level) == ("page_first", "error")
    assert (prefill.limits.window, prefill.limits.queue_max) == (8, 9)
    decode = bound(monkeypatch, "--config", str(file), "decode")
    assert (decode.host_layout, decode.limits.window) == ("page_head", 9)
    router = bound(monkeypatch, "router", "--config", str(file))
    assert router.prefill == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    assert router.log_level == "error"


def test_repeated_flags_make_a_list_instead_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pd.toml"
    file.write_text('[router]\ndecode = ["tcp://127.0.0.1:1"]\n')
    config = bound(monkeypatch, "router", "--config", str(file), "--decode=tcp://[::1]:2", "--decode=tcp://[::1]:3")
    assert config.decode == ("tcp://[::1]:2", "tcp://[::1]:3")
    monkeypatch.setenv("PDTRANSFER_DECODE", "tcp://127.0.0.1:4 tcp://127.0.0.1:5")
    assert bound(monkeypatch, "router").decode == ("tcp://127.0.0.1:4", "tcp://127.0.0.1:5")


def test_variables_that_a_container_platform_adds_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    links = ("SERVICE_HOST", "SERVICE_PORT_KV", "PORT", "PORT_7101_TCP", "PORT_7101_TCP_ADDR")
    for service in ("PDTRANSFER", "PDTRANSFER_ROUTER"):
        for name in links:
            monkeypatch.setenv(f"{service}_{name}", "tcp://10.0.0.1:7101")
    assert bound(monkeypatch, "prefill") == PrefillConfig()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["prefill", "decode", "router"])
def test_a_daemon_warns_of_a_variable_that_no_setting_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in ("LOG_LEVL", "NO_VERIFI", "TRANSPORT_PORT", "LIMITS_ROOMS_MAXX", "NODES_WITHOUT_ANY"):
        monkeypatch.setenv(f"PDTRANSFER_{name}", "1")
    bound(monkeypatch, command)
    warned = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert warned == [
        "PDTRANSFER_LIMITS_ROOMS_MAXX: no daemon has this setting; is it PDTRANSFER_LIMITS_ROOMS_MAX?",
        "PDTRANSFER_LOG_LEVL: no daemon has this setting; is it PDTRANSFER_LOG_LEVEL?",
        "PDTRANSFER_NODES_WITHOUT_ANY: no daemon has this setting",
        "PDTRANSFER_TRANSPORT_PORT: no daemon has this setting; is it PDTRANSFER_TRANSPORT_PORTS?",
        "PDTRANSFER_VERIFI: no daemon has this setting; is it PDTRANSFER_VERIFY?",
    ]


@pytest.mark.parametrize("command", ["prefill", "decode", "router"])
def test_no_daemon_warns_of_what_another_process_of_ours_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "pd.toml").touch()
    others = {"LISTEN": "127.0.0.1:1", "CHUNK_TOKENS": "8", "BATCH_MAX": "8", "REQUESTS": "8", "LIMITS_WINDOW": "8"}
    flags = {"CONFIG": str(tmp_path / "pd.toml"), "DEBUG": "false", "NO_PREFIX_CACHE": "true"}
    for name, value in {**others, **flags, "CACHE": str(tmp_path), "LED": "0", "SGLANG": "{}"}.items():
        monkeypatch.setenv(f"PDTRANSFER_{name}", value)
    bound(monkeypatch, command)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["prefill", "decode", "router"])
def test_an_older_name_is_warned_of_and_is_none_of_a_routers_in_a_shared_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("PDTRANSFER_HTTP", "127.0.0.1:1")
    monkeypatch.setenv("PDTRANSFER_LISTEN", "127.0.0.1:2")
    shown = bound(monkeypatch, command).listen, "PDTRANSFER_HTTP end with 0.3" in capsys.readouterr().err
    assert shown == (("127.0.0.1:2", False) if command == "router" else ("127.0.0.1:1", True))
    assert (bound(monkeypatch, command, "--listen=127.0.0.1:3").listen, capsys.readouterr().err) == ("127.0.0.1:3", "")


@pytest.mark.parametrize(
    "given",
    [
        PrefillConfig(),
        PrefillConfig(node="p0", slots=1_024, page_size=16, engine_option=("a=1", "b=-2"), json=True, listen=""),
        DecodeConfig(node="d1", prefix_cache=False),
        DecodeConfig(node="d0", bind="tcp://127.0.0.1:0", socket_directory=Path("/run/a b"), limits=Limits(window=4)),
        RouterConfig(prefill=(f"-{KEY[1:]}@tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), key=Path("k"), allow=Path("a")),
        DemoConfig(requests=3, decode_layout="page_head"),
    ],
)
def test_arguments_build_the_same_config_in_another_process(
    given: PrefillConfig | DecodeConfig | RouterConfig | DemoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = next(name for name in COMMANDS if type(given) is settings_of(name))
    flags = config_to_argv(given)
    assert bound(monkeypatch, command, *flags) == given


def test_children_do_not_inherit_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTRANSFER_SLOTS", "64")
    monkeypatch.setenv("PDTRANSFER_CACHE", "/tmp/c")
    monkeypatch.setenv("UNRELATED", "1")
    child = environment.child_environment()
    assert "PDTRANSFER_SLOTS" not in child
    assert (child["PDTRANSFER_CACHE"], child["UNRELATED"]) == ("/tmp/c", "1")


def test_directories_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert DecodeConfig().socket_directory == Path("/run/user/7/pdtransfer")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in DecodeConfig().socket_directory.name
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert environment.cache_directory() == Path("/var/cache/pdtransfer")
    monkeypatch.setenv("PDTRANSFER_CACHE", "/var/kernels")
    assert environment.cache_directory() == Path("/var/kernels")


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: str, **variables: str) -> Any:
    for name, value in (TORCHRUN | variables).items():
        monkeypatch.setenv(name, value)
    return bound(monkeypatch, *arguments)


@pytest.mark.parametrize(
    ("arguments", "variables", "ranks", "group"),
    [
        (("prefill",), {}, Ranks(3, 4), "127.0.0.1:29500"),
        (("decode",), {}, Ranks(3, 4), "127.0.0.1:29500"),
        (("prefill", "--tp-size=2"), {}, Ranks(1, 2, 1, 2), "127.0.0.1:29500"),
        (("prefill", "--pp-size=4"), {}, Ranks(0, 1, 3, 4), "127.0.0.1:29500"),
        (("prefill", "--tp-size=4", "--pp-size=1"), {}, Ranks(3, 4), "127.0.0.1:29500"),
        (("prefill",), {"PDTRANSFER_PP_SIZE": "2"}, Ranks(1, 2, 1, 2), "127.0.0.1:29500"),
        (("prefill",), {"RANK": "0"}, Ranks(0, 4), "127.0.0.1:29500"),
        (("prefill", "--group=127.0.0.1:7100"), {"MASTER_PORT": "x"}, Ranks(3, 4), "127.0.0.1:7100"),
        (("prefill",), {"PDTRANSFER_GROUP": "127.0.0.1:7100"}, Ranks(3, 4), "127.0.0.1:7100"),
        (("prefill",), {"TORCHELASTIC_USE_AGENT_STORE": "True"}, Ranks(3, 4), "127.0.0.1:29501"),
        (("prefill",), {"MASTER_ADDR": "::1"}, Ranks(3, 4), "[::1]:29500"),
        (("prefill",), {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "x"}, Ranks(), ""),
        (("prefill", "--tp-size=2"), {"RANK": "0", "WORLD_SIZE": "1"}, Ranks(0, 2), ""),
        (("prefill", "--tp-size=2", "--tp-rank=0"), {"RANK": "x", "WORLD_SIZE": "y"}, Ranks(0, 2), ""),
        (("prefill", "--tp-size=2"), {"RANK": "x", "PDTRANSFER_TP_RANK": "0"}, Ranks(0, 2), ""),
    ],
)
def test_a_process_that_torchrun_started_takes_its_rank_from_there_unless_it_is_given_one(
    arguments: tuple[str, ...], variables: dict[str, str], ranks: Ranks, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = launched(monkeypatch, *arguments, **variables)
    assert (config.ranks, config.group) == (ranks, group)


@pytest.mark.parametrize(
    ("given", "device"), [((), "cpu"), (("--device=cuda",), "cuda:1"), (("--device=cuda:5",), "cuda:5")]
)
def test_the_local_rank_is_the_card_where_no_card_is_named(
    given: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launched(monkeypatch, "prefill", *given).own_device == device


def test_children_and_other_commands_get_no_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    router = launched(monkeypatch, "router", "--prefill=tcp://127.0.0.1:1", "--decode=tcp://127.0.0.1:2", RANK="x")
    assert router.prefill == ("tcp://127.0.0.1:1",)
    assert not TORCHRUN.keys() & environment.child_environment().keys()


def test_a_server_of_vllm_may_have_both_roles_and_workers_may_come_that_no_flag_names() -> None:
    both = ("http://127.0.0.1:8200",)
    config = RouterConfig(engine="vllm", prefill=both, decode=both)
    assert (config.decode, config.finds_workers) == (both, False)
    for more in (
        {"workers_file": Path("w")}, {"admin": "127.0.0.1:1", "admin_token": Path("t")},
        {"prefill_dns": ("dns://p:1",)}, {"decode_dns": ("dns://d:1",)},
    ):  # fmt: skip
        assert RouterConfig(**more).finds_workers


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_router_of_http_servers_takes_their_urls(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = ("--prefill=http://127.0.0.1:8100", "--decode=http://127.0.0.1:8200", "--decode=https://d1.example:443")
    config = bound(monkeypatch, "router", f"--engine={engine}", *servers)
    assert config.relays
    assert config.prefill == ("http://127.0.0.1:8100",)
    assert config.decode == ("http://127.0.0.1:8200", "https://d1.example:443")
    assert not bound(monkeypatch, "router").relays


def test_an_engine_of_daemons_in_a_shared_environment_is_none_of_a_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTRANSFER_ENGINE", "my.engine:create")
    assert not bound(monkeypatch, "router", "--prefill=tcp://127.0.0.1:1").relays


def test_http_servers_on_other_hosts_need_no_more_than_insecure(monkeypatch: pytest.MonkeyPatch) -> None:
    config = bound(monkeypatch, "router", "--engine=vllm", "--decode=http://10.0.0.1:1", "--insecure")
    assert config.decode == ("http://10.0.0.1:1",)
