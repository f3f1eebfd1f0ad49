"""doctor reports the host, warns of limitations, and returns 1 where something required is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdtransfer import environment
from pdtransfer import probe as probes
from pdtransfer.bounds import port_range
from pdtransfer.bus.keys import Address
from pdtransfer.kernels import UnusableError, private_directory
from pdtransfer.kernels.compiled import KERNELS, _stem
from pdtransfer.memory.available_memory import AvailableMemory
from pdtransfer.probe import Probe, Seen
from pdtransfer.serve.commands import cli, doctor
from pdtransfer.serve.commands.probes import builds, cards, host, kernel, network
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.transports.engines import probes as engine_probes
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.mooncake import host as mooncake
from tests.support.paths import REPO

PLAIN = {"fd": -1, "byte_count": 4_096, "close": lambda: None}


ROOT = Path("/")


def only(monkeypatch: pytest.MonkeyPatch, *these: Probe) -> None:
    monkeypatch.setattr(doctor, "probes", lambda *_: these)


def probe_of(name: str, state: Callable[..., Seen], *words: str) -> Probe:
    return Probe(name, lambda _: state(*words))


def put(root: Path, **files: str) -> Path:
    """Creates a host's files; __ in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.slow
def test_this_host_passes_and_json_equals_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.doctor(json=True)
    answer = json.loads(capsys.readouterr().out)
    assert (status, answer["ok"]) == (0, True)
    assert [each["name"] for each in answer["findings"]] == [probe.name for probe in doctor.probes()]
    for each in answer["findings"]:
        assert each.keys() == {"name", "state", "found", "mend"}
        assert each["found"]
        assert bool(each["mend"]) == (each["state"] != "ok")
    assert doctor.doctor(json=False) == 0
    table = capsys.readouterr().out
    assert all(probe.name in table for probe in doctor.probes())
    assert "\nNothing required is missing." in table


@pytest.mark.parametrize("as_json", [False, True])
def test_missing_requirement_is_status_1_with_its_fix(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, probe_of("a", probes.ok, "fine"), probe_of("b", probes.missing, "[none] of it", "get it"))
    assert doctor.doctor(json=as_json) == 1
    out = capsys.readouterr().out
    assert "[none] of it" in out
    assert "get it" in out
    assert "Missing: b." in out or json.loads(out)["ok"] is False


def test_warning_is_status_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, probe_of("a", probes.warn, "slow", "speed up"))
    assert doctor.doctor(json=False) == 0
    out = capsys.readouterr().out
    assert "speed up" in out
    assert "1 warning." in out


def test_a_command_is_on_one_line_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "echo " + " ".join("word" for _ in range(40))
    only(monkeypatch, probe_of("a", probes.warn, "slow " * 30, command))
    doctor.doctor(json=False)
    out = capsys.readouterr().out
    assert command in out
    assert len(out.splitlines()) > 5


def test_a_failed_system_call_is_missing_and_other_probes_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert doctor.doctor(json=True) == 1
    states = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    for name in ("sealed memfd", "fence lock", "descriptor passing"):
        assert states[name]["state"] == "missing"
        assert "Operation not permitted" in states[name]["found"]
        assert "kernel" in states[name]["mend"]
    assert states["clock"]["state"] in ("ok", "warn")


def test_a_probe_that_raises_is_missing_if_required_and_other_probes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Path) -> Seen:
        raise TypeError("a bug\nof two lines")

    only(
        monkeypatch, Probe("a", breaks), Probe("b", breaks, "mend it", required=True), probe_of("c", probes.ok, "fine")
    )
    a, b, c = doctor.examine()
    assert (a.state, b.state, c.state) == ("warn", "missing", "ok")
    assert a.found == "cannot be tried: TypeError: a bug of two lines"
    assert a.mend
    assert b.mend == "mend it"


