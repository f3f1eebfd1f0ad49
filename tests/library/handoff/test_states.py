"""Every table of states: what is named can be reached, what has ended stays so, and the diagrams say all of it."""

from __future__ import annotations

from enum import Enum

import pytest

from pdtransfer.handoff.states import (
    DECODE_ROOM,
    LEASE,
    PREFILL_ROOM,
    SESSION,
    WRITER,
    WRITER_GRANT,
    WRITER_GRANT_ENDS,
    DecodeRoom,
    Lease,
    LeaseEvent,
    PrefillRoom,
    SessionState,
    WriterGrantState,
    WriterState,
)
from pdtransfer.handoff.tables import step
from pdtransfer.hisparse.states import SPARSE_REQUEST, SPARSE_REQUEST_ENDS, SparseRequest
from tests.support.paths import REPO
from tools.proto_generator.diagrams import diagram

TABLES: dict[str, tuple[dict, Enum, set[Enum]]] = {
    "decode's room": (DECODE_ROOM, DecodeRoom.CONNECTING, {DecodeRoom.RELEASED, DecodeRoom.FAILED}),
    "prefill's room": (PREFILL_ROOM, PrefillRoom.OPEN, {PrefillRoom.LANDED, PrefillRoom.FAILED}),
    "lease": (LEASE, Lease.GRANTED, {Lease.ENDED}),
    "grant": (WRITER_GRANT, WriterGrantState.WAITING, set(WRITER_GRANT_ENDS)),
    "decode's session": (SESSION, SessionState.OFFERING, {SessionState.CLOSED}),
    "prefill's session": (WRITER, WriterState.MAPPING, {WriterState.CLOSED}),
    "HiSparse request": (SPARSE_REQUEST, SparseRequest.RESERVED, set(SPARSE_REQUEST_ENDS)),
}
tables = pytest.mark.parametrize(("table", "start", "ends"), TABLES.values(), ids=TABLES)


@tables
def test_every_state_can_be_reached_from_the_start(table: dict, start: Enum, ends: set[Enum]) -> None:
    reached, last = {start}, set()
    while reached != last:
        last = set(reached)
        reached |= {after for (before, _), after in table.items() if before in reached}
    assert reached == set(type(start))


@tables
def test_ends_are_the_only_states_without_an_exit(table: dict, start: Enum, ends: set[Enum]) -> None:
    assert set(type(start)) - {before for before, _ in table} == ends


@tables
def test_every_event_means_something_somewhere(table: dict, start: Enum, ends: set[Enum]) -> None:
    events = {event for _, event in table}
    assert events == set(type(next(iter(events))))


@tables
def test_the_diagram_has_every_arrow_and_every_end(table: dict, start: Enum, ends: set[Enum]) -> None:
    drawn = diagram(table, start).splitlines()
    assert drawn[:2] == ["stateDiagram-v2", f"    [*] --> {start.name}"]
    arrows: dict[tuple[str, str], set[str]] = {}
    for line in drawn[2:]:
        before, _, rest = line.strip().partition(" --> ")
        after, _, events = rest.partition(": ")
        arrows[before, after] = set(filter(None, events.split(", ")))
    expected: dict[tuple[str, str], set[str]] = {(end.name, "[*]"): set() for end in ends}
    for (before, event), after in table.items():
        if before is not after:
            expected.setdefault((before.name, after.name), set()).add(event.name.lower())
    assert arrows == expected


def test_an_event_that_the_table_does_not_name_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match=r"Lease\.ENDED has no transition for PROOF"):
        step(LEASE, Lease.ENDED, LeaseEvent.PROOF)


def test_the_hisparse_page_draws_the_table_of_its_requests() -> None:
    page = (REPO / "docs" / "hisparse.md").read_text()
    drawn = page.partition("<!-- sparse request -->\n")[2].partition("<!-- /sparse request -->")[0]
    assert drawn == f"```mermaid\n{diagram(SPARSE_REQUEST, SparseRequest.RESERVED)}\n```\n"
