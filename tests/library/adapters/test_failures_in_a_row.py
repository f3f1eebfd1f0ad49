"""Hand-offs that fail one after the other are one warning, with what to do; the next one after a success."""

from __future__ import annotations

import pytest

from pdtransfer import Cause
from pdtransfer.adapters.kit.ends import WHAT_TO_DO, FailuresInARow
from tests.library.adapters.warnings_in_a_row import in_a_row


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
        "the last 5 hand-offs have all failed, the latest one so: refused: block_size: d has '64', p '128'. "
        "What to do: run `pdtransfer doctor PREFILL_URL DECODE_URL`, and start both engines with equal facts"
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
