"""CURVE keys on every process: who is on the allow-lists works, who is not is refused, and the others go on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import zmq

from pdtransfer.bus.keys import generate
from pdtransfer.wire import Hello, Identity, Ranks, encode
from tests.support.fleets import LIMITS, Site, equal, generated, prompts, running
from tests.support.waiting import Running, standing, until

SOON = replace(LIMITS, resend_ms_max=200)  # what is refused is tried again soon
NODES = ("router", "prefill-0", "decode-0", "decode-1")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    """Of two decodes the second is unknown to the prefill, though the router knows it."""
    directory = tmp_path_factory.mktemp("k")
    lines = {node: generate(directory / node) for node in NODES}
    (directory / "all").write_text("\n".join(lines.values()) + "\n")
    (directory / "prefills").write_text("\n".join((lines["router"], lines["decode-0"])) + "\n")

    def keys(node: str, allow: str) -> dict[str, Any]:
        return {"key": directory / f"{node}.key", "allow": directory / allow, "limits": SOON}

    yield from standing(
        running(
            tmp_path_factory.mktemp("f"),
            prefills=[keys("prefill-0", "prefills")],
            decodes=[keys("decode-0", "all"), keys("decode-1", "all")],
            router=keys("router", "all"),
        )
    )


async def test_who_is_on_the_lists_serves_and_who_is_not_costs_no_request(site: Site) -> None:
    texts = prompts(1, *[30] * 6)
    answers = await asyncio.gather(*(site.complete(text) for text in texts))
    for text, answer in zip(texts, answers, strict=True):
        assert equal(answer, generated(text)), answer
        assert answer.facts["decode"] == "decode-0"
    prefill = await site.metrics(site.prefill)
    assert prefill["pdtransfer_bus_strangers_total"] >= 1
    assert prefill["pdtransfer_sessions"] == 1
    assert "not on the allow-list" in site.log(site.prefill)
    await site.settled()


async def test_a_stranger_receives_nothing_and_is_counted(site: Site) -> None:
    before = (await site.metrics(site.prefill))["pdtransfer_bus_strangers_total"]
    endpoint: str = site.prefill.ready["endpoint"]
    key, _, address = endpoint.rpartition("@")
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = key.encode(), public, secret
        bare = context.socket(zmq.DEALER)
        for each in (socket, bare):
            each.connect(address)
            hello = encode(Hello(1, 1, Identity("decode-0", "decode", 5, Ranks(), "reference-mla", b"w", 16)))
            with suppress(zmq.Again):  # it was refused by now
                each.send(hello, zmq.NOBLOCK)
        await site.until(site.prefill, "pdtransfer_bus_strangers_total", lambda count: count > before)
        assert not socket.poll(200)
        assert not bare.poll(0)
    finally:
        context.destroy(linger=0)
    await site.served()


def without(node: str) -> Callable[[str], str]:
    """A list but for this node's line."""
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if node not in line)


def as_role(node: str, role: str) -> Callable[[str], str]:
    """A list that lets this node be no other role."""
    return lambda text: re.sub(f"^(.*{node}.*)$", rf"\1 {role}", text, flags=re.MULTILINE)


async def test_a_revoked_key_loses_its_sessions_at_a_hangup_and_comes_back_at_another(site: Site) -> None:
    await site.served()
    assert (await site.metrics(site.prefill))["pdtransfer_sessions"] == 1
    with site.listed(site.prefill, lambda _: "decode-0 is not a line"):
        await until(lambda: "the allow-list is unchanged" in site.log(site.prefill))
        await site.served()
    with site.listed(site.prefill, without("decode-0")):
        await site.until(site.prefill, "pdtransfer_sessions", lambda sessions: not sessions)
        assert not await site.answers()
    await until(site.answers, "it is listed again")
    await site.settled()


@pytest.mark.parametrize("role", ["", "decode", "router"])
async def test_a_prefill_whose_key_or_role_decode_revokes_serves_it_no_more_until_it_is_listed_again(
    site: Site, role: str
) -> None:
    log = site.log(site.decode)
    await site.served()
    with site.listed(site.decode, as_role("prefill-0", role) if role else without("prefill-0")):
        await until(
            lambda: "its key was revoked, or its role" in site.log(site.decode)[len(log) :], "the prefill is refused"
        )
        assert not await site.answers()
    await until(site.answers, "it is listed again")
    await site.settled()


@pytest.mark.parametrize(
    ("worker", "role"), [("prefill-0", "decode"), ("prefill-0", "router"), ("decode-0", "prefill")]
)
async def test_a_worker_whose_role_the_router_revokes_is_lost_until_it_is_back(
    site: Site, worker: str, role: str
) -> None:
    await site.served()

    async def usable(expected: bool) -> bool:
        health = await (await site.http.get("/health")).json()
        workers = {each["node"]: each["usable"] for each in health["workers"] if each["node"]}
        return workers.get(worker, False) == expected

    with site.listed(site.router, as_role(worker, role)):
        await until(lambda: usable(False), "the worker is lost")
    await until(lambda: usable(True), "it is back")
    await site.served()
    await site.settled()


async def test_a_ready_daemon_prints_the_endpoint_that_its_peers_dial(site: Site) -> None:
    public = (site.configs["prefill-0"].key.with_suffix(".pub")).read_text().split()[1]
    assert site.prefill.ready["endpoint"].startswith(f"{public}@tcp://127.0.0.1:")
