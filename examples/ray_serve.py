"""Ray Serve LLM on this CPU host: one replica of prefill and two of decode, with pdtransfer between them.

    make venv-ray
    .venv-ray/bin/python examples/ray_serve.py MODEL

MODEL is a directory or a name that vLLM takes. Requests and KV stay on loopback. All of it ends with this process: with
Ctrl-C, or at the end of its input. deploy/ray/serve.yaml is the same for a cluster.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import Any

import ray
from ray import serve

from pdtransfer.adapters.vllm.ray_serve import build_app

HOST = "127.0.0.1"
MODEL_ID = "m"
# So that all of it fits into what Ray counts as this host's cores.
SHARE: dict[str, Any] = {"num_cpus": 0.1}


def llm_config(model: str, role: str, replicas: int, **settings: Any) -> dict[str, Any]:
    """One side's LLMConfig, with settings of the connector."""
    transfer = {
        "kv_connector": "PDTransferConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }  # fmt: skip
    return {
        "model_loading_config": {"model_id": MODEL_ID, "model_source": model},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 0.2}]},
        "deployment_config": {"num_replicas": replicas, "ray_actor_options": SHARE},
        "engine_kwargs": {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8,
            "kv_cache_memory_bytes": 128 << 20, "kv_transfer_config": transfer,
        },
    }  # fmt: skip


def start(model: str, *, port: int, kv_port: int = 7801, temp: str | None = None) -> None:
    """Starts Ray and the application, and returns once it takes requests."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _node_ip_address=HOST, _temp_dir=temp)
    serve.start(http_options={"host": HOST, "port": port})
    app = build_app(
        {
            "prefill_config": llm_config(model, "kv_producer", 1, bind=f"tcp://{HOST}:{kv_port}"),
            "decode_config": llm_config(model, "kv_consumer", 2),
            "ingress_deployment_config": {"autoscaling_config": None, "num_replicas": 1, "ray_actor_options": SHARE},
        }
    )
    serve.run(app, name="pd")


def main() -> None:
    """Serves until its input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    start(given.model, port=given.port)
    print(f"serves {MODEL_ID} at http://{HOST}:{given.port}/v1", flush=True)
    with suppress(KeyboardInterrupt):
        sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
