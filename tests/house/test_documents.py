"""The documents: their lengths, their links, and that what they name exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tools import plots

GENERATED = {REPO / "docs" / "flags.md", REPO / "docs" / "metrics.md"}
OTHERS = {REPO / name / "README.md" for name in ("deploy", "kernels", "tests/serve/stranger")} | {
    *(REPO / "proto").rglob("*.md")
}
DOCUMENTS = sorted({*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *OTHERS} - GENERATED)
PLACES = ("pdtransfer/", "kernels/", "tests/", "tools/", "examples/", "docs/", "deploy/", "lab/")

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
README = (REPO / "README.md").read_text(encoding="utf-8")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _name(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def _prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def _anchors(path: Path) -> set[str]:
    """What `#name` may follow the path: each heading, as code hosts write it."""
    headings = re.findall(r"^#+ (.+)$", _prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in _LINK.findall(_prose(path)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in _anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_documents_name_files_that_exist(path: Path) -> None:
    named = {each.split("*")[0] for each in re.findall(r"`([\w./*-]+)`", _prose(path)) if each.startswith(PLACES)}
    named = {each for each in named if not each.startswith("pdtransfer/_share/")}  # _share: of a wheel
    assert {each for each in named if not any((REPO / f"{each}{end}").exists() for end in ("", ".py"))} == set()


def test_documents_name_tests_that_exist() -> None:
    defined = {
        node.name
        for path in (REPO / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    } | {path.stem for path in (REPO / "tests").rglob("test_*.py")}
    named = {name for path in DOCUMENTS for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))}
    assert named - defined == set()


def test_readme_is_short_and_plain_enough_for_a_package_index() -> None:
    assert len(README.splitlines()) < 120
    assert "mermaid" not in README


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_readme_has_the_commands_of_an_engines_document(engine: str) -> None:
    """As they stand there."""
    [block] = re.findall(rf"\(docs/{engine}\.md\) .*?^```\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    document = (REPO / "docs" / f"{engine}.md").read_text(encoding="utf-8")
    commands = re.split(r"\n(?=\S)", block.strip())
    assert len(commands) == 3
    assert [command for command in commands if command.strip() not in document] == []


def test_the_plot_of_readme_has_the_figures_of_its_table() -> None:
    assert plots.PLOT.read_text(encoding="utf-8") == plots.drawn(
        plots.medians(plots.SOURCE.read_text(encoding="utf-8"))
    )


def test_architecture_is_short_and_links_every_decision() -> None:
    text = (REPO / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) < 250
    assert max(map(len, lines)) <= 120
    decisions = sorted((REPO / "docs" / "decisions").glob("*.md"))
    assert [link for link in _LINK.findall(text) if "decisions/" in link] == [_name(path) for path in decisions]
    for path in decisions:
        number, _, title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        assert path.name.startswith(f"{number}-")
        assert f"): {title}" in text


def test_figures_pages_are_listed() -> None:
    listed = set(_LINK.findall((REPO / "docs" / "figures" / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in (REPO / "docs" / "figures").glob("*.md")} - listed == {"README.md"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_install_commands_work_from_a_checkout(path: Path) -> None:
    """The name on a package index is not this project's."""
    assert re.findall(r"pip install '?pdtransfer", path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_programs_in_documents_import_names_that_exist(path: Path) -> None:
    for program in re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pdtransfer":
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_refusals_of_the_compatibility_table_are_texts_of_the_adapters() -> None:
    text = (REPO / "docs" / "compatibility.md").read_text(encoding="utf-8")
    named = [refusal for refusal in re.findall(r"refused: `([^`]+)`", text) if refusal != "..."]
    code = "".join(path.read_text(encoding="utf-8") for path in (REPO / "pdtransfer" / "adapters").rglob("*.py"))
    assert len(named) >= 6
    assert [refusal for refusal in named if refusal not in code] == []
