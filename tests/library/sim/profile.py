"""What one seed's world is like: its size, its network, its faults; drawn from the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

KINDS = (
    "quiet", "lossy", "rough", "crowded", "isolation", "deadly", "split", "patient", "restarts", "fleet", "ranks",
    "shared", "growing", "checked", "groups", "leaving", "sparse", "apart", "placed", "led", "hasty", "waiting",
    "strangers", "spelled", "starved", "lines", "staged", "turns", "parts", "variants",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Probabilities are per message, per write or per room; times are seconds of virtual time."""

    name: str
    decodes: int
    prefills: int
    rooms: int
    arena_tokens: int
    pool_tokens: int = 1024
    tokens_max: int = 48
    span: float  # over which rooms arrive
    skew: float  # clocks run so much faster or slower than the world's, at most
    loss: float = 0.0
    duplicate: float = 0.0
    delay: float  # median of a message's way
    delay_tail: float = 0.0  # how heavy its tail is: 0 is none
    delay_max: float = 10.0
    ordered: bool = False  # what one process sends another comes in order, as on one connection
    write: float  # median time of a write
    write_tail: float = 0.0
    write_fails: float = 0.0
    write_unknown: float = 0.0  # a write that nobody can tell the end of, until its writer is killed
    write_deaf: float = 0.0  # a write that goes on when it is asked to stop, as what waits for a device does
    abort: float = 0.0  # a room that somebody gives up
    hasty: float = 0.0  # a room for which decode has far less time than prefill
    opens_late: float = 0.0  # a room that the prefill engine takes up long after decode has granted
    engine_skips: float = 0.0  # a room of which the prefill engine forgets a cell
    deadline: tuple[float, float] = (5.0, 10.0)
    freezes: int = 0  # processes that stop for a while
    freeze: tuple[float, float] = (0.5, 8.0)
    kills: int = 0  # processes that die, and are started again
    restart: tuple[float, float] = (0.0005, 9.0)  # so much later, most of them soon
    ping_ms: int = 150
    silence_ms: int = 1_500
    starved: float = 0.0  # every process gets a tenth of its time, in pauses of this many seconds at most
    blips: int = 0  # connections that end on the way, and are made again
    dies_registering: float = 0.0  # a decode, once, when a prefill that was started again gets its Register
    orphans: float = 0.7  # a killed writer leaves a child that goes on writing
    partitions: int = 0  # a process cut off from some or all others, in one direction or both
    window: int
    queue_max: int = 1_024
    quarantine_fraction: float = 0.5
    inflight_bytes: int = 64 << 30  # to one decode at once
    peer_sessions_max: int = 4
    strangers: bool = False  # one of each role that keeps to no rules, among honest ones that nothing else troubles
    isolation: bool = False  # one prefill freezes for long, and the others' rooms may not feel it: invariant 6
    patient: bool = False  # nothing but loss: no room's only trouble may be that it waited until its deadline
    exact: bool = False  # nothing but restarts: a session ends because a process has died, and for nothing else
    ranks: bool = False  # workers are groups of ranks
    families: int = 0  # of prompts that begin alike; 0: nobody knows the rooms' prompts
    blocks_max: int = 1_024  # that a decode remembers
    routers: int = 0  # that begin the rooms, for clients; 0: begun by hand
    router_kills: int = 0
    leaves: bool = False  # one worker of each role drains, says goodbye, and is started again; no request is lost
    engine_fails: float = 0.0  # a room that an engine fails, behind a router
    chunks: int = 1  # in which an arena is backed with memory, while its first ones serve
    backing: float = 0.0  # over which they come, in each life
    verify: bool = False
    sparse: bool = False  # rooms that have landed wait for a HiSparse device
    sparse_queue_max: int = 1_024
    sparse_late: float = 0.0  # median time of what is queued there
    corrupts: float = 0.0  # a write of which other bits arrive than left
    apart: bool = False  # decode's KV is in HBM, which some writers reach and others not
    lift_fails: float = 0.0  # a grant that is not copied up
    staging_tokens: int = 0  # that the staging buffer before it has slots for
    led: bool = False  # half of the rooms name the leader of a worker alone, which learns its group late
    dial_fails: float = 0.0  # a rank that a leader named, and that cannot be dialled this time
    spellings: int = 1  # names of each process that is dialled
    placed: bool = False  # decode's engine chooses the slots, and now and then wrong ones
    lines: float = 0.0  # a session that has a line beside the network
    line_delay: float = 0.001  # mean time until a process reads what has come by one
    line_queue: int = 1 << 18  # bytes that one holds in each direction
    line_bytes: int = 16 << 10  # of a frame that goes by one
    line_forks: float = 0.0  # an end of one that a forked child has as well
    line_faults: int = 0  # a line ends in one direction, or a process forgets it
    turns: float = 0.0  # a room that others go on from, often without a prefill
    parts: bool = False  # a prefill has some components, and a room several prefills that cover it, or do not
    stand_ins: bool = False  # a component is described twice: by token, and by page
    closes: int = 0  # prefills that leave while decode has not acknowledged what has landed


