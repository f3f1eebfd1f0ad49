"""The workflow of the code host runs targets that there are, for at most as long as a job may take."""

from __future__ import annotations

import re

import yaml

from tests.support.paths import REPO


def test_each_job_makes_targets_that_the_makefile_has() -> None:
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    phony = re.search(r"^\.PHONY: (.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    [job] = workflow["jobs"].values()
    targets = {target.partition(" ")[0] for target in job["strategy"]["matrix"]["target"]}
    assert targets - set(phony[1].split()) == set()
    assert job["steps"][-1] == {"run": "make ${{ matrix.target }}"}
    ran = (REPO / ".ci" / "run").read_text()
    assert {target for target in targets if target.partition("-")[0] != "test"} <= set(re.findall(r"\w+", ran))
