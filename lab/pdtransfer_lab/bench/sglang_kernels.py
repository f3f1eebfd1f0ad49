"""SGLang's kernels and ours on one GPU: the same bytes in the same memory, graphs on both sides, replayed in turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pdtransfer.errors import WorldError
from pdtransfer.hisparse.swap import HotBuffers, SwapPlan, swap_plan
from pdtransfer.kernels.gpu import Gpu, gpu_at
from pdtransfer.kernels.kv_copy import PlannedCopy, kv_copy
from pdtransfer.kernels.pools import GpuArray, PageSlots, PinnedCancel, Pool
from pdtransfer.kernels.set_mla import set_mla_kv_buffer
from pdtransfer.layout.layout import Layout, Plane

from .models import PAGE_SIZE, latent_layout
from .replays import Replays, registered
from .report import Figures, Line
from .side_by_side import Comparison, Contender, compare, line

PACKAGE = "sglang==0.5.23"
_CAPABILITY = 9, 0
_RUNS = 9
_ROW = 1_152
_POISON = -0x5A5A_5A5A_5A5A_5A5B  # eight bytes that nobody has written
_BLOCKS = 4  # of our pushes, which is kv_copy's own choice
_REGISTER_QUOTAS = (2, 4, 8, 16, 32)  # blocks of SGLang's register kernel; its default is the first
_TMA_QUOTAS = (4, 8, 16)  # and of its bulk copies through shared memory
_SWAP_THREADS = (960, 1_024, 512)  # of a block of SGLang's swap-in; its engine's default is the first
_TURN_BYTES = 256 << 20  # carried by one graph, or more: what one replay leaves in a cache, the next does not find
_TURNS_MAX = 122
_SETS_BYTES = 256 << 20  # of new rows that are used in turn: beyond the GPU's L2
_SETS_MAX = 16
_SCATTERS = 96
_ARENA_BYTES = 3 << 30
_TOP = 2_048


class CopySize(NamedTuple):
    """Slots of a pool on the GPU and of one in host memory, both of this many layers of 1,152-byte rows."""

    slots: int = 16_384
    layers: int = 61


class SwapSize(NamedTuple):
    """Positions of a step, places of a request, and its tokens."""

    top: int = _TOP
    hot: int = 4_096
    length: int = 20_000


class CopyCase(NamedTuple):
    """A push to host memory or a load from there: of all layers, or of one layer after another."""

    push: bool
    layout: str  # of the host memory; the GPU's is layer_first
    whole: bool
    tokens: int
    paged: bool  # tokens lie in whole pages, the pages anywhere; otherwise each token lies anywhere

    @property
    def name(self) -> str:
        parts = ("push" if self.push else "load", self.layout, "" if self.whole else "layer", self.tokens)
        return "_".join(str(part) for part in (*parts, "pages" if self.paged else "") if part)

    @property
    def what(self) -> str:
        way = "push to" if self.push else "load from"
        return f"{way} {self.layout}, {self.tokens:,} tokens{'' if self.whole else ' of a layer'}, {self._slots}"

    @property
    def _slots(self) -> str:
        return f"pages of {PAGE_SIZE}" if self.paged else "slots anywhere"


class SwapCase(NamedTuple):
    """A step's missing rows, one plane, from host memory; every request lacks this many of its positions."""

    row: int
    batch: int
    misses: int
    steps: int  # in turn: what a step swaps out has been asked for again by then

    @property
    def name(self) -> str:
        return f"swap_{self.row}_{self.batch}_{self.misses}"

    @property
    def what(self) -> str:
        return f"swap-in {self.row:,} B, batch {self.batch}, {self.misses} misses a request"


