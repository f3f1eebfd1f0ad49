"""Prefill's side of a hand-off, where a scenario in text does not do: counts, loops, and what is inside."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdtransfer.errors import LocalProtocolError
from pdtransfer.handoff.effects import Map, Write
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.limits import AUX_BYTES_MAX
from pdtransfer.wire import Abort, Landed, Member, Reject, Welcome
from tests.library.sim.pools import LAYERS, ROW, components
from tests.support.session_ends import ARENA_BYTES, D2, LIMITS, SLOTS, PrefillEnd, grant, identity, of, sent

S = 0xA0


@pytest.fixture
def end() -> PrefillEnd:
    return PrefillEnd()


def test_numbers_are_over_once_their_ends_were_acknowledged_in_any_order(end: PrefillEnd) -> None:
    end.up()
    for number in (1, 2, 3):
        end.open(number)
        end.receive(grant(number, number, at=8 * (number - 1)))
        for write in of([*end.push(number), *end.finish(number)], Write):
            end.wrote(write)
    acked = end.core.sessions[S].acked
    for number, runs in ((3, 2), (1, 2), (2, 1)):
        end.released(number)
        assert number in acked
        assert acked.runs == runs, "they take no more memory than there are gaps"
        assert end.receive(grant(number), Abort(S, number)) == []
    assert 4 not in acked


def test_an_aux_that_no_frame_could_carry_is_reported_to_the_engine(end: PrefillEnd) -> None:
    end.open()
    with pytest.raises(LocalProtocolError, match="aux"):
        end.finish(aux=bytes(AUX_BYTES_MAX + 1))
    assert end.finish(aux=bytes(AUX_BYTES_MAX)) == []


def test_only_the_latest_ended_labels_are_kept() -> None:
    end = PrefillEnd(replace(LIMITS, rooms_max=3))
    for room in range(10):
        end.open(room)
        end.core.abort(room, 0.0)
    assert list(end.core._ended) == [7, 8, 9]


def test_a_session_of_some_layers_is_written_those_and_no_byte_of_others(end: PrefillEnd) -> None:
    end.receive(end.hello())
    stage = components(SLOTS, 1, page_first=True)[0]
    stage = msgspec.structs.replace(stage, layout=stage.layout.layers(1, LAYERS))
    end.receive(end.register(S, components=(stage,)))
    end.core.mapped(S, ARENA_BYTES)
    end.open()
    end.receive(grant(parts=grant().parts[:1]))
    writes = []
    for first in range(LAYERS):
        writes += of(end.push(layers=(first, first + 1)), Write)
    assert [(write.component, write.layers) for write in writes] == [
        (0, (layer, layer + 1)) for layer in range(1, LAYERS)
    ]
    end.finish()
    landed = [message for write in writes for message in sent(end.wrote(write), Landed)]
    assert [message.kv_bytes for message in landed] == [8 * (LAYERS - 1) * ROW]


def test_registers_cannot_pile_up_mappings(end: PrefillEnd) -> None:
    end.receive(end.hello())
    maps = []
    for session in range(100, 200):
        maps += of(end.receive(end.register(session)), Map)
    assert len(maps) == len(end.core.sessions) == LIMITS.peer_sessions_max
    (reject,) = sent(end.receive(end.register(777)), Reject)
    assert reject.reason == "full"
    assert "peer_sessions_max is 4" in reject.fields[0]
    end.up(0xB0, D2)
    for order in maps:
        end.core.mapped(order.session, ARENA_BYTES)
    assert of(end.receive(end.register(778)), Map)


def test_a_quiet_peer_is_looked_at_often_enough_to_separate_silence_from_time_that_nobody_ran(end: PrefillEnd) -> None:
    end.receive(end.hello())
    for _ in range(3):
        due = end.core.next_tick()
        assert due is not None
        assert due <= end.now + LIMITS.ping_ms / 1e3
        assert end.tick(due - end.now) == []
    assert end.core.peers


def test_silence_is_noticed_however_times_round() -> None:
    """Simulated, seed 176: now - seen rounded below the limit when seen + limit was due, so that tick never ended."""
    limit = LIMITS.session_silence_ms / 1e3
    seen = next(t for t in (0.1 * n + 4.18 for n in range(10_000)) if (t + limit - t) * 1e3 < limit * 1e3)
    end = PrefillEnd()
    end.now = seen
    end.receive(end.hello())
    end.core.tick(seen + limit)
    assert end.core.peers == {}


def test_the_text_of_a_reject_fits_into_its_frame(end: PrefillEnd) -> None:
    (reject,) = sent(end.receive(end.hello(model="\U0010ffff" * 128, node="n" * 128)), Reject)
    assert all(len(line) <= 512 for line in reject.fields)


def test_no_hello_is_answered_before_the_group_is_known(end: PrefillEnd) -> None:
    end.core = PrefillSessions(identity("p0", "prefill"), end.components, LIMITS, group_is_known=False)
    assert end.receive(end.hello()) == []
    group = (Member("p0", ""), Member("p1", "tcp://p1"))
    end.core.set_group(group)
    (welcome,) = sent(end.receive(end.hello()), Welcome)
    assert welcome.identity.group == group
