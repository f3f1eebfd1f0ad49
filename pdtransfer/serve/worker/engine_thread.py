"""The engine's thread: takes orders from its port, steps the engine while there is work, and returns the outcomes.

Only this thread touches the engine. The outcomes of one step go to the loop in one call. In a group, the leader's
thread decides which orders come before each step, and the followers' threads repeat them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...client.thread_queues import ThreadQueues
from ...errors import LocalProtocolError, WorldError
from ...handoff.prefill.cells import Cell
from ...handoff.ready_gate import ReadyGate
from ...layout.layout import slots_of_rows
from ...limits import STEP_ORDERS_MAX
from ..engine_api import (
    Broken,
    Computed,
    ComputesRests,
    DecodeEngine,
    Finished,
    Prefilled,
    PrefillEngine,
    ReportsEarly,
    Request,
    Token,
)
from .cell_batching import Batching, CellBatcher

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compute:
    """Prefill: compute this prompt."""

    request: Request


@dataclass(frozen=True, slots=True, eq=False)
class Generate:
    """Decode: the room has landed."""

    request: Request
    slots: dict[str, NDArray[np.int64]]
    aux: bytes


@dataclass(frozen=True, slots=True, eq=False)
class GenerateFrom:
    """Decode: the room has its slots, with the rows of its first `done` tokens; the engine computes the others."""

    request: Request
    slots: dict[str, NDArray[np.int64]]
    done: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the room; answered by Dropped on decode."""

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
class Stepped:
    """The room's first or last step on prefill, and on decode the one with its first token: from when to when, in
    seconds of CLOCK_MONOTONIC."""

    room: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Offered:
    """Prefill: a cell of the room is computed, once its gate is open."""

    room: int
    cell: Cell


Order: TypeAlias = Compute | Generate | GenerateFrom | Drop | Free | Quit
PrefillOutcome: TypeAlias = Stepped | Offered | Prefilled | Broken | Refused
DecodeOutcome: TypeAlias = Stepped | Token | Finished | Broken | Dropped


Steps: TypeAlias = Iterator[list[Order]]
"""What to do before each step. The last orders hold Quit."""
FollowerPort: TypeAlias = ThreadQueues[list[Order] | Callable[[], None]]
"""The leader's orders, one entry a step, and calls for the loop, once the steps before them are done."""


def leader_steps(
    engine: PrefillEngine | DecodeEngine, port: ThreadQueues[Order], announce: Callable[[list[Order]], None] | None
) -> Steps:
    """Yields the orders before each step, STEP_ORDERS_MAX at most. `announce` gets each step's orders on the loop
    before the step, for the followers; None without followers."""
    while True:
        if engine.idle:
            port.wait(None)
        polled = port.poll()
        for first in range(0, max(1, len(polled)), STEP_ORDERS_MAX):
            orders = polled[first : first + STEP_ORDERS_MAX]
            if announce is not None:
                port.to_loop(announce, orders)
            yield orders


def follower_steps(port: FollowerPort) -> Steps:
    """Yields the leader's orders, one step at a time. A call goes to the loop behind what the steps before it made."""
    while True:
        port.wait(None)
        for entry in port.poll():
            if callable(entry):
                port.to_loop(entry)
            else:
                yield entry


