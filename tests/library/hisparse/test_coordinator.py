"""The coordinator: all resources or none, what comes back when, and what is refused with which words."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pdtransfer.errors import CapacityError, LocalProtocolError
from pdtransfer.hisparse.coordinator import Capacity, Coordinator, Placement
from pdtransfer.hisparse.states import SPARSE_REQUEST, SparseRequest, SparseRequestEvent
from tests.library.hisparse.hisparse_events import Switch, host

R = SparseRequest
CAPACITY = Capacity(rows=2, logical_tokens=100, device_slots=20, hot=8, top_k=4)


def running(here: Coordinator, request: int, tokens: int = 20, growth: int = 4) -> Placement:
    assert here.alloc_logical_only(request, tokens=tokens, growth=growth)
    placement = here.admit_direct(request, host(tokens + growth, 100 * (request - 1)))
    assert placement is not None
    return placement


def free(here: Coordinator) -> tuple[int, int, int]:
    return here.logical_free, here.rows_free, here.device_free


EMPTY = (100, 2, 20)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator(CAPACITY)


@pytest.mark.parametrize(("tokens", "preload"), [(8, True), (9, False)])
def test_a_prompt_is_preloaded_where_it_fits_the_buffer_whatever_it_grows_to(tokens: int, preload: bool) -> None:
    placement = running(Coordinator(CAPACITY), 1, tokens=tokens, growth=10)
    assert (len(placement.device_slots), placement.preload) == (9, preload)


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        ({"logical_tokens": 23}, "logical tokens: 24 wanted, 23 available"),
        ({"host_slots": 23}, "host slots: 24 wanted, 23 available"),
        ({"top_k": 9}, "slots of a device buffer (top-k): 9 wanted, 8 available"),
        ({"device_slots": 8}, "device slots: 9 wanted, 8 available"),
    ],
)
def test_what_could_never_run_is_refused_by_the_name_of_the_resource(capacity: dict[str, int], words: str) -> None:
    sizes = {"rows": 2, "logical_tokens": 100, "device_slots": 20, "hot": 8, "top_k": 4} | capacity
    coordinator = Coordinator(Capacity(**sizes))
    assert coordinator.alloc_logical_only(1, tokens=3, growth=2), "another request is not disturbed"
    before = free(coordinator)
    with pytest.raises(CapacityError, match=re.escape(words)) as refused:
        coordinator.alloc_logical_only(2, tokens=20, growth=4)
    assert refused.value.retry_ms is None
    assert (free(coordinator), coordinator.state(2)) == (before, None)
    assert coordinator.admit_direct(1, host(5)) is not None


def test_exactly_what_there_is_can_be_had() -> None:
    coordinator = Coordinator(Capacity(rows=1, logical_tokens=24, device_slots=9, hot=8, top_k=8, host_slots=24))
    running(coordinator, 1, tokens=20, growth=4)
    assert free(coordinator) == (0, 0, 0)


def test_a_top_k_beyond_the_buffer_is_no_matter_where_every_token_has_a_place() -> None:
    running(Coordinator(Capacity(rows=1, logical_tokens=100, device_slots=20, hot=8, top_k=9)), 1, tokens=8, growth=0)


def test_host_slots_have_to_suffice_for_growth(coordinator: Coordinator) -> None:
    assert coordinator.alloc_logical_only(1, tokens=20, growth=4)
    before = free(coordinator)
    with pytest.raises(CapacityError, match="host slots of this request: 24 wanted, 23 available"):
        coordinator.admit_direct(1, host(23))
    assert (free(coordinator), coordinator.state(1)) == (before, R.RESERVED)
    assert coordinator.admit_direct(1, host(24)) is not None


@pytest.mark.parametrize("slots", [host(24).astype(np.int32), host(24).reshape(2, 12), host(24, -1), host(24, 50)])
def test_host_slots_that_are_none_are_refused(slots: np.ndarray) -> None:
    coordinator = Coordinator(Capacity(rows=1, logical_tokens=100, device_slots=20, hot=8, host_slots=73))
    assert coordinator.alloc_logical_only(1, tokens=20, growth=4)
    with pytest.raises(LocalProtocolError, match="host slots"):
        coordinator.admit_direct(1, slots)
    assert coordinator.admit_direct(1, host(24, 49)) is not None


def test_host_slots_below_zero_are_refused_where_nobody_knows_the_pool(coordinator: Coordinator) -> None:
    assert coordinator.alloc_logical_only(1, tokens=20, growth=4)
    with pytest.raises(LocalProtocolError, match="host slots: -1 to 22"):
        coordinator.admit_direct(1, host(24, -1))
    assert coordinator.admit_direct(1, host(24, 1 << 40)) is not None


def test_nobody_grows_beyond_what_was_admitted(coordinator: Coordinator) -> None:
    running(coordinator, 1, tokens=20, growth=2)
    coordinator.grow(1)
    assert coordinator.remaining(1) == 1
    coordinator.grow(1)
    with pytest.raises(LocalProtocolError, match="request 1 has all of its 22 tokens"):
        coordinator.grow(1)


def test_a_retracted_request_keeps_its_tokens_and_host_slots_and_goes_on_with_what_it_has() -> None:
    coordinator = Coordinator(CAPACITY)
    assert running(coordinator, 1, tokens=7, growth=4).preload
    coordinator.grow(1)
    coordinator.grow(1)
    coordinator.retract(1)
    assert coordinator.collect() == []
    assert (free(coordinator), coordinator.state(1)) == ((89, 2, 20), R.RETRACTED)
    again = coordinator.admit_direct(1)
    assert again is not None
    assert (again.tokens, again.preload) == (9, False)
    assert coordinator.remaining(1) == 2


def test_a_readmitted_request_reads_where_it_has_landed(coordinator: Coordinator) -> None:
    running(coordinator, 1)
    coordinator.retract(1)
    coordinator.collect()
    with pytest.raises(LocalProtocolError, match="request 1 has landed in other host slots"):
        coordinator.admit_direct(1, host(24, 500))
    assert coordinator.admit_direct(1, host(24, 0)) is not None


def test_an_event_that_cannot_be_asked_gives_nothing_back_and_loses_nothing() -> None:
    coordinator, event = Coordinator(CAPACITY), Switch()
    running(coordinator, 1)
    running(coordinator, 2, tokens=3, growth=1)
    coordinator.finish(1)
    coordinator.finish(2, after=event)
    event.broken = True
    with pytest.raises(OSError, match="fallen off"):
        coordinator.collect()
    event.broken, event.fired = False, True
    assert coordinator.collect() == [1, 2]


def test_an_event_is_kept_though_an_older_one_cannot_be_asked() -> None:
    coordinator, old, new = Coordinator(CAPACITY), Switch(), Switch()
    running(coordinator, 1)
    coordinator.grow(1, after=old)
    old.broken = True
    with pytest.raises(OSError, match="fallen off"):
        coordinator.finish(1, after=new)
    old.broken, old.fired = False, True
    assert coordinator.collect() == []
    new.fired = True
    assert coordinator.collect() == [1]


def test_events_that_have_fired_are_forgotten_while_a_request_runs() -> None:
    coordinator = Coordinator(Capacity(rows=1, logical_tokens=2_000, device_slots=20, hot=8))
    running(coordinator, 1, tokens=20, growth=1_000)
    for _ in range(1_000):
        event = Switch()
        coordinator.grow(1, after=event)
        event.fired = True
    assert len(coordinator._entries[1].holds) == 1


def test_every_call_may_be_repeated() -> None:
    coordinator, event = Coordinator(CAPACITY), Switch()
    for _ in range(2):
        assert coordinator.alloc_logical_only(1, tokens=20, growth=4)
        coordinator.land(1, host(24))
    placement = coordinator.admit_direct(1, host(24))
    assert coordinator.admit_direct(1, host(24)) is placement
    for _ in range(2):
        coordinator.retract(1, after=event)
    event.fired = True
    for _ in range(2):
        assert coordinator.collect() == []
    assert free(coordinator) == (76, 2, 20)
    for _ in range(2):
        coordinator.finish(1)
        coordinator.retract(1, drop=True)
    assert [coordinator.collect(), coordinator.collect()] == [[1], []]
    coordinator.finish(1)
    coordinator.retract(1)
    coordinator.retract(1, drop=True)
    assert (free(coordinator), coordinator.collect(), coordinator.is_idle) == (EMPTY, [], True)


CALLS = {
    SparseRequestEvent.LAND: lambda here: here.land(1, host(24)),
    SparseRequestEvent.ADMIT: lambda here: here.admit_direct(1),
    SparseRequestEvent.RETRACT: lambda here: here.retract(1),
    SparseRequestEvent.FINISH: lambda here: here.finish(1),
    SparseRequestEvent.DROP: lambda here: here.retract(1, drop=True),
}
PATHS = {
    R.RESERVED: "",
    R.WAITING: "land",
    R.RUNNING: "land admit",
    R.RETRACTED: "land admit retract",
    R.FINISHED: "land finish",
    R.DROPPED: "drop",
}
REPEATED = {  # what changes nothing where it has happened
    (R.WAITING, "land"), (R.RUNNING, "land"), (R.RETRACTED, "land"), (R.RUNNING, "admit"),
    *((end, event) for end in (R.FINISHED, R.DROPPED) for event in ("retract", "finish", "drop")),
}  # fmt: skip


@pytest.mark.parametrize("event", CALLS, ids=lambda each: each.value)
@pytest.mark.parametrize("state", PATHS, ids=lambda each: each.value)
def test_a_call_is_legal_where_the_table_has_it_and_elsewhere_changes_nothing(
    coordinator: Coordinator, state: SparseRequest, event: SparseRequestEvent
) -> None:
    assert coordinator.alloc_logical_only(1, tokens=20, growth=4)
    for word in PATHS[state].split():
        CALLS[SparseRequestEvent(word)](coordinator)
        if word == "retract":
            coordinator.collect()
    assert coordinator.state(1) is state
    before = free(coordinator)
    if (state, event) in SPARSE_REQUEST or (state, event.value) in REPEATED:
        CALLS[event](coordinator)
        assert coordinator.state(1) is SPARSE_REQUEST.get((state, event), state)
    else:
        with pytest.raises(LocalProtocolError, match=f"request 1 is {state.value}: it cannot {event.value}"):
            CALLS[event](coordinator)
        assert (coordinator.state(1), free(coordinator)) == (state, before)


def test_who_is_not_known_cannot_land_run_or_grow(coordinator: Coordinator) -> None:
    for call in (
        lambda: coordinator.land(7, host(5)),
        lambda: coordinator.admit_direct(7),
        lambda: coordinator.grow(7),
    ):
        with pytest.raises(LocalProtocolError, match="request 7 is not known"):
            call()


def test_only_who_runs_grows(coordinator: Coordinator) -> None:
    running(coordinator, 1)
    coordinator.retract(1)
    with pytest.raises(LocalProtocolError, match="request 1 is retracted: it does not grow"):
        coordinator.grow(1)


def test_a_number_is_not_used_for_another_request(coordinator: Coordinator) -> None:
    running(coordinator, 1, tokens=20, growth=4)
    with pytest.raises(LocalProtocolError, match="request 1 is running, with 24 tokens in all"):
        coordinator.alloc_logical_only(1, tokens=20, growth=5)
    coordinator.finish(1)
    with pytest.raises(LocalProtocolError, match="request 1 is finished"):
        coordinator.alloc_logical_only(1, tokens=20, growth=4)


@pytest.mark.parametrize("leak", ["_rows", "_device", "logical_free"])
def test_the_idle_check_finds_what_leaked(coordinator: Coordinator, leak: str) -> None:
    match leak:
        case "_rows":
            coordinator._rows.pop()
        case "_device":
            coordinator._device.allocate(1)
        case _:
            coordinator.logical_free -= 1
    with pytest.raises(AssertionError, match="idle, and"):
        _ = coordinator.is_idle


def test_what_is_on_its_way_back_counts_as_not_lacking() -> None:
    coordinator, event = Coordinator(Capacity(rows=1, logical_tokens=100, device_slots=9, hot=8)), Switch()
    running(coordinator, 1)
    assert coordinator.alloc_logical_only(2, tokens=20, growth=0)
    assert coordinator.lacking(2) == (1, 9)
    coordinator.retract(1, after=event)
    assert coordinator.lacking(2) == (0, 0)
    assert not coordinator.fits_now(2)


@pytest.mark.parametrize("name", ["rows", "logical_tokens", "device_slots", "hot", "top_k"])
def test_a_capacity_of_nothing_is_refused_by_name(name: str) -> None:
    sizes = {"rows": 1, "logical_tokens": 1, "device_slots": 1, "hot": 1, "top_k": 1}
    with pytest.raises(LocalProtocolError, match=f"{name}: 0"):
        Capacity(**(sizes | {name: 0}))


@pytest.mark.parametrize(("tokens", "growth"), [(0, 5), (-1, 5), (5, -1)])
def test_a_request_of_no_tokens_is_refused(tokens: int, growth: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"tokens: {tokens}, growth: {growth}"):
        Coordinator(CAPACITY).alloc_logical_only(1, tokens=tokens, growth=growth)
