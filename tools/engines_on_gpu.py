"""`python -m tools.engines_on_gpu vllm|sglang OUT`: an engine's tests on one GPU, in groups that run beside each other.

Run it with the interpreter that has the engine, pytest and this project. Each group is a pytest of its own with its own
servers, so a server that ends costs its own group. Groups start in their order, as long as few servers run at once.
Each result is in OUT/results.jsonl and on standard output as soon as the test has ended, whatever ends the run. OUT
also has each group's pytest output, and the logs of all servers in logs.tar.xz.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
RESULTS = "PDTRANSFER_TEST_RESULTS"  # the file to which the pytest of a group adds its results
ALONE = 1_000  # more servers than ever run at once: nothing runs beside this group
END_S = 25.0  # after which a group that was interrupted is killed
ERROR_LINES = 6  # of a failed test, in the table

VLLM, GPU, BOTH = "test_vllm_gpu.py", "test_sglang_gpu.py", "test_sglang.py"
DRAFTS = "test_sglang_speculation.py"


@dataclass
class Group:
    """Tests that share servers; `servers` run at once."""

    name: str
    servers: int
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    interrupted: bool = False
    results: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def vllm_groups() -> list[Group]:
    """All of vLLM's, the most wanted first. `-rP` prints how many tokens were others that are as likely."""
    drafts = "test_speculation_on_both_sides_continues"
    return [
        Group(name, engines, (VLLM, "-rP", "-k", wanted))
        for name, engines, wanted in (
            ("dense", 3, "test_dense_models_continue"),
            ("tiers", 3, "test_what_a_tier_in_host_memory_has and Offloading"),
            ("lmcache", 4, "test_what_a_tier_in_host_memory_has and LMCache"),
            ("mooncake", 2, "test_kv_is_sent_over_mooncake"),
            ("mla", 2, "test_bytes_are_those_of_prefill and mla"),
            ("fp8", 2, "test_bytes_are_those_of_prefill and fp8"),
            ("context-parallel", 2, "test_latents_that_ranks_have_in_turn"),
            ("dsa", 2, "test_bytes_of_sparse_attention and auto"),
            ("dsa-fp8", 2, "test_bytes_of_sparse_attention and fp8"),
            ("hisparse", 2, "test_kv_lands_in_hisparses_host_pool"),
            ("layouts", 4, "layout"),
            ("draft-model", 2, f"{drafts} and draft_model"),
            ("eagle", 2, f"{drafts} and eagle"),
            ("ngram", 2, f"{drafts} and ngram"),
            ("ends", 3, "test_requests_and_prefill_end_early"),
            ("unequal-blocks", 2, "test_blocks_of_unequal_sizes"),
            ("states", 2, "test_states"),
            ("all-layers", 2, "test_blocks_of_all_layers"),
            ("large", ALONE, "test_a_large_cache"),
        )
    ]


def sglang_groups() -> list[Group]:
    """All of SGLang's, the most wanted first."""
    dense, retracts = "test_dense_models_continue", "test_what_decode_retracts_goes_on"
    sparse = "test_other_forms_of_the_sparse_cache_continue"
    ends = "(no_memory or behind_our_router or dead_servers)"
    return [
        Group("glm_dsa", 5, (GPU, "-k", "glm_dsa")),
        Group("retract-hisparse", 3, (GPU, "-k", f"{retracts} and hisparse")),
        Group("dense-fp8", 3, (GPU, "-k", f"{dense} and fp8")),
        Group("dense-graphs", 3, (GPU, "-k", f"{dense} and graphs")),
        Group("v4", 4, (GPU, "-k", "deepseek_v4", "-rP")),
        Group("deepseek_v32", 5, (GPU, "-k", "deepseek_v32")),
        Group("eagle", 4, (DRAFTS, "-k", "llama")),
        Group("mtp", 4, (DRAFTS, "-k", "deepseek_v3_drafted")),
        Group("mtp-hisparse", 4, (DRAFTS, "-k", "deepseek_v32_drafted")),
        Group("dense-hicache", 3, (GPU, "-k", f"{dense} and hicache")),
        Group("dense-dp", 3, (GPU, "-k", f"{dense} and attention")),
        Group("sparse-hicache", 4, (GPU, "-k", f"{sparse} and hicache")),
        Group("sparse-graphs", 4, (GPU, "-k", f"{sparse} and graphs")),
        Group("sparse-fp8", 4, (GPU, "-k", f"{sparse} and fp8")),
        Group("dense-radix", 3, (GPU, "-k", f"{dense} and radix")),
        Group("retract-dense", 3, (GPU, "-k", f"{retracts} and dense")),
        Group("lora", 3, (GPU, "-k", "test_an_adapter_by_its_name")),
        Group("mooncake", 3, (GPU, "-k", "test_kv_is_sent_over_mooncake")),
        Group("states", 3, (GPU, "-k", "test_states_are_sent_with_the_kv", "-rP")),
        Group("two-gpus", 9, (GPU, "-k", "ranks_and_stages", "-rP")),
        Group("llama", 5, (BOTH, "-k", f"not other_models and not ranks and not stages and not {ends}")),
        Group("llama-ends", 5, (BOTH, "-k", ends)),
        Group("models", 3, (BOTH, "-k", "test_other_models_continue_as_well")),
        Group("bytes", ALONE, (GPU, "-k", "test_an_admission_reads_no_more_than_the_preload", "-rP")),
    ]


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of a group's pytest: adds what came of a test to the file of results."""
    if report.when != "call" and report.passed:
        return
    lines = str(report.longrepr).splitlines() if report.longrepr else []
    result = {
        "test": report.nodeid.partition("::")[2], "outcome": report.outcome if report.when == "call" else
        f"{report.outcome} in {report.when}", "seconds": round(report.duration, 1), "error": lines,
    }  # fmt: skip
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(result) + "\n")


