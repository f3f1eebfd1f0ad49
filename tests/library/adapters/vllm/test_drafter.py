"""What is read of a vLLM engine's drafter; the test plays vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer.adapters.vllm.drafter import KVLayers, drafter_layers, layers_with_kv, speculation


def model(layers: int, heads: int, size: int, *, mla: bool = False, **config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        use_mla=mla, get_total_num_hidden_layers=lambda: layers, get_total_num_kv_heads=lambda: heads,
        get_head_size=lambda: size, hf_config=SimpleNamespace(to_dict=lambda: config),
    )  # fmt: skip


def engine(method: str, drafter: SimpleNamespace | None) -> SimpleNamespace:
    speculative = SimpleNamespace(method=method, draft_model_config=drafter)
    return SimpleNamespace(model_config=model(32, 8, 128), speculative_config=speculative)


ALONE = SimpleNamespace(model_config=model(32, 8, 128), speculative_config=None)
HEAD = model(1, 4, 64, hidden_size=256)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp", "one of a later version"])
def test_the_layers_of_a_drafter_are_sent_with_the_models(method: str) -> None:
    assert layers_with_kv(engine(method, HEAD)) == [KVLayers(32, 8, 128), KVLayers(1, 4, 64)]
    assert speculation(engine(method, HEAD))["speculation"].startswith(f"{method} ")


@pytest.mark.parametrize(
    "config", [ALONE, engine("ngram", HEAD), engine("suffix", None)], ids=["no", "ngram", "suffix"]
)
def test_drafts_without_kv_have_no_layers_and_no_fact(config: SimpleNamespace) -> None:
    """vLLM names the model itself as the drafter of such methods."""
    assert layers_with_kv(config) == [KVLayers(32, 8, 128)]
    assert speculation(config) == {}


def test_drafters_of_other_configurations_are_other_facts() -> None:
    """vLLM wraps the configuration of a drafter for EAGLE in one of its own."""

    def fact(**more: Any) -> dict[str, str]:
        return speculation(engine("eagle", model(1, 4, 64, model={"hidden_size": 256} | more)))

    assert fact() != fact(bias=True)
    assert fact(_name_or_path="/a/host") == fact(_name_or_path="/another/host") == fact()


@pytest.mark.parametrize(("mla", "planes"), [(False, 3 * 4 * (64 + 1)), (True, 3)], ids=["heads", "latent"])
def test_the_most_planes_of_a_drafter_follow_from_its_configuration(mla: bool, planes: int) -> None:
    assert [layers.planes_max for layers in layers_with_kv(engine("mtp", model(3, 4, 64, mla=mla)))][1:] == [planes]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.31.self_attn.attn", False), ("model.layers.32.self_attn.attn", True),
        ("language_model.model.layers.0.self_attn.attn", False), ("draft_model.model.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True), ("model.mtp.layers.0.attn", True), ("encoder", False),
    ],
)  # fmt: skip
def test_the_layers_of_a_drafter_are_known_by_name(name: str, expected: bool) -> None:
    assert (drafter_layers(engine("mtp", HEAD), [name]) == {name}) is expected
    assert drafter_layers(ALONE, [name]) == set()
