"""From landing to the first pick nothing reads a HiSparse request's KV, by whatever path: the page table shows it."""

from __future__ import annotations

import numpy as np
import pytest
from pdtransfer_lab.models.factory import create

from pdtransfer.hisparse.hot_requests import HotRequests
from tests.lab.models.hot_requests import HOT, SPARSE, hisparse
from tests.support.engine_pair import Decode, Prefill, config, request
from tests.support.engine_pair import prompts as prompts_of
from tests.support.page_table import WatchedMemory, touched_at_picks

LONG, SHORT = 4 * HOT, HOT - 10


class WatchedDecode:
    """A decode engine whose arena is watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = create(config("decode", slots=2048, options=SPARSE, hisparse=hisparse(), host_layout="page_first"))
        self.arena = WatchedMemory(engine.description.memory_bytes)
        memory, hbm = self.arena.bytes.view(np.float32), np.full(engine.description.hbm_bytes // 4, np.nan, np.float32)
        memory[:] = np.nan
        engine.attach(self.arena.bytes.data, **({"hbm": hbm.data.cast("B")} if len(hbm) else {}))
        random = np.random.default_rng(0)
        free = [list(random.permutation(component.layout.slots)) for component in engine.description.components]
        self.decode = Decode(engine, memory, hbm, free)
        self.touched = touched_at_picks(self.arena, monkeypatch)

    def serve(self, tokens: int) -> None:
        """Lands a prompt and runs its request up to the end of its first step."""
        one = request(1, prompts_of(3, (tokens,))[0], max_tokens=4, sparse=True)
        prefill = Prefill.of(slots=4096, options=SPARSE).run(one)
        self.decode.land(one, prefill)
        self.arena.forget()
        self.decode.engine.admit(one, self.decode.held(one.room), prefill.aux[one.room])
        while not self.touched:
            self.decode.step()


def test_nothing_of_the_arena_is_read_before_the_first_pick(monkeypatch):
    watched = WatchedDecode(monkeypatch)
    watched.serve(LONG)
    assert watched.touched[0] == 0
    assert watched.touched[1] > 0, "what the first pick has brought"


def test_a_request_that_fits_the_device_is_read_when_it_is_placed(monkeypatch):
    watched = WatchedDecode(monkeypatch)
    watched.serve(SHORT)
    assert watched.touched[0] > 0
    assert watched.decode.engine.figures.preloaded_bytes > 0


@pytest.mark.parametrize("whose", ["offer", "turn"])
def test_a_copy_of_the_prompt_by_any_path_shows(whose, monkeypatch):
    watched = WatchedDecode(monkeypatch)
    plain, staged = getattr(HotRequests, whose), []

    def copying(*given, **more):
        slots, layout = watched.decode.slots[1][:LONG], watched.decode.layout
        for number, plane in enumerate(layout.planes):
            staged.append(watched.arena.bytes[layout.address(number, slots)[:, None] + np.arange(plane.row_bytes)])
        return plain(*given, **more)

    monkeypatch.setattr(HotRequests, whose, copying)
    watched.serve(LONG)
    assert staged
    assert watched.touched[0] > 0
    assert watched.decode.engine.figures.admission_bytes == 0, "which the copies' own count does not see"
