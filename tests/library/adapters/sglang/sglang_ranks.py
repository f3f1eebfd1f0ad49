"""Ranks of two SGLang engines without SGLang: its KV pools as numpy arrays, described as its KVArgs describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdtransfer import ArenaMemory, DecodeClient, KVPoll, NodeSettings, PrefillClient, WriterOptions
from pdtransfer.adapters.kit.cache_memory import CacheMemory
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.sglang.decode import ReceivingSide
from pdtransfer.adapters.sglang.pools import Buffers, HeadCounts, KVPools, extent_of, kv_buffers, pools, state_buffers
from pdtransfer.adapters.sglang.prefill import SendingSide, Sent
from pdtransfer.adapters.sglang.rooms import Change, Uses
from pdtransfer.adapters.sglang.states import drop_empty_states
from pdtransfer.wire import Ranks
from tests.support.client_pair import LIMITS
from tests.support.waiting import wait_for

LAYERS, HEADS, WIDTH, SLOTS, REQUESTS, ITEM = 3, 4, 8, 128, 6, 24
AUX = bytes(range(64)) * 2
STATES = ("swa", "dsa", "mamba")


class Pool:
    """A rank's KV pools in `raw`, uint8: K and V by layer, sliding windows', items of pages and of requests."""

    conv_sections: tuple[int, ...] | None = None  # of the model
    drafter_total: int | None = None  # KV heads of a drafter, if it has others than the model
    of_rows: tuple[str, ...] = ("kv", "swa")  # whose buffers have a row for each token, and pages of them as items

    def __init__(self, raw: np.ndarray | None, page_size: int, heads: int, states: Sequence[str], latent: bool) -> None:
        self.page_size, self.states = page_size, list(states)
        shapes = self.shapes(heads, latent)
        sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in shapes.items()}
        self.raw = np.zeros(sum(sizes.values()), np.uint8) if raw is None else raw[: sum(sizes.values())]
        self.arrays: dict[str, np.ndarray] = {}
        at = 0
        for name, (shape, dtype) in shapes.items():
            self.arrays[name] = self.raw[at : at + sizes[name]].view(dtype).reshape(shape)
            at += sizes[name]

    def shapes(self, heads: int, latent: bool) -> dict[str, Any]:
        """Of the arrays, in their order, and their dtypes."""
        pages = SLOTS // self.page_size
        kv = (1 if latent else 2, LAYERS, SLOTS, 1 if latent else heads, WIDTH), np.float32
        index = (LAYERS, pages, ITEM * self.page_size), np.uint8
        known: dict[str, Any] = {
            "kv": kv, "swa": kv, "dsa": index, "minimax_index_k": index,
            "minimax_dense_kv": ((LAYERS, pages, ITEM * self.page_size * heads), np.uint8),
            "mamba": ((LAYERS, REQUESTS, ITEM), np.uint8),
        }  # fmt: skip
        return {name: known[name] for name in ("kv", *self.states)}

    def to_host(self, memory: Callable[[int], np.ndarray]) -> None:
        """The model's KV is in host memory from now on, as with HiSparse."""
        kv = self.kv
        self.arrays["kv"] = memory(kv.nbytes).view(kv.dtype).reshape(kv.shape)

    @property
    def kv(self) -> np.ndarray:
        """(kinds, layers, slots, heads, width)."""
        return self.arrays["kv"]

    def listed(self, name: str) -> list[np.ndarray]:
        """The buffers of one kind, each (rows, ...) or (items, ...)."""
        array = self.arrays[name]
        return list(array.reshape(-1, *array.shape[2:]) if name in self.of_rows else array)

    def _buffers(self, name: str) -> Buffers:
        arrays, rows = self.listed(name), self.page_size if name in self.of_rows else 1
        items = [each[0].nbytes * rows for each in arrays]
        return Buffers([each.ctypes.data for each in arrays], [each.nbytes for each in arrays], items)

    @property
    def args(self) -> Any:
        """SGLang's KVArgs of this pool."""
        kv, states = self._buffers("kv"), [self._buffers(name) for name in self.states]
        return SimpleNamespace(
            page_size=self.page_size, kv_data_ptrs=kv.addresses, kv_data_lens=kv.byte_counts,
            kv_item_lens=kv.item_bytes, kv_layer_ids=[], prefill_start_layer=0, num_draft_entries=0,
            aux_item_lens=[64, 64], state_types=self.states, state_data_ptrs=[state.addresses for state in states],
            state_data_lens=[state.byte_counts for state in states],
            state_item_lens=[state.item_bytes for state in states],
            state_layer_ids=[[] for _ in states], swa_kv_cache_layout="nhd", mla_compression_ratios=None,
        )  # fmt: skip


