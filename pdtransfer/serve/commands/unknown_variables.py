"""Warns of variables of this package that are no setting, such as typing errors."""

from __future__ import annotations

import difflib
import logging
import re
from dataclasses import fields

from ...environment import PREFIX, other_variables
from ...limits import Limits
from ..settings.node import NodeConfig

log = logging.getLogger(__name__)


def warn_of_unknown(config: NodeConfig) -> None:
    """Logs a line for each that no daemon and no demo has, with the nearest name."""
    names = {re.sub("^(NO|EMPTY)_", "", name.removeprefix(PREFIX)) for name in other_variables()}  # flags have both
    names.difference_update(field.name.upper() for field in fields(config))
    if not names:
        return
    from .cli import COMMANDS, settings_of  # with modules that this daemon has no other use for

    settings = [field.name.upper() for command in COMMANDS for field in fields(settings_of(command))]
    settings += ["CONFIG", "DEBUG", *(f"LIMITS_{field.name.upper()}" for field in fields(Limits))]
    for name in sorted(names.difference(settings)):
        near = difflib.get_close_matches(name, settings, n=1, cutoff=0.75)
        log.warning("%s: no daemon has this setting%s", PREFIX + name, f"; is it {PREFIX}{near[0]}?" if near else "")
