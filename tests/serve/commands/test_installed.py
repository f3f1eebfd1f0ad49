"""Commands of other distributions: when they are looked for, and what is said where they are missing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from cyclopts import App

from pdtransfer.errors import ConfigError
from pdtransfer.serve.commands import installed


def _nothing() -> None:
    pass


def _found(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Has these commands installed, and returns the names of those that are loaded."""
    loaded: list[str] = []

    def load(name: str) -> Callable[[], Callable[[], None]]:
        return lambda: (loaded.append(name), _nothing)[1]

    entries = [SimpleNamespace(name=name, load=load(name)) for name in names]
    monkeypatch.setattr(installed, "entry_points", lambda *, group: entries)
    return loaded


def _app() -> App:
    app = App()
    app.command(_nothing, name="prefill")
    return app


@pytest.mark.parametrize("tokens", [[], ["--help"], ["bench", "copy"], ["--debug", "bench"], ["prefil"]])
def test_installed_commands_are_there_for_help_and_for_their_names(
    tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, app = _found(monkeypatch, "bench", "plan"), _app()
    installed.add_installed(app, tokens)
    assert loaded == ["bench", "plan"]
    assert "bench" in app


@pytest.mark.parametrize("tokens", [["prefill"], ["--debug", "prefill", "--slots", "64"]])
def test_a_command_of_the_package_loads_no_other(tokens: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, app = _found(monkeypatch, "bench"), _app()
    installed.add_installed(app, tokens)
    assert (loaded, "bench" in app) == ([], False)


@pytest.mark.parametrize("name", installed.OF_LAB)
def test_a_command_that_is_not_installed_is_named_with_its_distribution(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch)
    with pytest.raises(ConfigError, match=rf"{name}: comes with pdtransfer-lab: pip install \./lab"):
        installed.add_installed(_app(), [name])
