"""HiSparse over several ranks: the leader decides who runs, and the bits are those of one process with all resident."""

import numpy as np
import pytest
from pdtransfer_lab.models.factory import create, generate_many

from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.serve.engine_api import Broken, Finished
from pdtransfer.wire import Ranks
from tests.lab.models.hot_requests import HOT, SPARSE, hisparse
from tests.support.engine_group import Threads, carry, prefills, together
from tests.support.engine_pair import Decode, config, prompts, request

LENGTHS = (1, 30, 44, 48, 49, 100, 300)
TOKENS = 8


class Late:
    """A fence that fires when it has been asked this many times."""

    def __init__(self, times):
        self.times = times

    def query(self):
        self.times -= 1
        return self.times < 0

    def wait(self):
        while not self.query():
            pass


def decodes(tp, **more):
    """Ranks that have other slots for the same room, and whose events fire at other times."""
    made = together(
        [
            lambda at=index, group=group: Decode.of(group=group, seed=at, slots=2048, **more)
            for index, group in enumerate(Threads(tp=tp).groups())
        ]
    )
    for index, target in enumerate(made):
        random = np.random.default_rng(index)
        target.engine.model.hot._pool.fence = lambda random=random: Late(int(random.integers(0, 6)))
    return made


def run(sources, targets, rooms, *, ahead=0, cancels=()):
    """Every rank admits the rooms, with `ahead` steps after each, and cancels (step, room) before that step."""
    together([lambda source=source: source.run(*rooms) for source in sources])

    def script(target):
        step = 0

        def stepped():
            nonlocal step
            for at, room in cancels:
                if at == step:
                    target.engine.cancel(room)
            target.step()
            step += 1

        for one in rooms:
            carry(one, sources, target)
            target.engine.admit(one, target.held(one.room), sources[0].aux[one.room])
            for _ in range(ahead):
                stepped()
        while not target.engine.idle:
            stepped()

    together([lambda target=target: script(target) for target in targets])


def expected(attention, options, rooms):
    one = config(attention=attention, slots=4096, page_size=64, options=options)
    return generate_many(one, [(room.prompt, room.sampling) for room in rooms])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "options", "prefill_tp", "decode_tp", "policy"),
    [("mla", {}, 1, 2, "longest"), ("gqa", {}, 2, 2, "newest"), ("gqa", {"kv_heads": "2"}, 1, 4, "shortest")],
)
def test_ranks_with_places_for_few_retract_and_come_back_without_losing_a_bit(
    attention, options, prefill_tp, decode_tp, policy
):
    """Dense requests beside them, one that leaves while it waits, and one while it runs or has been retracted."""
    options = SPARSE | options
    rooms = [
        request(index, prompt, max_tokens=TOKENS, sparse=index % 7 != 2)
        for index, prompt in enumerate(prompts(0, 2 * LENGTHS))
    ]
    sources = prefills(prefill_tp, attention=attention, slots=4096, options=options)
    device = hisparse(slots=2 * (HOT + 1), policy=policy)
    targets = decodes(decode_tp, attention=attention, options=options, hisparse=device, batch_max=5)
    gone = {6, 12}
    run(sources, targets, rooms, ahead=1, cancels=[(7, 6), (18, 12)])
    wanted = expected(attention, options, rooms)
    for room in rooms:
        for target in targets:
            assert room.room in gone or target.outcome(room.room) == wanted[room.room]
    retracts = [target.engine.figures.retracts for target in targets]
    assert retracts[0] > 3
    assert retracts[1:] == [0] * (decode_tp - 1), "what the leader has decided counts once"
    for target in targets:
        figures = target.engine.figures
        assert (figures.running, figures.waiting) == (0, 0)
        assert figures.admission_bytes == figures.preloaded_bytes
        assert figures.misses > 0
        assert target.ends.keys() == targets[0].ends.keys()


def gathers_of(target):
    """What the ranks told each other, of HiSparse, at each of the next steps."""
    counts = []
    group = target.engine.model.hot._group

    class Counting:
        ranks = group.ranks

        def gather(self, part):
            counts[-1] += 1
            return group.gather(part)

    target.engine.model.hot._group = Counting()
    return counts


def test_a_step_for_which_nobody_waits_is_decided_without_a_word():
    rooms = [
        request(index, prompt, max_tokens=TOKENS, sparse=True) for index, prompt in enumerate(prompts(1, (100, 60)))
    ]
    sources, targets = prefills(1, slots=4096, options=SPARSE), decodes(2, options=SPARSE, hisparse=hisparse())
    together([lambda: sources[0].run(*rooms)])
    counts = gathers_of(targets[0])

    def script(target):
        for room in rooms:
            carry(room, sources, target)
            target.engine.admit(room, target.held(room.room), sources[0].aux[room.room])
        while not target.engine.idle:
            if target is targets[0]:
                counts.append(0)
            target.step()

    together([lambda target=target: script(target) for target in targets])
    assert [count for count in counts if count] == [2] + [1] * (TOKENS - 2), "who runs, then what was refused"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_place_that_is_refused_ends_its_room_on_all_ranks_or_the_group_that_disagrees(ranks):
    rooms = [
        request(index, prompt, max_tokens=TOKENS, sparse=True) for index, prompt in enumerate(prompts(1, (100, 60)))
    ]
    sources, targets = prefills(1, slots=4096, options=SPARSE), decodes(2, options=SPARSE, hisparse=hisparse())
    together([lambda: sources[0].run(*rooms)])

    def script(target):
        for room in rooms:
            carry(room, sources, target)
            target.engine.admit(room, target.held(room.room), sources[0].aux[room.room])
        target.step()
        hot = target.engine.model.hot
        if hot._group.ranks.tp_rank in ranks:
            hot._pool.refused[hot._placed[1].row] = 1
        try:
            target.run()
        except WorldError as error:
            return str(error)
        return ""

    errors = together([lambda target=target: script(target) for target in targets])
    if ranks == (1,):
        assert errors == [f"rank {rank} runs other HiSparse requests, or refused other ones" for rank in (1, 0)]
        return
    assert errors == ["", ""]
    for target in targets:
        assert isinstance(target.ends[1], Broken)
        assert "the device has no room" in target.ends[1].detail
        assert isinstance(target.ends[0], Finished)
        assert target.outcome(0) == expected("mla", SPARSE, rooms)[0]


def test_a_pipeline_of_decode_ranks_is_refused():
    (group, _) = Threads(pp=2).groups()
    assert group.ranks == Ranks(0, 1, 0, 2)
    with pytest.raises(ConfigError, match="pp_size = 2: only prefill is split into stages"):
        create(config("decode", options=SPARSE, hisparse=hisparse(), group=group))
