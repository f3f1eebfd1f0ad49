"""Starts daemons as child processes with their own command lines, waits until they are ready, and stops them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...environment import child_environment
from ...errors import WorldError
from ..settings.config_to_argv import config_to_argv
from ..settings.router import RouterConfig
from ..settings.worker import DecodeConfig, PrefillConfig
from .signals import end_with_parent

READY_S = 120.0  # enough to prefault an arena of some GiB on a busy host
STOP_S = 30.0
END_S = 1.0  # from the end of a daemon's output to its exit
LOG_LINES = 15  # log lines of a failed daemon that the error shows


class Daemon:
    """One child process of `pdtransfer ROLE`; `ready` is the ready message that it printed."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.role, self.process, self.log = role, process, log
        self.ready: dict[str, Any] = {}

    @classmethod
    async def start(
        cls, config: PrefillConfig | DecodeConfig | RouterConfig, log: Path, *, within: Sequence[str] = ()
    ) -> Daemon:
        """Starts the daemon with the flags for this config; its log goes to the file `log`.

        `within` is a command prefix, for example to run the daemon in a network namespace.
        """
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *within, sys.executable, "-m", "pdtransfer", config.role, *config_to_argv(replace(config, json=True)),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env=child_environment(), start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        return cls(config.role, process, log)

    async def wait_ready(self) -> dict[str, Any]:
        """Returns the daemon's ready message. Raises WorldError with the end of its log if the daemon fails first."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), READY_S)
        except TimeoutError:
            line = b""
        if not line:
            with suppress(TimeoutError):  # the daemon closes its output just before it exits
                await asyncio.wait_for(self.process.wait(), END_S)
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise WorldError(f"the {self.role} daemon did not become ready (status {self.process.returncode}):\n{last}")
        self.ready = json.loads(line)
        return self.ready

    async def stop(self) -> int:
        """Sends SIGTERM, then SIGKILL if the daemon does not stop in time; returns its exit status."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_S)
            except TimeoutError:
                self.process.kill()
        return await self.process.wait()


class Fleet:
    """A router with prefill and decode daemons on this host: `async with Fleet(...) as fleet`.

    `within` maps a node's name to the command prefix that Daemon.start takes.
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
        """Registers the process before it waits, so that a cancelled start still finds it."""
        start = asyncio.ensure_future(Daemon.start(config, log, within=self._within(config.node)))
        try:
            await asyncio.shield(start)
        finally:
            self.daemons.append(await start)

    def of(self, role: str) -> list[Daemon]:
        """Returns the daemons of one role."""
        return [daemon for daemon in self.daemons if daemon.role == role]

    @property
    def url(self) -> str:
        """The URL of the router."""
        return f"http://{self.of('router')[0].ready['http']}"

    @property
    def metrics(self) -> list[str]:
        """The host:port of each decode rank's metrics."""
        return [rank["http"] for daemon in self.of("decode") for rank in daemon.ready["ranks"]]
