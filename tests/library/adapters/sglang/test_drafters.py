"""What is read of an SGLang engine's drafter; the test plays SGLang's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer.adapters.sglang.options import speculation


def engine(drafter: str | None, path: str | None = "head", revision: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_algorithm=drafter, speculative_draft_model_path=path, speculative_draft_model_revision=revision,
        model_path="model",
    )  # fmt: skip


def fact(server_args: SimpleNamespace, **config: Any) -> str:
    """Of a drafter with this configuration beside its name."""
    of_path = speculation(server_args, lambda path, revision: {"path": path, "revision": revision, **config})
    return of_path["speculation"]


def test_drafters_of_other_configurations_are_other_facts() -> None:
    first = fact(engine("EAGLE"))
    assert first.startswith("EAGLE ")
    assert first != fact(engine("EAGLE"), eagle_aux_hidden_state_layer_ids=[1])
    assert first != fact(engine("EAGLE", revision="r"))
    assert first != fact(engine("EAGLE3"))
    assert first == fact(engine("eagle"), _name_or_path="/on/another/host")
    assert first == fact(engine("EAGLE"), context_len=1024, language_only=False), "as options of an engine have it"


def test_a_drafter_in_the_models_checkpoint_is_the_models() -> None:
    assert fact(engine("NEXTN", None)) == fact(engine("NEXTN", "model")) != fact(engine("NEXTN"))


@pytest.mark.parametrize("drafter", [None, "NGRAM", "UNO"])
def test_drafts_without_kv_are_no_fact(drafter: str | None) -> None:
    def unread(path: str, revision: str | None) -> dict[str, Any]:
        raise AssertionError(path)

    assert speculation(engine(drafter), unread) == {}
