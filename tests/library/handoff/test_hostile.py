"""Peers that lie, err or rave: each gets a Reject that names the wrong field and both values, and
ends nobody else's session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from pdtransfer.errors import Cause, RemoteProtocolError
from pdtransfer.handoff import effects as fx
from pdtransfer.layout.layout import Component, Layout, Span
from pdtransfer.wire import (
    MESSAGES,
    Abort,
    Drained,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Landed,
    Message,
    Part,
    Reach,
    Register,
    Registered,
    Reject,
    Released,
    StagedLayout,
    decode,
    encode,
    pack_extents,
)
from tests.library.handoff.siege import Siege
from tests.library.sim.pools import components
from tests.support.session_ends import (
    ARENA_BYTES,
    C4,
    C4_ROW,
    D2,
    KV,
    LIMITS,
    P2,
    REACH,
    SLOTS,
    D,
    DecodeEnd,
    P,
    PrefillEnd,
    grant,
    of,
    refusal,
    sent,
)

HONEST, HOSTILE = 0xA0, 0xB0  # their sessions
ARENA = components(SLOTS, 1, page_first=True)


def part(index: int = 0, first_row: int = 0, rows: int = 8, extents: Any = ((0, 8),)) -> Part:
    if not isinstance(extents, bytes):
        extents = pack_extents(np.array(extents, dtype=np.int64))
    return Part(index, first_row, rows, extents)


def kv(**changes: Any) -> tuple[Component, ...]:
    """What decode registers, with its first component changed."""
    return (msgspec.structs.replace(ARENA[0], **changes), ARENA[1])


def planes(**changes: Any) -> Layout:
    layout = ARENA[0].layout
    return Layout(
        tuple(msgspec.structs.replace(plane, **changes) for plane in layout.planes), layout.page_size, layout.slots
    )


NEXT_STAGE = Layout(
    tuple(msgspec.structs.replace(plane, layer=plane.layer + 1) for plane in ARENA[0].layout.planes), 1, SLOTS
)


# A hostile decode node, with an honest one beside it


def beset() -> tuple[PrefillEnd, list[fx.Write]]:
    """A prefill with a room of an honest decode in flight, and a hostile one that has grant 1 of room 3 waiting."""
    end = PrefillEnd()
    end.up(HONEST, D)
    end.up(HOSTILE, D2)
    end.open(peers=[D])
    end.receive(grant())
    writes = of(end.push(), fx.Write)
    end.finish()
    end.receive(grant(1, 3, at=8, session=HOSTILE), peer=D2)
    return end, writes


def check_honest_lands(end: PrefillEnd, writes: list[fx.Write]) -> None:
    effects = [effect for write in writes for effect in end.wrote(write)]
    assert of(effects, fx.RoomLanded)
    assert [landed.session for landed in sent(effects, Landed)] == [HONEST]


@pytest.fixture
def end() -> PrefillEnd:
    return PrefillEnd()


def test_a_bad_grant_of_extents_that_are_no_pairs_is_a_breach() -> None:
    end, writes = beset()
    effects = end.receive(grant(2, 2, session=HOSTILE, parts=(part(extents=b"1234"),)), peer=D2)
    assert refusal(effects) == "Grant.parts[0].extents: 4 bytes, expected pairs of u32"
    check_honest_lands(end, writes)


@pytest.mark.parametrize(
    "message", [grant(1, 2, session=HOSTILE), Abort(HOSTILE, 1), Released(HOSTILE, 1)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("ready", [None, 0])
def test_a_grant_before_any_byte_is_registered_is_a_breach(message: Message, ready: int | None) -> None:
    end = PrefillEnd()
    end.receive(end.hello(), end.register(HOSTILE), peer=D2)
    if ready is not None:
        end.core.mapped(HOSTILE, ready)
    effects = end.receive(message, peer=D2)
    assert refusal(effects) == f"{type(message).__name__}.session: 0xb0 is not yet Registered"
    assert not end.core.sessions[HOSTILE].open if ready is None else HOSTILE not in end.core.sessions


def test_a_grant_beyond_what_is_registered_is_a_breach_and_below_it_is_none(end: PrefillEnd) -> None:
    end.receive(end.hello(), end.register(HOSTILE), peer=D2)
    end.core.mapped(HOSTILE, ARENA_BYTES // 2 + C4_ROW)  # all of kv, and one row of c4
    assert sent(end.receive(grant(1, tokens=4, session=HOSTILE), peer=D2), Granted) == [Granted(HOSTILE, 1)]
    effects = end.receive(grant(2, room=2, tokens=8, at=8, session=HOSTILE), peer=D2)
    text = "Grant.parts[1].extents: end at slot 10, 1 of c4 are ready"
    assert refusal(effects) == text


def test_a_grant_that_came_for_a_room_of_another_peer_before_it_was_open_fails_alone(end: PrefillEnd) -> None:
    end.up(HONEST, D)
    end.up(HOSTILE, D2)
    end.receive(grant(session=HOSTILE), grant(2, session=HOSTILE, at=20), peer=D2)
    end.receive(grant(), peer=D)
    effects = end.open(peers=[D])
    assert [failed.session for failed in sent(effects, Failed)] == [HOSTILE, HOSTILE]
    assert of(effects, fx.RoomLeased)
    assert {write.session for write in of(end.push(), fx.Write)} == {HONEST}


def test_a_grant_of_other_tokens_than_the_engine_has_fails_the_room_with_both_values(end: PrefillEnd) -> None:
    end.up()
    end.open(tokens=9)
    effects = end.receive(grant())
    assert [(e.cause, e.detail) for e in of(effects, fx.RoomFailed)] == [
        (Cause.BREACH, "tokens: the grant has 8, the engine 9")
    ]
    assert end.core.sessions[0xA0].open


BEYOND = "Register.reach.arena_bytes: planes[2] (kind latent, layer 2) ends at byte 3072"
BAD_REGISTERS: dict[str, tuple[dict[str, Any], str]] = {
    "a component twice": (
        {"components": (ARENA[0], ARENA[0])}, "Register.components: 'kv' is there twice in one memory",
    ),
    "rows outside the arena": (
        {"reach": msgspec.structs.replace(REACH, arena_bytes=ARENA_BYTES - 1)},
        f"Register.components[1].layout: {BEYOND}, of 3071",
    ),
    "an unknown component": (
        {"components": kv(name="index")}, "Register.components[0].name: 'index', this prefill has ['c4', 'kv']",
    ),
    "other tokens a row": (
        {"components": kv(tokens_per_row=2)}, "Register.components[0].tokens_per_row: decode has 2, prefill 1",
    ),
    "another span": (
        {"components": kv(span=Span("last", 16))},
        "Register.components[0].span: decode has Span(kind='last', tokens=16), prefill Span(kind='all', tokens=0)",
    ),
    "another dtype": (
        {"components": kv(layout=planes(dtype="float64"))},
        "Register.components[0].layout: kind latent layers 0..2 dtype: source int64, target float64",
    ),
    "a layer that is not held": (
        {"components": kv(layout=NEXT_STAGE)}, "Register.components[0].layout: layers: source 0..2, target 1..3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), BAD_REGISTERS.values(), ids=BAD_REGISTERS)
def test_a_register_that_does_not_fit_is_refused_with_field_and_values(changes: dict[str, Any], named: str) -> None:
    end, writes = beset()
    effects = end.receive(end.register(0xB1, **changes), peer=D2)
    assert refusal(effects) == named
    assert of(effects, fx.Map) == []
    assert 0xB1 not in end.core.sessions
    check_honest_lands(end, writes)


def test_every_difference_has_a_line_of_its_own(end: PrefillEnd) -> None:
    end.receive(end.hello())
    wrong = kv(tokens_per_row=2, layout=planes(dtype="float64"))
    (reject,) = sent(end.receive(end.register(components=wrong)), Reject)
    assert reject.reason == "refused"
    assert len(reject.fields) == 2


def _another(value: object) -> object:
    """A value of the same type that is not equal to it."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return {"shm": "mooncake"}.get(value, value + "x")
        case bytes():
            return value + b"x"
        case _:
            return ()


