"""What SGLang's engine for CPUs lacks for speculation with a chain of drafts (`speculative_eagle_topk` 1): kernels that
are compiled, and attention with torch in the steps of drafts."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import torch


def install() -> None:
    """Raises ImportError with a version that has no speculation on CPUs."""
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    cache_move.copy_all_layer_kv_cache_cpu = copy_rows
    allocation.assign_req_to_token_pool_cpu = keep_slots
    cache_locs.assign_draft_cache_locs_contiguous_cpu = slots_of_drafts
    cache_locs.assign_extend_cache_locs_cpu = slots_between
    eagle.fill_bonus_tokens_cpu = last_accepted
    spec_tree.sgl_build_tree_kernel_efficient_cpu = build_chains
    spec_tree.sgl_verify_tree_greedy_cpu = verify_chains

    torch.cuda.synchronize = lambda device=None: None  # which models ask for when they share their embeddings

    class Step(TorchNativeAttnBackend):
        """Attention of one of the steps that draft a token: each sequence has the drafts before as well."""

        def __init__(self, runner: Any, step: int) -> None:
            super().__init__(runner)
            self._step = step

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *more: Any, **named: Any) -> Any:
            longer = copy.copy(batch)
            longer.seq_lens = batch.seq_lens + self._step + 1
            return super().forward_decode(q, k, v, layer, longer, *more, **named)

    class Steps:
        def __init__(self, runner: Any, count: int) -> None:
            self.attn_backends = [Step(runner, step) for step in range(count)]

        def init_forward_metadata(self, batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(batch)

    extend = TorchNativeAttnBackend.forward_extend

    def extended(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *more: Any, **named: Any) -> Any:
        """A step that verifies drafts has them behind each sequence."""
        if batch.forward_mode.is_target_verify():
            verified = copy.copy(batch)
            count = batch.spec_info.draft_token_num
            verified.extend_prefix_lens, verified.seq_lens = batch.seq_lens, batch.seq_lens + count
            verified.extend_seq_lens = torch.full_like(batch.seq_lens, count)
            batch = verified
        return extend(self, q, k, v, layer, batch, *more, **named)

    TorchNativeAttnBackend.forward_extend = extended
    DraftBackendFactory.create_decode_backend = lambda self: Steps(
        self.draft_model_runner, self.speculative_num_steps - 1
    )
    DraftBackendFactory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(self.draft_model_runner)


def copy_rows(addresses: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor) -> None:
    """Stands in for a kernel that a chain of drafts only tries: what it accepts is in its place already."""
    assert torch.equal(targets, sources), (targets, sources)


def slots_of_drafts(
    rows: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, _: int, topk: int, columns: int
) -> None:
    """The slots behind each sequence."""
    places = lengths[:, None] + torch.arange(topk * columns)
    out.copy_(slots[rows[:, None], places].flatten())


def keep_slots(
    rows: torch.Tensor, slots: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor, taken: torch.Tensor, _: int
) -> None:
    """Writes down which slots each sequence has from the first place to the end."""
    parts = taken.split((ends - firsts).tolist())
    for row, first, end, part in zip(rows, firsts, ends, parts, strict=True):
        slots[row, first:end] = part


def slots_between(
    rows: torch.Tensor, slots: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, _: int
) -> None:
    """The slots of each sequence from the first place to the end."""
    parts = [slots[row, first:end] for row, first, end in zip(rows, firsts, ends, strict=True)]
    taken = torch.cat(parts)
    out[: len(taken)] = taken


def last_accepted(tokens: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, stride: int) -> None:
    """Each sequence's last accepted token."""
    out.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths - 1])


def build_chains(
    parents: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor,
    index: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor, topk: int, steps: int, count: int,
    mask_mode: object,
) -> None:  # fmt: skip
    """Of each sequence its last token and the drafts behind it, each of which follows the one before."""
    assert topk == 1, topk
    of_chain = torch.arange(count)
    positions.copy_((lengths[:, None] + of_chain).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(of_chain + 1 < count, of_chain + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def verify_chains(
    *, predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor,
    retrive_index: torch.Tensor, retrive_next_token: torch.Tensor, retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:  # fmt: skip
    """Drafts are accepted as long as they are what the model computes, and the model's next token follows."""
    predicts.copy_(target_predict.flatten())
    same = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(dim=1)
    accept_token_num.copy_(same.sum(dim=1))
    accepted = torch.cat([torch.ones_like(same[:, :1]), same], dim=1)
    accept_index.copy_(torch.where(accepted.bool(), retrive_index, -1)[:, : accept_index.shape[1]])
