"""A checkpoint's tokenizer and chat template, without torch: ids and texts as transformers has them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdtransfer.errors import ConfigError
from pdtransfer.serve.engines.transformers.text import CheckpointText, load
from pdtransfer.serve.router.front.text import load_text, token_name
from tests.support.tiny_tokenizer import END, START, TEMPLATE, write_tokenizer

TEXT = "The cat is always in the fridge: \u017c\u00f3\u0142w, 10 \u20ac, \U0001f389\U0001f389 and\n\n  spaces "
CHAT = [{"role": "system", "content": " be kind "}, {"role": "user", "content": "hello \u20ac"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def text(directory: Path) -> CheckpointText:
    return load(directory)


def test_texts_become_ids_and_come_back(text: CheckpointText) -> None:
    ids = text.encode(TEXT, special=True)
    assert len(ids) < len(TEXT.encode())
    assert text.decode(ids.tolist()) == TEXT
    assert b"".join(map(text.token_bytes, ids.tolist())) == TEXT.encode()
    assert (text.vocabulary, text.max_model_len) == (300, 128)
    assert text.encode("", special=True).tolist() == []


def test_pieces_split_no_character_and_make_up_the_whole(text: CheckpointText) -> None:
    ids, detokenizer = text.encode(TEXT, special=False).tolist(), text.detokenizer()
    pieces = [detokenizer.feed(each) for each in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.end() == TEXT
    assert "" in pieces, "some ids end within a character"


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_make_the_same_text_in_pieces_as_at_once(text: CheckpointText, seed: int) -> None:
    ids, detokenizer = random.Random(seed).choices(range(322), k=200), text.detokenizer()
    pieces = "".join(map(detokenizer.feed, ids)) + detokenizer.end()
    tokenizer = text._tokenizer
    assert pieces.replace("\ufffd", "") == tokenizer.decode(ids, skip_special_tokens=True).replace("\ufffd", "")


def test_an_incomplete_character_is_held_back_and_comes_at_the_end(text: CheckpointText) -> None:
    ids, detokenizer = text.encode("\u20ac", special=False).tolist(), text.detokenizer()
    assert len(ids) == 3
    assert [detokenizer.feed(each) for each in ids[:2]] == ["", ""]
    assert (detokenizer.end(), detokenizer.end()) == ("\ufffd", "")
    endless = text.detokenizer()
    assert "".join(endless.feed(ids[0]) for _ in range(64)), "no endless hold"


def test_tokens_that_begin_words_have_their_space(tmp_path: Path) -> None:
    pieces = {"<unk>": 0, "\u2581a": 1, "\u2581cat": 2, "s": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = load(tmp_path)
    detokenizer = text.detokenizer()
    assert [detokenizer.feed(each) for each in (1, 2, 3, 4, 5, 6, 2)] == ["a", " cat", "s", "", "", "\u20ac", " cat"]
    assert [text.token_bytes(each) for each in (2, 4, 99)] == [b" cat", b"\xe2", b""]
    assert [token_name(text, each) for each in (2, 4, 99)] == [" cat", "bytes:\\xe2", "token_id:99"]
    assert text.max_model_len is None


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_a_long_text_on_a_thread_lets_other_threads_run(text: CheckpointText, way: str) -> None:
    ids = [*range(100, 130)] * 40_000
    work = threading.Thread(target=lambda: text.encode("word " * 80_000, special=True))
    if way == "decode":
        work = threading.Thread(target=lambda: text.decode(ids))
    work.start()
    turns = 0
    while work.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


def test_a_chat_is_rendered_by_the_template(text: CheckpointText) -> None:
    rendered = text.render(CHAT, reply=True)
    assert rendered == f"{START}system\nbe kind{END}\n{START}user\nhello \u20ac{END}\n{START}assistant\n"
    assert text.render(CHAT, reply=False) == rendered.removesuffix(f"{START}assistant\n")
    ids = text.encode(rendered, special=False).tolist()
    assert ids.count(0) == 3
    detokenizer = text.detokenizer()
    assert "".join(map(detokenizer.feed, ids)) == rendered.replace(START, "").replace(END, "")
    assert token_name(text, 1) == END


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (TEMPLATE, "no developers here"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[9].content + 1 }}", "chat template refuses"),
        ("{{ range(10**9) }}", "chat template refuses.*Range too big"),
        ("{{ 1 // (messages | length - 1) }}", "chat template refuses.*by zero"),
        (None, "no chat template"),
    ],
)
def test_what_the_template_refuses_is_an_error_of_the_request(
    template: str | None, complaint: str, tmp_path: Path
) -> None:
    text = load(write_tokenizer(tmp_path, template=template))
    with pytest.raises(ValueError, match=complaint):
        text.render([{"role": "developer", "content": "x"}], reply=True)


def test_templates_have_what_transformers_gives_them(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}\n"
        "    {% generation %}{{ eos_token }}{% endgeneration %}\n"
        "{{ strftime_now('%Y')[:2] }}{{ pad_token }}"
        "{{ {'b': '€', 'a': 1} | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}"
        "{{ documents is none }}"
    )
    text = load(write_tokenizer(tmp_path, template=template, pad_token=END))
    rendered = f'{{"role": "system", "content": " be kind "}}{END}20{END}{{"a":1,"b":"€"}}True'
    assert text.render(CHAT, reply=True) == rendered


def test_texts_ids_and_chats_are_those_of_transformers(directory: Path, text: CheckpointText) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert theirs(TEXT)["input_ids"] == text.encode(TEXT, special=True).tolist()
    assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == text.render(CHAT, reply=True)
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ids == text.encode(text.render(CHAT, reply=True), special=False).tolist()


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer_config.json": "[1]"}, "tokenizer_config.json: it holds no object"),
        ({"config.json": "{"}, "config.json"),
        ({"chat_template.jinja": "{% for %}"}, "its chat template"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_with_the_reason(
    files: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    if files:
        write_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        load_text(str(tmp_path))


def test_a_template_may_stand_in_the_settings_alone_or_by_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    for number, template in enumerate(["yes", named]):
        settings = {"template": None, "chat_template": template}
        assert load(write_tokenizer(tmp_path / str(number), **settings)).render(CHAT, reply=True) == "yes"
    config = {"text_config": {"max_position_embeddings": 77}}
    (tmp_path / "0" / "config.json").write_text(json.dumps(config))
    assert load(tmp_path / "0").max_model_len == 77


def test_neither_torch_nor_transformers_is_imported(directory: Path) -> None:
    code = (
        "import sys; from pdtransfer.serve.router.front.text import load_text;"
        f"load_text({str(directory)!r}); sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
