"""Tiny checkpoints of each family with random weights, what transformers generates from them, and a hand-off between
two engines that serve one, by nothing but addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from pdtransfer.layout.layout import Component, Layout, slots_of_rows
from pdtransfer.serve.engine_api import (
    Broken,
    Computed,
    EngineConfig,
    EngineDescription,
    Finished,
    Prefilled,
    Request,
    Token,
)
from pdtransfer.serve.engines.transformers import create
from pdtransfer.wire import Sampling

WINDOW = 24
TOP_K = 24  # of a sparse index
EOS = 2
_COMMON = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0,
    "initializer_range": 0.3, "num_hidden_layers": 3, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 24, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_INDEX = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": TOP_K}  # with few heads, scores are often equal
_HYBRID = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", _HYBRID),  # its logits and scores are capped
    "gemma3": ("Gemma3TextConfig", _HYBRID | {"num_hidden_layers": 6}),
    "gpt_oss": ("GptOssConfig", _HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    ),
    "gpt2": ("GPT2Config", {"num_hidden_layers": 2}),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "deepseek_v32": ("DeepseekV32Config", _LATENT | _INDEX),
    # The second layer attends to what the first one's index has picked.
    "glm_moe_dsa": ("GlmMoeDsaConfig", _LATENT | _INDEX | {"indexer_types": ["full", "shared", "full"]}),
}  # fmt: skip
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 5, 70)  # of prompts, as different as they may be


def make(family: str, directory: Path, **more: Any) -> Path:
    """Writes the checkpoint of a family, the same each time, with other fields of its configuration; returns where."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**_COMMON | sizes | more)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def prompts(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 512, length) for length in lengths]


@cache
def model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """As transformers loads it, by itself."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def generated(directory: Path, prompt: NDArray[np.int64], count: int, *, ignore_eos: bool = False) -> list[int]:
    """The likeliest tokens in turn, up to an end of the sequence, by transformers' own `generate`."""
    more: dict[str, Any] = {"eos_token_id": None} if ignore_eos else {}
    with torch.inference_mode():
        ids = model(directory).generate(
            torch.as_tensor(prompt[None]), max_new_tokens=count, do_sample=False, pad_token_id=0, **more
        )
    return ids[0, len(prompt) :].tolist()


def config(directory: Path, role: Any = "prefill", **more: Any) -> EngineConfig:
    options = {"model": str(directory), "threads": "1", **more.pop("options", {})}
    sizes = {"slots": 1_024, "page_size": 16, "host_layout": "layer_first", "chunk_tokens": 17, "batch_max": 4}
    return EngineConfig(role=role, options=options, **sizes | more)


def request(
    room: int, prompt: NDArray[np.int64], max_tokens: int = 8, *, sparse: bool = False, **sampling: Any
) -> Request:
    return Request(
        room=room, prompt=prompt, sampling=Sampling(max_tokens=max_tokens, **sampling), enable_hisparse=sparse
    )


def components_of(description: EngineDescription, one: Request) -> dict[str, Component]:
    """Where decode keeps the request's rows: of two components of a name, HiSparse has the one in host memory."""
    components = description.components
    return {component.name: component for component in (reversed(components) if one.enable_hisparse else components)}


