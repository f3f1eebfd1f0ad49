"""A send ring that a card fills: launches gather rows of its memory into slots that are registered with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from msgspec.structs import replace

from ...handoff.effects import Outcome, Write
from ...handoff.sharing import facing
from ...kernels import checksum_copy
from ...kernels.pools import Pool
from ...layout.layout import Component
from ...layout.pairing import Pairing
from ..card_launcher import WriterCard
from ..card_writer import Pusher
from ..copier import attempt
from ..pushes import Push, Staged
from .jobs import Gather
from .ring import Cut, Ring, cut

_STAGED_MAX = 64


class LaunchGatherer:
    """A Gatherer of a pool that lies at `pool_address` of a card's memory: a gather is one launch, so that two are in
    flight at most while slots that are full are sent. `over` is called in the thread that launches.

    `components` are the pool's own, by name.
    """

    def __init__(
        self, card: WriterCard, pool_address: int, components: dict[str, Component], over: Callable[[Gather], None]
    ) -> None:
        self._card, self._pool_address, self._components, self._over = card, pool_address, components, over
        self._pusher = Pusher(
            card.lane, lambda push: push.done(push.order, push.outcome, push.text, push.checksum), card.spans
        )
        self._pushes: dict[Gather, Push] = {}  # that are not over

    def prepare(self, ring: Ring) -> None:
        self._card.prepare()
        checksum_copy.native()
        ring.register(self._card)

    def cut(self, pairing: Pairing) -> Cut:
        return cut(pairing, paged=True)

    def add(self, gather: Gather) -> None:
        job, piece = gather.job, gather.piece
        source, ring = job.cut.layouts(piece)
        first = gather.slot * piece.room
        card = self._card.ordinal
        push = self._pushes[gather] = Push(
            order=replace(
                job.order,
                source_slots=job.order.source_slots[piece.first : piece.end],
                target_slots=np.arange(first, first + piece.rows),
                first_row=job.order.first_row + piece.first,
            ),
            done=partial(self._ended, gather),
            source=Pool(layout=source, address=self._pool_address, card=card),
            target=Pool(layout=ring, address=gather.ring.device_address, card=card, host=True),
            row_bytes=ring.row_bytes,
            staged=None if piece.low or not job.order.verify else self._staged(job.order, job.theirs),
        )
        self._pusher.add(push)

    def stop(self, gather: Gather) -> None:
        if (push := self._pushes.get(gather)) is not None:
            push.stop()

    def close(self) -> None:
        self._pusher.close()

    def _ended(self, gather: Gather, _: Write, outcome: Outcome, text: str, checksum: int) -> None:
        """In the pusher's thread."""
        del self._pushes[gather]
        gather.text, gather.checksum, gather.lost = text, checksum, outcome is Outcome.UNKNOWN
        if outcome is Outcome.LANDED:
            runs, gather.text = attempt(partial(gather.job.cut.runs, gather.piece, gather.job.order.target_slots))
            gather.runs = gather.runs if runs is None else runs
        self._over(gather)

    def _staged(self, order: Write, theirs: Component) -> Staged:
        """All planes of the rows, whichever a piece begins with: the first planes' piece sums for all of them."""
        ours = self._components[theirs.name]
        return _staged(ours, theirs, order.layers, self._pool_address, self._card.ordinal)


@lru_cache(_STAGED_MAX)
def _staged(ours: Component, theirs: Component, layers: tuple[int, int], address: int, card: int) -> Staged:
    source = facing(ours.layout, theirs.layout.layers(*layers))
    return Staged.of(ours.name, Pool(layout=source, address=address, card=card))
