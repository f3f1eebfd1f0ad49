"""DeepSeek V4's compressed KV cache: what SGLang lists of it becomes components, and is sent by whole pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer import KVPoll
from pdtransfer.adapters.kit.cache_memory import CacheMemory
from pdtransfer.adapters.sglang.pools import DRAFT_LAYER, KVPools, extent_of, kv_buffers, pools, state_buffers
from pdtransfer.errors import ConfigError, LocalProtocolError
from pdtransfer.wire import Ranks
from tests.library.adapters.sglang.sglang_modules import ROOM, DisaggregationMode, ServerArgs, with_stand_ins
from tests.library.adapters.sglang.sglang_ranks import AUX, SLOTS, CompressedPool, Rank, World, model_of, world
from tests.support.covered import check_covered

STATES = ("swa", "c128_state")


def made_of(pool: CompressedPool, ranks: Ranks | None = None, **changed: Any) -> KVPools:
    args, base = pool.args, pool.raw.ctypes.data
    vars(args).update(changed)
    return pools(
        args, model_of(ranks or Ranks(), latent=True), lambda _: (base, "dram"),
        kv=kv_buffers(args), states=state_buffers(args),
    )  # fmt: skip


def test_each_kind_of_buffer_is_planes_of_its_layers() -> None:
    pool = CompressedPool(None, 4, states=("swa", "c128_state", "swa_draft"))
    pool.raw[:] = np.random.default_rng(2).integers(0, 256, len(pool.raw), np.uint8)
    components = made_of(pool).components
    kinds = {
        component.name: [(plane.kind, plane.layer) for plane in component.layout.planes] for component in components
    }
    assert kinds == {
        "kv": [("c4", 1), ("c4", 3)],
        "kv_device": [("c4_index", 1), ("c4_index", 3), ("c128", 2)],
        "swa": [
            *(("window", layer) for layer in range(4)),
            ("c4_state", 1), ("c4_state", 3), ("c4_index_state", 1), ("c4_index_state", 3),
        ],
        "c128_state": [("c128_state", 2)],
        "swa_draft": [("window", DRAFT_LAYER)],
    }  # fmt: skip
    # A row is an item. Those that only some kinds have are nobody's.
    pages = SLOTS // 4
    assert [(component.span.kind, component.tokens_per_row, component.layout.slots) for component in components] == [
        ("all", 4, pages + 3), ("all", 4, pages + 3), ("all", 4, pages), ("once", 1, 6), ("all", 4, pages),
    ]  # fmt: skip
    for component in components:
        for index, (plane, items) in enumerate(zip(component.layout.planes, pool.items[component.name], strict=True)):
            row = pool.raw[component.layout.address(index, 5) :][: plane.row_bytes]
            assert np.array_equal(row, items[5])


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
def test_any_prefill_ranks_share_what_a_decode_rank_has(sizes: tuple[int, int]) -> None:
    """All ranks have the same."""
    check_covered(lambda rank, size: made_of(CompressedPool(None, 4, states=STATES), Ranks(rank, size)), *sizes)


@pytest.mark.parametrize(
    ("states", "changed", "text"),
    [
        ((), {"mla_compression_ratios": [0, 1, 2, 4]}, "compression by 1, 2 is not supported; must be 0, 4, 128"),
        (
            (), {"mla_compression_ratios": [4, 4, 128, 4]},
            "kv_device: 2 buffers are not 3 of c4_index and 1 of c128, as DeepSeek V4's layers have",
        ),
        (("swa",), {"mla_compression_ratios": [4, 4, 4, 4]}, "kv_device: 1 buffers are not 4 of c4_index"),
        ((), {"kv_data_ptrs": [1], "kv_data_lens": [72], "kv_item_lens": [72]}, "kv: 1 buffers are not 2 of c4, as"),
        (("c128_state",), {"state_types": ["swa_ring"]}, "state swa_ring: is not supported; must be one each of c128_"),
        (("c128_state",), {"state_types": ["swa"]}, "swa: 1 buffers are not 2 of c4_state and 2 of c4_index_state"),
        (("swa", "swa_draft", "swa_draft"), {}, "state swa: is not supported"),
        (STATES, {"state_types": ["c128_state", "c128_state"]}, "state c128_state: is not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_the_reason(
    states: tuple[str, ...], changed: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        made_of(CompressedPool(None, 4, states=states), **changed)


def landed(sources: list[Rank], targets: list[Rank], name: str, source: list[int], target: list[int]) -> bool:
    """Whether items of one component are decode's, on all ranks, and its others are still zero."""
    for rank in targets:
        assert isinstance(rank.pool, CompressedPool)
        assert isinstance(sources[0].pool, CompressedPool)
        for computed, items in zip(sources[0].pool.items[name], rank.pool.items[name], strict=True):
            others = np.setdiff1d(np.arange(len(items)), target)
            if not np.array_equal(computed[source], items[target]) or items[others].any():
                return False
    return True


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("waiting", [True, False])
def test_pages_and_states_are_sent_by_their_own_indices(sizes: tuple[int, int], *, waiting: bool) -> None:
    """A request of three pages, two of them behind decode's prefix, in chunks; where its length is a multiple of 128 no
    token waits for its row, and SGLang names no state of the request."""
    with world(prefill_tp=sizes[0], decode_tp=sizes[1], states=STATES, latent=True, pool_type=CompressedPool) as made:
        ours, theirs = ([np.array([6, 1]), np.array(row)] for row in (([4], [2]) if waiting else ([], [])))
        theirs[0] = np.array([3, 0])
        made.meet(7, [1, 8], prefix=4, states=theirs)
        assert made.prefill[0].side.prefix(7) == 4
        made.push(7, [5])
        made.push(7, [2], first_page=1, aux=AUX, states=ours)
        made.until(7, KVPoll.SUCCESS)
        assert landed(made.prefill, made.decode, "kv", [5, 2], [1, 8])
        assert landed(made.prefill, made.decode, "kv_device", [5, 2], [1, 8])
        assert landed(made.prefill, made.decode, "swa", [6, 1], [3, 0])
        assert landed(made.prefill, made.decode, "c128_state", *(([4], [2]) if waiting else ([], [])))


