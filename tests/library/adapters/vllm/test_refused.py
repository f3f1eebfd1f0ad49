"""What an engine refuses at its start, by the text that docs/compatibility.md has: KV cache groups with modules in the
place of vLLM's."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer.errors import ConfigError
from tests.library.adapters.stand_ins import imported, stand_in

MUST_BE = "is not supported; must be one of FullAttentionSpec, .*, "
INTERFACE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def dialect_of(monkeypatch: pytest.MonkeyPatch, **interface: Any) -> Any:
    """The module `dialect`. `interface` is what vLLM's connectors have beside their base."""
    version = {"__version__": "0.30.0" if interface else "0.29.1+cpu"}
    has = {"vllm": version, INTERFACE: {"KVConnectorBase_V1": object, **interface}}
    return with_stand_ins(monkeypatch, "dialect", has)


def connector_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector's class."""
    bases = "Base_V1", "HandshakeMetadata", "Metadata", "Role"
    above = INTERFACE.removesuffix(".v1.base")
    has: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.29.1"},
        INTERFACE: {f"KVConnector{name}": type(name, (), {}) for name in bases} | {"SupportsHMA": type("HMA", (), {})},
        f"{above}.factory": {"KVConnectorFactory": SimpleNamespace(register_connector=lambda *named: None)},
        f"{above}.v1.metrics": {"KVConnectorPromMetrics": object, "KVConnectorStats": object},
    }
    return with_stand_ins(monkeypatch, "connector", has, "stats", "dialect").PDTransferConnector


def with_stand_ins(monkeypatch: pytest.MonkeyPatch, module: str, has: dict[str, dict[str, Any]], *others: str) -> Any:
    """The adapter's module with modules of vLLM's that have what it, and `others` of the adapter, import; nothing of
    them stays."""
    has |= {
        "vllm.distributed.parallel_state": {"get_pp_group": None, "get_tensor_model_parallel_rank": None},
        "vllm.logger": {"init_logger": logging.getLogger},
    }
    stand_in(monkeypatch, has)
    return imported("pdtransfer.adapters.vllm", module, *others)


def groups(*specs: str) -> Any:
    """vLLM's configuration of a cache with a group of each of these classes."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(
                kv_cache_spec=type(name, (), {"block_size": 16})(), layer_names=[f"model.layers.{index}.attn"]
            )
            for index, name in enumerate(specs)
        ]
    )


@pytest.mark.parametrize(
    ("interface", "spec", "text"),
    [
        ({"KVConnectorTransferResults": object}, "CrossAttentionSpec", f"{MUST_BE}MambaSpec"),
        ({"KVConnectorTransferResults": object}, "EncoderOnlyAttentionSpec", f"{MUST_BE}MambaSpec"),
        ({}, "CrossAttentionSpec", f"{MUST_BE}ChunkedLocalAttentionSpec"),
        ({}, "MambaSpec", r"needs vLLM 0\.30, found 0\.29\.1\+cpu"),
    ],
)
def test_caches_that_are_not_supported_are_refused_with_what_is(
    interface: dict[str, Any], spec: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before 0.30 have no interface for states."""
    dialect = dialect_of(monkeypatch, **interface)
    assert [names for _, names in dialect.groups_of(groups("FullAttentionSpec"))] == [["model.layers.0.attn"]]
    with pytest.raises(ConfigError, match=rf"(?m)^KV cache group 1: {spec} {text}$"):
        dialect.groups_of(groups("FullAttentionSpec", spec))


