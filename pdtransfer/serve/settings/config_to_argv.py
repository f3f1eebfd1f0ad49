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
    for field in fields(config):
        value = cast("object", getattr(config, field.name))
        if isinstance(value, Limits):
            flags += [
                f"--limits.{f.name.replace('_', '-')}={v}"
                for f in fields(value)
                if (v := getattr(value, f.name)) != f.default
            ]
        elif value != _default(field):
            values = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
            flags += [_flag(field.name, item) for item in values]
    return flags


def _flag(name: str, value: object) -> str:
    name = name.replace("_", "-")
    return f"--{name}" if value is True else f"--no-{name}" if value is False else f"--{name}={value}"


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