def draw(seed: int, kind: str | None = None) -> Profile:
    """The profile of a seed: one of the kinds, in turn, unless it is given."""
    rng = random.Random(f"profile {seed}")
    kind = kind or KINDS[seed % len(KINDS)]
    small = rng.choice([128, 256])
    base = Profile(
        name=kind, decodes=rng.randint(1, 2), prefills=rng.randint(1, 3), rooms=rng.randint(20, 40), arena_tokens=1024,
        span=rng.choice([0.2, 2.0]), skew=rng.choice([0.0, 0.01, 0.05]), delay=rng.choice([0.0002, 0.005]),
        write=rng.choice([0.0001, 0.01, 0.1]), abort=rng.choice([0.0, 0.1]), window=rng.choice([2, 8, 64]),
    )  # fmt: skip
    lossy = replace(
        base, loss=rng.choice([0.0, 0.05, 0.2, 0.4]), duplicate=rng.choice([0.1, 0.4]),
        delay_tail=rng.choice([0.0, 1.0, 2.5]), write_tail=rng.choice([0.5, 1.5, 2.5]),
        write_fails=rng.choice([0.0, 0.02, 0.1]), write_unknown=rng.choice([0.0, 0.0, 0.01]),
        abort=rng.choice([0.05, 0.2, 0.5]), opens_late=rng.choice([0.2, 0.7]), engine_skips=rng.choice([0.0, 0.05]),
        deadline=(0.5, 8.0),
    )  # fmt: skip
    match kind:
        case "quiet" | "lossy":
            return base if kind == "quiet" else lossy
        case "rough":
            return replace(lossy, freezes=1, kills=rng.randint(0, 2), partitions=rng.randint(0, 1))
        case "crowded":
            fraction = rng.choice([0.25, 0.5])
            return replace(lossy, arena_tokens=small, queue_max=rng.choice([4, 1_024]), quarantine_fraction=fraction)
        case "isolation":
            return replace(
                base, isolation=True, prefills=rng.randint(2, 3), arena_tokens=4096, pool_tokens=4096,
                write=rng.choice([0.0001, 0.01]), abort=0.0, freezes=1, freeze=(4.0, 8.0), window=64,
            )  # fmt: skip
        case "deadly":
            return replace(
                base, prefills=rng.randint(2, 3), arena_tokens=small, write=rng.choice([0.1, 2.0]),
                kills=rng.randint(2, 4), quarantine_fraction=rng.choice([0.1, 0.25, 0.5]), restart=(0.002, 20.0),
                write_deaf=0.3,
            )  # fmt: skip
        case "split":
            return replace(
                base, prefills=rng.randint(2, 3), partitions=rng.randint(1, 3), kills=rng.randint(0, 1),
                abort=rng.choice([0.0, 0.2]), arena_tokens=rng.choice([small, 1024]),
            )  # fmt: skip
        case "patient":
            return replace(
                base, patient=True, loss=rng.choice([0.02, 0.1]), duplicate=0.1, arena_tokens=4096, pool_tokens=4096,
                window=64, span=2.0, abort=0.2, opens_late=0.3,
            )  # fmt: skip
        case "restarts":
            return replace(
                base, exact=True, ordered=True, delay=0.005, delay_tail=rng.choice([1.0, 2.5]), delay_max=0.14,
                kills=rng.randint(2, 4), restart=(0.001, rng.choice([0.02, 2.0])), orphans=0.3, span=2.0, ping_ms=30,
                dies_registering=0.5,
            )  # fmt: skip
        case "fleet":
            return replace(
                base, decodes=2, prefills=2, routers=rng.randint(1, 3), router_kills=rng.choice([0, 1, 2]),
                kills=rng.choice([0, 0, 1, 2]), freezes=rng.choice([0, 0, 1]), partitions=rng.choice([0, 0, 1]),
                loss=rng.choice([0.0, 0.02, 0.1]), duplicate=rng.choice([0.0, 0.2]),
                delay_tail=rng.choice([0.0, 1.0]), engine_fails=rng.choice([0.0, 0.1]),
                arena_tokens=rng.choice([64, 256]), queue_max=rng.choice([2, 1_024]), span=rng.choice([0.5, 2.0]),
            )  # fmt: skip
        case "ranks":
            return replace(
                lossy, ranks=True, rooms=rng.randint(10, 20), loss=rng.choice([0.0, 0.1]), abort=rng.choice([0.0, 0.2]),
                kills=rng.choice([0, 0, 1]), freezes=rng.choice([0, 0, 1]), delay_tail=rng.choice([0.0, 1.0]),
                opens_late=0.1, deadline=(2.0, 8.0),
            )  # fmt: skip
        case _:
            return FURTHER[kind](base, rng)