@pytest.mark.parametrize("field", [name for name in Register.__struct_fields__ if name not in ("session", "reach")])
def test_each_field_of_a_repeated_register_is_compared(field: str) -> None:
    end, writes = beset()
    register = end.register(HOSTILE)
    before = getattr(register, field)
    another = (StagedLayout(1, b""),) if field == "staging" else _another(before)
    text = f"{another!r}, the session began with {before!r}"
    if isinstance(before, tuple):
        text = f"{len(another)} items, not the {len(before)} that the session began with"
    effects = end.receive(msgspec.structs.replace(register, **{field: another}), peer=D2)
    assert refusal(effects) == f"Register.{field}: {text}"
    assert HOSTILE not in end.core.sessions
    check_honest_lands(end, writes)


@pytest.mark.parametrize("field", Reach.__struct_fields__)
def test_each_field_of_a_repeated_reach_is_compared_and_no_secret_is_shown(field: str) -> None:
    end, writes = beset()
    before = getattr(REACH, field)
    another = _another(before)
    effects = end.receive(end.register(HOSTILE, reach=msgspec.structs.replace(REACH, **{field: another})), peer=D2)
    text = f"{another!r}, the session began with {before!r}"
    if field in ("token", "hbm_handle"):
        text = "not the one that the session began with"
    assert refusal(effects) == f"Register.reach.{field}: {text}"
    assert HOSTILE not in end.core.sessions
    check_honest_lands(end, writes)


