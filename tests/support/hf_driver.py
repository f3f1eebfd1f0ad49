"""Runs where transformers are: makes tiny checkpoints with random weights, and generates from them.

Each family is the smallest that has what is special about it, at head sizes that vLLM's attention for CPUs takes.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.support.json_process import Requests

COMMON = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.12,
}  # fmt: skip
# MLA: one latent row of 512 + 64 numbers a token; vLLM asks for the name of the way in which experts are chosen.
LATENT: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 96,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "topk_method": "noaux_tc", "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "initializer_range": 0.08,
}  # fmt: skip
# SGLang's kernel for what such a layer reads takes more than 256 hidden numbers. Of a model with a single layer, SGLang
# loads this one in the place of the one that drafts.
NEXT_LAYER = LATENT | {
    "hidden_size": 512, "num_hidden_layers": 2, "first_k_dense_replace": 0, "num_nextn_predict_layers": 1,
}  # fmt: skip
# As DeepSeek-V3 has it: SGLang turns rows on a CPU in no other way.
PUBLISHED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "max_position_embeddings": 32768,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "q_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "moe_intermediate_size": 512, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 4, "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "initializer_range": 0.05, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LORA_RANK = 8
HYBRID: dict[str, Any] = {"num_hidden_layers": 4, "tie_word_embeddings": False}
MIXED = HYBRID | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "num_local_experts": 0,
    "shared_intermediate_size": 512,
}
DELTA = {
    "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
# vLLM asks for two sizes that transformers do not.
CONVOLVED = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_dim": 256, "block_dim": 256}
# A language model that is eight times as sure of the next token as others here, behind one that makes eight tokens of
# an image. Its vocabulary is for a tokenizer of bytes and five special tokens, the third for an image.
SEEING: dict[str, Any] = {
    "text_config": COMMON | {
        "model_type": "granite", "num_hidden_layers": 2, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1,
        "logits_scaling": 0.125, "attention_multiplier": 0.125,
    },
    "vision_config": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8, "initializer_range": 0.12,
    },
    "qformer_config": {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "initializer_range": 0.12,
    },
    "num_query_tokens": 8, "image_token_index": 2, "initializer_range": 0.12,
}  # fmt: skip
# A language model that turns rows by places in an image as well, behind one that makes a token of each 16 by 16 pixels.
# Its vocabulary is for a tokenizer of bytes and six special tokens, the last four for images and videos.
SEEING_PLACES: dict[str, Any] = {
    "text_config": COMMON | {
        "num_hidden_layers": 2, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "hidden_size": COMMON["hidden_size"],
        "in_chans": 3, "patch_size": 8, "spatial_merge_size": 2, "initializer_range": 0.12,
    },
    "image_token_id": 2, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5,
}  # fmt: skip
# Experts in each layer, and one more layer that drafts (MTP).
NEXT_TOKENS: dict[str, Any] = {
    "num_hidden_layers": 1, "head_dim": 64, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "use_qk_norm": True, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 2, "head_dim": 64, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 4, "head_dim": 64, "tie_word_embeddings": False}),
    # Of the sizes that attention for GPUs is made for, and prompts of some thousand tokens, 16 KiB each in bfloat16.
    "llama_long": (
        "LlamaConfig",
        {
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": False,
        },
    ),
    # Of a vocabulary for a tokenizer of bytes.
    "llama_bytes": (
        "LlamaConfig",
        {"num_hidden_layers": 2, "head_dim": 64, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "llama_drafted": ("LlamaConfig", {"num_hidden_layers": 2, "head_dim": 64, "tie_word_embeddings": False}),
    "glm4_moe_drafted": ("Glm4MoeConfig", NEXT_TOKENS),
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 4, "head_dim": 64, "tie_word_embeddings": False}),
    "blip2": ("Blip2Config", SEEING),
    "qwen2_vl": ("Qwen2VLConfig", SEEING_PLACES),
    # Experts in each layer; in the second family a window of 64 tokens in every other layer, and sinks in all.
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 128}),
    "gpt_oss": ("GptOssConfig", EXPERTS | {"num_hidden_layers": 4, "num_local_experts": 4, "sliding_window": 64}),
    # Five layers with a window of 64 tokens before one that sees all.
    "gemma3": ("Gemma3TextConfig", {"num_hidden_layers": 6, "head_dim": 64, "sliding_window": 64}),
    # Three layers that see a chunk of 256 tokens, up to themselves, before one that sees all; none with experts.
    "llama4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "attention_chunk_size": 256,
            "intermediate_size_mlp": 512,
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "tie_word_embeddings": False,
        },
    ),
    # Short convolutions, Mamba 2 and gated delta nets, with one layer of attention between them.
    "lfm2": ("Lfm2Config", HYBRID | CONVOLVED),
    "granite_hybrid": ("GraniteMoeHybridConfig", MIXED | MAMBA2),
    "qwen3_next": ("Qwen3NextConfig", MIXED | DELTA | {"full_attention_interval": 3}),
    "qwen3_next_drafted": (
        "Qwen3NextConfig",
        HYBRID
        | DELTA
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "full_attention_interval": 2,
            "num_nextn_predict_layers": 1,
        },
    ),
    # Mamba 2, and one layer of attention with a window of 64 tokens.
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "head_dim": 64,
            "sliding_window": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "ssm_state_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    # Mamba, with one layer of attention in two, and no experts.
    "jamba": (
        "JambaConfig",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 16,
            "use_mamba_kernels": False,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v3_dense": ("DeepseekV3Config", LATENT | {"first_k_dense_replace": 3}),
    "deepseek_v3_drafted": ("DeepseekV3Config", NEXT_LAYER),
    "deepseek_v3_yarn": ("DeepseekV3Config", LATENT | PUBLISHED),
    # Of the sizes that kernels of sparse attention (DSA) take; the second has a layer of experts.
    "glm_dsa": ("GlmMoeDsaConfig", SPARSE),
    "deepseek_v32": ("DeepseekV32Config", SPARSE | {"first_k_dense_replace": 3}),
    "deepseek_v32_drafted": ("DeepseekV32Config", SPARSE | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 1}),
}


def make(family: str, path: str) -> None:
    """Writes a checkpoint of a family to `path`: float32, the same weights each time, and a word for each token."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(7)
    sees = "vision_config" in sizes
    config = getattr(transformers, name)(**sizes if sees else COMMON | sizes)
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    if "index_topk" in sizes:  # sharp attention, so that tokens depend on the KV cache
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                if parameter.endswith("q_b_proj.weight"):
                    weight.mul_(4)
    if family.endswith("_drafted"):  # A norm leaves the embeddings as they are: see `drafter_input`.
        with torch.no_grad():
            embeddings = model.get_input_embeddings().weight
            embeddings.div_(embeddings.square().mean(-1, keepdim=True).sqrt())
    model.save_pretrained(path)
    if family == "qwen3_next_drafted":
        add_next_token_model(Path(path) / "model.safetensors", config)
    elif sizes.get("num_nextn_predict_layers"):
        add_next_token_layer(Path(path) / "model.safetensors", config)
    if sees:
        write_processor(Path(path), config)
    words = Tokenizer(
        WordLevel({f"w{token}": token for token in range(config.get_text_config().vocab_size)}, unk_token="w0")
    )
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2").save_pretrained(path)