def _shared(base: Profile, rng: random.Random) -> Profile:
    """Few beginnings, and now and then hardly a slot to keep them in."""
    return replace(
        base, families=rng.choice([1, 3]), arena_tokens=rng.choice([64, 128, 1024]), blocks_max=rng.choice([4, 1_024]),
        span=rng.choice([0.5, 4.0]), loss=rng.choice([0.0, 0.1]), duplicate=rng.choice([0.0, 0.2]),
        write_tail=rng.choice([0.0, 1.5]), write_fails=rng.choice([0.0, 0.05]), kills=rng.choice([0, 0, 2]),
        freezes=rng.choice([0, 0, 1]), delay_tail=rng.choice([0.0, 1.0]), abort=rng.choice([0.0, 0.3]),
        opens_late=rng.choice([0.0, 0.2]),
    )  # fmt: skip


def _growing(base: Profile, rng: random.Random) -> Profile:
    """Half of them lose messages and nothing else, so that a room that only waits is seen."""
    grows = replace(
        base, chunks=rng.choice([2, 8, 32]), backing=rng.choice([0.5, 2.0]), loss=rng.choice([0.0, 0.02, 0.1]),
        duplicate=rng.choice([0.0, 0.2]), families=rng.choice([0, 0, 3]), window=rng.choice([8, 64]), span=2.0,
    )  # fmt: skip
    if rng.random() < 0.5:
        return replace(grows, patient=True, abort=0.2)
    return replace(
        grows, arena_tokens=rng.choice([128, 1024]), kills=rng.randint(1, 3), freezes=rng.choice([0, 0, 1]),
        delay_tail=rng.choice([0.0, 1.0]), write_tail=rng.choice([0.0, 1.5]), restart=(0.001, 2.0),
    )  # fmt: skip


def _checked(base: Profile, rng: random.Random) -> Profile:
    """Half of them have no other fault, so that a session that ends for a wrong row is seen."""
    checked = replace(
        base, verify=True, corrupts=rng.choice([0.0, 0.01, 0.05]), families=rng.choice([0, 0, 3]),
        arena_tokens=rng.choice([128, 1024]), duplicate=rng.choice([0.0, 0.2]), write_tail=rng.choice([0.0, 1.5]),
        abort=rng.choice([0.0, 0.3]), ranks=rng.random() < 0.3,
    )  # fmt: skip
    if rng.random() < 0.5:
        return replace(checked, exact=True)
    return replace(
        checked, loss=rng.choice([0.0, 0.1]), kills=rng.choice([0, 1]), freezes=rng.choice([0, 1]),
        write_fails=rng.choice([0.0, 0.05]), opens_late=rng.choice([0.0, 0.2]), deadline=(0.5, 8.0),
    )  # fmt: skip


