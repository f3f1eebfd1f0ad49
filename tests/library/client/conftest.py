"""Fixtures of the clients' tests."""

from tests.support import copy_gate

gate = copy_gate.gate
