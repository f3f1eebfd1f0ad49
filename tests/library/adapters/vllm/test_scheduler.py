"""What the scheduler's side orders: the texts in `scheduler`, and what depends on the ranks that an engine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtransfer.adapters.vllm.orders import RankRuns
from pdtransfer.errors import ConfigError
from tests.library.adapters.vllm.scheduler_player import ADDRESS, SchedulerPlayer
from tests.support.scenarios import plays

test_scenario = plays(dict.fromkeys(sorted(Path(__file__).parent.glob("scheduler/*.txt")), SchedulerPlayer))


def test_ranks_that_would_hand_over_unequal_rows_end_the_start_by_name() -> None:
    """Each rank has chosen by its own part of the cache."""
    side = SchedulerPlayer().side
    ranks = {
        (stage, 0): RankRuns(f"tcp://127.0.0.1:{7801 + stage}", {"facts": {"rows": name}}, (1,))
        for stage, name in enumerate(("blocks+tokens", "blocks+tokens", "blocks"))
    }
    text = r"rows: 'blocks\+tokens' of stage 0 rank 0, 'blocks' of stage 2 rank 0: all ranks .* need the same"
    with pytest.raises(ConfigError, match=text):
        side.on_ranks(ranks)
    assert side.endpoints == (ADDRESS,), "as it was"
    side.on_ranks({(1, 0): ranks[1, 0], (0, 0): ranks[0, 0]})
    assert side.endpoints == ("tcp://127.0.0.1:7801", "tcp://127.0.0.1:7802")
    assert side.identity is ranks[0, 0].identity
    side.on_ranks({})
    assert (side.endpoints, side.identity) == ((), {})


def test_bytes_of_an_answer_are_those_that_the_ranks_have_of_its_blocks() -> None:
    """Ranks have other layers of two groups each; a block of the second is in one of its stripes alone."""
    player = SchedulerPlayer()
    player.play("engine groups=page16,page16/2/4")
    sizes = {(0, 0): (10, 200), (0, 1): (10, 200), (1, 0): (7, 600), (1, 1): (7, 600)}
    player.side.on_ranks({rank: RankRuns(ADDRESS, {"facts": {}}, of_rank) for rank, of_rank in sizes.items()})
    assert player.play("load a 40 7,3,5/4,9 cached=16") == "39 tokens; 23 tokens; a peer waits"
    assert player.play("end a") == (f"frees its blocks; answers kv_bytes={2 * 34 + 2 * 1600 // 4} kv_lost=false")