def _apart(base: Profile, rng: random.Random) -> Profile:
    """Little of it, so that slots are soon another room's."""
    return replace(
        base, apart=True, staging_tokens=rng.choice([8, 16, 64]), lift_fails=rng.choice([0.0, 0.05]),
        families=rng.choice([0, 0, 3]),
        arena_tokens=rng.choice([64, 128]), duplicate=rng.choice([0.0, 0.2]), write_tail=rng.choice([0.0, 1.5]),
        abort=rng.choice([0.1, 0.4]), ranks=rng.random() < 0.3, verify=rng.random() < 0.3, loss=rng.choice([0.0, 0.1]),
        kills=rng.choice([0, 1, 2]), freezes=rng.choice([0, 1]), write_fails=rng.choice([0.0, 0.05]),
        opens_late=rng.choice([0.0, 0.2]), deadline=(0.5, 8.0), chunks=rng.choice([1, 1, 8]), backing=1.0,
    )  # fmt: skip


def _staged(base: Profile, rng: random.Random) -> Profile:
    """A staging buffer that holds a part of one room. Nothing but loss, so that a room that only waits is seen, or a
    prefill that freezes, which no other may feel."""
    staged = replace(
        base, apart=True, staging_tokens=rng.choice([4, 8, 32]), prefills=rng.randint(2, 3), pool_tokens=4096,
        arena_tokens=4096, window=64, write=rng.choice([0.0001, 0.01]),
    )  # fmt: skip
    if rng.random() < 0.5:
        return replace(
            staged, isolation=True, abort=0.0, freezes=1, freeze=(4.0, 8.0), staging_tokens=rng.choice([16, 64]),
            write=0.0001, delay=0.0002, span=rng.choice([0.2, 1.0]),
        )  # fmt: skip
    if rng.random() < 0.5:  # rooms that wait for the pages of rooms that wait for decode
        staged = replace(staged, pool_tokens=rng.choice([64, 128]))
    else:  # rooms that wait for slots of rooms that wait for a window
        staged = replace(staged, arena_tokens=rng.choice([64, 256]), window=rng.choice([1, 2, 64]))
    return replace(
        staged, patient=True, deadline=(20.0, 30.0), loss=rng.choice([0.0, 0.05]), duplicate=rng.choice([0.0, 0.1]),
        opens_late=rng.choice([0.0, 0.3]), abort=rng.choice([0.0, 0.2]), verify=rng.random() < 0.3,
        hasty=rng.choice([0.0, 0.3]),
    )  # fmt: skip


def _placed(base: Profile, rng: random.Random) -> Profile:
    """Few slots, so that the engine soon chooses those that are given back, and little time for rooms to land."""
    return replace(
        base, placed=True, arena_tokens=rng.choice([64, 128, 256]), duplicate=rng.choice([0.0, 0.2]),
        write_tail=rng.choice([0.0, 1.5]), write_deaf=rng.choice([0.0, 0.3]), abort=rng.choice([0.1, 0.5]),
        ranks=rng.random() < 0.4, verify=rng.random() < 0.2, apart=rng.random() < 0.2, staging_tokens=16,
        loss=rng.choice([0.0, 0.1]),
        kills=rng.choice([0, 1, 2]), freezes=rng.choice([0, 1]), write_fails=rng.choice([0.0, 0.05]),
        write_unknown=rng.choice([0.0, 0.01]), opens_late=rng.choice([0.0, 0.2]), deadline=(0.5, 8.0),
        chunks=rng.choice([1, 1, 8]), backing=1.0,
    )  # fmt: skip


