"""Fixtures of the clients' tests."""

from tests.library.client import copy_gate

gate = copy_gate.gate
