"""The line that an engine logs at its start: where its KV goes, and what decides whether a peer fits."""

from __future__ import annotations

from ...wire import Identity
from .model_facts import OF_MODEL

DIGITS = 8  # of the digest: two engines whose line has the same ones fit
_USUAL = "", "0", "null", "None", "auto"


def first_line(identity: Identity, where: str, *, both: bool = False) -> str:
    """One line. `where` is what the engine does with KV. The facts of the model's configuration are many: the digest
    stands for them, and `pdtransfer doctor` lists them."""
    facts = {fact.name: fact.value for fact in identity.facts}
    settings = "".join(f"{name}={_word(value)} " for name, value in facts.items() if _is_shown(name, value))
    role = "prefill and decode" if both else identity.role
    digest = identity.weights.hex()[:DIGITS]
    return f"pdtransfer {role}: {where}; model={_word(identity.model)} {settings}facts={digest}"


def _is_shown(name: str, value: str) -> bool:
    return name not in OF_MODEL | {"engine"} and not name.startswith("rope.") and value not in _USUAL


def _word(value: str) -> str:
    return value if value.isprintable() and value and not set(value) & set(" ='\"") else repr(value)
