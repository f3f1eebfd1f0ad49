"""Requests that are under way while a node of their fleet is struck: each is answered rightly, or gives the reason."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from pdtransfer.serve.process.fleet import Daemon
from tests.support.engines import plain
from tests.support.fleets import Answer, Site, prompts
from tests.support.healing import right, text_of
from tests.support.processes import deliver
from tests.support.waiting import until

STREAM_TOKENS = 100
LOST = {"peer_lost", "peer_restarted", "transfer", "shutdown", "aborted"}


def named(site: Site, node: str) -> Daemon:
    return next(daemon for daemon in site.fleet.daemons if daemon.ready["node"] == node)


async def metric(site: Site, node: str, name: str) -> float:
    return (await site.metrics(named(site, node)))[name]


async def killed(daemon: Daemon) -> None:
    daemon.process.kill()
    await daemon.process.wait()


class Load:
    """Requests that are under way; every one is answered rightly, or gives the reason."""

    def __init__(self, site: Site, seed: int, count: int = 16, size: int = 80) -> None:
        self._texts = prompts(seed, *[size] * count)
        self._asked = [asyncio.ensure_future(site.complete(text)) for text in self._texts]

    async def answers(self) -> list[Answer]:
        answers = await asyncio.gather(*self._asked)
        for text, answer in zip(self._texts, answers, strict=True):
            if answer.status != 200:
                assert answer.status in (502, 503), answer
                assert answer.error["code"] in LOST, answer
                assert answer.error["message"]
            else:
                assert right(text, answer), answer
        return answers

    async def all_served(self) -> None:
        answers = await self.answers()
        assert [answer.status for answer in answers] == [200] * len(answers), answers


class Stream:
    """One stream, whose first token has come when `open` returns."""

    @classmethod
    async def open(cls, site: Site, prompt: str) -> Stream:
        self = cls()
        self._prompt, self._events = prompt, list[dict[str, Any]]()

        async def read() -> None:
            async for event in site.events(prompt, max_tokens=STREAM_TOKENS):
                self._events.append(event)

        self._task = asyncio.ensure_future(read())
        await until(lambda: self._events or self._task.done(), "the first token")
        return self

    async def whole(self) -> bool:
        """Whether it came to its end; if not, it gives the reason."""
        await self._task
        text = plain.text(self._prompt, STREAM_TOKENS)
        last = self._events[-1]
        assert text.startswith(text_of(self._events))
        if "error" in last:
            assert last["error"]["code"] in LOST, last
            return False
        return text_of(self._events) == text


async def streams(site: Site, node: str) -> list[Stream]:
    """Some streams, one of which at least has to do with this node."""
    before = await metric(site, node, "pdtransfer_rooms_begun_total")
    made = await asyncio.gather(*(Stream.open(site, f"stream {number}") for number in range(4)))
    assert await metric(site, node, "pdtransfer_rooms_begun_total") > before
    return made


async def strike(site: Site, node: str, number: signal.Signals) -> None:
    """The signal is in force once this returns."""
    deliver([named(site, node).process.pid], number)
    if number is signal.SIGKILL:
        await named(site, node).process.wait()


async def mend(site: Site, node: str, number: signal.Signals) -> None:
    if number is signal.SIGKILL:
        await site.restart(named(site, node))
    else:
        named(site, node).process.send_signal(signal.SIGCONT)
