"""Any wrong byte of a request's KV changes its tokens: where it landed, under its running request, in any component."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdtransfer.layout.layout import Layout
from pdtransfer.serve.engine_api import Broken, Finished, Request
from pdtransfer.serve.engines.stamp.digests import AGAIN_ROWS, AGAIN_STEPS
from pdtransfer.serve.engines.stamp.factory import create
from pdtransfer.wire import Sampling
from tests.support.component_pair import ComponentPair
from tests.support.effort import some
from tests.support.engine_pair import config, prompts

TOKENS = 8  # of which decode picks all but the first: none differs by chance
OPTIONS = {
    "mla": {"layers": "2", "head_bytes": "16"},
    "gqa": {"layers": "2", "kv_heads": "2", "head_bytes": "8", "top_k": "4"},
    "hybrid": {"pools": "deepseek_v4", "ratios": "0,4,128", "requests": "1", "window_tokens": "8", "page_tokens": "1"},
}


class Landed:
    """A room that has landed in decode's memory, and its bytes there."""

    def __init__(self, options: dict[str, str], tokens: int = 12, max_tokens: int = TOKENS, **more: Any) -> None:
        slots = -(-(tokens + max_tokens) // 256) * 256
        self.pair = ComponentPair(
            create(config(slots=slots, options=options)),
            create(config("decode", host_layout="page_first", page_size=1, slots=slots, options=options, **more)),
        )
        (prompt,) = prompts(0, (tokens,))
        self.request = Request(room=1, prompt=prompt, sampling=Sampling(max_tokens=max_tokens, ignore_eos=True))
        self.aux = self.pair.land(self.request)
        self.before = {name: memory.copy() for name, memory in self.pair.memories.items()}

    def generate(self) -> tuple[tuple[int, ...], bytes]:
        """The tokens, and the digest of the KV."""
        self.pair.decode.admit(self.request, self.pair.slots[1], self.aux)
        *tokens, end = self.pair.run()[1]
        assert isinstance(end, Finished), end
        return tuple(token.id for token in tokens), end.kv_digest

    def restore(self) -> None:
        for name, memory in self.pair.memories.items():
            memory[:] = self.before[name]

    def bytes_of(self, name: str, rows: int) -> np.ndarray[Any, Any]:
        """Where the bytes of the first rows of a component are, in every plane."""
        component = self.pair.target[name]
        return bytes_of(component.layout, self.pair.slots[1][name][:rows])


def bytes_of(layout: Layout, slots: Any) -> np.ndarray[Any, Any]:
    return np.concatenate(
        [
            (layout.address(number, slots)[:, None] + np.arange(plane.row_bytes)).reshape(-1)
            for number, plane in enumerate(layout.planes)
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_one_wrong_byte_anywhere_changes_the_tokens(name: str) -> None:
    """With --full every byte of small rows, and some of large ones."""
    landed = Landed(OPTIONS[name])
    tokens, digest = landed.generate()
    random = np.random.default_rng(0)
    for component in landed.pair.target.values():
        memory = landed.pair.memories[component.memory]
        every = landed.bytes_of(component.name, component.rows(12))
        for at in random.choice(every, min(len(every), some(1_000 if len(every) < 1_000 else 40)), replace=False):
            landed.restore()
            memory[at] ^= 1 << int(random.integers(8))
            spoilt = landed.generate()
            assert spoilt[0] != tokens, (component.name, at)
            assert spoilt[1] != digest, (component.name, at)
    landed.restore()
    assert landed.generate() == (tokens, digest)


def swapped_rows(memory: Any, places: Any) -> None:
    memory[places[[2, 7]]] = memory[places[[7, 2]]]


def swapped_words(memory: Any, places: Any) -> None:
    memory[np.concatenate((places[3, :4], places[3, 4:8]))] = memory[np.concatenate((places[3, 4:8], places[3, :4]))]


def lost_row(memory: Any, places: Any) -> None:
    memory[places[5]] = 0


def shifted_rows(memory: Any, places: Any) -> None:
    memory[places[1:]] = memory[places[:-1]]


def high_bits(memory: Any, places: Any) -> None:
    memory[places[:, 3::4]] ^= 0x80  # of every word


@pytest.mark.parametrize("spoil", [swapped_rows, swapped_words, lost_row, shifted_rows, high_bits])
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_misplaced_and_missing_rows_change_the_tokens(name: str, spoil: Any) -> None:
    landed = Landed(OPTIONS[name])
    tokens, _ = landed.generate()
    layout, slots = landed.pair.target["kv"].layout, landed.pair.slots[1]["kv"][:12]
    for number, plane in enumerate(layout.planes):
        landed.restore()
        places = layout.address(number, slots)[:, None] + np.arange(plane.row_bytes)
        spoil(landed.pair.memories["dram"], places)
        assert landed.generate()[0] != tokens, plane


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_two_tokens_whose_rows_are_exchanged_in_every_plane_change_the_tokens(name: str) -> None:
    landed = Landed(OPTIONS[name])
    tokens, _ = landed.generate()
    landed.restore()
    layout, slots = landed.pair.target["kv"].layout, landed.pair.slots[1]["kv"][:12]
    for number, plane in enumerate(layout.planes):
        swapped_rows(landed.pair.memories["dram"], layout.address(number, slots)[:, None] + np.arange(plane.row_bytes))
    assert landed.generate()[0] != tokens


def test_the_kv_of_another_prompt_gives_other_tokens() -> None:
    landed = Landed(OPTIONS["mla"])
    tokens, _ = landed.generate()
    other = landed.request.prompt.copy()
    other[0] ^= 1
    landed.aux = landed.pair.land(Request(room=1, prompt=other, sampling=landed.request.sampling))
    assert landed.generate()[0] != tokens


@pytest.mark.parametrize("tokens", [AGAIN_ROWS // 2, AGAIN_ROWS * AGAIN_STEPS])
def test_a_byte_that_changes_under_a_running_request_changes_its_tokens_in_time(tokens: int) -> None:
    landed = Landed(OPTIONS["mla"], tokens=tokens, max_tokens=3 * AGAIN_STEPS)
    wanted, _ = landed.generate()
    places = landed.bytes_of("kv", tokens)
    memory = landed.pair.memories["dram"]
    for at in np.random.default_rng(tokens).choice(places, some(20)):
        landed.restore()
        landed.pair.decode.admit(landed.request, landed.pair.slots[1], landed.aux)
        ids = [token.id for _ in range(4) for token in landed.pair.decode.step()]
        assert tuple(ids) == wanted[: len(ids)]
        memory[at] ^= 16
        later = [event for events in landed.pair.run().values() for event in events]
        found = (*ids, *(token.id for token in later[:-1]))
        assert found[: 5 + AGAIN_STEPS] != wanted[: 5 + AGAIN_STEPS] or found != wanted
        assert found[5 + AGAIN_STEPS :] != wanted[5 + AGAIN_STEPS :], "every later token depends on it"
        assert len(found) == len(wanted)


def test_what_was_generated_is_read_back_as_well() -> None:
    landed = Landed(OPTIONS["mla"], max_tokens=24)
    wanted, digest = landed.generate()
    landed.restore()
    landed.pair.decode.admit(landed.request, landed.pair.slots[1], landed.aux)
    for _ in range(4):
        landed.pair.decode.step()
    place = landed.pair.target["kv"].layout.address(1, int(landed.pair.slots[1]["kv"][13]))
    landed.pair.memories["dram"][place] ^= 1
    *later, end = landed.pair.run()[1]
    assert tuple(token.id for token in later) != wanted[-len(later) :]
    assert end.kv_digest != digest


@pytest.mark.parametrize("name", OPTIONS)
def test_with_check_a_wrong_byte_fails_its_request_and_is_named(name: str) -> None:
    landed = Landed(OPTIONS[name] | {"check": "1"})
    wanted = landed.generate()
    component = next(iter(landed.pair.target.values()))
    landed.restore()
    plane = component.layout.planes[-1]
    at = component.layout.address(len(component.layout.planes) - 1, int(landed.pair.slots[1][component.name][1]))
    landed.pair.memories[component.memory][at] ^= 1
    landed.pair.decode.admit(landed.request, landed.pair.slots[1], landed.aux)
    end = landed.pair.run()[1][-1]
    assert isinstance(end, Broken)
    where = f"component '{component.name}', row 1, layer {plane.layer}, rank 0: these bytes are not this room's"
    assert end.detail == f"at position 12: {where}"
    landed.restore()
    assert landed.generate() == wanted
