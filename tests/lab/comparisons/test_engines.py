"""`pdtransfer bench engines` with servers that compute nothing in place of vLLM's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from pdtransfer_lab.bench.fleets import engines, servers, vllm_fleet
from pdtransfer_lab.bench.fleets.engines import ONE, Cell, Row

from pdtransfer.errors import ConfigError

# One server: its tokens follow from the prompt. Decode refuses what prefill has not been asked for, and a connector's
# decode that is not asked as its own proxy does it.
SERVER = """
import argparse, asyncio, json, os
from pathlib import Path
from aiohttp import web
parser = argparse.ArgumentParser()
for name in ("model", "port", "kv-transfer-config", "folder"):
    parser.add_argument(f"--{name}", default="{}")
given, _ = parser.parse_known_args()
config, folder = json.loads(given.kv_transfer_config), Path(given.folder)
connector, role = config.get("kv_connector"), config.get("kv_role")
if connector == "NixlConnector" and role == "kv_consumer" and (folder / "broken").exists():
    raise SystemExit("ValueError: no such connector")

async def generate(request):
    body = await request.json()
    params = body.get("kv_transfer_params") or {}
    if role == "kv_producer":
        assert body["max_tokens"] == 1 and not body.get("stream")
        if params:
            assert params["do_remote_decode"]
            (folder / params["transfer_id"]).touch()
        return web.json_response({"kv_transfer_params": params and {
            "do_remote_prefill": True, "remote_engine_id": "P", "transfer_id": params["transfer_id"],
            "remote_request_id": "r"}})
    if params:
        assert params["do_remote_prefill"] and params["remote_engine_id"] == "P"
        assert (connector == "MooncakeConnector") == ("remote_bootstrap_addr" in params)
        while not (folder / params["transfer_id"]).exists():
            assert connector != "NixlConnector", "asked before prefill had answered"
            await asyncio.sleep(0.001)
    answer = web.StreamResponse()
    await answer.prepare(request)
    for at in range(body["max_tokens"]):
        ids = [(sum(body["prompt"]) + at + (connector == "MooncakeConnector")) % 97]
        await answer.write(b"data: " + json.dumps({"choices": [{"token_ids": ids}]}).encode() + b"\\n\\n")
        await asyncio.sleep(0.001)
    await answer.write(b"data: [DONE]\\n\\n")
    return answer

async def health(_):
    return web.Response()

async def metrics(_):
    return web.Response(text='vllm:pdtransfer_rooms_total{end="received"} 3.0\\nvllm:other 1\\n')

async def query(_):
    return web.json_response({"0": {"engine_id": "P"}})

