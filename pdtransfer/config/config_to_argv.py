"""The command line that makes a process of one of our own what a config says."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, cast

from ..commands.demo_config import DemoConfig
from ..limits import Limits
from .config import Config


def arguments(config: Config | DemoConfig) -> list[str]:
    """The flags that make a process build this very config: for those who start daemons."""
    given: list[str] = []
    for each in fields(config):
        value = cast("object", getattr(config, each.name))
        if isinstance(value, Limits):
            given += [
                f"--limits.{f.name.replace('_', '-')}={v}"
                for f in fields(value)
                if (v := getattr(value, f.name)) != f.default
            ]
        elif value != _default(each):
            many = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
            given += [_flag(each.name, one) for one in many]
    return given


def _flag(name: str, value: object) -> str:
    name = name.replace("_", "-")
    return f"--{name}" if value is True else f"--no-{name}" if value is False else f"--{name}={value}"


def _default(each: Field[Any]) -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()
