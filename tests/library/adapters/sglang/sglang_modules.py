"""Modules in the place of SGLang's, with as little as 0.5.17's have of what the plugin imports."""

from __future__ import annotations

from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from tests.library.adapters.stand_ins import imported, stand_in

ROOM = 7


class KVPoll(IntEnum):
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class KVTransferError(Exception):
    def __init__(self, room: int, reason: str, is_from_another_rank: bool) -> None:
        super().__init__(reason)


class KVArgs:
    pass


class BaseKVReceiver:
    pass


class Common:
    """What the common sender and receiver of 0.5.17 share."""

    kv_mgr: Any
    timed_out: KVPoll | None = None

    def __init__(self, manager: Any, *_: Any) -> None:
        self.kv_mgr, self.bootstrap_room, self.conclude_state, self.init_time = manager, ROOM, None, None
        self.abort_notified, self.bootstrap_infos, self.bootstrap_addr = False, [{}], "host:1"

    def failure_exception(self) -> None:
        raise Exception("a stand-in, as in 0.5.17")

    def clear(self) -> None:
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)

    def _check_bootstrap_timeout(self) -> KVPoll | None:
        return self.timed_out

    _check_waiting_timeout = _check_bootstrap_timeout


class CommonKVManager:
    """A rank, alone in its pipeline stage, has the fields of SGLang's manager that the plugin's reads at its start."""

    def __init__(
        self, args: Any = None, mode: Any = None, server_args: Any = None, is_mla_backend: bool = False
    ) -> None:
        self.request_status: dict[int, KVPoll] = {}
        self.kv_args, self.disaggregation_mode, self.server_args = args, mode, server_args
        self.is_mla_backend, self.is_hybrid_mla_backend, self.kv_cache_dtype_str = is_mla_backend, False, "auto"
        self.attn_tp_rank, self.attn_tp_size, self.attn_cp_rank, self.attn_cp_size, self.dcp_size = 0, 1, 0, 1, 1
        self.pp_rank, self.pp_size = 0, getattr(server_args, "pp_size", 1)
        self.attn_dp_rank, self.system_dp_rank = 0, getattr(args, "system_dp_rank", 0)
        self.system_dp_size, self.attn_dp_size = getattr(server_args, "dp_size", 1), 1

    def update_status(self, room: int, status: KVPoll) -> None:
        known = self.request_status.get(room, status)
        self.request_status[room] = status if status is KVPoll.Failed else max(known, status)


class CommonKVSender(Common):
    def send(self, *_: Any) -> None:
        pass

    def poll(self) -> None:
        pass


class CommonKVReceiver(Common, BaseKVReceiver):
    pass


class CommonKVBootstrapServer:
    pass


class DisaggregationMode(Enum):
    DECODE, PREFILL = "decode", "prefill"


class ModelConfig:
    """Of a model of four KV heads, or of the drafter at a path, with as many as that says: MLA or a number."""

    dtype, hf_text_config, head_dim = "torch.float32", SimpleNamespace(), 8

    def __init__(self, path: str = "") -> None:
        self.hf_config = SimpleNamespace(to_dict=lambda: {"model_type": path})
        self.attention_arch = SimpleNamespace(name="MLA" if path == "MLA" else "MHA")
        self.heads = int(path) if path.isdigit() else 4

    @classmethod
    def from_server_args(
        cls, _: Any, model_path: str = "", model_revision: str | None = None, *, is_draft_model: bool = False
    ) -> ModelConfig:
        assert is_draft_model == bool(model_path)
        return cls(model_path)

    def get_total_num_kv_heads(self) -> int:
        return self.heads

    def get_num_kv_heads(self, tp_size: int) -> int:
        return self.heads // tp_size

    get_swa_num_kv_heads = get_num_kv_heads


class ServerArgs:
    def __init__(self, speculative_algorithm: str | None = None, **more: Any) -> None:
        self.speculative_algorithm = speculative_algorithm
        self.enable_hierarchical_cache, self.disaggregation_mode, self.pp_size = False, "decode", 1
        self.enable_hisparse = False
        vars(self).update(more)


def with_stand_ins(name: str, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.17", **context: Any) -> Any:
    """A module of the plugin that has imported these modules; nothing of it stays. `context` are fields of SGLang's
    settings and of this rank, wherever the plugin asks for them."""
    pytest.importorskip("torch")
    asked = dict.fromkeys(
        ("get_device", "get_disagg", "get_exec", "get_memory", "get_parallel"), lambda: SimpleNamespace(**context)
    )
    has: dict[str, dict[str, Any]] = {
        "configs.model_config": {"ModelConfig": ModelConfig},
        "disaggregation.base.conn": {"BaseKVReceiver": BaseKVReceiver, "KVArgs": KVArgs, "KVPoll": KVPoll},
        "disaggregation.common.conn": {
            "CommonKVBootstrapServer": CommonKVBootstrapServer, "CommonKVManager": CommonKVManager,
            "CommonKVSender": CommonKVSender, "CommonKVReceiver": CommonKVReceiver, "KVTransferError": KVTransferError,
        },
        "disaggregation.utils": {
            "DisaggregationMode": DisaggregationMode, "all_reduce_flags": lambda flags, group, op: group(flags, op),
        },
        "mem_cache.pool_host.common": {"_CUDA_HOST_REGISTERED_RANGES_ATTR": "ranges"},
        "plugins.hook_registry": {"HookRegistry": None, "HookType": Enum},
        "runtime_context": asked,
        "server_args": {"ServerArgs": ServerArgs, "add_disagg_transfer_backend_choices": None},
    }  # fmt: skip
    modules = {"sglang": {"__version__": version}} | {f"sglang.srt.{name}": content for name, content in has.items()}
    stand_in(monkeypatch, modules)
    return imported("pdtransfer.adapters.sglang", name, "dialect", "admission")
