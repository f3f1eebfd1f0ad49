"""API keys and TLS of the router's HTTP side: who is let through, how much at once, and what is read again."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import re
import signal
import ssl
import subprocess
import tempfile
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from pdtransfer.errors import ConfigError
from pdtransfer.limits import API_KEYS_MAX
from pdtransfer.serve.process.http import Health, HttpListener, application, requests_log
from pdtransfer.serve.process.request_lines import fields_of
from pdtransfer.serve.process.signals import reload_on_hangup
from pdtransfer.serve.process.tls import ServerTls
from pdtransfer.serve.router.front.api_keys import ApiKey, ApiKeys
from pdtransfer.serve.router.front.json_bodies import RefusedRequestError
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.tracing.ended_request import EndedRequests
from tests.serve.router.client_keys import A, B, C, bearer, written
from tests.support.waiting import until


def basic(credentials: str) -> str:
    return "Basic " + base64.b64encode(credentials.encode()).decode()


def keys_of(text: str) -> ApiKeys:
    keys = ApiKeys()
    keys.replace(text, source="keys")
    return keys


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return certificate(tmp_path, "one")


EC, RSA = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"), ("rsa:2048",)


def certificate(directory: Path, name: str, of: tuple[str, ...] = EC) -> tuple[Path, Path]:
    cert, key = directory / f"{name}.crt", directory / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", *of, "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "keys: no key: a line is"),
        (f"{A}\nshort", "keys:2: key: must be 16 to 256 printable"),
        (f"{A}\u00e9", "keys:1: key: must be"),
        ("x" * 257, "keys:1: key: must be"),
        (f"{A} two words", "keys:1: word 3: a line is"),
        (f"{A} na/me", "keys:1: name: 'na/me' is not letters"),
        (f"{A} a open=0", "keys:1: open: '0' is not a number from 1"),
        (f"{A} a open=1e3", "keys:1: open: '1e3' is not a number"),
        (f"{A} rate=-1", "keys:1: rate: '-1' is not a number"),
        (f"{A} rate=nan", "keys:1: rate: 'nan' is not a number"),
        (f"{A} burst=3", "keys:1: word 2: a line is"),
        (f"{A} a\n\n{B} a", "keys:3: name: 'a' is already in line 1"),
        (f"{A} a\n# {B}\n{A} b", "keys:3: key: the same as in line 1"),
        pytest.param("\n".join(f"{n:016}" for n in range(API_KEYS_MAX + 1)), "keys:4097: more than 4096", id="many"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_its_key_is_not_shown(text: str, error: str) -> None:
    keys = keys_of(f"{C} before")
    with pytest.raises(ConfigError) as raised:
        keys.replace(text, source="keys")
    assert str(raised.value).startswith(error)
    assert A not in str(raised.value)
    assert keys.find(f"Bearer {C}") is not None, "nothing has changed"


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", A)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod o-rwx"):
        ApiKeys().read(path)


def test_only_a_known_key_is_found() -> None:
    keys = keys_of(f"# tenants\n{A} a open=3 rate=2.5 # the first\n{B}")
    found = keys.find(f"Bearer {A}")
    assert found is not None
    assert (found.name, found.open_max, found.rate) == ("a", 3, 2.5)
    assert (unnamed := keys.find(f"bearer  {B}")) is not None
    assert unnamed.name == "line-3"
    assert keys.find(basic(f"anybody:{A}")) is found, "as a browser asks for the status page"
    wrong = [
        basic(A), basic(f"x:{A}y"), "Basic %", basic("x" * 900), basic("\u00e9:"), None, "", A, f"Basic {A}",
        f"Bearer {A}x", f"Bearer {A[:-1]}", "Bearer " + "x" * 9_000, "Bearer \u00e9",
    ]  # fmt: skip
    assert [keys.find(each) for each in wrong] == [None] * len(wrong)
    assert A not in repr(found), "no secret in a repr"


def test_a_key_has_its_limits_and_keeps_its_use_when_the_file_is_read_again() -> None:
    keys = keys_of(f"{A} a open=1")
    key = keys.find(f"Bearer {A}")
    assert key is not None
    with key.use(0.0):
        with pytest.raises(RefusedRequestError, match="1 answers of this API key are open, and 1 more"), key.use(0.0):
            pass
        keys.replace(f"{A} a open=2", source="keys")
        again = keys.find(f"Bearer {A}")
        assert again is not None
        with again.use(0.0):
            assert again.open_count == 2
    assert again.open_count == 0


def used(key: ApiKey, now: float, times: int) -> int:
    """How many of this many requests at once the key's limits let through."""
    passed = 0
    for _ in range(times):
        try:
            with key.use(now):
                passed += 1
        except RefusedRequestError:
            pass
    return passed


