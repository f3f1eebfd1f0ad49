"""Workers that are added, drained and removed while their router runs: by an operator, and by a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pdtransfer.bus.limits import BusLimits
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.limits import Limits
from pdtransfer.serve.commands.cli import main
from pdtransfer.serve.router.backends.daemons.backend import Daemons
from pdtransfer.serve.router.backends.servers.server_pool import ServerPool
from pdtransfer.serve.router.fleet import fleet_changes, membership
from pdtransfer.serve.router.fleet.admin import read_token
from pdtransfer.serve.router.fleet.fleet_changes import LOOK_S, FleetChanges
from pdtransfer.serve.router.fleet.membership import Membership
from pdtransfer.serve.router.fleet.roles import Departure, Role
from pdtransfer.serve.router.fleet.status import WorkerStatus
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import RouterConfig
from tests.serve.router.router_site import Site, Worker, site
from tests.support.waiting import until

P, D, D2 = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3"
TOKEN = "0123456789abcdef-secret"


def test_a_server_leaves_once_its_requests_have_ended() -> None:
    pool = ServerPool(["http://p"], ["http://d"], Limits())
    added = pool.add("http://d2", "decode")
    assert added is not None
    for each in pool.all:
        pool.report(each, "", 0.0)
    added.unfinished += 1
    pool.depart("http://d2", Departure.DRAINS)
    assert {pool.choose((), ()).decode.url for _ in range(3)} == {"http://d"}  # type: ignore[union-attr]
    assert pool.add("http://d2", "decode") is None
    assert added.usable, "taken in again"
    pool.depart("http://d2", Departure.LEAVES)
    pool.depart("http://d2", Departure.DRAINS)
    assert not pool.left(added)
    added.unfinished -= 1
    assert pool.left(added)
    assert added not in pool.all
    assert not pool.left(added), "once"


class Record:
    """A site that keeps the changes that it gets."""

    def __init__(self, **here: Role) -> None:
        self.here, self.calls = dict[str, Role](here), list[str]()

    def roles(self) -> dict[str, Role]:
        return self.here

    def add_worker(self, role: Role, address: str) -> None:
        self.calls.append(f"add {role} {address}")
        self.here[address] = role

    def depart_worker(self, address: str, departure: Departure) -> None:
        self.calls.append(f"{departure.name.lower()} {address}")
        del self.here[address]

    def workers_status(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(role=role, address=address, node="same", state="ready", rooms_here=0)
            for address, role in self.here.items()
        ]


def members(*prefill: str) -> tuple[Membership, Record]:
    record = Record()
    record.here = dict.fromkeys(prefill, "prefill")
    return Membership(RouterConfig(prefill=prefill), record), record


def test_a_file_adds_and_removes_what_has_changed_in_it_and_no_worker_of_a_flag() -> None:
    it, record = members(P)
    it.listed("file", {P: "prefill", D: "decode"})
    it.listed("file", {P: "prefill", D2: "decode"})
    assert record.calls == [f"add prefill {P}", f"add decode {D}", f"leaves {D}", f"add decode {D2}"]
    record.calls.clear()
    it.depart(D2, Departure.LEAVES)  # an operator's decision stands until the file changes
    it.listed("file", {P: "prefill", D2: "decode"})
    it.listed("file", {})
    assert record.calls == [f"leaves {D2}"]
    assert set(record.here) == {P}


def test_a_line_that_cannot_be_followed_costs_no_other_line(monkeypatch: pytest.MonkeyPatch) -> None:
    it, record = members(P)
    it.listed("file", {P: "decode", D: "decode"})
    assert record.here == {P: "prefill", D: "decode"}
    monkeypatch.setattr(membership, "WORKERS_MAX", 2)
    with pytest.raises(WorldError, match="this router has 2 workers, which is the limit"):
        it.add("decode", D2)


def test_a_refused_line_is_tried_again_and_its_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it, record = members(P)
    monkeypatch.setattr(membership, "WORKERS_MAX", 2)
    lines: dict[str, Role] = {D: "decode", D2: "decode"}
    assert [it.listed("file", lines) for _ in range(3)] == [False] * 3
    assert caplog.text.count("this router has 2 workers, which is the limit") == 1
    it.depart(D, Departure.LEAVES)
    assert it.listed("file", lines), "there is room for it now"
    assert set(record.here) == {P, D2}, "and an operator's decision stands"


def test_a_worker_changes_its_role_once_it_has_left() -> None:
    it, record = members(P)
    assert it.listed("file", {D: "decode"})
    leaving, record.depart_worker = record.depart_worker, lambda *_: None
    assert not it.listed("file", {D: "prefill"}), "its rooms have not ended"
    leaving(D, Departure.LEAVES)
    assert it.listed("file", {D: "prefill"})
    assert record.here == {P: "prefill", D: "prefill"}


def test_what_two_sources_list_is_removed_when_neither_does() -> None:
    it, record = members(P)
    it.listed("file", {D: "decode"})
    it.listed("dns", {D: "decode", D2: "decode"})
    it.listed("file", {})
    assert set(record.here) == {P, D, D2}
    it.listed("dns", {D2: "decode"})
    assert set(record.here) == {P, D2}


def test_a_change_of_a_large_source_takes_time_by_its_workers_and_not_by_their_square() -> None:
    record, looks = Record(), list[str]()
    roles = record.roles
    record.roles = lambda: looks.append("") or dict(roles())  # type: ignore[method-assign]
    named = tuple(f"tcp://127.0.0.1:{port}" for port in range(1, 2_001))
    listed: dict[str, Role] = {f"tcp://127.0.0.1:{port}": "decode" for port in range(10_000, 12_000)}
    followed = Membership(RouterConfig(prefill=named), record)
    followed.listed("file", listed)
    began_s = time.process_time()
    followed.listed("file", {})
    assert (len(record.calls), len(looks)) == (4_000, 4)
    assert time.process_time() - began_s < 0.1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prefill", "line 1: must be a role and an endpoint"),
        ("# all\n\nprefill tcp://127.0.0.1:1 more", "line 3: must be a role and an endpoint"),
        ("both tcp://127.0.0.1:1", "line 1: role = 'both': must be prefill or decode"),
        ("decode http://127.0.0.1:1", "line 1: decode = 'http://127.0.0.1:1'"),
        ("decode tcp://192.0.2.1:1", "line 1: decode = 'tcp://192.0.2.1:1': on another host"),
        ("decode tcp://127.0.0.1:1\nprefill tcp://127.0.0.1:1", "line 2: 'tcp://127.0.0.1:1' is listed twice"),
        pytest.param("\ufeff" + "#" * ((4 << 20) - 2), "longer than 4194304 bytes", id="a BOM too long"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "workers"
    file.write_text(text)
    it, _ = members()
    with pytest.raises(ConfigError) as raised:
        it.read(file)
    assert str(raised.value).startswith(f"workers_file = '{file}': {error}")


def test_a_file_of_comments_and_workers_is_read(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text(f"\ufeff# prefill\nprefill {P}\n\n  decode   {D}  \n")
    assert members()[0].read(file) == {P: "prefill", D: "decode"}
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="workers_file"):
        members()[0].read(file)
    with pytest.raises(ConfigError, match="No such file"):
        members()[0].read(tmp_path / "none")


def test_a_name_must_mean_one_worker() -> None:
    it, record = members(P)
    assert it.find(P) == P
    assert it.find("same") == P
    record.here[D] = "decode"
    for name in ("same", "other"):
        with pytest.raises(ConfigError, match=f"worker = {name!r}: (2|no) workers"):
            it.find(name)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"\ufeff{TOKEN}\n")
    file.chmod(0o600)
    return file


def test_a_token_is_one_word_that_others_cannot_read(token: Path) -> None:
    assert read_token(token) == TOKEN.encode()
    for text, error in (("short", "16 to 512"), ("two words are not one", "one word"), ("ü" * 20, "ASCII")):
        token.write_text(text)
        with pytest.raises(ConfigError, match=error):
            read_token(token)
    token.write_text(TOKEN)
    token.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640"):
        read_token(token)


@pytest.mark.parametrize(
    "given", [{"admin": "127.0.0.1:1"}, {"admin_token": Path("x")}, {"admin": "0.0.0.0:1", "admin_token": Path("x")}]
)
def test_the_admin_api_takes_an_address_and_a_token_and_stays_on_this_host(given: dict) -> None:
    with pytest.raises(ConfigError, match="admin"):
        RouterConfig(**given)


def rewrite(file: Path, text: str, mode: int) -> None:
    file.write_text(text)
    file.chmod(mode)


@asynccontextmanager
async def administered(token: Path, **more) -> AsyncIterator[tuple[Site, str]]:
    """A router with its admin API, and that one's URL."""
    async with site() as it:
        prefill, decode = it.backend.roles()
        config = RouterConfig(prefill=(prefill,), decode=(decode,), admin="127.0.0.1:0", admin_token=token, **more)
        changes = FleetChanges(config, it.backend)
        try:
            yield it, "http://" + await changes.open()
        finally:
            await changes.close()