_LAYOUTS = "page_first", "layer_first"
PUSHES = (
    *(CopyCase(True, layout, True, tokens, False) for layout in _LAYOUTS for tokens in (16, 64, 256, 1_024, 8_192)),
    *(CopyCase(True, layout, True, tokens, True) for layout in _LAYOUTS for tokens in (64, 1_024, 8_192)),
    *(CopyCase(True, layout, False, tokens, False) for layout in _LAYOUTS for tokens in (64, 256, 1_024)),
)
LOADS = (
    *(CopyCase(False, layout, True, tokens, False) for layout in _LAYOUTS for tokens in (64, 1_024, 8_192)),
    *(CopyCase(False, layout, False, tokens, False) for layout in _LAYOUTS for tokens in (1_024, 8_192)),
    *(CopyCase(False, layout, False, tokens, True) for layout in _LAYOUTS for tokens in (1_024, 8_192)),
)
SWAPS = (
    *(SwapCase(row, batch, _TOP // 5, 16) for row in (656, 1_152) for batch in (1, 10, 100)),
    *(SwapCase(row, batch, 2, 1_100) for row in (656, 1_152) for batch in (1, 10, 100)),
)
SCATTERS = (1, 32, 512, 2_048, 8_192, 16_384)


def _silent(_: str) -> None:
    pass


class Opponents(NamedTuple):
    """SGLang's functions, by their public names."""

    version: str
    copy_layers: Any
    copy_layer: Any
    can_copy: Any
    swap_in: Any
    scatter: Any

    @classmethod
    def find(cls) -> Opponents:
        """Raises WorldError, with what to install, if this Python cannot import them."""
        try:
            hicache, hisparse, scatter = (
                import_module(f"sglang.kernels.ops.kvcache.{name}")
                for name in ("hicache", "hisparse", "set_mla_kv_buffer")
            )
            return cls(
                _version(), hicache.transfer_hicache_all_layer_mla, hicache.transfer_hicache_one_layer_mla,
                hicache.can_use_hicache_jit_kernel, hisparse.load_cache_to_device_buffer_mla,
                scatter.set_mla_kv_buffer,
            )  # fmt: skip
        except (ImportError, AttributeError) as error:
            text = str(error).splitlines()[0]
            raise WorldError(f"--beside sglang: {text}: pip install {PACKAGE}; it compiles with nvcc") from None


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of unknown version"


def measure(*, runs: int = _RUNS, progress: Callable[[str], None] = _silent) -> Figures:
    """On GPU 0, which is sm_90 or later. Every way to do the work does it once and its bytes are looked at. Then graphs
    of launches, of ours and of SGLang's best way, are replayed in turn, `runs` of each (A B, B A, ...). The best is
    that of 3 such rounds of all its ways. Times are medians of one launch, ratios are SGLang's to ours.

    Copies are one launch of 61 or 1 layers of 1,152-byte rows between a layer_first pool on the GPU and a registered
    memfd; other slots each launch. Ours push with 4 blocks and a cancel word, and load with 32 blocks. SGLang's ways
    are its register kernel with 2 to 32 blocks and its TMA kernel with 4 to 16. Its default is the register kernel with
    2 blocks for tokens that lie anywhere, and the TMA kernel with 4 for pages. `swap` is a step, K 2,048 of 20,000
    tokens, hot 4,096, plan and copy; its ways are blocks of 960 (default), 1,024 and 512 threads. `set_mla` scatters
    rows of 1,024 + 128 bytes. `share` is the time of one contiguous copy of the same bytes to ours.
    """
    opponents = Opponents.find()
    gpu = gpu_at(0)
    if gpu.capability < _CAPABILITY:
        raise WorldError(f"--beside sglang: GPU 0 is {gpu.architecture}, and its kernels need sm_90")
    import torch

    where, clock = torch.device("cuda", 0), Replays(gpu)
    figures: Figures = {"card": gpu.architecture, "sglang": opponents.version}
    with ExitStack() as stack:
        address = stack.enter_context(registered(gpu, _ARENA_BYTES))
        arena: Any = torch.as_tensor(GpuArray(address, _ARENA_BYTES, "|u1"), device=where)
        build(opponents, arena, where)
        progress("SGLang's kernels are compiled")
        for comparison in _comparisons(opponents, gpu, arena, where):
            figures |= compare(clock, comparison, runs=runs)
            row = line(comparison.name, comparison.what, figures)
            progress(": ".join(column.format(**figures) for column in row))
    return figures


def lines(figures: Figures) -> tuple[Line, ...]:
    """The table: a row for each comparison."""
    scatters = [(f"set_mla_{rows}", _scatter_text(rows)) for rows in SCATTERS]
    rows = [(case.name, case.what) for case in (*PUSHES, *LOADS, *SWAPS)] + scatters
    head = Line("SGLang's time to ours", "{card}", "SGLang {sglang}; above 1 ours is faster")
    return head, *(line(name, what, figures) for name, what in rows)


def _comparisons(opponents: Opponents, here: Gpu, arena: Any, where: Any) -> Iterable[Comparison]:
    copies = Copies(opponents, CopySize(), arena, where, cancel=PinnedCancel(0))
    for case in (*PUSHES, *LOADS):
        yield copies.comparison(case, here)
    del copies
    for case in SWAPS:
        yield swap_comparison(opponents, case, SwapSize(), arena, where)
    for rows in SCATTERS:
        yield scatter_comparison(opponents, rows, where, here)


def build(opponents: Opponents, arena: Any, where: Any) -> None:
    """Has SGLang compile all the kernels that are timed, at once: each takes a process of its own."""
    first = SwapCase(0, 1, 2, 2)
    works: list[Callable[[], object]] = [
        partial(opponents.can_copy, element_size=_ROW, block_quota=quota, page_size=page_size)
        for page_size, quotas in ((1, _REGISTER_QUOTAS), (PAGE_SIZE, _TMA_QUOTAS))
        for quota in quotas
    ]
    for row in sorted({case.row for case in SWAPS}):
        swaps = swap_comparison(opponents, first._replace(row=row), SwapSize(), arena, where).theirs
        works += [partial(swap.launch, 0, 0) for swap in swaps]
    works += [partial(scatter.launch, 0, 0) for scatter in scatter_comparison(opponents, 1, where, slots=64).theirs]
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.exception()  # what does not build has a note in its rows


@contextmanager
def _on(stream: int) -> Generator[None]:
    """Makes the stream torch's current one, which SGLang launches on."""
    if not stream:
        yield
        return
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        yield


def _wait(where: Any) -> None:
    import torch

    if where.type == "cuda":
        torch.cuda.synchronize(where)


# Copies between a GPU and host memory


class Copies:
    """A pool on the GPU and one in host memory, each with a row of every layer in each of its slots."""

    def __init__(self, opponents: Opponents, size: CopySize, arena: Any, where: Any, cancel: Any = None) -> None:
        """`arena` is host memory as the GPU sees it, uint8 (bytes,)."""
        import torch

        self._opponents, self._size, self._where, self._cancel = opponents, size, where, cancel
        byte_count = size.layers * size.slots * _ROW
        self._pool: Any = torch.empty(byte_count // 8, dtype=torch.int64, device=where)
        self._arena = arena[:byte_count].view(torch.int64)

    def comparison(self, case: CopyCase, here: Gpu | None = None) -> Comparison:
        """The first turn's bytes are checked, with everything around them. `here` has a copy engine to set beside."""
        import torch

        source, target = (self._pool, self._arena) if case.push else (self._arena, self._pool)
        source.random_()
        layers = self._size.layers if case.whole else 1
        byte_count = layers * case.tokens * _ROW
        turns = max(2, min(_TURNS_MAX, _TURN_BYTES // byte_count))
        sets = [self._slots(case) for _ in range(-(-turns * layers // self._size.layers))]

        def at(turn: int) -> tuple[int, _SlotSet]:
            """The first layer and the slots of a turn."""
            return (
                (0, sets[turn % len(sets)])
                if case.whole
                else (turn % self._size.layers, sets[turn // self._size.layers])
            )

        def roof(stream: int) -> None:
            assert here is not None
            for start in range(0, byte_count, 256 << 20):  # the arena is registered in such chunks
                part = min(256 << 20, byte_count - start)
                here.copy(target.data_ptr() + start, source.data_ptr() + start, part, stream)

        right = self._after_first(case, sets[0])

        def problem(launch: Callable[[int, int], object]) -> str:
            target.fill_(_POISON)
            _wait(self._where)
            launch(0, 0)
            _wait(self._where)
            return "" if torch.equal(target, right) else "other bytes"

        def contender(name: str, launch: Callable[[int, int], object]) -> Contender:
            return Contender(name, launch, partial(problem, launch))

        return Comparison(
            name=case.name, what=case.what, ours=contender("ours", self._ours(case, at)),
            theirs=tuple(contender(name, launch) for name, launch in self._theirs(case, at)),
            turns=turns, byte_count=byte_count, roof=None if here is None else roof,
        )  # fmt: skip

    def _slots(self, case: CopyCase) -> _SlotSet:
        import torch

        granule = PAGE_SIZE if case.paged else 1

        def drawn() -> Any:
            return torch.randperm(self._size.slots // granule, device=self._where)[
                : case.tokens // granule
            ].contiguous()

        pool, arena = drawn(), drawn()
        if not case.paged:
            return _SlotSet(pool, arena, pool, arena)
        rows = torch.arange(granule, device=self._where)
        expanded = ((pages[:, None] * granule + rows).view(-1) for pages in (pool, arena))
        return _SlotSet(PageSlots(kernel_view(pool)), PageSlots(kernel_view(arena)), *expanded)

    def _ours(self, case: CopyCase, at: Callable[[int], tuple[int, _SlotSet]]) -> Callable[[int, int], object]:
        page_size = PAGE_SIZE if case.paged else 1
        size, ordinal = self._size, self._where.index
        pool, arena = (
            Pool(
                layout=latent_layout(layout, slots=size.slots, page_size=page_size, layers=size.layers),
                address=memory.data_ptr(), device=ordinal, host=ordinal is not None and memory is self._arena,
            )
            for layout, memory in (("layer_first", self._pool), (case.layout, self._arena))
        )  # fmt: skip
        step = size.layers if case.whole else 1
        parts = [
            (pool.layers(first, first + step), arena.layers(first, first + step))
            for first in range(0, size.layers, step)
        ]

        def launch(turn: int, stream: int) -> None:
            first, slots = at(turn)
            (inner, outer), (inner_slots, outer_slots) = parts[first], slots.ours
            if case.push:
                kv_copy(
                    outer, inner, outer_slots, inner_slots, case.tokens,
                    blocks=_BLOCKS, cancel=self._cancel, stream=stream,
                )  # fmt: skip
            else:
                kv_copy(inner, outer, inner_slots, outer_slots, case.tokens, stream=stream)

        return launch

    def _theirs(
        self, case: CopyCase, at: Callable[[int], tuple[int, _SlotSet]]
    ) -> list[tuple[str, Callable[[int, int], object]]]:
        """Their page size chooses the kernel: bulk copies want pages. The engine's own choice comes first."""
        registers = [(f"registers, {quota} blocks", 1, quota) for quota in _REGISTER_QUOTAS]
        bulk = [(f"TMA, {quota} blocks", PAGE_SIZE, quota) for quota in _TMA_QUOTAS]
        ways = (*bulk, *registers) if case.paged else (*registers, *bulk)
        return [(name, self._their_way(case, at, page_size, quota)) for name, page_size, quota in ways]

    def _their_way(
        self, case: CopyCase, at: Callable[[int], tuple[int, _SlotSet]], page_size: int, quota: int
    ) -> Callable[[int, int], object]:
        import torch

        source, target = self._views(case, self._pool, self._arena)
        pointers = [
            torch.tensor([tensor.data_ptr() for tensor in side], dtype=torch.uint64, device=self._where)
            for side in (source, target)
        ]

        def launch(turn: int, stream: int) -> None:
            first, slots = at(turn)
            source_slots, target_slots = slots.rows if case.push else slots.rows[::-1]
            with _on(stream):
                if case.whole:
                    self._opponents.copy_layers(
                        pointers[1], target_slots, pointers[0], source_slots,
                        cache_src_stride_bytes=8 * source.stride(1), cache_dst_stride_bytes=8 * target.stride(1),
                        element_size=_ROW, block_quota=quota, page_size=page_size,
                    )  # fmt: skip
                else:
                    self._opponents.copy_layer(
                        target[first], target_slots, source[first], source_slots,
                        block_quota=quota, page_size=page_size,
                    )  # fmt: skip

        return launch

    def _views(self, case: CopyCase, pool: Any, arena: Any) -> tuple[Any, Any]:
        """Both as int64 (layers, slots, 144), source first."""
        layers, slots, words = self._size.layers, self._size.slots, _ROW // 8
        strides = {"layer_first": (slots * words, words, 1), "page_first": (words, layers * words, 1)}
        inner = pool.as_strided((layers, slots, words), strides["layer_first"])
        outer = arena.as_strided((layers, slots, words), strides[case.layout])
        return (inner, outer) if case.push else (outer, inner)

    def _after_first(self, case: CopyCase, slots: _SlotSet) -> Any:
        """The target after the first turn, whose layer, if it is one, is the first. int64 (words,), on the device."""
        import torch

        right = torch.full_like(self._pool, _POISON)
        pool, arena = (self._pool, right) if case.push else (right, self._arena)
        source, target = self._views(case, pool, arena)
        layers = self._size.layers if case.whole else 1
        source_slots, target_slots = slots.rows if case.push else slots.rows[::-1]
        target[:layers, target_slots] = source[:layers, source_slots]
        return right


def kernel_view(array: Any) -> Any:
    """A tensor as the kernels take it: itself on a GPU, numpy's view of the same memory on the CPU."""
    return array if array.is_cuda else array.numpy()


class _SlotSet(NamedTuple):
    """Slots of the pool and of the arena: as kv_copy takes them, pages or tokens, and int64 (tokens,)."""

    pool: Any
    arena: Any
    pool_rows: Any
    arena_rows: Any

    @property
    def ours(self) -> tuple[Any, Any]:
        pool, arena = (slots if isinstance(slots, PageSlots) else kernel_view(slots) for slots in self[:2])
        return pool, arena

    @property
    def rows(self) -> tuple[Any, Any]:
        return self.pool_rows, self.arena_rows


# Swap-in


class _Steps:
    """The positions of steps, one after another; each has `misses` that the hot buffers do not hold."""

    def __init__(self, case: SwapCase, size: SwapSize, arena: Any, where: Any) -> None:
        """`arena`, uint8 (bytes,), holds each request's tokens one after another; they are drawn here."""
        import torch

        self.case, self.size, self.where = case, size, where
        self.tokens = arena[: case.batch * size.length * case.row].view(torch.int64).view(-1, case.row // 8)
        self.tokens.random_()
        rng = np.random.default_rng(case.batch)
        drawn = self.there([rng.permutation(size.length) for _ in range(case.batch)])
        common, fresh = drawn[:, : size.top - case.misses], drawn[:, size.top - case.misses :]
        self.positions = [
            torch.cat((common, fresh[:, index * case.misses : (index + 1) * case.misses]), 1).contiguous()
            for index in range(case.steps)
        ]
        self._first = torch.arange(case.batch, device=where)[:, None] * size.length

    def there(self, array: ArrayLike, kind: Any = np.int32) -> Any:
        import torch

        return torch.tensor(np.asarray(array, kind), device=self.where)

    def problem(self, side: _OurSwap | _TheirSwap) -> str:
        """After all steps, of the first one again: its rows, and how many of them were missing."""
        import torch

        for turn in range(self.case.steps):
            side.launch(turn, 0)
        _wait(self.where)
        before = side.held + self._first
        side.launch(0, 0)
        _wait(self.where)
        tokens = side.device[side.slots.long()]
        if not torch.equal(tokens, self.tokens[self.positions[0] + self._first]):
            return "other bytes"
        missed = int(torch.isin(side.held + self._first, before, invert=True).sum())
        return "" if missed == self.case.batch * self.case.misses else f"{missed} misses"


class _OurSwap:
    """Hot buffers, and a launch that plans and one that copies."""

    def __init__(self, steps: _Steps) -> None:
        import torch

        case, size, there = steps.case, steps.size, steps.there
        batch, ordinal = case.batch, steps.where.index
        self._steps = steps
        self.held = there(np.full((batch, size.hot), -1))
        self.device: Any = torch.zeros(batch * size.hot, case.row // 8, dtype=torch.int64, device=steps.where)
        self._buffers = HotBuffers(
            held=kernel_view(self.held),
            order=kernel_view(there(np.tile(np.arange(size.hot), (batch, 1)))),
            hot_slots=kernel_view(there(np.arange(batch * size.hot).reshape(batch, -1))),
            host_slots=kernel_view(there(np.arange(batch * size.length).reshape(batch, -1))),
        )
        self._lengths, self._rows = (
            kernel_view(there(values)) for values in (np.full(batch, size.length), np.arange(batch))
        )
        self.slots = there(np.zeros((batch, size.top)))
        sources, targets, counts = (
            kernel_view(there(np.zeros(count))) for count in (batch * size.top, batch * size.top, 5)
        )
        self._plan = SwapPlan(slots=kernel_view(self.slots), sources=sources, targets=targets, counts=counts)
        target, source = (
            Pool(
                layout=Layout((Plane(0, "latent", "uint8", 0, 1, 0, case.row, case.row, case.row),), 1, len(memory)),
                address=memory.data_ptr(), device=ordinal, host=ordinal is not None and memory is steps.tokens,
            )
            for memory in (self.device, steps.tokens)
        )  # fmt: skip
        self._copy = PlannedCopy(target, source, targets, sources, counts=counts)

    def launch(self, turn: int, stream: int) -> None:
        positions = self._steps.positions[turn]
        bring = None if self._steps.where.type == "cpu" else self._copy
        swap_plan(
            self._buffers, kernel_view(positions), self._lengths, self._rows, self._plan, bring=bring, stream=stream
        )
        self._copy.queue(positions.numel(), stream=stream)


class _TheirSwap:
    """SGLang's tables, and its one launch. Each request has a place more, for a token that it has just computed."""

    def __init__(self, opponents: Opponents, steps: _Steps, threads: int) -> None:
        import torch

        case, size, there = steps.case, steps.size, steps.there
        self._opponents, self._steps, self._threads = opponents, steps, threads
        batch, places = case.batch, size.hot + 1
        self._tokens = there(np.full((batch, places), -1))
        self._order = there(np.tile(np.arange(size.hot), (batch, 1)), np.int16)
        self._locs = there(np.arange(batch * places).reshape(batch, -1))
        self._host_locs = there(np.arange(batch * size.length).reshape(batch, -1), np.int64)
        self._requests, self._lengths = there(np.arange(batch)), there(np.full(batch, size.length + 1))
        self._real = there([batch])
        self.slots = there(np.zeros((batch, size.top)))
        self.device: Any = torch.zeros(batch * places, case.row // 8, dtype=torch.int64, device=steps.where)

    @property
    def held(self) -> Any:
        return self._tokens[:, : self._steps.size.hot]

    def launch(self, turn: int, stream: int) -> None:
        size = self._steps.size
        with _on(stream):
            self._opponents.swap_in(
                top_k_tokens=self._steps.positions[turn], device_buffer_tokens=self._tokens,
                host_cache_locs=self._host_locs, device_buffer_locs=self._locs, host_cache=self._steps.tokens,
                device_buffer=self.device, top_k_device_locs=self.slots, req_pool_indices=self._requests,
                seq_lens=self._lengths, lru_slots=self._order, item_size_bytes=self._steps.case.row,
                num_top_k=size.top, hot_buffer_size=size.hot, block_size=self._threads, num_real_reqs=self._real,
            )  # fmt: skip


def swap_comparison(opponents: Opponents, case: SwapCase, size: SwapSize, arena: Any, where: Any) -> Comparison:
    """Each way has tables and a device buffer of its own; all read the same arena."""
    steps = _Steps(case, size, arena, where)

    def contender(name: str, side: _OurSwap | _TheirSwap) -> Contender:
        return Contender(name, side.launch, partial(steps.problem, side))

    return Comparison(
        name=case.name, what=case.what, ours=contender("ours", _OurSwap(steps)),
        theirs=tuple(contender(f"{count} threads", _TheirSwap(opponents, steps, count)) for count in _SWAP_THREADS),
        turns=case.steps, byte_count=case.batch * case.misses * case.row,
    )  # fmt: skip


# New rows of a step


def _scatter_text(rows: int) -> str:
    return f"set_mla_kv_buffer, {rows:,} row{'s' if rows > 1 else ''}"


def scatter_comparison(
    opponents: Opponents, rows: int, where: Any, here: Gpu | None = None, slots: int = 200_000
) -> Comparison:
    """Into two buffers in turn, from several sets of rows. `here` can copy within its memory, to set beside."""
    import torch

    def drawn(count: int, width: int) -> Any:
        return torch.randint(0, 256, (count, width), dtype=torch.uint8, device=where)

    buffers = [drawn(slots, _ROW) for _ in range(2)]
    sets = [
        (torch.randperm(slots, device=where)[:rows].contiguous(), drawn(rows, 1_024), drawn(rows, 128))
        for _ in range(max(1, min(_SETS_MAX, _SETS_BYTES // (2 * _ROW * rows))))
    ]
    flat = [(drawn(rows, _ROW), drawn(rows, _ROW)) for _ in sets] if here else []
    _wait(where)

    def ours(turn: int, stream: int) -> None:
        set_mla_kv_buffer(buffers[turn % 2], *sets[turn % len(sets)], stream=stream)

    def theirs(turn: int, stream: int) -> None:
        with _on(stream):
            opponents.scatter(buffers[turn % 2], *sets[turn % len(sets)], reserved_skip_index=-1)

    turns = iter(range(1 << 30))

    def roof(stream: int) -> None:
        assert here is not None
        target, source = flat[next(turns) % len(flat)]
        here.copy(target.data_ptr(), source.data_ptr(), rows * _ROW, stream)

    def problem(launch: Callable[[int, int], object]) -> str:
        buffers[0].fill_(_POISON & 0xFF)
        right = buffers[0].clone()
        right[sets[0][0]] = torch.cat(sets[0][1:], 1)
        _wait(where)
        launch(0, 0)
        _wait(where)
        return "" if torch.equal(buffers[0], right) else "other bytes"

    return Comparison(
        name=f"set_mla_{rows}", what=_scatter_text(rows), ours=Contender("ours", ours, partial(problem, ours)),
        theirs=(Contender("its one way", theirs, partial(problem, theirs)),),
        turns=_SCATTERS, roof=None if here is None else roof,
    )  # fmt: skip
