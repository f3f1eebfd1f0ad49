"""The documents' site has every page, and each file that a page links to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import REPO
from tools import docs_site


def test_the_site_has_every_document_and_what_it_links_to(tmp_path: Path) -> None:
    assert docs_site.main([str(tmp_path / "site")]) == 0
    made = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*") if path.is_file()}
    expected = {path.relative_to(REPO) for path in [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]}
    assert expected - made == set()
    for name in ("proto/v1/README.md", "proto/v1/life.md", "deploy/README.md", "examples/embed.py", "docs/top.svg"):
        assert Path(name) in made
    assert not any(path.parts[0].startswith(".") for path in made)


def test_each_page_beside_the_decisions_and_figures_is_in_its_navigation() -> None:
    """mkdocs itself fails for one that is missing, where it can be had."""
    named = set(_pages(yaml.safe_load((REPO / "mkdocs.yml").read_text())["nav"]))
    pages = {path.relative_to(REPO).as_posix() for path in [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md")]}
    assert pages - named == set(), "add each of them to nav in mkdocs.yml"
    assert named - pages == {"proto/v1/README.md", "docs/figures/README.md", "docs/decisions/README.md"}


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if hasattr(nav, "values") else nav
    return [page for part in parts for page in _pages(part)]
