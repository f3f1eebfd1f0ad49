"""The deep model in small, and the textbook's numbers of the same weights."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as nn

from tests.support.engine_pair import heads_of, places

SMALL = {"layers": "3", "width": "128", "mlp_width": "128", "context_tokens": "1024"}
OPTIONS = {"mla": SMALL | {"heads": "2"}, "gqa": SMALL | {"heads": "4", "kv_heads": "2"}}


def model_of(engine):
    return engine.model._model


def kv_of(memory, layout, slots):
    """By (kind, layer) float32 (rows, heads, dim), as the pool has it in bfloat16."""
    held = {}
    for kind, layer, head in heads_of(layout):
        rows = np.ascontiguousarray(memory[places(layout, kind, layer, head, slots)])
        held.setdefault((kind, layer), []).append(torch.from_numpy(rows).view(torch.bfloat16).float())
    return {key: torch.stack(heads, dim=1) for key, heads in held.items()}


def textbook(model, ids):
    """What the cache should hold by (kind, layer), and the last row's logits: each dense, of the same weights, in
    float32 and in bfloat16, as `near` takes it."""
    (exact, logits), (rounded, rounded_logits) = (
        _dense(model, ids, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    return {key: (exact[key], rounded[key]) for key in exact}, (logits, rounded_logits)


def _dense(model, ids, dtype):
    sizes, held = model.architecture, {}
    weights = [{name: each.to(dtype) for name, each in layer.items()} for layer in model._layers]
    positions = torch.arange(len(ids), device=model.device)
    cos, sin = (each.squeeze(1) for each in model._rope.at(positions, dtype))

    def rope(x):
        low, high = x.chunk(2, -1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    def norm(x):
        return nn.rms_norm(x, (x.shape[-1],))

    x = model._embedding.to(dtype)[torch.from_numpy(ids).to(model.device)]
    hidden = positions > positions.unsqueeze(1)
    for layer, own in enumerate(weights):
        inner = norm(x) @ own["in"]
        if sizes.attention == "mla":
            h, d, r, lat = sizes.mla_heads, sizes.head_dim, sizes.rope_dim, sizes.latent_dim
            plain, turned, latent = inner.split([h * d, (h + 1) * r, lat], -1)
            turned, latent = rope(turned.reshape(-1, h + 1, r)), norm(latent)
            held["latent", layer] = torch.cat((latent, turned[:, h]), -1).unsqueeze(1)
            key = (latent @ own["key_up"]).view(-1, h, d)
            query = torch.cat((plain.reshape(-1, h, d), turned[:, :h]), -1)
            key = torch.cat((key, turned[:, h:].expand(-1, h, -1)), -1)
            value = (latent @ own["value_up"]).view(-1, h, d + r)[..., :d]
        else:
            h, k, d = sizes.gqa_heads, sizes.kv_heads, sizes.head_dim
            query, key, value = inner.view(-1, h + 2 * k, d).split([h, k, k], 1)
            query, key = rope(query), rope(key)
            held["k", layer], held["v", layer] = key, value
            key, value = (each.repeat_interleave(h // k, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
        x = x + mixed.flatten(1) @ own["output"]
        gate, up = (norm(x) @ own["gate_up"]).chunk(2, -1)
        x = x + (nn.silu(gate) * up) @ own["down"]
    return held, (norm(x[-1:]) @ model._head.to(dtype))[0]


# In bfloat16 no two processors round alike, and float32 is the reference: what is computed may be twice as far from it
# as the same model is in plain bfloat16, which is one bit of eight.
ERROR_MAX = 2.0


def near(found, wanted):
    """By the norm of what differs from float32, over all of it. `wanted`: in float32 and in bfloat16."""
    exact, rounded = wanted
    assert float((found - exact).norm()) < ERROR_MAX * float((rounded.float() - exact).norm())


TOP = {"top_k": "16", "index_share": "2"}
