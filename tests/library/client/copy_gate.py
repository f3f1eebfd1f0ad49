"""Holds copies of rows under way, for as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pdtransfer import kernels
from pdtransfer.transports import copier


class Gate:
    """In place of the copy: it waits until it is opened."""

    def __init__(self) -> None:
        self.opened, self.entered, self._copy = threading.Event(), threading.Event(), kernels.copy
        self.copies = 0

    def __call__(self, *arguments: object, **named: object) -> bool:
        self.copies += 1
        self.entered.set()
        assert self.opened.wait(60)
        return self._copy(*arguments, **named)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds every copy, in the copy threads, until it is opened."""
    made = Gate()
    monkeypatch.setattr(copier, "SMALL_BYTES_MAX", 0)
    monkeypatch.setattr(copier.kernels, "copy", made)
    yield made
    made.opened.set()
