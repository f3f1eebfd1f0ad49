"""What every process has in its metrics: its build, what it uses, and what its HTTP answered."""

from __future__ import annotations

import re

import aiohttp

from pdtransfer import __version__
from pdtransfer.serve.process.http import Health, HttpListener, application
from pdtransfer.serve.process.process_metrics import process_registry


def _answers(text: str) -> dict[tuple[str, str], float]:
    matches = re.findall(r'^pdtransfer_http_responses_total{path="(.*)",status="(\d+)"} (\S+)$', text, re.MULTILINE)
    return {(path, status): float(count) for path, status, count in matches}


async def test_every_answer_is_counted_by_its_route_and_no_path_of_a_client_is_a_label() -> None:
    registry = process_registry(role="prefill", node="p0")
    listener = HttpListener(application(lambda: Health(False, {}), registry, body_bytes_max=16))
    url = "http://" + await listener.open("127.0.0.1:0")
    async with aiohttp.ClientSession() as http:
        for path in ("/nothing", "/nothing/at/all", "/health"):
            await http.get(url + path)
        await http.post(url + "/metrics", data=b"x" * 64)
        text = await (await http.get(url + "/metrics")).text()
        assert _answers(text) == {("other", "404"): 2, ("other", "405"): 1, ("/health", "503"): 1}
        text = await (await http.get(url + "/metrics")).text()
        assert _answers(text)["/metrics", "200"] == 1
    await listener.close()


async def test_a_process_reports_what_it_is_and_what_it_uses() -> None:
    listener = HttpListener(application(lambda: Health(True, {}), process_registry(role="decode", node="d0")))
    url = "http://" + await listener.open("127.0.0.1:0")
    async with aiohttp.ClientSession() as http:
        text = await (await http.get(url + "/metrics")).text()
    await listener.close()
    (build,) = re.findall(r"^pdtransfer_build_info{(.*)} 1.0$", text, re.MULTILINE)
    assert {'role="decode"', 'node="d0"', f'version="{__version__}"'} <= set(build.split(","))
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "start_time_seconds"):
        assert float(re.findall(rf"^process_{name} (\S+)$", text, re.MULTILINE)[0]) > 0
