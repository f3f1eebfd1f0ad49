"""The commands of a document, run in a shell as they stand there, but for what this host decides, such as ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.json_process import end_of
from tests.support.paths import REPO

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FIRST_LINE = re.compile(r"^pdtransfer (?:prefill|decode): .* facts=[0-9a-f]{8}$", re.MULTILINE)


def section(document: str, heading: str) -> str:
    """The text below a heading of a document in docs/, up to the next heading of its level or above."""
    text = (REPO / "docs" / document).read_text(encoding="utf-8")
    level = len(heading) - len(heading.lstrip("#"))
    parts = re.split(rf"^(?=#{{1,{level}}} )", text, flags=re.MULTILINE)
    [found] = [part for part in parts if part.startswith(f"{heading}\n")]
    return found


def commands(text: str) -> str:
    """All its fenced blocks of shell commands, in order."""
    found = [block for language, block in _FENCE.findall(text) if language == "sh"]
    assert found
    return "".join(found)


def readme(engine: str) -> list[str]:
    """The commands below the link to an engine's document in README: prefill, decode and the router."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(rf"\(docs/{engine}\.md\) .*?^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [command.strip() for command in re.split(r"\n(?=\S)", block.strip())]


def in_background(commands_of: Sequence[str]) -> str:
    """A script that starts each of prefill, decode and the router, with a log of its name, and waits for the router."""
    logs = zip(commands_of, ("prefill", "decode", "router"), strict=True)
    started = "".join(f"{command} >{name}.log 2>&1 &\n" for command, name in logs)
    healthy = "curl -sf http://127.0.0.1:8000/health >health.json"
    return f'{started}until {healthy}; do [ "$(jobs -rp | wc -l)" = 3 ]; sleep 1; done\n'


def stated_lines(text: str) -> list[str]:
    """The first lines of engines in its blocks of output, where they are broken before spaces."""
    blocks = [re.sub(r"\n +", " ", block) for language, block in _FENCE.findall(text) if not language]
    return [line for block in blocks for line in FIRST_LINE.findall(block)]


def shape_of(line: str) -> list[str]:
    """An engine's first line without what differs from host to host: what it does, and the names of its facts."""
    head, _, facts = line.partition("; ")
    return [re.sub(r":\d+$", "", head), *re.findall(r"(?:^| )(\w+)=(?:'[^']*'|\S+)", facts)]


def run(script: str, replaced: Mapping[str, str], folder: Path, environment: Mapping[str, str], seconds: float) -> str:
    """What a shell prints that runs the commands in `folder`. Each text of `replaced` must be there. What they have
    started in the background ends with them."""
    for text, by in replaced.items():
        assert text in script, f"the document has no {text!r}"
        script = script.replace(text, by)
    printed = folder / "printed"
    with printed.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", script], cwd=folder, env=os.environ | dict(environment), stdout=out,
            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            _, traced = shell.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            traced = b"it has not ended in time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    logs = "\n".join(end_of(log) for log in sorted(folder.glob("*.log")))
    assert shell.returncode == 0, f"{traced.decode()[-2_000:]}\n{printed.read_text()}\n{logs}"
    return printed.read_text()
