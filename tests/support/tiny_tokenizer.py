"""Checkpoint directories with a small byte-level tokenizer and a chat template, and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LINES = ["The fridge is always full of cheese.", "It is always the same: the cat, the hat, the ca\u017co\u0142w."] * 20
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)


def write_tokenizer(
    directory: Path,
    *,
    vocabulary: int = 300,
    special: tuple[str, ...] = (START, END),
    template: str | None = TEMPLATE,
    context: int = 128,
    **settings: Any,
) -> Path:
    """Ids: `special`, the 256 bytes, then merges up to `vocabulary`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1], **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": context}))
    return directory
