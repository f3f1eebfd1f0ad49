"""What stands behind a command's flags: PDTRANSFER_* of the environment, then a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from cyclopts.config import Dict, Env

from ..config.config import Config, DecodeConfig, PrefillConfig, RouterConfig
from ..environment import PREFIX
from ..errors import ConfigError
from ..limits import Limits
from .demo_config import DemoConfig

COMMANDS: dict[str, type[Config | DemoConfig]] = {
    "prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig, "demo": DemoConfig,
}  # fmt: skip


def sources(path: Path | None) -> list[Dict | Env]:
    """What stands behind the flags, the stronger first. Raises ConfigError for a file that does not make sense.

    Variables that no command knows are left alone: container platforms put PDTRANSFER_*_PORT and the like there.
    """
    environment = Env(PREFIX, command=False, show=False)
    if path is None:
        return [environment]
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config = '{path}': {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config = '{path}': not TOML: {error}") from error
    return [environment, Dict(data=_sections(path, table), source=str(path))]


def _sections(path: Path, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """One table for each command: its own over the keys that stand above all tables."""
    known = {command: [each.name for each in fields(kind)] for command, kind in COMMANDS.items()}
    limits = [each.name for each in fields(Limits)]
    shared = {key: value for key, value in table.items() if key not in COMMANDS}
    _known(path, "", shared, sorted({name for names in known.values() for name in names}))
    sections: dict[str, dict[str, Any]] = {}
    for command, names in known.items():
        own = cast("dict[str, Any]", table.get(command, {}))
        _known(path, f"[{command}] ", own, names)
        for place, each in (("[limits] ", shared), (f"[{command}.limits] ", own)):
            _known(path, place, each.get("limits", {}), limits)
        merged = {key: value for key, value in shared.items() if key in names} | own
        if "limits" in merged:
            merged["limits"] = shared.get("limits", {}) | own.get("limits", {})
        sections[command] = merged
    # Doctor is no daemon, and has a look at what those of the file are told.
    ports = {each["transport_ports"] for each in sections.values() if "transport_ports" in each}
    return sections | ({"doctor": {"transport_ports": sorted(ports)}} if ports else {})


def _known(path: Path, place: str, table: object, names: list[str]) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"config = '{path}': {place}must be a table")
    for key in cast("dict[str, object]", table):
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise ConfigError(f"config = '{path}': {place}{key} is unknown" + (f"; is it {near[0]}?" if near else ""))
