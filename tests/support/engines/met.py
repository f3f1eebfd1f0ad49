"""No engine: a factory that fails once both ranks of a worker are in it, `--engine tests.support.engines.met:create`.

Option `at`: a directory that they share.
"""

from __future__ import annotations

from pathlib import Path

from pdtransfer.serve.engine_api import EngineConfig
from tests.support.waiting import PATIENCE_S, wait_for


def create(config: EngineConfig) -> None:
    """Raises what an invalid setting raises, on either rank."""
    path = Path(config.options["at"])
    (path / f"rank{config.group.ranks.tp_rank}").touch()
    wait_for(lambda: len(list(path.glob("rank*"))) == 2, "the other rank makes its engine too", 2 * PATIENCE_S)
    raise ValueError("both ranks were here")
