"""States of linear attention and of convolutions, between engines of other tensor parallel sizes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer import KVPoll
from pdtransfer.adapters.kit.kinds import StatePart
from pdtransfer.adapters.sglang.states import Sections, conv_sections, item_parts, states_fact
from tests.library.adapters.sglang.sglang_ranks import AUX, HEADS, REQUESTS, Pool, World, slots_of, stage_of, world

STATE_LAYERS, KERNEL = (1, 2, 5), 3


@dataclass(frozen=True)
class Model:
    """What a model keeps of a request in a layer, of all ranks together: channels of the last tokens, in sections, and
    heads of the recurrent state."""

    sections: tuple[int, ...]
    heads: int
    head: tuple[int, int] = (3, 5)
    tokens_first: bool = False
    named: bool = True  # by SGLang's KVArgs

    def states(self, seed: int) -> list[np.ndarray]:
        """The convolution's as (channels, tokens), float16, and (heads, ...), float32."""
        random = np.random.default_rng(seed)
        conv = random.integers(0, 999, (sum(self.sections), KERNEL)).astype(np.float16)
        return [conv, random.random((self.heads, *self.head), np.float32)][: 2 if self.heads else 1]

    def of_rank(self, states: list[np.ndarray], rank: int, size: int) -> list[np.ndarray]:
        """A rank's part, as SGLang's layers compute it: of each section and of the heads its share."""
        sections = np.split(states[0], np.cumsum(self.sections)[:-1])
        conv = np.concatenate([np.split(section, size)[rank] for section in sections])
        return [conv.T if self.tokens_first else conv, *(np.split(state, size)[rank] for state in states[1:])]


MODELS = {
    "gated delta nets": Model((8, 8, 16), 8), "Kimi's delta attention": Model((16, 8, 8), 4, tokens_first=True),
    "Mamba 2": Model((24, 8, 8), 12, named=False), "Mamba": Model((12,), 12, (1, 7), named=False),
    "short convolutions": Model((20,), 0, named=False),
}  # fmt: skip


def pool_of(model: Model) -> type[Pool]:
    """Pools with the states of a model. Its KV heads tell how many ranks there are."""

    class StatePool(Pool):
        conv_sections = None if model.named else model.sections

        def __init__(self, raw: np.ndarray | None, page_size: int, heads: int, *more: Any) -> None:
            self.items = model.of_rank(model.states(0), 0, HEADS // heads)
            super().__init__(raw, page_size, heads, *more)
            self.buffers = list(self.arrays.values())[1:]  # (requests, ...), of each state one a layer

        def shapes(self, heads: int, latent: bool) -> dict[str, Any]:
            states = [((REQUESTS, *item.shape), item.dtype) for item in self.items for _ in STATE_LAYERS]
            kv = super().shapes(heads, latent)["kv"]
            return {"kv": kv} | {f"state {place}": state for place, state in enumerate(states)}

        def listed(self, name: str) -> list[np.ndarray]:
            return super().listed(name) if name == "kv" else self.buffers

        @property
        def args(self) -> Any:
            """As SGLang lists them: of each state a buffer a layer."""
            args, (conv, *heads), layers = super().args, self.items, len(STATE_LAYERS)
            args.state_layer_ids = [list(STATE_LAYERS) * len(self.items)]
            channels, rows = conv.shape[::-1] if model.tokens_first else (conv.shape[0], 1)
            args.state_dim_per_tensor = [[channels] * layers + [state.shape[0] for state in heads] * layers]
            args.state_slice_outer_counts = [[rows] * layers + [1 for _ in heads] * layers]
            sections = [*model.sections] if model.named else None
            args.state_conv_shard_groups = [[sections] * layers + [None for _ in heads] * layers]
            return args

    return StatePool


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2), (2, 4), (2, 2)])
def test_states_divide_between_ranks_of_unequal_number(name: str, prefill: int, decode: int) -> None:
    model = MODELS[name]

    def parts(rank: int, size: int) -> list[np.ndarray]:
        """What a rank has of a request, in the order of its buffers."""
        layers = [model.of_rank(model.states(layer), rank, size) for layer in STATE_LAYERS]
        return [state for kind in zip(*layers, strict=True) for state in kind]

    with world(prefill_tp=prefill, decode_tp=decode, states=("mamba",), pool_type=pool_of(model)) as engines:
        for number, rank in enumerate(engines.prefill):
            for buffer, state in zip(cast("Any", rank.pool).buffers, parts(number, prefill), strict=True):
                buffer[4] = state
        engines.hand_over(7, source=[5], target=[1], states=[np.array([4])], decode={"states": [np.array([2])]})
        for number, rank in enumerate(engines.decode):
            for buffer, state in zip(cast("Any", rank.pool).buffers, parts(number, decode), strict=True):
                assert np.array_equal(buffer[2], state)
                assert not buffer[[0, 1, 3, 4, 5]].any()


