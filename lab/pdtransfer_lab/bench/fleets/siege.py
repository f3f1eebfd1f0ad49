"""Service to others while a peer attacks: healthy hand-offs beside each attack, p99 over p99."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import numpy as np

from pdtransfer.bus.keys import generate_pair
from pdtransfer.errors import WorldError

from ..models import PAGE_SIZE, components
from ..processes import begun
from ..ranks import RankPair
from ..report import Figures, Line
from .attacks import ATTACKS, Target, run

_WHAT = {
    "no_key": "handshakes without a key",
    "wrong_key": "handshakes for another server's key",
    "stranger": "handshakes with keys off the list",
    "replay": "a listed peer's bytes, replayed",
    "oversize": "frames over the limit, listed key",
    "slow": "handshakes of a byte a time",
    "trespass": "grants, landings, registers it may not; listed key",
    "flood": "pings at full speed, listed key",
    "junk": "junk connections, held open",
}
LINES = tuple(
    Line(
        what,
        f"{{{name}_p99_ratio:.2f}} x",
        f"p99 {{{name}_us_p99:,.0f}} us, quiet {{{name}_quiet_us_p99:,.0f}} us; {{{name}_count:,}} of them, "
        f"each {{{name}_cpu_us:,.0f}} us of prefill's CPU; aim: 2",
    )
    for name, what in _WHAT.items()
)
_TOKENS = 16
_START_SECONDS = 60.0


def measure(*, rooms: int = 500, rounds: int = 5, connections: int = 10_000) -> Figures:
    """Hand-offs of 16-token rooms between two processes, one at a time, with keys. Another process attacks prefill's
    listener over loopback. It has the lowest priority, since on a host of its own it would take none of these
    processors.

    For each attack, `rounds` times in turn: `rooms` rooms in quiet, then as many with the attack under way. Times are
    from `expect` to READY; p99s are medians over the rounds, and so is the ratio of each round's two. `cpu` is what the
    prefill process used beyond quiet for each thing that was done to it. `junk` holds `connections` connections,
    `slow` 500. A room that fails ends the bench.
    """
    guest = generate_pair()
    source, target = components("mla", source_slots=64 * PAGE_SIZE, target_slots=4 * _TOKENS)
    figures: Figures = {"rooms": rooms, "rounds": rounds, "connections": connections}
    with RankPair(source, target, keys=True, guest=guest) as ranks:
        target_of_attack = Target(endpoint=ranks.endpoints[0], guest=guest, component=target, connections=connections)
        _hand_off(ranks, rooms)
        for name in ATTACKS:
            pairs, count = list[tuple[_Batch, _Batch]](), 0
            for _ in range(rounds):
                quiet = _hand_off(ranks, rooms)
                with _attack(name, target_of_attack) as done:
                    pairs.append((quiet, _hand_off(ranks, rooms)))
                count += done[0]
            ratios = [besieged.p99_us / quiet.p99_us for quiet, besieged in pairs]
            cpu_us = sum(besieged.cpu_us - quiet.cpu_us for quiet, besieged in pairs)
            figures |= {
                f"{name}_p99_ratio": median(ratios),
                f"{name}_p99_ratio_max": max(ratios),
                f"{name}_us_p99": median(besieged.p99_us for _, besieged in pairs),
                f"{name}_quiet_us_p99": median(quiet.p99_us for quiet, _ in pairs),
                f"{name}_count": count,
                f"{name}_cpu_us": max(0.0, cpu_us / max(1, count)),
            }
    return figures


class _Batch(NamedTuple):
    """Some hand-offs, and the CPU time of the prefill process meanwhile."""

    p99_us: float
    cpu_us: float


def _hand_off(ranks: RankPair, rooms: int) -> _Batch:
    stamps = ranks.hand_off(rooms, tokens=_TOKENS)
    return _Batch(float(np.percentile(stamps.ready - stamps.expected, 99)) / 1e3, stamps.prefill_cpu_ns / 1e3)


@contextmanager
def _attack(name: str, target: Target) -> Generator[list[int]]:
    """With the attack under way; how often it attacked is in the list afterwards."""
    process, ours = begun(run, name, target)
    done: list[int] = []
    try:
        if not ours.poll(_START_SECONDS):
            raise WorldError(f"the attack {name} did not get under way within {_START_SECONDS:.0f} s")
        ours.recv()
        yield done
        ours.send(None)
        done.append(ours.recv())
    except EOFError:
        raise WorldError(f"the attack {name} has ended by itself") from None
    finally:
        ours.close()
        process.join(_START_SECONDS)
        process.kill()
        time.sleep(0.1)
