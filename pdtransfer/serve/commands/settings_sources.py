"""Where settings come from besides flags: a TOML file, the environment, torchrun's variables."""

from __future__ import annotations

import difflib
import logging
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cyclopts import App, ArgumentCollection, Token
from cyclopts.config import Dict, Env

from ...environment import PREFIX, launcher_variables, other_variables
from ...errors import ConfigError
from ...limits import Limits
from ..settings.node import NodeConfig
from ..settings.router import RouterConfig

if TYPE_CHECKING:
    from ..settings.worker import DecodeConfig, PrefillConfig
    from .demo_config import DemoConfig

log = logging.getLogger(__name__)

# Commands whose flags may stand in a file.
COMMANDS = ("prefill", "decode", "router", "demo")


def settings_of(command: str) -> type[PrefillConfig | DecodeConfig | RouterConfig | DemoConfig]:
    """The settings of one of COMMANDS."""
    from ..settings.worker import DecodeConfig, PrefillConfig  # which the router has no other use for
    from .demo_config import DemoConfig

    return {"prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig, "demo": DemoConfig}[command]


def sources(path: Path | None) -> list[Callable[..., None]]:
    """Returns the sources, strongest first. Raises ConfigError for an invalid file.

    Ignores variables that no command knows, since container platforms set PDTRANSFER_*_PORT and similar ones: daemons
    warn of them.
    """
    file = [] if path is None else [Dict(data=read(path), source=str(path))]
    return [Env(PREFIX, command=False, show=False), *file, check_tokens, _launcher]


def read(path: Path) -> dict[str, dict[str, Any]]:
    """A table for each command: its own keys over those above all tables. ConfigError for an invalid file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config = '{path}': {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config = '{path}': not TOML: {error}") from error
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
            near = nearest(key, names)
            raise ConfigError(f"config = '{path}': {prefix}{key} is unknown" + (f"; is it {near}?" if near else ""))


def nearest(name: str, names: Iterable[str], likeness_min: float = 0.6) -> str:
    """The name that a typing error may be meant for, or the first that begins with this word; empty for none. What many
    names begin with, `--` or a group as in `--limits.window`, makes no two of them alike."""

    def likeness(other: str) -> float:
        (whole, last), (whole_of_other, last_of_other) = _parts(name), _parts(other)
        if whole_of_other.startswith(f"{whole}-"):
            return likeness_min
        ratios = (
            difflib.SequenceMatcher(None, *pair).ratio() for pair in ((whole, whole_of_other), (last, last_of_other))
        )
        return min(ratios)

    best = max(names, key=likeness, default="")
    return best if best and likeness(best) >= likeness_min else ""


def _parts(name: str) -> tuple[str, str]:
    whole = name.lower().lstrip("-").replace("_", "-").replace("limits-", "limits.")
    return whole, whole.rpartition(".")[2]


def check_tokens(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:  # noqa: ARG001
    """Raises ConfigError for what cyclopts takes and should not: no path, NUL in a path, an integer's fraction."""
    for argument in arguments:
        name, values = argument.name.lstrip("-").replace("-", "_"), [token.value for token in argument.tokens]
        if argument.hint in (Path, Path | None) and (wrong := [text for text in values if not text or "\0" in text]):
            raise ConfigError(f"{name} = {wrong[0]!r}: must be a path, or left out")
        if argument.hint in (int, int | None) and re.search(r"\.\d*[1-9]", " ".join(values)):
            raise ConfigError(f"{name} = {values[-1]}: must be an integer")


def _launcher(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:  # noqa: ARG001
    """Sets rank flags that are not given from torchrun's variables, and drops `http` where a stronger source has
    `listen`. Of one source the older counts, since a router may share that. Raises ConfigError."""
    if commands not in (("prefill",), ("decode",)):
        return
    from ..settings.ranks import launched

    by_field = {argument.name.lstrip("-").replace("-", "_"): argument for argument in arguments}
    if _level(by_field["listen"].tokens) > _level(by_field["http"].tokens):
        by_field["http"].tokens.clear()
    given = {name: argument.tokens[-1].value for name, argument in by_field.items() if argument.tokens}
    for name, value in launched(launcher_variables(), given, stages=commands == ("prefill",)).items():
        by_field[name].tokens[:] = [Token(keyword=name, value=value, source="launcher")]


def _level(tokens: Iterable[Token]) -> int:
    return max((2 * (token.source == "cli") + (token.source == "env") for token in tokens), default=0)


def warn_of_unknown(config: NodeConfig) -> None:
    """Logs a line for each variable of this package that no command has as a setting, with the nearest name. Logs one
    for an older name of a setting."""
    if getattr(config, "http", None) is not None:
        log.warning("http, --http and PDTRANSFER_HTTP end with 0.3: set listen, --listen or PDTRANSFER_LISTEN")
    names = {re.sub("^(NO|EMPTY)_", "", name.removeprefix(PREFIX)) for name in other_variables()}  # flags have both
    names.difference_update(field.name.upper() for field in fields(config))
    if not names:
        return
    settings = [field.name.upper() for command in COMMANDS for field in fields(settings_of(command))]
    settings += ["CONFIG", "DEBUG", *(f"LIMITS_{field.name.upper()}" for field in fields(Limits))]
    for name in sorted(names.difference(settings)):
        near = nearest(name, settings, 0.75)
        log.warning("%s: no daemon has this setting%s", PREFIX + name, f"; is it {PREFIX}{near}?" if near else "")
