"""What holds for every test: none fails for being slow, since the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