def test_however_long_a_key_was_idle_a_second_of_requests_comes_at_once() -> None:
    for rate, burst in (("4", 4), ("0.5", 1)):
        key = keys_of(f"{A} rate={rate}").find(f"Bearer {A}")
        assert key is not None
        for now in (10.0, 3_600.0, 1e7):
            assert used(key, now, 20) == burst, (rate, now)


def test_a_clock_that_goes_back_takes_no_request_away() -> None:
    key = keys_of(f"{A} rate=4").find(f"Bearer {A}")
    assert key is not None
    assert (used(key, 100.0, 2), used(key, 40.0, 5)) == (2, 2)


def test_more_answers_than_a_key_may_ever_have_open_are_not_to_be_asked_for_again() -> None:
    key = keys_of(f"{A} open=2").find(f"Bearer {A}")
    assert key is not None
    with key.use(1.0) as use, pytest.raises(RefusedRequestError, match="this API key takes at most 2") as refused:
        use.widen(3, 1.0)
    assert (refused.value.status, refused.value.param) == (400, "n")
    with key.use(1.0), key.use(1.0) as use, pytest.raises(RefusedRequestError) as refused:
        use.widen(2, 1.0)
    assert (refused.value.status, key.open_count) == (429, 0)


def test_a_request_that_raises_is_not_open_any_more() -> None:
    key = keys_of(f"{A} open=1").find(f"Bearer {A}")
    assert key is not None
    with pytest.raises(OSError, match="the client left"), key.use(1.0):
        raise OSError("the client left")
    assert used(key, 1.0, 3) == 3


@pytest.mark.parametrize("engine", ["pdtransfer", "vllm", "sglang"])
async def test_a_router_of_any_engine_lets_only_known_keys_through_over_tls(
    engine: str, tmp_path: Path, pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "keys", f"{A} a\n{B} b rate=1\n")
    config = RouterConfig(
        listen="127.0.0.1:0", node="r", engine=engine, api_keys=path, tls_cert=pair[0], tls_key=pair[1]
    )
    names = list[str]()
    ended = EndedRequests()
    ended.subscribe(lambda record: names.append(fields_of(record)["key_name"]))
    trusted = ssl.create_default_context(cafile=str(pair[0]))
    with caplog.at_level(logging.INFO):
        router = router_of(config, ended)
        address = await router.open()
        try:
            connector = aiohttp.TCPConnector(ssl=trusted)
            async with aiohttp.ClientSession(f"https://{address}", connector=connector) as http:
                for public in ("/health", "/live", "/metrics"):
                    assert (await http.get(public)).status in (200, 503)
                for headers in ({}, bearer(C), bearer("x" * 300)):
                    for _ in range(5):
                        refused = await http.post("/v1/completions", data=b"{}", headers=headers)
                        assert refused.status == 401
                        assert refused.headers["WWW-Authenticate"].startswith("Bearer, Basic ")
                        assert (await refused.json())["error"]["code"] == "invalid_api_key"
                assert (await http.get("/nothing/here")).status == 401
                assert (await http.post("/v1/completions", data=b"{", headers=bearer(A))).status in (400, 503)
                assert (await http.get("/nothing/here", headers=bearer(B))).status == 404
                limited = await http.get("/nothing/here", headers=bearer(B))
                assert (limited.status, (await limited.json())["error"]["code"]) == (429, "rate_limit_exceeded")
                metrics = await (await http.get("/metrics")).text()
                assert re.search(r'^pdtransfer_requests_total\{.*status="401".*\} 16\.0$', metrics, re.MULTILINE)
                reload_on_hangup(*router.reloads)
                written(path, f"{C} c\n")
                os.kill(os.getpid(), signal.SIGHUP)

                async def revoked() -> bool:
                    return (await http.get("/nothing/here", headers=bearer(A))).status == 401

                await until(revoked)
                assert (await http.get("/nothing/here", headers=bearer(C))).status == 404
        finally:
            await router.close()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    lines = [record.getMessage() for record in caplog.records]
    assert not [line for line in lines for key in (A, B, C) if key in line], "keys are never logged"
    assert names == ["a"]
    assert len([line for line in lines if "other refusals not logged" in line]) <= 5