def args_of(axes: list[int], rows: list[int] | None, sections: list[Any] | None) -> Any:
    """SGLang's KVArgs of these lists, for its second state."""
    lists = {"state_dim_per_tensor": axes, "state_slice_outer_counts": rows, "state_conv_shard_groups": sections}
    named = {name: [[], values] for name, values in lists.items() if values is not None}
    return SimpleNamespace(state_types=["dsa", "mamba"], state_item_lens=[[], [144, 96]], **named)


@pytest.mark.parametrize(
    ("axes", "rows", "named", "of_model"),
    [
        ([], None, None, ()),  # older versions name nothing
        ([12, 4], None, None, None),  # a convolution whose sections are not known
        ([12, 4], None, None, (8, 8)),  # or are not this one's
        ([12, 0], [1, 1], [[8, 8, 8], None], None),  # of which one is the same on all ranks
        ([12, 4], [1, 1], [[9, 9, 6], None], None),  # sections that two ranks cannot share out
        ([3, 4], None, [[8, 8, 8], None], None),  # an axis that is not that of the sections
    ],
)
def test_an_item_that_is_not_known_in_detail_is_one_thing(
    axes: list[int], rows: list[int] | None, named: list[Any] | None, of_model: Sections | None
) -> None:
    whole = [[StatePart("whole", 1, 144)], [StatePart("whole", 1, 96)]]
    assert item_parts(args_of(axes, rows, named), 1, 2, of_model) == whole
    assert item_parts(args_of([12, 4], None, [[8, 8, 8], None]), 1, 2, None) != whole


@pytest.mark.given(prefill_tp=2, states=("mamba",))
def test_engines_of_other_sizes_refuse_each_other_where_they_do_not_divide(engines: World) -> None:
    engines.expect(7, [1])
    engines.begin(7)
    engines.until(7, KVPoll.FAILED, engines.decode)
    assert engines.decode[0].states[7][-1].reason.endswith("p1 has heads 1 of 'mamba', which has 0")


def alone(texts: list[str]) -> list[list[str]]:
    """An engine without stages."""
    return [texts]


