"""Key files, allow-lists, endpoints and exposure: what is accepted, and the text of each refusal."""

from __future__ import annotations

import itertools
import os
import socket
import stat
from pathlib import Path

import pytest
import zmq

from pdtransfer.bus.keys import (
    Address,
    AllowList,
    Endpoint,
    KeyPair,
    check_exposure,
    generate,
    generate_pair,
    is_loopback,
)
from pdtransfer.errors import ConfigError

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
OTHER = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


def test_generated_keys_are_a_working_curve_pair_that_only_the_owner_can_read(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        line = generate(tmp_path / "decode-0")
    finally:
        os.umask(old)
    pair = KeyPair.read(tmp_path / "decode-0.key")
    assert stat.S_IMODE((tmp_path / "decode-0.key").stat().st_mode) == 0o600
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    assert (tmp_path / "decode-0.pub").read_text() == line + "\n"
    assert AllowList.read(tmp_path / "decode-0.pub").names[pair.public] == "decode-0"
    assert pair.secret not in repr(pair)
    assert pair.secret not in (tmp_path / "decode-0.pub").read_text()


@pytest.mark.parametrize("first", ["-", "#"])
def test_no_generated_key_looks_like_a_flag(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([(f"{first}{KEY[1:]}".encode(), OTHER.encode()), (KEY.encode(), OTHER.encode())])
    monkeypatch.setattr(zmq, "curve_keypair", lambda: next(drawn))
    assert generate_pair().public == KEY


def test_two_generated_pairs_differ(tmp_path: Path) -> None:
    assert generate(tmp_path / "a").split()[1] != generate(tmp_path / "b").split()[1]


@pytest.mark.parametrize("existing", ["n.key", "n.pub"])
def test_generate_overwrites_nothing_and_leaves_no_partial_pair(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        generate(tmp_path / "n")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "mine"


def test_generate_refuses_a_name_that_an_allow_list_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name"):
        generate(tmp_path / "two words")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    generate(tmp_path / "n")
    (tmp_path / "n.key").chmod(mode)
    with pytest.raises(ConfigError, match=rf"n\.key: mode {mode:o}.*chmod 600"):
        KeyPair.read(tmp_path / "n.key")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "public: line missing"),
        (f"public {KEY}\n", "secret: line missing"),
        (f"public {KEY}\npublic {KEY}\n", "n.key:2"),
        (f"public {KEY}\nsecret {KEY[:-1]}\n", "n.key:2: secret: 39 characters"),
        (f"public {KEY}\nsecret {KEY[:-1]}~\n", "n.key:2: secret: .* is not Z85"),
        (f"public {KEY}\nsecret {'#' * 40}\n", "n.key:2: secret: .* is not Z85"),  # a group over 32 bits
        (f"public {KEY}\nsecret {KEY} more\n", "n.key:2"),
        (f"public {KEY}\nsecret {OTHER}\n", "public: not the public key of this secret"),
        (f"name {KEY}\n", "n.key:1"),
    ],
)
def test_a_malformed_key_file_is_refused_by_line_and_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "n.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=named):
        KeyPair.read(path)


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyPair.read(tmp_path / "absent.key")
    with pytest.raises(ConfigError, match="directory"):
        AllowList.read(tmp_path)
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbf# fine\n\xff\xfe")
    with pytest.raises(ConfigError, match="list:2: not UTF-8"):
        AllowList.read(tmp_path / "list")


def test_a_world_writable_allow_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(f"a {KEY}\n")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        AllowList.read(path)


def test_an_allow_list_takes_comments_blank_lines_and_keys_with_hashes() -> None:
    keys = (zmq.curve_keypair()[0].decode() for _ in itertools.count())
    hashed = next(key for key in keys if "#" in key)
    text = f"# peers\n\n  prefill-0   {KEY}   # rack 3, # twice\nrouter.a\t{OTHER}\ndecode {hashed} #\n"
    allowed = AllowList.parse(text, source="list")
    assert dict(allowed.names) == {KEY: "prefill-0", OTHER: "router.a", hashed: "decode"}


