"""The command pdtransfer; python -m pdtransfer is the same."""

from __future__ import annotations

import signal
import sys

from .errors import missing_extra

MISUSED, INTERRUPTED = 2, 130
DAEMONS = {"prefill", "decode", "router"}


def main() -> int:
    """Runs one command line. Neither an interrupt during the imports nor a missing package shows a traceback, and
    SIGHUP ends no daemon, not even during the imports."""
    if DAEMONS & set(sys.argv):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        from .environment import without_collection

        with without_collection():
            from .serve.commands.cli import main
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ImportError as error:  # installed for an engine's clients alone; of a command's module the cause tells it
        missing = missing_extra(error.__cause__ or error)
        if missing is None:
            raise
        print(f"pdtransfer: {missing}", file=sys.stderr)
        return MISUSED


if __name__ == "__main__":
    sys.exit(main())
