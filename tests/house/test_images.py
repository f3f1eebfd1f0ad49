"""The images: what is locked for them, what the router needs of it, how they are packed, and their SBOM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import REPO
from tools.check_sbom import differences, locked

LOCKS = REPO / "deploy" / "locks"
IMAGE = REPO / "deploy" / "image"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
LOCKED = {  # the extras that each lock has, beside what the package always needs
    "router": ("daemons", "otel"),
    "worker": ("daemons", "otel", "mooncake"),
    "cuda": ("daemons", "otel", "mooncake", "cuda"),
}


def lock(*names: str, python: str = "3.12") -> dict[str, str]:
    return locked("".join((LOCKS / f"{name}.txt").read_text() for name in names), python)


def asked(*extras: str) -> list[Requirement]:
    listed = [*PROJECT["dependencies"], *(one for each in extras for one in PROJECT["optional-dependencies"][each])]
    return [requirement for each in listed if (requirement := Requirement(each)).name != "pdtransfer"]


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of deploy/image as a module."""
    monkeypatch.syspath_prepend(str(IMAGE))
    spec = spec_from_file_location(name, IMAGE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", LOCKED)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_locks_have_all_that_the_package_asks_for_in_versions_that_fit(name: str, python: str) -> None:
    found = lock(name, python=python)
    for each in asked(*LOCKED[name]):
        assert each.specifier.contains(found[canonicalize_name(each.name)], prereleases=True), each


@pytest.mark.parametrize("path", sorted(LOCKS.iterdir()), ids=lambda path: path.name)
def test_each_line_of_a_lock_is_a_version_with_hashes(path: Path) -> None:
    entries = re.split(r"\n(?=\S)", path.read_text().partition("\n#    make locks\n")[2].rstrip())
    assert entries
    for entry in entries:
        first, *rest = entry.splitlines()
        assert re.match(r"[a-z0-9-]+==[^ ]+ ", first), first
        hashes = [line.strip(" \\") for line in rest if not line.strip().startswith("#")]
        assert hashes, first
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), first
    assert not re.search(r"^-|://|file:", path.read_text(), re.MULTILINE), "it names an index"


def test_images_have_one_release_of_torch_and_the_router_none() -> None:
    cpu, cuda = lock("torch-cpu")["torch"], lock("cuda")["torch"]
    assert cpu == f"{cuda}+cpu"
    [wanted] = (each for each in asked("transformers") if each.name == "torch")
    assert wanted.specifier.contains(cuda)
    assert "torch" not in lock("router", "worker")
    assert lock("router").items() <= lock("worker").items()


def test_the_router_serves_with_what_its_image_has_and_without_torch() -> None:
    had = lock("router", python="3.11").keys() | {"pdtransfer"}
    absent = [
        name for name, of in packages_distributions().items() if not had & {canonicalize_name(each) for each in of}
    ]
    assert {"torch", "tokenizers", "mooncake"} <= set(absent)
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from pdtransfer.serve.router.process import run; from pdtransfer.serve.settings.router import RouterConfig\n"
        "sys.exit(run(RouterConfig(listen='127.0.0.1:0', json=True, node='r', otlp='http://127.0.0.1:9')))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        place = json.loads(process.stdout.readline())["http"]
        with urlopen(f"http://{place}/live", timeout=20) as answer:
            assert answer.status == 200
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_the_dockerfile_installs_each_lock_and_none_without_hashes() -> None:
    text = (REPO / "Dockerfile").read_text()
    installed = set(re.findall(r"/build/install \S+ ([\w-]+)(?: |$)", text, re.MULTILINE))
    assert installed == {path.stem for path in LOCKS.iterdir()}
    assert not re.search(r"^[^#]*pip install", text, re.MULTILINE)
    script = (IMAGE / "install").read_text()
    assert "--require-hashes" in script
    assert re.findall(r"^FROM (?:scratch|\S+) AS (router|worker|worker-torch|cuda)$", text, re.MULTILINE) == [
        "router",
        "worker",
        "worker-torch",
        "cuda",
    ]


def bom(**packages: str) -> dict[str, Any]:
    """An SBOM of these packages, on Debian's Python 3.11."""
    components = [
        {"name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"} for name, version in packages.items()
    ]
    python = {"name": "python3.11-minimal", "version": "3", "purl": "pkg:deb/debian/python3.11-minimal@3?arch=amd64"}
    metadata = {"component": {"name": "pdtransfer"}}
    return {"bomFormat": "CycloneDX", "metadata": metadata, "components": [*components, python]}