@pytest.mark.parametrize(
    ("host", "device"), [([40, 31], [1, 8]), ([40], [1, 8]), ([], [1])],
    ids=["as many pages", "no row of 4 in the last page", "no row of 4 at all"],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
def test_with_hisparse_rows_of_4_land_in_host_pages_and_the_rest_on_the_device(
    sizes: tuple[int, int], host: list[int], device: list[int]
) -> None:
    """SGLang allocates a host page once a row of it is complete."""
    options: dict[str, Any] = {"states": STATES, "latent": True, "pool_type": CompressedPool, "hisparse": True}
    with world(prefill_tp=sizes[0], decode_tp=sizes[1], **options) as made:
        source = [5, 2][: len(device)]
        given = {"device_pages": np.array(device), "states": [np.array([3]), np.array([2])]}
        made.hand_over(7, source=source, target=host, decode=given, states=[np.array([6]), np.array([4])])
        assert {part.component.name: part.component.memory for part in made.decode[0].side._pools.parts} == {
            "kv": "dram", "kv_device": "hbm", "swa": "hbm", "c128_state": "hbm",
        }  # fmt: skip
        assert landed(made.prefill, made.decode, "kv", source[: len(host)], host)
        assert landed(made.prefill, made.decode, "kv_device", source, device)
        assert landed(made.prefill, made.decode, "swa", [6], [3])
        assert landed(made.prefill, made.decode, "c128_state", [4], [2])


def test_decodes_receiver_takes_pages_of_the_host_and_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the plugin's own manager: the last page has no row of 4."""
    backend = with_stand_ins("backend", monkeypatch, enable_hisparse=True, device="cpu")
    monkeypatch.setattr(backend.dialect, "require", lambda *_: None)
    monkeypatch.setattr(backend, "version", lambda _: "0.5.23")
    pool, refused = CompressedPool(None, 4), list[str]()
    memory, extent = CacheMemory([len(pool.raw)]), extent_of([kv_buffers(pool.args)], None)
    pool.to_host(lambda size: memory.beside(extent, size).numpy())
    monkeypatch.setattr(backend.process, "memory", memory)
    monkeypatch.setattr(backend.process, "extent", extent)
    monkeypatch.setattr(backend, "sources_of", lambda *_: ["tcp://[::1]:1"])
    for name, does in {
        "_facts": lambda _: {"cache": "uint8"},
        "_start_heartbeat_checker_thread": lambda _: None, "record_failure": lambda *given: refused.append(given[-1]),
    }.items():  # fmt: skip
        monkeypatch.setattr(backend.Manager, name, does, raising=False)
    server_args = ServerArgs(enable_hisparse=True, served_model_name="m")
    manager = backend.Manager(pool.args, DisaggregationMode.DECODE, server_args)
    try:
        for host in ([40, 31], [40]):
            receiver = backend.Receiver(manager, "host:1", ROOM)
            receiver.send_metadata(np.array(host), 3, device_kv_indices=np.array([1, 8, 2]))
    finally:
        manager.close()
    assert refused == ["its hand-off is refused: kv: 1 host pages, beside 3 pages of the device"]


@pytest.mark.parametrize("host", [[40], [40, 31, 2, 3]], ids=["too few", "too many"])
@pytest.mark.given(states=STATES, latent=True, pool_type=CompressedPool, hisparse=True)
def test_host_pages_of_another_number_are_refused(engines: World, host: list[int]) -> None:
    with pytest.raises(LocalProtocolError, match=rf"^kv: {len(host)} host pages, beside 3 pages of the device$"):
        engines.expect(7, host, device_pages=np.array([1, 8, 2]), states=[np.array([3]), np.array([2])])


@pytest.mark.given(states=STATES, latent=True, pool_type=CompressedPool)
def test_a_state_that_only_decode_waits_for_fails_the_request(engines: World) -> None:
    engines.meet(7, [1], states=[np.array([3]), np.array([2])])
    engines.push(7, [5], aux=AUX, states=[np.array([6]), np.array([], np.int64)])
    engines.until(7, KVPoll.FAILED)


@pytest.mark.given(prefill_page=8, states=STATES, latent=True, pool_type=CompressedPool)
def test_pages_of_unequal_sizes_are_refused(engines: World) -> None:
    engines.expect(7, [1], states=[np.array([3]), np.array([2])])
    engines.begin(7)
    engines.until(7, KVPoll.FAILED, engines.decode)
    assert "tokens_per_row" in engines.decode[0].states[7][-1].reason