async def main():
    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/v1/completions", generate), web.get("/health", health), web.get("/metrics", metrics),
                    web.get("/query", query)])
    runner = web.AppRunner(app)
    await runner.setup()
    if connector == "MooncakeConnector" and role == "kv_producer":
        await web.TCPSite(runner, "127.0.0.1", int(os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"])).start()
    await web.TCPSite(runner, "127.0.0.1", int(given.port)).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


# SGLang's: decode's stream has all tokens so far, and begins when prefill has its room; prefill answers once decode has
# it, and tells when it had computed.
SGLANG = """
import argparse, asyncio, json, time
from pathlib import Path
from aiohttp import web
parser = argparse.ArgumentParser()
for name in ("model-path", "port", "disaggregation-mode", "disaggregation-transfer-backend", "folder", "only-decode",
             "disaggregation-bootstrap-port"):
    parser.add_argument(f"--{name}", default="")
given, _ = parser.parse_known_args()
role, folder, computed = given.disaggregation_mode, Path(given.folder), {}
assert bool(given.only_decode) == (role == "decode")
if role == "prefill":
    (folder / "port").write_text(given.disaggregation_bootstrap_port)

async def there(name):
    while not (folder / name).exists():
        await asyncio.sleep(0.001)

async def generate(request):
    body = await request.json()
    room, transferred = body.get("bootstrap_room"), body.get("bootstrap_host") == "127.0.0.1"
    assert bool(role) == bool(room)
    if transferred:
        assert str(body["bootstrap_port"]) == (folder / "port").read_text()
    if role == "prefill":
        finished = time.time()
        if transferred:
            (folder / f"computed-{room}").touch()
            await there(f"landed-{room}")
            await asyncio.sleep(0.05)
        return web.json_response({"output_ids": [0], "meta_info": {"prefill_finished_time": finished}})
    if transferred:
        await there(f"computed-{room}")
        (folder / f"landed-{room}").touch()
    answer = web.StreamResponse()
    await answer.prepare(request)
    ids = []
    for at in range(body["sampling_params"]["max_new_tokens"]):
        ids.append((sum(body["input_ids"]) + at + (given.disaggregation_transfer_backend == "nixl")) % 97)
        await answer.write(b"data: " + json.dumps({"output_ids": ids, "meta_info": {}}).encode() + b"\\n\\n")
        await asyncio.sleep(0.001)
    await answer.write(b"data: [DONE]\\n\\n")
    return answer

async def health(_):
    return web.Response()

async def metrics(_):
    return web.Response(text='sglang:kv_transfer_speed_gb_s_sum 3.0\\nsglang:other 1\\n')

async def main():
    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/generate", generate), web.get("/health", health), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(given.port)).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def setup(folder: Path) -> servers.Setup:
    for module, text in (("vllm/entrypoints/openai/api_server.py", SERVER), ("sglang/launch_server.py", SGLANG)):
        path = folder / "stub" / module
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return engines.setup_of(
        "tiny", ("--folder", str(folder)), Path(sys.executable), (), (),
        [f"PYTHONPATH={folder / 'stub'}"], folder / "logs", decode_options=("--only-decode", "yes"),
    )  # fmt: skip


def measured(made: servers.Setup, fleets: tuple[str, ...], **more: object) -> engines.Result:
    options: dict[str, object] = {"first": 0, "cells": [Cell(20, 2, 4)], "tokens": 5, "beside": (), "out": None} | more
    engine = engines.ENGINES[str(options.pop("engine", "vllm"))]
    return engines.measure(made, engine=engine, fleets=fleets, progress=lambda _: None, **options)  # type: ignore[arg-type]


def test_each_connector_is_asked_as_its_own_proxy_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STREAM_TOKENS", 400), ("BESIDE_TOKENS", 0), ("BESIDE_PROMPTS", 3), ("BESIDE_ROUNDS", 1)):
        monkeypatch.setattr(engines, name, value)
    out = tmp_path / "rows.jsonl"
    result = measured(setup(tmp_path), (ONE, *vllm_fleet.CONNECTORS), out=out, beside=(30,), first=3)
    assert result.broken == {}
    rows = {row.fleet: row for row in result.rows}
    assert list(rows) == [ONE, "PDTransferConnector", "NixlConnector", "MooncakeConnector"]
    assert [row.error for row in result.rows] == [""] * 4
    assert [(row.failed, row.identical) for row in result.rows] == [(0, 4), (0, 4), (0, 4), (0, 0)]
    assert math.isnan(rows[ONE].handoff_ms)
    for name, connector in vllm_fleet.CONNECTORS.items():
        row = rows[name]
        assert row.exposed_ms == pytest.approx(row.ttft_ms - rows[ONE].ttft_ms)
        assert row.prefill_ms > 0
        assert connector.at_once or row.prefill_ms < row.ttft_ms_p99, "decode is asked after prefill"
        assert 0 < row.gap_ms <= row.gap_ms_p99
    assert rows["NixlConnector"].handoff_ms > 0
    beside = [(each.fleet, each.prompt, each.failed) for each in result.beside]
    assert beside == [(name, 30, 0) for name in vllm_fleet.CONNECTORS]
    assert min(each.gap_ms for each in result.beside) > 0
    assert result.metrics == {'vllm:pdtransfer_rooms_total{end="received"}': 3.0}
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert kinds[:8] == ["first", "row", "memory", "first", "row", "beside", "memory", "memory"]
    assert kinds[8:] == ["metrics", *["first", "row", "beside", "memory", "memory"] * 2]
    for each in result.first:
        assert (each.prompt, each.requests, each.failed) == (20, 3, 0)
        assert 0 < each.ttft_ms <= each.ttft_ms_p99 <= each.slowest_ms
        assert each.slowest_at in (1, 2, 3)
    assert [each.role for each in result.memory] == ["one", *["prefill", "decode"] * 3]
    assert min(min(each.anonymous, each.shared, each.start_s) for each in result.memory) > 0
    head, *body = engines.tables(result)[0]
    assert len(head) == len(body[0]) == 16


@pytest.mark.parametrize(
    ("link", "role", "expected"),
    [
        (None, "one", ["HiSparseConnector"]),
        ("NixlConnector", "prefill", ["NixlConnector"]),
        ("NixlConnector", "decode", ["MultiConnector", "NixlConnector", "HiSparseConnector"]),
    ],
)
def test_hisparse_is_on_one_engine_and_on_decode(
    tmp_path: Path, link: str | None, role: servers.Role, expected: list[str]
) -> None:
    command, _ = vllm_fleet.Vllm().command(replace(setup(tmp_path), hisparse_gib=2.0), link, role, (1, 2))
    [config] = [json.loads(value) for name, value in pairwise(command) if name == "--kv-transfer-config"]
    parts = config["kv_connector_extra_config"]["connectors"] if config["kv_connector"] == "MultiConnector" else []
    assert [part["kv_connector"] for part in [config, *parts]] == expected
    roles = {"one": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
    assert config["kv_role"] == roles[role]
    if role != "prefill":
        assert [config, *parts][-1]["kv_connector_extra_config"] == {"host_pool_gib": 2.0}


def test_both_servers_of_sglang_get_each_request_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STREAM_TOKENS", 400), ("BESIDE_TOKENS", 0), ("BESIDE_PROMPTS", 3), ("BESIDE_ROUNDS", 1)):
        monkeypatch.setattr(engines, name, value)
    fleets = ONE, "pdtransfer", "mooncake", "nixl"
    result = measured(setup(tmp_path), fleets, engine="sglang", beside=(30,), first=2)
    assert result.broken == {}
    assert [row.error for row in result.rows] == [""] * 4
    assert [(row.fleet, row.failed, row.identical) for row in result.rows] == [
        (ONE, 0, 4), ("pdtransfer", 0, 4), ("mooncake", 0, 4), ("nixl", 0, 0),
    ]  # fmt: skip
    for row in result.rows[1:]:
        assert 0 < row.handoff_ms < 50, "to decode's first token, not to prefill's answer"
        assert row.prefill_ms > 0
    assert [(each.fleet, each.failed) for each in result.beside] == [(name, 0) for name in fleets[1:]]
    assert result.metrics == {"sglang:kv_transfer_speed_gb_s_sum": 3.0}


@pytest.mark.parametrize("busy", ["main", "other"])
def test_cpu_is_that_of_other_threads_than_the_main_one(busy: str) -> None:
    script = "import threading, time\ndef burn():\n while True: pass\n"
    script += "burn()" if busy == "main" else "threading.Thread(target=burn, daemon=True).start(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        while cpu_s(process.pid) < 0.5:
            time.sleep(0.01)
        others_s = servers.threads_cpu_s(process.pid)
        process.kill()
    assert (others_s > 0.2) is (busy == "other")


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / servers.TICKS_S


def test_a_fleet_that_does_not_start_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    result = measured(setup(tmp_path), ("NixlConnector", "PDTransferConnector"))
    assert list(result.broken) == ["NixlConnector"]
    assert "ValueError: no such connector" in result.broken["NixlConnector"]
    assert [(row.fleet, row.identical) for row in result.rows] == [("PDTransferConnector", None)]


def test_cells_have_what_fits() -> None:
    assert engines.cells((1_000, 30_000), (1, 4, 32), 2, 100_000) == [
        Cell(1_000, 1, 5), Cell(1_000, 4, 8), Cell(1_000, 32, 64), Cell(30_000, 1, 3),
    ]  # fmt: skip


def test_wrong_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fleet = 'nixl': must be 'one engine' or one of PDTransferConnector, "):
        measured(setup(tmp_path), ("nixl",))
    for arguments, text in (
        (
            ("huge", (), Path(sys.executable), (), (), ()),
            "model = 'huge': neither a directory nor one of qwen3-8b, deepseek-v2-lite, glm-5-dense, tiny",
        ),
        (("tiny", (), tmp_path / "python", (), (), ()), "is not there; make venv-vllm or venv-sglang makes one"),
        (("tiny", (), Path(sys.executable), (), ("verify",), ()), "'verify': must be name=value"),
        (("tiny", (), Path(sys.executable), (), ("verify=yes",), ()), "setting: Expecting value"),
    ):
        with pytest.raises(ConfigError, match=text):
            engines.setup_of(*arguments, tmp_path / "logs")


def test_rows_without_a_figure_show_none() -> None:
    row = Row(
        fleet=ONE, prompt=8, clients=1, requests=1, failed=1, identical=None, error="x",
        **dict.fromkeys(("ttft_ms", "ttft_ms_p99", "gap_ms", "gap_ms_p99", "tokens_s", "cpu_ms", "prefill_ms",
                         "handoff_ms", "handoff_ms_p99", "exposed_ms"), math.nan),
    )  # fmt: skip
    assert engines.tables(engines.Result(rows=[row]))[0][1][5:] == ["-"] * 11