def test_an_sbom_is_held_against_the_locks() -> None:
    lines = "a==1 \\\n    --hash=sha256:00\nb==2 ; python_full_version >= '3.12' \\\n    --hash=sha256:00\n"
    assert differences(bom(a="1"), lines) == []
    assert differences(bom(a="2", c="3"), lines) == [
        "a: 2 in the image, 1 in the locks", "c: 3 in the image, none in the locks",
    ]  # fmt: skip
    assert differences(bom(), lines) == ["a: none in the image, 1 in the locks"]
    other = bom(a="1") | {"metadata": {"component": {"name": "other"}}}
    assert differences(other, lines) == ["it is not a SBOM of pdtransfer"]
    assert differences({"components": []}, lines) == ["this is not a SBOM of CycloneDX"]


def test_an_sbom_names_the_debian_packages_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbom = loaded("sbom", monkeypatch)
    real, dpkg = tmp_path / "usr" / "lib", tmp_path / "dpkg"
    real.mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    (dpkg / "info").mkdir(parents=True)
    (dpkg / "info" / "libz:amd64.list").write_text(f"{tmp_path}/lib\n{tmp_path}/lib/libz.so\n")
    (dpkg / "info" / "other.list").write_text(f"{tmp_path}/usr/lib/other.so\n")
    (dpkg / "status").write_text(
        "Package: libz\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:2+b1\n"
        "Description: z\n more: so\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    )
    assert sbom.owners([real / "libz.so", real / "ours.so"], dpkg) == ["libz"]
    packages = sbom.installed(dpkg)
    assert packages.keys() == {"libz"}
    assert sbom.component(packages["libz"], "debian-12") == {
        "type": "library", "bom-ref": "deb-libz", "name": "libz", "version": "1:2+b1",
        "purl": "pkg:deb/debian/libz@1%3A2%2Bb1?arch=amd64&distro=debian-12",
    }  # fmt: skip


def test_an_sbom_is_one_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbom = loaded("sbom", monkeypatch)
    found = {"name": "zlib1g", "Package": "zlib1g", "Version": "1", "Architecture": "amd64"}
    monkeypatch.setattr(sbom, "installed", lambda: {"zlib1g": found})
    monkeypatch.setattr(sbom, "release", lambda: "debian-12")
    source, target = tmp_path / "source", tmp_path / "target"
    components = [{"name": "aiohttp", "type": "library"}, {"name": "pdtransfer", "type": "library"}]
    source.write_text(json.dumps({"bomFormat": "CycloneDX", "metadata": {}, "components": components}))
    sbom.write(source, target, ["zlib1g"])
    written = json.loads(target.read_text())
    assert written["metadata"]["component"] == {"name": "pdtransfer", "type": "application"}
    assert [each["name"] for each in written["components"]] == ["aiohttp", "zlib1g"]


def test_what_is_packed_has_its_links_libraries_and_owners_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = loaded("pack", monkeypatch)
    place = tmp_path / "place"
    (place / "deep").mkdir(parents=True)
    (place / "deep" / "file").write_text("it is there\n")
    (place / "deep" / "file").chmod(0o640)
    (place / "link").symlink_to("deep")
    root = tmp_path / "root"
    root.mkdir()
    image = pack.Image(root)
    for path in (Path("/bin/sh"), Path("/bin/cat"), place / "link" / "file"):
        image.add(path)
    image.add_libraries()
    copied = root / place.relative_to("/")
    assert (copied / "link").readlink() == Path("deep")
    assert (copied / "deep" / "file").stat().st_mode & 0o777 == 0o640
    assert not list(root.rglob("libpython*"))
    if os.geteuid() == 0:
        command = ["chroot", root, "/bin/sh", "-c", f"cat {place}/link/file"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ran.returncode, ran.stdout) == (0, "it is there\n"), ran.stderr


def test_bytecode_is_packed_beside_its_module_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = loaded("pack", monkeypatch)
    for name in ("used", "left_out"):
        (tmp_path / f"{name}.py").write_text("")
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode"), "PYTHONPATH": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, "-c", "import used, left_out"], env=environment, timeout=60, check=True)
    root = tmp_path / "root"
    root.mkdir()
    image = pack.Image(root)
    image.add(tmp_path / "used.py")
    image.add_bytecode(tmp_path / "bytecode")
    assert [path.name.partition(".")[0] for path in root.rglob("*.pyc")] == ["used"]
    assert (root / tmp_path.relative_to("/") / "__pycache__").is_dir()
    assert [path.name for path in root.rglob("*.py")] == ["used.py"]
