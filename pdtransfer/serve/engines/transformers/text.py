"""A checkpoint's tokenizer and chat template, by `tokenizers` and Jinja's sandbox: neither torch nor transformers.

It reads `tokenizer.json`, `tokenizer_config.json`, `config.json`, `generation_config.json`, and the template where it
stands in a file of its own. Texts and ids are those of transformers.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

FILE_BYTES_MAX = 256 << 20  # of one JSON file of a checkpoint
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
HELD_TOKENS_MAX = 16  # that may wait for the end of a character, which has four bytes at most
REPLACEMENT = "\ufffd"


def load(directory: Path) -> CheckpointText:
    """Reads a checkpoint directory. Raises ValueError for one that has no usable tokenizer."""
    if not directory.is_dir():
        raise ValueError("no such directory")
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError("it has no tokenizer.json: save its tokenizer with transformers first")
    try:
        tokenizer = Tokenizer.from_str(_read(path))
    except Exception as error:  # noqa: BLE001 -- the library raises nothing narrower
        raise ValueError(f"tokenizer.json: {error}") from None
    settings = _json(directory / "tokenizer_config.json")
    template = settings.get("chat_template")
    if (directory / TEMPLATE_FILE).is_file():
        template = _read(directory / TEMPLATE_FILE)
    elif isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", template)}
        template = named.get("default")
    return CheckpointText(
        tokenizer,
        None if template is None else str(template),
        special={name: _content(settings[name]) for name in SPECIAL_TOKENS if settings.get(name)},
        max_model_len=_context(_json(directory / "config.json")),
    )


def _read(path: Path) -> str:
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ValueError(f"{path.name} has more than {FILE_BYTES_MAX} bytes")
    return path.read_text(encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty without one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: it holds no object")
    return cast("dict[str, Any]", content)


def _content(token: object) -> str:
    return str(cast("dict[str, Any]", token).get("content", "")) if isinstance(token, dict) else str(token)


def _context(config: dict[str, Any]) -> int | None:
    """Tokens that the model was made for; the config of a model for text and images has another inside."""
    text = config.get("text_config")
    tokens = (cast("dict[str, Any]", text) if isinstance(text, dict) else config).get("max_position_embeddings")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


class CheckpointText:
    """A TextCodec of one checkpoint. `special` are the tokens that templates know by name."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, *, special: Mapping[str, str], max_model_len: int | None
    ) -> None:
        self._tokenizer, self._special, self.max_model_len = tokenizer, special, max_model_len
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocabulary: int | None = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._template = None if template is None else _compiled(template)
        self._byte_level = _is_byte_level(tokenizer)

    def encode(self, text: str, *, special: bool) -> NDArray[np.int64]:
        # The calls for one text hold the interpreter's lock: a long text on a thread would stop the event loop.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return np.array(encoded.ids, np.int64)

    def render(self, messages: Sequence[Mapping[str, object]], *, reply: bool) -> str:
        if self._template is None:
            raise ValueError("this model has no chat template")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=reply, tools=None, documents=None, **self._special
            )
        except Exception as error:  # noqa: BLE001 -- the template is code that came with the weights
            raise ValueError(f"the chat template refuses it: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return text

    def detokenizer(self) -> _Window:
        return _Window(self._tokenizer)

    def token_bytes(self, token: int) -> bytes:
        added = self._added.get(token)
        piece = added or self._tokenizer.id_to_token(token)
        if added or not piece:
            return (piece or "").encode()
        if self._byte_level:
            return bytes(_BYTES_OF[character] for character in piece if character in _BYTES_OF)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()


class _Window:
    """Decodes the last few ids with those before them, since a token's text depends on its neighbours."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []  # whose text is out
        self._new: list[int] = []  # whose text is held back

    def feed(self, token: int) -> str:
        self._new.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._new) < HELD_TOKENS_MAX:
            return ""
        if text:
            self._known, self._new = self._new, []
        else:  # a special token, which has no text: what it follows stays known
            self._known += self._new
            self._known, self._new = self._known[-HELD_TOKENS_MAX:], []
        return text

    def end(self) -> str:
        text = self._text() if self._new else ""
        self._new = []
        return text

    def _text(self) -> str:
        """The text that the new ids add to the known ones."""
        decode = self._tokenizer.decode
        return decode(self._known + self._new)[len(decode(self._known)) :]


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write for the 256 bytes: printable ones of Latin-1 stand for
    themselves, the others for 256 and on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES_OF = _byte_characters()


# Chat templates


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words, for training; here its content is written as it is."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's name

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(template: str) -> jinja2.Template:
    """Raises ValueError for one that is not a template. It is rendered in a sandbox, since it came with the weights."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    cast("dict[str, Any]", environment.globals).update(raise_exception=_refuse, strftime_now=_now)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"its chat template: {error}") from None


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(text: str) -> NoReturn:
    raise jinja2.TemplateError(text)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
