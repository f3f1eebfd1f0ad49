"""What a test asks of each of vLLM's workers, in whatever process it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class CacheRows:
    """Added to vLLM's worker by the option `worker_extension_cls`."""

    model_runner: Any

    def cache_rows(self, blocks: dict[str, list[int]]) -> list[np.ndarray]:
        """The bytes of each layer's blocks, uint8 (rows, ...), one row a token, in the order of the layers' names."""
        layers = self.model_runner.vllm_config.compilation_config.static_forward_context
        rows_of_layers: list[np.ndarray] = []
        for name in sorted(blocks):
            # [blocks, heads, tokens, width], or of a latent [blocks, tokens, width]
            of_request = layers[name].kv_cache[blocks[name]]
            if hasattr(layers[name], "isa"):
                rows = _rows_on_a_cpu(layers[name], of_request)
            else:
                rows = (of_request.transpose(1, 2) if of_request.ndim == 4 else of_request).flatten(0, 1)
            rows_of_layers.append(rows.contiguous().view(torch.uint8).cpu().numpy())
        return rows_of_layers


def _rows_on_a_cpu(layer: Any, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of numbers of one byte, whose tokens vLLM's kernels for CPUs pack together: the layer's own write of
    another number for each token of an empty block shows where its bytes stand."""
    _, heads, size, width = blocks.shape
    tokens = torch.arange(size)
    numbers = (tokens % 64 + 32 + tokens // 64 * 128).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    written, block = numbers[:, None, None].expand(size, heads, width // 2).contiguous(), torch.zeros_like(blocks[:1])
    layer.impl.do_kv_cache_update(layer, written, written, block, tokens)
    assert block.view(torch.uint8).unique(return_counts=True)[1].unique().tolist() == [heads * width]
    places = block.view(torch.uint8).flatten().argsort(stable=True)
    return blocks.view(torch.uint8).flatten(1)[:, places].reshape(len(blocks) * size, heads * width)