def drafter_input(config: Any) -> torch.Tensor:
    """The weights that take a token's embedding and drop the model's hidden state. A drafter that has the model's own
    layers behind them drafts what the model takes, but that it never sees the first token."""
    return torch.cat([torch.eye(config.hidden_size), torch.zeros(config.hidden_size, config.hidden_size)], 1)


def add_next_token_layer(weights_path: Path, config: Any) -> None:
    """Adds to a model its first layer once more, for multi-token prediction. The layers between add nothing to the
    hidden state, so that it drafts what the model takes."""
    weights = load_file(weights_path)
    for name, weight in weights.items():
        if ".layers." in name and ".layers.0." not in name and ("o_proj" in name or "down_proj" in name):
            weight.zero_()
    first, last = "model.layers.0.", f"model.layers.{config.num_hidden_layers}."
    added = {last + name.removeprefix(first): weight for name, weight in weights.items() if name.startswith(first)}
    added |= {f"{last}{norm}.weight": torch.ones(config.hidden_size) for norm in ("enorm", "hnorm")}
    added[f"{last}eh_proj.weight"] = drafter_input(config)
    added[f"{last}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    added[f"{last}shared_head.norm.weight"] = weights["model.norm.weight"]
    added[f"{last}shared_head.head.weight"] = weights["lm_head.weight"]
    save_file(weights | {name: weight.clone() for name, weight in added.items()}, weights_path, {"format": "pt"})


def add_next_token_model(weights_path: Path, config: Any) -> None:
    """Adds to a model with one layer of attention, its last one, this layer once more, for multi-token prediction. The
    states of the layer before it change little, so that it drafts what the model takes."""
    weights = load_file(weights_path)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    for name, weight in weights.items():
        if name.startswith("model.layers.0.") and ("out_proj" in name or "down_proj" in name):
            weight.mul_(0.02)
    added = {
        f"mtp.layers.0.{name.removeprefix(last)}": weight for name, weight in weights.items() if name.startswith(last)
    }
    # Its norms multiply by one more than their weights.
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
    added |= {f"mtp.{norm}.weight": torch.zeros(config.hidden_size) for norm in norms}
    added |= {"mtp.fc.weight": drafter_input(config), "mtp.norm.weight": weights["model.norm.weight"]}
    save_file(weights | {name: weight.clone() for name, weight in added.items()}, weights_path, {"format": "pt"})


def eagle(model: str, path: str, architecture: str = "") -> None:
    """Writes the EAGLE head of a model of the family llama_drafted to `path`: all its layers, the first without its
    first norm. An engine that wants to be told its `architecture` adds a bias as well."""
    config = AutoConfig.from_pretrained(model)
    weights = load_file(Path(model) / "model.safetensors")
    head = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith("model.layers.")}
    del head["layers.0.input_layernorm.weight"]
    if architecture:
        config.architectures, head["fc.bias"] = [architecture], torch.zeros(config.hidden_size)
    folder = Path(path)
    folder.mkdir()
    save_file(head | {"fc.weight": drafter_input(config)}, folder / "model.safetensors")
    config.save_pretrained(folder)


