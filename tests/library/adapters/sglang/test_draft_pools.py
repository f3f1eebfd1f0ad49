"""A draft model's cache, which SGLang allocates after the model's own: in the same allocation."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.cache_memory import Extent
from pdtransfer.adapters.sglang import process
from pdtransfer.adapters.sglang.options import drafter_with_kv
from pdtransfer.errors import ConfigError
from tests.library.adapters.sglang.sglang_modules import ServerArgs, with_stand_ins
from tests.library.adapters.stand_ins import stand_in

SIZE = 1 << 16  # bytes of a layer


class Configurator:
    """Of a model of two layers, or a drafter of one; the pools are the layers."""

    device = "cpu"

    layer_bytes = SIZE

    def __init__(self, layer_count: int, *, is_draft_worker: bool) -> None:
        self.layer_count, self.is_draft_worker = layer_count, is_draft_worker

    def _derive_pool_sizes(self, *, config: int) -> int:
        return config


def make(configurator: Configurator, *, sizes: int, **_: object) -> Any:
    """As SGLang makes them."""
    layers = [
        torch.zeros(sizes * configurator.layer_bytes, dtype=torch.int8, device="cpu")
        for _ in range(configurator.layer_count)
    ]
    pool = SimpleNamespace(c4_kv_pool=SimpleNamespace(layer_num=2))
    return SimpleNamespace(
        layers=layers, token_to_kv_pool=pool, req_to_token_pool=None, token_to_kv_pool_allocator=None
    )  # fmt: skip


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = with_stand_ins("hooks", monkeypatch)
    modules.dialect.HAS |= {"draft_buffers"}
    monkeypatch.setattr(modules, "_is_ours", lambda: True)
    monkeypatch.setattr(modules, "_receives_on_host", lambda: False)
    monkeypatch.setattr(modules, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    for name, value in (("memory", None), ("draft_runners", ()), ("pool_config", None), ("draft_scope", nullcontext)):
        monkeypatch.setattr(process, name, value)
    return {target.rpartition(".")[2]: hook for target, hook in modules.HOOKS} | {"modules": modules}


def worker_of(configurator: Configurator) -> dict[str, Any]:
    """Attributes of SGLang's worker of a drafter."""
    runner = SimpleNamespace(init_kv_cache_configurator=lambda: None, kv_cache_configurator=configurator)
    return {"_draft_model_runners": lambda: (runner,)}


def started(
    hooks: Any, server_args: ServerArgs, worker: dict[str, Any], drafter: Configurator, scope: Any = None
) -> list[torch.Tensor]:
    """The layers of a model and of its drafter, which SGLang allocates in this scope."""

    def make_pools(configurator: Configurator) -> list[torch.Tensor]:
        sizes = hooks["_derive_pool_sizes"](lambda _, config: config, configurator, config=1)
        return hooks["_init_pools"](
            make, configurator, sizes=sizes, req_to_token_pool=None, token_to_kv_pool_allocator=None
        ).layers

    def make_all(_: object) -> list[torch.Tensor]:
        layers = make_pools(Configurator(2, is_draft_worker=False))
        with scope or nullcontext():
            return layers + make_pools(drafter)

    scheduler = SimpleNamespace(server_args=server_args, draft_worker=SimpleNamespace(**worker))
    return hooks["init_memory_pools"](make_all, scheduler)


def test_a_drafters_layers_lie_behind_the_models(hooks: Any) -> None:
    drafter = Configurator(1, is_draft_worker=True)
    layers = started(hooks, ServerArgs("EAGLE"), worker_of(drafter), drafter)
    first = layers[0].data_ptr()
    assert [layer.data_ptr() - first for layer in layers] == [0, SIZE, 2 * SIZE]
    assert process.memory is not None
    assert process.memory.target(Extent(first, first + 3 * SIZE)).memory == "dram"