def test_an_allow_list_may_limit_a_peers_roles() -> None:
    text = f"a {KEY} prefill # rack 3\nb {OTHER} decode,router\n"
    allowed = AllowList.parse(text, source="list")
    roles = ("prefill", "decode", "router")
    assert [not allowed.why_not(KEY, role) for role in roles] == [True, False, False]
    assert [not allowed.why_not(OTHER, role) for role in roles] == [False, True, True]
    assert allowed.why_not(OTHER, "prefill") == "the allow-list lets b be decode, router, not prefill"
    allow_list = AllowList.parse(f"a {KEY}", source="list")
    assert not any(allow_list.why_not(KEY, role) for role in roles)
    assert all(allow_list.why_not(OTHER, role) == "not on the allow-list" for role in roles)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("prefill", "list:2: key: missing"),
        (f"prefill {KEY[1:]}", "list:2: key: 39 characters, a Z85 key has 40"),
        (f"prefill {KEY}0", "list:2: key: 41 characters"),
        (f"prefill {KEY[:-1]}é", "list:2: key: .* is not Z85"),
        (f"pre/fill {KEY}", "list:2: name: 'pre/fill'"),
        (f"{'n' * 129} {KEY}", "list:2: name"),
        (f"prefill {KEY} rack 3", "list:2: role: 'rack' must be one of decode, prefill, router, or begin a # comment"),
        (f"prefill {KEY} prefill rack", "list:2: comment: 'rack' does not start with #"),
        (f"prefill {KEY} prefill, router", "list:2: role: '' must be one of"),
        (f"prefill {KEY} Prefill", "list:2: role: 'Prefill' must be one of"),
        (f"prefill {OTHER}", "list:2: key: also listed for 'first' in line 1"),
        (f"first {KEY}", "list:2: name: 'first' is already in line 1"),
    ],
)
def test_a_malformed_allow_list_is_refused_by_line_and_field(line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        AllowList.parse(f"first {OTHER}\n{line}\n", source="list")


def test_endpoints_parse_with_and_without_a_key() -> None:
    assert Endpoint.parse("tcp://10.0.0.7:9000") == Endpoint("tcp://10.0.0.7:9000", None)
    assert Endpoint.parse(f"{KEY}@tcp://[fe80::1%eth0]:9000") == Endpoint("tcp://[fe80::1%eth0]:9000", KEY)
    assert Endpoint.parse(f"{KEY}@tcp://prefill-0.kv:9000") == Endpoint("tcp://prefill-0.kv:9000", KEY)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is not tcp"),
        ("tcp://host", "is not tcp"),
        ("ipc:///tmp/socket", "is not tcp"),
        ("tcp://host:0", "port"),
        ("tcp://host:65536", "port: 65536 is not within"),
        ("tcp://host:1-2", "port"),
        ("tcp://host:9000/", "is not tcp"),
        ("tcp://ho st:9000", "is not tcp"),
        ("tcp://host;tcp://other:9000", "is not tcp"),
        ("tcp://::1:9000", "is not tcp"),
        ("tcp://*:9000", "bound, but not dialled"),
        ("tcp://0.0.0.0:9000", "bound, but not dialled"),
        ("tcp://[::]:9000", "bound, but not dialled"),
        (f"{KEY[1:]}@tcp://host:9000", "is not tcp"),
        (f"{KEY}0@tcp://host:9000", "is not tcp"),
        (f"{KEY[:-1]}~@tcp://host:9000", "key: .* is not Z85"),
        ("tcp://" + "h" * 246 + ":9000", "is not tcp"),
    ],
)
def test_a_malformed_endpoint_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Endpoint.parse(text)


def test_a_bind_may_name_any_port_or_a_range() -> None:
    assert Address.parse("tcp://*:0") == Address("*", 0, 0)
    assert Address.parse("tcp://[::1]:9000-65535") == Address("::1", 9000, 65_535)
    for wrong in ("tcp://*:9010-9000", "tcp://*:0-1", "tcp://*:9000-70000"):
        with pytest.raises(ConfigError, match="port"):
            Address.parse(wrong)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.1:1", True),
        ("tcp://127.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://localhost:0", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://[::ffff:10.0.0.1]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://[fe80::1]:1", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_a_name_is_loopback_only_if_every_address_is(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"both": ["127.0.0.1", "10.0.0.1"], "local": ["127.0.0.1", "::1"]}

    def answer(host: str, *_: object, **__: object) -> list[tuple[object, object, object, str, tuple[str, int]]]:
        if host not in answers:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in answers[host]]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert is_loopback("tcp://local:1")
    assert not is_loopback("tcp://both:1")
    with pytest.raises(ConfigError, match="absent does not resolve"):
        is_loopback("tcp://absent:1")


def test_other_hosts_are_admitted_only_with_keys_or_insecure() -> None:
    with pytest.raises(ConfigError, match=r"bind tcp://0\.0\.0\.0:9000: .*keygen.*insecure"):
        check_exposure("tcp://0.0.0.0:9000", named="bind tcp://0.0.0.0:9000", keyed=False, insecure=False)
    check_exposure("tcp://0.0.0.0:9000", named="bind tcp://0.0.0.0:9000", keyed=True, insecure=False)
    check_exposure("tcp://0.0.0.0:9000", named="bind tcp://0.0.0.0:9000", keyed=False, insecure=True)
    check_exposure("tcp://127.0.0.1:9000", named="bind tcp://127.0.0.1:9000", keyed=False, insecure=False)
