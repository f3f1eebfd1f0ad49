"""Stands in for SGLang's compiled kernels, of which no wheel for CPUs is published. Any name can be imported; a call
says which kernel is missing. What SGLang computes with torch alone never calls one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: there are no compiled kernels in this environment")

    missing.__name__ = name
    return missing
