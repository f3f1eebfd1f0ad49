"""The rules of `python -m tools.lint`: each finds what it forbids, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest

from tools.lint import arrays, asserts, ceilings, device_waits, modules, tests_tree, versions, words
from tools.lint.sources import REPO, Source, parsed

Rule = Callable[[Iterable[Source]], Iterator[str]]
of_peers = asserts.checks_of_peers
alike = partial(modules.duplicate_functions, size_min=0)
locals_ = partial(words.locals_, locals_max={})


@pytest.mark.parametrize(
    ("rule", "path", "text", "complaint"),
    [
        (modules.class_names, "x.py", "class A: ...\nclass B:\n    class A: ...", "x.py:3: a second class is named A"),
        (modules.opening_sentences, "x.py", "import os", "x.py:1: a module opens"),
        (modules.opening_sentences, "x.py", "'''No full stop'''", "x.py:1: a module opens"),
        (modules.core_without_io, "pdtransfer/handoff/x.py", "np.random.rand()", "draws no random number"),
        (modules.core_without_io, "pdtransfer/errors.py", "def f():\n print(1)", "py:2: the core does no I/O: print"),
        (modules.environment_readers, "pdtransfer/x.py", "import os\nos.environ['A']", "x.py:2: only"),
        (modules.environment_readers, "pdtransfer/x.py", "from os import getenv", "x.py:1: only"),
        (alike, "x.py", "def f(x: int) -> int:\n '''A.'''\n return x + 1\ndef g(x):\n return x + 1", "x.py:4: g does"),
        (of_peers, "x.py", "def f(a: str, m: Hello) -> None:\n assert m.identity.role == 'router'", "x.py:2: "),
        (of_peers, "x.py", "def f(m: Hello) -> None:\n a = m.identity\n assert a.role == 'b'", "x.py:3: "),
        (of_peers, "x.py", "def f(m: Message):\n match m:\n  case Grant(grant=n):\n   assert n > 0", "x.py:4: "),
        (of_peers, "x.py", "def f(m: Grant):\n for part in m.parts:\n  assert part.extents", "x.py:3: "),
        (of_peers, "x.py", "async def f(*, m: zmq.Frame):\n if (a := len(m)) > 3:\n  assert a < 9", "x.py:3: "),
        (tests_tree.imports, "tests/x.py", "from tests.library.test_a import b", "tests.library.test_a.b"),
        (tests_tree.imports, "tests/x.py", "import tests.conftest", "tests.conftest"),
        (words.phrases_shown, "x.py", "raise ValueError(f'{a} is none of {b}')", "x.py:1: 'is none of' in a text"),
        (words.phrases_shown, "x.py", "log.error('%s is no message', a)", "say 'is not a message from X to Y'"),
        (words.phrases_shown, "x.py", "Flag(help='Refused for ever.')", "say 'permanently'"),
        (words.phrases_shown, "x.py", "text = f'{a} is none of b'\nraise ValueError(text)", "x.py:1: 'is none of'"),
        (words.phrases_shown, "x.py", "def f(a):\n return f'no {a} is ready; {a} says why'", "x.py:2: 'says why'"),
        (words.phrases_shown, "x.py", "A = {'full': 'so many rooms'}", "x.py:1: 'so many' in a text"),
        (words.phrases_shown, "x.py", "def f(why: str = 'there is none'): ...", "x.py:1: 'there is none' in a text"),
        (words.phrases_shown, "x.py", "b.append('a' 'b is'\n ' told of it')", "x.py:1: 'is told' in a text"),
        (words.phrases, "x.py", "def f():\n '''Waits for so\n many rows.'''", "x.py:2: 'so many' in a docstring"),
        (words.phrases, "x.py", "'''So many rows.'''", "x.py:1: 'so many' in a docstring"),
        (words.phrases, "x.py", "a = 1\n# It is\n# told.\nb = 2", "x.py:2: 'is told' in a docstring or comment"),
        (words.sentences, "x.py", f"'''A.'''\ndef f():\n '''B.\n\n C {'d ' * 28}.'''", "x.py:2: a sentence of 30"),
        (words.names, "x.py", "class A:\n async def heard_of(self): ...", "x.py:2: 'heard' in the name heard_of"),
        (words.names, "x.py", "class ToldLater: ...", "x.py:1: 'told' in the name ToldLater: say 'sent"),
        (words.names, "x.py", "def f(a, *, tell): ...", "x.py:1: 'tell' in the name tell"),
        (words.names, "x.py", "for _said in a: pass", "x.py:1: 'said' in the name _said"),
        (words.names, "x.py", "self.told_by = 1", "x.py:1: 'told' in the name told_by"),
        (locals_, "pdtransfer/x.py", "for each in rows: pass", "x.py:1: each: a local is named for what it"),
        (locals_, "pdtransfer/x.py", "def f(a, *, held): ...", "x.py:1: held: a local is named"),
        (locals_, "lab/x.py", "a = [(b, at) for b, at in c]", "x.py:1: at: a local is named"),
    ],
)
def test_what_a_rule_forbids_is_found_once(rule: Rule, path: str, text: str, complaint: str) -> None:
    (found,) = rule([parsed(text, path)])
    assert complaint in found


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (modules.class_names, "x.py", "class A: ...\nclass B: ..."),
        (modules.opening_sentences, "x.py", "'''One sentence.'''"),
        (modules.core_without_io, "pdtransfer/client/x.py", "print(open('a'))"),
        (modules.environment_readers, "pdtransfer/environment.py", "import os\nos.environ['A']"),
        (alike, "x.py", "def f(x):\n return x + 1\ndef g(x):\n return x + 2"),
        (alike, "x.py", "def f(x):\n return x + 1\nasync def g(x):\n return x + 1"),
        (of_peers, "x.py", "def f(self, m: Message) -> None:\n assert self.room is not None"),
        (tests_tree.imports, "tests/x.py", "from tests.support.waiting import until"),
        (words.phrases_shown, "x.py", "# Refused for ever.\nraise ValueError('must be one of a, b')"),
        (words.phrases_shown, "x.py", "def f():\n 'So many.'\nclass A:\n 'As ever.'\n a: str\n 'There is none.'"),
        (words.phrases, "x.py", "'''There is none for every row.'''  # as everywhere\n\n# It is\n\n# told here.\n"),
        (words.sentences, "x.py", f"'''A {'b ' * 26}c. D {'e ' * 26}f.\n\n| {'g ' * 30}|\n\n  H {'i ' * 30}\n'''"),
        (words.names, "x.py", "teller = b.told(say)\nimport saying"),
        (locals_, "pdtransfer/x.py", "class A:\n at: float\nself.held = f(own=1, held_s=at)"),
    ],
)
def test_what_a_rule_allows_is_not_found(rule: Rule, path: str, text: str) -> None:
    assert list(rule([parsed(text, path)])) == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("from pdtransfer.x import b", "import pdtransfer.x.a"),
        ("def f():\n from . import b", "from .a import C"),
        ("from ..x.b import C", "if TYPE_CHECKING:\n from pdtransfer.x import a"),
        ("from . import f", "from . import a"),
        ("from .c import D", "from .a import C"),
    ],
)
def test_files_that_import_each_other_are_found(a: str, b: str) -> None:
    texts = {"__init__": "from .b import f", "a": a, "b": b, "c": "from . import b"}
    package = [parsed(text, f"pdtransfer/x/{name}.py") for name, text in texts.items()]
    (circle,) = modules.circles(package)
    assert {"pdtransfer.x.a", "pdtransfer.x.b"} <= set(circle.partition(" in a circle: ")[2].split(", "))
    assert not list(modules.circles([*package[:2], package[3]]))


def test_a_helper_of_general_use_is_defined_once() -> None:
    files = [parsed("def until(): ...", "tests/support/waiting.py"), parsed("def until(): ...", "tests/test_a.py")]
    assert list(tests_tree.general_helpers(files)) == ["tests/test_a.py:1: until is in tests/support/waiting.py"]


def test_locals_that_name_nothing_are_counted_by_part_of_the_tree() -> None:
    files = [parsed("each = 1\nat = 2", "tests/x.py"), parsed("each = 1", "lab/x.py")]
    assert list(words.locals_(files, {"tests": 2, "lab": 1})) == []
    complaints = list(words.locals_(files, {"tests": 1, "lab": 1}))
    named = [complaint.partition(": a local")[0] for complaint in complaints]
    assert named == ["tests/x.py:1: each", "tests/x.py:2: at"]


def test_private_reads_are_counted_and_ones_own_are_none() -> None:
    files = [parsed("a.b._c; self._d; cls._e; f.__class__; self.g._h", "tests/x.py")]
    assert list(tests_tree.private_reads(files, reads_max=2)) == []
    reads = list(tests_tree.private_reads(files, reads_max=1))
    assert sorted(read.split(", ")[1].partition(";")[0] for read in reads) == ["a.b._c", "self.g._h"]


@pytest.mark.parametrize("field", ["NDArray[np.int64]", "dict[str, Tensor] | None", "Words", "np.ndarray"])
def test_a_dataclass_that_compares_arrays_is_found(field: str) -> None:
    words = parsed("Words = NDArray[np.uint64]\n", "words.py")
    one = parsed(
        f"from .words import Words\n@dataclass\nclass One:\n    n: int\n    a: {field}\n"
        f"\n@dataclass\nclass Own:\n    a: {field}\n    def __eq__(self, other): ...\n"
        f"\n@dataclass(eq=False)\nclass Two:\n    a: {field}\n"
        "\n@dataclass\nclass Three:\n    a: Callable[[Tensor], Tensor]\n",
        "one.py",
    )
    (found,) = arrays.comparing_dataclasses([words, one])
    assert found.startswith("one.py:3: dataclass One ")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.cuda.synchronize()", "synchronize"),
        ("with torch.cuda.graph(made): pass", "graph"),
        ("self.call('cuCtxSynchronize')", "cuCtxSynchronize"),
        ("driver.cuMemFree(1)", "cuMemFree"),
        ("torch.cuda.empty_cache()", "empty_cache"),
        ("self._gpu.finish()", "Gpu.finish"),
        ("gpus.gpu_at(0).free(address)", "Gpu.free"),
        ("at = here.allocate(self.count * 8)", "Gpu.allocate"),
        ("here.synchronise(0)", "Gpu.synchronise"),
        ("torch.cuda.current_stream().synchronize()", ""),
        ("event.synchronize()", ""),
        ("here.synchronise(stream)", ""),
        ("here.free(address, stream)", ""),
        ("self._gpu.allocate(8, stream=stream)", ""),
        ("engine.free(room)", ""),
        ("node.finish(room)", ""),
    ],
)
def test_a_wait_for_a_whole_device_is_distinguished_from_one_for_ones_own_work(line: str, name: str) -> None:
    waits = {device_waits.waits_for_a_device(node) for node in ast.walk(ast.parse(line))} - {""}
    assert waits == ({name} if name else set())


@pytest.mark.parametrize(
    ("rule", "path", "line", "complaint"),
    [
        (device_waits.device_wide, "pdtransfer/x.py", "torch.cuda.empty_cache()", "waits for a whole device"),
        (device_waits.streams, "pdtransfer/x.py", "gpu.synchronise(stream)", "waits for a stream"),
        (device_waits.engines, "pdtransfer/hisparse/hot_x.py", "tensor.item()", "waits inside the driver: item"),
        (device_waits.engines, "pdtransfer/hisparse/hot_x.py", "rows.to(self.device)", "waits inside the driver: to"),
        (device_waits.loops, "pdtransfer/client/x.py", "event.synchronize()", "waits for no GPU"),
    ],
)
def test_a_wait_without_a_reason_is_found(rule: Rule, path: str, line: str, complaint: str) -> None:
    source = parsed(f"class A:\n def f(self):\n  {line}", path)
    assert [found for found in rule([source]) if found.startswith(f"{path}:3: ") and complaint in found]


def test_a_reason_of_which_there_is_no_wait_any_more_is_found() -> None:
    assert len(list(device_waits.streams([]))) == len(device_waits.WAITS_FOR_A_STREAM)


TABLE = """
[parts]
library = { ceiling = 5, goal = 5 }
[library]
root = { paths = ["pdtransfer"], ceiling = 2, goal = 2, role = "names" }
handoff = { paths = ["pdtransfer/handoff", "pdtransfer/wire"], ceiling = 4, goal = 3, role = "the core" }
[lab]
lab = { paths = ["lab"], ceiling = 9, goal = 9, role = "models" }
"""


def lines_above(**counts: int) -> list[str]:
    files = [parsed("1\n" * count, f"{path.replace('_', '/')}.py") for path, count in counts.items()]
    return list(ceilings.above(files, ceilings.rooms(TABLE)))


def test_a_version_that_a_text_has_otherwise_or_no_more_is_found() -> None:
    found = versions.differing(lambda path: (REPO / path).read_text("utf-8").replace(" to 0.33", " to 0.9"))
    assert [each.partition(":")[0] for each in found] == ["README.md", "docs/vllm.md"]
    assert all(": nothing, and" in each for each in versions.differing(lambda _: ""))


def test_lines_count_to_the_room_with_the_longest_path_and_to_its_part() -> None:
    assert lines_above(pdtransfer_x=2, pdtransfer_handoff_x=2, pdtransfer_wire_x=1, lab_x=9) == []
    (room,) = lines_above(pdtransfer_x=3)
    assert "root has 3 lines, 1 above its ceiling of 2: make room" in room
    (room,) = lines_above(pdtransfer_handoff_x=3, pdtransfer_wire_x=2)
    assert "handoff has 5 lines, 1 above its ceiling of 4" in room
    (part,) = lines_above(pdtransfer_x=2, pdtransfer_handoff_deep_x=4)
    assert "library has 6 lines, 1 above its ceiling of 5" in part
    (nowhere,) = lines_above(elsewhere_x=1)
    assert "elsewhere/x.py:1: no room" in nowhere


def test_ceilings_come_down_to_the_lines_or_the_goal_and_never_rise() -> None:
    counted = {"root": 9, "handoff": 2, "lab": 9, "library": 11}
    table = ceilings.rooms(ceilings.lowered(TABLE, counted))
    assert {name: room.ceiling for name, room in table.items()} == {"root": 2, "handoff": 3, "lab": 9, "library": 5}
