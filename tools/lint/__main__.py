"""`python -m tools.lint`: every rule over the tree; prints `path:line: complaint`, and ends with 1 for any."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from . import arrays, asserts, ceilings, device_waits, modules, tests_tree, versions, words
from .sources import product, sources


def complaints() -> Iterator[str]:
    package, tests, both = sources("pdtransfer"), sources("tests"), tuple(product())
    yield from modules.class_names(package)
    yield from modules.opening_sentences(both)
    yield from modules.core_without_io(both)
    yield from modules.environment_readers(package)
    yield from modules.circles(both)
    yield from asserts.checks_of_peers(package)
    yield from arrays.comparing_dataclasses(package)
    yield from device_waits.device_wide(both)
    yield from device_waits.streams(both)
    yield from device_waits.engines(both)
    yield from device_waits.loops(package)
    yield from words.phrases_shown(both)
    yield from words.phrases((*both, *tests))
    yield from words.sentences((*both, *sources("tools"), *sources("examples")))
    yield from words.names((*both, *tests))
    yield from words.locals_((*both, *tests))
    yield from tests_tree.folders()
    yield from tests_tree.imports(tests)
    yield from tests_tree.general_helpers(tests)
    yield from tests_tree.functions(tests)
    yield from tests_tree.private_reads(tests)
    yield from versions.in_the_tree()
    yield from ceilings.above((*both, *tests), ceilings.ours())


def main() -> int:
    broken = False
    for complaint in complaints():
        print(complaint)
        broken = True
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