class Run:
    """All groups, until they have ended or the time is over."""

    def __init__(self, out: Path, scratch: Path, seconds: float, servers_max: int) -> None:
        self._out, self._scratch, self._servers_max = out, scratch, servers_max
        self._began = time.monotonic()
        self._deadline = self._began + seconds

    def run(self, wanted: Sequence[Group]) -> None:
        waiting = list(wanted)
        while True:
            running = [group for group in wanted if group.process is not None and group.process.poll() is None]
            for group in wanted:
                self._take(group)
            over = time.monotonic() > self._deadline
            if not running and (over or not waiting):
                return
            for group in [] if over else list(waiting):
                if running and sum(each.servers for each in running) + group.servers > self._servers_max:
                    continue
                self._start(group)
                waiting.remove(group)
                running.append(group)
            for group in running if over else ():
                self._stop(group)
            time.sleep(0.5)

    def _start(self, group: Group) -> None:
        environment = os.environ | {RESULTS: str(self._results(group)), "PYTHONUNBUFFERED": "1"}
        command = [
            sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", __spec__.name, "-m", "engines",
            "--basetemp", self._scratch / group.name, "--junitxml", self._out / f"{group.name}.xml",
            Path("tests", "engines", group.arguments[0]), *group.arguments[1:],
        ]  # fmt: skip
        with (self._out / f"{group.name}.txt").open("wb") as output:
            group.process = subprocess.Popen(  # noqa: S603
                command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self._print(f"{group.name}: started")

    def _stop(self, group: Group) -> None:
        """Interrupts it once, so that it ends its servers; kills it where it does not end."""
        assert group.process is not None
        if not group.interrupted:
            group.interrupted = True
            self._print(f"{group.name}: no time left")
            group.process.send_signal(signal.SIGINT)
        elif time.monotonic() > self._deadline + END_S and group.process.poll() is None:
            os.killpg(group.process.pid, signal.SIGKILL)
            group.process.wait()

    def _take(self, group: Group) -> None:
        """Prints the results that are new."""
        path = self._results(group)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in lines[len(group.results) :]:
            if not line.endswith("\n"):
                break
            group.results.append(result := json.loads(line))
            self._print(f"{group.name}: {result['outcome'].upper()} {result['test']} in {result['seconds']} s")
            for text in result["error"][-ERROR_LINES:]:
                self._print(f"    {text[:300]}")
            with (self._out / "results.jsonl").open("a") as file:
                file.write(json.dumps({"group": group.name} | result) + "\n")

    def _results(self, group: Group) -> Path:
        return self._scratch / f"{group.name}.jsonl"

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f}] {text}", flush=True)


def table(wanted: Sequence[Group]) -> str:
    """A line for each test that has ended, and for each group of which nothing is known."""
    lines = ["", f"{'group':<18}{'test':<100}{'outcome':<18}seconds"]
    for group in wanted:
        lines += [
            f"{group.name:<18}{result['test'][:98]:<100}{result['outcome']:<18}{result['seconds']:>7}"
            for result in group.results
        ]
        if group.process is None:
            lines.append(f"{group.name:<18}{'-':<100}not started")
        elif group.interrupted or not group.results:
            lines.append(f"{group.name:<18}{'-':<100}{'interrupted' if group.interrupted else 'no result'}")
        elif group.process.returncode not in (0, 1):  # neither all passed nor one failed
            lines.append(f"{group.name:<18}{'-':<100}pytest ended with status {group.process.returncode}")
    counts = Counter(result["outcome"] for group in wanted for result in group.results)
    lines.append(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test has ended")
    return "\n".join(lines)


def main() -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--scratch", type=Path, required=True, help="an empty folder for checkpoints and servers' logs")
    parser.add_argument("--seconds", type=float, default=3_600.0, help="after which what still runs is interrupted")
    parser.add_argument("--servers-max", type=int, default=28, help="that run at once")
    parser.add_argument("--group", action="append", default=[], help="only this one; may be repeated")
    given = parser.parse_args()
    groups = vllm_groups() if given.engine == "vllm" else sglang_groups()
    wanted = [group for group in groups if not given.group or group.name in given.group]
    given.out.mkdir(parents=True, exist_ok=True)
    given.scratch.mkdir(parents=True, exist_ok=True)
    try:
        Run(given.out, given.scratch, given.seconds, given.servers_max).run(wanted)
    finally:
        text = table(wanted)
        (given.out / "table.txt").write_text(text + "\n")
        with tarfile.open(given.out / "logs.tar.xz", "w:xz", preset=1) as logs:
            for path in sorted(given.scratch.rglob("*.log")):
                logs.add(path, path.relative_to(given.scratch))
        print(text, flush=True)
    passed = [result["outcome"] == "passed" for group in wanted for result in group.results]
    return 0 if passed and all(passed) and not any(group.interrupted for group in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
