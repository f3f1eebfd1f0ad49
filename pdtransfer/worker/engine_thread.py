"""The engine's thread: takes orders from its port, steps the engine while there is work, submits what came out.

The engine is touched by this thread alone. One step's outcomes go to the loop in one call. A turn is some orders and
one step: in a group of ranks the leader's thread makes the turns, and those of its followers repeat them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine_api import Broken, Computed, DecodeEngine, Event, Finished, Prefilled, PrefillEngine, Request, Token
from ..errors import LocalProtocolError, WorldError
from ..handoff.prefill.sessions import Cell
from ..layout.layout import slots_of_rows
from ..node.thread_queues import Port
from .cell_batching import Offers, Push

log = logging.getLogger(__name__)

TURN_ORDERS_MAX = 32  # each may carry AUX_BYTES_MAX, and a group's ranks hear of a turn in one frame of 4 MiB


@dataclass(frozen=True, slots=True)
class Compute:
    """Prefill: compute this prompt."""

    request: Request


@dataclass(frozen=True, slots=True)
class Generate:
    """Decode: the room has landed."""

    request: Request
    slots: dict[str, NDArray[np.int64]]
    aux: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the room; answered by Dropped on decode."""

    room: int


@dataclass(frozen=True, slots=True)
class Free:
    """Prefill: nothing reads the room's pages any more."""

    room: int


@dataclass(frozen=True, slots=True)
class Quit:
    """End the thread."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Decode: the engine touches no slot of this room any more."""

    room: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Prefill: the engine can never compute this prompt."""

    room: int
    detail: str


@dataclass(frozen=True, slots=True)
class Offered:
    """Prefill: a cell of the room is computed, once `after` has fired."""

    room: int
    cell: Cell
    after: Event | None = None


Order: TypeAlias = Compute | Generate | Cancel | Free | Quit
PrefillOutcome: TypeAlias = Offered | Prefilled | Broken | Refused
DecodeOutcome: TypeAlias = Token | Finished | Broken | Dropped


Turns: TypeAlias = Iterator[list[Order]]
"""What to do before each step. The last turn holds Quit."""


def leading(
    engine: PrefillEngine | DecodeEngine, port: Port[Order], told: Callable[[list[Order]], None] | None = None
) -> Turns:
    """Whatever was said, TURN_ORDERS_MAX at once, and steps as long as there is something to compute; `told` hears of
    each turn, on the loop, before it is done here."""
    while True:
        if engine.idle:
            port.wait(None)
        orders = port.poll()
        for at in range(0, max(1, len(orders)), TURN_ORDERS_MAX):
            turn = orders[at : at + TURN_ORDERS_MAX]
            if told is not None:
                port.submit(lambda turn=turn: told(turn))
            yield turn


def following(port: Port[list[Order]]) -> Turns:
    """The leader's turns, one by one."""
    while True:
        port.wait(None)
        yield from port.poll()


class PrefillThread:
    """Prompts wait here, in order, for the engine to have pages for them."""

    def __init__(
        self,
        engine: PrefillEngine,
        port: Port[Any],
        heard: Callable[[list[PrefillOutcome]], None],
        turns: Turns | None = None,
        *,
        push: Push = "auto",
    ) -> None:
        self._engine, self._port, self._heard = engine, port, heard
        self._turns = leading(engine, port) if turns is None else turns
        self._waiting: deque[Request] = deque()
        self._offers = Offers(engine.card.components, push)
        self._page_size = {component.name: component.layout.page_size for component in engine.card.components}

    def warm_up(self) -> None:
        """Before `run`."""
        _warm_up(self._engine)

    @property
    def waiting(self) -> int:
        """Prompts that wait for pages; any thread may ask."""
        return len(self._waiting)

    def run(self) -> None:
        """Until Quit."""
        for orders in self._turns:
            for order in orders:
                match order:
                    case Compute(request):
                        self._waiting.append(request)
                    case Cancel(room):
                        self._waiting = deque(request for request in self._waiting if request.room != room)
                        self._engine.cancel(room)
                        self._offers.drop(room)
                    case Free(room):
                        self._engine.free(room)
                    case Quit():
                        return
                    case Generate():
                        raise AssertionError("a prefill engine generates nothing")
            outcomes = self._admit()
            made = [self._known(each) for each in self._engine.step()]
            outcomes += [self._outcome(each) for each in self._offers.take(made)]
            if outcomes:
                self._port.submit(lambda outcomes=outcomes: self._heard(outcomes))

    def _admit(self) -> list[PrefillOutcome]:
        refused: list[PrefillOutcome] = []
        while self._waiting:
            try:
                if not self._engine.admit(self._waiting[0]):
                    break
            except ValueError as error:
                refused.append(Refused(self._waiting[0].room, str(error)))
            self._waiting.popleft()
        return refused

    def _known(self, outcome: Computed | Prefilled | Broken) -> Computed | Prefilled | Broken:
        """A cell of no component breaks its room, like any other that the engine gets wrong."""
        if not isinstance(outcome, Computed) or outcome.component in self._page_size:
            return outcome
        detail = f"the engine's cells: component {outcome.component!r} is none of {sorted(self._page_size)}"
        return Broken(room=outcome.room, detail=detail)

    def _outcome(self, outcome: Computed | Prefilled | Broken) -> PrefillOutcome:
        if not isinstance(outcome, Computed):
            return outcome
        page_size = self._page_size[outcome.component]
        try:
            slots = slots_of_rows(outcome.pages, page_size, outcome.rows, skip=outcome.skip)
        except LocalProtocolError as error:
            return Broken(room=outcome.room, detail=f"the engine's pages: {error}")
        return Offered(outcome.room, Cell(outcome.component, outcome.rows[0], outcome.layers, slots), outcome.after)


class DecodeThread:
    """Rooms that have landed go straight into the engine's batch."""

    def __init__(
        self,
        engine: DecodeEngine,
        port: Port[Any],
        heard: Callable[[list[DecodeOutcome]], None],
        turns: Turns | None = None,
    ) -> None:
        self._engine, self._port, self._heard = engine, port, heard
        self._turns = leading(engine, port) if turns is None else turns

    def warm_up(self) -> None:
        """Before `run`."""
        _warm_up(self._engine)

    def run(self) -> None:
        """Until Quit."""
        for orders in self._turns:
            outcomes: list[DecodeOutcome] = []
            for order in orders:
                match order:
                    case Generate(request, slots, aux):
                        try:
                            self._engine.admit(request, slots, aux)
                        except ValueError as error:
                            outcomes.append(Broken(room=request.room, detail=str(error)))
                    case Cancel(room):
                        self._engine.cancel(room)
                        outcomes.append(Dropped(room))
                    case Quit():
                        return
                    case Compute() | Free():
                        raise AssertionError("a decode engine computes no prompt")
            outcomes += self._engine.step()
            if outcomes:
                self._port.submit(lambda outcomes=outcomes: self._heard(outcomes))


def _warm_up(engine: PrefillEngine | DecodeEngine) -> None:
    """Where the engine has something to warm up."""
    warm_up: Callable[[], None] = getattr(engine, "warm_up", lambda: None)
    warm_up()


def start(
    work: PrefillThread | DecodeThread,
    died: Callable[[BaseException], None],
    warm: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Runs the work on a thread of its own; `warm` hears, there, when the engine has warmed up, and `died` of one that
    broke down altogether."""

    def run() -> None:
        try:
            work.warm_up()
            warm()
            work.run()
        except WorldError as error:
            log.error("the engine stops: %s", error)
            died(error)
        except BaseException as error:
            log.exception("the engine broke down")
            died(error)

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    return thread