@dataclass
class Handoff:
    """A prefill and a decode engine of one checkpoint, each with memory of its own, that of decode full of NaN."""

    prefill: Any
    decode: Any
    arena: NDArray[np.uint8]
    hbm: NDArray[np.uint8]
    free: dict[tuple[str, str], list[int]]  # by component and memory
    cells: dict[int, list[Computed]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finished | Broken] = field(default_factory=dict)
    slots: dict[int, dict[str, NDArray[np.int64]]] = field(default_factory=dict)
    targets: dict[int, dict[str, Component]] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, *, prefill: dict[str, Any], decode: dict[str, Any], **options: str) -> Handoff:
        ours = create(config(directory, "prefill", options=options, **prefill))
        theirs: Any = create(config(directory, "decode", options=options, **decode))
        arena, hbm = (
            np.full(size, 0xFF, np.uint8) for size in (theirs.description.memory_bytes, theirs.description.hbm_bytes)
        )
        theirs.attach(memoryview(arena), **({"hbm": memoryview(hbm)} if len(hbm) else {}))
        return cls.between(ours, theirs, arena, hbm)

    @classmethod
    def between(cls, ours: Any, theirs: Any, arena: NDArray[np.uint8], hbm: NDArray[np.uint8]) -> Handoff:
        """Of engines whose memory is there."""
        random = np.random.default_rng(3)
        free = {
            (component.name, component.memory): random.permutation(component.layout.slots).tolist()
            for component in theirs.description.components
        }
        return cls(ours, theirs, arena, hbm, free)

    def computed(self, one: Request) -> bytes:
        """Computes the prompt; returns its aux."""
        assert self.prefill.admit(one)
        while not self.prefill.idle:
            for event in self.prefill.step():
                match event:
                    case Computed():
                        self.cells.setdefault(event.room, []).append(event)
                    case Prefilled(room=one.room, aux=aux):
                        return aux
                    case _:
                        raise AssertionError(event)
        raise AssertionError("no end")

    def land(self, one: Request, aux: bytes, shared: dict[str, NDArray[np.int64]] | None = None) -> None:
        """Copies every row to slots of decode, which admits the room. The first rows may be in `shared` slots."""
        self.copy(one, shared)
        self.decode.admit(one, self.slots[one.room], aux)

    def copy(self, one: Request, shared: dict[str, NDArray[np.int64]] | None = None) -> None:
        """The first half of `land`."""
        tokens = len(one.prompt) + one.sampling.max_tokens
        slots = self.slots[one.room] = {}
        targets = self.targets[one.room] = components_of(self.decode.description, one)
        for component in targets.values():
            had = (shared or {}).get(component.name, np.zeros(0, np.int64))
            new = [self.free[component.name, component.memory].pop() for _ in range(component.rows(tokens) - len(had))]
            slots[component.name] = np.concatenate((had, np.array(new, np.int64)))
        for cell in self.cells.pop(one.room):
            source = next(
                component for component in self.prefill.description.components if component.name == cell.component
            ).layout
            target = targets[cell.component]
            held = slots_of_rows(cell.pages, source.page_size, cell.rows, skip=cell.skip)
            place = slots[cell.component][cell.rows[0] : cell.rows[1]]
            memory = self.hbm if target.memory == "hbm" else self.arena
            pool = np.frombuffer(self.prefill.pool.view, np.uint8)
            move((pool, source), held, (memory, target.layout), place, cell.layers)
        self.prefill.free(one.room)

    def run(self) -> None:
        """Decodes until nothing is left."""
        while not self.decode.idle:
            for event in self.decode.step():
                self.note(event)

    def note(self, event: Token | Finished | Broken) -> None:
        """What a step of decode has returned."""
        if isinstance(event, Token):
            self.tokens.setdefault(event.room, []).append(event.id)
            return
        self.ends[event.room] = event
        for name, slot in self.slots[event.room].items():
            self.free[name, self.targets[event.room][name].memory].extend(slot.tolist())

    def addresses(self, room: int, tokens: int | None = None) -> list[NDArray[np.int64]]:
        """Where in its memory each byte of the room's keys is, by plane: of its first `tokens`, or of all."""
        layout, slots = self.targets[room]["kv"].layout, self.slots[room]["kv"][:tokens]
        rows = [(layout.address(number, slots), plane.row_bytes) for number, plane in enumerate(layout.planes)]
        return [(at[:, None] + np.arange(byte_count)).reshape(-1) for at, byte_count in rows]


def move(
    source: tuple[NDArray[np.uint8], Layout], held: NDArray[np.int64], target: tuple[NDArray[np.uint8], Layout],
    place: NDArray[np.int64], layers: tuple[int, int],
) -> None:  # fmt: skip
    """Copies rows of these layers, head by head: those that the target has."""
    places = {
        (plane.kind, plane.layer, plane.head_start + head): (number, head)
        for number, plane in enumerate(target[1].planes)
        for head in range(plane.head_count)
    }
    for number, plane in enumerate(source[1].planes):
        if not layers[0] <= plane.layer < layers[1]:
            continue
        row = np.arange(plane.head_bytes)
        for head in range(plane.head_count):
            key = plane.kind, plane.layer, plane.head_start + head
            if key not in places:
                continue
            to, at = places[key]
            target_row = target[1].address(to, place)[:, None] + at * plane.head_bytes + row
            source_row = source[1].address(number, held)[:, None] + head * plane.head_bytes + row
            target[0][target_row] = source[0][source_row]
