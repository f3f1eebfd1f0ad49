"""What steps cost whose KV lies in host memory, the hot tokens on the device, and how many requests that carries.

On a host with a card the device is card 0, and the host memory an arena that is registered with it; elsewhere it is
other memory of this process.
"""

from __future__ import annotations

from contextlib import ExitStack

from ..kernels.card import card
from ..kernels.driver import count
from .hot_batch import Batch, Size
from .report import Figures, Line

RATES = (0.001, 0.05, 0.20)  # of a step's positions that the buffer lacks
ON_CPU = Size(requests=4, tokens=4_096, layers=4, top=256, hot=512, steps=10)
ON_CARD = Size(requests=64, tokens=32_768, layers=61, top=2_048, hot=4_096)


def _name(rate: float) -> str:
    return f"miss_{round(rate * 1_000)}"


LINES = (
    Line("batch", "{requests} x {tokens:,} tokens", "{layers} layers of 656 B, {plans} plans a step; {where}"),
    Line("device memory", "{device_mib:,.0f} MiB", "tables {table_mib:.1f} MiB; top-k {top}, buffer {hot}"),
    Line("requests in it", "{requests}", "all tokens resident: {resident_requests:.1f}, so {carried:.1f} times; aim 5"),
    Line("the same, with an index", "{carried_with_index:.1f} times", "132 B a token and plan, resident in both"),
    Line("admission", "{admit_us:.1f} us", "until the device has it {admit_done_us:.1f} us; aim 100"),
    Line("attention, all resident", "{resident_us:,.0f} us", "a step of all layers, nothing else"),
    *(
        Line(
            f"step, {100 * rate:g} % misses",
            f"{{{_name(rate)}_step_us:,.0f}} us",
            f"plan {{{_name(rate)}_plan_us:,.0f}}, copy {{{_name(rate)}_copy_us:,.0f}}, attention "
            f"{{{_name(rate)}_attention_us:,.0f}}; hits {{{_name(rate)}_hit_rate:.4f}}, "
            f"{{{_name(rate)}_misses:,.0f}} misses, {{{_name(rate)}_bytes:,.0f}} B, "
            f"by one copy {{{_name(rate)}_dma_us:,.0f}} us",
        )
        for rate in RATES
    ),
)  # fmt: skip


def measure(size: Size | None = None) -> Figures:
    """Medians of `steps` steps a miss rate: of a step's positions a part is the same each time, the rest was not asked
    for since it was last replaced. Each plan of a step asks for positions and has buffers of its own.

    `plan` and `copy` are HotPool's halves of a swap-in, for all layers, `attention` is a plain one over picked rows,
    `backup` the newest token's slot and its copy. On a card each step is one replay of a graph, its launch included:
    three graphs are timed, plans alone, plans and copies, and all of it, and what is said of a part is the difference
    of two (attention is with backup there). `dma` is the time of one contiguous copy of the missed bytes. `admit` is
    Coordinator.admit_direct and HotPool.start of a request whose tokens are all in host memory, none on the device.
    `carried` divides what requests take with every token resident by what they take here, tables included.
    """
    on_card = count() > 0
    size = size or (ON_CARD if on_card else ON_CPU)
    with ExitStack() as held:
        batch = Batch(size, card(0) if on_card else None, held)
        figures = batch.sizes() | batch.admission()
        batch.fill()
        figures["resident_us"] = 1e6 * batch.resident_seconds()
        for rate in RATES:
            figures |= {f"{_name(rate)}_{name}": value for name, value in batch.steps(rate).items()}
        return figures
