"""Stands in for torchvision, whose published wheels are for CUDA. SGLang and transformers import it for models that see
images; nothing here transforms one. Any name of its modules can be imported; a call says which function is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import NoReturn

__version__ = "0.28.0"  # transformers ask for it


class InterpolationMode(Enum):
    """As torchvision's: tables are made of its members."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _module(name: str, **has: object) -> ModuleType:
    """An importable module, with `has` and whatever else is asked for."""

    def missing(attribute: str) -> Callable[..., NoReturn]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def call(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{name}.{attribute}: torchvision is not in this environment")

        return call

    made = ModuleType(name)
    vars(made).update(has, __path__=[], __getattr__=missing)
    sys.modules[name] = made
    return made


_functional = _module("torchvision.transforms.functional", InterpolationMode=InterpolationMode)
_functional2 = _module("torchvision.transforms.v2.functional", InterpolationMode=InterpolationMode)
_v2 = _module("torchvision.transforms.v2", functional=_functional2, InterpolationMode=InterpolationMode)
transforms = _module("torchvision.transforms", functional=_functional, v2=_v2, InterpolationMode=InterpolationMode)
io = _module("torchvision.io", ImageReadMode=Enum("ImageReadMode", "UNCHANGED GRAY GRAY_ALPHA RGB RGB_ALPHA"))
ops = _module("torchvision.ops", boxes=_module("torchvision.ops.boxes"))
