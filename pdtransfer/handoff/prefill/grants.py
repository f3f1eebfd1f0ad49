"""Prefill's grants: how each ends, and what it says of that until the end is acknowledged."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import Cause, RemoteProtocolError
from ...limits import TEXT_LENGTH_MAX, Limits
from ...wire import Failed
from ..effects import PrefillEffect, Send, StopWriting
from ..lease import DUTY_ENDS, Duty, DutyEvent
from ..timers import Timers
from .decode_peers import TimerKey
from .writer_grants import DutyEntry, WriterSession, WriterState, end_message


class Grants:
    """Ends of the duties of one prefill rank. Rooms are not its business."""

    def __init__(self, limits: Limits, timers: Timers[TimerKey], out: Callable[[PrefillEffect], None]) -> None:
        self._limits, self._timers, self._out = limits, timers, out

    def land(self, duty: DutyEntry, aux: bytes, now: float) -> None:
        """All its bytes are written."""
        duty.step(DutyEvent.COMPLETE)
        self._end(duty, now, aux=aux)

    def fail(self, duty: DutyEntry, cause: Cause, detail: str, now: float) -> None:
        """Ends a duty; of one with writes in flight decode hears at once, its proof follows when they have ended."""
        if duty.state not in (Duty.WAITING, Duty.ACTIVE):
            return
        duty.stop(DutyEvent.FAIL)
        if not duty.in_flight:
            self._end(duty, now, cause=cause, detail=detail)
            return
        session = duty.session
        self._out(StopWriting(session.id, duty.number))
        if session.state is WriterState.UP:
            text = detail[:TEXT_LENGTH_MAX]
            self._out(Send(session.peer, Failed(session.id, duty.number, cause.value, text, quiescent=False)))

    def abort(self, duty: DutyEntry, now: float) -> None:
        """Decode does not want it any more, and says so until it has an end."""
        if duty.state in DUTY_ENDS:
            self.say(duty, now)
            return
        if duty.state is not Duty.STOPPING:
            duty.stop(DutyEvent.ABORT)
        if duty.in_flight:
            self._out(StopWriting(duty.session.id, duty.number))
        else:
            self._end(duty, now)

    def refuse(self, session: WriterSession, number: int, now: float) -> None:
        """A number whose Abort came first: over for ever, so that its Grant finds it so."""
        self._end(session.refuse(number), now)

    def settle(self, duty: DutyEntry, now: float) -> None:
        """A write of it has ended: if it was the last of a duty that stops, that is the proof."""
        if duty.state is Duty.STOPPING and not duty.in_flight:
            duty.step(DutyEvent.QUIET)
            self._end(duty, now)

    def say(self, duty: DutyEntry, now: float) -> None:
        """Says how the grant ended, until Released; a closed session has nobody to say it to."""
        session = duty.session
        if session.state is WriterState.UP and duty.end is not None:
            self._out(Send(session.peer, duty.end))
            duty.repeat_ms = min(max(2 * duty.repeat_ms, self._limits.resend_ms), self._limits.resend_ms_max)
            self._timers.set(("end", session.id, duty.number), now + duty.repeat_ms / 1e3)

    def released(self, session: WriterSession, number: int) -> None:
        """Decode has heard of the end."""
        duty = session.duties.get(number)
        if duty is None:
            return
        if duty.state not in DUTY_ENDS:
            raise RemoteProtocolError("Released.grant", f"{number} has not ended, it is {duty.state.value}")
        self._timers.clear(("end", session.id, number))
        session.acknowledge(number)

    def _end(
        self, duty: DutyEntry, now: float, *, aux: bytes = b"", cause: Cause = Cause.ABORTED, detail: str = ""
    ) -> None:
        duty.end = end_message(duty, aux=aux, cause=cause, detail=detail)
        self.say(duty, now)
