"""Imports what an image runs: each module of pdtransfer that can be had, and all of those that are named.

    modules.py NAME...

With PYTHONPYCACHEPREFIX their bytecode goes there. Status 1 where a module that is named cannot be imported.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

import pdtransfer


def main() -> None:
    for name in sys.argv[1:]:
        import_module(name)
    absent: list[str] = []
    for module in pkgutil.walk_packages(pdtransfer.__path__, "pdtransfer.", onerror=absent.append):
        try:
            import_module(module.name)
        except ImportError:
            absent.append(module.name)
    print("not in this image:", *sorted(absent))


if __name__ == "__main__":
    main()
