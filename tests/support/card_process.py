"""tests/support/gpu_writer.py as a process, for whoever tests a GPU that writes; imports where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from tests.support.paths import REPO
from tests.support.shm_pair import WRITER, Process


class CardProcess(Process):
    """tests/support/gpu_writer.py, and what it forked; with no GPU the CPU writes."""

    def __init__(self, reach: object, session: int = WRITER, device: int | None = 0) -> None:
        writer = str(REPO / "tests" / "support" / "gpu_writer.py")
        command = [sys.executable, writer, str(session), msgspec.json.encode(reach)]
        command.append("cpu" if device is None else str(device))
        self.started = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        self.forked: list[int] = []

    async def child(self, how: str) -> int:
        self.send(how)
        self.forked.append(int(await self.receive()))
        return self.forked[-1]
