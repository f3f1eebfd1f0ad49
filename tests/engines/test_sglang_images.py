"""A model that sees images, on two of SGLang's servers: both make the tokens of an image's place in the prompt, prefill
alone computes what is seen, and decode has its KV."""

from __future__ import annotations

import base64
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked_features import TEXT, texts_of
from tests.support.sglang_engine import DEVICE, SglangServer, is_since
from tests.support.vllm_engine import Checkpoints
from tests.support.vllm_server import model_of_bytes, router, stream_of

pytestmark = [
    pytest.mark.timeout(2_000),  # servers start slowly on a busy host
    pytest.mark.skipif(DEVICE != "cpu", reason="without a grammar backend on a GPU"),
    pytest.mark.skipif(not is_since("0.5.23"), reason="earlier versions import other kernels with the processor"),
]

CHATS = "/v1/chat/completions"
SPECIAL = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def asked(shade: int, width: int, text: str) -> dict[str, Any]:
    """A chat about an image of `width` by 32 pixels."""
    pixels = bytes((shade * row * column) % 256 for row in range(32) for column in range(width) for _ in range(3))
    picture = base64.b64encode(f"P6 {width} 32 255 ".encode() + pixels).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/x-portable-pixmap;base64,{picture}"}}
    parts = [{"type": "text", "text": text}, image, {"type": "text", "text": "What is it?"}]
    return {
        "model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 24, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def text_of(answer: Any) -> str:
    [choice] = answer["choices"]
    return choice["message"]["content"]


def test_an_image_is_seen_by_prefill_and_decode_has_its_kv(sglang_checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Images of two sizes, in a chunk of the prompt and behind one; whole answers, and a stream."""
    model = model_of_bytes(
        sglang_checkpoints.path("qwen2_vl"), tmp_path / "bytes", special=SPECIAL, template=TEMPLATE,
        pad_token=SPECIAL[0],
    )  # fmt: skip
    options: dict[str, dict[str, Any]] = {
        "prefill": {"disaggregation_mode": "prefill", "enable_metrics": True},
        "decode": {"disaggregation_mode": "decode", "disaggregation_decode_retraction_backup": "cpu_tensor"},
        "single": {},
    }
    with ExitStack() as stack:
        prefill, decode, single = (
            stack.enter_context(
                SglangServer(
                    model, tmp_path / f"{name}.log", settings={"verify": True, "time_left_s": 60.0},
                    served_model_name="m", disable_fast_image_processor=True, **given,
                )
            )
            for name, given in options.items()
        )  # fmt: skip
        for server in (prefill, decode, single):
            server.ready()
        front = stack.enter_context(router(prefill, decode, tmp_path / "router.log", engine="sglang")).ready()
        bodies = [asked(3, 32, TEXT[:40]), asked(7, 32, TEXT[:40]), asked(3, 64, TEXT[:40]), asked(5, 48, TEXT)]
        alone = [text_of(single.ask(CHATS, body)) for body in bodies]
        assert alone[0] != alone[1]
        assert [text_of(front.post(CHATS, body)) for body in bodies] == alone
        assert texts_of(stream_of(front.url, CHATS, bodies[0])) == {"content": alone[0]}
        assert prefill.metric("sglang:kv_transfer_total_mb_count") == len(bodies) + 1
        for server in (prefill, decode):
            server.settles()
