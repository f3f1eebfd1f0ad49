"""Which versions of an engine its adapter supports, those that have been run, and what each is the first to have."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from typing import NamedTuple

log = logging.getLogger(__name__)

Version = tuple[int, ...]

VLLM: tuple[Version, ...] = ((0, 26), (0, 27), (0, 28), (0, 29), (0, 30), (0, 31), (0, 32), (0, 33))
SGLANG: tuple[Version, ...] = ((0, 5, 17), (0, 5, 18), (0, 5, 19), (0, 5, 20), (0, 5, 21), (0, 5, 22), (0, 5, 23))


class Since(NamedTuple):
    """The first version that has something, and a name that it and later ones have: MODULE:ATTRIBUTE. `lacks` is what
    users of earlier ones meet instead, for the documents; empty where they meet nothing."""

    text: str
    proof: str = ""
    lacks: str = ""


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
VLLM_SINCE = {
    "one_allocation": Since("0.29"),  # of which tensors are parts
    "fails_by_request": Since(
        "0.30", f"{_BASE}:KVConnectorTransferResults",
        "vLLM knows failed hand-offs by the numbers of their blocks, not by request",
    ),
    "layout": Since("0.30"),  # LBHNC is the name of the one in which the heads of a block lie apart
    "states": Since(
        "0.30", lacks="states of hybrid models (`MambaSpec`) are refused; 0.30 and 0.31 take them, and have not run "
        "with them",
    ),
    "prefill_context": Since("0.30", lacks="`--prefill-context-parallel-size` on prefill is refused"),
    "sets_interleave": Since(
        "0.30", lacks="with decode context parallelism, set `--cp-kv-cache-interleave-size` to the block size yourself"
    ),
    "allocation_hook": Since("0.31", f"{_BASE}:KVConnectorBase_V1.get_mem_pool_context"),
    "hit_source": Since("0.32", f"{_BASE}:CacheHitSource.P2P"),  # of tokens that a peer has computed
}  # fmt: skip

_SRT = "sglang.srt.disaggregation"
SGLANG_SINCE = {
    # 0.5.17 and 0.5.18 unregister whole host buffers, and only log CUDA's error.
    "registered_ranges": Since("0.5.19", "sglang.srt.mem_cache.pool_host.common:_CUDA_HOST_REGISTERED_RANGES_ATTR"),
    "resolves_releases": Since("0.5.19"),  # decode's queue, before it flushes the cache
    "draft_buffers": Since(
        "0.5.20", f"{_SRT}.base.conn:KVArgs.num_draft_entries",
        "speculation with a drafter that has KV: SGLang does not report which buffers are the drafter's",
    ),
    "destinations": Since(
        "0.5.21", f"{_SRT}.base.conn:KVTransferDestination.HOST", "receiving into host memory, but for HiSparse"
    ),
    "transfer_buffers": Since("0.5.21", f"{_SRT}.utils:get_kv_transfer_buf_infos"),
    "prealloc_ceiling": Since("0.5.21"),  # of an allocator whose parts share their bytes
    "window_layouts": Since("0.5.22"),
    # The common classes send, poll and fail by themselves.
    "complete": Since("0.5.23", f"{_SRT}.common.conn:CommonKVSender._poll_with_status"),
    # SGLang itself keeps the pages of a failed request until nobody can write them on any rank. 0.5.19 to 0.5.22 could,
    # but flush the cache meanwhile, and then free the pages again: there `_poll_transfers` keeps them.
    "defers_releases": Since("0.5.23"),
    "decode_stages": Since("0.5.23", lacks="`--pp-size` on decode"),  # earlier versions have not been tried
    "cached_beginnings": Since("0.5.23", lacks="`--enable-hierarchical-cache` on decode"),
    "draft_layouts": Since("0.5.23"),
    "device_pages": Since("0.5.23", lacks="`--enable-hisparse` with DeepSeek V4, and with a drafter that has KV"),
}  # fmt: skip


def check_version(
    adapter: str, package: str, engine: str, versions: tuple[Version, ...], *, all_between: bool = False
) -> None:
    """Raises ImportError, with the found and the supported versions, for an engine that is older or newer than all
    `versions`, or that cannot be imported. Warns of one between them that is not among them, unless `all_between` are
    supported. Of a version only as many numbers count as theirs have."""
    names = [".".join(map(str, version)) for version in versions]
    supported = f"supported are {(' to ' if all_between else ', ').join(names)}"
    try:
        version = str(import_module(package).__version__)
    except ImportError as error:
        raise ImportError(
            f"{adapter} is a part of {engine}'s engines, and {engine} cannot be imported here ({error}): {supported}"
        ) from None
    found = _numbers(version)[: len(versions[0])]
    if not versions[0] <= found <= versions[-1]:
        raise ImportError(f"{adapter}: found {engine} {version}, {supported}")
    if not all_between and found not in versions:
        log.warning("%s: %s %s has not been tested, %s", adapter, engine, version, supported)


def capabilities(engine: str, table: Mapping[str, Since], version: str) -> frozenset[str]:
    """What of this table an engine of this version has: its number decides. Raises ImportError for a missing proof."""
    has = {name: since for name, since in table.items() if _numbers(since.text) <= _numbers(version)}
    for text, proof, _ in has.values():
        module, _, attributes = proof.partition(":")
        try:
            reduce(getattr, attributes.split("."), import_module(module)) if module else None
        except (AttributeError, ModuleNotFoundError) as error:
            raise ImportError(f"{engine} {version}: has no {proof}, which {text} is the first to have") from error
    return frozenset(has)


def _numbers(version: str) -> Version:
    return tuple(int(number) for number in version.split("+", maxsplit=1)[0].split(".") if number.isdigit())
