"""Texts, schemas and tools that tests of engines' features ask for."""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
TEXT = "The fridge is always full of cheese, and the cat is always in the hat. " * 8
OTHER = "It is always the same: the cat, the hat, the fridge. " * 6
QUESTION = [{"role": "user", "content": TEXT}]
COMPLETION: dict[str, Any] = {"prompt": TEXT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": QUESTION, "max_tokens": 64, "temperature": 0}
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}, "rank": {"enum": [1, 2, 3]}},
    "required": ["city", "rank"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def texts_of(events: list[Any]) -> dict[str, str]:
    """The texts of a chat's stream, or of a completion's, by field."""
    texts: dict[str, str] = {}
    for choice in [choice for event in events for choice in event["choices"]]:
        for name, text in (choice.get("delta") or {"text": choice.get("text")}).items():
            if isinstance(text, str) and text and name != "role":
                texts[name] = texts.get(name, "") + text
    return texts