JUNK = "\x00]not [what: a kernel 99\n says\n"
PAGES = "/sys/kernel/mm/hugepages/hugepages-2048kB"
FILES = (
    "/proc/sys/kernel/random/boot_id", "/proc/self/status", "/proc/cpuinfo", "/proc/net/tcp", "/proc/net/tcp6",
    "/proc/7/comm", f"{PAGES}/free_hugepages", f"{PAGES}/resv_hugepages",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled", "/sys/devices/system/node/node0/meminfo",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource", "/sys/class/infiniband/x/ports/1/state",
    "/sys/bus/pci/devices/0000:01:00.0/vendor", "/sys/bus/pci/devices/0000:01:00.0/max_link_width",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["nothing", "junk", "directories", "closed"])
def test_unusual_files_stop_no_probe(kind: str, tmp_path: Path) -> None:
    for name in FILES if kind != "nothing" else ():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "directories":
            path.mkdir()
        else:
            path.write_text(JUNK)
            path.chmod(0 if kind == "closed" else 0o600)
    findings = doctor.examine(tmp_path)
    assert [finding.name for finding in findings] == [probe.name for probe in doctor.probes()]
    assert all(finding.found and (finding.mend or finding.state == "ok") for finding in findings)
    states = {finding.name: finding.state for finding in findings}
    assert (states["shared memory mount"], states["clock"]) == ("warn", "warn")
    if kind != "closed":  # root reads what is closed
        assert states["boot id"] == ("ok" if kind == "junk" else "missing")


def test_probe_detects_a_lock_that_its_mapping_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_map", lambda _: 0)
    monkeypatch.setattr(kernel, "_unmap", lambda _: None)
    assert kernel.lock(ROOT).state == "missing"


def test_probe_detects_a_memfd_that_can_be_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)  # as if the kernel let it pass
    monkeypatch.setattr(kernel, "map_received", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(kernel, "ArenaMemory", SimpleNamespace(create=lambda *_, **__: SimpleNamespace(**PLAIN)))
    assert kernel.memfd(ROOT).state == "missing"


def test_a_host_without_torch_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert (builds.torch(ROOT).state, builds.torch(ROOT).mend) == ("warn", "pip install '.[transformers]'")


def test_a_host_without_a_compiler_gets_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PDTRANSFER_CACHE", str(tmp_path / "cache"))
    assert builds.copy(ROOT).state == "warn"
    assert "numpy" in builds.copy(ROOT).found
    assert builds.copy(ROOT).mend == "install gcc or clang with this host's packages"
    (tmp_path / "apt-get").touch(mode=0o755)
    assert builds.copy(ROOT).mend.endswith("apt-get install -y g++")


def test_a_used_port_is_named_with_its_flag() -> None:
    port = Address.parse(PrefillConfig().bind).port_first
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError:
            pass  # another process has it, which is as good
        ports = network.ports(ROOT)
    assert ports.state == "warn"
    assert f"{port} (prefill --bind, EADDRINUSE, bound to " in ports.found


def test_low_limit_of_open_files_is_a_warning() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 2048)); "
        "from pdtransfer.serve.commands.probes import host; print(host.descriptors(None))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "state='warn', found='1,024, may be raised to 2,048'" in done.stdout


def test_with_too_little_memory_the_fix_names_the_slots_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = host.memory(ROOT)
    assert enough.state == "ok"
    monkeypatch.setattr(host, "available_memory", lambda: AvailableMemory("a small box", 32 << 20))

    tight = host.memory(ROOT)
    assert tight.state == "warn"
    assert "32 MiB (a small box)" in tight.found
    words = tight.mend.split()
    decode, prefill = (int(words[index + 1]) for index, word in enumerate(words) if word == "--slots")
    assert DecodeConfig(slots=decode).slots + PrefillConfig(slots=prefill).slots < DecodeConfig().slots // 4


def test_cards_are_named_with_their_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "count", lambda: 0)
    assert cards.cards(ROOT).state == "ok"
    monkeypatch.setattr(cards, "count", lambda: 2)
    monkeypatch.setattr(cards, "gpu_at", lambda ordinal: SimpleNamespace(architecture="sm_90"))
    monkeypatch.setattr(cards, "compiler", lambda: SimpleNamespace(version="NVRTC 13.0"))
    assert cards.cards(ROOT) == probes.ok("2 x sm_90, NVRTC 13.0")

    def nothing() -> None:
        raise UnusableError("no NVRTC")

    monkeypatch.setattr(cards, "compiler", nothing)
    assert cards.cards(ROOT) == probes.warn("2 x sm_90, and no NVRTC", "pip install '.[cuda]'")


