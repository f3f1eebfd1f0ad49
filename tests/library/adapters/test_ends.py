"""How hand-offs end: several failures in a row are one warning, with what to do, the next one after a success; and what
an engine waits for reads in flight is bounded for all requests of a step together."""

from __future__ import annotations

import logging

import pytest

from pdtransfer import Cause
from pdtransfer.adapters.kit.ends import QUIESCE_S, WHAT_TO_DO, FailuresInARow, Quiescence
from tests.library.adapters.warnings_in_a_row import in_a_row


class Client:
    """A client whose rooms drain after this many seconds, by a clock of its own."""

    def __init__(self, drains_s: float) -> None:
        self.now, self.aborted, self._drains_s = 100.0, dict[int, float](), drains_s

    def abort(self, room: int) -> None:
        self.aborted.setdefault(room, self.now)

    def quiesce(self, room: int, timeout_s: float) -> bool:
        self.abort(room)
        left_s = max(0.0, self.aborted[room] + self._drains_s - self.now)
        self.now += min(left_s, timeout_s)
        return left_s <= timeout_s


def test_rooms_of_one_step_drain_beside_each_other() -> None:
    client = Client(drains_s=2.0)
    Quiescence(client, lambda: client.now).wait((room, f"room {room}") for room in range(8))
    assert client.now == 102.0
    assert list(client.aborted) == [1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("together", [True, False])
def test_no_step_waits_longer_for_many_requests_than_for_one(together: bool, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(drains_s=1_000.0)
    quiescence, rooms = Quiescence(client, lambda: client.now), [(room, f"room {room}") for room in range(8)]
    with caplog.at_level(logging.ERROR):
        for each in [rooms] if together else [[room] for room in rooms]:
            quiescence.wait(each)
    assert client.now == 100.0 + QUIESCE_S
    assert [record.getMessage() for record in caplog.records] == [
        f"room {room}: its pages are still read after 30.0 s, and are reused" for room in range(8)
    ]


def test_the_time_comes_back_while_the_engine_runs() -> None:
    client = Client(drains_s=1_000.0)
    quiescence = Quiescence(client, lambda: client.now)
    for room, waited_s in enumerate((QUIESCE_S, 10.0, QUIESCE_S)):
        before = client.now
        quiescence.wait([(room, "r")])
        assert client.now - before == waited_s
        client.now += 10.0 if room == 0 else 1_000.0
    quiescence.wait([])


def test_what_a_step_leaves_of_the_time_is_the_next_ones() -> None:
    client = Client(drains_s=12.0)
    quiescence = Quiescence(client, lambda: client.now)
    for room, until in enumerate((112.0, 124.0, 130.0, 130.0)):
        quiescence.wait([(room, "r")])
        assert client.now == until


def test_the_fifth_failure_in_a_row_is_a_warning_once_until_one_has_landed(caplog: pytest.LogCaptureFixture) -> None:
    row = FailuresInARow()
    for index in range(4):
        row.failed(Cause.DEADLINE, f"room {index}")
    row.landed()
    for index in range(4):
        row.failed(Cause.DEADLINE, f"room {index}")
    assert in_a_row(caplog) == []
    row.failed(Cause.REFUSED, "block_size: d has '64', p '128'")
    expected = (
        "the last 5 hand-offs have all failed, the latest as refused: block_size: d has '64', p '128'. "
        "What to do: run `pdtransfer doctor PREFILL_URL DECODE_URL`, and start both engines with equal facts; "
        "docs/troubleshooting.md"
    )
    assert in_a_row(caplog) == [expected]
    for index in range(20):
        row.failed(Cause.PEER_LOST, f"room {index}")
    assert in_a_row(caplog) == [expected]
    row.landed()
    for index in range(5):
        row.failed(Cause.PEER_LOST, f"room {index}")
    assert len(in_a_row(caplog)) == 2
    assert "peer_lost: room 4" in in_a_row(caplog)[1]


def test_requests_that_were_given_up_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    row = FailuresInARow()
    for _ in range(20):
        row.failed(Cause.ABORTED, "its client left")
    for index in range(5):
        row.failed(Cause.DEADLINE, f"room {index}")
        row.failed(Cause.ABORTED, "its client left")
    assert len(in_a_row(caplog)) == 1


def test_every_cause_has_something_to_do() -> None:
    assert set(WHAT_TO_DO) == set(Cause) - {Cause.ABORTED}
