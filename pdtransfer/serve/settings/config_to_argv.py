"""Turns a config into the command line of a child process."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, cast

from ...limits import Limits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def config_to_argv(config: DataclassInstance) -> list[str]:
    """Returns the flags from which a child process builds an equal config (a dataclass)."""
    flags: list[str] = []
    for each in fields(config):
        value = cast("object", getattr(config, each.name))
        if isinstance(value, Limits):
            flags += [
                f"--limits.{f.name.replace('_', '-')}={v}"
                for f in fields(value)
                if (v := getattr(value, f.name)) != f.default
            ]
        elif value != _default(each):
            values = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
            flags += [_flag(each.name, item) for item in values]
    return flags


def _flag(name: str, value: object) -> str:
    name = name.replace("_", "-")
    return f"--{name}" if value is True else f"--no-{name}" if value is False else f"--{name}={value}"


def _default(each: Field[Any]) -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()
