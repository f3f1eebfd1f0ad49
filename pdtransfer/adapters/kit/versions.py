"""Whether an engine is of a version that its adapter was written for."""

from __future__ import annotations

from importlib import import_module

Version = tuple[int, ...]


def check_version(adapter: str, package: str, engine: str, versions: tuple[Version, Version]) -> None:
    """Raises ImportError, with the found and the supported versions, for an engine whose interface is not known, or
    that cannot be imported. `versions` are the first and the last, of as many numbers as matter."""
    first, last = (".".join(map(str, each)) for each in versions)
    supported = f"supported are {first} to {last}" if first != last else f"supported is {first}"
    try:
        found = str(import_module(package).__version__)
    except ImportError as error:
        raise ImportError(
            f"{adapter} is a part of {engine}'s engines, and {engine} cannot be imported here ({error}): {supported}"
        ) from None
    numbers = found.split("+", maxsplit=1)[0].split(".")[: len(versions[0])]
    if not all(map(str.isdigit, numbers)) or not versions[0] <= tuple(map(int, numbers)) <= versions[1]:
        raise ImportError(f"{adapter}: found {engine} {found}, {supported}")
