"""A DNS server on loopback that answers from tables that a test changes. It needs dnspython."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """Answers what `records` has by (name, type), with `ttl`; NXDOMAIN for names that it has nothing of."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl, self.failing, self.asked = 1, False, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    @property
    def address(self) -> str:
        host, port = self._transport.get_extra_info("sockname")
        return f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked += 1
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.AA | dns.flags.RA
        asked = question.question[0]
        name, kind = asked.name.to_text(omit_final_dot=True), asked.rdtype.name
        if self.failing:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif record := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(asked.name, self.ttl, "IN", kind, *record))
        elif not any(of == name for of, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