async def test_without_its_token_the_admin_api_does_nothing(token: Path) -> None:
    async with administered(token) as (it, url):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer "}):
            async with it.http.post(url + "/workers/remove", json={"worker": "d0"}, headers=headers) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await it.get("/workers"))[0] == 404, "clients do not see it"
        assert len(it.backend.roles()) == 2
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        async with it.http.get(url + "/workers", headers=bearer) as answer:
            assert answer.status == 200
        rewrite(token, "another-token-of-the-router", 0o600)
        async with it.http.get(url + "/workers", headers=bearer) as answer:
            assert answer.status == 401
        rewrite(token, TOKEN, 0o644)
        async with it.http.get(url + "/workers", headers=bearer) as answer:
            assert answer.status == 503


async def test_the_admin_token_is_compared_as_a_whole(token: Path) -> None:
    """Each beginning of it, each byte changed, and what goes on after it."""
    parts = [TOKEN[:count] for count in range(len(TOKEN))]
    changed = [TOKEN[:index] + chr(ord(TOKEN[index]) ^ 1) + TOKEN[index + 1 :] for index in range(len(TOKEN))]
    others = [f"Bearer {each}" for each in (*parts, *changed, TOKEN + "x", TOKEN + " x", TOKEN * 2)]
    headers = [*others, "bearer " + TOKEN, "", *("Bearer"[:count] for count in range(7))]
    async with administered(token) as (it, url):
        for header in headers:
            async with it.http.get(url + "/workers", headers={"Authorization": header}) as answer:
                assert answer.status == 401, header
        async with it.http.get(url + "/workers", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert answer.status == 200


async def test_a_wrong_change_is_refused_with_its_field(token: Path) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    async with administered(token) as (it, url):
        for path, body, error in (
            ("", {"worker": D}, "role: missing"),
            ("", {"worker": D, "role": "both"}, "$.role"),
            ("", {"worker": "tcp://192.0.2.1:1", "role": "decode"}, "on another host"),
            ("", {"worker": [*it.backend.roles()][1], "role": "prefill"}, "is already a decode worker of this router"),
            ("/drain", {"worker": "nobody"}, "no workers"),
            ("/remove", {"worker": 7}, "$.worker"),
            ("/remove", {"worker": "d0", "force": True}, "force"),
        ):
            async with it.http.post(url + "/workers" + path, json=body, headers=bearer) as answer:
                assert answer.status == 400
                assert error in (await answer.json())["error"]
        assert len(it.backend.roles()) == 2


async def test_the_commands_list_add_drain_and_remove(token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = Worker("d1", "decode")
    endpoint = await new.open()

    async with administered(token) as (it, url):

        async def command(*words: str) -> tuple[int, list[WorkerStatus]]:
            status = await asyncio.to_thread(
                main, ["workers", *words, "--admin", url, "--admin-token", str(token), "--json"]
            )
            out = capsys.readouterr().out
            return status, msgspec.convert(msgspec.json.decode(out)["workers"], list[WorkerStatus]) if out else []

        pool = it.backend.routing.workers.by_peer
        status, listed = await command("list")
        assert (status, [each.node for each in listed]) == (0, ["p0", "d0"])
        it.decode[0].gate.clear()
        answer = asyncio.create_task(it.post(prompt="abc", max_tokens=4))
        await until(lambda: it.decode[0].begun)
        assert (await command("add", "decode", endpoint))[0] == 0
        await until(lambda: pool[endpoint].usable)
        status, listed = await command("drain", "d0")
        assert [(each.node, each.state) for each in listed][1:] == [("d0", "draining"), ("d1", "ready")]
        status, listed = await command("remove", "d0")
        assert [(each.node, each.leaves) for each in listed][1:] == [("d0", True), ("d1", False)]
        it.decode[0].gate.set()
        assert (await answer)[0] == 200, "its room ended as asked"
        await until(lambda: len(pool) == 2)
        assert (await it.post(prompt="abc", max_tokens=4))[0] == 200
        assert new.begun
        assert [each.node for each in (await command("remove", "d1", "--wait"))[1]] == ["p0"]
        assert (await command("drain", "d1"))[0] == 2
        await new.close()


async def test_a_file_is_followed_after_an_error_of_ours_and_a_wrong_line_is_tried_again(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, new = tmp_path / "workers", Worker("d1", "decode")
    endpoint = await new.open()
    file.write_text("")
    monkeypatch.setattr(fleet_changes, "LOOK_S", 0.01)
    monkeypatch.setattr(fleet_changes, "RETRY_S", 0.01)
    failing, taken = True, Daemons.add_worker

    def add(router: Daemons, role: Role, address: str) -> None:
        if failing:
            raise RuntimeError("a bug")
        taken(router, role, address)

    monkeypatch.setattr(Daemons, "add_worker", add)
    async with administered(token, workers_file=file) as (it, _):
        file.write_text(f"decode {endpoint}\n")
        await until(lambda: "RuntimeError: a bug" in caplog.text)
        failing = False
        await until(lambda: endpoint in it.backend.roles())
        assert caplog.text.count("the workers are unchanged") == 1
    await new.close()


async def test_a_file_is_followed_and_a_wrong_one_changes_nothing(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, new = tmp_path / "workers", Worker("d1", "decode")
    endpoint = await new.open()
    file.write_text("")
    async with administered(token, workers_file=file) as (it, _):
        roles = it.backend.roles
        file.write_text(f"decode {endpoint}\n")
        await until(lambda: endpoint in roles())
        file.write_text("what?")
        await until(lambda: "the workers are unchanged" in caplog.text)
        assert endpoint in roles()
        moved = tmp_path / "moved"
        moved.write_text("# none\n")
        moved.rename(file)
        await until(lambda: endpoint not in roles())
        assert len(roles()) == 2
        assert LOOK_S <= 1.0
    await new.close()


async def test_a_router_dials_more_workers_than_a_worker_has_peers() -> None:
    missing = tuple(f"tcp://127.0.0.1:{port}" for port in range(1, 301))
    router = router_of(RouterConfig(listen="127.0.0.1:0", prefill=missing[:1], decode=missing[1:]))
    try:
        await router.open()
        assert len(router.backend.routing.workers.by_peer) == len(missing) > BusLimits().dials_max
    finally:
        await router.close()