# Of hosts that this one is not


def card_files(width: str, **more: str) -> dict[str, str]:
    at = "sys__bus__pci__devices__0000:18:00.0__"
    files = {"vendor": "0x10de", "class": "0x030200", "current_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
    return {at + name: text + "\n" for name, text in (files | {"current_link_width": width} | more).items()}


def test_a_cards_link_has_its_node_and_fewer_lanes_are_a_warning(tmp_path: Path) -> None:
    good = put(tmp_path / "good", **card_files("16", numa_node="1"))
    assert cards.links(good) == probes.ok("0000:18:00.0 32.0 GT/s x16 (of x16), node 1")
    narrow = cards.links(put(tmp_path / "narrow", **card_files("8", numa_node="-1")))
    assert (narrow.state, "x8 (of x16): fewer lanes" in narrow.found) == ("warn", True)
    assert "lspci -vv -s 0000:18:00.0" in narrow.mend
    other = put(tmp_path / "other", **card_files("8", vendor="0x8086"))
    assert cards.links(other) == probes.ok("no NVIDIA GPU on the PCIe bus")


def test_kernels_that_a_first_transfer_would_wait_for_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "count", lambda: 2)
    monkeypatch.setattr(cards, "gpu_at", lambda ordinal: SimpleNamespace(architecture="sm_90"))
    monkeypatch.setenv("PDTRANSFER_CACHE", str(tmp_path))
    assert cards.kernels(ROOT).state == "warn"
    assert "kv_copy for sm_90" in cards.kernels(ROOT).found
    assert cards.kernels(ROOT).mend == "pdtransfer kernels build"
    for name in KERNELS[1:]:
        (private_directory(None) / f"{_stem(name, 'sm_90')}-0123.cubin").touch()
    assert cards.kernels(ROOT).found == f"to be compiled at their first use: {KERNELS[0]} for sm_90"
    (private_directory(None) / f"{_stem(KERNELS[0], 'sm_90')}-0123.cubin").touch()
    assert cards.kernels(ROOT) == probes.ok(f"{len(KERNELS)} in the cache")


def test_mps_must_not_run(tmp_path: Path) -> None:
    assert cards.mps(put(tmp_path / "without", proc__11__comm="bash\n")).state == "ok"
    running = cards.mps(put(tmp_path / "with", proc__11__comm="bash\n", proc__12__comm="nvidia-cuda-mps\n"))
    assert (running.state, "process 12" in running.found) == ("missing", True)
    assert running.mend == "echo quit | nvidia-cuda-mps-control"
    assert cards.mps(put(tmp_path / "pipe", **{"tmp__nvidia-mps__control": ""})).state == "missing"


def rdma_files(state: str, *, device: bool = True) -> dict[str, str]:
    at = "sys__class__infiniband__mlx5_0__ports__1__"
    files = {at + "state": state, at + "rate": "400 Gb/sec (4X NDR)", at + "link_layer": "InfiniBand"}
    return files | ({"dev__infiniband__uverbs0": ""} if device else {})


def test_rdma_devices_and_obstacles_are_reported(tmp_path: Path) -> None:
    assert network.rdma(tmp_path) == probes.ok("none: KV goes to other hosts over TCP")
    up = network.rdma(put(tmp_path / "up", **rdma_files("4: ACTIVE")))
    assert up == probes.ok("mlx5_0 port 1 ACTIVE, 400 Gb/sec (4X NDR), InfiniBand")
    down = network.rdma(put(tmp_path / "down", **rdma_files("1: DOWN")))
    assert (down.state, "none is up" in down.found) == ("warn", True)
    hidden = network.rdma(put(tmp_path / "hidden", **rdma_files("4: ACTIVE", device=False)))
    assert "--device /dev/infiniband" in hidden.mend


