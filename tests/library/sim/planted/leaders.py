"""Defences of rooms that name leaders alone, taken away."""

from __future__ import annotations

from typing import Any

from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.effects import Dial
from pdtransfer.handoff.prefill.decode_peers import DecodePeers

from . import Patch


def waited_for_alone(patch: Patch) -> None:
    """A room waits for the leaders, and not for the ranks that they lead."""
    patch(PrefillPeers, "sources_of", lambda self, leaders, now: leaders)


def greeted_undialled(patch: Patch) -> None:
    """The ranks that a leader named are not dialled."""
    effects = DecodeSessions._effects

    def silent(self: DecodeSessions, now: float) -> Any:
        return [effect for effect in effects(self, now) if not isinstance(effect, Dial)]

    patch(DecodeSessions, "_effects", silent)


def welcomed_before_the_group_is_known(patch: Patch) -> None:
    """A leader answers Hello before it knows the ranks that it leads."""
    made = DecodePeers.__init__

    def hasty(self: DecodePeers, *args: Any, **more: Any) -> None:
        made(self, *args, **(more | {"group_is_known": True}))

    patch(DecodePeers, "__init__", hasty)


def named_too_late(patch: Patch) -> None:
    """Rooms that wait for a group do not notice that it was named."""
    patch(DecodeSessions, "_on_group", lambda self, leader, now: None)


def undialled_forgotten(patch: Patch) -> None:
    """A peer that cannot be dialled is forgotten, and the rooms that wait for it are not."""

    def forget(self: PrefillPeers, name: str, *_: Any) -> None:
        if name in self.peers and all(session.peer != name for session in self.sessions.values()):
            self._forget(self.peers[name])

    patch(PrefillPeers, "undialled", forget)
