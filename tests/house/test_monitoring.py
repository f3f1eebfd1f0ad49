"""The alert rules, the dashboard and Prometheus's configurations: they are valid, and name what there is.

Debian's package `prometheus` has promtool. Where it is missing, what needs it is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPO

DEPLOY = REPO / "deploy"
MONITORING = DEPLOY / "monitoring"
ALERTS = MONITORING / "alerts.yml"
OF_PROMETHEUS = {"up", "ALERTS"}
MINUTES = 120
FLAT, GROWS = f"5+0x{MINUTES}", f"0+60x{MINUTES}"
WORKER, ROUTER = 'job="pdtransfer", instance="d0"', 'job="pdtransfer", instance="r"'
# Nothing of this is worth an alert.
HEALTHY = {
    f"up{{{WORKER}}}": f"1+0x{MINUTES}",
    f'pdtransfer_worker_usable{{{ROUTER}, role="decode", peer="a"}}': f"0+0x{MINUTES}",
    f'pdtransfer_worker_usable{{{ROUTER}, role="decode", peer="b"}}': f"1+0x{MINUTES}",
    f'pdtransfer_requests_total{{{ROUTER}, status="200"}}': f"0+6000x{MINUTES}",
    f'pdtransfer_requests_total{{{ROUTER}, status="503"}}': GROWS,
    f'pdtransfer_requests_total{{{ROUTER}, status="429"}}': GROWS,
    f'pdtransfer_first_token_seconds_bucket{{{ROUTER}, model="m", le="1.0"}}': GROWS,
    f'pdtransfer_first_token_seconds_bucket{{{ROUTER}, model="m", le="+Inf"}}': GROWS,
    f'pdtransfer_handoff_seconds_bucket{{{WORKER}, transport="shm", le="0.01"}}': GROWS,
    f'pdtransfer_handoff_seconds_bucket{{{WORKER}, transport="shm", le="+Inf"}}': GROWS,
    f'pdtransfer_slots{{{WORKER}, component="kv"}}': f"1000+0x{MINUTES}",
    f'pdtransfer_slots_free{{{WORKER}, component="kv"}}': f"10+0x{MINUTES}",
    f"pdtransfer_rooms_queued{{{WORKER}}}": f"0+0x{MINUTES}",
    f"pdtransfer_quarantined_bytes{{{WORKER}}}": f"0+0x{MINUTES}",
    f"pdtransfer_grants_mismatched_total{{{WORKER}}}": FLAT, f"pdtransfer_breaches_total{{{ROUTER}}}": FLAT,
    f"pdtransfer_bus_refused_total{{{WORKER}}}": FLAT, f"pdtransfer_bus_strangers_total{{{WORKER}}}": FLAT,
    f"process_open_fds{{{WORKER}}}": f"100+0x{MINUTES}", f"process_max_fds{{{WORKER}}}": f"1024+0x{MINUTES}",
    f'pdtransfer_build_info{{{WORKER}, version="1"}}': f"1+0x{MINUTES}",
    f'pdtransfer_build_info{{{ROUTER}, version="1"}}': f"1+0x{MINUTES}",
}  # fmt: skip
# What has to change for an alert; a series that is not among the healthy ones is one more.
CHANGES = {
    "PdtransferDown": {f"up{{{WORKER}}}": f"0+0x{MINUTES}"},
    "PdtransferNoWorker": {f'pdtransfer_worker_usable{{{ROUTER}, role="decode", peer="b"}}': f"0+0x{MINUTES}"},
    "PdtransferRequestsFail": {f'pdtransfer_requests_total{{{ROUTER}, status="503"}}': f"0+600x{MINUTES}"},
    "PdtransferRequestsRefused": {f'pdtransfer_requests_total{{{ROUTER}, status="429"}}': f"0+600x{MINUTES}"},
    "PdtransferFirstTokenSlow": {
        f'pdtransfer_first_token_seconds_bucket{{{ROUTER}, model="m", le="1.0"}}': f"0+0x{MINUTES}",
        f'pdtransfer_first_token_seconds_bucket{{{ROUTER}, model="m", le="30.0"}}': GROWS,
    },
    "PdtransferHandoffSlow": {
        f'pdtransfer_handoff_seconds_bucket{{{WORKER}, transport="shm", le="0.01"}}': f"0+0x{MINUTES}",
        f'pdtransfer_handoff_seconds_bucket{{{WORKER}, transport="shm", le="1.0"}}': GROWS,
    },
    "PdtransferArenaFull": {f"pdtransfer_rooms_queued{{{WORKER}}}": f"3+0x{MINUTES}"},
    "PdtransferQuarantine": {f"pdtransfer_quarantined_bytes{{{WORKER}}}": f"4096+0x{MINUTES}"},
    "PdtransferRowsDiffer": {f"pdtransfer_grants_mismatched_total{{{WORKER}}}": GROWS},
    "PdtransferBreaches": {f"pdtransfer_bus_refused_total{{{WORKER}}}": GROWS},
    "PdtransferStrangers": {f"pdtransfer_bus_strangers_total{{{WORKER}}}": GROWS},
    "PdtransferDescriptors": {f"process_open_fds{{{WORKER}}}": f"1000+0x{MINUTES}"},
    "PdtransferVersions": {f'pdtransfer_build_info{{{ROUTER}, version="2"}}': f"1+0x{MINUTES}"},
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None and "PROMTOOL" not in os.environ,
    reason="promtool is missing: apt-get install prometheus",
)


def _promtool(*arguments: str | Path) -> None:
    tool = os.environ.get("PROMTOOL", "promtool")
    ran = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _documented() -> set[str]:
    """Every name that Prometheus knows, as the processes serve it."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (REPO / "docs" / "metrics.md").read_text(), re.MULTILINE)
    names = {name for name, kind in rows if kind != "histogram"}
    return names | {f"{name}_{end}" for name, kind in rows if kind == "histogram" for end in ("bucket", "sum", "count")}