@pytest.mark.parametrize(("capable", "state"), [("00000000a80425fb", "warn"), ("000001ffffffffff", "ok")])
def test_a_low_limit_of_locked_memory_matters_where_a_device_pins_it(capable: str, state: str, tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); "
        "from pdtransfer.serve.commands.probes import host; print(host.memlock(Path(sys.argv[1])).state)"
    )
    status = {"proc__self__status": f"Name:\tx\nCapEff:\t{capable}\n"}
    for root, expected in (
        (put(tmp_path / "pins", dev__infiniband__uverbs0="", **status), state),
        (put(tmp_path / "plain", **status), "ok"),
    ):
        command = [sys.executable, "-c", script, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.strip() == expected


def test_with_several_nodes_memory_must_be_bindable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = "sys__devices__system__node__node"
    one = {f"{at}0__meminfo": "Node 0 MemTotal: 9 kB\nNode 0 MemFree:  2097152 kB\n"}
    assert host.numa(put(tmp_path / "one", **one)).state == "ok"
    two = put(tmp_path / "two", **one, **{f"{at}1__meminfo": "Node 1 MemFree: 1048576 kB\n"})
    allowed = [True]
    mapping = SimpleNamespace(bind=lambda _: allowed[0])
    plain = SimpleNamespace(**PLAIN, mapping=mapping)
    monkeypatch.setattr(host, "ArenaMemory", SimpleNamespace(create=lambda *_, **__: plain))
    assert host.numa(two) == probes.ok("node0 2,048 MiB free; node1 1,024 MiB free")
    allowed[0] = False
    assert (host.numa(two).state, "SYS_NICE" in host.numa(two).mend) == ("warn", True)


def test_a_clock_that_takes_a_system_call_or_is_coarse_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "sys__devices__system__clocksource__clocksource0__current_clocksource"
    guest = {"proc__cpuinfo": "flags\t\t: fpu hypervisor tsc\n"}
    good = put(tmp_path / "good", **{source: "tsc\n"}, **guest)
    assert host.clock(good).state == "ok"
    assert "under a hypervisor" in host.clock(good).found
    slow = host.clock(put(tmp_path / "slow", **{source: "hpet\n"}))
    assert (slow.state, "system call" in slow.found, "hypervisor" in slow.found) == ("warn", True, False)
    monkeypatch.setattr(time, "clock_getres", lambda _: 0.004)
    assert "too coarse" in host.clock(good).found


def test_listeners_on_a_port_are_reported_by_address(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st\n"
    root = put(
        tmp_path,
        proc__net__tcp=f"{head}   0: 0100007F:1BBD 00000000:0000 0A\n   1: 0100007F:1BBE 0200007F:1111 01\n",
        proc__net__tcp6=f"{head}   0: 00000000000000000000000000000000:1BBD 0:0 0A\n",
    )
    assert network._listening(root) == {7101: ["127.0.0.1", "::"]}


DEFAULT = [(21_000, 21_999)]
HEAD = "  sl  local_address rem_address   st\n"
EPHEMERAL = "proc__sys__net__ipv4__ip_local_port_range"
RESERVED = "proc__sys__net__ipv4__ip_local_reserved_ports"


def test_ports_of_recently_ended_engines_count_as_used(tmp_path: Path) -> None:
    ended = "   1: 00000000:5209 0200007F:1111 06\n   2: 00000000:5209 0200007F:1112 06\n"  # 21001, of two connections
    sockets = f"{HEAD}   0: 00000000:5208 00000000:0000 0A\n{ended}   3: 00000000:1BBD 00000000:0000 0A\n"
    root = put(tmp_path, proc__net__tcp=sockets, **{EPHEMERAL: "32768\t60999\n"})
    seen = engine_probes.engine_ports(root, DEFAULT)
    assert seen.state == "ok"
    assert "21000 to 21999, 2 of them taken: room for 499 engines, 500 in any minute" in seen.found


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("libnftables.so.1 is not installed: apt-get install -y libnftables1", "apt-get install -y libnftables1"),
        ("this process may not: run it with CAP_NET_ADMIN", "run it with CAP_NET_ADMIN"),
        ("nftables refuses the rules: Not supported", "nft -f deploy/firewall.nft"),
    ],
)
def test_where_daemons_cannot_close_their_engines_ports_the_reason_and_the_mend_are_printed(
    reason: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "needs_no_guard", lambda *_args, **_kwargs: "")
    monkeypatch.setattr(network, "why_no_table", lambda: reason)
    seen = network.firewall(Path("/"))
    assert (seen.state, seen.mend) == ("warn", mend)
    assert reason.partition(":")[0] in seen.found
    monkeypatch.setattr(network, "why_no_table", lambda: "")
    assert network.firewall(Path("/")).state == "ok"
    monkeypatch.setattr(network, "needs_no_guard", lambda *_args, **_kwargs: "transport auto opens no port here")
    assert network.firewall(Path("/")).found == "not needed: transport auto opens no port here"


