"""Holds JSON against the types of OpenAI's own client: no field has another type, and none is added but our own."""

from __future__ import annotations

from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

EXTENSIONS = {"pdtransfer"}


def extras(model: object) -> set[str]:
    """Names of fields that the types do not have, at any depth."""
    if isinstance(model, BaseModel):
        own = set(model.model_extra or ())
        return own.union(*(extras(getattr(model, name)) for name in type(model).model_fields))
    if isinstance(model, list | tuple):
        return set().union(*map(extras, model))
    if isinstance(model, dict):
        return set().union(*map(extras, model.values()))
    return set()


def checked(kind: type[BaseModel], content: dict[str, Any]) -> Any:
    """The object as that type, strictly."""
    model = kind.model_validate(content, strict=True)
    assert extras(model) <= EXTENSIONS, extras(model)
    return model


def checked_answer(content: dict[str, Any], *, chat: bool) -> Any:
    return checked(ChatCompletion if chat else Completion, content)


def checked_chunk(content: dict[str, Any], *, chat: bool) -> Any:
    """A chunk of a stream. OpenAI's type for completions has no choice that goes on: it is checked as if ended."""
    if not chat:
        choices = [{**each, "finish_reason": each["finish_reason"] or "stop"} for each in content["choices"]]
        checked(Completion, {**content, "choices": choices})
        return Completion.construct(**content)
    return checked(ChatCompletionChunk, content)