def test_a_refusal_has_each_fact_by_the_name_that_users_know(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = dialect_of(monkeypatch)
    monkeypatch.setattr(dialect.vllm, "__version__", "0.32.0", raising=False)
    monkeypatch.setattr(dialect, "facts_of_model", lambda *_: {"model": {"head_dim": 8}, "cache": "fp8"})
    facts = {"model": "a digest", "groups": [(16, None, 0), (32, 128, 0), (16, 128, 0)], "scales": 2}
    shown = {
        "head_dim": "8", "kv_dtype": "fp8", "scales": "2", "block_size": "16/32", "window": "None/128",
        "attention_chunk": "0", "rows": "tokens", "engine": "vLLM 0.32.0",
    }  # fmt: skip
    assert dialect.shown_facts(None, {}, facts, "tokens") == shown
    shown["attention_backend"] = "A/B"
    assert dialect.shown_facts(None, {}, facts | {"attention": ["A", "B"]}, "tokens") == shown


def test_the_parts_of_one_allocation_are_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = dialect_of(monkeypatch)
    tensors = [SimpleNamespace(size=size, block_stride=stride) for size, stride in ((8, 0), (5, 2), (5, 2), (3, 0))]
    config = SimpleNamespace(kv_cache_tensors=tensors)
    assert dialect.sizes_of(config) == [8]
    dialect.HAS -= {"one_allocation"}
    assert dialect.sizes_of(config) == [5, 8, 3]


def test_layers_of_unlike_windows_in_one_group_are_refused_by_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = dialect_of(monkeypatch, KVConnectorTransferResults=object)
    config = groups("FullAttentionSpec")
    [group] = config.kv_cache_groups
    specs = {"a": type("FullAttentionSpec", (), {})(), "b": type("SlidingWindowSpec", (), {"sliding_window": 64})()}
    group.kv_cache_spec = SimpleNamespace(block_size=16, kv_cache_specs=specs)
    windows = r"all tokens \(FullAttentionSpec\), 64 tokens \(SlidingWindowSpec\)"
    with pytest.raises(ConfigError, match=rf"(?m)^KV cache group 0 mixes attention windows: {windows}$"):
        dialect.groups_of(config)


def drafted(*, mla: bool, drafter_mla: bool) -> Any:
    """vLLM's configuration of a model of eight KV heads, or one latent, with an EAGLE drafter of four, or one."""

    def model(layers: int, heads: int, mla: bool) -> SimpleNamespace:
        return SimpleNamespace(
            use_mla=mla, get_total_num_hidden_layers=lambda: layers, get_total_num_kv_heads=lambda: heads,
            get_head_size=lambda: 64,
        )  # fmt: skip

    speculative = SimpleNamespace(method="eagle", draft_model_config=model(1, 4, drafter_mla))
    return SimpleNamespace(model_config=model(2, 8, mla), speculative_config=speculative)


@pytest.mark.parametrize(
    ("mla", "drafter_mla", "expected"),
    [(False, False, (8, 8, 4, 1)), (True, False, (1, 1, 4, 1)), (False, True, (8, 8, 1, 1))],
)
def test_each_layer_has_the_heads_of_its_own_model(
    mla: bool, drafter_mla: bool, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = dialect_of(monkeypatch, KVConnectorTransferResults=object)
    config = groups("FullAttentionSpec", "FullAttentionSpec", "FullAttentionSpec", "MLAAttentionSpec")
    assert tuple(dialect.head_totals(drafted(mla=mla, drafter_mla=drafter_mla), config).values()) == expected


def test_windows_have_heads_of_their_own_where_the_configuration_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = dialect_of(monkeypatch, KVConnectorTransferResults=object)
    config, model = groups("FullAttentionSpec", "SlidingWindowSpec"), drafted(mla=False, drafter_mla=False)
    model.speculative_config = None
    model.model_config.hf_text_config = SimpleNamespace(swa_num_key_value_heads=16)
    assert tuple(dialect.head_totals(model, config).values()) == (8, 16)


def test_a_drafter_with_heads_needs_them_apart_whatever_its_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = connector_of(monkeypatch)
    for mla, drafter_mla, expected in ((True, True, None), (True, False, "HND"), (False, True, "HND")):
        assert connector.get_required_kvcache_layout(drafted(mla=mla, drafter_mla=drafter_mla)) == expected


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"bindd": "tcp://127.0.0.1:0"}, "kv_connector_extra_config: 'bindd' must be one of advertise, .*, verify"),
        ({"copy_threads": 0}, "copy_threads = 0: must be from 1 to 64"),
        ({"rows": "both"}, "rows = 'both': must be one of auto, blocks, tokens"),
    ],
)
def test_a_wrong_setting_is_refused_where_vllm_asks_before_it_loads_weights(
    extra: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = connector_of(monkeypatch)
    for right in (None, {}, {"copy_threads": 1, "rows": "blocks"}):
        assert connector.requires_piecewise_for_cudagraph(right) is False
    with pytest.raises(ConfigError, match=text):
        connector.requires_piecewise_for_cudagraph(extra)