def test_with_hisparse_peers_can_write_each_tensor_of_the_host_and_a_drafters_layers(
    hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host pool is one tensor for each layer of 4, as DeepSeek V4's."""
    monkeypatch.setattr(hooks["modules"], "_receives_on_host", lambda: True)
    monkeypatch.setattr(hooks["modules"].dialect, "buffer_infos", lambda _: ([0], [0], [0]))
    for name in ("extent", "host_tensors", "host_memory"):
        monkeypatch.setattr(process, name, getattr(process, name))
    drafter = Configurator(1, is_draft_worker=True)
    layers = started(hooks, ServerArgs("EAGLE"), worker_of(drafter), drafter)
    own = torch.zeros(8, dtype=torch.uint8)
    hosts = [hooks["allocate"](lambda *_, **__: own, SimpleNamespace(), (8, 64), torch.uint8) for _ in range(3)]
    assert hosts[2] is own
    assert process.memory is not None
    assert process.extent is not None
    target = process.memory.target(process.extent)
    memories = [target.locate(tensor.data_ptr() + tensor.nbytes - 1)[1] for tensor in (*layers, *hosts[:2])]
    assert memories == ["hbm", "hbm", "hbm", "dram", "dram"]
    assert hosts[1].data_ptr() - hosts[0].data_ptr() == hosts[0].nbytes == 512


@pytest.mark.parametrize(("drafter", "has_scope"), [("DFLASH", True), ("EAGLE", False)])
def test_a_drafter_is_measured_in_the_scope_in_which_sglang_allocates_it(
    drafter: str, has_scope: bool, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DFLASH's has other ranks than the model with DP attention, and so layers of other sizes."""
    configurator = Configurator(1, is_draft_worker=True)

    @contextmanager
    def scope(layout: str) -> Generator[None]:
        assert layout == "a layout"
        configurator.layer_bytes = 2 * SIZE
        yield
        configurator.layer_bytes = SIZE

    hooks["modules"].dialect.HAS |= {"draft_layouts"}
    stand_in(monkeypatch, {"sglang.srt.speculative.spec_utils": {"draft_tp_context": scope}})
    worker = worker_of(configurator) | {"draft_parallel_layout": "a layout"}
    layers = started(
        hooks, ServerArgs(drafter), worker, configurator, scope("a layout") if has_scope else nullcontext()
    )
    first = layers[0].data_ptr()
    assert [layer.data_ptr() - first for layer in layers] == [0, SIZE, 2 * SIZE]
    assert len(layers[2]) == (2 * SIZE if has_scope else SIZE)


def test_a_version_without_it_is_refused_before_any_cache_is_made(hooks: Any) -> None:
    hooks["modules"].dialect.HAS = frozenset()
    scheduler = SimpleNamespace(server_args=ServerArgs("EAGLE"), draft_worker=object())
    with pytest.raises(ConfigError, match=r"speculative_algorithm: SGLang 0\.5\.17 does not report"):
        hooks["init_memory_pools"](lambda _: pytest.fail("a cache is made"), scheduler)


def test_hisparse_on_prefill_is_refused_likewise(hooks: Any) -> None:
    scheduler = SimpleNamespace(server_args=ServerArgs(disaggregation_mode="prefill", enable_hisparse=True))
    text = r"(?m)^enable_hisparse: prefill cannot hand over from its host pool: use it on decode alone$"
    with pytest.raises(ConfigError, match=text):
        hooks["init_memory_pools"](lambda _: pytest.fail("a cache is made"), scheduler)


@pytest.mark.parametrize("drafter", ["EAGLE", "EAGLE3", "STANDALONE", "DFLASH", "eagle"])
def test_a_drafter_with_kv_is_refused_where_requests_land_on_the_host(
    drafter: str, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any cache is made: the memory that is set aside has room for the model's host pool alone."""
    monkeypatch.setattr(hooks["modules"].dialect, "receives_on_host", lambda _: True)
    scheduler = SimpleNamespace(server_args=ServerArgs(drafter), draft_worker=object())
    text = rf"^disaggregation_decode_host_receive_threshold: the KV of a drafter \({drafter.upper()}\) cannot land in "
    with pytest.raises(ConfigError, match=text):
        hooks["init_memory_pools"](lambda _: pytest.fail("a cache is made"), scheduler)


@pytest.mark.parametrize(
    ("drafter", "mode", "on_host"),
    [("NGRAM", "decode", True), ("UNO", "decode", True), ("FROZEN_KV_MTP", "decode", True), (None, "decode", True),
     ("EAGLE", "prefill", True), ("EAGLE", "decode", False)],
)  # fmt: skip
def test_other_drafters_and_engines_start(
    drafter: str | None, mode: str, on_host: bool, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks["modules"].dialect, "receives_on_host", lambda _: on_host)
    worker = SimpleNamespace(**worker_of(Configurator(1, is_draft_worker=True)))
    scheduler = SimpleNamespace(server_args=ServerArgs(drafter, disaggregation_mode=mode), draft_worker=worker)
    assert hooks["init_memory_pools"](lambda _: "made", scheduler) == "made"


def test_a_drafter_without_kv_is_no_fact_that_peers_compare() -> None:
    facts = {name: drafter_with_kv(ServerArgs(name)) for name in ("EAGLE", "NGRAM", "FROZEN_KV_MTP", "UNO", None)}
    assert facts == {"EAGLE": "EAGLE", "NGRAM": "", "FROZEN_KV_MTP": "", "UNO": "", None: ""}