class PrefillThread:
    """Steps a prefill engine; prompts wait in order until the engine has pages for them."""

    def __init__(
        self,
        engine: PrefillEngine,
        port: ThreadQueues[Any],
        on_outcomes: Callable[[list[PrefillOutcome]], None],
        steps: Steps,
        *,
        batching: Batching | None = None,
    ) -> None:
        self.engine, self._port, self._on_outcomes = engine, port, on_outcomes
        self._steps = steps
        self._waiting: deque[Request] = deque()
        self._offers = batching or CellBatcher(engine.description.components)
        self._begun: set[int] = set()  # rooms of which some was computed, and not all
        self._step_s = 0.0  # when the latest step began
        self._page_size = {component.name: component.layout.page_size for component in engine.description.components}
        if isinstance(engine, ReportsEarly):
            engine.report = partial(self._pass_on, ())

    @property
    def waiting(self) -> int:
        """Prompts that wait for pages; callable from any thread."""
        return len(self._waiting)

    def run(self) -> None:
        """Runs until Quit."""
        for orders in self._steps:
            for order in orders:
                match order:
                    case Compute(request):
                        self._waiting.append(request)
                    case Drop(room):
                        self._waiting = deque(request for request in self._waiting if request.room != room)
                        self.engine.cancel(room)
                        self._offers.drop(room)
                        self._begun.discard(room)
                    case Free(room):
                        self.engine.free(room)
                    case Quit():
                        return
                    case Generate() | GenerateFrom():
                        raise AssertionError("a prefill engine generates nothing")
            outcomes, self._step_s = self._admit(), time.monotonic()
            self._pass_on(outcomes, self.engine.step())

    def _pass_on(self, outcomes: Sequence[PrefillOutcome], produced: Sequence[Computed | Prefilled | Broken]) -> None:
        """Sends these outcomes to the loop, and then what the engine has made, which may be in the middle of a step."""
        timed = [self._known(outcome) for outcome in produced]
        stepped = self._stepped(timed, time.monotonic())
        every = [*outcomes, *stepped, *map(self._outcome, self._offers.take(timed))]
        if every:
            self._port.to_loop(self._on_outcomes, every)

    def _admit(self) -> list[PrefillOutcome]:
        refused: list[PrefillOutcome] = []
        while self._waiting:
            try:
                if not self.engine.admit(self._waiting[0]):
                    break
            except ValueError as error:
                refused.append(Refused(self._waiting[0].room, str(error)))
            self._waiting.popleft()
        return refused

    def _stepped(self, produced: list[Computed | Prefilled | Broken], end_s: float) -> Iterator[PrefillOutcome]:
        for outcome in produced:
            last = not isinstance(outcome, Computed)
            if last or outcome.room not in self._begun:
                yield Stepped(outcome.room, self._step_s, end_s)
            if last:
                self._begun.discard(outcome.room)
            else:
                self._begun.add(outcome.room)

    def _known(self, outcome: Computed | Prefilled | Broken) -> Computed | Prefilled | Broken:
        """Turns a cell of an unknown component into a failure of its room, as any other error of the engine."""
        if not isinstance(outcome, Computed) or outcome.component in self._page_size:
            return outcome
        detail = (
            f"the engine's cell: component {outcome.component!r} must be one of {', '.join(sorted(self._page_size))}"
        )
        return Broken(room=outcome.room, detail=detail)

    def _outcome(self, outcome: Computed | Prefilled | Broken) -> PrefillOutcome:
        if not isinstance(outcome, Computed):
            return outcome
        page_size = self._page_size[outcome.component]
        try:
            slots = slots_of_rows(outcome.pages, page_size, outcome.rows, skip=outcome.skip)
        except LocalProtocolError as error:
            return Broken(room=outcome.room, detail=f"the engine's pages: {error}")
        gate = None if outcome.after is None else ReadyGate(outcome.after)
        return Offered(outcome.room, Cell(outcome.component, outcome.rows[0], outcome.layers, slots, gate))


class DecodeThread:
    """Steps a decode engine; landed rooms join its batch at once."""

    def __init__(
        self,
        engine: DecodeEngine,
        port: ThreadQueues[Any],
        on_outcomes: Callable[[list[DecodeOutcome]], None],
        steps: Steps,
    ) -> None:
        self.engine, self._port, self._on_outcomes = engine, port, on_outcomes
        self._steps = steps

    def run(self) -> None:
        """Runs until Quit."""
        for orders in self._steps:
            outcomes: list[DecodeOutcome] = []
            for order in orders:
                match order:
                    case Generate(request) | GenerateFrom(request):
                        try:
                            self._admit(order)
                        except ValueError as error:
                            outcomes.append(Broken(room=request.room, detail=str(error)))
                    case Drop(room):
                        self.engine.cancel(room)
                        outcomes.append(Dropped(room))
                    case Quit():
                        return
                    case Compute() | Free():
                        raise AssertionError("a decode engine computes no prompt")
            begin_s = time.monotonic()
            produced = self.engine.step()
            end_s = time.monotonic()
            firsts = [outcome.room for outcome in produced if isinstance(outcome, Token) and outcome.index == 0]
            outcomes += [Stepped(room, begin_s, end_s) for room in firsts]
            outcomes += produced
            if outcomes:
                self._port.to_loop(self._on_outcomes, outcomes)

    def _admit(self, order: Generate | GenerateFrom) -> None:
        match order:
            case Generate(request, slots, aux):
                self.engine.admit(request, slots, aux)
            case GenerateFrom(request, slots, done):
                assert isinstance(self.engine, ComputesRests), "the daemon refuses such rooms of other engines"
                self.engine.admit_rest(request, slots, done)


def start(
    work: PrefillThread | DecodeThread, died: Callable[[BaseException], None], warm: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Runs the work on a thread of its own. On that thread, `warm` is called after the warm-up, and `died` after a
    failure of the whole engine."""

    def run() -> None:
        try:
            warm_up: Callable[[], None] = getattr(work.engine, "warm_up", lambda: None)
            warm_up()
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