def _led(base: Profile, rng: random.Random) -> Profile:
    """Half of them lose messages and nothing else, so that no room waits for its deadline."""
    led = replace(
        base, led=True, ranks=True, decodes=1, prefills=rng.randint(1, 2), rooms=rng.randint(10, 30),
        span=rng.choice([0.05, 1.0]), window=rng.choice([1, 2, 64]), write=rng.choice([0.0001, 0.01]),
        loss=rng.choice([0.0, 0.05]), dial_fails=rng.choice([0.0, 0.5]),
    )  # fmt: skip
    if rng.random() < 0.5:
        return replace(led, patient=True, arena_tokens=4096, pool_tokens=4096, deadline=(20.0, 30.0))
    return replace(
        led, kills=rng.choice([0, 1, 2]), freezes=rng.choice([0, 1]), partitions=rng.choice([0, 1]),
        duplicate=rng.choice([0.0, 0.2]), delay_tail=rng.choice([0.0, 1.0]),
        deadline=(1.0, 8.0),
    )  # fmt: skip


def _hasty(base: Profile, rng: random.Random) -> Profile:
    """Nothing but loss, and an arena in which rooms wait: decode's deadline comes long before prefill's, which must not
    wait for its own."""
    return replace(
        base, hasty=0.5, patient=True, arena_tokens=128, pool_tokens=4096, deadline=(60.0, 90.0), write=0.01,
        loss=rng.choice([0.0, 0.05]), duplicate=rng.choice([0.0, 0.2]), span=rng.choice([0.2, 2.0]),
        opens_late=rng.choice([0.0, 0.4]), abort=rng.choice([0.0, 0.2]),
    )  # fmt: skip


def _waiting(base: Profile, rng: random.Random) -> Profile:
    """More rooms than there are slots, or bytes that may be in flight; peers that are away longer than the longest
    pause between repeats; rooms that prefill never opens."""
    return replace(
        base, rooms=rng.randint(30, 60), span=rng.choice([0.1, 1.0]), arena_tokens=rng.choice([64, 128, 1024]),
        inflight_bytes=rng.choice([2_000, 4_000, 64 << 30]), families=rng.choice([0, 0, 3]), window=rng.choice([8, 64]),
        loss=rng.choice([0.0, 0.0, 0.1]), partitions=rng.choice([0, 1, 2]), kills=rng.choice([0, 0, 2]),
        freezes=rng.choice([0, 0, 1]), restart=(0.001, 3.0), opens_late=rng.choice([0.1, 0.5]), deadline=(0.3, 6.0),
    )  # fmt: skip


def _starved(base: Profile, rng: random.Random) -> Profile:
    """A busy host, on which nobody dies: whoever is slow is only slow."""
    return replace(
        base, starved=rng.choice([0.3, 1.0]), silence_ms=3_000, blips=10, arena_tokens=4096, pool_tokens=4096,
        window=64, span=rng.choice([2.0, 5.0]), abort=0.1, deadline=(60.0, 90.0), write=rng.choice([0.0001, 0.01]),
        routers=rng.choice([0, 0, 1]), skew=0.0,
    )  # fmt: skip


def _strangers(base: Profile, rng: random.Random) -> Profile:
    """No other faults: what an honest room suffers, it suffers from strangers."""
    return replace(
        base, strangers=True, patient=True, arena_tokens=4096, pool_tokens=4096, span=2.0, peer_sessions_max=2,
        abort=rng.choice([0.0, 0.2]), opens_late=0.3, deadline=(3.0, 8.0), window=rng.choice([4, 8, 64]),
        duplicate=rng.choice([0.0, 0.1]), delay_tail=rng.choice([0.0, 0.5]), delay_max=0.04,
    )  # fmt: skip


def _spelled(base: Profile, rng: random.Random) -> Profile:
    """Half of them have no faults but loss: what is lost is lost because a process has two names."""
    spelled = replace(
        base, spellings=rng.choice([2, 3]), prefills=rng.randint(1, 2), span=rng.choice([0.2, 2.0]), abort=0.0,
        duplicate=rng.choice([0.0, 0.1]), ranks=rng.random() < 0.3, window=rng.choice([2, 64]),
        routers=rng.choice([0, 0, 2]), write=rng.choice([0.0001, 0.01]), arena_tokens=4096, pool_tokens=4096,
    )  # fmt: skip
    if rng.random() < 0.5:
        return replace(spelled, exact=True, patient=True, deadline=(20.0, 30.0), duplicate=0.0)
    return replace(
        spelled, kills=rng.choice([0, 1, 2]), freezes=rng.choice([0, 1]), partitions=rng.choice([0, 1]),
        delay_tail=rng.choice([0.0, 1.0]), loss=rng.choice([0.0, 0.05]),
    )  # fmt: skip


