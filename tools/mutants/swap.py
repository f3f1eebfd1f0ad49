"""A mutant in a process that has imported its file: live functions get the code that it has for them.

It does not fit if what it changes has run in the import. That is the body of a module or a class, with defaults and
decorators, and the functions that these call. Their results would stay as they are.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType

# A code object's name and position: that of another compilation of the same source has the same.
Place = tuple[str, int, bytes]


class Image:
    """What this process has imported, and which of it has run. It is made before `gc.freeze`, which hides functions."""

    def __init__(self, ran: Iterable[CodeType]) -> None:
        self._ran = {(code.co_filename, _place(code)) for code in ran}
        self._functions: defaultdict[str, list[FunctionType]] = defaultdict(list)
        for function in gc.get_objects():
            if type(function) is FunctionType:
                self._functions[function.__code__.co_filename].append(function)

    def swaps(self, path: Path, before: str) -> list[tuple[FunctionType, CodeType]] | None:
        """The new code of each live function of this file, whose text was `before`; None if the mutant does not fit."""
        file = str(path)
        if not any(getattr(module, "__file__", None) == file for module in [*sys.modules.values()]):
            return []  # its import reads the mutant
        old, new = (compile(source, file, "exec", dont_inherit=True) for source in (before, path.read_text()))
        if (file, _place(old)) not in self._ran:
            return None
        live: defaultdict[Place, list[FunctionType]] = defaultdict(list)
        for function in self._functions[file]:
            live[_place(function.__code__)].append(function)
        swaps: list[tuple[FunctionType, CodeType]] = []
        try:
            for outer, code, mutated in _pairs(old, new):
                if _own(code) != _own(mutated) and ((file, _place(code)) in self._ran or _place(outer) not in live):
                    return None
                functions = live.get(_place(code), [])
                if functions and code.co_freevars != mutated.co_freevars:
                    return None
                swaps += ((function, mutated) for function in functions)
        except ValueError:  # a nested function is gone
            return None
        return swaps


def _pairs(
    old: CodeType, new: CodeType, outer: CodeType | None = None
) -> Iterator[tuple[CodeType, CodeType, CodeType]]:
    """Each code object with the mutant's in its place, behind the outermost function that it belongs to."""
    if outer is None and old.co_flags & inspect.CO_OPTIMIZED:
        outer = old
    yield outer or old, old, new
    for pair in zip(_nested(old), _nested(new), strict=True):
        yield from _pairs(*pair, outer)


def _nested(code: CodeType) -> list[CodeType]:
    return [value for value in code.co_consts if isinstance(value, CodeType)]


def _place(code: CodeType) -> Place:
    return code.co_name, code.co_firstlineno, code.co_linetable


def _own(code: CodeType) -> tuple[object, ...]:
    """All that a code object does, without its nested ones and its lines."""
    values = [repr(value) for value in code.co_consts if not isinstance(value, CodeType)]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return code.co_name, code.co_code, code.co_exceptiontable, values, names, counts