def test_session_0_is_no_session(end: PrefillEnd) -> None:
    end.receive(end.hello())
    assert refusal(end.receive(end.register(0))) == f"Register.session: 0x0 is not a session of {D}"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ((3, 0, 4, 1), 3, "page_size: 3"),
        ((3, 0, 4, 0, 0, 2), "float9", "float9"),
        ((3, 0, 4, 2), 0, "slots"),
        ((0,), 2, "version: 2"),
    ],
)
def test_a_register_that_is_wrong_in_itself_never_gets_to_a_session(path: tuple, value: Any, named: str) -> None:
    frame = msgpack.unpackb(encode(Register(HOSTILE, ARENA, REACH)))
    place = frame
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(RemoteProtocolError, match=named):
        decode(msgpack.packb(frame))


# A hostile prefill, with an honest one beside it

BAD_ENDS: dict[str, tuple[Callable[[Grant], Message], str]] = {
    "too many bytes": (lambda g: Landed(g.session, g.grant, 241, b""), "Landed.kv_bytes: 241, the grant is 240"),
    "a number never granted": (
        lambda g: Landed(g.session, g.grant + 1, 240, b""), "Landed.grant: 2 was never granted, the next is 2",
    ),
    "a failure never granted": (
        lambda g: Failed(g.session, 99, "engine", "", quiescent=True),
        "Failed.grant: 99 was never granted, the next is 2",
    ),
    "Granted never granted": (lambda g: Granted(g.session, 99), "Granted.grant: 99 was never granted, the next is 2"),
    "more bytes ready than there are": (
        lambda g: Registered(g.session, ARENA_BYTES + 1),
        f"Registered.bytes_ready: {ARENA_BYTES + 1}, the arena has {ARENA_BYTES}",
    ),
    "a word of decode": (lambda g: Abort(g.session, g.grant), "kind: Abort is not a message from prefill to decode"),
}  # fmt: skip


@pytest.mark.parametrize(("lie", "named"), BAD_ENDS.values(), ids=BAD_ENDS)
def test_a_lie_of_a_prefill_ends_its_own_session(lie: Callable[[Grant], Message], named: str) -> None:
    end = DecodeEnd()
    end.up(P)
    end.up(P2)
    honest, theirs = end.granted(1, 8, P), end.granted(2, 8, P2)
    effects = end.receive(lie(theirs), peer=P2)
    (failed,) = of(effects, fx.RoomFailed)
    assert (failed.room, failed.cause, failed.detail) == (2, Cause.BREACH, f"{P2} broke the protocol: {named}")
    assert refusal(effects) == failed.detail
    assert of(effects, fx.Fence) == [fx.Fence(theirs.session)]
    assert end.free == [SLOTS - 16, SLOTS - 4], "its slots are not free before the fence"
    assert of(end.land(honest, P), fx.RoomReady)
    end.core.fenced(theirs.session, end.now)
    assert end.free == [SLOTS - 8, SLOTS - 2]


def test_aux_from_a_rank_that_sends_none_is_a_breach() -> None:
    end = DecodeEnd()
    end.up(P, holds=KV)
    end.up(P2, holds=C4)
    _, second = sent(end.expect(1, 8, P, P2), Grant)
    (failed,) = of(end.land(second, P2, aux=b"mine"), fx.RoomFailed)
    assert failed.detail.endswith("Landed.aux: 4 bytes, but the Grant does not ask for aux")


def test_no_prefill_speaks_on_a_session_of_another() -> None:
    end = DecodeEnd()
    end.up(P)
    theirs = end.up(P2)
    honest = end.granted(1, 8, P)
    for message in (
        Landed(honest.session, honest.grant, 240, b""),
        Drained(honest.session, honest.grant),
        Reject(honest.session, "transfer", ()),
        Registered(honest.session, 0),
    ):
        effects = end.receive(message, peer=P2)
        assert refusal(effects) == f"session: {honest.session:#x} is not a session of {P2}"
        assert of(effects, fx.RoomFailed) == []
    end.core.dial("tcp://p9:1", 0.0)
    unmet = end.receive(Landed(honest.session, honest.grant, 240, b""), peer="tcp://p9:1")
    assert sent(unmet, Reject) == [], "it may be that session's peer"
    assert end.core.prefill_peers.peers[P2].up.id == theirs
    assert of(end.land(honest, P), fx.RoomReady)


