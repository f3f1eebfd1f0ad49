"""Checks the SBOM of an image against the locks that it was built of: the same packages, each in its version.

    python -m tools.check_sbom SBOM LOCK...

Prints how many packages there are. Status 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, cast

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_REQUIREMENT = re.compile(r"^([a-zA-Z].*?) \\$", re.MULTILINE)


def locked(locks: str, python: str) -> dict[str, str]:
    """The versions that locks have for this Python, such as 3.11, on Linux."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    pins: dict[str, str] = {}
    for line in _REQUIREMENT.findall(locks):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(cast("dict[str, str]", environment)):
            [pin] = requirement.specifier
            pins[canonicalize_name(requirement.name)] = pin.version
    return pins


def differences(sbom: dict[str, Any], locks: str) -> list[str]:
    """What is wrong with the SBOM, a line each."""
    if sbom.get("bomFormat") != "CycloneDX":
        return ["this is not a SBOM of CycloneDX"]
    if sbom["metadata"]["component"]["name"] != "pdtransfer":
        return ["it is not a SBOM of pdtransfer"]
    packages: dict[str, str] = {}
    pythons: set[str] = set()
    for component in sbom.get("components", ()):
        kind, _, rest = str(component.get("purl", "")).partition("/")
        if kind == "pkg:pypi":
            packages[canonicalize_name(component["name"])] = component["version"]
        elif kind == "pkg:deb" and (match := re.match(r"debian/python(3\.\d+)", rest)):
            pythons.add(match[1])
    if len(pythons) != 1:
        return [f"Debian's packages of Python are of {', '.join(sorted(pythons)) or 'no version'}"]
    wanted = locked(locks, *pythons)
    return [
        f"{name}: {packages.get(name, 'none')} in the image, {wanted.get(name, 'none')} in the locks"
        for name in sorted(packages.keys() | wanted.keys())
        if packages.get(name) != wanted.get(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_sbom", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sbom", metavar="SBOM", type=Path)
    parser.add_argument("locks", metavar="LOCK", type=Path, nargs="+")
    options = parser.parse_args()
    sbom = json.loads(options.sbom.read_text())
    wrong = differences(sbom, "".join(path.read_text() for path in options.locks))
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    if not wrong:
        kinds = [str(component.get("purl", "")).partition("/")[0] for component in sbom["components"]]
        print(f"{kinds.count('pkg:pypi')} packages of Python and {kinds.count('pkg:deb')} of Debian")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
