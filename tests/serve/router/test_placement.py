"""Placement: the ranked choice is the one that a look at every worker would make, however loads changed before."""

from __future__ import annotations

import dataclasses
import gc
import random

import pytest
from msgspec.structs import replace

from pdtransfer.errors import Cause
from pdtransfer.handoff.prefix_keys import block_keys, root_key
from pdtransfer.limits import PREFIX_PLACED_BLOCKS_MAX, Limits
from pdtransfer.serve.router.backends.daemons.placement import Ranking, WorkerPair
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest
from pdtransfer.serve.router.backends.daemons.worker_pool import WorkerPool
from pdtransfer.serve.router.backends.daemons.workers import Worker, obstacle
from pdtransfer.serve.router.fleet.prefixes import EVERYONE, PrefixHolders
from pdtransfer.serve.router.fleet.roles import Departure, NoPair, Pair
from pdtransfer.wire import VERSION, Load, Sampling, Welcome, pack_ids
from tests.support.routing_world import identity

BLOCK = 4
LIMITS = Limits(prefix_block_tokens=BLOCK, prefix_keys_max=40, queue_max=5)


def plain_choice(
    pool: WorkerPool, prompt: CompletionRequest, *, enable_hisparse: bool, avoid: list[Worker], now: float
) -> tuple[Worker, Worker] | None:
    """The rule, worker by worker; of one model."""
    able = [each for each in pool.by_peer.values() if each.usable and each.full_ms(
        now, LIMITS, enable_hisparse=enable_hisparse) == 0]  # fmt: skip
    decodes = [w for w in able if w.role == "decode" and (not enable_hisparse or w.load.enable_hisparse)]
    prefills = [w for w in able if w.role == "prefill"]
    decodes = [each for each in decodes if any(not obstacle(prefill, each) for prefill in prefills)]
    if not decodes:
        return None
    root = root_key(*decodes[0].model, prompt.salt)
    keys = block_keys(root, prompt.prompt, block_tokens=BLOCK, blocks_max=PREFIX_PLACED_BLOCKS_MAX)

    def score(worker: Worker) -> int:
        left = worker.slots_left(enable_hisparse=enable_hisparse)
        prefix = worker.known.count(keys) * BLOCK
        return left + (LIMITS.prefix_weight * prefix if left >= prompt.tokens - prefix else 0)

    decode = min(decodes, key=lambda each: (each in avoid, -score(each), len(each.rooms), each.peer))
    prefill = min(
        (prefill for prefill in prefills if not obstacle(prefill, decode)),
        key=lambda each: (each in avoid, each.prompt_tokens, each.load.rooms_queued, len(each.rooms), each.peer),
    )
    return prefill, decode


def draw_load(dice: random.Random) -> Load:
    free = dice.choice((0, 8, 40, 41, 100))
    return Load(
        dice.random() < 0.9, False, 0, dice.choice((0, 0, 0, 2, 5)), free, 100,
        enable_hisparse=dice.random() < 0.5, sparse_slots_free=dice.choice((3, 30)),
        sparse_slots_total=dice.choice((0, 30)),
    )  # fmt: skip


