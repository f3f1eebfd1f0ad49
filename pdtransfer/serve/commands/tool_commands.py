"""The commands timeline and keygen, bound to flags."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..settings.node import Json, counted


def timeline(
    *files: Annotated[Path, Parameter(help="Files, or directories of them, that processes wrote by --timeline.")],
    output: Annotated[Path | None, Parameter(help="Writes all of them as one file, for ui.perfetto.dev.")] = None,
    json: Json = False,
) -> int:
    """Breaks down the time to each room's first token, from the timelines of prefill, decode and router."""
    from ..tracing.merge_traces import run

    return run(files, output=output, json=json)


def keygen(
    name: Annotated[str, Parameter(help="The node's name, optionally with a directory.")],
    /,
    *,
    tp_size: Annotated[int, counted("Ranks that share the heads: a key for each, beside its leader's.")] = 1,
    pp_size: Annotated[int, counted("Stages that share the layers: the same.")] = 1,
    json: Json = False,
) -> int:
    """Writes NAME.key, which stays secret, and NAME.pub, a line for the allow-list of every peer."""
    from ...bus.keys import generate, key_of
    from ...wire.ranks import ranks_of

    others = ranks_of(tp_size, pp_size)[1:]
    for path in (Path(name), *(key_of(Path(name), ranks) for ranks in others)):
        line = generate(path)
        print(dumps({"name": line.split()[0], "public": line.split()[1]}) if json else line)
    return 0
