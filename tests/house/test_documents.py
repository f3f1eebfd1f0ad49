"""The documents: their lengths, their links, and that what they name exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.support.document_commands import readme
from tests.support.paths import REPO
from tools import plots

GENERATED = {REPO / "docs" / "flags.md", REPO / "docs" / "metrics.md"}
OTHERS = {REPO / name / "README.md" for name in ("deploy", "kernels", "tests/serve/stranger")} | {
    *(REPO / "proto").rglob("*.md")
}
DOCUMENTS = sorted({*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *OTHERS} - GENERATED)
PLACES = ("pdtransfer/", "kernels/", "tests/", "tools/", "examples/", "docs/", "deploy/", "lab/")

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
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


def test_readme_is_plain_enough_for_a_package_index() -> None:
    assert "mermaid" not in (REPO / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_readme_has_the_commands_of_an_engines_document(engine: str) -> None:
    """As they stand there."""
    document = (REPO / "docs" / f"{engine}.md").read_text(encoding="utf-8")
    assert [command for command in readme(engine) if command not in document] == []


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_has_the_figures_of_its_table(name: str) -> None:
    path, drawn = plots.plot(name)
    assert path.read_text(encoding="utf-8") == drawn


def test_each_decision_is_in_the_index_with_its_title() -> None:
    index = REPO / "docs" / "decisions" / "README.md"
    text = index.read_text(encoding="utf-8")
    decisions = sorted(set(index.parent.glob("*.md")) - {index})
    assert _LINK.findall(text) == [path.name for path in decisions]
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
    assert len(named) >= 6
    assert _absent(named, REPO / "pdtransfer" / "adapters") == []


def test_symptoms_of_the_troubleshooting_page_are_texts_of_the_package() -> None:
    """But for those of other programs, below its last heading."""
    text = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Texts of other programs")[0]
    named = [
        quote for cell in re.findall(r"^\|([^|]+)\|", text, re.MULTILINE) for quote in re.findall(r"`([^`]+)`", cell)
    ]
    assert len(named) >= 40
    assert _absent(named, REPO / "pdtransfer") == []


def _absent(quotes: list[str], package: Path) -> list[str]:
    """Those that are in no string of its code; `...` of a quote is any text, a value put into the string included."""
    nodes = [node for path in package.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    texts = {_text(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in alone}
    code = "\n".join(text.replace("\n", " ") for text in texts)
    return [quote for quote in quotes if not re.search("[^\n]*".join(map(re.escape, quote.split("..."))), code)]


def _text(node: ast.AST) -> str:
    """A string literal, with NUL for each value that is put into it; empty for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"