def stage_of(kv_layers: Sequence[int], state_layers: Sequence[int]) -> type[Pool]:
    """Pools of a pipeline stage that has KV of these layers, and states of those. SGLang's KVArgs list the states of
    other stages without buffers."""

    class StagePool(Pool):
        @property
        def args(self) -> Any:
            args = super().args
            chosen = [*kv_layers, *(LAYERS + layer for layer in kv_layers)]  # K, then V
            for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
                vars(args)[name] = [vars(args)[name][index] for index in chosen]
            for name in ("state_data_ptrs", "state_data_lens", "state_item_lens"):
                vars(args)[name] = [[values[layer] for layer in state_layers] for values in vars(args)[name]]
            args.kv_layer_ids, args.state_layer_ids = (
                [*kv_layers, *kv_layers],
                [list(state_layers) for _ in self.states],
            )
            args.state_types = list(args.state_types)
            drop_empty_states(args)
            return args

    return StagePool


RATIOS, HOST_PAGES = [0, 4, 128, 4], 50


class CompressedPool(Pool):
    """DeepSeek V4's of these ratios, as SGLang lists it: kind by kind, each a buffer for each of its layers. Kinds have
    items of their own sizes, and not all the same number of them."""

    of_rows = ()

    def __init__(
        self, raw: np.ndarray | None, page_size: int, heads: int = 1, states: Sequence[str] = (), latent: bool = True
    ) -> None:
        super().__init__(raw, page_size, heads, states, latent)
        self.items: dict[str, list[np.ndarray]] = {}  # of each buffer (items, bytes)
        for name, array in self.arrays.items():
            self.items.setdefault(name.partition(" ")[0], []).extend(array)

    def shapes(self, heads: int, latent: bool) -> dict[str, Any]:
        pages, fours, wides = SLOTS // self.page_size, RATIOS.count(4), RATIOS.count(128)
        known = {
            "kv": [(fours, pages + 3, 72)], "kv_device": [(fours, pages + 3, 24), (wides, pages + 9, 8)],
            "swa": [(len(RATIOS), pages, 104), (fours, pages + 1, 48), (fours, pages + 1, 16)],
            "swa_draft": [(1, pages, 104)], "c128_state": [(wides, REQUESTS, 64)],
        }  # fmt: skip
        names = "kv", "kv_device", *self.states
        return {f"{name} {part}": (shape, np.uint8) for name in names for part, shape in enumerate(known[name])}

    def to_host(self, memory: Callable[[int], np.ndarray]) -> None:
        """The rows of 4 are, in pages of their own."""
        shape = len(self.items["kv"]), HOST_PAGES, 72
        self.items["kv"] = list(memory(int(np.prod(shape))).reshape(shape))

    def listed(self, name: str) -> list[np.ndarray]:
        return self.items["kv"] + self.items["kv_device"] if name == "kv" else self.items[name]

    @property
    def args(self) -> Any:
        args = super().args
        args.state_types = [name.removesuffix("_draft") for name in self.states]
        args.mla_compression_ratios, args.swa_kv_cache_layout = RATIOS, None
        return args


def model_of(ranks: Ranks, latent: bool = False, total: int = HEADS) -> HeadCounts:
    """A model of this many KV heads, or of one latent."""
    heads = Heads(1 if latent else total, ranks)
    return HeadCounts(latent, heads, heads)


@dataclass
class Rank:
    """One rank of either engine, and what its side has reported."""

    pool: Pool
    host: Pool | None
    side: Any
    client: Any
    states: dict[int, list[Change]] = field(default_factory=dict)
    aux: dict[int, bytes] = field(default_factory=dict)

    def turn(self) -> None:
        for change in self.side.turn():
            self.states.setdefault(change.bootstrap_room, []).append(change)

    def state(self, room: int) -> KVPoll:
        """The latest state."""
        self.turn()
        return self.states[room][-1].state if room in self.states else KVPoll.BOOTSTRAPPING


@dataclass
class World:
    """Both engines."""

    prefill: list[Rank]
    decode: list[Rank]

    @property
    def sources(self) -> list[str]:
        return [rank.client.endpoint for rank in self.prefill]

    def expect(self, room: int, pages: Any, **more: Any) -> None:
        """Every decode rank asks, as its scheduler does with `send_metadata`."""
        given = {"prefix": 0, "states": [None] * len(self.decode[0].pool.states), "aux_index": 3} | more
        for rank in self.decode:
            rank.side.expect(room, np.array(pages, np.int32), sources=self.sources, **given)

    def begin(self, room: int) -> Sent:
        """Every prefill rank has a sender."""
        first, *_ = [rank.side.begin(room) for rank in self.prefill]
        return first

    def push(self, room: int, pages: Any, **more: Any) -> None:
        for rank in self.prefill:
            rank.side.push(room, np.array(pages, np.int32), **{"first_page": 0} | more)

    def until(self, room: int, state: KVPoll, ranks: list[Rank] | None = None) -> None:
        ranks = self.prefill + self.decode if ranks is None else ranks
        wait_for(lambda: all(rank.state(room) is state for rank in ranks))

    def meet(self, room: int, pages: Any, **more: Any) -> None:
        """Decode has asked, and prefill may send."""
        self.expect(room, pages, **more)
        self.begin(room)
        self.until(room, KVPoll.WAITING_FOR_INPUT, self.prefill)

    def hand_over(self, room: int, *, source: Any, target: Any, aux: bytes = AUX, **more: Any) -> None:
        """A whole request, from decode's ask to both ends."""
        self.meet(room, target, **more.pop("decode", {}))
        self.push(room, source, aux=aux, **more)
        self.until(room, KVPoll.SUCCESS)


