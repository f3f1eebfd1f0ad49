"""tools/compose-demo says by its status whether anything is wrong: 1, or only something that cannot be had here: 3."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import REPO

USED = (  # of the host; whatever could change it is one of `commands`, or is not there
    "bash", "cat", "chmod", "dirname", "env", "grep", "id", "mkdir", "mktemp", "rm", "sed", "seq", "setsid", "sleep",
    "tail", "tar", "timeout", "wc",
)  # fmt: skip
FULL = "test-vllm ARGS='--full -m full'"
TARGETS = "test-vllm", "test-sglang", FULL
ENGINES = {"vllm": 0, "sglang": 0}  # what tools/venv ends with for each
LATE_PYTHON = {"other_python": 0, "test_fast": 124}
DOCKER = """case $* in
  info|"image rm"*) exit 0 ;;
  "image inspect"*) echo $((${{MIB:-100}} << 20)) ;;
  "run --rm"*) echo 3 9 ;;
  build*) {build} ;;
  *) exit 1 ;;
esac"""


@pytest.fixture
def tried(tmp_path: Path) -> Path:
    """A copy that may write where it likes, and the only commands that it finds."""
    for name in ("tools/compose-demo", "deploy/compose.yaml"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(REPO / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/usr/bin/env bash\n[ "$1" != -m ] || [ -z "${OTHER_PACKAGES:-}" ]\n')
    python.chmod(0o755)
    for name in USED:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    return tmp_path


def demo(tried: Path, variables: dict[str, str] | None = None, **commands: str) -> tuple[int, str]:
    """Its status and what it said, where `commands` do what is said here, and no other can be had."""
    for name, does in commands.items():
        path = tried / "bin" / name.replace("_", "-")
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(0o755)
    ran = subprocess.run(
        [tried / "tools" / "compose-demo"], env={"PATH": str(tried / "bin"), "HOME": str(tried)} | (variables or {}),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stderr


def test_no_engine_is_nothing_that_is_wrong(tried: Path) -> None:
    status, output = demo(tried, docker="exit 1")
    assert (status, "no container engine" in output) == (3, True), output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts an engine")
def test_an_engine_that_cannot_be_started_is_nothing_that_is_wrong_and_the_host_is_as_before(tried: Path) -> None:
    calls = tried / "calls"
    noted = {name: f'echo "{name} $*" >>{calls}' for name in ("ip", "iptables", "iptables_save", "iptables_restore")}
    status, output = demo(tried, docker="exit 1", dockerd="exit 1", **noted)
    assert (status, "no container engine" in output) == (3, True), output
    saved, link, restored = calls.read_text().splitlines()
    assert (saved.strip(), link) == ("iptables_save", "ip link delete docker0")
    assert restored.startswith("iptables_restore /")


def test_no_base_image_is_nothing_that_is_wrong(tried: Path) -> None:
    docker = 'case $* in info) ;; "compose version") ;; *) exit 1 ;; esac'
    status, output = demo(tried, docker=docker, debootstrap="exit 1")
    assert (status, "debootstrap failed" in output) == (3, True), output


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("E: Failed to fetch http://deb.debian.org/x.deb  Temporary failure resolving 'deb.debian.org'", 3),
        ("urllib3: NewConnectionError('failed to establish a new connection: [Errno 101] Network is unreachable')", 3),
        ("error: metadata-generation-failed", 1),
        ("The command '/bin/sh -c gcc' returned a non-zero code: 1", 1),
        ("COPY failed: file not found in build context: stat kernels: file does not exist", 1),
    ],
)
def test_an_image_that_cannot_be_built_is_wrong_but_for_want_of_the_network(
    tried: Path, last: str, status: int
) -> None:
    build = f'echo "Step 1/9"; echo "{last}" >&2; exit 1'
    found, output = demo(tried, docker=DOCKER.format(build=build), docker_compose="exit 0")
    assert (found, "could not be built" in output, last in output) == (status, True, True), output


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        ({"MIB": "149"}, "the router image has 149 MiB: more than 148"),
        ({"OTHER_PACKAGES": "1"}, "other packages than its locks"),
    ],
)
def test_an_image_that_is_too_large_or_has_packages_that_are_not_locked_is_wrong(
    tried: Path, variables: dict[str, str], wrong: str
) -> None:
    status, output = demo(tried, variables, docker=DOCKER.format(build="exit 0"), docker_compose="exit 0")
    assert (status, wrong in output) == (1, True), output


def test_an_images_limit_lies_between_what_it_has_and_what_any_part_would_add_that_it_leaves_out() -> None:
    script = (REPO / "tools" / "compose-demo").read_text()
    figures = (REPO / "docs" / "figures" / "images.md").read_text()
    (spare,) = re.findall(r"^mib_spare=(\d+)$", script, re.MULTILINE)
    limits = dict(re.findall(r'^build (\w+) "\$\w+" (\d+) ', script, re.MULTILINE))
    measured = re.findall(r"^\| `(\w+)` \| .*? \| (\d+) MiB \|", figures, re.MULTILINE)
    assert limits == dict(measured)
    left_out = figures.partition("What the worker's leaves out")[2].partition("Debian's base")[0]
    parts = [int(mib) for mib in re.findall(r" \| (\d+) \|$", left_out, re.MULTILINE)]
    (mooncake,) = re.findall(r"^\| Mooncake's engine.*? \| +\| ([\d.]+) \|$", figures, re.MULTILINE)
    assert len(parts) == 6
    assert int(spare) < min(*parts, float(mooncake))


def test_a_connection_that_broke_and_was_made_again_is_not_why_a_build_fails(tried: Path) -> None:
    build = 'echo "Retrying: NewConnectionError"; for line in $(seq 30); do echo "Step $line"; done; exit 1'
    assert demo(tried, docker=DOCKER.format(build=build), docker_compose="exit 0")[0] == 1


def test_a_fleet_that_does_not_start_is_wrong(tried: Path) -> None:
    status, output = demo(tried, docker=DOCKER.format(build="exit 0"), docker_compose="exit 1")
    assert (status, "does not start" in output) == (1, True), output


def test_a_fleet_does_not_start_before_it_may(tried: Path) -> None:
    after, early = tried / "after", tried / "early"
    (tried / "bin" / "sleep").unlink()
    status, output = demo(
        tried, {"AFTER": str(after)}, docker=DOCKER.format(build="exit 0"), sleep=f": >{after}",
        docker_compose=f"[ -e {after} ] || [[ $* != *up* ]] || : >{early}; exit 1",
    )  # fmt: skip
    assert (status, "does not start" in output, after.exists(), early.exists()) == (1, True, True, False), output


def integrate(
    tried: Path, *, test: str = "", containers: str = "exit 3", vllm: int = 3, sglang: int = 3, test_engines: int = 0,
    other_python: int | None = None, test_fast: int = 0, seconds_all: int = 5_100, dist: int = 0, docs: int = 0,
    site: int = 0,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """.ci/run, where `make test` and tools/compose-demo do what is said here, and where tools/venv for each engine and
    the tests of any end with these statuses, and tools/venv and the tests for another Python, if there is one. So do
    tools/dist, and with `docs` and `site` tools/venv for the documents and `make docs`."""
    (tried / ".ci").mkdir()
    script = (REPO / ".ci" / "run").read_text()
    assert "seconds_all=5100 " in script
    (tried / ".ci" / "run").write_text(script.replace("seconds_all=5100 ", f"seconds_all={seconds_all} "))
    (tried / ".ci" / "run").chmod(0o755)
    fast = f"test-fast) exit {test_fast} ;;"
    others = f"test-vllm | test-sglang) exit {test_engines} ;; docs) exit {site} ;;"
    make = f"case $1 in test) {test or ':'} ;; {fast} {others} esac"
    statuses = {"docs": docs, "vllm": vllm, "sglang": sglang, "3.13": other_python, "*": 9}
    venv = f"case $1 in {' '.join(f'{kind}) exit {status} ;;' for kind, status in statuses.items())} esac"
    written = [("tools/compose-demo", containers), ("tools/venv", venv), ("bin/make", make)]
    written.append(("tools/dist", f"exit {dist}"))
    for name, does in [*written, ("bin/python3.13", "exit 0")] if other_python is not None else written:
        (tried / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tried / name).chmod(0o755)
    environment = {"PATH": str(tried / "bin")}
    return subprocess.run(
        [tried / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (1, 1), (3, 0), (124, 0)])
def test_continuous_integration_fails_with_the_containers_and_not_for_want_of_them(
    tried: Path, status: int, ends: int
) -> None:
    ran = integrate(tried, containers=f"echo so it is; exit {status}")
    assert ran.returncode == ends, ran.stderr
    assert "so it is\n" in ran.stdout
    assert ("compose-demo:" in ran.stdout) == (ends == 0)


def pythons(first: str, second: str, third: str) -> list[str]:
    return [f"Python 3.12: {first}", f"Python 3.13: {second}", f"Python 3.14: {third}"]


# What is run after the tests, with the statuses of each of its parts; then how .ci/run ends, and what it prints of it.
AFTER_THE_TESTS = [
    ("d", {}, 0, ["dist: passed", "docs: passed"]),
    ("d", {"dist": 3, "docs": 3}, 0, ["dist: not run", "docs: not run"]),
    ("d", {"dist": 1}, 1, []),
    ("d", {"docs": 1}, 1, ["dist: passed"]),
    ("d", {"site": 1}, 1, ["dist: passed"]),
    ("test-", ENGINES, 0, ["test-vllm: passed", "test-sglang: passed", f"{FULL}: passed"]),
    ("test-", ENGINES | {"vllm": 3}, 0, ["test-vllm: not run", "test-sglang: passed"]),
    ("test-", ENGINES | {"sglang": 3}, 0, ["test-vllm: passed", "test-sglang: not run", f"{FULL}: passed"]),
    ("test-", ENGINES | {"test_engines": 124}, 0, [f"{target}: not finished" for target in TARGETS]),
    ("test-", ENGINES | {"vllm": 3, "test_engines": 1}, 1, ["test-vllm: not run"]),
    ("test-", ENGINES | {"test_engines": 1}, 1, []),
    ("test-", ENGINES | {"sglang": 1}, 1, ["test-vllm: passed"]),
    ("test-", ENGINES | {"vllm": 1}, 1, []),
    ("Python", {}, 0, pythons("not run", "not run", "not run")),
    ("Python", {"other_python": 0}, 0, pythons("not run", "passed", "not run")),
    ("Python", {"other_python": 3}, 0, pythons("not run", "not run", "not run")),
    ("Python", LATE_PYTHON, 0, pythons("not run", "not finished in the time that was left", "not run")),
    ("Python", {"other_python": 0, "test_fast": 2}, 2, ["Python 3.12: not run"]),
    ("Python", {"other_python": 1}, 1, ["Python 3.12: not run"]),
]


@pytest.mark.parametrize(("named", "statuses", "ends", "output"), AFTER_THE_TESTS)
def test_continuous_integration_fails_with_what_it_runs_and_not_for_want_of_it(
    tried: Path, named: str, statuses: dict[str, int], ends: int, output: list[str]
) -> None:
    ran = integrate(tried, **statuses)
    assert ran.returncode == ends, ran.stderr
    assert re.findall(rf"^{named}[^:]*: [^:,\n]*", ran.stdout, re.MULTILINE) == output


def test_engines_do_not_begin_without_time(tried: Path) -> None:
    ran = integrate(tried, vllm=0, sglang=0, test_engines=1, seconds_all=100)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("test-")]
    assert lines == [f"{target}: not run, no time is left: make {target}" for target in TARGETS]


def test_an_image_is_built_beside_the_tests_and_its_fleet_starts_after_them(tried: Path) -> None:
    building, order = tried / "building", tried / "order"
    ran = integrate(
        tried,
        test=f"until [ -s {building} ]; do sleep 0.01; done; [ -e $(cat {building}) ] || echo tested >>{order}",
        containers=f"echo $AFTER >{building}; until [ -e $AFTER ]; do sleep 0.01; done; echo fleet >>{order}",
    )
    assert (ran.returncode, order.read_text().split()) == (0, ["tested", "fleet"]), ran.stderr


def test_tests_that_fail_end_what_is_built_beside_them(tried: Path) -> None:
    building, ended = tried / "building", tried / "ended"
    ran = integrate(
        tried,
        test=f"until [ -e {building} ]; do sleep 0.01; done; exit 7",
        # A signal within $(...) would end the script without its trap.
        containers=f"trap ': >{ended}; exit 143' TERM; n=$(seq 3000); : >{building}; for _ in $n; do sleep 0.01; done",
    )
    assert (ran.returncode, ended.exists()) == (7, True), ran.stderr