def _lines(base: Profile, rng: random.Random) -> Profile:
    """Half of them have lines that fail and no other fault but loss, so that a room that only waits is seen. In the
    others prefills leave and decodes freeze, and the network loses nothing and keeps its order."""
    lined = replace(
        base, lines=rng.choice([0.7, 1.0]), line_delay=rng.choice([0.0002, 0.005, 0.1]),
        line_queue=rng.choice([90, 300, 1 << 18]), line_forks=rng.choice([0.0, 0.5]),
        line_bytes=rng.choice([64, 16 << 10]), span=rng.choice([0.2, 2.0]), write=rng.choice([0.0001, 0.01]), skew=0.0,
        window=rng.choice([8, 64]),
    )  # fmt: skip
    if rng.random() < 0.5:
        return replace(
            lined, patient=True, arena_tokens=4096, pool_tokens=4096, loss=rng.choice([0.0, 0.05]),
            line_faults=rng.choice([1, 2, 3]), opens_late=rng.choice([0.0, 0.3]), abort=rng.choice([0.0, 0.2]),
        )  # fmt: skip
    return replace(
        lined, ordered=True, closes=rng.randint(1, 3), freezes=rng.choice([0, 1]), restart=(0.5, 2.0),
        delay=rng.choice([0.0002, 0.005]), abort=rng.choice([0.0, 0.1]),
        line_queue=rng.choice([50, 120, 1 << 18]), line_delay=rng.choice([0.001, 0.02, 0.1]),
    )  # fmt: skip


def _groups(base: Profile, rng: random.Random) -> Profile:
    """As "fleet", of workers with up to four ranks."""
    return replace(
        base, ranks=True, prefills=rng.randint(1, 2), decodes=rng.randint(1, 2), rooms=rng.randint(8, 16),
        routers=rng.randint(1, 2), router_kills=rng.choice([0, 0, 1]), kills=rng.choice([0, 0, 1, 2]),
        freezes=rng.choice([0, 0, 1]), loss=rng.choice([0.0, 0.02, 0.1]), duplicate=rng.choice([0.0, 0.2]),
        delay_tail=rng.choice([0.0, 1.0]), engine_fails=rng.choice([0.0, 0.1]), arena_tokens=rng.choice([64, 64, 128]),
        span=rng.choice([0.2, 1.0]), window=rng.choice([2, 8]), verify=rng.random() < 0.2, chunks=rng.choice([1, 1, 8]),
        backing=0.5,
    )  # fmt: skip


def _leaving(base: Profile, rng: random.Random) -> Profile:
    """No faults but loss: what is lost is lost because somebody left."""
    return replace(
        base, leaves=True, decodes=2, prefills=2, routers=rng.randint(1, 2), rooms=rng.randint(15, 30), window=64,
        loss=rng.choice([0.0, 0.02]), delay_tail=rng.choice([0.0, 1.0]), span=rng.choice([1.0, 3.0]),
        ranks=rng.random() < 0.3, restart=(0.001, 2.0),
    )  # fmt: skip


def _sparse(base: Profile, rng: random.Random) -> Profile:
    """Half of them have no faults: all that happens is that more land than the device takes at once."""
    sparse = replace(
        base, sparse=True, sparse_late=rng.choice([0.0005, 0.005, 0.05]), sparse_queue_max=rng.choice([4, 1_024]),
        arena_tokens=rng.choice([256, 1024]), span=rng.choice([0.1, 0.5]), write=rng.choice([0.0001, 0.01]),
        rooms=rng.randint(10, 25), families=rng.choice([0, 0, 3]), abort=rng.choice([0.0, 0.3]),
    )  # fmt: skip
    if rng.random() < 0.3:
        return replace(
            sparse, decodes=rng.randint(1, 2), routers=rng.randint(1, 2), router_kills=rng.choice([0, 0, 1]),
            families=0, kills=rng.choice([0, 0, 1]), loss=rng.choice([0.0, 0.02]), engine_fails=rng.choice([0.0, 0.1]),
            rooms=rng.randint(20, 40), arena_tokens=1024,
        )  # fmt: skip
    if rng.random() < 0.5:
        return sparse
    return replace(
        sparse, loss=rng.choice([0.0, 0.1]), kills=rng.choice([0, 1]), freezes=rng.choice([0, 1]),
        write_tail=rng.choice([0.0, 1.5]), opens_late=rng.choice([0.0, 0.2]), deadline=(0.5, 8.0),
    )  # fmt: skip