def test_the_fix_reserves_engine_ports_beside_reserved_ones(tmp_path: Path) -> None:
    files = {EPHEMERAL: "1024\t60999\n"}
    shared = engine_probes.engine_ports(put(tmp_path / "shared", **files), DEFAULT)
    assert (shared.state, shared.mend) == ("warn", "sysctl -w net.ipv4.ip_local_reserved_ports=21000-21999")
    for kept, state in {"8080": "warn", "21000-21998": "warn", "21000-21999": "ok", "8080,20000-22000": "ok"}.items():
        seen = engine_probes.engine_ports(put(tmp_path / kept, **files, **{RESERVED: f"{kept}\n"}), DEFAULT)
        assert seen.state == state, kept
        assert seen.mend.partition("=")[2] == (f"{kept},21000-21999" if state == "warn" else "")


@pytest.mark.parametrize(("ports", "state"), [("21000-21238", "warn"), ("21000-21239", "ok"), ("65500-65531", "warn")])
def test_a_range_that_the_engines_of_a_minute_may_fill_is_a_warning(ports: str, state: str, tmp_path: Path) -> None:
    seen = engine_probes.engine_ports(tmp_path, [port_range("ports", ports)])
    assert seen.state == state
    assert " to ".join(ports.split("-")) in seen.found
    if state == "warn":
        first, last = ports.split("-")
        assert f"room for {(int(last) - int(first) + 1) // 2} engines" in seen.found
        mended = seen.mend.split()[1]
        assert "up to 120 engines a minute" in seen.found, "a greeting each 2 s, four engines each"
        assert engine_probes.engine_ports(tmp_path, [port_range("ports", mended)]).state == "ok"


def test_doctor_checks_the_ports_from_flag_environment_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[list[tuple[int, int]]] = []

    def look(_root: Path, ranges: list[tuple[int, int]]) -> Seen:
        looked.append(ranges)
        return probes.ok("fine")

    monkeypatch.setattr(engine_probes, "engine_ports", look)
    monkeypatch.setattr(doctor, "PROBES", ())
    file = tmp_path / "p.toml"
    file.write_text('transport_ports = "23000-23999"\n[decode]\ntransport_ports = "22000-22031"\n')
    assert cli.main(["doctor"]) == 0
    assert cli.main(["--config", str(file), "doctor"]) == 0
    monkeypatch.setenv("PDTRANSFER_TRANSPORT_PORTS", "24000-24999")
    assert cli.main(["--config", str(file), "doctor"]) == 0
    assert cli.main(["doctor", "--transport-ports", "25000-25999"]) == 0
    assert looked == [DEFAULT, [(22_000, 22_031), (23_000, 23_999)], [(24_000, 24_999)], [(25_000, 25_999)]]


