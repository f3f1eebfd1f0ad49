"""Where this checkout is: processes under test start in it, or have it as their PYTHONPATH."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
