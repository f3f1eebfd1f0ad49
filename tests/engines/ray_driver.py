"""Runs in .venv-ray: Ray, its application of examples/ray_serve.py or of a file, and the processes of its replicas."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util import list_named_actors

from examples import ray_serve
from tests.support.json_process import Requests


class Driver:
    """What a test may ask: each public method by its name."""

    def start(self, **options: Any) -> None:
        """Starts all of it; returns when it takes requests."""
        ray_serve.start(**options)

    def deploy(self, *, config: str, temp: str) -> None:
        """Has `serve run` deploy a file on a cluster of this host alone; returns when all of it takes requests. Cores
        are what Ray counts with: there are fewer."""
        ray.init(
            num_cpus=16, include_dashboard=False, object_store_memory=100 << 20, _node_ip_address=ray_serve.HOST,
            _temp_dir=temp,
        )  # fmt: skip
        address = ray.get_runtime_context().gcs_address
        command = [Path(sys.executable).with_name("serve"), "run", "--non-blocking", "--address", address, config]
        subprocess.run(command, stdout=sys.stderr, check=True)
        while any(found.status != "RUNNING" for found in serve.status().applications.values()):
            failed = [found.message for found in serve.status().applications.values() if "FAILED" in found.status]
            if failed:
                raise RuntimeError(failed)
            time.sleep(1.0)

    def replicas(self, *, deployment: str) -> list[int]:
        """The processes of a deployment's replicas that answer."""
        names = (actor["name"] for actor in list_named_actors(all_namespaces=True))
        actors = [ray.get_actor(name, "serve") for name in names if f"#{deployment}:" in name]
        asked = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors]
        pids: list[int] = []
        for answer in asked:
            try:
                pids.append(ray.get(answer, timeout=30.0))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):  # it has ended, or only starts
                continue
        return pids


if __name__ == "__main__":
    requests, driver = Requests(), Driver()
    while not requests.ended:
        for number, name, arguments in requests.take(wait=True):
            requests.attempt(number, getattr(driver, name), arguments)
    serve.shutdown()
    ray.shutdown()