# Mooncake


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Sets the installed wheels, by name."""
    installed = {"mooncake-transfer-engine-non-cuda": "1.2"}
    monkeypatch.setattr(engine_probes, "version_of", lambda name: installed.get(name, ""))
    monkeypatch.setattr(mooncake, "why_not", lambda: "")
    monkeypatch.setattr(MooncakeLibrary, "why_not", lambda _: "")
    return installed


def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Installs another `mooncake` before any installed one."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "engine.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_loadable_mooncake_is_reported_with_its_wheel(
    wheels: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(tmp_path, monkeypatch, "TransferEngine = None")
    assert mooncake.wheel(ROOT) == probes.ok("mooncake-transfer-engine-non-cuda 1.2 (TCP and RDMA)")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("raise ImportError('libcuda.so.1: cannot open shared object file')", "libcuda.so.1"),
        ("import os; os.abort()", "status -6"),
    ],
)
def test_a_mooncake_that_fails_to_load_is_a_warning(
    text: str, word: str, wheels: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(tmp_path, monkeypatch, text)
    seen = mooncake.wheel(ROOT)
    assert (seen.state, word in seen.found) == ("warn", True)
    assert "pip install" in seen.mend


def test_no_mooncake_two_of_them_and_one_without_its_libraries_are_warnings(
    wheels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "mooncake cannot be loaded: apt-get install -y libibverbs1 libnuma1"
    monkeypatch.setattr(mooncake, "why_not", lambda: reason)
    monkeypatch.setattr(MooncakeLibrary, "why_not", lambda _: reason)
    for probe in (mooncake.wheel, network.transport):
        assert (probe(ROOT).state, probe(ROOT).mend) == ("warn", "apt-get install -y libibverbs1 libnuma1")
    wheels["mooncake-transfer-engine-cuda13"] = "1.3"
    assert mooncake.wheel(ROOT).mend == "pip uninstall mooncake-transfer-engine-cuda13"
    wheels.clear()
    assert mooncake.wheel(ROOT).state == "warn"
    assert "[mooncake]" in mooncake.wheel(ROOT).mend


def test_the_available_transport_is_reported(wheels: dict[str, str], tmp_path: Path) -> None:
    assert network.transport(tmp_path) == probes.ok("on this host shm; to other hosts mooncake over TCP")
    assert "RDMA" in network.transport(put(tmp_path, **rdma_files("4: ACTIVE"))).found


def test_each_transport_is_asked_for_a_daemons_addresses(
    wheels: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PROBES", ())
    assert cli.main(["doctor", "--bind", "tcp://[::1]:7101", "--json"]) == 0
    (found,) = (each for each in json.loads(capsys.readouterr().out)["findings"] if each["name"] == "transport")
    assert found["state"] == "warn"
    assert "to other hosts none (bind = 'tcp://[::1]:7101': transport mooncake" in found["found"]
    assert "bind an IPv4 address" in found["mend"]


def test_what_pip_is_to_install_comes_from_where_this_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    assert environment.pip_install("cuda") == "pip install '.[cuda]'"
    monkeypatch.chdir(tmp_path)
    assert environment.pip_install("cuda") == f"pip install '{REPO}[cuda]'"
    monkeypatch.setattr(environment, "_checkout", lambda: None)
    source = tmp_path / "a checkout"
    direct_url = {"url": source.as_uri()}
    monkeypatch.setattr(
        environment, "distribution", lambda _: SimpleNamespace(read_text=lambda _: json.dumps(direct_url))
    )
    assert environment.pip_install("cuda") == "pip install '.[cuda]' in a clone of pdtransfer", "the checkout is gone"
    source.mkdir()
    (source / "pyproject.toml").touch()
    assert environment.pip_install("cuda") == f"pip install '{source}[cuda]'"
    assert environment.complete_environment() == f"pip install '{source}[daemons]'"
    wheel = tmp_path / "pdtransfer-0.1.0-py3-none-any.whl"
    direct_url["url"] = wheel.as_uri()
    assert environment.pip_install("cuda").endswith("in a clone of pdtransfer"), "the wheel is gone"
    wheel.touch()
    assert environment.pip_install("cuda") == f"pip install '{wheel}[cuda]'"
    monkeypatch.setattr(environment, "_checkout", lambda: source)
    monkeypatch.setattr(sys, "prefix", str(source / ".venv"))
    assert environment.complete_environment() == "make venv"
