"""Flags that several commands have, those of other distributions among them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

FLAT = Parameter(name="*")
Json = Annotated[bool, Parameter(help="Print one JSON object.")]


def counted(text: str) -> Parameter:
    """A flag that counts something; `text` is its help."""
    return Parameter(help=text, validator=Number(gte=1, lte=1 << 30))
