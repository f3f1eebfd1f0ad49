"""Rates: curves between measured points, and what each benchmark's JSON gives."""

from __future__ import annotations

import pytest
from pdtransfer_lab.plan.kv_bytes import kv_bytes_per_token
from pdtransfer_lab.plan.rates import Curve, rates_of

from pdtransfer.errors import ConfigError

OWN = {"prefill_s": {"1000": 0.5}, "decode_step_s": {"1": 0.01, "9": 0.05}}


def test_a_curve_is_straight_between_its_points_and_beyond() -> None:
    curve = Curve.of({100: 1.0, 300: 2.0})
    assert [curve(size) for size in (100, 200, 300, 500)] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert curve(0) == pytest.approx(0.5)
    assert Curve.of({100: 1.0})(50) == pytest.approx(0.5)
    assert Curve.of({100: 1.0, 200: 9.0})(1) == 0.0, "never below nothing"


@pytest.mark.parametrize("points", [{}, {1: 0.0}, {0: 1.0}, {1: float("nan")}, {1: 2.0, 2: 1.0}, {-1: 1.0}])
def test_points_that_are_no_curve_are_refused(points: dict[float, float]) -> None:
    with pytest.raises(ConfigError):
        Curve.of(points)


def test_rates_come_from_benchmarks_and_flags_rank_first() -> None:
    pd = {
        "part": "pd",
        "prompts": {"mla": {
            "100": {"auto": {"compute_ms": 20.0, "step_ms": 9.0}},
            "200": {"auto": {"compute_ms": 19.0, "step_ms": 8.0}},
        }},
        "rows_alone": {"mla": {"100": {"to_ready_gb_s": 12.5}}},
    }  # fmt: skip
    rates = rates_of([("a", pd)])
    assert rates.prefill(200) == pytest.approx(0.019), "a longer prompt that took less shows the noise of the shorter"
    assert rates.decode(1) == pytest.approx(0.008)
    assert rates.link_bytes_s == pytest.approx(12.5e9)
    transfer = {"part": "transfer", "fresh_1_gb_s": 3.0, "fresh_2_gb_s": 5.0, "memcpy_gb_s": 9.0}
    rates = rates_of(
        [("a", pd), ("b", transfer), ("c", {"part": "handoff", "ready_us_p50": 700.0})], {"overhead_s": 0.5}
    )
    assert (rates.link_bytes_s, rates.handoff_s, rates.overhead_s) == pytest.approx((5e9, 7e-4, 0.5))
    assert rates_of([("own", {"rates": OWN})]).decode(5) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ([], "f: must be a JSON object"),
        ({"prefil_s": {}}, "f: prefil_s: must be one of "),
        (OWN | {"prefill_s": {"x": 1}}, "prefill_s: must be an object"),
        (OWN | {"prefill_s": [1]}, "prefill_s: must be an object"),
        (OWN | {"decode_step_s": {"2": 1, "1": 3}}, "decode_step_s: 2 takes 1 s, less than 1"),
        (OWN | {"link_bytes_s": "fast"}, "f: link_bytes_s = 'fast'"),
        (OWN | {"link_bytes_s": 0}, "f: link_bytes_s = 0"),
        (OWN | {"first_step_tokens": 3}, "f: first_step_tokens"),
        ({"part": "copy"}, "f: part = 'copy': must be one of "),
        ({"part": "transfer"}, "f: fresh_gb_s: missing"),
        ({"part": "handoff"}, "f: ready_us_p50 = None"),
        ({"part": "pd", "prompts": {}}, "f: prompts: not what bench pd prints"),
        ({}, "prefill_s: no rate is given; --prefill-tokens-per-s"),
        ({"prefill_s": {"1": 1}}, "decode_step_s: no rate is given; --decode-step-ms"),
    ],
)
def test_a_bad_document_is_named_with_its_field(document: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rates_of([("f", document)])


def test_bytes_of_a_token_follow_from_the_configuration() -> None:
    gqa = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert kv_bytes_per_token(gqa | {"torch_dtype": "bfloat16"}) == 30 * 2 * 3 * 64 * 2
    assert kv_bytes_per_token({"text_config": gqa}, dtype="float8_e4m3fn") == 30 * 2 * 3 * 64
    mla = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_bytes_per_token(mla) == 61 * 576 * 2
    for wrong in ({"num_hidden_layers": "30"}, {"num_hidden_layers": True}, {"num_key_value_heads": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            kv_bytes_per_token(gqa | wrong)
    with pytest.raises(ConfigError, match="dtype = 'int3'"):
        kv_bytes_per_token(gqa, dtype="int3")
