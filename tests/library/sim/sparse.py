"""A HiSparse engine of the simulated world: rooms that have landed wait for it, and its device does everything late.

What is queued happens in order, one thing after another, and its event fires when it has happened. Some reads are on a
second stream, which waits for the first and is then as late as it likes. So whoever gets a row, a device slot or a host
slot too early is seen, by the words that are read there or by what is still queued.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pdtransfer.errors import CapacityError, LocalProtocolError
from pdtransfer.hisparse.coordinator import Capacity, Coordinator, Placement
from pdtransfer.hisparse.scheduler import POLICIES, Scheduler
from pdtransfer.hisparse.states import SparseRequest

from .pools import Int64s, holds, places

if TYPE_CHECKING:
    from .decodes import DecodeNode
    from .rooms import Target

AHEAD = 2  # steps that are queued at once
LATE = AHEAD + 8  # steps in which whatever was queued has happened, on either stream
STEP = 0.002  # seconds


class Done:
    """Fires when what it stands behind has happened."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired


@dataclass(eq=False)
class Seat:
    """A running request: what is in its places, the one used longest ago first."""

    target: Target
    placement: Placement
    step: int  # in which it was placed
    held: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])  # position -> place

    @property
    def places(self) -> int:
        return len(self.placement.device_slots) - 1


