"""What cannot be served is refused at the start, or before a request has slots, with the field and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

import torch
import transformers

from pdtransfer.errors import ConfigError
from pdtransfer.serve.engine_api import Alone, HiSparse
from pdtransfer.serve.engines.shell.first_token import FirstToken
from pdtransfer.serve.engines.transformers import create, factory
from pdtransfer.wire import Ranks, Sampling
from tests.support import checkpoints
from tests.support.checkpoints import Handoff, prompts, request

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
STATES = TINY | {"num_hidden_layers": 4, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1}


def written(directory: Path, name: str, **sizes: Any) -> Path:
    """A directory with a configuration and no weights."""
    getattr(transformers, name)(**sizes).save_pretrained(directory)
    return directory


def refused(directory: Path, *, options: dict[str, str] | None = None, **more: Any) -> str:
    """Why, in one line."""
    given = {"weights": "random", **(options or {})}
    with pytest.raises(ConfigError) as caught:
        create(checkpoints.config(directory, options=given, **more))
    assert "\n" not in str(caught.value)
    return str(caught.value)


CONFIGURATIONS = {
    "mamba": ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "linear_attention"),
    "linear attention": ("Qwen3NextConfig", STATES, "layer_types: linear_attention"),
    "chunked attention": ("Llama4TextConfig", TINY | {"num_hidden_layers": 4}, "layer_types: chunked_attention"),
    "encoder and decoder": ("T5Config", {"vocab_size": 64, "d_model": 32, "num_layers": 2}, "an encoder and a decoder"),
    "vision": ("Gemma3Config", {}, "it has vision_config; only text is served"),
    "no text": ("ViTConfig", {}, "generates no text"),
    "rope": ("LlamaConfig", TINY | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
             "rope_type 'dynamic'"),
    "quantised": ("LlamaConfig", TINY | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
                  "quantization_config: gptq"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_model_that_no_engine_here_can_serve_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    name, sizes, reason = CONFIGURATIONS[case]
    text = refused(written(tmp_path / "m", name, **sizes))
    assert text.startswith(f"model = '{tmp_path / 'm'}': ")
    assert reason in text


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    assert "model_type 'own': it needs code of its own, which is not run" in refused(tmp_path)
    assert not ran.exists()
    # Where transformers knows the type, its own code is taken.
    known = written(tmp_path / "known", "LlamaConfig", **TINY | {"auto_map": {"AutoConfig": "own.Own"}})
    (known / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    assert "auto_map" in (known / "config.json").read_text()
    assert create(checkpoints.config(known, options={"weights": "random"})) is not None
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "config.json: "),
        ("[]", "config.json: list, expected an object"),
        ("7", "config.json: int, expected an object"),
        ("null", "config.json: NoneType, expected an object"),
        ("{}", "model_type None"),
        ('{"model_type": 7}', "model_type 7"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json: "),
        ('{"model_type": "llama", "hidden_size": -1}', "config.json: "),
    ],
)
def test_a_broken_configuration_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert reason in refused(tmp_path)
    assert "no such directory; a" in refused(tmp_path / "org/name")


def test_weights_that_are_pickled_are_not_read(tmp_path: Path) -> None:
    directory = written(tmp_path / "m", "LlamaConfig", **TINY)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    assert "its weights: " in refused(directory, options={"weights": "checkpoint"})
    torch.save({"other": Path}, directory / "pytorch_model.bin")
    assert "its weights: " in refused(directory, options={"weights": "checkpoint"})


def test_an_end_of_sequence_that_no_token_has_is_left_out_or_refused(tmp_path: Path) -> None:
    directory = written(tmp_path / "m", "LlamaConfig", **TINY)
    file = directory / "generation_config.json"
    file.write_text('{"eos_token_id": [-1, 5, 64]}')
    config = checkpoints.config(directory, options={"weights": "random"})
    sampling = Sampling(max_tokens=4, min_tokens=3)  # bars every end of sequence from the first picks
    (found,) = factory.generate_many(config, [(np.array([3, 4]), sampling)])
    assert 3 <= len(found.tokens) <= 4
    assert factory.loaded(config, factory.ModelOptions.parse(config.options)).eos == {5}
    for wrong in ('"two"', "[[5]]", "{}", "5.0", "true"):
        file.write_text(f'{{"eos_token_id": {wrong}}}')
        assert "eos_token_id: " in refused(directory)


def test_weights_that_are_missing_or_broken_are_one_line(tmp_path: Path) -> None:
    directory = written(tmp_path / "m", "LlamaConfig", **TINY)
    assert "its weights: " in refused(directory, options={"weights": "checkpoint"})
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | {"num_hidden_layers": 1})).save_pretrained(
        directory
    )
    written(directory, "LlamaConfig", **TINY)
    assert "its weights: 9 are missing" in refused(directory, options={"weights": "checkpoint"})
    (directory / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    assert "its weights: " in refused(directory, options={"weights": "checkpoint"})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"options": {"dtype": "int8"}}, "dtype"),
        ({"options": {"speed": "9"}}, "speed"),
        ({"options": {"threads": "many"}}, "threads"),
        ({"device": "cuda:77"}, "device: 'cuda:77'"),
        ({"device": "abacus"}, "device: 'abacus'"),
        ({"host_layout": "round"}, "'round'"),
        ({"slots": 10}, "no pool of 10 slots"),
        ({"chunk_tokens": 0}, "chunk_tokens: 0"),
        ({"hisparse": HiSparse(device_slots=8, hot_tokens=8)}, "enable_hisparse"),
        ({"group": Alone(Ranks(0, 1, 0, 2))}, "pp_size = 2"),
    ],
)
def test_settings_that_it_does_not_have_are_refused_by_name(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in refused(written(tmp_path / "m", "LlamaConfig", **TINY), **more)


def test_a_model_that_computes_something_else_over_a_paged_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path / "m", "LlamaConfig", **TINY)
    whole: Callable[..., Any] = factory.PagedModel.chunk
    monkeypatch.setattr(
        factory.PagedModel, "chunk", lambda self, ids, *given, **more: whole(self, ids - 1, *given, **more)
    )
    assert "its logits differ" in refused(directory)


def test_a_model_that_reads_positions_out_of_the_number_of_keys_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    layers = {"attention_types": [[["global", "local"], 1]], "window_size": 256}  # the last keys of the longest
    assert "its logits differ" in refused(written(tmp_path / "m", "GPTNeoConfig", **sizes, **layers))


def test_other_weights_have_another_digest_and_random_ones_of_a_seed_the_same(tmp_path: Path) -> None:
    directory = written(tmp_path / "m", "LlamaConfig", **TINY)

    def digest(role: str, **options: str) -> bytes:
        return create(checkpoints.config(directory, role, options={"weights": "random", **options})).description.weights

    digests = [
        digest("prefill", seed="1"), digest("decode", seed="1"), digest("decode"), digest("decode", dtype="bfloat16")
    ]  # fmt: skip
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.fixture(scope="module")
def handoff(tmp_path_factory: pytest.TempPathFactory) -> Handoff:
    directory = checkpoints.make("gemma3", tmp_path_factory.mktemp("c") / "gemma3")
    return Handoff.of(directory, prefill={"slots": 128}, decode={"slots": 128})


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], {}, "prompt: 0 tokens"),
        ([-1], {}, "id -1 is not within"),
        ([512], {}, "id 512 is not within [0, 512)"),
        ([1] * 125, {"max_tokens": 8}, "133 tokens, the arena has 128 slots"),
        ([1] * 2_045, {"max_tokens": 8}, "2053 tokens, the context has 2048"),
        ([1], {"temperature": float("nan")}, "temperature: nan"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_by_both_roles(
    handoff: Handoff, prompt: list[int], sampling: dict[str, Any], reason: str
) -> None:
    one = request(1, np.array(prompt, np.int64), **sampling)
    with pytest.raises(ValueError, match=reason.replace("[", r"\[").replace(")", r"\)").replace(".", r"\.")):
        handoff.decode.check(one)
    if "arena" not in reason:  # prefill needs slots for the prompt alone
        with pytest.raises(ValueError, match=r"prompt|temperature|tokens"):
            handoff.prefill.admit(one)


def test_a_context_has_the_tokens_that_a_model_without_position_embeddings_has_biases_for(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 48}
    config = checkpoints.config(written(tmp_path / "m", "MptConfig", **sizes), options={"weights": "random"})
    whole = Sampling(max_tokens=8, ignore_eos=True)
    assert len(factory.generate_many(config, [(np.full(40, 5), whole)])[0].tokens) == 8
    with pytest.raises(ValueError, match="49 tokens, the context has 48"):
        factory.generate_many(config, [(np.full(41, 5), whole)])


def test_a_prompt_that_its_pool_can_never_hold_is_refused_with_both_values(handoff: Handoff) -> None:
    with pytest.raises(ValueError, match="129 tokens, the pool has 128 slots"):
        handoff.prefill.admit(request(1, np.full(129, 5)))


def test_aux_of_anything_else_is_refused_and_takes_no_room(handoff: Handoff) -> None:
    one = request(7, prompts()[0])
    aux = handoff.computed(one)
    handoff.prefill.free(7)
    good = msgspec.msgpack.decode(aux, type=FirstToken)
    slots = {component.name: np.arange(component.rows(9)) for component in handoff.decode.description.components}
    for wrong in (
        b"", b"\x91", aux[:-1], aux + b"\0",
        msgspec.structs.replace(good, prompt_tokens=2).pack(), msgspec.structs.replace(good, id=512).pack(),
        msgspec.msgpack.encode(["reference/1", *msgspec.to_builtins(good)[1:]]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="aux"):
            handoff.decode.admit(one, slots, wrong)
    for wrong in ({"kv": slots["kv"]}, slots | {"kv": slots["kv"][1:]}, slots | {"kv": slots["kv"] + 128}):
        with pytest.raises(ValueError, match="slot"):
            handoff.decode.admit(one, wrong, aux)
    assert handoff.decode.idle


def test_prefill_gives_pages_back_of_rooms_that_end_or_are_cancelled(handoff: Handoff) -> None:
    full = [request(room, np.full(64, 5)) for room in (11, 12, 13)]
    assert [handoff.prefill.admit(each) for each in full] == [True, True, False]
    handoff.prefill.step()
    handoff.prefill.cancel(11)
    assert not handoff.prefill.admit(full[2])  # its pages may still be read
    handoff.prefill.free(11)
    assert handoff.prefill.admit(full[2])
    for each in full:
        handoff.prefill.free(each.room)
    handoff.prefill.free(99)
    assert handoff.prefill.idle


def test_a_prompt_gets_a_turn_before_a_longer_one_ends(handoff: Handoff) -> None:
    for room, length in ((21, 60), (22, 10)):
        assert handoff.prefill.admit(request(room, np.full(length, 5)))
    ended = [type(event).__name__ + str(event.room) for _ in range(5) for event in handoff.prefill.step()]
    assert ended.index("Prefilled22") < ended.index("Prefilled21")
    for room in (21, 22):
        handoff.prefill.free(room)


def test_rooms_beyond_a_batch_take_turns(handoff: Handoff) -> None:
    rooms = [request(room, prompts()[4], max_tokens=4, ignore_eos=True) for room in range(31, 37)]
    for each in rooms:
        handoff.land(each, handoff.computed(each))
    first = {event.room for event in handoff.decode.step()}
    second = {event.room for event in handoff.decode.step()}
    assert (len(first), len(second)) == (4, 4)
    assert first | second == {room.room for room in rooms}
    handoff.decode.cancel(31)
    handoff.run()
    assert handoff.ends.keys() & {room.room for room in rooms} == {room.room for room in rooms} - {31}
    assert replace(rooms[0], room=99).room not in handoff.ends
