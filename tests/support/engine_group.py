"""Ranks of one worker as threads of this process: their engines in lockstep, and the hand-off between two groups."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from pdtransfer.wire import Ranks
from tests.support.engine_pair import Decode, Prefill, copy_rows, heads_of, request
from tests.support.waiting import PATIENCE_S


class Threads:
    """What the threads of one group share; `rank` makes each its base.Group."""

    def __init__(self, *, tp=1, pp=1):
        self.tp, self.pp = tp, pp
        self.barriers = [threading.Barrier(tp, timeout=PATIENCE_S) for _ in range(pp)]
        self.parts = [[None] * tp for _ in range(pp)]
        self.between = {(pp_rank, tp_rank): queue.Queue() for pp_rank in range(pp) for tp_rank in range(tp)}

    def groups(self):
        return [_Rank(self, Ranks(t, self.tp, p, self.pp)) for p in range(self.pp) for t in range(self.tp)]


class _Rank:
    def __init__(self, threads: Threads, ranks: Ranks) -> None:
        self.threads, self.ranks = threads, ranks

    def gather(self, part):
        shared, barrier = self.threads.parts[self.ranks.pp_rank], self.threads.barriers[self.ranks.pp_rank]
        shared[self.ranks.tp_rank] = part.copy()
        barrier.wait()
        parts = list(shared)
        barrier.wait()
        return parts

    def hand_on(self, hidden):
        self.threads.between[self.ranks.pp_rank + 1, self.ranks.tp_rank].put(hidden.copy())

    def take_over(self, hidden):
        hidden[:] = self.threads.between[self.ranks.pp_rank, self.ranks.tp_rank].get(timeout=PATIENCE_S)


def together(calls):
    """Runs one call a rank at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def prefills(tp=1, pp=1, **more):
    return together([lambda group=group: Prefill.of(group=group, **more) for group in Threads(tp=tp, pp=pp).groups()])


def decodes(tp=1, **more):
    return together([lambda group=group: Decode.of(group=group, **more) for group in Threads(tp=tp).groups()])


def carry(one, sources, target):
    """What `target` keeps of the request, each plane from the first rank that has it."""
    components = target.engine.description.components
    number = 1 if len(components) == 3 and not one.enable_hisparse else 0
    kept = components[number]
    target.slots[one.room] = target.take(number, one)
    wanted = set(heads_of(kept.layout))
    for source in sources:
        ours = wanted & set(heads_of(source.layout))
        wanted -= ours
        place = target.slots[one.room][: len(one.prompt)]
        copy_rows((source.memory, source.layout), source.slots(one), (target.of_memory(kept), kept.layout), place, ours)
    assert not wanted
    target.land_index(one, *sources)


def generate(sources, targets, prompts, **sampling):
    """Every prompt through one group into the other; what each decode rank says of each room."""
    rooms = [request(index, prompt, **sampling) for index, prompt in enumerate(prompts)]
    together([lambda source=source: source.run(*rooms) for source in sources])
    aux = [{source.aux[room.room] for source in sources} - {b""} for room in rooms]
    for room, each in zip(rooms, aux, strict=True):
        assert len(each) == 1, "every rank that picks a token picks the same"
        for target in targets:
            carry(room, sources, target)
            target.engine.admit(room, target.held(room.room), next(iter(each)))
    together([target.run for target in targets])
    return [[target.outcome(room.room) for target in targets] for room in rooms]
