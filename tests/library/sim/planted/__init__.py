"""Planted bugs: each takes one defence away, through a `patch(owner, name, value)` that a test can take back."""

from collections.abc import Callable
from typing import Any

Patch = Callable[[object, str, Any], None]
