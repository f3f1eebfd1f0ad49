"""tests/support/gpu_writer.py as a process, for whoever tests a GPU that writes; imports where there is no GPU."""

from __future__ import annotations

from pdtransfer.wire import Reach
from tests.support.shm_pair import WRITER, Process


class CardProcess(Process):
    """tests/support/gpu_writer.py, and what it forked; with no GPU the CPU writes."""

    def __init__(self, reach: Reach, session: int = WRITER, device: int | None = 0) -> None:
        super().__init__(reach, session, "gpu_writer.py", "cpu" if device is None else str(device))
