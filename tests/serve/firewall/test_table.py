"""A table at work: who reaches guarded ports, and that nothing of it outlives its process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from pdtransfer.errors import ConfigError
from pdtransfer.serve.firewall import Firewall, FirewallMode, firewall_for, table, why_no_table
from tests.serve.firewall.guarded_ports import ADMITTED, OTHER, OWN6, PEER, PEER6, STRANGER, STRANGER6
from tests.support.networks import APART, why_not_apart

TRIAL = "nft -f -"
OWNED = "table inet trial { flags owner\n chain input { type filter hook input priority filter; }\n }\n"
ALL = [PEER, OTHER, STRANGER, ADMITTED, "127.0.0.1", PEER6, STRANGER6]


def test_guarded_ports_admit_their_peer_alone_for_as_long_as_they_are_guarded() -> None:
    """And a host its own ports only while engines that dial themselves start."""
    if why := why_not_apart(TRIAL, "nft", text=OWNED):
        pytest.skip(why)
    command = [*APART, sys.executable, "-m", "tests.serve.firewall.guarded_ports"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert OWN6 not in ALL
    assert seen["own port"] == [PEER, ADMITTED]
    assert seen["of IPv6"] == [ADMITTED, PEER6]
    assert seen["of mapped"] == [OTHER, ADMITTED]
    assert seen["nobody's"] == ALL, "another process's ports are not closed"
    assert seen["refused"] == sorted(each for each in ALL if each != ADMITTED), "each was a stranger to one port"
    assert seen["report"] == sorted([PEER, OTHER, PEER6])
    assert seen["moved"] == [OTHER, ADMITTED]
    assert seen["old connection"] == "TimeoutError", "connections of before are cut as well"
    assert seen["no session"] == ["the session has ended meanwhile"] * 2
    assert "key:unknown has no connection" in seen["no address"]
    assert seen["starting"] == ALL, "all are this host"
    assert seen["started"] == [OTHER, ADMITTED]
    assert seen["after a flush"] == [ADMITTED, PEER6], "only its own process changes the table"
    assert seen["tables"] == ["pdtransfer-another", "pdtransfer-d.0_1"]
    assert not seen["after SIGTERM"], "the ports are guarded while the daemon drains"
    assert seen["ended"] == ["key:mapped", "key:six"], "engines end that nothing guards any more"
    assert seen["tables without its process"] == ["pdtransfer-another"]
    assert seen["again"] == [OTHER, ADMITTED]
    assert seen["closed"] == []


def test_on_refuses_to_start_where_auto_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(mode: FirewallMode, needless: str = "") -> tuple[Firewall | None, str]:
        return asyncio.run(firewall_for(mode, node="d", needless=needless))

    assert made("off") == (None, "--firewall off")
    assert made("auto", "it opens no port") == (None, "it opens no port")

    def no_process(*_: object) -> None:
        raise table.TransportError("no process for the firewall: Too many open files")

    monkeypatch.setattr(table, "Keeper", no_process)
    assert made("auto") == (None, "no process for the firewall: Too many open files")
    with pytest.raises(ConfigError, match=r"firewall = 'on': no process for the firewall: Too many open files"):
        made("on", "it opens no port")
    assert why_no_table() == "no process for the firewall: Too many open files"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("libnftables.so.1: cannot open shared object file", "apt-get install -y libnftables1"),
        ("Error: Could not process rule: Operation not permitted\ntable inet x", "CAP_NET_ADMIN"),
        ("Error: Could not process rule: Not supported\ntable", "Could not process rule: Not supported"),
        ("", "no reason given"),
    ],
)
def test_a_reason_is_one_line_with_what_mends_it(text: str, reason: str) -> None:
    found = table.reason_of(text)
    assert reason in found
    assert "\n" not in found


def test_a_process_without_the_capability_gets_the_name_of_the_one_it_lacks() -> None:
    dropped = "import sys; from pdtransfer.serve.firewall import why_no_table; print(why_no_table())"
    command = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", sys.executable, "-c", dropped]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("setpriv not installed")
    if ran.returncode:
        pytest.skip(f"capabilities cannot be dropped here: {ran.stderr.strip()}")
    if "libnftables" in ran.stdout:
        pytest.skip(ran.stdout.strip())
    assert "CAP_NET_ADMIN" in ran.stdout
