"""The ends of grants: each is sent until decode has acknowledged it."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import Cause, RemoteProtocolError
from ...layout.checksum import CHECKSUM_BYTES
from ...limits import TEXT_LENGTH_MAX, Limits
from ...wire import Drained, Failed, Landed
from ..effects import PrefillEffect, Send, StopWriting
from ..states import WRITER_GRANT_ENDS, WriterGrantEvent, WriterGrantState, WriterState
from ..timers import TimerKey, Timers, backoff_ms
from .records import EndMessage, WriterGrant, WriterSession


def end_message(grant: WriterGrant, *, aux: bytes, cause: Cause, detail: str) -> EndMessage:
    """The message that reports an ended grant until Released."""
    session, number = grant.session.id, grant.number
    match grant.state:
        case WriterGrantState.LANDED:
            send_aux = grant.message is not None and grant.message.send_aux
            checksum = grant.checksum.to_bytes(CHECKSUM_BYTES, "little") if grant.verify else b""
            return Landed(session, number, grant.written_bytes, aux if send_aux else b"", checksum)
        case WriterGrantState.FAILED:
            return Failed(session, number, cause.value, detail[:TEXT_LENGTH_MAX], quiescent=True)
        case _:
            assert grant.state is WriterGrantState.DRAINED
            return Drained(session, number)


class GrantEnds:
    """The ends of one prefill rank's grants; rooms are handled elsewhere."""

    def __init__(self, limits: Limits, timers: Timers[TimerKey], out: Callable[[PrefillEffect], None]) -> None:
        self._limits, self._timers, self._out = limits, timers, out

    def end(
        self, grant: WriterGrant, event: WriterGrantEvent, now: float, *,
        aux: bytes = b"", cause: Cause = Cause.ABORTED, detail: str = "",
    ) -> None:  # fmt: skip
        """Ends a grant. One that has writes in flight is stopping until they have ended."""
        grant.stop(event)
        if grant.state is WriterGrantState.STOPPING:
            self._out(StopWriting(grant.session.id, grant.number))
        else:
            grant.end = end_message(grant, aux=aux, cause=cause, detail=detail)
            self.send_end(grant, now)

    def fail(self, grant: WriterGrant, cause: Cause, detail: str, now: float) -> None:
        """Fails a grant. With writes in flight, decode is informed now, and the proof follows when they have ended."""
        if grant.state not in (WriterGrantState.WAITING, WriterGrantState.ACTIVE):
            return
        self.end(grant, WriterGrantEvent.FAIL, now, cause=cause, detail=detail)
        session = grant.session
        if grant.end is None and session.state is WriterState.UP:
            text = detail[:TEXT_LENGTH_MAX]
            self._out(Send(session.peer, Failed(session.id, grant.number, cause.value, text, quiescent=False)))

    def abort(self, grant: WriterGrant, now: float) -> None:
        """Aborts a grant for decode, which repeats Abort until an end."""
        if grant.state in WRITER_GRANT_ENDS:
            self.send_end(grant, now)
        elif grant.state is WriterGrantState.STOPPING:
            self._out(StopWriting(grant.session.id, grant.number))
        else:
            self.end(grant, WriterGrantEvent.ABORT, now)

    def refuse(self, session: WriterSession, number: int, now: float) -> None:
        """Ends a number whose Abort came before its Grant."""
        self.end(session.refuse(number), WriterGrantEvent.ABORT, now)

    def send_end(self, grant: WriterGrant, now: float) -> None:
        """Sends the end of the grant and repeats it until Released, while the session is up."""
        session = grant.session
        if session.state is WriterState.UP and grant.end is not None:
            self._out(Send(session.peer, grant.end))
            grant.repeat_ms = backoff_ms(grant.repeat_ms, self._limits.resend_ms, self._limits.resend_ms_max)
            self._timers.set(("end", session.id, grant.number), now + grant.repeat_ms / 1e3)

    def released(self, session: WriterSession, number: int) -> None:
        """Decode acknowledged the end."""
        grant = session.grants.get(number)
        if grant is None:
            return
        if grant.state not in WRITER_GRANT_ENDS:
            raise RemoteProtocolError("Released.grant", f"{number} has not ended, it is {grant.state.value}")
        self._timers.clear(("end", session.id, number))
        session.acknowledge(number)
