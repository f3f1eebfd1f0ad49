"""Groups of ranks with CURVE keys: each rank is a peer with a key of its own, and none does more than it is listed for.

Decode verifies what it lands, and keeps prompts that have landed for the next ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdtransfer.bus.keys import generate
from pdtransfer.serve.commands.cli import main
from tests.support.fleets import GQA, Site, equal, generated, prompts, running
from tests.support.waiting import Running, standing, until

GROUP = {"engine_option": GQA, "tp_size": 2}
STRANGERS = "pdtransfer_bus_strangers_total"
KEYS = ("front", "p", "p-tp1", "d", "d-tp1")  # nobody's node goes by the name of its key


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    directory = tmp_path_factory.mktemp("k")
    lines = {name: generate(directory / name) for name in KEYS}
    for owner, listed in {
        "front": {"p": "prefill", "d": "decode"},
        "p": {"front": "router", "p": "prefill", "p-tp1": "prefill", "d": "decode", "d-tp1": "decode"},
        "d": {"front": "router", "d": "decode", "d-tp1": "decode", "p": "prefill", "p-tp1": "prefill"},
    }.items():
        (directory / f"{owner}.allow").write_text("".join(f"{lines[name]} {role}\n" for name, role in listed.items()))

    def keys(name: str) -> dict[str, Path]:
        return {"key": directory / f"{name}.key", "allow": directory / f"{name}.allow"}

    yield from standing(
        running(
            tmp_path_factory.mktemp("f"),
            prefills=[GROUP | keys("p") | {"chunk_tokens": 16}],
            decodes=[GROUP | keys("d") | {"verify": True}],
            router=keys("front"),
        )
    )


async def on_ranks(site: Site, role: str, name: str) -> list[float]:
    """One metric of each rank of a worker, the leader's first."""
    daemon = site.fleet.of(role)[0]
    return [(await site.metrics(daemon, rank)).get(name, 0) for rank in range(len(daemon.ready["ranks"]))]


async def test_ranks_with_keys_of_their_own_answer_as_one_process_verified_and_from_the_prefix_cache(
    site: Site,
) -> None:
    texts = prompts(7, 1, 40, 150, 90)
    strangers = {role: await on_ranks(site, role, STRANGERS) for role in ("prefill", "decode")}
    cached = []
    for _ in range(2):
        answers = await asyncio.gather(*(site.complete(text) for text in texts))
        for text, answer in zip(texts, answers, strict=True):
            assert equal(answer, generated(text, options=GQA)), answer
        cached.append([answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers])
    assert cached == [[0, 0, 0, 0], [0, 0, 128, 64]]
    verified = await on_ranks(site, "decode", "pdtransfer_grants_verified_total")
    assert min(verified) >= 2 * len(texts), "on either rank, the rows of each room"
    assert await on_ranks(site, "decode", "pdtransfer_grants_mismatched_total") == [0, 0]
    for role, before in strangers.items():
        assert await on_ranks(site, role, STRANGERS) == before
    assert await on_ranks(site, "prefill", "pdtransfer_sessions") == [2, 2]
    await site.settled()


@pytest.mark.full
async def test_what_a_leader_reads_anew_at_a_hangup_its_ranks_read_anew_as_well(site: Site) -> None:
    await site.served(options=GQA)

    async def sessions(count: int) -> bool:
        return await on_ranks(site, "prefill", "pdtransfer_sessions") == [count, count]

    def without_a_rank(text: str) -> str:
        return "".join(line for line in text.splitlines(keepends=True) if "d-tp1" not in line)

    with site.listed(site.prefill, without_a_rank):
        await until(lambda: sessions(1), "no rank serves the rank whose key is gone")
        assert not await site.answers()
    await until(site.answers, "it is listed again")
    await site.settled()


def test_a_rank_without_a_key_of_its_own_is_reported_with_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(tmp_path / "d")
    (tmp_path / "allow").write_text((tmp_path / "d.pub").read_text())
    flags = ("--tp-size=2", f"--key={tmp_path / 'd.key'}", f"--allow={tmp_path / 'allow'}", "--engine-option=layers=1")
    assert main(["decode", *flags, "--bind=tcp://127.0.0.1:0", "--listen=", "--slots=64"]) == 2
    needs = f"rank tp1 is a peer of its own and needs a key: pdtransfer keygen {tmp_path}/d-tp1"
    assert needs in capsys.readouterr().err
