"""The tokens of the stamp engine: the same in one process and in two, however the work is cut, and on every host."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pdtransfer.layout.layout_builders import HOST_LAYOUTS, ITEM_LAYOUTS
from pdtransfer.serve.engine_api import Request
from pdtransfer.serve.engines.generation import Generation
from pdtransfer.serve.engines.stamp.factory import create, generate, generate_many
from pdtransfer.serve.engines.stamp.stamps import Stamper, stamps_of
from pdtransfer.serve.engines.stamp.tokens import VOCABULARY, logits_of
from pdtransfer.serve.sampling import pick
from pdtransfer.wire import Sampling
from tests.support.component_pair import ComponentPair
from tests.support.engine_pair import Decode, Prefill, config, prompts, request
from tests.support.paths import REPO

SHAPES = {
    "mla": {"layers": "2"},
    "gqa": {"layers": "2", "kv_heads": "4", "head_bytes": "24"},
    "mla with an index": {"layers": "3", "top_k": "16"},
    "gqa with an index": {"layers": "4", "kv_heads": "2", "top_k": "5", "index_share": "1"},
}
HYBRID = {"pools": "deepseek_v4", "requests": "16", "window_tokens": "48"}
LENGTHS = (1, 1, 2, 15, 16, 17, 64, 255, 300, 513)


@pytest.fixture(scope="module", params=SHAPES)
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    return SHAPES[request.param]


def requests(max_tokens: int = 6, **sampling: Any) -> list[tuple[Any, Sampling]]:
    sampling.setdefault("ignore_eos", True)
    return [(prompt, Sampling(max_tokens=max_tokens, **sampling)) for prompt in prompts(0, LENGTHS)]


def expected(options: dict[str, str], **sampling: Any) -> list[Generation]:
    return generate_many(config(slots=4_096, page_size=64, options=options), requests(**sampling))


@pytest.mark.parametrize(
    ("layout", "page", "chunk", "batch", "slots", "layers"),
    [
        ("page_first", 1, 64, 64, 4_096, 1),
        ("page_first_direct", 16, 37, 3, 1_024, 2),
        ("page_head", 64, 130, 5, 2_048, 0),
        ("layer_first", 16, 1_000, 1, 576, 0),
        ("layer_first", 2, 1, 2, 600, 1),
    ],
)
def test_no_chunk_batch_page_layout_or_pool_changes_an_outcome(
    options: dict[str, str], layout: str, page: int, chunk: int, batch: int, slots: int, layers: int
) -> None:
    cut = config(
        host_layout=layout, page_size=page, chunk_tokens=chunk, batch_max=batch, slots=slots,
        options=options | {"layers_per_cell": str(layers)},
    )  # fmt: skip
    order = np.random.default_rng(chunk).permutation(len(LENGTHS))
    wanted = expected(options)
    assert generate_many(cut, [requests()[at] for at in order]) == [wanted[at] for at in order]


@pytest.mark.parametrize("page_tokens", ["1", "64", "256"])
@pytest.mark.parametrize("host_layout", ITEM_LAYOUTS)
def test_hybrid_pools_have_the_outcomes_of_one_process_in_every_layout(host_layout: str, page_tokens: str) -> None:
    more = {"slots": 4_096, "page_size": 64, "chunk_tokens": 100}
    wanted = generate_many(config(options=HYBRID, **more), requests(9))
    target = HYBRID | {"page_tokens": page_tokens, "index_memory": "hbm" if page_tokens == "64" else "dram"}
    both = ComponentPair(
        create(config(options=HYBRID, **more)),
        create(config("decode", host_layout=host_layout, options=target, **more)),
    )
    for index, (prompt, sampling) in enumerate(requests(9)):
        both.hand_over(Request(room=index, prompt=prompt, sampling=sampling))
    events = both.run()
    for index, one in enumerate(wanted):
        *tokens, end = events[index]
        assert tuple(token.id for token in tokens) == one.tokens
        assert (end.tokens_digest, end.logits_digest, end.kv_digest) == (
            one.tokens_digest, one.logits_digest, one.kv_digest,
        )  # fmt: skip


@pytest.mark.parametrize("source", HOST_LAYOUTS)
@pytest.mark.parametrize("target", HOST_LAYOUTS)
def test_rows_copied_between_any_two_layouts_decode_to_what_one_process_generates(
    options: dict[str, str], source: str, target: str
) -> None:
    random = np.random.default_rng([HOST_LAYOUTS.index(source), HOST_LAYOUTS.index(target)])
    pages = [int(random.choice([1, 16, 64])) for _ in range(2)]
    rooms = [request(index, prompt) for index, prompt in enumerate(prompts(0, LENGTHS))]
    more = {"options": options, "factory": create, "slots": 2_048}
    prefill = Prefill.of(host_layout=source, page_size=pages[0], chunk_tokens=100, **more).run(*rooms)
    decode = Decode.of(host_layout=target, page_size=pages[1], batch_max=3, **more)
    for room in rooms:
        decode.admit(room, prefill)
        decode.step()
    decode.run()
    assert [decode.outcome(room.room) for room in rooms] == expected(options)


GOLDEN = (  # of SHAPES["gqa with an index"], of the prompt "stamp" and 12 tokens
    "rovhjzveeawm",
    "3c5fbaee838a202a03ac85113a1fbc20",
)


def test_tokens_and_digests_are_these_on_every_host() -> None:
    prompt = np.frombuffer(b"stamp", np.uint8).astype(np.int64)
    one = generate(config(options=SHAPES["gqa with an index"]), prompt, Sampling(max_tokens=12, ignore_eos=True))
    assert ("".join(map(chr, one.tokens)), one.kv_digest.hex()) == GOLDEN


def test_every_seed_and_shape_is_a_model_of_its_own() -> None:
    variants = [
        *SHAPES.values(), {"layers": "2", "seed": "1"}, {"layers": "3"}, {"layers": "2", "head_bytes": "128"}, HYBRID,
        HYBRID | {"window_tokens": "64"},
    ]  # fmt: skip
    cards = [
        create(config(role, options=variant)).description for variant in variants for role in ("prefill", "decode")
    ]
    assert len({description.weights for description in cards}) == len(variants)
    outcomes = [generate(config(options=variant, slots=4_096), *requests()[6]).tokens for variant in variants]
    assert len(set(outcomes)) == len(variants)
    assert {description.model for description in cards} == {"stamp-mla", "stamp-gqa", "stamp-deepseek_v4"}


def test_a_token_changes_every_stamp_from_its_own_on() -> None:
    (prompt,) = prompts(1, (200,))
    before = stamps_of(prompt)
    assert len(set(before.tolist())) == 200
    for at in (0, 57, 199):
        other = prompt.copy()
        other[at] ^= 1
        differs = stamps_of(other) != before
        assert not differs[:at].any()
        assert differs[at:].all()


def test_stamps_are_the_same_in_pieces() -> None:
    (prompt,) = prompts(2, (200,))
    stamper = Stamper()
    pieces = [stamper.extend(piece) for piece in np.split(prompt, [0, 1, 64, 64, 199])]
    assert np.array_equal(np.concatenate(pieces), stamps_of(prompt))


@pytest.mark.parametrize("options", [*SHAPES.values(), HYBRID], ids=[*SHAPES, "hybrid"])
def test_an_answer_goes_on_in_another_room_as_in_the_first(options: dict[str, str]) -> None:
    """A room whose prompt has what another room had generated, as the router does where a worker is lost."""
    (prompt,) = prompts(3, (90,))
    whole = generate(config(options=options), prompt, Sampling(max_tokens=10, ignore_eos=True))
    first = generate(config(options=options), prompt, Sampling(max_tokens=4, ignore_eos=True))
    assert first.tokens == whole.tokens[:4]
    longer = np.concatenate((prompt, np.array(first.tokens)))
    rest = generate(config(options=options), longer, Sampling(max_tokens=6, ignore_eos=True, generated=4))
    assert rest.tokens == whole.tokens[4:]


def test_logits_are_of_letters_and_a_bias_can_lift_any_other_id() -> None:
    for index in range(50):
        logits = logits_of(bytes([index]))
        assert logits.dtype == np.float32
        assert len(logits) == VOCABULARY
        assert chr(int(logits.argmax())) in "abcdefghijklmnopqrstuvwxyz"
        logits[65] += 100
        assert pick(logits, Sampling(max_tokens=1), prompt=np.array([1]), ids=()).id == 65


def test_sampling_ends_and_logprobs_are_those_of_the_shared_picks(options: dict[str, str]) -> None:
    (prompt,) = prompts(4, (40,))
    engine = config(options=options)
    greedy = generate(engine, prompt, Sampling(max_tokens=30, ignore_eos=True))
    warm = [generate(engine, prompt, Sampling(max_tokens=30, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert warm[0] == warm[1]
    assert len({greedy.tokens, warm[0].tokens, warm[2].tokens}) == 3
    eos = greedy.tokens[5]
    ended = generate(config(options=options | {"eos": str(eos)}), prompt, Sampling(max_tokens=30))
    assert ended.reason == "stop"
    assert ended.tokens == greedy.tokens[: greedy.tokens.index(eos) + 1]


def test_the_engine_runs_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from pdtransfer.serve.engine_api import EngineConfig, HiSparse
from pdtransfer.serve.engines.stamp.factory import create
for role in ("prefill", "decode"):
    hot = HiSparse(device_slots=99, hot_tokens=48, dense_slots=64) if role == "decode" else None
    engine = create(EngineConfig(role=role, slots=256, page_size=1, options={"top_k": "16"}, hisparse=hot))
described = engine.description
engine.attach(memoryview(bytearray(described.memory_bytes)), hbm=memoryview(bytearray(described.hbm_bytes)))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def second_turn(options: dict[str, str], *, chunk: int = 64, spoil: bool = False) -> tuple[Generation, Generation]:
    """What a decode engine answers to a turn of which it computes the rest itself, and what one process does."""
    (prompt,) = prompts(0, (40,))
    first, source = request(1, prompt, max_tokens=10), Prefill.of(factory=create, options=options)
    decode = Decode.of(factory=create, options=options, chunk_tokens=chunk)
    decode.admit(first, source.run(first))
    decode.run()
    done = np.concatenate((prompt, decode.tokens[1][:-1]))
    turn = request(2, np.concatenate((done, *prompts(1, (30,)))), max_tokens=8)
    decode.slots[2] = np.concatenate((decode.slots[1][: len(done)], decode.take(0, turn)[len(done) :]))
    if spoil:
        slot = int(decode.slots[2][7])
        decode.memory.view(np.uint8)[decode.layout.address(0, np.array([slot]))[0] + 3] ^= 1
    decode.engine.admit_rest(turn, decode.held(2), len(done))
    decode.run()
    (whole,) = generate_many(config(slots=4_096, page_size=64, options=options), [(turn.prompt, turn.sampling)])
    return decode.outcome(2), whole


@pytest.mark.parametrize("shape", ["mla", "gqa"])
@pytest.mark.parametrize("chunk", [64, 7])
def test_the_rest_of_a_prompt_is_computed_behind_an_earlier_answer(shape: str, chunk: int) -> None:
    answered, whole = second_turn(SHAPES[shape], chunk=chunk)
    assert answered == whole


def test_an_answer_shows_a_wrong_byte_of_its_cached_beginning() -> None:
    answered, whole = second_turn(SHAPES["mla"], spoil=True)
    assert answered.tokens != whole.tokens


def test_what_needs_the_whole_prompt_computes_no_rests() -> None:
    able = {
        shape: create(config("decode", options=options)).computes_rests
        for shape, options in {**SHAPES, "hybrid": HYBRID}.items()
    }
    assert able == {shape: shape in ("mla", "gqa") for shape in (*SHAPES, "hybrid")}
