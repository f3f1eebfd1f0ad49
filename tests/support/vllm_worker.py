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
            of_request = layers[name].kv_cache[
                blocks[name]
            ]  # [blocks, heads, tokens, width], or of a latent [blocks, tokens, width]
            rows = (of_request.transpose(1, 2) if of_request.ndim == 4 else of_request).flatten(0, 1)
            rows_of_layers.append(rows.contiguous().view(torch.uint8).cpu().numpy())
        return rows_of_layers
