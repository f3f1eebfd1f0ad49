"""What a page of another site can make a browser send: nothing of it generates, and nothing is read by another name."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdtransfer.errors import ConfigError
from pdtransfer.serve.process.http import Health, HttpListener, application
from pdtransfer.serve.router.fleet.admin import AdminApi
from pdtransfer.serve.router.fleet.membership import Membership
from pdtransfer.serve.settings.router import RouterConfig
from tests.serve.router.client_keys import A, bearer, written
from tests.serve.router.router_site import Site
from tests.support.vllm_servers import ServerSite, server_site

PATH = "/v1/completions"
BODY = b'{"prompt": "abc", "max_tokens": 2, "x": "="}'
FORMS = ["text/plain", "text/plain;charset=UTF-8", "Text/Plain", "multipart/form-data; boundary=x"]
SAFE_LISTED = [*FORMS, "application/x-www-form-urlencoded", ""]
STORED = "Basic " + base64.b64encode(f"me:{A}".encode()).decode()


async def fetch(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """Sends these headers and no others; returns the answer."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    headers = {"Host": f"127.0.0.1:{port}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in headers.items() if value]
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "Connection: close", f"Content-Length: {len(body)}"])
    writer.write(f"{head}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.given(keys="")
async def test_a_page_of_another_site_makes_nothing_generate(either: Site | ServerSite) -> None:
    evidence = [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://evil.example", "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"},
        {"Sec_Fetch_Site": "what"},
    ]
    for each in evidence:
        for kind in (*SAFE_LISTED, "application/json"):
            headers = {"Authorization": STORED, "Content_Type": kind} | each
            status, answer = await fetch(either.url, "POST", PATH, BODY, **headers)
            assert status == 403, (headers, answer)
            assert "another site" in json.loads(answer)["error"]["message"]
        assert (await fetch(either.url, "OPTIONS", PATH, Authorization=STORED, **each))[0] == 403
    for kind in FORMS:  # as old browsers send a form, without any evidence
        status, _ = await fetch(either.url, "POST", PATH, BODY, Authorization=STORED, Content_Type=kind)
        assert status == 415, kind
    assert either.at_decode == 0


async def test_other_clients_send_what_they_like_and_pages_of_this_router_json(either: Site | ServerSite) -> None:
    kinds = ["application/x-www-form-urlencoded", "", "application/json; charset=utf-8", "application/octet-stream"]
    for kind in kinds:  # the first is curl's
        assert (await fetch(either.url, "POST", PATH, BODY, Content_Type=kind))[0] == 200
    own = either.url.removeprefix("http://")
    pages = [
        {"Origin": either.url},
        {"Origin": f"https://{own}"},
        {"Origin": either.url, "Sec_Fetch_Site": "same-origin"},
    ]
    for page in pages:
        assert (await fetch(either.url, "POST", PATH, BODY, Content_Type="application/json", **page))[0] == 200
        assert (await fetch(either.url, "POST", PATH, BODY, Content_Type="text/x", **page))[0] == 415
        assert (await fetch(either.url, "POST", PATH, BODY, **page))[0] == 415
    assert either.at_decode == 7


PATHS = ["/", "/status", "/health", "/live", "/metrics", "/v1/models", "/none"]


@pytest.mark.given(allowed_hosts=("api.example", "*.inner.example"))
async def test_by_a_name_that_is_not_its_own_nothing_is_read(either: Site | ServerSite) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "inner.example", "[", "a@127.0.0.1"):
        for path in PATHS:
            status, answer = await fetch(either.url, "GET", path, Host=host, Sec_Fetch_Site="same-origin")
            assert status == 403, (host, path)
            assert b"is not a name of this server" in answer
    names = ["localhost", "LOCALHOST:1", "a.localhost", "127.0.0.1", "[::1]:80", "10.1.2.3", "api.example:443"]
    for host in (*names, "API.example.", "b.inner.example"):
        assert (await fetch(either.url, "GET", "/live", Host=host))[0] == 200, host
    cross = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"}
    assert {(await fetch(either.url, "GET", path, **cross))[0] for path in PATHS} == {403}
    link = cross | {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert (await fetch(either.url, "GET", "/", **link))[0] == 200, "a link to the status page"
    assert (await fetch(either.url, "GET", "/", **link | {"Sec_Fetch_Dest": "iframe"}))[0] == 403


async def test_two_hosts_in_one_request_must_both_be_its_own(site: Site) -> None:
    status, _ = await fetch(site.url, "GET", "/live", X="1\r\nHost: evil.example")
    assert status in (400, 403)


@pytest.mark.given(allowed_hosts=("*",))
async def test_a_listener_that_may_have_any_name_still_asks_where_a_request_comes_from(site: Site) -> None:
    assert (await fetch(site.url, "GET", "/live", Host="what.ever"))[0] == 200
    assert (await fetch(site.url, "GET", "/live", Host="what.ever", Origin="http://other"))[0] == 403


async def test_ports_of_daemons_and_of_the_admin_api_have_the_same_rules(tmp_path: Path) -> None:
    listener = HttpListener(application(lambda: Health(True, {}), CollectorRegistry()), allowed_hosts=("d0",))
    admin = AdminApi(Membership.__new__(Membership), written(tmp_path / "token", A))
    daemon, of_admin = await listener.open("127.0.0.1:0"), await admin.open("127.0.0.1:0")
    assert (await fetch(daemon, "GET", "/metrics", Host="d0:7102"))[0] == 200
    assert (await fetch(daemon, "GET", "/metrics", Host="d1"))[0] == 403
    assert (await fetch(of_admin, "GET", "/workers", Host="d0", **bearer(A)))[0] == 403
    headers = {"Origin": "http://evil.example", "Content_Type": "application/json"}
    assert (await fetch(of_admin, "POST", "/workers", b"{}", **headers, **bearer(A)))[0] == 403
    await listener.close()
    await admin.close()


@pytest.mark.parametrize("host", ["http://a", "a:80", "a b", "", "*.*", "a/b", "*a"])
def test_an_allowed_host_is_a_name(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        RouterConfig(allowed_hosts=(host,))


# Who may see what


def named(site: Site | ServerSite, health: bytes) -> int:
    return len(json.loads(health)["servers" if isinstance(site, ServerSite) else "workers"])


@pytest.mark.given(keys="")
async def test_with_keys_only_a_client_with_one_sees_names_in_health(either: Site | ServerSite) -> None:
    for headers in ({}, bearer("x" * 30), {"Authorization": STORED[:-4]}):
        assert await fetch(either.url, "GET", "/health", **headers) == (200, b'{"ready":true}')
    for headers in (bearer(A), {"Authorization": STORED}):
        assert named(either, (await fetch(either.url, "GET", "/health", **headers))[1]) == 2


async def test_without_keys_everybody_sees_names_in_health(either: Site | ServerSite) -> None:
    assert named(either, (await fetch(either.url, "GET", "/health"))[1]) == 2


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_trace_that_is_not_valid_is_not_passed_on() -> None:
    async with server_site() as it:
        for parent in (
            "x",
            TRACE[:-1],
            TRACE + "-",
            TRACE.upper(),
            "00-" + "0" * 32 + TRACE[35:],
            "ff" + TRACE[2:],
            "\xff" * 55,
        ):
            await fetch(it.url, "POST", PATH, BODY, traceparent=parent, tracestate="a=b")
            for each in (it.decode[0].seen[-1], it.prefill[0].seen[-1]):
                assert not {"traceparent", "tracestate"} & {name.lower() for name in each.headers}
        for state, passed in (("a=b", "a=b"), ("a=" + "b" * 600, None), ("a=b\u00e9", None)):
            await fetch(it.url, "POST", PATH, BODY, traceparent=TRACE, tracestate=state)
            seen = it.decode[0].seen[-1].headers
            assert (seen["traceparent"], seen.get("tracestate")) == (TRACE, passed)
