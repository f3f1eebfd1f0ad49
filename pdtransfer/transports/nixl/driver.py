"""NIXL's agent with its UCX backend, for an engine's process, which loads this module by its path.

It imports nothing of this package. An agent's listener gives everybody its metadata: with it UCX is reached, and the
memory that is registered. Its name is where the peer dials it, host:port, since a writer knows nothing else of it. A
transfer ends with a flush of the endpoint, so its success is that of every write of it, in the peer's memory.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

PACKAGES = "nixl_cu12", "nixl_cu13"  # which have the same modules; `nixl` itself takes one of them, and torch

_LISTEN_US = 20_000  # between two looks for somebody who wants the metadata
_WAKE_US = 100_000  # at the latest, of its thread, which events of sockets wake: its default of 0 keeps a core busy
_MEET_S = 8.0
_LOOK_S = 0.002


class NixlEngine:
    """An Engine of `engines.child`.

    It holds its two ports from the beginning, and nothing of NIXL runs before `serve` or `meet`. A stranger who reaches
    UCX needs no registered memory to write this process.
    """

    def __init__(self, host: str, protocol: str, ports: tuple[int, int], *, serves: bool) -> None:
        del protocol  # it is in the environment
        self._target, self._serves = "", serves
        self._listens, self._ucx_listens = _HeldPort(ports), _HeldPort(ports)
        self.port = self._listens.number
        self._name = f"{host}:{self.port}"

    @cached_property
    def _nixl(self) -> Any:
        for package in PACKAGES:
            try:
                return import_module(f"{package}._bindings")
            except ModuleNotFoundError:
                continue
        raise RuntimeError("nixl is not installed")

    @cached_property
    def _agent(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useListenThread, config.lthrDelay, config.listenPort = True, _LISTEN_US, self.port
        # An engine that writes is advanced by `landed` alone: with a thread as well it takes twice the time of the CPU.
        config.useProgThread, config.pthrDelay = self._serves, _WAKE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        self._listens.give_up()
        return self._nixl.nixlAgent(self._name, config)

    @cached_property
    def _backends(self) -> list[int]:
        agent, port = self._agent, self._ucx_listens.number
        self._ucx_listens.give_up()
        try:
            return [agent.createBackend("UCX", {"engine_config": f"TCP_PORT_RANGE={port}-{port}"})]
        except self._nixl.nixlBackendError as error:
            text = f"UCX does not start ({error}): check that /sys/class/net has the interface to the peer"
            raise RuntimeError(text) from None

    def serve(self, address: int, byte_count: int) -> None:
        memory = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, byte_count, 0, b"")])
        self._agent.registerMem(memory, self._backends)

    def read(self, address: int, byte_count: int) -> None:
        self.serve(address, byte_count)  # its metadata is given to nobody who could ask for more than it

    def meet(self, target: str, base: int) -> None:
        self._target, backends = target, self._backends  # what it fetches is read by a backend
        host, _, port = target.rpartition(":")
        address = socket.gethostbyname(host)
        socket.create_connection((address, int(port)), _MEET_S).close()  # the agent does not report a refusal
        self._agent.fetchRemoteMD(target, address, int(port), "")
        deadline = time.monotonic() + _MEET_S
        while not self._knows([]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no agent of this name answers at {target}")
            time.sleep(_LOOK_S)
        if not self._knows([(base, 1, 0)]) or self._knows([(base - 1, 1, 0)]):
            raise RuntimeError(f"no engine with this arena answers at {target}")
        self._agent.makeConnection(target, backends)

    def _knows(self, descriptors: list[tuple[int, int, int]]) -> bool:
        """True if it has the peer's metadata, and the peer has registered these."""
        descriptors_there = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, descriptors)
        return self._agent.checkRemoteMD(self._target, descriptors_there) == self._nixl.NIXL_SUCCESS

    def submit(self, operations: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int]]:
        memory, xfer_list = self._nixl.DRAM_SEG, self._nixl.nixlXferDList
        request: int = self._agent.createXferReq(
            self._nixl.NIXL_WRITE,
            xfer_list(memory, [(source, byte_count, 0) for source, _, byte_count in operations]),
            xfer_list(memory, [(target, byte_count, 0) for _, target, byte_count in operations]),
            self._target,
            b"",
            self._backends,
        )
        self._agent.postXferReq(request)
        return [(request, sum(byte_count for _, _, byte_count in operations))]

    def landed(self, request: int) -> bool:
        if self._agent.getXferStatus(request) != self._nixl.NIXL_SUCCESS:  # an error is an exception
            return False
        self._agent.releaseXferReq(request)
        return True


class _HeldPort:
    """A free port, which is held by a listener that accepts nobody until the library's own listens there.

    The name keeps other engines away from it meanwhile, as long as this process lives.
    """

    def __init__(self, ports: tuple[int, int]) -> None:
        first, last = ports
        for self.number in random.sample(range(first, last + 1), last + 1 - first):
            self._name, self._listener = socket.socket(socket.AF_UNIX), socket.socket()
            try:
                self._name.bind(f"\0pdtransfer-nixl-port-{self.number}")  # of this network namespace, as the port is
                self._listener.bind(("", self.number))  # fails also for one that the kernel keeps after its end
                self._listener.listen()
            except OSError:
                self._name.close()
                self._listener.close()
                continue
            return
        raise RuntimeError(f"no port from {first} to {last} is free, and an engine takes two")

    def give_up(self) -> None:
        """Lets the library listen there."""
        self._listener.close()


ENGINE = NixlEngine
