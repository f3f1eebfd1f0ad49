"""A model split over tensor-parallel ranks, by the plan that transformers has for it.

The plan is data here, and its hooks are not used: they need every rank while the model is loaded, which a worker's
ranks are not yet. Partial sums are added in the order of the ranks, so that all ranks have the same bits, and pick the
same tokens without asking each other. Embeddings and the last product are whole on every rank.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn

from ....errors import ConfigError
from ....kernels.stream import Download, upload
from ....wire import Ranks
from ...engine_api import Group
from .layers import LayerShape

# What takes a whole input to a whole output: it may stay whole. Or it is about gradients.
_WHOLE = {
    "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "colwise_gather_output", "colwise_rep",
    "rowwise_rep", "rowwise_split_input", "embedding_rowwise", "embedding_colwise",
}  # fmt: skip
_SUMMED = {"moe_tp_experts", "all_reduce"}  # modules whose outputs are partial sums
_PARTS = {"colwise": 1, "packed_colwise": 2}  # tensors that lie behind one another in the split axis
Result = TypeVar("Result")


def split(model: Any, group: Group) -> Any:
    """A copy of the model that has this rank's share of each tensor that the plan splits, and the others in common.
    Raises ConfigError, in one line, for a model or a size that the plan does not fit."""
    size = group.ranks.tp_size
    share = deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    done = Counter[str]()
    for name, module in list(share.named_modules()):
        style = _style(model.tp_plan, name)
        if style in _SUMMED:
            _sum_output(module, group)
        elif style == "rowwise" and isinstance(module, nn.Linear):
            _take(module, "weight", 1, group.ranks, name)
            _sum_product(module, group)
        elif style in _PARTS and isinstance(module, nn.Linear):
            _check_heads(share.get_submodule(name.rpartition(".")[0]), module, name, size)
            for parameter in ("weight", "bias"):
                _take(module, parameter, 0, group.ranks, name, parts=_PARTS[style])
        elif style is not None and style not in _WHOLE:
            raise ConfigError(f"tp_size = {size}: {name}: {style} of a {type(module).__name__} is not served")
        done[style or ""] += 1
    for name, tensor in dict(share.named_parameters()).items():
        style, (owner, _, attribute) = _style(model.tp_plan, name), name.rpartition(".")
        if style is None or style in _WHOLE:
            continue
        if style != "rowwise" and style not in _PARTS:
            raise ConfigError(f"tp_size = {size}: {name}: {style} of a tensor is not served")
        axis = tensor.ndim - (1 if style == "rowwise" else 2)
        _take(share.get_submodule(owner), attribute, axis, group.ranks, name, parts=_PARTS.get(style, 1))
        done[style] += 1
    if not done["rowwise"]:
        raise ConfigError(f"tp_size = {size}: transformers has no plan that splits a {type(model).__name__}")
    return share


def keep(model: Any) -> None:
    """Copies what is a share of a whole tensor, so that the whole one can go."""
    for parameter in model.parameters():
        if parameter.untyped_storage().nbytes() > parameter.nbytes:
            parameter.data = parameter.data.clone()


def share_of(whole: LayerShape, share: LayerShape, ranks: Ranks) -> LayerShape:
    """What a rank's layer keeps, by its cache and that of the whole model. Raises ConfigError for anything else than
    equal shares of the heads, or all of them."""
    if share.kinds == whole.kinds:
        return share
    parts = tuple((kind, heads * ranks.tp_size, size) for kind, heads, size in share.kinds)
    if parts != whole.kinds or len({heads for _, heads, _ in share.kinds}) > 1:
        raise ConfigError(f"tp_size = {ranks.tp_size}: layer {share.layer}: its plan does not split heads")
    return replace(share, first_head=ranks.tp_rank * share.kinds[0][1], shared=False)


def together(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Does the work of all ranks on threads of this process; returns the results by rank. Raises what it raises."""
    barrier, parts = Barrier(size), list[Any]([None] * size)

    def rank(number: int) -> Result:
        try:
            return work(_Seat(Ranks(number, size), barrier, parts))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(rank, number) for number in range(size)]
    failures = [failure for rank in ranks if (failure := rank.exception()) is not None]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, BrokenBarrierError)):
        raise failure
    return [rank.result() for rank in ranks]


class _Seat:
    """A Group whose ranks are threads."""

    def __init__(self, ranks: Ranks, barrier: Barrier, parts: list[Any]) -> None:
        self.ranks, self._barrier, self._parts = ranks, barrier, parts

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        self._parts[self.ranks.tp_rank] = part
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def hand_on(self, hidden: NDArray[np.float32]) -> None:  # noqa: ARG002
        raise AssertionError("there is one stage")

    def take_over(self, hidden: NDArray[np.float32]) -> None:  # noqa: ARG002
        raise AssertionError("there is one stage")


def _style(plan: dict[str, str], name: str) -> str | None:
    """The plan's word for a module or a tensor: `*` stands for the numbers of layers."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _check_heads(parent: Any, module: nn.Linear, name: str, size: int) -> None:
    """Raises ConfigError where heads would be cut."""
    head: int = getattr(parent, "head_dim", 1)
    if module.out_features % (head * size):
        raise ConfigError(f"tp_size = {size}: does not divide the {module.out_features // head} heads of {name}")


def _take(module: Any, name: str, axis: int, ranks: Ranks, path: str, *, parts: int = 1) -> None:
    """Replaces a tensor by this rank's share of it, or of each of its parts. A bias that is missing stays so."""
    whole: Tensor | None = getattr(module, name, None)
    if whole is None:
        return
    if whole.shape[axis] % (parts * ranks.tp_size):
        text = f"does not divide the {whole.shape[axis] // parts} numbers that {path} is split by"
        raise ConfigError(f"tp_size = {ranks.tp_size}: {text}")
    shares = [chunk.chunk(ranks.tp_size, axis)[ranks.tp_rank] for chunk in whole.detach().chunk(parts, axis)]
    share = shares[0] if parts == 1 else torch.cat(shares, axis)
    setattr(module, name, nn.Parameter(share, requires_grad=False))


def _sum_product(module: nn.Linear, group: Group) -> None:
    def forward(given: Tensor) -> Tensor:
        product = _summed(functional.linear(given, module.weight), group)
        return product if module.bias is None else product + module.bias

    module.forward = forward


def _sum_output(module: Any, group: Group) -> None:
    partial = module.forward
    module.forward = lambda *args, **kwargs: _summed(partial(*args, **kwargs), group)


def _summed(part: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' tensors, added in float32 and in the order of the ranks."""
    parts = [torch.from_numpy(part) for part in group.gather(Download(part.float()).get().numpy())]
    whole = parts[0].clone()
    for further in parts[1:]:
        whole += further
    return upload(whole, part.device).type(part.dtype)
