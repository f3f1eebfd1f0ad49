"""What one seed's world is like: its size, its network, its faults; drawn from the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Probabilities are per message, per write or per room; times are seconds of virtual time."""

    name: str
    decodes: int
    prefills: int
    rooms: int
    arena_tokens: int
    pool_tokens: int
    tokens_max: int
    span: float  # over which rooms arrive
    loss: float
    duplicate: float
    delay: float  # median of a message's way
    delay_tail: float  # how heavy its tail is: 0 is none
    write: float  # median time of a write
    write_tail: float
    write_fails: float
    write_unknown: float  # a write that nobody can tell the end of, until its writer is killed
    abort: float  # a room that somebody gives up
    opens_late: float  # a room that the prefill engine takes up long after decode has granted
    deadline: tuple[float, float]
    freezes: int  # processes that stop for a while
    freeze: tuple[float, float]
    kills: int  # processes that die, and are started again
    orphans: float  # a killed writer leaves a child that goes on writing
    window: int
    isolation: bool  # one prefill freezes for long, and the others' rooms may not feel it: invariant 6


def draw(seed: int) -> Profile:
    """The profile of a seed, one of six kinds in turn."""
    rng = random.Random(f"profile {seed}")
    kind = ("quiet", "lossy", "rough", "crowded", "isolation", "deadly")[seed % 6]
    rough, crowded, isolation, deadly = (kind == name for name in ("rough", "crowded", "isolation", "deadly"))
    quiet = kind in ("quiet", "isolation", "deadly")
    small = rng.choice([128, 256])
    return Profile(
        name=kind,
        decodes=rng.randint(1, 2),
        prefills=rng.randint(2, 3) if isolation or deadly else rng.randint(1, 3),
        rooms=rng.randint(20, 40),
        arena_tokens=small if crowded or deadly else 4096 if isolation else 1024,
        pool_tokens=4096 if isolation else 1024,
        tokens_max=48,
        span=rng.choice([0.2, 2.0]),
        loss=0.0 if quiet else rng.choice([0.0, 0.05, 0.2, 0.4]),
        duplicate=0.0 if quiet else rng.choice([0.1, 0.4]),
        delay=rng.choice([0.0002, 0.005]),
        delay_tail=0.0 if quiet else rng.choice([0.0, 1.0, 2.5]),
        write=rng.choice([0.1, 2.0]) if deadly else rng.choice([0.0001, 0.01] if isolation else [0.0001, 0.01, 0.1]),
        write_tail=0.0 if quiet else rng.choice([0.5, 1.5, 2.5]),
        write_fails=0.0 if quiet else rng.choice([0.0, 0.02, 0.1]),
        write_unknown=0.0 if quiet else rng.choice([0.0, 0.0, 0.01]),
        abort=0.0 if isolation else rng.choice([0.0, 0.1]) if quiet else rng.choice([0.05, 0.2, 0.5]),
        opens_late=0.0 if quiet else rng.choice([0.2, 0.7]),
        deadline=(5.0, 10.0) if quiet else (0.5, 8.0),
        freezes=1 if rough or isolation else 0,
        freeze=(4.0, 8.0) if isolation else (0.5, 8.0),
        kills=rng.randint(2, 4) if deadly else rng.randint(0, 2) if rough else 0,
        orphans=0.7,
        window=64 if isolation else rng.choice([2, 8, 64]),
        isolation=isolation,
    )
