"""Words: phrases that texts must not have, and what to write instead."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .sources import Source

PHRASES = {
    "is none of": "must be one of A, B",
    "is no message": "is not a message from X to Y",
    "is nothing that": "is not a message from X to Y",
    "there is none": "what is missing, and how to get it",
    "for ever": "permanently",
    "so many": "the number",
    "what it has": "the value",
    "knows no ": "has no",
    "takes no wish": "cannot",
}
LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
TEXTS_OF_HELP = {"help", "description", "epilog"}


def phrases(files: Iterable[Source]) -> Iterator[str]:
    """No text of an error, a log line or a help text has a phrase of the list."""
    for source in files:
        for node, text in _texts(source):
            for phrase, instead in PHRASES.items():
                if phrase in text:
                    yield source.complaint(node, f"{phrase!r} in a text for people: say {instead!r}")


def _texts(source: Source) -> Iterator[tuple[ast.AST, str]]:
    shown: list[ast.AST] = [node.exc for node in source.nodes(ast.Raise) if node.exc is not None]
    for call in source.nodes(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in LOGS:
            shown += call.args
        shown += [keyword.value for keyword in call.keywords if keyword.arg in TEXTS_OF_HELP]
    # A text that is too long for its line stands in a variable of its own.
    shown += [assigned.value for assigned in source.nodes(ast.Assign) if _is_text(assigned)]
    for whole in shown:
        for node in ast.walk(whole):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node, node.value


def _is_text(assigned: ast.Assign) -> bool:
    target = assigned.targets[0]
    return isinstance(target, ast.Name) and target.id in ("text", "detail", "reason")
