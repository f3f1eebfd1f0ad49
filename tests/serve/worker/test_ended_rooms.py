"""The record that a worker makes of each room at its end, and what its End tells the router of its times."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from pdtransfer.errors import Cause
from pdtransfer.serve.tracing.ended_request import TraceContext
from pdtransfer.wire import Cancel as CancelRoom
from pdtransfer.wire import Load
from tests.serve.worker.daemon_pair import ROOM, TOKENS, decode, engine_of, prefill
from tests.support.waiting import until


async def test_both_workers_record_a_room_once_with_the_parts_of_its_time(directory: Path) -> None:
    async with prefill() as p, decode(directory) as d:
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        async with engine_of(d):
            written, generated = await p.routers.over("a", ROOM), await d.routers.over("a", ROOM)
        (of_prefill,), (of_decode,) = p.ended, d.ended
        for record in (of_prefill, of_decode):
            assert (record.scope, record.rooms, record.request_id) == ("room", (ROOM,), "r7")
            assert record.trace == TraceContext("a1" * 16, "b2" * 8, sampled=True)
            assert (record.transport, record.prompt_tokens, record.state) == ("shm", TOKENS, "finished")
            assert (record.cause, record.detail) == (None, "")
            assert record.kv_bytes == written.kv_bytes > 0
            assert [span.begin_s for span in record.spans] == sorted(span.begin_s for span in record.spans)
            times = [(span.begin_s - record.began_s, span.end_s - record.began_s) for span in record.spans]
            assert all(0 <= begin_s <= end_s <= record.total_s for begin_s, end_s in times)
        assert (of_prefill.role, of_prefill.prefill, of_prefill.decode) == ("prefill", "p0", "d0")
        assert (of_decode.role, of_decode.prefill, of_decode.decode) == ("decode", "p0", "d0")
        assert (of_prefill.reason, of_prefill.tokens, of_prefill.cached_tokens) == ("done", 0, None)
        assert (of_decode.reason, of_decode.tokens, of_decode.cached_tokens) == ("length", 4, 0)
        parts = of_prefill.queue_s, of_prefill.prefill_s, of_prefill.transfer_s
        assert all(part is not None for part in parts)
        assert sum(part or 0 for part in parts) <= of_prefill.total_s
        assert (of_prefill.admission_s, of_prefill.first_token_s) == (None, None)
        assert (of_decode.prefill_s, of_decode.transfer_s) == (None, None), "another process's clock"
        assert of_decode.queue_s is not None
        assert of_decode.admission_s is not None
        assert of_decode.first_token_s is not None
        assert of_decode.queue_s + of_decode.admission_s <= of_decode.first_token_s <= of_decode.total_s
        recorded = written.queue_us, written.compute_us, written.transfer_us
        assert recorded == tuple(max(1, round(1e6 * (part or 0))) for part in parts)
        assert (written.admission_us, of_prefill.copy_s) == (0, written.copy_us / 1e6)
        assert generated.admission_us == max(1, round(1e6 * of_decode.admission_s))


async def test_a_room_that_its_router_gives_up_is_recorded_as_cancelled(directory: Path) -> None:
    async with prefill() as p, decode(directory) as d:
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        await until(lambda: any(room.landing is not None for room in d.rank.rooms.values()))
        d.routers.send("a", CancelRoom(ROOM, "aborted"))
        async with engine_of(d):
            await d.routers.over("a", ROOM)
        (record,) = d.ended
        assert (record.state, record.cause, record.reason) == ("cancelled", Cause.ABORTED, "")
        assert record.detail == "the router gave it up"
        assert (record.admission_s, record.first_token_s) == (None, None)


async def test_rooms_that_never_start_are_recorded_with_their_cause(directory: Path) -> None:
    async with prefill() as p, decode(directory) as d:
        begin = replace(
            p.begin("a", ROOM, "d0"), room=8, sampling=replace(p.begin("a", 9, "d0").sampling, max_tokens=0)
        )
        d.routers.send("a", replace(begin, prompt=b""))
        d.desk.service.load(replace(d.load(), draining=True), 0.0)
        d.routers.send("a", replace(begin, room=10))
        assert isinstance(d.load(), Load)
        refused, draining = d.ended
        assert (refused.cause, refused.detail, refused.prompt_tokens) == (Cause.REFUSED, "prompt: no tokens", 0)
        assert (draining.cause, draining.rooms) == (Cause.SHUTDOWN, (10,))
        assert draining.spans == ()
        assert draining.prefill == begin.peers[0], "its node is not known yet"
