"""Adds Debian's packages to an SBOM of a Python environment, CycloneDX in JSON.

    sbom.py FILE

FILE is what cyclonedx-py wrote. The result, with every package that is installed, goes to PLACE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

PLACE = Path("/usr/share/sbom/pdtransfer.cdx.json")
DPKG = Path("/var/lib/dpkg")


def installed(dpkg: Path = DPKG) -> dict[str, dict[str, str]]:
    """The fields of each Debian package that is installed, by its name."""
    packages: dict[str, dict[str, str]] = {}
    for paragraph in (dpkg / "status").read_text().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields
    return packages


def owners(files: Iterable[Path], dpkg: Path = DPKG) -> list[str]:
    """The names of the Debian packages that these files are of, given by their real paths."""
    owner: dict[Path, str] = {}
    for listing in (dpkg / "info").glob("*.list"):
        name = listing.name.removesuffix(".list").partition(":")[0]
        for path in map(Path, listing.read_text().splitlines()):
            # A path may be listed by way of a link: /lib is /usr/lib.
            owner[path.parent.resolve() / path.name] = name
    return sorted({owner[path] for path in files if path in owner})


def component(package: dict[str, str], release: str) -> dict[str, Any]:
    """A Debian package as CycloneDX names it."""
    name, version = package["Package"], package["Version"]
    purl = f"pkg:deb/{release.partition('-')[0]}/{quote(name)}@{quote(version)}"
    purl += f"?arch={package['Architecture']}&distro={release}"
    return {"type": "library", "bom-ref": f"deb-{name}", "name": name, "version": version, "purl": purl}


def release(file: Path = Path("/etc/os-release")) -> str:
    """The distribution, such as debian-12."""
    lines = dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line)
    return f"{lines['ID']}-{lines['VERSION_ID']}".replace('"', "")


def write(source: Path, target: Path, names: Collection[str]) -> None:
    """Writes the SBOM in `source`, as one of pdtransfer, with these Debian packages to `target`."""
    bom, packages, distribution = json.loads(source.read_text()), installed(), release()
    [product] = (component for component in bom["components"] if component["name"] == "pdtransfer")
    bom["components"].remove(product)
    bom["metadata"]["component"] = product | {"type": "application"}
    bom["components"] += [component(packages[name], distribution) for name in sorted(names)]
    target.write_text(json.dumps(bom, indent=1) + "\n")


if __name__ == "__main__":
    PLACE.parent.mkdir(parents=True)
    write(Path(sys.argv[1]), PLACE, installed().keys())
