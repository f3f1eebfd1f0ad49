"""Daemons as child processes: started by their own command line, awaited until ready, ended in good order."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ..config.config import DecodeConfig, PrefillConfig, RouterConfig
from ..config.config_to_argv import arguments
from ..environment import child_environment
from ..errors import WorldError
from .signals import end_with_parent

READY_S = 120.0  # an arena of some GiB is prefaulted within it, on a busy host too
STOP_S = 30.0
END_S = 1.0  # from the end of a daemon's output to its own
LOG_LINES = 15  # of a daemon that failed, for the person who reads the error


class Daemon:
    """One child process of `pdtransfer ROLE`; `ready` is what it said of itself."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.role, self.process, self.log = role, process, log
        self.ready: dict[str, Any] = {}

    @classmethod
    async def start(
        cls, config: PrefillConfig | DecodeConfig | RouterConfig, log: Path, *, within: Sequence[str] = ()
    ) -> Daemon:
        """Starts it with the flags that make this very config; its log goes to `log`.

        `within` is what the command line begins with, where that has it run in a namespace, say.
        """
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *within, sys.executable, "-m", "pdtransfer", config.role, *arguments(replace(config, json=True)),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env=child_environment(), start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        return cls(config.role, process, log)

    async def wait_ready(self) -> dict[str, Any]:
        """What the daemon says when it is ready. Raises WorldError, with the end of its log, when it does not."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), READY_S)
        except TimeoutError:
            line = b""
        if not line:
            with suppress(TimeoutError):  # its output ends a moment before it does
                await asyncio.wait_for(self.process.wait(), END_S)
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise WorldError(f"the {self.role} daemon did not get ready (status {self.process.returncode}):\n{last}")
        self.ready = json.loads(line)
        return self.ready

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL for one that does not end in time; its exit status."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_S)
            except TimeoutError:
                self.process.kill()
        return await self.process.wait()


class Fleet:
    """A router before some prefill and decode daemons, all of this host: `async with Fleet(...) as fleet`.

    `within` says for a node's name what Daemon.start does.
    """

    def __init__(
        self,
        prefills: Sequence[PrefillConfig],
        decodes: Sequence[DecodeConfig],
        router: RouterConfig,
        logs: Path,
        *,
        within: Callable[[str], Sequence[str]] = lambda _: (),
    ) -> None:
        self._configs, self._router, self._logs, self._within = (*prefills, *decodes), router, logs, within
        self.daemons: list[Daemon] = []

    async def __aenter__(self) -> Fleet:
        try:
            for number, config in enumerate(self._configs):
                await self._start(config, self._logs / f"{config.role}-{number}.log")
            await asyncio.gather(*(daemon.wait_ready() for daemon in self.daemons))
            endpoints = {role: tuple(d.ready["endpoint"] for d in self.of(role)) for role in ("prefill", "decode")}
            router = replace(self._router, prefill=endpoints["prefill"], decode=endpoints["decode"])
            await self._start(router, self._logs / "router.log")
            await self.daemons[-1].wait_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(daemon.stop() for daemon in reversed(self.daemons)))

    async def _start(self, config: PrefillConfig | DecodeConfig | RouterConfig, log: Path) -> None:
        """Whoever gives up in the middle of it finds the process among the others all the same."""
        start = asyncio.ensure_future(Daemon.start(config, log, within=self._within(config.node)))
        try:
            await asyncio.shield(start)
        finally:
            self.daemons.append(await start)

    def of(self, role: str) -> list[Daemon]:
        """The daemons of one role."""
        return [daemon for daemon in self.daemons if daemon.role == role]

    @property
    def url(self) -> str:
        """Where the router listens."""
        return f"http://{self.of('router')[0].ready['http']}"

    @property
    def metrics(self) -> list[str]:
        """Where each decode rank says its figures, host:port."""
        return [rank["http"] for daemon in self.of("decode") for rank in daemon.ready["ranks"]]


@dataclass(frozen=True, slots=True)
class Standing:
    """A fleet that somebody else has started, and ends: where its router listens, and its decode ranks' figures are."""

    url: str
    metrics: Sequence[str] = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass
