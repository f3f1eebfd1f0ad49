"""Compares two nodes: what their identities must have in common, and a line for each field that differs.

The digest `weights` decides. Where both nodes name the facts behind it, those that differ are named in its place. A
node shows the same to `pdtransfer doctor` as a `ShownIdentity`, before it has a peer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from ..limits import FACTS_MAX, NAME_LENGTH_MAX, TEXT_LENGTH_MAX, TOKENS_MAX
from ..wire import Fact, Identity, Ranks

_VALUE_LENGTH_MAX = 96  # of a fact in a line that has two

Text = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]


class ShownIdentity(Struct, frozen=True):
    """What decides whether a node fits its peers, and the longest request that it takes, as JSON."""

    role: Literal["prefill", "decode", "both"]
    model: Text
    weights: Annotated[str, Meta(max_length=128, pattern=r"\A([0-9a-f]{2})*\Z")]
    facts: Annotated[dict[Annotated[str, Meta(max_length=NAME_LENGTH_MAX)], Text], Meta(max_length=FACTS_MAX)] = {}
    context_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] = 0  # of a prompt and its answer at most; 0: not said

    def in_role(self, role: Literal["prefill", "decode"], node: str) -> Identity:
        """The identity of the node of this name, in `role` if it can be both."""
        facts = tuple(Fact(name, value) for name, value in self.facts.items())
        return Identity(
            node, role if self.role == "both" else self.role, 0, Ranks(), self.model, bytes.fromhex(self.weights), 1,
            context_tokens=self.context_tokens, facts=facts,
        )  # fmt: skip


def shown(identity: Identity, *, both: bool = False) -> dict[str, object]:
    """The ShownIdentity of a node, as JSON; of one that is prefill and decode with `both`."""
    facts = {fact.name: fact.value for fact in identity.facts}
    role = "both" if both else "prefill" if identity.role == "prefill" else "decode"
    return asdict(ShownIdentity(role, identity.model, identity.weights.hex(), facts, identity.context_tokens))


def differences(theirs: Identity, ours: Identity, *, role: str) -> list[str]:
    """A line for each field in which a peer differs from this node, with both values; empty where the two fit. The peer
    must have `role`."""
    lines: list[str] = []
    if theirs.role != role:
        lines.append(_line("role", theirs, theirs.role, ours, role))
    if theirs.model != ours.model:
        lines.append(_line("model", theirs, theirs.model, ours, ours.model))
    if theirs.weights != ours.weights:
        lines += _facts(theirs, ours) or [_line("weights", theirs, theirs.weights.hex(), ours, ours.weights.hex())]
    return lines


def _facts(theirs: Identity, ours: Identity) -> list[str]:
    """A line for each fact that differs, those first of which both have a value: of another kind of peer several may be
    missing as well. None where one of the two names no facts, or all are equal."""
    if not theirs.facts or not ours.facts:
        return []
    their_facts, our_facts = ({fact.name: fact.value for fact in identity.facts} for identity in (theirs, ours))
    differing = [
        name for name in dict.fromkeys([*our_facts, *their_facts]) if their_facts.get(name) != our_facts.get(name)
    ]
    return [
        _line(name, theirs, their_facts.get(name), ours, our_facts.get(name))
        for name in sorted(differing, key=lambda name: (name in their_facts) + (name in our_facts), reverse=True)
    ]


def _line(name: str, theirs: Identity, their_value: str | None, ours: Identity, our_value: str | None) -> str:
    return f"{name}: {theirs.node} has {_value(their_value)}, {ours.node} {_value(our_value)}"[:TEXT_LENGTH_MAX]


def _value(value: str | None) -> str:
    if value is None:
        return "nothing"
    return repr(value if len(value) <= _VALUE_LENGTH_MAX else value[:_VALUE_LENGTH_MAX] + "...")
