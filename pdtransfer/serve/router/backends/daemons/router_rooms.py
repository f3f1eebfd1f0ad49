"""The router's view of a room: one leg on each of two workers, a state table for each, and the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replace_fields

from .....errors import Cause
from .....handoff.prefix_keys import RunningKeys
from .....handoff.tables import Word
from .....limits import PROMPT_BYTES_MAX
from .....wire import Begin, End, Sampling, pack_ids
from .workers import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A client's request. `prompt` holds u32 token ids as on the wire; a `model` of None accepts any."""

    prompt: bytes
    sampling: Sampling
    model: str | None = None
    enable_hisparse: bool = False
    enable_resume: bool = False  # once tokens were delivered, another pair may go on with the answer
    early: bool = False  # the first token is taken from prefill, while decode does not have the KV yet
    salt: bytes = b""
    request_id: str = ""  # this and the next: as in Begin
    traceparent: str = ""
    keys: tuple[bytes, ...] | None = None  # of the prompt's blocks; None: by its ids

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def tokens(self) -> int:
        """Slots needed where nothing is cached."""
        return self.prompt_tokens + self.sampling.max_tokens

    @property
    def kept_bytes(self) -> int:
        """What the router keeps of it and its answer as ids, at most."""
        answer = 4 * self.sampling.max_tokens if self.enable_resume else 0
        return min(len(self.prompt) + answer, PROMPT_BYTES_MAX)

    def begin(self, room: int) -> Begin:
        """What both workers of a room get of it."""
        return Begin(
            room,
            self.prompt,
            self.sampling,
            peers=(),
            time_left_ms=0,
            enable_hisparse=self.enable_hisparse,
            salt=self.salt,
            request_id=self.request_id,
            traceparent=self.traceparent,
        )


def dense(request: CompletionRequest) -> CompletionRequest:
    """Returns the same request without HiSparse."""
    return replace(request, enable_hisparse=False)


class Leg(Word):
    """A room on one of its two workers."""

    BEGINNING = "beginning"  # Begin repeats
    RUNNING = "running"
    CANCELLING = "cancelling"  # Cancel repeats
    ENDED = "ended"  # its End and all tokens that it counts have arrived, or its worker is lost


class LegEvent(Word):
    """What happens to a room on one worker."""

    BEGUN = "begun"
    CANCEL = "cancel"
    END = "end"
    LOSE = "lose"


_L, _LE = Leg, LegEvent

LEG: dict[tuple[Leg, LegEvent], Leg] = {
    (_L.BEGINNING, _LE.BEGUN): _L.RUNNING,
    (_L.BEGINNING, _LE.CANCEL): _L.CANCELLING,
    (_L.BEGINNING, _LE.END): _L.ENDED,
    (_L.BEGINNING, _LE.LOSE): _L.ENDED,
    (_L.RUNNING, _LE.BEGUN): _L.RUNNING,
    (_L.RUNNING, _LE.CANCEL): _L.CANCELLING,
    (_L.RUNNING, _LE.END): _L.ENDED,
    (_L.RUNNING, _LE.LOSE): _L.ENDED,
    (_L.CANCELLING, _LE.BEGUN): _L.CANCELLING,
    (_L.CANCELLING, _LE.END): _L.ENDED,
    (_L.CANCELLING, _LE.LOSE): _L.ENDED,
    (_L.ENDED, _LE.BEGUN): _L.ENDED,
}


@dataclass(slots=True, eq=False)
class RoomLeg:
    """A room on one worker."""

    worker: Worker
    begin: Begin
    node: str
    state: Leg = Leg.BEGINNING
    pending_end: End | None = None  # a success that waits for missing tokens
    end: End | None = None
    repeat_ms: int = 0


@dataclass(slots=True, eq=False)
class AnswerSoFar:
    """What was delivered of an answer, through all of its rooms.

    Where a room is lost, the next one's prompt is the client's and all ids so far but the last. It picks that one
    again, which is compared and not delivered twice: where it had ended the answer, it does so again.
    """

    request: CompletionRequest  # the client's
    ids: bytearray = field(default_factory=bytearray)  # u32, as on the wire
    resumptions: int = 0
    lost: tuple[Cause, str] | None = None  # why a room was, the latest that no worker refused
    too_long: bool = False  # for a prompt: nothing is kept

    @property
    def repeated(self) -> int | None:
        """The id that the next room picks again; None where nothing was delivered."""
        return int.from_bytes(self.ids[-4:], "little") if self.ids else None

    def add(self, ids: list[int]) -> None:
        """These ids were delivered."""
        self.too_long |= len(self.request.prompt) + len(self.ids) + 4 * len(ids) > PROMPT_BYTES_MAX
        if self.too_long:
            self.ids.clear()
        else:
            self.ids += pack_ids(ids)

    def rest(self, *, enable_hisparse: bool) -> CompletionRequest:
        """What a room is asked that goes on after these ids."""
        generated = max(0, len(self.ids) // 4 - 1)
        asked = self.request.sampling
        # An engine without all of Sampling can go on where nothing depends on `generated`.
        counted = asked.temperature or asked.presence_penalty or asked.frequency_penalty
        sampling = replace_fields(
            asked,
            max_tokens=asked.max_tokens - generated,
            min_tokens=max(0, asked.min_tokens - generated),
            generated=generated if counted else 0,
        )
        prompt = self.request.prompt + bytes(self.ids[: 4 * generated])
        return replace(self.request, prompt=prompt, sampling=sampling, enable_hisparse=enable_hisparse)


@dataclass(slots=True, eq=False)
class RoutedRoom:
    """One attempt at a request. Once its client waits for it no more it stays until both legs have ended."""

    id: int
    request_id: int  # the id of the request's first room
    request: CompletionRequest
    prefill: RoomLeg | None  # None: decode computes the rest of the prompt itself
    decode: RoomLeg
    deadline: float
    keys: RunningKeys | None  # of its prompt's blocks and its answer's, where decode may compute the next turn
    so_far: AnswerSoFar | None = None  # None: the request is not resumed
    repeats: int | None = None  # the id that decode has to send first, which was delivered already
    retried: bool = False  # a pair has failed at the request before
    is_open: bool = True  # its client waits for it
    received: int = 0
    cause: Cause = Cause.ABORTED  # why it failed

    @property
    def legs(self) -> tuple[RoomLeg, ...]:
        """Prefill, where the room has one, then decode."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    def generated(self, ids: bytes) -> None:
        """Decode sent these ids, u32, behind those that it sent before."""
        self.decode.worker.computing.pop(self.id, None)
        if self.keys is not None:
            self.keys.generated(ids)

    @property
    def delivered(self) -> int | None:
        """The id that was delivered last, as far as it is kept: a room that goes on with the answer picks it again."""
        resumed = None if self.so_far is None else self.so_far.repeated
        return self.repeats if resumed is None else resumed

    def needs(self, leg: RoomLeg) -> bool:
        """True if its client waits for what this leg has to do: prefill matters until decode has the prompt's KV."""
        landed = self.received > 0 or self.decode.state is Leg.ENDED
        return self.is_open and (leg is self.decode or not landed)


def rooms_by_progress(rooms: Iterable[RoutedRoom]) -> dict[str, int]:
    """Counts the router's rooms by what their client waits for."""
    counts = Counter({"waiting": 0, "generating": 0, "ending": 0})
    for room in rooms:
        if not room.is_open or all(leg.state is Leg.ENDED for leg in room.legs):
            counts["ending"] += 1
        else:
            counts["generating" if room.received else "waiting"] += 1
    return dict(counts)
