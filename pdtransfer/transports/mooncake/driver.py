"""Mooncake's TransferEngine, for an engine's process, which loads this module by its path.

It imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any


class MooncakeEngine:
    """An Engine of `engines.child`. Its environment, which the parent sets, has its ports."""

    def __init__(self, host: str, protocol: str, ports: tuple[int, int], *, serves: bool) -> None:
        del ports, serves  # it has a thread for either
        self._protocol, self._target = protocol, ""
        self._engine: Any = import_module("mooncake.engine").TransferEngine()  # it has no types, and may be missing
        _check("initialize", self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""))
        self.port: int = self._engine.get_rpc_port()

    def serve(self, address: int, byte_count: int) -> None:
        _check("register_memory", self._engine.register_memory(address, byte_count))

    def read(self, address: int, byte_count: int) -> None:
        if self._protocol != "tcp":  # TCP reads its source without registration
            self.serve(address, byte_count)

    def meet(self, target: str, base: int) -> None:
        self._target = target
        if self._engine.get_first_buffer_address(target) != base:
            raise RuntimeError(f"no engine with this arena answers at {target}")

    def submit(self, operations: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int]]:
        requests: list[tuple[int, int]] = []
        for source, target, byte_count in operations:
            number: int = self._engine.transfer_submit_write(self._target, source, target, byte_count)
            if number <= 0:
                raise RuntimeError(f"transfer_submit_write answers {number}")
            requests.append((number, byte_count))
        return requests

    def landed(self, request: int) -> bool:
        status: int = self._engine.transfer_check_status(request)
        if status < 0:
            raise RuntimeError(f"transfer_check_status answers {status}")
        return status > 0


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call} answers {status}")


ENGINE = MooncakeEngine
