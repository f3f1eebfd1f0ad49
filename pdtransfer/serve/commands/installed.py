"""Commands of other distributions, found by the entry points of one group."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from cyclopts import App

from ...errors import ConfigError

GROUP = "pdtransfer.commands"
OF_LAB = ("bench", "plan", "replay")


def add_installed(app: App, tokens: Sequence[str]) -> None:
    """Adds the commands that are installed, unless `tokens` name one of `app` itself, which then starts sooner.

    An entry point's value is a function or an App. Raises ConfigError for a command of the lab that is not installed.
    """
    words = (token for token in tokens if not token.startswith("-"))
    named = next((word for word in words if word in app or word in OF_LAB), None)
    if named is not None and named in app:
        return
    for entry in entry_points(group=GROUP):
        if entry.name not in app:
            app.command(entry.load(), name=entry.name)
    if named is not None and named not in app:
        raise ConfigError(f"{named}: comes with pdtransfer-lab: pip install ./lab")