def _named(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:pdtransfer|process|http)_\w+\b(?!\s*=)", expression))


def _dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "dashboard.json").read_text())


def _expressions() -> list[str]:
    panels = [target["expr"] for panel in _dashboard()["panels"] for target in panel.get("targets", ())]
    variables = [each["definition"] for each in _dashboard()["templating"]["list"] if "definition" in each]
    return panels + variables


def test_dashboard_and_alerts_name_metrics_that_there_are() -> None:
    documented = _documented()
    assert {"pdtransfer_handoff_seconds_bucket", "process_open_fds", "pdtransfer_build_info"} <= documented
    expressions = _expressions()
    assert len(expressions) > 30
    rules = re.sub(r"^\s*(#|- alert|summary|action).*$", "", ALERTS.read_text(), flags=re.MULTILINE)
    for text in (*expressions, rules):
        assert _named(text), text
        assert _named(text) - documented == set(), text


def test_dashboard_asks_for_labels_that_its_metrics_have() -> None:
    """Those that Prometheus itself adds, and `le`, are on all of them."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) \|", (REPO / "docs" / "metrics.md").read_text(), re.MULTILINE)
    labels: dict[str, set[str]] = {}
    for name, named in rows:
        labels.setdefault(name, set()).update(re.findall(r"`(\w+)`", named))
    added = {"le", "job", "instance", "role"}
    for text in _expressions():
        names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in _named(text)}
        asked = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", text))
        for group in re.findall(r"by \((.*?)\)", text):
            asked |= set(group.split(", "))
        known = set[str]().union(*(labels.get(name, set()) for name in names))
        assert asked - added <= known, text


def test_no_two_panels_of_the_dashboard_lie_on_each_other() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(0 <= x < 24 for x, _ in cells)


def test_prometheus_of_the_composed_fleet_scrapes_each_of_its_nodes() -> None:
    scraped = re.findall(r'"([\w-]+):(\d+)"', (MONITORING / "prometheus.yml").read_text())
    compose = (DEPLOY / "compose.yaml").read_text()
    nodes = set(re.findall(r"--node, ([\w-]+)", compose))
    assert {name for name, _ in scraped} == nodes
    listens = {"prefill": "7102", "decode": "7202", "router": "8000"}
    for name, port in scraped:
        role = name.partition("-")[0]
        assert port == listens[role]
        assert re.search(rf"0\.0\.0\.0:{port}", compose)


def test_composed_monitoring_mounts_what_there_is() -> None:
    compose = (DEPLOY / "compose.yaml").read_text()
    mounted = re.findall(r'"\./(monitoring/[\w.]+):', compose)
    assert {Path(each).name for each in mounted} == {path.name for path in MONITORING.iterdir()}
    for each in mounted:
        assert (DEPLOY / each).exists(), each


def test_each_alert_has_a_case() -> None:
    names = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    assert names == set(CHANGES)


@needs_promtool
def test_promtool_takes_the_rules_and_both_configurations() -> None:
    _promtool("check", "rules", ALERTS)
    for path in (MONITORING / "prometheus.yml", DEPLOY / "prometheus.yml"):
        _promtool("check", "config", path)


@needs_promtool
def test_each_alert_fires_for_its_cause_alone_and_none_in_a_healthy_fleet(tmp_path: Path) -> None:
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    cases = {"nothing": dict[str, str](), **CHANGES}
    tests = [
        {
            "interval": "1m",
            "name": name,
            "input_series": [{"series": each, "values": values} for each, values in (HEALTHY | changes).items()],
            "promql_expr_test": [
                {
                    "expr": firing,
                    "eval_time": f"{MINUTES - 1}m",
                    "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] if changes else [],
                }
            ],
        }
        for name, changes in cases.items()
    ]
    file = tmp_path / "alerts.test.yml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    _promtool("test", "rules", file)


@needs_promtool
def test_promtool_takes_each_query_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, which have to parse; Grafana puts values for its variables."""
    values = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
    rules: list[dict[str, str]] = []
    for expression in (target["expr"] for panel in _dashboard()["panels"] for target in panel.get("targets", ())):
        for name, value in values.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        rules.append({"record": f"panel:{len(rules)}", "expr": expression})
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    _promtool("check", "rules", file)
