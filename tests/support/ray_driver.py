"""Runs in .venv-ray: Ray and its application of examples/ray_serve.py, and the processes of its replicas."""

from __future__ import annotations

import os
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
