"""The examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


async def test_engine_serves_completions_behind_a_router(tmp_path: Path) -> None:
