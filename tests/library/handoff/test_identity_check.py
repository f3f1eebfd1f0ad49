"""What a node names where a peer does not fit."""

from __future__ import annotations

from pdtransfer.handoff.identity_check import ShownIdentity, differences


def identity(role: str, **facts: str):
    shown = ShownIdentity(role, "model", ("00" if role == "prefill" else "11") * 32, facts)
    return shown.in_role(role, role)


def test_what_both_have_otherwise_is_named_before_what_one_of_them_lacks() -> None:
    theirs = identity("prefill", block_size="128", dtype="float32", rows="blocks")
    ours = identity("decode", dtype="float32", page_size="64", rows="tokens")
    assert differences(theirs, ours, role="prefill") == [
        "rows: prefill has 'blocks', decode 'tokens'",
        "page_size: prefill has nothing, decode '64'",
        "block_size: prefill has '128', decode nothing",
    ]


def test_of_facts_that_are_equal_or_unknown_the_weights_are_named() -> None:
    for facts in ({}, {"rows": "tokens"}):
        [line] = differences(identity("prefill", **facts), identity("decode", **facts), role="prefill")
        assert line.startswith("weights: prefill has '0000")
    assert differences(identity("decode"), identity("decode"), role="prefill") == [
        "role: decode has 'decode', decode 'prefill'"
    ]