class SparseEngine:
    """One decode rank's, for one life of its process."""

    def __init__(self, node: DecodeNode) -> None:
        self.node, self.world = node, node.world
        p, rng = self.world.profile, self.world.rng
        hot, top_k = rng.choice([4, 8, 16]), rng.choice([2, 4, 4, 6])
        self.capacity = Capacity(
            rows=rng.randint(1, 4), logical_tokens=rng.choice([80, 200, 10_000]),
            device_slots=hot + rng.choice([1, 9, 40]), hot=hot,
            top_k=min(top_k, hot) if p.routers else top_k,  # a daemon refuses what can never run before it begins
        )  # fmt: skip
        # A daemon keeps the bound itself; by what it knows of the step before it may let in some more.
        most = p.sparse_queue_max + (self.capacity.rows if p.routers else 0)
        self.limits = replace(
            node.limits, hisparse_queue_max=most, hisparse_wait_steps=rng.randint(1, 4),
            hisparse_quantum_steps=rng.randint(1, 6),
        )  # fmt: skip
        self.scheduler = Scheduler(Coordinator(self.capacity), self.limits, policy=rng.choice(POLICIES))
        self.component = node.components[0]
        shape = holds(self.component)
        sizes = (shape.layers[1] - shape.layers[0], shape.heads[1] - shape.heads[0], self.capacity.device_slots)
        self.device: Int64s = np.zeros(sizes, dtype=np.int64)
        self.targets: dict[int, Target] = {}  # from their reservation until their host slots are released
        self.reserved: set[int] = set()
        self.seats: dict[int, Seat] = {}
        self.grows: dict[int, int] = {}  # tokens that a request makes
        self.report: dict[int, Callable[[int], None]] = {}  # who gets the number of tokens that it has made
        self.line: dict[int, tuple[int, int]] = {}  # since which step it waits for a row, behind how many
        self.ending: set[int] = set()
        self.queued: Counter[int] = Counter()  # accesses to what a request has
        self.busy: Counter[int] = Counter()  # accesses to device slots
        self.steps = 0
        self._ahead = 0
        self._stream: deque[Callable[[], None]] = deque()  # what is queued, in order
        self._tail = 0.0  # when the last of it happens
        self._armed = False

    @property
    def idle(self) -> bool:
        return self.scheduler.is_idle and not self.targets

    # What becomes of a room.

    def reserve(self, target: Target) -> None:
        """Its logical tokens, before anything is sent, where they are free."""
        room, coordinator = target.room, self.scheduler.coordinator
        if self._fits(target) and not self.scheduler.full:
            if coordinator.alloc_logical_only(room.id, tokens=room.tokens, growth=room.growth):
                self.targets[room.id] = target
                self.reserved.add(room.id)
            self._check_logical()

    def failed(self, target: Target) -> None:
        """Nothing of it will land."""
        room = target.room.id
        if room in self.reserved:
            self.reserved.discard(room)
            self.scheduler.ended(room, drop=True)
            del self.targets[room]
            self._arm()

    def take(
        self, target: Target, *, grows: int | None = None, report: Callable[[int], None] = lambda grown: None
    ) -> None:
        """It has landed. Behind a router it makes `grows` tokens, unless it is dropped."""
        world, room = self.world, target.room
        waiting = len(self.targets) - len(self.seats) - len(self.ending)
        known = room.id in self.reserved
        try:
            self.scheduler.offer(room.id, target.slots["kv"], tokens=room.tokens, growth=room.growth)
        except CapacityError as error:
            if known or world.profile.routers or (error.retry_ms is None) == self._fits(target):
                world.fail(f"room {room.id} is refused: {error}")
            world.seen["sparse rooms refused"] += 1
            target.release()
            return
        if not self._fits(target) or (not known and waiting >= self.limits.hisparse_queue_max):
            world.fail(f"room {room.id} is taken, though there is no place for it: {waiting} wait")
        self.reserved.discard(room.id)
        self.targets[room.id], target.grown = target, 0
        self.grows[room.id] = world.rng.randint(0, room.growth) if grows is None else grows
        self.report[room.id] = report
        self._join()
        if not self.grows[room.id]:
            self._end(room.id)
            report(0)
        elif grows is None and world.rng.random() < world.profile.abort:
            self.node.later(world.rng.expovariate(20.0), lambda: self.drop(room.id))
        self._arm()

    def drop(self, room: int) -> None:
        """It is given up, wherever it is."""
        self._end(room, drop=True)

    def _fits(self, target: Target) -> bool:
        total, here = target.room.tokens + target.room.growth, self.capacity
        return total <= here.logical_tokens and (total <= here.hot or here.top_k <= here.hot)

    def _last_read(self, target: Target, seat: Seat | None, when: str) -> Done | None:
        """Reads all that it has once more, behind what is queued; or not, and then there are only the backups."""
        if self.world.rng.random() < 0.5:
            return None
        return self._read(target, seat, when, aside=self.world.rng.random() < 0.5)

    def _read(self, target: Target, seat: Seat | None, when: str, *, aside: bool) -> Done:
        rows = target.room.tokens + target.grown
        return self._queue([target.room.id], seat, lambda: self._check_host(target, when, rows), aside=aside)

    def _end(self, room: int, *, drop: bool = False) -> None:
        target = self.targets.get(room)
        if target is None or room in self.ending:
            return
        self.world.seen["sparse rooms dropped"] += drop
        seat = self.seats.pop(room, None)
        event = self._last_read(target, seat, "its end")
        for _ in range(self.world.rng.choice([1, 1, 2])):
            self.scheduler.ended(room, drop=drop, after=event)
        self.ending.add(room)
        self.line.pop(room, None)

    # Steps.

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self.node.later(STEP if self.seats or self.line else 10 * STEP, self._step)

    def _step(self) -> None:
        world = self.world
        self._armed = False
        if self._ahead < AHEAD:
            if self.seats and world.rng.random() < 0.02:
                self._retract(world.rng.choice(list(self.seats)))
            try:
                while self._turn():
                    pass
                if self.seats:
                    self._run()
            except LocalProtocolError as error:
                world.fail(f"{self.node.name}: {error}")
        if self.scheduler.is_idle and self.queued.total():
            world.fail(f"{self.node.name}'s device is idle, and {self.queued} are queued")
        if len(self.targets) > len(self.reserved):
            self._arm()

    def _turn(self) -> bool:
        turn = self.scheduler.next(self.node.clock)
        for room in turn.released:
            self._release(room)
        self._join()
        for placement in turn.place:
            self._start(placement)
        self._check_line()
        self._check_victims(turn.retract)
        for room in turn.retract:
            self.world.seen["sparse rooms retracted"] += 1
            self._retract(room)
        return bool(turn.retract)

    def _start(self, placement: Placement) -> None:
        world, room = self.world, placement.request
        target = self.targets[room]
        total = target.room.tokens + target.room.growth
        slots = placement.device_slots.tolist()
        taken = {slot for seat in self.seats.values() for slot in seat.placement.device_slots.tolist()}
        if taken & set(slots) or placement.row in {seat.placement.row for seat in self.seats.values()}:
            world.fail(f"room {room} gets row {placement.row} or device slots that another has")
        if any(self.busy[slot] for slot in slots) or self.queued[room]:
            world.fail(f"room {room} gets a row while what was queued before reads or writes there")
        if len(slots) != min(total, self.capacity.hot) + 1 or placement.row >= self.capacity.rows:
            world.fail(f"room {room} of {total} tokens gets {len(slots)} device slots, row {placement.row}")
        tokens = target.room.tokens + target.grown
        if placement.tokens != tokens or placement.preload != (tokens <= len(slots) - 1):
            world.fail(f"room {room} of {tokens} tokens starts as {placement}")
        world.seen["sparse rooms readmitted"] += target.grown > 0
        world.seen["sparse rooms preloaded" if placement.preload else "sparse rooms all-miss"] += 1
        self._check_host(target, "its placement", tokens)
        self.line.pop(room, None)
        seat = self.seats[room] = Seat(target, placement, self.steps)
        if placement.preload:
            self.device[:, :, slots[:tokens]] = self._host(target, np.arange(tokens))
            seat.held.update((position, position) for position in range(tokens))

    def _retract(self, room: int) -> None:
        seat = self.seats.pop(room)
        event = self._last_read(seat.target, seat, "its retraction")
        self.scheduler.retract(room, after=event)
        self._join()

    def _run(self) -> None:
        """One token for each that has a row: top-k, then the newest token's way to its host slot."""
        rng = self.world.rng
        seats = list(self.seats.values())
        picks = [sorted(rng.sample(range(tokens), min(self.capacity.top_k, tokens))) for tokens in map(_tokens, seats)]
        news = [_tokens(seat) for seat in seats]
        for seat in seats:
            seat.target.grown += 1
        self._ahead += 1
        rooms = [seat.target.room.id for seat in seats]
        self._queue(rooms, seats, lambda: [self._attend(*each) for each in zip(seats, picks, news, strict=True)])
        backed_up = self._queue(rooms, seats, lambda: self._back_up(seats, news))
        self.scheduler.stepped(rooms, after=backed_up)
        self.steps += 1
        self._check_line()
        if rng.random() < 0.2:
            seat = rng.choice(seats)
            event = self._read(seat.target, seat, "its running", aside=True)
            self.scheduler.coordinator.hold(seat.target.room.id, after=event)
        for seat in seats:
            if seat.target.grown == self.grows[seat.target.room.id]:
                self._end(seat.target.room.id)
            self.report[seat.target.room.id](seat.target.grown)

    # What happens on the device, late.

    def _queue(
        self, rooms: list[int], seats: Seat | list[Seat] | None, work: Callable[[], object], *, aside: bool = False
    ) -> Done:
        world, event = self.world, Done()
        seats = [seats] if isinstance(seats, Seat) else seats or []
        slots = [slot for seat in seats for slot in seat.placement.device_slots.tolist()]
        self.queued.update(rooms)
        self.busy.update(slots)

        def happen() -> None:
            work()
            event.fired = True
            self.queued.subtract(rooms)
            self.busy.subtract(slots)
            world.seen["sparse rooms read after they had ended"] += sum(room in self.ending for room in rooms)

        if aside:
            late = world.rng.uniform(0.0, 4.0) * world.profile.sparse_late
            self.node.later(max(self._tail - world.now, 0.0) + late, happen)
            return event
        self._tail = max(self._tail, world.now + world.stretch(world.profile.sparse_late, 1.0))
        self._stream.append(happen)
        self.node.later(self._tail - world.now, lambda: self._stream.popleft()())
        return event

    def _attend(self, seat: Seat, picks: list[int], newest: int) -> None:
        slots, held = seat.placement.device_slots, seat.held
        for position in picks:
            if position not in held:
                place = len(held)
                if place == seat.places:
                    victim = next(each for each in held if each not in picks)
                    place = held.pop(victim)
                self.device[:, :, slots[place]] = self._host(seat.target, np.array([position]))[:, :, 0]
                held[position] = place
                self.world.seen["sparse misses"] += 1
            held.move_to_end(position)
        got = self.device[:, :, slots[[held[position] for position in picks]]]
        if (got != self._words(seat.target, np.array(picks))).any():
            self.world.fail(f"room {seat.target.room.id} attends to wrong rows at {newest}")
        place = newest if newest < seat.places else -1
        self.device[:, :, slots[place]] = self._words(seat.target, np.array([newest]))[:, :, 0]
        if place >= 0:
            held[newest] = place

    def _back_up(self, seats: list[Seat], news: list[int]) -> None:
        self._ahead -= 1
        for seat, newest in zip(seats, news, strict=True):
            slot = seat.placement.device_slots[newest if newest < seat.places else -1]
            place = places(self.component)[:, :, seat.target.slots["kv"][newest]]
            self.node.memory[place] = self.device[:, :, slot]

    def _host(self, target: Target, positions: Int64s) -> Int64s:
        return self.node.memory[places(self.component)[:, :, target.slots["kv"][positions]]]

    def _words(self, target: Target, positions: Int64s) -> Int64s:
        room = target.room
        return room.words(self.component, (0, room.tokens + room.growth), holds(self.component))[:, :, positions]

    # What has to hold.

    def _check_host(self, target: Target, when: str, row_count: int) -> None:
        """Its rows are as they landed and as they were backed up."""
        if self.targets.get(target.room.id) is not target:
            self.world.fail(f"room {target.room.id} is read at {when}, and its host slots are released")
        rows = np.arange(row_count)
        if (self._host(target, rows) != self._words(target, rows)).any():
            self.world.fail(f"room {target.room.id} has wrong rows at {when}")

    def _release(self, room: int) -> None:
        if room not in self.ending or self.queued[room]:
            self.world.fail(f"room {room}'s host slots are released while something queued uses them")
        self.ending.discard(room)
        self.targets.pop(room).release()

    def _join(self) -> None:
        """Who has landed and has logical tokens is in line for a row."""
        state = self.scheduler.coordinator.state
        for room in self.targets:
            if room not in self.line and state(room) in (SparseRequest.WAITING, SparseRequest.RETRACTED):
                self.line[room] = self.steps, len(self.line)
        self._check_logical()

    def _check_line(self) -> None:
        """Nobody starves: each who was in line before has a row within a quantum, or the wait before it, and what is
        queued takes."""
        each = max(self.limits.hisparse_wait_steps, self.limits.hisparse_quantum_steps) + LATE
        for room, (since, behind) in self.line.items():
            if self.steps - since > (behind + 1) * each:
                self.world.fail(f"room {room} waits for a row since {self.steps - since} steps, behind {behind} others")

    def _check_victims(self, retract: list[int]) -> None:
        """Rows are taken away for the first in line alone, once it has waited, from those that had their quantum, in
        the policy's order: as few as it needs, and none where all of them would not do."""
        wanted = self._victims()
        if set(retract) != set(wanted):
            first = next(iter(self.line), None)
            self.world.fail(f"rooms {retract} are retracted for room {first}, it is {self.scheduler.policy}: {wanted}")

    def _victims(self) -> list[int]:
        first, (since, _) = next(iter(self.line.items()), (0, (self.steps, 0)))
        if not self.line or self.steps - since < self.limits.hisparse_wait_steps:
            return []
        here, room = self.capacity, self.targets[first].room
        taken = {each: len(seat.placement.device_slots) for each, seat in self.seats.items()}
        need = min(room.tokens + room.growth, here.hot) + 1

        def suffices(gone: list[int]) -> bool:
            slots = sum(taken.values()) - sum(taken[each] for each in gone)
            return len(taken) - len(gone) < here.rows and here.device_slots - slots >= need

        chosen: list[int] = []
        for each in self._by_policy():
            if suffices(chosen):
                break
            chosen.append(each)
        if not suffices(chosen):
            return []
        for each in chosen[::-1]:
            rest = [other for other in chosen if other != each]
            chosen = rest if suffices(rest) else chosen
        return chosen

    def _by_policy(self) -> list[int]:
        """Running rooms that had their quantum, the first to go first; of equals the one placed last."""
        quantum, policy = self.limits.hisparse_quantum_steps, self.scheduler.policy
        had = [room for room, seat in reversed(self.seats.items()) if self.steps - seat.step >= quantum]
        left = {room: self.targets[room].room.growth - self.targets[room].grown for room in had}
        return sorted(had, key=lambda room: {"longest": -left[room], "shortest": left[room], "newest": 0}[policy])

    def _check_logical(self) -> None:
        """What is reserved or admitted can grow to its stated maximum."""
        rooms = [target.room for target in self.targets.values() if self.scheduler.coordinator.state(target.room.id)]
        wanted = sum(room.tokens + room.growth for room in rooms)
        if wanted > self.capacity.logical_tokens:
            self.world.fail(f"{wanted} logical tokens are promised, there are {self.capacity.logical_tokens}")

    def check_end(self) -> None:
        """Invariant 5: rows, device slots and logical tokens are where they started, and no host slots are kept."""
        coordinator, here = self.scheduler.coordinator, self.capacity
        left = coordinator.rows_free, coordinator.device_free, coordinator.logical_free
        if not self.idle or left != (here.rows, here.device_slots, here.logical_tokens):
            self.world.fail(f"{self.node.name}'s device ends with {left} of {here}, and rooms {list(self.targets)}")


def _tokens(seat: Seat) -> int:
    return seat.target.room.tokens + seat.target.grown