def test_what_states_there_are_is_a_fact_that_peers_compare() -> None:
    """Of all ranks together: equal where they divide."""

    def fact(size: int, *, named: bool) -> dict[str, str]:
        sections = [[8, 8, 16], None] if named else None
        args = args_of([32 // size, 8 // size], None, sections)
        args.state_item_lens = [[], [192 // size, 480 // size]]
        return states_fact(args, size, None, alone)

    assert fact(1, named=True) == fact(2, named=True) == {"states": "0:8x6 1:8x6 2:8x12, 0:8x60"}
    assert fact(1, named=False) == {"states": "whole:1x192, whole:1x480"}
    assert fact(2, named=False) == {"states": "whole:2x240, whole:2x96"}
    assert states_fact(SimpleNamespace(state_types=["swa"]), 1, None, alone) == {}


@pytest.mark.parametrize(
    "layers", [(([0], [1, 2]), ([1, 2], [])), (([], [0, 1]), ([0, 1, 2], [2]))], ids=["no state", "no KV"]
)
def test_a_stage_carries_what_its_layers_have(layers: tuple[tuple[list[int], list[int]], ...]) -> None:
    """From one rank to two stages, of which one has no state or no KV. SGLang names no indices of states there."""
    with world(states=("mamba",), decode_stages=[stage_of(*of_stage) for of_stage in layers]) as engines:
        for rank, (_, state_layers) in zip(engines.decode, layers, strict=True):
            states = [np.array([2])] if state_layers else []
            assert len(rank.pool.args.state_types) == len(states)
            given: dict[str, Any] = {"prefix": 4, "states": states, "aux_index": 3, "sources": engines.sources}
            rank.side.expect(7, np.array([1, 8], np.int32), **given)
        engines.begin(7)
        engines.until(7, KVPoll.WAITING_FOR_INPUT, engines.prefill)
        engines.push(7, [5, 2], aux=AUX, states=[np.array([4])])
        engines.until(7, KVPoll.SUCCESS)
        source = engines.prefill[0].pool
        for rank, (kv_layers, state_layers) in zip(engines.decode, layers, strict=True):
            pool, computed = rank.pool, source.kv[:, kv_layers][:, :, slots_of([5, 2], 4)]
            assert np.array_equal(pool.kv[:, kv_layers][:, :, slots_of([1, 8], 4)], computed, equal_nan=True)
            assert not np.delete(pool.kv, kv_layers, axis=1).any()
            assert np.array_equal(pool.arrays["mamba"][state_layers, 2], source.arrays["mamba"][state_layers, 4])
            assert not np.delete(pool.arrays["mamba"], state_layers, axis=0).any()


def test_a_prefill_stage_sends_what_its_layers_have() -> None:
    """It has no KV, and the other stage has no state."""
    layers = ([], [0, 1, 2]), ([0, 1, 2], [])
    with world(states=("mamba",), prefill_stages=[stage_of(*of_stage) for of_stage in layers]) as engines:
        engines.meet(7, [1, 8], states=[np.array([2])])
        for rank, states in zip(engines.prefill, ([np.array([4])], []), strict=True):
            rank.side.push(7, np.array([5, 2], np.int32), first_page=0, aux=AUX, states=states)
        engines.until(7, KVPoll.SUCCESS)
        (of_states, of_kv), landed = [rank.pool for rank in engines.prefill], engines.decode[0].pool
        computed = of_kv.kv[:, :, slots_of([5, 2], 4)]
        assert np.array_equal(landed.kv[:, :, slots_of([1, 8], 4)], computed, equal_nan=True)
        assert np.array_equal(landed.arrays["mamba"][:, 2], of_states.arrays["mamba"][:, 4])


@pytest.mark.parametrize("stages", [[True, True], [True, False], [False, True]])
def test_stages_and_engines_without_stages_have_the_same_fact(stages: list[bool]) -> None:
    """Whether a stage has such layers or not."""

    def args(*, has_states: bool) -> Any:
        lists = args_of([32, 8], None, [[8, 8, 16], None])
        lists.state_types, lists.state_item_lens = ["mamba"] if has_states else [], [[192, 480]]
        for name in ("state_dim_per_tensor", "state_conv_shard_groups"):
            vars(lists)[name] = vars(lists)[name][1:]
        return lists

    whole = states_fact(args(has_states=True), 1, None, alone)
    of_stages = [whole["states"].split(", ") if has_states else [] for has_states in stages]
    for has_states in stages:
        assert states_fact(args(has_states=has_states), 1, None, lambda _: of_stages) == whole


def shape(sections: tuple[int, ...], entering: int, convs: int = 1) -> Any:
    return SimpleNamespace(conv=[(1, 3)] * convs, conv_dim=sum(sections), intermediate_size=entering)


@pytest.mark.parametrize(
    ("model_type", "state_shape", "sections"),
    [
        ("nemotron_h", shape((24, 8, 8), 24), (24, 8, 8)),
        ("jet_nemotron", shape((8, 8, 24), 24), None),  # which are in another order
        ("lfm2", shape((20,), 20), (20,)),
        ("minicpm", shape((), 0), ()),  # without convolutions
        ("zaya", shape((20,), 20, convs=2), None),
        ("inkling", SimpleNamespace(conv=[(3, 1)] * 6), None),
    ],
)
def test_sections_of_convolutions_follow_from_the_model(
    model_type: str, state_shape: Any, sections: Sections | None
) -> None:
    params = SimpleNamespace(shape=state_shape)
    assert conv_sections(SimpleNamespace(model_type=model_type, mamba2_cache_params=params)) == sections
    assert conv_sections(SimpleNamespace(model_type=model_type)) is None