def decide(dice: random.Random, pool: WorkerPool, worker: Worker, now: float) -> str:
    """An operator's decision about a worker, and what came of it."""
    before = worker.departure
    match dice.choice(("drain", "remove", "add", "add")):
        case "drain":
            pool.depart(worker.peer, Departure.DRAINS)
        case "remove":
            pool.depart(worker.peer, Departure.LEAVES)
            return "leaving" if worker.peer in pool.by_peer else "left"
        case _:
            pool.add(worker.peer, worker.role, now)
    return "the same" if worker.departure is before else "drained" if worker.departure is Departure.DRAINS else "kept"


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_that_of_a_look_at_every_worker(seed: int) -> None:
    dice = random.Random(seed)
    names = [f"tcp://{role}{index}:1" for role in "pd" for index in range(50 if seed % 2 else 4)]
    prefill, decode = ([name for name in names if name[6] == role] for role in "pd")
    ways_of = {peer: dice.choice((("shm",), ("mooncake",), ("mooncake", "shm"))) for peer in names}
    lost: list[str] = []
    pool = WorkerPool(
        identity("r", "router"), prefill, decode, LIMITS, lambda _: None, lambda worker, *_: lost.append(worker.peer)
    )
    pool.start(0.0)
    begun: list[tuple[WorkerPair, int, CompletionRequest]] = []
    chosen = differing = 0
    met: dict[str, int] = dict.fromkeys(("drained", "leaving", "left", "kept", "the same", "added"), 0)
    for turn in range(1_500):
        now, peer = turn / 10, dice.choice(names)
        role = "prefill" if peer in prefill else "decode"
        if peer not in pool.by_peer:
            if dice.random() < 0.5:
                continue
            pool.add(peer, role, now)
            met["added"] += 1
        worker = pool.by_peer[peer]
        match dice.randrange(10):
            case 9 if dice.random() < 0.6:
                busy = [each.decode for each, *_ in begun]
                met[decide(dice, pool, dice.choice([worker, *busy]), now)] += 1
            case 0:
                life = dice.choice((1, 2)) if dice.random() < 0.1 else worker.liveness.incarnation or 1
                ways = replace(identity(peer, role, life), transports=ways_of[peer])
                pool.receive(worker, Welcome(VERSION, ways), now)
            case 1 | 2 if worker.identity is not None:
                pool.receive(worker, draw_load(dice), now)
            case 3 if worker.load is not None and dice.random() < 0.2:
                worker.mark_full(now + dice.random(), enable_hisparse=dice.random() < 0.5)
            case 4 if worker.load is not None and worker.usable and dice.random() < 0.1:
                pool.refuse(worker, Cause.BREACH, "it did", now)
            case 5 | 6 | 7 if begun:
                pair, room, prompt = begun.pop(dice.randrange(len(begun)))
                for each in (pair.prefill, pair.decode):
                    pool.end(each, room, len(prompt.prompt) // 4)
                    pool.left(each)
            case _:
                system, tail = [1] * 2 * BLOCK, [dice.randrange(3) for _ in range(dice.randrange(1, 12))]
                prompt = CompletionRequest(prompt=pack_ids(system + tail), sampling=Sampling(2))
                avoid, sparse = dice.sample(list(pool.by_peer.values()), dice.randrange(3)), dice.random() < 0.3
                expected = plain_choice(pool, prompt, enable_hisparse=sparse, avoid=avoid, now=now)
                pair = pool.choose(dataclasses.replace(prompt, enable_hisparse=sparse), avoid, now)
                if isinstance(pair, NoPair):
                    assert expected is None
                    continue
                assert expected is not None
                assert (pair.prefill.peer, pair.decode.peer) == tuple(each.peer for each in expected)
                differing += pair.decode.known.count(pair.keys) > 0
                chosen += 1
                pool.begin(pair, turn, prompt)
                begun.append((pair, turn, prompt))
    assert chosen > 50
    assert differing > 5, "some choices had a prefix to weigh"
    assert all(met.values()), met


@pytest.mark.usefixtures("young_heap")
def test_nothing_is_kept_of_workers_that_have_left() -> None:
    pool = WorkerPool(identity("r", "router"), ["tcp://p:1"], ["tcp://d:1"], LIMITS, lambda _: None, lambda *_: None)
    pool.start(0.0)
    prompt = CompletionRequest(prompt=pack_ids([1] * 3 * BLOCK), sampling=Sampling(2))

    def connect(peer: str, role: str) -> Worker:
        worker = pool.by_peer[peer]
        pool.receive(worker, Welcome(VERSION, identity(peer, role)), 0.0)
        pool.receive(worker, Load(True, False, 0, 0, 100, 100), 0.0)
        return worker

    def choose() -> WorkerPair:
        pair = pool.choose(prompt, (), 0.0)
        assert isinstance(pair, Pair)
        return pair

    connect("tcp://p:1", "prefill")
    connect("tcp://d:1", "decode").load = Load(True, False, 0, 0, 1, 100)
    gc.collect()
    before = sum(isinstance(each, Worker) for each in gc.get_objects())
    numbers: set[int] = set()
    for index in range(20):
        pool.add(f"tcp://d{index}:1", "decode", 0.0)
        numbers.add(connect(f"tcp://d{index}:1", "decode").number)
        pair = choose()
        assert pair.decode.peer == f"tcp://d{index}:1"
        assert pool.begin(pair, index, prompt) == 0, "another worker's prefixes are not its own"
        assert pool.begin(choose(), 100 + index, prompt) == 3 * BLOCK
        pool.depart(pair.decode.peer, Departure.LEAVES)
        for each, room in ((side, room) for side in (pair.prefill, pair.decode) for room in (index, 100 + index)):
            pool.end(each, room, len(prompt.prompt) // 4)
            pool.left(each)
    assert len(numbers) == 1, "a number is used again, so that masks stay short"
    assert choose().keys == (), "with one decode worker there is nothing to weigh"
    connect("tcp://d:1", "decode").load = Load(True, False, 0, 0, 101, 100)
    pool.add("tcp://d20:1", "decode", 0.0)
    connect("tcp://d20:1", "decode")
    assert choose().decode.peer == "tcp://d:1", "what another worker knew counts for none that gets its number"
    pool.depart("tcp://d20:1", Departure.LEAVES)
    del pair, each
    gc.collect()
    assert sum(isinstance(each, Worker) for each in gc.get_objects()) == before


def test_a_ranking_gives_the_best_of_a_mask_whichever_way_it_looks() -> None:
    ranking = Ranking[str]()
    for number in range(100):
        ranking.put(f"w{number}", ((number * 37) % 100, number))
    for mask in (1 << 5 | 1 << 70, sum(1 << offset for offset in range(0, 100, 2)), EVERYONE):
        members = [index for index in range(100) if mask >> index & 1]
        found = ranking.best(mask, lambda item: item != "w46")
        assert found is not None
        assert found[1] == f"w{min((member for member in members if member != 46), key=lambda each: each * 37 % 100)}"
    ranking.remove(5)
    assert ranking.best(1 << 5, lambda _: True) is None
    ranking.put("w70", (-1, 70))
    assert len(ranking) == 99
    assert ranking.best(EVERYONE, lambda _: True) == ((-1, 70), "w70")


def test_levels_part_all_workers_by_what_they_know() -> None:
    holders = PrefixHolders()
    for key, numbers in ((b"a", (0, 1, 2)), (b"b", (1, 2)), (b"c", (2, 3))):
        for number in numbers:
            holders.add(key, number)
    levels = holders.levels([b"a", b"b", b"c", b"d"])
    assert [(mask & 0b11111, blocks) for mask, blocks in levels] == [
        (0b11000, 0), (0b00001, 1), (0b00010, 2), (0b00100, 3)
    ]  # fmt: skip
    holders.discard([b"a", b"b", b"c"], 2)
    holders.discard([b"c"], 3)
    assert len(holders._masks) == 2
    assert [blocks for _, blocks in holders.levels([b"a", b"b"])] == [0, 1, 2]
