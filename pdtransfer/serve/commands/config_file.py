"""Reads the TOML file that --config names: settings of all commands, and a table of their own for each."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from ...errors import ConfigError
from ...limits import Limits
from .cli import COMMANDS, settings_of


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns a table for each command. Raises ConfigError for an invalid file."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config = '{path}': {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config = '{path}': not TOML: {error}") from error
    return _sections(path, table)


def _sections(path: Path, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns one table for each command: its own keys over those above all tables."""
    names_of = {command: [field.name for field in fields(settings_of(command))] for command in COMMANDS}
    limits = [field.name for field in fields(Limits)]
    shared = {key: value for key, value in table.items() if key not in COMMANDS}
    _known(path, "", shared, sorted({name for names in names_of.values() for name in names}))
    sections: dict[str, dict[str, Any]] = {}
    for command, names in names_of.items():
        section = cast("dict[str, Any]", table.get(command, {}))
        _known(path, f"[{command}] ", section, names)
        for prefix, values in (("[limits] ", shared), (f"[{command}.limits] ", section)):
            _known(path, prefix, values.get("limits", {}), limits)
        merged = {key: value for key, value in shared.items() if key in names} | section
        if "limits" in merged:
            merged["limits"] = shared.get("limits", {}) | section.get("limits", {})
        sections[command] = merged
    # Doctor checks the ports of all daemons in the file.
    ports = {section["transport_ports"] for section in sections.values() if "transport_ports" in section}
    return sections | ({"doctor": {"transport_ports": sorted(ports)}} if ports else {})


def _known(path: Path, prefix: str, table: object, names: list[str]) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"config = '{path}': {prefix}must be a table")
    for key in cast("dict[str, object]", table):
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise ConfigError(f"config = '{path}': {prefix}{key} is unknown" + (f"; is it {near[0]}?" if near else ""))
