"""Words: what texts and names must not have, and what to write instead."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeGuard

from .sources import DEFINITIONS, Source

# In what a process shows to people: errors, log lines, help texts, answers.
PHRASES_SHOWN = {
    "is none of": "must be one of A, B",
    "is no message": "is not a message from X to Y",
    "is nothing that": "is not a message from X to Y",
    "there is none": "what is missing, and how to get it",
    "what it has": "the value",
    "takes no wish": "cannot",
}
# In these, and in docstrings and comments.
PHRASES = {
    "for ever": "permanently",
    "so many": "how many, or this many",
    "as ever": "as usual",
    "knows no ": "has no",
    "know no ": "have no",
    "is told": "gets, or is reported",
    "are told": "get, or are reported",
    "was told": "got, or was asked",
    "never heard": "never received",
    "has heard": "has received",
    "says so": "reports it",
    "say so": "report it",
    "says why": "gives the reason",
    "says whether": "reports whether",
    "tells why": "gives the reason",
    "tells whether": "reports whether",
}
# As a part of an identifier.
NAMES = {
    "hear": "receive",
    "hears": "receives",
    "heard": "received",
    "say": "send, report",
    "says": "sends, reports",
    "said": "sent, reported",
    "tell": "send, report",
    "tells": "sends, reports",
    "told": "sent, reported",
}
# Pronouns and participles that name no thing, as the whole name of a local or an argument.
LOCALS = {
    "at", "each", "found", "got", "held", "here", "it", "known", "made", "one", "own", "some", "there", "what", "who",
}  # fmt: skip
# How many may be left in each part of the tree. Lower it as they go.
LOCALS_MAX = {"pdtransfer": 40, "lab": 60, "tests": 2_050}
SENTENCE_WORDS_MAX = 28  # of a docstring
_TABLE = re.compile(r"^[\s|-]", re.MULTILINE)  # an indented line, a row of a table or a point of a list
_PART = re.compile(r"[A-Z]?[a-z]+")


def phrases_shown(files: Iterable[Source]) -> Iterator[str]:
    """No string has a phrase of either list."""
    for source in files:
        for line, text in _shown(source):
            yield from _complaints(source, line, text, PHRASES | PHRASES_SHOWN, "a text for people")


def phrases(files: Iterable[Source]) -> Iterator[str]:
    """No docstring and no comment has a phrase of PHRASES, over the end of a line neither."""
    for source in files:
        for line, text in (*_docstrings(source), *_comments(source)):
            yield from _complaints(source, line, text, PHRASES, "a docstring or comment")


def sentences(files: Iterable[Source]) -> Iterator[str]:
    """No sentence of a docstring is long, tables, lists and examples aside."""
    for source in files:
        for node in (source.tree, *source.nodes(*DEFINITIONS)):
            paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
            for paragraph in (paragraph for paragraph in paragraphs if not _TABLE.search(paragraph)):
                for sentence in re.split(r"(?<=[.!?])\s", " ".join(paragraph.split())):
                    if (count := len(sentence.split())) > SENTENCE_WORDS_MAX:
                        text = (
                            f"a sentence of {count} words, at most {SENTENCE_WORDS_MAX} in a docstring: {sentence[:40]}"
                        )
                        yield source.complaint(node, text)


def names(files: Iterable[Source]) -> Iterator[str]:
    """No name that a file defines has a word of NAMES."""
    for source in files:
        for line, name in sorted(set(_defined(source))):
            for word in sorted({part.lower() for part in _PART.findall(name)} & NAMES.keys()):
                yield f"{source.path}:{line}: {word!r} in the name {name}: say {NAMES[word]!r}"


def locals_(files: Iterable[Source], locals_max: Mapping[str, int] = LOCALS_MAX) -> Iterator[str]:
    """A local is named for what it holds: each one that is not, where a part of the tree has too many."""
    by_part: dict[str, list[str]] = defaultdict(list)
    for source in files:
        part = source.path.partition("/")[0]
        text = f"a local is named for what it holds; {locals_max.get(part, 0)} in {part} may be named as this one"
        by_part[part] += [
            f"{source.path}:{line}: {name}: {text}" for line, name in sorted(_locals(source)) if name in LOCALS
        ]
    for part, complaints in by_part.items():
        if len(complaints) > locals_max.get(part, 0):
            yield from complaints


def _locals(source: Source) -> Iterator[tuple[int, str]]:
    fields = {id(child.target) for node in source.nodes(ast.ClassDef) for child in node.body if _is_field(child)}
    for node in source.nodes(ast.arg):
        yield node.lineno, node.arg
    for node in source.nodes(ast.Name):
        if isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id


def _is_field(node: ast.stmt) -> TypeGuard[ast.AnnAssign]:
    return isinstance(node, ast.AnnAssign)


def _complaints(source: Source, line: int, text: str, listed: dict[str, str], where: str) -> Iterator[str]:
    lowered = text.lower()
    for phrase, instead in listed.items():
        # At the beginning of a word, since "for every" is none, and "as everybody" neither.
        if re.search(rf"\b{re.escape(phrase.strip())}\b", lowered):
            yield f"{source.path}:{line}: {phrase.strip()!r} in {where}: say {instead!r}"


def _shown(source: Source) -> Iterator[tuple[int, str]]:
    """Every string but those that stand alone, such as docstrings: a text reaches people by any way."""
    alone = {id(node.value) for node in source.nodes(ast.Expr)}
    for node in source.nodes(ast.Constant):
        if isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def _docstrings(source: Source) -> Iterator[tuple[int, str]]:
    for node in (source.tree, *source.nodes(*DEFINITIONS)):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.lineno, " ".join(first.value.value.split())


def _comments(source: Source) -> Iterator[tuple[int, str]]:
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != first + len(lines):
                yield first, " ".join(lines)
                lines = []
            first = first if lines else token.start[0]
            lines.append(token.string.lstrip("# "))
    if lines:
        yield first, " ".join(lines)


def _defined(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(*DEFINITIONS):
        yield node.lineno, node.name
    for node in source.nodes(ast.arg):
        yield node.lineno, node.arg
    for node in source.nodes(ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
    for node in source.nodes(ast.Attribute):
        if isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
