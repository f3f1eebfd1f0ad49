"""Run with SGLang's Python: the plugin's manager and receivers meet each answer that a bootstrap server may give, as
SGLang's decode scheduler calls them. Writes a line of JSON for each: what was refused, or what was raised."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVPoll
from sglang.srt.plugins import load_plugins

load_plugins()

from pdtransfer.adapters.kit.peers import Remembered  # noqa: E402
from pdtransfer.adapters.sglang import backend, process  # noqa: E402
from tests.support.json_values import spoiled  # noqa: E402

SERVER = {
    **dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1),
    "page_size": None, "kv_cache_dtype": None, "follow_bootstrap_room": True, "enable_dsa_cache_layer_split": False,
    "kv_layout": None, "dsv41_spec_layout": None, "decode_allocation_policy": "early",
    "enable_kv_cache_sharding": False,
    "prefill_http_port": 30_000, "target_tp_rank": None, "target_tp_ranks": None, "target_cp_ranks": None,
    "target_pp_ranks": None, "required_dst_info_num": None, "required_prefill_response_num": None,
}  # fmt: skip
RANK = {"rank_ip": "127.0.0.1", "rank_port": 7801, "pp_rank": 0, "is_dummy": False}
ROOM = 7
given: list[Any] = [None]  # the server's answer


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(given[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


class Manager(backend.Manager):
    """What SGLang's methods ask of a decode rank, without an engine."""

    def __init__(self) -> None:
        self.kv_args = SimpleNamespace(page_size=16, engine_rank=0, state_types=[])
        self.kv_cache_dtype_str, self.kv_layout, self.is_mla_backend, self.is_hybrid_mla_backend = (
            "auto", None, False, False,
        )  # fmt: skip
        self.attn_tp_size = self.attn_cp_size = self.dcp_size = self.pp_size = 1
        self.attn_cp_rank = self.pp_rank = 0
        self.enable_all_cp_ranks_for_transfer = self.enable_staging = self.defer_decode_allocation = False
        self.refusals = Remembered[str, str](9)
        self.prefill_info_table, self.connection_pool, self.request_status = {}, {}, {}
        self.failure_records, self.heartbeat_failures, self.required_prefill_response_num_table = {}, {}, {}
        self.prefill_response_tracker: dict[int, set[int]] = {}
        self.addr_to_rooms_tracker = defaultdict(set)
        self.connection_lock, self.failure_lock = threading.Lock(), threading.Lock()
        self._deferred_ack_targets, self._staging_outstanding = {}, defaultdict(int)
        self._deferred_ack_poisoned_rooms: set[int] = set()
        self.deferred_bootstrap = None
        self._side = None

    dsv41_spec_layout = None

    def lose(self, address: str) -> None:
        """As the thread that watches servers does."""
        self._handle_node_failure(address)

    def __del__(self) -> None:
        pass


class Receiver(backend.Receiver):
    def learn(self) -> None:
        """As `init` does, once it knows the server."""
        self._setup_bootstrap_infos()


def receiver(manager: Manager, address: str) -> Receiver:
    made = Receiver(manager, address, ROOM)
    made.target_cp_ranks, made.target_tp_ranks, made.target_pp_ranks = [0], [0], [0]
    made.target_tp_rank, made.prefill_dp_rank = 0, 0
    return made


def learns_server(manager: Manager, address: str) -> str:
    if not manager.try_ensure_parallel_info(address):
        return manager.refusals.get(address, "")
    info = manager.prefill_info_table[address]
    assert 0 <= ROOM % info.dp_size < info.dp_size  # as DecodePreallocQueue resolves the rank
    assert type(info.follow_bootstrap_room) is bool
    assert isinstance(getattr(info, "decode_allocation_policy", "early"), str)  # since 0.5.22
    return ""


def learns_ranks(manager: Manager, address: str) -> str:
    made = receiver(manager, address)
    made.learn()
    if made.conclude_state != KVPoll.Failed:
        assert [rank["pp_rank"] for rank in made.bootstrap_infos] == [0]
        assert isinstance(made.bootstrap_infos[0]["rank_ip"], str)
    refused = manager.failure_records.get(ROOM, "")
    manager.lose(address)
    return refused


def learns_dp_ranks(manager: Manager, address: str) -> str:
    receiver(manager, address)
    ranks = CommonKVReceiver.query_prefill_dp_ranks(address, [ROOM])
    ranks.update({})  # as DecodePreallocQueue does
    if (rank := ranks.get(str(ROOM))) is not None:
        assert int(rank) >= 0
    return manager.failure_records.get(ROOM, "")


EDGES: tuple[tuple[Callable[[Manager, str], str], dict[str, Any]], ...] = (
    (learns_server, SERVER), (learns_ranks, RANK), (learns_dp_ranks, {str(ROOM): 0}),
)  # fmt: skip


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        for learns, right in EDGES:
            for case, given[0] in spoiled(right):
                manager = Manager()
                process.decode = manager
                line = {"edge": learns.__name__, "case": case}
                try:
                    line["refused"] = learns(manager, address)
                except Exception as error:  # noqa: BLE001
                    line["raised"] = traceback.format_exception_only(error)[-1].strip()[:300]
                print(json.dumps(line), flush=True)
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
