"""One call that carries rows between two pools, by whichever of its backends suits their size and their runs."""

from __future__ import annotations

from typing import Any, Literal

from ..cancel import Cancel
from .kv_copy import kv_copy
from .pools import Pool, Progress, Slots

Backend = Literal["auto", "kernel"]


def push(
    target: Pool,
    source: Pool,
    target_slots: Slots,
    source_slots: Slots,
    count: Any,
    *,
    backend: Backend = "auto",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    stream: int = 0,
) -> None:
    """Copies `count` rows, all planes of both layouts: row i from source_slots[i] to target_slots[i].

    Arguments, errors and progress are kv_copy's. Work starts after what is queued on `stream`, and later work there
    starts after it. Returns once all of it is queued: on a card that may be shortly before it has ended, so call it off
    the loop. What `cancel` stops is not begun; bytes that were being copied when it was set may still land, until
    `progress` says that nothing is pending.
    """
    assert backend in ("auto", "kernel"), backend
    kv_copy(target, source, target_slots, source_slots, count, progress=progress, cancel=cancel, stream=stream)
