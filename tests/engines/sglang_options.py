"""Options of SGLang's servers on a GPU, with sparse attention and with HiSparse."""

from __future__ import annotations

import json
from typing import Any

LENGTHS = 5, 300, 3_000, 6_000  # of prompts: the last two have more tokens than a device buffer of HiSparse
TOP_K = 2_048

COMMON: dict[str, Any] = {
    "enable_deterministic_inference": False,  # of sparse attention there is none
    "dtype": "bfloat16", "page_size": 64, "chunked_prefill_size": 2_048, "context_length": 16_384,
    "max_total_tokens": 32_768,
}  # fmt: skip
# The default choice of the top k is not repeatable, even on one server.
SPARSE: dict[str, Any] = {
    "attention_backend": False, "dsa_prefill_backend": "flashmla_sparse", "dsa_decode_backend": "flashmla_sparse",
    "dsa_topk_backend": "torch", "kv_cache_dtype": "bfloat16",
}  # fmt: skip
HISPARSE: dict[str, Any] = {
    "enable_hisparse": True,
    "hisparse_config": json.dumps({"top_k": TOP_K, "device_buffer_size": TOP_K, "host_to_device_ratio": 4}),
}
PREFILL, DECODE = {"disaggregation_mode": "prefill"}, {"disaggregation_mode": "decode"}
