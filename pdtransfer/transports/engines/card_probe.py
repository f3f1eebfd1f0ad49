"""card_probe.py DRIVER CARD UUID PROTOCOL FIRST LAST: tries whether engines read and write a GPU's memory.

Two engines of the library in DRIVER send some bytes of the GPU to itself, over `PROTOCOL` and ports FIRST to LAST. The
last line on stderr is the reason where they do not arrive. It is started by its path, as an engine's process is, since
a build without CUDA may crash.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

_BYTES = 1 << 20  # several of the pieces that a library copies at a time
_SECONDS = 20.0
_SECONDS_ALL = 40  # its parent ends it before that, unless that is dead
_LOOK_S = 0.001


def _module(path: str) -> Any:
    spec = spec_from_file_location(os.path.basename(path).partition(".")[0], path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Raises RuntimeError where a GPU's memory cannot be sent, or received."""
    signal.alarm(_SECONDS_ALL)
    driver, card, uuid, protocol, first, last = sys.argv[1:]
    here = _module(card).CARD(bytes.fromhex(uuid))
    source, target, content = here.allocate(_BYTES), here.allocate(_BYTES), os.urandom(_BYTES)
    here.upload(source, content)
    start = partial(_module(driver).ENGINE, "127.0.0.1", protocol, (int(first), int(last)))
    theirs, ours = start(serves=True), start(serves=False)
    theirs.serve(target, _BYTES)
    ours.read(source, _BYTES)
    ours.meet(f"127.0.0.1:{theirs.port}", target)
    deadline = time.monotonic() + _SECONDS
    for request, _ in ours.submit([(source, target, _BYTES)]):
        while not ours.landed(request):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing has arrived within {_SECONDS:g} s")
            time.sleep(_LOOK_S)
    if here.download(target, _BYTES) != content:
        raise RuntimeError("other bytes have arrived")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent reads it)
        print(f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else error, file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # destroying an engine takes a second, for nothing
