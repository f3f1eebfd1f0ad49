"""Which versions of an engine its adapter supports: those that have been run; docs/figures has the tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from typing import NamedTuple

log = logging.getLogger(__name__)

Version = tuple[int, ...]

VLLM: tuple[Version, ...] = ((0, 26), (0, 27), (0, 28), (0, 29), (0, 30), (0, 31), (0, 32), (0, 33))
SGLANG: tuple[Version, ...] = ((0, 5, 17), (0, 5, 18), (0, 5, 19), (0, 5, 20), (0, 5, 21), (0, 5, 22), (0, 5, 23))


def check_version(
    adapter: str, package: str, engine: str, versions: tuple[Version, ...], *, all_between: bool = False
) -> None:
    """Raises ImportError, with the found and the supported versions, for an engine that is older or newer than all
    `versions`, or that cannot be imported; warns of one between them that is not among them, unless `all_between` are
    supported. Of a version only as many numbers count as theirs have."""
    names = [".".join(map(str, version)) for version in versions]
    supported = f"supported are {(' to ' if all_between else ', ').join(names)}"
    try:
        version = str(import_module(package).__version__)
    except ImportError as error:
        raise ImportError(
            f"{adapter} is a part of {engine}'s engines, and {engine} cannot be imported here ({error}): {supported}"
        ) from None
    numbers = version.split("+", maxsplit=1)[0].split(".")[: len(versions[0])]
    if not all(map(str.isdigit, numbers)) or not versions[0] <= tuple(map(int, numbers)) <= versions[-1]:
        raise ImportError(f"{adapter}: found {engine} {version}, {supported}")
    if not all_between and tuple(map(int, numbers)) not in versions:
        log.warning("%s: %s %s has not been tested, %s", adapter, engine, version, supported)


class Since(NamedTuple):
    """The first version that has something, as text, and a name that it and later ones have: MODULE:ATTRIBUTE."""

    text: str
    proof: str = ""


def capabilities(engine: str, table: Mapping[str, Since], version: str) -> frozenset[str]:
    """What of this table an engine of this version has: its number decides. Raises ImportError for a proof that
    is not there."""
    has = {name: since for name, since in table.items() if _numbers(since.text) <= _numbers(version)}
    for text, proof in has.values():
        module, _, attributes = proof.partition(":")
        try:
            reduce(getattr, attributes.split("."), import_module(module)) if module else None
        except AttributeError:
            raise ImportError(f"{engine} {version}: has no {proof}, which {text} is the first to have") from None
    return frozenset(has)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split("+", maxsplit=1)[0].split(".") if number.isdigit()]
