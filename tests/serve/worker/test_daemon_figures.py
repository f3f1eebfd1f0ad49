"""What daemons report of themselves in each Pong to their routers."""

from __future__ import annotations

from pathlib import Path

from pdtransfer.errors import Cause
from pdtransfer.serve.engine_api import Finished, Token
from pdtransfer.wire import Begin, Cancel, Ping, Pong, Sampling, Tally, WorkerFigures, pack_ids
from tests.serve.worker.daemon_pair import TOKENS, Routers, decode, generates, prefill
from tests.support.waiting import PATIENCE_S

NOWHERE = "tcp://127.0.0.1:9"  # no prefill answers: rooms stay as they are


def figures(routers: Routers, router: str = "a") -> tuple[WorkerFigures, ...]:
    routers.sent.clear()
    routers.send(router, Ping(1))
    (pong,) = [message for _, message in routers.sent if isinstance(message, Pong)]
    return pong.figures


async def test_a_room_that_has_landed_counts_on_both_sides(tmp_path: Path) -> None:
    async with prefill() as left, decode(tmp_path) as right:
        right.routers.send("a", left.begin("a", 7, "d0"))
        (before,) = figures(right.routers)
        assert before.rooms == (Tally("connecting", 1),)
        local_id = await generates(right)
        end = await left.routers.over("a", 7)
        (sent,), (held,) = figures(left.routers), figures(right.routers)
        assert end.kv_bytes > 0
        assert (sent.tokens, sent.kv_bytes, sent.copy_us) == (TOKENS, end.kv_bytes, end.copy_us)
        assert (sent.rooms_done, sent.rooms_failed, sent.sessions) == (1, 0, (Tally("shm", 1),))
        assert (held.kv_bytes, held.tokens, held.rooms) == (end.kv_bytes, 0, (Tally("ready", 1),))
        assert held.prefix_queried_tokens == TOKENS // 64 * 64
        tokens = [Token(room=local_id, index=index, id=97) for index in range(2)]
        right.rank.on_outcomes([*tokens, Finished(room=local_id, reason="length")])
        (done,) = figures(right.routers)
        assert (done.tokens, done.rooms_done, done.rooms) == (2, 1, ())
        assert held.uptime_ms <= done.uptime_ms < 1e3 * PATIENCE_S
        await left.drained()


async def test_failed_rooms_are_counted_and_a_stranger_gets_no_figures(tmp_path: Path) -> None:
    async with decode(tmp_path) as daemon:
        for room in (7, 8, 9):
            daemon.routers.send("a", Begin(room, pack_ids([97] * 9), Sampling(4), (NOWHERE,), 30_000))
        for room, cause in ((7, Cause.ABORTED), (8, Cause.DEADLINE), (9, Cause.ENGINE)):
            daemon.routers.send("a", Cancel(room, cause.value))
        (figure,) = figures(daemon.routers)
        assert (figure.rooms_done, figure.rooms_failed, figure.rooms_cancelled, figure.rooms) == (0, 2, 1, ())
        assert figures(daemon.routers, "stranger") == ()