def write_processor(folder: Path, config: Any) -> None:
    """Writes what makes the pixels and the tokens of an image in a request."""
    if config.model_type == "qwen2_vl":
        sizes = {"patch_size": config.vision_config.patch_size, "min_pixels": 32 * 32, "max_pixels": 64 * 64}
        image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"} | sizes
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        return
    size = dict.fromkeys(("height", "width"), config.vision_config.image_size)
    image = {"image_processor_type": "BlipImageProcessor", "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    whole = {"processor_class": "Blip2Processor", "num_query_tokens": config.num_query_tokens}
    (folder / "processor_config.json").write_text(json.dumps(whole))


def generate(path: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Of each prompt, the `count` tokens that are likeliest in turn."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    made: list[list[int]] = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        made.append(tokens[0, len(prompt) :].tolist())
    return made


def adapter(model: str, path: str) -> None:
    """Writes a LoRA adapter for a model of the family llama to `path`, with random weights, as PEFT does."""
    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(11)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for name, heads in (("q_proj", config.num_attention_heads), ("v_proj", config.num_key_value_heads)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(LORA_RANK, config.hidden_size) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(heads * config.head_dim, LORA_RANK) * 0.2
    folder = Path(path)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": model,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about))


def scaled(model: str, path: str, scale: float) -> None:
    """Writes a copy of a model to `path` with scales of a cache of 8 bits, as llm-compressor does. Each layer has
    others, and its keys another than its values."""
    copytree(model, path)
    about, weights = Path(path) / "config.json", Path(path) / "model.safetensors"
    config = json.loads(about.read_text())
    of_cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": of_cache,
    }  # fmt: skip
    about.write_text(json.dumps(config))
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor([scale * factor * (1 + layer / 16)])
        for layer in range(config["num_hidden_layers"])
        for name, factor in (("k", 1.0), ("v", 0.75))
    }
    save_file(load_file(weights) | scales, weights)


def embeddings(model: str, prompt: list[int]) -> str:
    """What a model's first layer gets for a prompt, [tokens, hidden], as torch saves it, in base64."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).get_input_embeddings().weight
    kept = io.BytesIO()
    torch.save(weights.detach()[prompt].clone(), kept)
    return base64.b64encode(kept.getvalue()).decode()


def main() -> None:
    torch.set_num_threads(1)
    requests = Requests()
    does = {each.__name__: each for each in (make, generate, adapter, eagle, scaled, embeddings)}
    while not requests.ended:
        for number, name, arguments in requests.take(wait=True):
            requests.attempt(number, does[name], arguments)


if __name__ == "__main__":
    main()
