"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import engine
from tests.support.fleets import running
from tests.support.paths import REPO


def test_embed_lands_a_room_in_another_process() -> None:
    command = [sys.executable, "examples/embed.py"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "100 tokens, 460,800 bytes: every byte is where it belongs\n"


def test_the_program_of_the_clients_document_lands_a_room() -> None:
    [program, *_] = re.findall(
        r"^```python\n(.*?)^```$", (REPO / "docs" / "clients.md").read_text(), re.DOTALL | re.MULTILINE
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True 460800 b'the first token'\n"), done.stderr


def test_the_program_of_readme_lands_a_room() -> None:
    """As it stands, with the sizes, the memory and the room of the clients' document, in one process."""
    blocks = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    given, _, _ = blocks.findall((REPO / "docs" / "clients.md").read_text())[0].partition("p0, d0 =")
    [program] = blocks.findall((REPO / "README.md").read_text())
    prefill, decode, expect, poll = re.split(r"^(?=decode = |decode.expect|decode.poll)", program, flags=re.MULTILINE)
    given += "room, n, slots, digest, first_token = ROOM, TOKENS, np.arange(TOKENS), b'd', b't'\n"
    given += "components, writer = [component(16)], WriterOptions(pool_address=cache.address)\n"
    decode = "prefill_endpoint, components = prefill.endpoint, [component(1)]\n" + decode
    ended = f"select.select([decode], [], [], 30)\nprint(type({poll.partition('  #')[0]}[0]).__name__)\n"
    script = given + prefill + decode + expect + ended + "decode.close(), prefill.close()\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "RoomReady\n"), done.stderr


PAIR = "prefill", "decode", "router"


@pytest.mark.parametrize(
    ("path", "log"),
    [*(("docs/sglang.md", name) for name in (*PAIR, "sglang-router")), ("docs/bridge.md", "vllm"),
     *(("examples/vllm_cpu.sh", name) for name in PAIR)],
)  # fmt: skip
def test_a_wait_for_a_server_that_has_ended_shows_its_log(path: str, log: str, tmp_path: Path) -> None:
    """Each process has the log's name as its output. Those of other names run on, and nothing answers."""
    text = (REPO / path).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) or [text]
    [script] = [block for block in blocks if "until curl" in block and (f">{log}.log" in block or block == text)]
    server = f"case $1$(readlink /proc/$$/fd/1) in */{log}.log) echo no; exit 1;; doctor*) exit;; esac; exec sleep 20"
    (tmp_path / ".venv-vllm").mkdir()
    (tmp_path / ".venv-vllm" / "bin").symlink_to("..")
    for name, does in {**dict.fromkeys(("python", "pdtransfer", "vllm"), server), "curl": "exit 7"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = dict.fromkeys(("MODEL", "PREFILL_CORES", "DECODE_CORES"), "0") | {"LOGS": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", f"{script}\nkill $(jobs -p)"], env=given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path, capture_output=True, text=True, timeout=15, check=False,
    )  # fmt: skip
    assert f"/{log}.log <==\nno\n" in (done.stdout + done.stderr).replace("==> ", "==> /")


async def test_engine_serves_completions_behind_a_router(tmp_path: Path) -> None:
    own = {"engine": "examples.engine:create", "engine_option": ()}
    async with running(tmp_path, prefills=[own | {"chunk_tokens": 64}], decodes=[own]) as site:
        for prompt in ("once", "upon a time " * 40):
            answer = await site.complete(prompt, max_tokens=20)
            assert (answer.status, answer.text) == (200, engine.text(prompt, 20)), answer
        for name, value in {"top_k": 5, "presence_penalty": 1, "logprobs": 0}.items():  # it would ignore them
            answer = await site.complete("once", **{name: value})
            assert (answer.status, answer.error["code"], name in answer.error["message"]) == (400, "refused", True)
        await site.settled()
