"""Puts programs and all that they need below one directory, the root of an image, with an SBOM of that.

    pack.py ROOT --bytecode DIRECTORY --sbom FILE PATH...

Each PATH is copied as it stands, with the links that lead there and every library that it is linked to; and Python's
standard library. `--bytecode` is what PYTHONPYCACHEPREFIX named while the program was tried: modules that it imported
get their bytecode. `--sbom` is what cyclonedx-py wrote; Debian's packages of all these files are added.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sbom import PLACE, owners, write

# Of the standard library: what daemons do not import, and what needs programs or libraries that an image lacks.
UNNEEDED = {
    "__pycache__", "dbm", "dist-packages", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "sqlite3", "test", "tests", "tkinter", "turtle.py", "turtledemo", "venv",
}  # fmt: skip
UNNEEDED_PREFIXES = ("_dbm.", "_gdbm.", "_sqlite3.", "_test", "_tkinter.", "config-", "readline.")


class Image:
    """The root of an image while it fills."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: set[Path] = set()
        """Files of the host that were copied, by their real paths."""

    def add(self, path: Path) -> None:
        """Copies a file, a directory with all in it, or a link with what it leads to."""
        real = self._parents(path)
        if real.is_dir():
            for child in sorted(real.iterdir()):
                self.add(child)
        else:
            self._copy(real)

    def add_modules(self, path: Path) -> None:
        """Copies the standard library, or a part of it, without what no daemon imports."""
        if path.is_dir() and not path.is_symlink():
            self._parents(path)
            for child in sorted(path.iterdir()):
                if child.name not in UNNEEDED and not child.name.startswith(UNNEEDED_PREFIXES):
                    self.add_modules(child)
        else:
            self.add(path)

    def add_libraries(self) -> None:
        """Copies what the programs and libraries of the image are linked to, and what that is linked to."""
        for path in sorted(self.files):
            if _is_elf(path):
                for library in libraries(path):
                    self.add(library)

    def add_bytecode(self, prefix: Path) -> None:
        """Copies the bytecode of the modules that are in the image."""
        for path in sorted(prefix.rglob("*.pyc")):
            directory = Path("/") / path.parent.relative_to(prefix)
            source = directory / (path.name.partition(".")[0] + ".py")
            real = source.resolve()
            if real in self.files:
                # Not by cache_from_source, which knows the prefix as well.
                target = self.root / real.parent.relative_to("/") / "__pycache__" / path.name
                target.parent.mkdir(exist_ok=True)
                shutil.copy2(path, target)

    def _parents(self, path: Path) -> Path:
        """Makes the directories and links on the way to a path; returns where it really lies."""
        real = Path("/")
        rest = list(path.parts[1:])
        while rest:
            step = real / rest.pop(0)
            target = self.root / step.relative_to("/")
            if step.is_symlink():
                if not target.is_symlink():
                    target.symlink_to(step.readlink())
                followed = Path(os.path.normpath(real / step.readlink()))
                rest, real = [*followed.parts[1:], *rest], Path("/")
                continue
            if step.is_dir() and not target.is_dir():
                target.mkdir()
                _like(step, target)
            real = step
        return real

    def _copy(self, path: Path) -> None:
        if path in self.files or not path.is_file():
            return
        target = self.root / path.relative_to("/")
        shutil.copy2(path, target)
        _like(path, target)
        self.files.add(path)


def _like(path: Path, target: Path) -> None:
    status = path.stat()
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid)
    target.chmod(stat.S_IMODE(status.st_mode))


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def libraries(path: Path) -> Iterator[Path]:
    """What a program or library is linked to, its loader included. Raises SystemExit for a library that is missing."""
    listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)  # noqa: S603, S607
    for line in listed.stdout.splitlines():
        name, _, resolved = line.strip().partition(" => ")
        library = (resolved or name).split(" ")[0]
        if library.startswith("/"):
            yield Path(library)
        elif resolved.startswith("not found"):
            raise SystemExit(f"{path}: {name} is not found")


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs the root of an image.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--bytecode", type=Path, required=True)
    parser.add_argument("--sbom", type=Path, required=True)
    parser.add_argument("paths", type=Path, nargs="+")
    given = parser.parse_args()
    given.root.mkdir()
    image = Image(given.root)
    for path in given.paths:
        image.add(path)
    image.add_modules(Path(sysconfig.get_path("stdlib")))
    image.add_libraries()
    image.add_bytecode(given.bytecode)
    packages = owners(image.files)
    for name in packages:
        terms = Path("/usr/share/doc") / name / "copyright"
        if terms.exists():
            image.add(terms)
    target = given.root / PLACE.relative_to("/")
    target.parent.mkdir(parents=True)
    write(given.sbom, target, packages)
    size = sum(file.lstat().st_size for file in given.root.rglob("*") if not file.is_dir())
    print(f"{given.root}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