async def test_an_oversized_header_is_refused_and_shows_in_no_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = RouterConfig(listen="127.0.0.1:0", node="r", api_keys=written(tmp_path / "keys", A))
    with caplog.at_level(logging.INFO):
        router = router_of(config)
        host, _, port = (await router.open()).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer " + A.encode() + b"x" * 9_000 + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        await router.close()
    assert [record.getMessage() for record in caplog.records if record.name == requests_log.name]
    assert A not in caplog.text


async def test_a_new_certificate_is_served_once_it_is_read_and_a_wrong_one_never() -> None:
    with tempfile.TemporaryDirectory() as name:
        (cert, key), (other_cert, other_key) = (certificate(Path(name), each) for each in ("one", "two"))
        tls = ServerTls(cert, key)
        server = await asyncio.start_server(lambda _, w: w.close(), "127.0.0.1", 0, ssl=tls.context)
        port = server.sockets[0].getsockname()[1]

        async def served() -> bytes:
            return (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))).encode()

        first = await served()
        assert first == cert.read_bytes()
        cert.write_bytes(other_cert.read_bytes())
        with pytest.raises(ConfigError, match="key values mismatch"):
            tls.read()
        assert await served() == first
        key.write_bytes(other_key.read_bytes())
        tls.read()
        assert await served() == other_cert.read_bytes()
        cert, key = certificate(Path(name), "one", RSA)
        tls.read()
        assert await served() == cert.read_bytes(), "not the one before, whose key is of a type that clients prefer"
        server.close()


async def test_handshakes_that_never_end_are_bounded_and_keep_no_client_out() -> None:
    with tempfile.TemporaryDirectory() as name:
        cert, key = certificate(Path(name), "one")
        listener = HttpListener(application(lambda: Health(True, {}), CollectorRegistry()), connections_max=4)
        address = await listener.open("127.0.0.1:0", ServerTls(cert, key))
        host, _, port = address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        for reader, _ in silent[:8]:
            assert await reader.read() == b"", "the oldest are closed"
        assert not any(reader.at_eof() for reader, _ in silent[8:])
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(cert)))
        async with aiohttp.ClientSession(connector=connector) as http:
            assert (await http.get(f"https://{address}/live")).status == 200
        for _, writer in silent:
            writer.close()
        await listener.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("mode", "tls_key: .*: mode 644: others may read or change it"),
        ("missing", "tls_cert = .*: No such file"),
        ("junk", "tls_cert = .*: no certificate with its key|tls_cert = .*: no start line|pem"),
        ("encrypted", "tls_cert = "),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(pair: tuple[Path, Path], change: str, text: str) -> None:
    cert, key = pair
    if change == "mode":
        key.chmod(0o644)
    elif change == "missing":
        cert.unlink()
    elif change == "junk":
        cert.write_text("nonsense")
    else:
        subprocess.run(
            ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", str(key), "-out", str(key)],
            check=True, capture_output=True,
        )  # fmt: skip
        key.chmod(0o600)
    with pytest.raises(ConfigError, match=text):
        ServerTls(cert, key)


def test_a_certificate_without_its_key_is_a_misuse() -> None:
    with pytest.raises(ConfigError, match="tls_cert = 'c': needs tls_key as well"):
        RouterConfig(tls_cert=Path("c"))
