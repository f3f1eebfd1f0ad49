"""Defences that tell a slow peer from a dead one, taken away."""

from __future__ import annotations

import math

from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.records import PeerRecord
from pdtransfer.handoff.liveness import Liveness

from . import Patch


def slowness_taken_for_death(patch: Patch) -> None:
    """As much silence as a process without a processor has makes it a lost one."""
    patch(Liveness, "silent_at", property(lambda self: self.last_seen + self._slow_ms / 1e3))


def evidence_unheeded(patch: Patch) -> None:
    """Whatever the kernel says, silence alone counts."""
    patch(Liveness, "silent_at", property(lambda self: self.last_seen + self._silence_ms / 1e3))


def evidence_never_withdrawn(patch: Patch) -> None:
    """A connection that was made again stays an ended one."""
    report = Liveness.report

    def keep(self: Liveness, evidence: str, now: float) -> None:
        if evidence:
            report(self, evidence, now)

    def seen(self: Liveness, now: float) -> None:
        self.last_seen = now

    patch(Liveness, "report", keep)
    patch(Liveness, "seen", seen)


def evidence_counts_at_once(patch: Patch) -> None:
    """A connection that only broke has no time to be made again."""

    def silent_at(self: Liveness) -> float:
        return self.last_seen + (self._slow_ms if self.gone else self._silence_ms) / 1e3

    patch(Liveness, "silent_at", property(silent_at))


def evidence_taken_for_a_fence(patch: Patch) -> None:
    """Who is gone writes no more; but its children do."""
    look = PrefillPeers._look

    def and_quiet(self: PrefillPeers, peer: PeerRecord, now: float) -> None:
        look(self, peer, now)
        for session in [
            session for session in self.sessions.values() if session.peer == peer.name and peer.liveness.gone
        ]:
            self._quiet(session)

    patch(PrefillPeers, "_look", and_quiet)


def frozen_peers_never_found(patch: Patch) -> None:
    """Without evidence there is no limit of silence."""

    def silent_at(self: Liveness) -> float:
        return self.last_seen + self._slow_ms / 1e3 if self.gone else math.inf

    patch(Liveness, "silent_at", property(silent_at))
