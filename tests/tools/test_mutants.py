"""Mutants: which ones a piece of code has, and what becomes of them in a tree of three files."""

from __future__ import annotations

import json
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tools.mutants.__main__ as mutants_main
from tests.support.waiting import wait_for
from tools.mutants.edits import mutants


def edited(source: str) -> list[str]:
    """The whole text of each mutant."""
    mutated = mutants("m.py", source)
    return [(source.encode()[: m.start] + m.new.encode() + source.encode()[m.end :]).decode() for m in mutated]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b <= c", ["x = a <= b <= c", "x = a < b < c"]),
        ("x = 'é' in a and not b", ["x = 'é' in a or not b", "x = 'é' not in a and not b"]),
        ("x = (a) - (b)", ["x = (a) + (b)"]),
        ("x = a is not b", ["x = a is b"]),
        ("x += a", ["x -= a"]),
        ("x.y |= a", ["pass"]),
        ("x = [*a] + [b]", []),
        ("if not a: b = c", ["if (a): b = c"]),
        ("if a: return", ["if False: return", "if not (a): return"]),
        ("x = [y for y in a if y]", ["x = [y for y in a if not (y)]"]),
        ("a.b(c)", ["pass"]),
        ("await a(b)", ["pass"]),
        ("log.info('%d', 1)", []),
        ("self.a = b", ["pass"]),
        ("return a", ["return not (a)"]),
        ("return False", ["return True"]),
        ("x = a[:b]", ["x = (a)"]),
        ("x = _A.fullmatch(b)", ["x = _A.match(b)"]),
        ("x = a.rows_max", ["x = (a.rows_max - 1)"]),
        ("x = range(3)", ["x = range(4)"]),
        ("x = zip(a, strict=True)", []),
        ("raise A(1 + 2)", []),
        ("assert a < 1", []),
    ],
)  # fmt: skip
def test_a_line_has_these_mutants(line: str, expected: list[str]) -> None:
    head = "async def f() -> bool:\n    "
    assert edited(head + line) == [head + text for text in expected]


def test_an_except_is_narrowed_a_default_changed_and_a_state_swapped() -> None:
    source = "T = {1: _S.A, 2: _S.B}\ndef f(a=False):\n    try: b = a\n    except (C, D): b = c\n    except E: b = d\n"
    texts = [
        ("_S.A,", "_S.B,"),
        ("_S.B}", "_S.A}"),
        ("(C, D)", "(D, )"),
        ("(C, D)", "(C, )"),
        ("E:", "():"),
        ("=False", "=True"),
    ]
    assert sorted(edited(source)) == sorted(source.replace(old, new) for old, new in texts)


def test_a_mutant_keeps_its_name_when_other_code_changes() -> None:
    source = "def f(a):\n    if a < 1:\n        return a\n"
    names = {mutant.name for mutant in mutants("m.py", source)}
    moved = "def g():\n    return 5\n\n\n" + source.replace("return a", "return a - b")
    assert names < {mutant.name for mutant in mutants("m.py", moved)}


def command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


TREE = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())


@pytest.mark.slow
def test_each_mutant_of_a_tree_meets_its_tests_which_leave_no_process_and_may_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in TREE["files"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    sets: dict[str, Any] = {"sets": {"all": {"count": 30, "code": ["pdtransfer"], "tests": [["tests"]]}}}
    monkeypatch.setattr(mutants_main, "_ROOT", tmp_path)
    monkeypatch.setattr(mutants_main, "_SETS", sets | {"equivalent": {}, "gpu": {}})
    out = tmp_path / "out.json"
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    mutants_main.main([f"--out={out}", "--jobs=1", "--minutes=0"])
    assert capsys.readouterr().out.endswith("Not run: 14 of 14; --resume runs them\n")
    late = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as one that comes just before a read
    try:
        mutants_main.main([f"--out={out}", "--test-seconds=2", "--jobs=1", "--resume"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, late)
    report = json.loads(out.read_text())
    for place, expected in TREE["expected"].items():
        results = {name: kept["status"] for name, kept in report.items() if kept["fork"] == (place == "fork")}
        assert {name.partition(": ")[2]: status for name, status in results.items()} == expected
    lived = next(name for name, kept in report.items() if kept["status"] == "lived")
    assert capsys.readouterr().out.endswith(f"{lived}, line 3\n")
    mutants_main.main(["pdtransfer/clamp.py", f"--out={out}", "--test-seconds=600", "--seconds=1", "--jobs=1"])
    assert "by time" in {kept["status"] for kept in json.loads(out.read_text()).values()}
    for pid in (tmp_path / "left").read_text().split():
        wait_for(lambda pid=pid: b"sleep" not in command(pid))
    assert (tmp_path / "pdtransfer/clamp.py").read_text() == TREE["files"]["pdtransfer/clamp.py"]


def test_files_of_no_set_are_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def f(x):\n    return x < 1\n")
    monkeypatch.setattr(mutants_main, "_ROOT", tmp_path)
    assert mutants_main.main(["a.py", "b.py", "--list", "--tests=tests"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"a.py", "b.py"}
