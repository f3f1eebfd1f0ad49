"""Pools of a hybrid model's components: tensors of the real shapes over one memory, every byte of them known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdtransfer.layout.deepseek_v4 import deepseek_v4
from pdtransfer.layout.layout import Component
from pdtransfer.layout.layout_builders import C4_PARTS, DSA_INDEX_PARTS
from tests.support.layout_tensors import CANARY, Model, Pool, Slots

RATIOS = (0, 4, 128, 4, 4, 128)  # some layers keep their window alone, none keeps all
WINDOW = 128
SALT = 1 << 24  # between the tokens of one component and the next: no two hold equal rows
PARTS = {
    "c4": tuple(C4_PARTS), "c128": tuple(C4_PARTS), "window": tuple(C4_PARTS),
    "c4_state": (("state", "float32", 65_536),), "index_state": (("state", "float32", 16_384),),
    "c128_state": (("state", "float32", 524_288),), "index": tuple(DSA_INDEX_PARTS),
}  # fmt: skip


def layers_of(name: str) -> list[int]:
    """Which layers have this component."""
    wanted = {"window": (0, 4, 128), "c128": (128,), "c128_state": (128,)}.get(name, (4,))
    return [layer for layer, ratio in enumerate(RATIOS) if ratio in wanted]


class Pools:
    """A tensor for each component, as `host_layout` says, over one memory."""

    def __init__(self, host_layout: str, components: Sequence[Component], page_align: int) -> None:
        self.host_layout, self.components, self.page_align = host_layout, tuple(components), page_align
        self.by_name = {component.name: self._pool(component) for component in components}
        last = max(self.by_name.values(), key=lambda pool: pool.base)
        self.byte_count = last.base + int(np.prod(last.shape)) + 64
        self.memory = np.full(self.byte_count, CANARY, dtype=np.uint8)
        for pool in self.by_name.values():
            pool.__dict__["memory"] = self.memory[: pool.base + int(np.prod(pool.shape)) + 64]

    def _pool(self, component: Component) -> Pool:
        name, layout = component.name, component.layout
        align = self.page_align if PARTS[name] == tuple(C4_PARTS) else 1
        model = Model(parts=PARTS[name], layers=layers_of(name), heads=range(1), page_align=align)
        base = min(plane.base for plane in layout.planes)
        return Pool(name=self.host_layout, model=model, page_size=layout.page_size, slots=layout.slots, base=base)

    def salted(self, name: str, slots: Slots) -> Slots:
        """The tokens whose content slots of this component have."""
        return slots + SALT * list(PARTS).index(name)

    def fill(self) -> None:
        for name, pool in self.by_name.items():
            pool.fill(self.salted(name, np.arange(pool.slots)))

    def land(self, name: str, source_slots: Slots, target_slots: Slots) -> None:
        """What a copy of filled pools' rows has to leave here, by the tensors' own indexing."""
        self.by_name[name].land(self.salted(name, source_slots), target_slots)


def pools_of(host_layout: str, *, tokens: int, requests: int, granular: bool = False) -> Pools:
    """The pools of a DeepSeek V4; `granular`: of pages of one row, without padding but to 8 bytes."""
    align = 8 if granular else 576
    components = deepseek_v4(
        host_layout, ratios=RATIOS, tokens=tokens, requests=requests, window_tokens=WINDOW, page_align=align,
        page_tokens=1 if granular else 256, window_page_size=1 if granular else 64,
    )  # fmt: skip
    return Pools(host_layout, components, align)
