"""The model that the demo asks: its prompts, its requests, and what a single process answers."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from importlib import import_module
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...limits import TOKENS_MAX
from ...wire import Ranks, Sampling
from ..engine_api import EngineConfig
from ..router.front.text import load_text
from ..settings.node import BUILT_IN
from ..settings.ranks import device_of
from ..settings.worker import CHECKPOINT_ENGINE
from .demo_config import DemoConfig

TEXT = (
    "the cache of a prefill worker crosses once and lands where decode will read it no copy between them "
    "a slot is free when its last lease has ended and not before because a timeout proves nothing about what is still "
    "in flight"
)
QUESTIONS = (
    "What is the capital of France?",
    "Name the three primary colors.",
    "Why is the sky blue?",
    "Write one sentence about a fisherman and the sea.",
    "What do bees make?",
    "Which planet is the largest in our solar system?",
    "What is water made of?",
    "Who wrote Romeo and Juliet?",
)
CONTEXT_TOKENS = 16_384  # the reference model's default; a longer prompt raises it
TOP_K = 64  # with --hisparse: tokens that a step reads of a request
REQUESTS = 32  # of a model whose prompts are bytes
SLOTS_MIN = 32_768  # of the single process


class DemoModel:
    """A model of bytes, or a checkpoint that is asked questions. Raises ConfigError if it has no tokenizer."""

    def __init__(self, config: DemoConfig) -> None:
        self.config, self.speaks = config, config.model not in BUILT_IN
        self._text = load_text(config.model)
        self.path = "/v1/chat/completions" if self.speaks else "/v1/completions"

    def prompts(self) -> list[str]:
        """The prompts, determined by the seed. Each starts with the same shared_prefix bytes."""
        config = self.config
        rng = random.Random(config.seed)  # noqa: S311 (text to look at, not a secret)
        words = TEXT.split()
        if self.speaks:
            texts = list(islice(cycle(QUESTIONS), config.requests or len(QUESTIONS)))
            rng.shuffle(texts)
        else:
            texts = _random_texts(rng, words, config.requests or REQUESTS, config.prompt_bytes_max)
        shared = (" ".join(rng.choices(words, k=config.shared_prefix)) + " ")[: config.shared_prefix]
        return [shared + text for text in texts]

    def body(self, prompt: str) -> dict[str, Any]:
        """The fields of a request that determine what is generated."""
        greedy = {"max_tokens": self.config.max_tokens, "temperature": 0}
        if self.speaks:
            return {"messages": _messages(prompt), **greedy}
        return {"prompt": prompt, "ignore_eos": True, **greedy}

    def ids(self, prompt: str) -> NDArray[np.int64]:
        """The ids of a prompt, as the router makes them."""
        if self.speaks:
            return self._text.encode(self._text.render(_messages(prompt), reply=True), special=False)
        return self._text.encode(prompt, special=True)

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt and its answer at most."""
        chosen = self.engine_options().get("context_tokens", "")
        return int(chosen) if chosen.isdecimal() else self._text.max_model_len or TOKENS_MAX

    def engine_options(self) -> dict[str, str]:
        """Options of every engine."""
        config = self.config
        if self.speaks:
            workers = config.prefill + config.decode  # more threads than cores would wait for each other
            defaults = {"digests": "true", "threads": str(max(1, (os.cpu_count() or 1) // workers))}
        else:
            longest = config.shared_prefix + config.prompt_bytes_max + config.max_tokens
            defaults = {"context_tokens": str(longest)} if longest > CONTEXT_TOKENS else {}
            defaults |= {"top_k": str(TOP_K)} if config.hisparse else {}
        return defaults | {name: value for name, _, value in (option.partition("=") for option in config.engine_option)}

    def generate(self, prompts: Sequence[str]) -> list[dict[str, str]]:
        """The digests that each answer must have, computed in this process."""
        demo, ids = self.config, [self.ids(prompt) for prompt in prompts]
        longest = max(map(len, ids)) + demo.max_tokens
        options = self.engine_options() | ({"model": demo.model} if self.speaks else {})
        config = EngineConfig(
            role="decode", slots=-(-max(longest, SLOTS_MIN) // 64) * 64, page_size=64,
            host_layout="layer_first", device=device_of(demo.devices[1], Ranks()), options=options,
        )  # fmt: skip
        sampling = Sampling(max_tokens=demo.max_tokens, ignore_eos=not self.speaks)
        engine, _, _ = BUILT_IN.get(demo.model, CHECKPOINT_ENGINE).partition(":")
        outcomes = import_module(engine).generate_many(config, [(prompt, sampling) for prompt in ids])
        names = ("tokens_digest", "logits_digest", "kv_digest")
        return [{name: getattr(outcome, name).hex() for name in names} for outcome in outcomes]


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _random_texts(rng: random.Random, words: Sequence[str], count: int, bytes_max: int) -> list[str]:
    """Texts of 1 to `bytes_max` bytes, log-uniform in length, in random order."""
    sizes = [round(bytes_max ** (index / max(1, count - 1))) for index in range(count)]
    rng.shuffle(sizes)
    return [" ".join(rng.choices(words, k=size))[:size] for size in sizes]
