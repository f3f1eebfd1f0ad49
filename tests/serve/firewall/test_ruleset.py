"""The text of the rules, and what an operator may admit."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from pdtransfer.errors import ConfigError
from pdtransfer.serve.firewall.ruleset import (
    ADMIT_MAX,
    Admitted,
    admit_networks,
    change_text,
    host_of,
    removal_text,
    table_text,
)
from pdtransfer.serve.firewall.table import table_name


def test_the_table_closes_its_own_ports_alone_and_ends_with_its_process() -> None:
    text = table_text("t")
    assert text.startswith("table inet t {\n  flags owner\n")
    assert "policy accept" in text, "other ports of the host are not its business"
    verdicts = [line.strip() for line in text.splitlines() if "tcp dport" in line]
    assert verdicts == [
        "ip saddr . tcp dport @peers accept",
        "ip6 saddr . tcp dport @peers6 accept",
        'iifname "lo" tcp dport vmap @own',
        "tcp dport @ports add @strangers { ip saddr }",
        "tcp dport @ports add @strangers6 { ip6 saddr }",
        "tcp dport @ports counter reject with tcp reset",
    ]


def test_networks_of_an_operator_are_admitted_before_strangers_are_refused() -> None:
    text = table_text("t", admit_networks("firewall_admit", ("10.9.0.0/24", "fd00::/8", "10.1.2.3")))
    rules = [line.strip() for line in text.splitlines() if "@ports" in line]
    assert rules[:3] == [
        "ip saddr 10.9.0.0/24 tcp dport @ports accept",
        "ip6 saddr fd00::/8 tcp dport @ports accept",
        "ip saddr 10.1.2.3/32 tcp dport @ports accept",
    ]
    assert rules[-1].endswith("reject with tcp reset")


def test_a_change_takes_away_and_gives_in_one_transaction() -> None:
    four, six = (Admitted(ip_address(host), (7, 8)) for host in ("10.0.0.1", "fd00::1"))
    assert change_text("t", begun=four) == (
        "add element inet t peers { 10.0.0.1 . 7, 10.0.0.1 . 8 }\nadd element inet t ports { 7, 8 }\n"
    )
    assert change_text("t", ended=four, begun=six) == (
        "delete element inet t peers { 10.0.0.1 . 7, 10.0.0.1 . 8 }\ndelete element inet t ports { 7, 8 }\n"
        "add element inet t peers6 { fd00::1 . 7, fd00::1 . 8 }\nadd element inet t ports { 7, 8 }\n"
    )
    assert change_text("t", begun=Admitted(ip_address("10.0.0.1"), ())) == ""
    assert removal_text("t") == "delete table inet t\n"


@pytest.mark.parametrize(
    ("address", "host"),
    [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1"), ("fd00::1", "fd00::1")],
)
def test_an_address_is_written_as_packets_have_it(address: str, host: str) -> None:
    assert str(host_of(address)) == host


def test_what_is_no_address_reaches_no_rule() -> None:
    with pytest.raises(ValueError, match="does not appear"):
        host_of("10.0.0.1 }; flush ruleset")
    assert table_name("a b;{}").startswith("pdtransfer-a-b----")


def test_a_network_that_is_none_is_named_with_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"firewall_admit = '10.0.0.1/24': must be an address or a network"):
        admit_networks("firewall_admit", ("10.0.0.1/24",))
    with pytest.raises(ConfigError, match=r"firewall_admit: 65 networks, the limit is 64"):
        admit_networks("firewall_admit", ("10.0.0.1",) * (ADMIT_MAX + 1))
