"""What faults of one peer cost others: how soon aborted slots are free, and hand-offs beside a frozen peer."""

from __future__ import annotations

import os
import signal
import time
from statistics import median

import numpy as np

from pdtransfer.limits import Limits

from ..models import PAGE_SIZE, components
from ..ranks import RankPair
from ..report import Figures, Line

_ABORT_TOKENS = 4_096  # some tens of milliseconds of copying: there is time to interfere
_TOKENS = 16
_STALLED = 64  # grants that the frozen peer holds
_FROZEN_SECONDS = 4.0  # its silence is noticed after two; then come quarantine and the fence

LINES = (
    Line(
        "abort to slots free, p99", "{abort_us_p99:,.0f} us", "p50 {abort_us_p50:,.0f} us, {aborts} rooms; aim: 5,000"
    ),
    Line(
        "hand-offs beside a frozen peer, p99",
        "{frozen_p99_ratio:.2f} x",
        "p99 {frozen_us_p99:,.0f} us, quiet {quiet_us_p99:,.0f} us; {stalled} of its grants quarantined; aim: 2",
    ),
)


def measure(*, rooms: int = 1_000, aborts: int = 1_000, rounds: int = 5) -> Figures:
    """Two faults among three processes, two prefills and a decode, without engines.

    Abort: rooms of 4,096 tokens of the deepseek model on an idle pair, one at a time, each aborted by decode at a
    random moment of its transfer. Timed from `abort` until decode has received the end of writing, and the slots are
    free; rooms that were READY before are left out.

    Frozen: hand-offs of 16 tokens of the reference model from a healthy prefill, one at a time, from `expect` to READY.
    Each of `rounds` rounds begins with `rooms` in quiet. Then another prefill that holds 64 grants is stopped by
    SIGSTOP, and as many as pass in 4 s are timed from that moment on. Its silence, its rooms' failure, their quarantine
    and the look at its fence are all within. p99s are medians over the rounds, and so is the ratio of each round's two.
    """
    figures: Figures = {"rooms": rooms, "rounds": rounds, "stalled": _STALLED}
    return figures | _aborts(aborts) | _frozen(rooms, rounds)


def _aborts(count: int) -> Figures:
    source, target = components("deepseek", source_slots=2 * _ABORT_TOKENS + PAGE_SIZE, target_slots=2 * _ABORT_TOKENS)
    with RankPair(source, target) as ranks:
        ranks.hand_off(3, tokens=_ABORT_TOKENS)
        stamps = ranks.hand_off(5, tokens=_ABORT_TOKENS)
        whole_s = float(np.median(stamps.ready - stamps.expected)) / 1e9
        after_s = np.random.default_rng(1).uniform(0, whole_s, count).tolist()
        after_s[0] = 0.0  # no room is READY before: there is always a figure
        taken = ranks.abort(after_s, tokens=_ABORT_TOKENS)
    p50, p99 = np.percentile(taken, (50, 99)) / 1e3
    return {"aborts": len(taken), "abort_us_p50": float(p50), "abort_us_p99": float(p99)}


def _frozen(rooms: int, rounds: int) -> Figures:
    source, target = components("mla", source_slots=64 * PAGE_SIZE, target_slots=(_STALLED + 8) * _TOKENS)
    quiet, beside = list[float](), list[float]()
    limits = Limits(silence_ms=2_000)  # the longer default would only make each round longer
    with RankPair(source, target, bystander=True, limits=limits) as ranks:
        _us(ranks, rooms)
        for _ in range(rounds):
            quiet.append(float(np.percentile(_us(ranks, rooms), 99)))
            ranks.stall(_STALLED, tokens=_TOKENS)
            os.kill(ranks.bystander_pid, signal.SIGSTOP)
            try:
                over, taken = (
                    time.monotonic() + _FROZEN_SECONDS,
                    list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]](),
                )
                while time.monotonic() < over:
                    taken.append(_us(ranks, max(1, rooms // 10)))
            finally:
                os.kill(ranks.bystander_pid, signal.SIGCONT)
            beside.append(float(np.percentile(np.concatenate(taken), 99)))
    ratios = [disturbed / undisturbed for disturbed, undisturbed in zip(beside, quiet, strict=True)]
    return {
        "frozen_p99_ratio": median(ratios),
        "frozen_p99_ratio_max": max(ratios),
        "frozen_us_p99": median(beside),
        "quiet_us_p99": median(quiet),
    }


def _us(ranks: RankPair, rooms: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    stamps = ranks.hand_off(rooms, tokens=_TOKENS)
    return (stamps.ready - stamps.expected) / 1e3
