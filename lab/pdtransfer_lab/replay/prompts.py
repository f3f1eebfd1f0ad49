"""Prompts for requests of which only lengths and hashes are known: equal hashes give equal text. Pure."""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_128
from typing import Literal, TypeAlias

import numpy as np

from ..plan.trace import TraceRequest

PromptKind: TypeAlias = Literal["ids", "text"]
FIRST_ID, VOCABULARY = 32, 127  # printable bytes: any tokenizer of bytes has them, and others have tokens there
_TEXT = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were her all she there would their we him been has when who will more no if out so said what up its about
into than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came"""
_WORDS = tuple(_TEXT.split())


@lru_cache(maxsize=4_096)
def _drawn(block: int, tokens: int, choices: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Numbers below `choices`, always the same for a block."""
    digest = shake_128(block.to_bytes(8, "little")).digest(4 * tokens)
    return np.frombuffer(digest, "<u4") % np.uint32(choices)


def prompt_of(
    request: TraceRequest, *, block_tokens: int, kind: PromptKind = "ids", vocabulary: int = VOCABULARY
) -> list[int] | str:
    """The prompt of a request: token ids of [FIRST_ID, vocabulary), or common words of which most tokenizers make a
    token each. Requests that share their first blocks share the text of these."""
    choices = vocabulary - FIRST_ID if kind == "ids" else len(_WORDS)
    parts = [_drawn(block, block_tokens, choices) for block in request.blocks]
    numbers: list[int] = np.concatenate(parts)[: request.input_tokens].tolist()
    if kind == "ids":
        return [FIRST_ID + number for number in numbers]
    return " ".join([_WORDS[number] for number in numbers])
