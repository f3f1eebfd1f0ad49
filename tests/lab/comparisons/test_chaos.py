"""`pdtransfer bench chaos` with servers that compute nothing in place of vLLM's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pdtransfer_lab.bench.fleets import chaos, engines, servers
from pdtransfer_lab.bench.fleets.chaos import Asked, Outcome, right_after

from pdtransfer.errors import ConfigError

# Prefill holds a block for each request until decode takes it, or for a second, permanently where its folder has
# "leaks".
# Tokens follow from the prompt, and not after a restart where it has "forgets". Requests under way at SIGTERM get no
# answer where it has "hangs", and one without tokens where it has "cuts": decode holds all but the first until then.
SERVER = """
import argparse, asyncio, json, os, signal, time
from pathlib import Path
from aiohttp import web
parser = argparse.ArgumentParser()
for name in ("port", "kv-transfer-config", "folder"):
    parser.add_argument(f"--{name}")
given, _ = parser.parse_known_args()
config, folder = json.loads(given.kv_transfer_config), Path(given.folder)
assert config["kv_load_failure_policy"] == "recompute"
prefills, held = config["kv_role"] == "kv_producer", folder / "held"
held.mkdir(exist_ok=True)
started = folder / config["kv_role"]
wrong = started.exists() and (folder / "forgets").exists()
hangs = (folder / "hangs").exists()
holds = not prefills and not started.exists() and (hangs or (folder / "cuts").exists())
started.touch()
ending, handed_over = asyncio.Event(), []

async def generate(request):
    body = await request.json()
    params = body.get("kv_transfer_params") or {}
    await asyncio.sleep(0.02)
    if holds and params:
        handed_over.append(params)
        if len(handed_over) > 11:
            await ending.wait()
    if ending.is_set():
        if hangs:
            await asyncio.Event().wait()
        return web.json_response({"choices": [{"token_ids": [], "finish_reason": "abort"}]})
    if prefills and params:
        block = held / os.urandom(8).hex()
        block.touch()
        return web.json_response({"choices": [{"token_ids": [0]}], "kv_transfer_params": {"block": block.name}})
    if params and not (folder / "leaks").exists():
        (held / params["block"]).unlink(missing_ok=True)
    ids = [(sum(body["prompt"]) + at + wrong) % 97 for at in range(body["max_tokens"])]
    return web.json_response({"choices": [{"token_ids": ids}]})

async def health(_):
    return web.Response()

async def metrics(_):
    lease_s = 1e9 if (folder / "leaks").exists() else 1.0
    blocks = [path for path in held.iterdir() if path.stat().st_mtime > time.time() - lease_s] if prefills else []
    return web.Response(text='vllm:cache_config_info{a="b",num_gpu_blocks="101"} 1.0\\n'
                        f'vllm:kv_cache_usage_perc{{engine="0"}} {len(blocks) / 100}\\n')

async def main():
    app = web.Application()
    app.add_routes([web.post("/v1/completions", generate), web.get("/health", health), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(given.port)).start()
    if holds:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    await ending.wait()
    await asyncio.sleep(3.0)
    os._exit(0)

asyncio.run(main())
"""
NIXL = "NixlConnector"  # our own would want our router


def setup(folder: Path) -> servers.Setup:
    path = folder / "stub" / "vllm/entrypoints/openai/api_server.py"
    path.parent.mkdir(parents=True)
    path.write_text(SERVER)
    return engines.setup_of(
        "tiny", ("--folder", str(folder)), Path(sys.executable), (), (), [f"PYTHONPATH={folder / 'stub'}"],
        folder / "logs",
    )  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("LOAD_S", 0.5), ("GIVEN_UP", 30), ("FREE_S_MAX", 4.0), ("RIGHT_S_MAX", 6.0)):
        monkeypatch.setattr(chaos, name, value)
    servers_ = setup(tmp_path)
    return lambda *faults: chaos.measure(servers_, links=[NIXL], faults=faults, rounds=1, progress=lambda _: None)


def test_every_fault_strikes_and_all_is_right_again(measured) -> None:
    outcomes = measured(*chaos.FAULTS)
    assert [(outcome.link, outcome.fault) for outcome in outcomes] == [(NIXL, fault) for fault in chaos.FAULTS]
    for outcome in outcomes:
        assert outcome.answers["right"] >= chaos.ROW
        assert outcome.answers["wrong"] == outcome.answers["hung"] == outcome.leaked == 0
        assert outcome.right_s is not None
        assert (outcome.answers["given up"] > 0) == (outcome.fault == "aborts")
    assert not chaos.failed(outcomes)
    table = [chaos.HEAD, *chaos.rows(outcomes)]
    assert {len(row) for row in table} == {len(chaos.HEAD)}


def test_connectors_take_turns_at_each_fault(measured, tmp_path: Path) -> None:
    links = [NIXL, "MooncakeConnector"]
    outcomes = chaos.measure(
        setup(tmp_path / "turns"), links=links, faults=["kill prefill"], rounds=2, progress=lambda _: None
    )
    assert [outcome.link for outcome in outcomes] == 2 * links
    assert all(outcome.answers["right"] >= chaos.ROW and outcome.load > 0 for outcome in outcomes)


def test_blocks_that_stay_and_wrong_answers_are_seen(measured, tmp_path: Path) -> None:
    (tmp_path / "leaks").touch()
    [outcome] = measured("kill decode")
    assert outcome.held == outcome.leaked > 0
    (tmp_path / "leaks").unlink()
    (tmp_path / "forgets").touch()
    for name in ("kv_producer", "kv_consumer"):
        (tmp_path / name).unlink()
    [outcome] = measured("restart decode")
    assert outcome.answers["wrong"] > 0
    assert outcome.right_s is None
    assert chaos.failed([outcome])
    assert "never" in chaos.rows([outcome])[0]


def test_requests_without_an_end_are_seen(measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "ENDED_S_MAX", 1.0)
    (tmp_path / "hangs").touch()
    [outcome] = measured("restart decode")
    assert outcome.answers["hung"] > 0
    assert outcome.ended_s >= 1.0
    assert chaos.failed([outcome])


def test_answers_that_a_server_cuts_off_are_errors(measured, tmp_path: Path) -> None:
    (tmp_path / "cuts").touch()
    [outcome] = measured("restart decode")
    assert outcome.answers["error"] > 0
    assert "aborted after 0 tokens" in outcome.failures
    assert outcome.answers["wrong"] == outcome.answers["hung"] == 0
    assert not chaos.failed([outcome])


def test_right_is_after_the_last_answer_that_was_not() -> None:
    right = [Asked(10.0 + at, "right") for at in range(chaos.ROW)]
    assert right_after(right, 9.0) == 0.0
    assert right_after(right[1:], 9.0) is None
    assert right_after([Asked(9.5, "error"), *right], 9.0) == 0.5
    assert right_after([Asked(8.0, "error"), *right], 9.0) == 0.0, "before"
    assert right_after([*right, Asked(99.0, "given up")], 9.0) is None
    assert chaos.rows([Outcome(NIXL, "aborts", right_s=2.0), Outcome(NIXL, "aborts", right_s=None)])[0][-1] == "never"


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    made = setup(tmp_path)
    for links, faults in ((["LMCacheConnectorV1"], ["aborts"]), ([NIXL], ["freeze"])):
        with pytest.raises(ConfigError, match="must be one of"):
            chaos.measure(made, links=links, faults=faults, rounds=1, progress=lambda _: None)
