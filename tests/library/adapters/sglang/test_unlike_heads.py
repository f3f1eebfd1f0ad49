"""A drafter whose layers have other KV heads than its model's, and keys with other numbers than values: each rank of
decode gets the heads that it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.sglang.pools import Buffers, HeadCounts, kv_buffers, pools
from pdtransfer.errors import ConfigError
from pdtransfer.wire import Ranks
from tests.library.adapters.sglang.sglang_modules import DisaggregationMode, KVArgs, ServerArgs, with_stand_ins
from tests.library.adapters.sglang.sglang_ranks import HEADS, SLOTS, Pool, slots_of, world
from tests.support.covered import check_covered

SIZES = [(8, 4), (4, 8), (8, 2), (4, 2), (2, 4), (1, 8), (2, 1), (8, 8)]


def drafted(total: int, tp_size: int = 0, numbers: int = 8) -> type[Pool]:
    """Pools with K and V of one layer of a drafter behind the model's, of `total` heads of this many numbers. With a
    `tp_size` the heads are of that many ranks, whatever the model's are."""

    class DraftPool(Pool):
        drafter_total = total

        def shapes(self, heads: int, latent: bool) -> dict[str, Any]:
            count = max(1, total // (tp_size or HEADS // heads))
            return super().shapes(heads, latent) | {"draft": ((2, 1, SLOTS, count, numbers), np.float32)}

        def listed(self, name: str) -> list[np.ndarray]:
            return super().listed(name) + ([*self.arrays["draft"][:, 0]] if name == "kv" else [])

        @property
        def args(self) -> Any:
            args = super().args
            args.num_draft_entries = 2
            return args

        def expected(self, tp_rank: int, tp_size: int) -> tuple[np.ndarray, np.ndarray]:
            """The model's numbers and the drafter's, of this rank: each has its layer, kind, head and slot."""
            return tuple(  # type: ignore[return-value]
                np.stack([of_head + 1_000 * head for head in heads_of(all_heads, tp_rank, tp_size)], axis=3)
                for all_heads, shape in (
                    (1 if self.kv.shape[0] == 1 else HEADS, self.kv.shape), (total, self.arrays["draft"].shape)
                )
                for of_head in [np.arange(np.prod(shape) // shape[3], dtype=np.float32).reshape(*shape[:3], shape[4])]
            )  # fmt: skip

    return DraftPool


def heads_of(total: int, tp_rank: int, tp_size: int) -> range:
    first = tp_rank * total // tp_size
    return range(first, first + max(1, total // tp_size))


@pytest.mark.parametrize(
    ("prefill", "decode", "total", "latent"),
    [(4, 2, 2, False), (2, 4, 2, False), (4, 4, 2, False), (1, 4, 2, False), (2, 1, 8, True), (4, 2, 2, True)],
)
def test_the_heads_of_a_drafter_land_at_the_ranks_that_have_them(
    prefill: int, decode: int, total: int, latent: bool
) -> None:
    with world(prefill_tp=prefill, decode_tp=decode, latent=latent, pool_type=drafted(total), decode_page=8) as engines:
        for tp_rank, rank in enumerate(engines.prefill):
            rank.pool.kv[:], rank.pool.arrays["draft"][:] = rank.pool.expected(tp_rank, prefill)  # type: ignore[attr-defined]
        engines.hand_over(7, source=[5, 1, 9, 2], target=[3, 1])
        for tp_rank, rank in enumerate(engines.decode):
            expected = rank.pool.expected(tp_rank, decode)  # type: ignore[attr-defined]
            for landed, numbers in zip((rank.pool.kv, rank.pool.arrays["draft"]), expected, strict=True):
                assert np.array_equal(landed[:, :, slots_of([3, 1], 8)], numbers[:, :, slots_of([5, 1, 9, 2], 4)])


def test_with_hisparse_a_drafters_kv_lands_in_pages_of_the_device() -> None:
    with world(pool_type=drafted(HEADS), hisparse=True) as engines:
        [prefill], [decode] = engines.prefill, engines.decode
        engines.hand_over(7, source=[5, 9], target=[3, 20], decode={"device_pages": np.array([8, 1])})
        for name, pages in (("kv", [3, 20]), ("draft", [8, 1])):
            landed, computed = decode.pool.arrays[name], prefill.pool.arrays[name]
            assert landed[:, :, slots_of(pages, 4)].tobytes() == computed[:, :, slots_of([5, 9], 4)].tobytes()
            landed[:, :, slots_of(pages, 4)] = 0
            assert not landed.any()


@pytest.mark.parametrize(("latent", "total", "numbers"), [(False, 4, 8), (False, 8, 4), (True, 8, 8), (True, 2, 8)])
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_each_head_of_a_drafter_has_one_sender(
    prefill: int, decode: int, latent: bool, total: int, numbers: int
) -> None:
    """Eight heads of the model, or one latent."""

    def described(tp_rank: int, tp_size: int) -> Any:
        ranks = Ranks(tp_rank, tp_size)
        heads = Heads(1 if latent else 8, ranks)
        model = HeadCounts(latent, heads, heads, "float32", drafter=Heads(total, ranks, numbers))
        of_model = [heads.count * 8 * 4] * (1 if latent else 2)
        items = [*of_model, *[Heads(total, ranks).count * numbers * 4] * 2]
        starts = np.cumsum([0, *[item * SLOTS for item in items]]).tolist()
        pool = drafted(total)(None, 1, HEADS, (), latent)
        buffers = Buffers(starts[:-1], [item * SLOTS for item in items], items)
        args = pool.args
        args.page_size = 1
        return pools(args, model, lambda _: (0, "dram"), kv=buffers, states=[])

    for target, _ in check_covered(described, prefill, decode):
        assert [component.name for component in target.components] == ["kv", "kv_draft"]


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_keys_and_values_of_unequal_numbers_divide_between_ranks(prefill: int, decode: int) -> None:
    def described(tp_rank: int, tp_size: int) -> Any:
        ranks = Ranks(tp_rank, tp_size)
        heads = Heads(8, ranks)
        items = [heads.count * 12 * 4, heads.count * 8 * 4]
        buffers = Buffers([0, SLOTS * items[0]], [item * SLOTS for item in items], items)
        args = Pool(None, 1, HEADS, (), False).args
        return pools(args, HeadCounts(False, heads, heads, "float32"), lambda _: (0, "dram"), kv=buffers, states=[])

    check_covered(described, prefill, decode)


def test_a_drafter_whose_heads_other_ranks_share_is_refused() -> None:
    """As with DP attention: half as many numbers as this rank's part of its heads."""
    ranks = Ranks(0, 2)
    pool = drafted(4, tp_size=4)(None, 1, HEADS // 2, (), False)
    model = HeadCounts(False, Heads(HEADS, ranks), Heads(HEADS, ranks), "float32", drafter=Heads(4, ranks, 8))
    args = pool.args
    text = "^kv_draft: a token's keys have 32 bytes at this rank, expected 64 for 2 heads of the drafter: SGLang shares"
    with pytest.raises(ConfigError, match=text):
        pools(args, model, lambda _: (0, "dram"), kv=kv_buffers(args), states=[])


@pytest.mark.parametrize(
    ("drafter", "path", "expected"),
    [
        ("EAGLE", "2", (Heads(2, Ranks(), 8), False)), ("EAGLE", "MLA", (Heads(1, Ranks()), True)),
        ("NGRAM", None, (None, False)),
    ],
)  # fmt: skip
def test_a_drafters_heads_are_those_of_its_own_configuration(
    drafter: str, path: str | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVArgs, "num_draft_entries", 0, raising=False)
    backend = with_stand_ins("backend", monkeypatch, "0.5.20", enable_hisparse=False, device="cpu")
    models: list[HeadCounts] = []

    def refused(args: Any, model: HeadCounts, *_: Any, **__: Any) -> Any:
        models.append(model)
        raise ConfigError("enough")

    monkeypatch.setattr(backend, "pools", refused)
    mode = DisaggregationMode.PREFILL
    server_args = ServerArgs(
        drafter, disaggregation_mode=mode.value, speculative_draft_model_path=path, model_path="model",
        speculative_draft_model_revision=None,
    )  # fmt: skip
    manager = backend.Manager(Pool(None, 4, HEADS, (), latent=False).args, mode, server_args)
    with pytest.raises(ConfigError, match="enough"):
        manager.register_to_bootstrap()
    [model] = models
    assert (model.drafter, model.latent_drafter) == expected
    assert (model.heads, model.window_heads) == (Heads(4, Ranks()), Heads(4, Ranks()))
