"""Modules in the place of an engine's, and modules of an adapter that import them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, has: dict[str, dict[str, Any]]) -> None:
    """Puts modules there with what each `has`, and the packages above them."""
    above = {name.rsplit(".", level)[0] for name in has for level in range(1, name.count(".") + 1)}
    for name in sorted(has.keys() | above - sys.modules.keys()):
        made = ModuleType(name)
        vars(made).update(has.get(name, {}), __path__=[])
        monkeypatch.setitem(sys.modules, name, made)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, made)


def imported(package: str, name: str, *others: str) -> Any:
    """This module of the package, with stand-ins imported. Nothing of it stays, or of `others` that it may import."""
    module = import_module(f"{package}.{name}")
    for each in {name, *others}:
        if sys.modules.pop(f"{package}.{each}", None) is not None:
            delattr(sys.modules[package], each)
    return module
