"""doctor says what is there, warns of what is slower, and ends with 1 where something required is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdtransfer import doctor, probes
from pdtransfer.config import DecodeConfig, PrefillConfig
from pdtransfer.headroom import Headroom
from pdtransfer.kernels import UnusableError
from pdtransfer.keys import Address
from pdtransfer.probes import Seen

PLAIN = {"fd": -1, "byte_count": 4_096, "close": lambda: None}


def seen(name: str) -> Seen:
    probe, _ = probes.PROBES[name]
    return probe()


def only(monkeypatch: pytest.MonkeyPatch, **these: Callable[[], Seen]) -> None:
    monkeypatch.setattr(doctor, "PROBES", {name: (probe, "mend it") for name, probe in these.items()})


def test_this_host_passes_and_json_says_the_same_as_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.run(json=True)
    answer = json.loads(capsys.readouterr().out)
    assert (status, answer["ok"]) == (0, True)
    assert [each["name"] for each in answer["findings"]] == list(probes.PROBES)
    for each in answer["findings"]:
        assert each.keys() == {"name", "state", "found", "mend"}
        assert each["found"]
        assert bool(each["mend"]) == (each["state"] != "ok")
    assert doctor.run(json=False) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in probes.PROBES)
    assert table.endswith("Nothing required is missing.\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_missing_requirement_is_status_1_with_its_mend(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, a=lambda: probes.ok("fine"), b=lambda: probes.missing("[none] of it", "get it"))
    assert doctor.run(json=as_json) == 1
    out = capsys.readouterr().out
    assert "[none] of it" in out
    assert "get it" in out
    assert "Missing: b." in out or json.loads(out)["ok"] is False


def test_warning_is_status_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, a=lambda: probes.warn("slow", "speed up"))
    assert doctor.run(json=False) == 0
    assert "speed up" in capsys.readouterr().out


def test_what_cannot_be_tried_is_missing_and_the_rest_is_still_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert doctor.run(json=True) == 1
    states = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    for name in ("sealed memfd", "fence lock", "descriptor passing"):
        assert states[name]["state"] == "missing"
        assert "Operation not permitted" in states[name]["found"]
        assert "kernel" in states[name]["mend"]
    assert states["clock"]["state"] in ("ok", "warn")


def test_probe_notices_a_lock_that_its_mapping_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_map", lambda _: 0)
    monkeypatch.setattr(probes, "_unmap", lambda _: None)
    assert seen("fence lock").state == "missing"


def test_probe_notices_a_memfd_that_can_be_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)  # as if the kernel let it pass
    monkeypatch.setattr(probes, "map_received", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(probes, "Arena", SimpleNamespace(create=lambda *_, **__: SimpleNamespace(**PLAIN)))
    assert seen("sealed memfd").state == "missing"


def test_absent_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("aiohttp", "torch") else find(name))
    assert (seen("packages").state, seen("packages").found) == ("missing", "no aiohttp")
    assert seen("torch").state == "missing"
    assert seen("torch").mend == "make venv"


def test_host_without_a_compiler_is_warned_of_the_slower_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PDTRANSFER_CACHE", str(tmp_path / "cache"))
    assert seen("native copy").state == "warn"
    assert "numpy" in seen("native copy").found
    assert "g++" in seen("native copy").mend


def test_taken_port_is_named_with_the_flag_that_wants_it() -> None:
    port = Address.parse(PrefillConfig().bind).port_first
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError:
            pass  # somebody else has it, which does as well
        found = seen("ports")
    assert found.state == "warn"
    assert f"{port} (prefill --bind, EADDRINUSE)" in found.found


def test_low_limit_of_open_files_is_a_warning() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 2048)); "
        "from pdtransfer import probes; print(probes.PROBES['open files limit'][0]())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "state='warn', found='1,024, may be raised to 2,048'" in done.stdout


def test_host_with_too_little_memory_is_told_how_many_slots_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = seen("memory")
    assert enough.state == "ok"
    monkeypatch.setattr(probes, "headroom", lambda: Headroom("a small box", 256 << 20))

    tight = seen("memory")
    assert tight.state == "warn"
    assert "256 MiB (a small box)" in tight.found
    words = tight.mend.split()
    decode, prefill = (int(words[at + 1]) for at, word in enumerate(words) if word == "--slots")
    assert DecodeConfig(slots=decode).slots + PrefillConfig(slots=prefill).slots < DecodeConfig().slots // 4


def test_cards_are_named_with_what_compiles_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "count", lambda: 0)
    assert seen("cards").state == "ok"
    monkeypatch.setattr(probes, "count", lambda: 2)
    monkeypatch.setattr(probes, "card", lambda ordinal: SimpleNamespace(architecture="sm_90"))
    monkeypatch.setattr(probes, "compiler", lambda: SimpleNamespace(version="NVRTC 13.0"))
    assert seen("cards") == probes.ok("2 x sm_90, NVRTC 13.0")

    def nothing() -> None:
        raise UnusableError("no NVRTC")

    monkeypatch.setattr(probes, "compiler", nothing)
    assert seen("cards") == probes.warn("2 x sm_90, and no NVRTC", "pip install nvidia-cuda-nvrtc")