def _turns(base: Profile, rng: random.Random) -> Profile:
    """Prompts that go on from answers. Half of them lose messages and nothing else, and give no block up, so that a
    room that only waits is seen, and a block that is not kept."""
    turns = replace(
        base, turns=rng.choice([0.5, 0.9]), families=rng.choice([1, 3]), tokens_max=24, rooms=rng.randint(6, 14),
        prefills=rng.randint(1, 2), write=rng.choice([0.0001, 0.01]), apart=rng.random() < 0.2, staging_tokens=16,
        verify=rng.random() < 0.2, abort=rng.choice([0.0, 0.2]), loss=rng.choice([0.0, 0.05]), window=64,
        engine_fails=rng.choice([0.0, 0.1]), ranks=rng.random() < 0.4,
    )  # fmt: skip
    if rng.random() < 0.4:
        return replace(turns, patient=True, arena_tokens=4096, pool_tokens=4096)
    return replace(
        turns, arena_tokens=rng.choice([64, 64, 128]), blocks_max=rng.choice([4, 1_024]), span=rng.choice([0.2, 1.0]),
        duplicate=rng.choice([0.0, 0.2]), write_tail=rng.choice([0.0, 1.5]), kills=rng.choice([0, 0, 1, 2]),
        freezes=rng.choice([0, 0, 1]), delay_tail=rng.choice([0.0, 1.0]), chunks=rng.choice([1, 1, 4]), backing=0.5,
    )  # fmt: skip


def _parts(base: Profile, rng: random.Random) -> Profile:
    """Sources that know nothing of one another. Half of them lose messages and nothing else."""
    parts = replace(
        base, parts=True, prefills=rng.randint(3, 4), families=rng.choice([0, 0, 3]), verify=rng.random() < 0.2,
        write=rng.choice([0.0001, 0.01, 0.1]), loss=rng.choice([0.0, 0.05]), abort=rng.choice([0.0, 0.3]),
        opens_late=rng.choice([0.0, 0.2]), span=rng.choice([0.2, 1.0]),
    )  # fmt: skip
    if rng.random() < 0.4:
        return replace(parts, patient=True, arena_tokens=4096, pool_tokens=4096, window=64)
    return replace(
        parts, arena_tokens=rng.choice([64, 128, 256]), duplicate=rng.choice([0.0, 0.2]), deadline=(0.5, 8.0),
        write_tail=rng.choice([0.0, 1.5]), write_fails=rng.choice([0.0, 0.05]), write_deaf=rng.choice([0.0, 0.3]),
        write_unknown=rng.choice([0.0, 0.01]), kills=rng.choice([0, 1, 2]), freezes=rng.choice([0, 1]),
        chunks=rng.choice([1, 1, 8]), backing=1.0,
    )  # fmt: skip


def _variants(base: Profile, rng: random.Random) -> Profile:
    """As "parts", of an engine that chooses the slots and describes its KV twice."""
    return replace(_parts(base, rng), placed=True, stand_ins=True, families=0)


FURTHER = {
    "shared": _shared,
    "growing": _growing,
    "apart": _apart,
    "staged": _staged,
    "placed": _placed,
    "led": _led,
    "hasty": _hasty,
    "waiting": _waiting,
    "strangers": _strangers,
    "spelled": _spelled,
    "starved": _starved,
    "lines": _lines,
    "checked": _checked,
    "groups": _groups,
    "leaving": _leaving,
    "sparse": _sparse,
    "turns": _turns,
    "parts": _parts,
    "variants": _variants,
}  # worlds with something that may be switched on