def rows(ranks: list[Rank], slots: Any, name: str = "kv", host: bool = False) -> np.ndarray:
    """(kinds, layers, len(slots), heads, width) over all ranks."""
    return np.concatenate([(rank.host if host else rank.pool).arrays[name][:, :, slots] for rank in ranks], axis=3)


def slots_of(pages: Any, page_size: int) -> np.ndarray:
    """The slots of pages, one a token."""
    return (np.array(pages)[:, None] * page_size + np.arange(page_size)).reshape(-1)


@contextmanager
def world(
    *, prefill_tp: int = 1, prefill_dp: int = 1, decode_tp: int = 1, prefill_page: int = 4, decode_page: int = 4,
    states: Sequence[str] = (), latent: bool = False, host: bool = False, copied_up: bool = False,
    hisparse: bool = False, seed: int = 1,
    decode_weights: bytes = b"w", pool_type: type[Pool] = Pool,
    prefill_stages: Sequence[type[Pool]] = (), decode_stages: Sequence[type[Pool]] = (),
) -> Iterator[World]:  # fmt: skip
    """Engines of this many tensor parallel ranks, and this many of prefill; with `host`, decode has a host pool too,
    and with `hisparse` its KV, or some of it, in host memory alone.
    The `stages` are the pools of an engine's pipeline stages, if it has several, of one rank each."""
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {"model": "m", "weights": b"w", "limits": LIMITS}
    latent_data = None
    made = World([], [])
    with ExitStack() as stack:
        for index in range(len(prefill_stages) or prefill_tp * prefill_dp):
            ranks, prefill_pool = placed(index, prefill_tp, prefill_stages, pool_type)
            pool = prefill_pool(None, prefill_page, HEADS // prefill_tp, states, latent)
            pool.raw[:] = random.integers(0, 250, len(pool.raw), np.uint8)
            if latent:  # every rank has the same
                latent_data = pool.raw.copy() if latent_data is None else latent_data
                pool.raw[:] = latent_data
            base = pool.raw.ctypes.data
            described = described_of(pool, ranks, latent, lambda _, base=base: (base, "dram"))
            client = stack.enter_context(PrefillClient(
                NodeSettings(node=f"p{index}", ranks=ranks, **options), described.components,
                writer=WriterOptions(pool_address=base), replicas=described.replicas,
            ))  # fmt: skip
            made.prefill.append(Rank(pool, None, SendingSide(client, described, time_left_s=600.0), client))
        for index in range(len(decode_stages) or decode_tp):
            ranks, decode_pool = placed(index, decode_tp, decode_stages, pool_type)
            shape = decode_page, HEADS // decode_tp, states, latent
            if host or copied_up or hisparse:
                pool = decode_pool(None, *shape)
                memory = CacheMemory([len(pool.raw)])
                extent = extent_of([kv_buffers(pool.args), *state_buffers(pool.args)], None)
                host_pool = decode_pool(memory.beside(extent, len(pool.raw)).numpy(), *shape) if host else None
                if hisparse:
                    pool.to_host(lambda size, memory=memory, extent=extent: memory.beside(extent, size).numpy())
                target = memory.target(extent)
                arena, locate = target.arena, target.locate
            else:
                arena = ArenaMemory.create(1 << 20)
                pool, host_pool = decode_pool(np.frombuffer(arena.mapping.view, np.uint8), *shape), None
                start = arena.mapping.address
                locate = lambda _, start=start: (start, "dram")  # noqa: E731
            described = described_of(pool, ranks, latent, locate)
            components = described.components
            if host_pool is not None:
                components += described_of(host_pool, ranks, latent, locate).components
            client = stack.enter_context(DecodeClient(
                NodeSettings(node=f"d{index}", ranks=ranks, **options | {"weights": decode_weights}), components, arena,
                engine_slots=True, prefix_cache=False, enable_hisparse=host, verify=True,
                open_ended=["kv"] if hisparse else [],
            ))  # fmt: skip
            aux: dict[int, bytes] = {}
            side = ReceivingSide(client, described, Uses(99), put_aux=aux.__setitem__, aux_bytes=128, time_left_s=600.0)
            made.decode.append(Rank(pool, host_pool, side, client, aux=aux))
        yield made


def placed(index: int, tp_size: int, stages: Sequence[type[Pool]], pool_type: type[Pool]) -> tuple[Ranks, type[Pool]]:
    """A rank of an engine, and its pool."""
    if stages:
        return Ranks(0, 1, index, len(stages)), stages[index]
    return Ranks(index % tp_size, tp_size), pool_type


def described_of(pool: Pool, ranks: Ranks, latent: bool, locate: Callable[[int], Any]) -> KVPools:
    """The components of a pool."""
    drafter = Heads(pool.drafter_total, ranks) if pool.drafter_total else None
    model = replace(model_of(ranks, latent), conv_sections=pool.conv_sections, drafter=drafter, dtype="float32")
    args = pool.args
    return pools(args, model, locate, kv=kv_buffers(args), states=state_buffers(args))