def test_nothing_is_registered_before_it_was_offered() -> None:
    end = DecodeEnd()
    end.core.dial(P, 0.0)
    (offer,) = of(end.receive(end.welcome()), fx.Offer)
    for message in (Registered(offer.session, 0), Granted(offer.session, 1), Landed(offer.session, 1, 0, b"")):
        other = DecodeEnd()
        other.core.dial(P, 0.0)
        other.receive(other.welcome())
        assert of(other.receive(message), fx.Fence) == [fx.Fence(offer.session)]
    end.core.offered(offer.session, REACH, 0.0)
    assert end.receive(Registered(offer.session, ARENA_BYTES)) == []


def test_what_a_condemned_session_sends_is_taken_as_proof_and_nothing_else() -> None:
    end = DecodeEnd()
    session = end.up()
    first, second = end.granted(1), end.granted(2)
    end.tick(0.2)
    end.receive(Reject(session, "transfer", ()))
    assert end.receive(Granted(session, 1), Registered(session, ARENA_BYTES)) == []
    assert end.receive(Failed(session, 1, "transfer", "", quiescent=False)) == []
    assert sent(end.land(first), Released)
    assert sent(end.receive(Drained(session, second.grant)), Released)
    assert end.free == [SLOTS, SLOTS]
    assert of(end.receive(Landed(session, 9, 0, b"")), fx.RoomFailed) == []


# What one peer can make us hold


def test_grants_for_rooms_that_nobody_opens_are_held_within_the_window(end: PrefillEnd) -> None:
    end.up(HOSTILE, D2)
    session = end.core.sessions[HOSTILE]
    for number in range(1, 10 * LIMITS.window):
        end.receive(grant(number, number, session=HOSTILE, parts=()), peer=D2)
    assert len(session.grants) == session.window <= LIMITS.window
    for number in range(1, 10 * LIMITS.window):
        end.receive(
            Abort(HOSTILE, number), Released(HOSTILE, number) if number < 3 else Abort(HOSTILE, number), peer=D2
        )
    assert len(session.grants) <= session.window
    assert session.acked.runs <= session.window + 1
    assert session.open


def test_slots_that_are_granted_once_are_all_that_one_can_make_a_prefill_remember(end: PrefillEnd) -> None:
    """Extents cost memory: they may not overlap, so that an arena's slots bound them."""
    end.up(HOSTILE, D2)
    for number, at in enumerate((0, 8), 1):
        parts = (part(extents=tuple((at + index, 1) for index in range(8))),)
        assert sent(end.receive(grant(number, number, session=HOSTILE, parts=parts), peer=D2), Granted)
    effects = end.receive(grant(3, 99, session=HOSTILE, parts=(part(extents=((15, 8),)),)), peer=D2)
    assert "overlap" in refusal(effects)


# Raving


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_hostile_peer_sends_nothing_raises_and_the_honest_ones_rooms_land(seed: int) -> None:
    siege = Siege(seed)
    for number in range(600):
        siege.step(number)
    honest = range(1_000, 1_600, 10)
    assert {room: siege.failed.get(room) for room in honest if room not in siege.ready} == {}
    for room in honest:
        siege.on_decode(siege.decode.release(room, siege.now))
    own = siege.decode.prefill_peers.peers[P].up
    assert own is not None
    assert [lease.message.room for lease in own.leases.values() if lease.message.room >= 1_000] == []
    assert len(siege.decode.prefill_peers.sessions) <= 1 + LIMITS.peer_sessions_max
    assert len(siege.prefill.sessions) <= 1 + LIMITS.peer_sessions_max
    assert len(siege.prefill.peers) <= 2


@pytest.mark.slow
def test_the_raving_gets_somewhere() -> None:
    """Else the test above would pass by saying nothing."""
    delivered, done = Counter[str](), Counter[str]()
    for seed in range(20):
        siege = Siege(seed)
        for number in range(600):
            siege.step(number)
        delivered, done = delivered + siege.delivered, done + siege.done
    for side in ("decode", "prefill"):
        assert {what for what in delivered if what.endswith(side)} >= {
            f"{kind.__name__} to {side}" for kind in MESSAGES.values() if kind.kind <= Drained.kind or kind is Goodbye
        }
    for what in ("Released from decode", "Reject from decode", "Register from decode", "Grant from decode"):
        assert done[what] > 20, what
    for what in ("Granted", "Drained", "Failed", "Reject", "Registered", "Welcome"):
        assert done[f"{what} from prefill"] > 20, what
