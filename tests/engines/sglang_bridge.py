"""A prefill server of SGLang, a decode engine of vLLM, and what a proxy sends to both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.sglang_engine import SglangServer, free_port
from tests.support.vllm_engine import Generated, VllmEngine
from tests.support.vllm_pair import settles


def prefill_server(model: Path, log: Path, **options: Any) -> SglangServer:
    """A prefill server of SGLang, at a port that decode engines get. It starts in the background."""
    settings = {"bind": f"tcp://127.0.0.1:{free_port()}", "time_left_s": 60.0}
    given: dict[str, Any] = {"disaggregation_mode": "prefill", "disable_radix_cache": False} | options
    return SglangServer(model, log, settings=settings, **given)


@dataclass
class Bridge:
    """What a proxy in front of both engines does."""

    prefill: SglangServer
    decode: VllmEngine
    _draw: random.Random = field(default_factory=lambda: random.Random(5))
    _blocks: int = 0

    def ready(self) -> None:
        """Once both take requests."""
        self._blocks = self.decode.ready()["blocks"] - 1
        self.prefill.ready()

    def settles(self) -> None:
        """Decode comes to rest with all blocks that it began with."""
        settles(self.decode.state, {"free_blocks": self._blocks, "requests": 0})

    @property
    def port(self) -> int:
        """Where prefill's hand-offs are."""
        return int(self.prefill.settings["bind"].rpartition(":")[2])

    def room(self) -> int:
        """A bootstrap_room."""
        return self._draw.getrandbits(63)

    def receives(self, room: int) -> dict[str, Any]:
        """kv_transfer_params of decode."""
        return {
            "do_remote_prefill": True, "bootstrap_room": str(room), "remote_host": "127.0.0.1",
            "remote_port": self.port, "tp_size": 1,
        }  # fmt: skip

    def begin_prefill(self, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[Future[list[int]]]:
        """Begins to prefill each prompt in the room of a bootstrap_room, and makes one token of each."""
        host = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port}
        return [
            self.prefill.add(prompt, tokens=1, bootstrap_room=room, **host)
            for prompt, room in zip(prompts, rooms, strict=True)
        ]

    def begin_decode(self, prompts: Sequence[Sequence[int]], rooms: Sequence[int], *, tokens: int) -> list[Future[Any]]:
        """Begins to decode each prompt, which comes from the room of a bootstrap_room."""
        return [
            self.decode.add(prompt, tokens=tokens, kv_transfer_params=self.receives(room))
            for prompt, room in zip(prompts, rooms, strict=True)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], *, tokens: int) -> tuple[list[Generated], list[list[int]]]:
        """Both engines are asked at once: what decode generated, and the tokens that prefill sampled."""
        rooms = [self.room() for _ in prompts]
        sent = self.begin_prefill(prompts, rooms)
        made = [self.decode.generated(each) for each in self.begin_decode(prompts, rooms, tokens=tokens)]
        return made, [each.result() for each in sent]
