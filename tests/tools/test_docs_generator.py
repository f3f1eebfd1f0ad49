"""What the generator writes is what the code says, and leaves nothing out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools import docs_generator

ROOT = Path(docs_generator.__file__).parent.parent
PAGES = ("flags.md", "metrics.md", "vllm.md", "sglang.md")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for name in PAGES:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    return tmp_path


def test_no_page_is_stale() -> None:
    assert docs_generator.main(["--check"]) == 0, "run python -m tools.docs_generator, and look at what it changed"


@pytest.mark.parametrize("name", PAGES)
def test_a_stale_page_is_reported_and_then_written(name: str, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = docs / name
    whole = page.read_text()
    page.write_text(whole.replace("| --- |", "| -- |", 1))
    assert docs_generator.main(["--check", f"--root={docs}"]) == 1
    assert capsys.readouterr().out == f"stale {page}\n"
    assert page.read_text() != whole
    assert docs_generator.main([f"--root={docs}"]) == 0
    assert page.read_text() == whole


def test_a_page_without_a_place_for_its_table_is_left_alone(docs: Path) -> None:
    page = docs / "sglang.md"
    page.write_text(page.read_text().replace("<!-- The end", "<!-- end"))
    with pytest.raises(SystemExit, match=r"sglang\.md: has no place for a table"):
        docs_generator.main([f"--root={docs}"])


def test_every_metric_that_the_code_names_has_a_row() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    modules = [
        "worker/daemon_metrics", "worker/worker_times", "process/process_metrics", "router/front/status",
        "router/backends/daemons/routing_metrics", "router/backends/servers/server_metrics",
    ]  # fmt: skip
    sources = (ROOT / "pdtransfer" / "serve" / f"{module}.py" for module in modules)
    names = {name for path in sources for name in re.findall(r'[^f]"(pdtransfer_\w+)"', path.read_text())}
    assert len(names) > 40
    assert {name for name in names if not re.search(rf"`{name}(_total|_info)?`", page)} == set()
