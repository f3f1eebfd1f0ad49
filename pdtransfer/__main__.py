"""The command pdtransfer; python -m pdtransfer is the same."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> int:
    """Runs one command line. Who interrupts it is shown no traceback, while it still imports what it needs either."""
    try:
        from .commands.cli import main
    except KeyboardInterrupt:
        return INTERRUPTED
    return main()


if __name__ == "__main__":
    sys.exit(main())
