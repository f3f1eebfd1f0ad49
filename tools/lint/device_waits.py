"""No engine and no writer waits for a whole GPU: every wait inside the driver has its reason in a table here."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from .sources import Source

# What waits for all that a GPU does, whoever has queued it: always, or where the driver takes its memory apart.
DEVICE_WIDE = {
    "synchronize": "torch.cuda's, unless it is a stream's or an event's own",
    "empty_cache": "torch.cuda's: it frees, and that waits",
    "graph": "torch.cuda.graph() synchronises the device before it captures; capture_begin does not",
    "cuCtxSynchronize": "the driver's",
    "cuDeviceSynchronize": "the runtime's",
    "cudaDeviceSynchronize": "the runtime's",
    "cuMemFree": "waits for the GPU",
    "cuMemsetD8": "on stream 0, behind all that torch has queued there",
    "cuMemcpyHtoD": "as well",
    "cuMemcpyDtoH": "as well",
    "cuMemAlloc": "work on either side of it may not run at once",
    "cuMemHostAlloc": "as well",
    "cuMemFreeHost": "may wait",
    "cuMemHostRegister": "nobody says that it does not",
    "cuMemHostUnregister": "nobody says that it does not",
    "cuIpcOpenMemHandle": "nobody says that it does not",
    "cuIpcCloseMemHandle": "nobody says that it does not",
    "cuModuleLoadData": "code is copied to the GPU, which may wait",
    # GPU's own, by what they call
    "Gpu.finish": "cuCtxSynchronize",
    "Gpu.free": "cuMemFree, without a stream",
    "Gpu.allocate": "cuMemAlloc, without a stream",
    "Gpu.synchronise": "of stream 0: for all that torch has queued there",
    "Gpu.pinned": "cuMemHostAlloc",
    "Gpu.host_register": "cuMemHostRegister",
    "Gpu.host_unregister": "cuMemHostUnregister",
    "Gpu.ipc_open": "cuIpcOpenMemHandle",
    "Gpu.ipc_close": "cuIpcCloseMemHandle",
}
_GPUS = {"gpu", "here", "gpu_at", "_gpu", "_here"}  # what a GPU is called
_SHELL = "a GPU's own, for those below"
_START = "before anybody is served"
_GROWS = "the first time, and each time that twice as much is needed"
_APART = "a session comes or goes: in a thread beside the writer's loop, or at a start or an end"
_ENGINES = "in a process of engines, which has a context of its own"
MAY_WAIT_FOR_A_WHOLE_DEVICE = {
    ("kernels.gpu.Gpu.finish", "cuCtxSynchronize"): _SHELL,
    ("kernels.gpu.Gpu.allocate", "cuMemAlloc"): _SHELL,
    ("kernels.gpu.Gpu.free", "cuMemFree"): _SHELL,
    ("kernels.gpu.Gpu._pinned", "cuMemHostAlloc"): _SHELL,
    ("kernels.gpu.Gpu.host_register", "cuMemHostRegister"): _SHELL,
    ("kernels.gpu.Gpu.host_register", "cuMemHostUnregister"): "where it has failed",
    ("kernels.gpu.Gpu.host_unregister", "cuMemHostUnregister"): _SHELL,
    ("kernels.gpu.Gpu.ipc_open", "cuIpcOpenMemHandle"): _SHELL,
    ("kernels.gpu.Gpu.ipc_close", "cuIpcCloseMemHandle"): _SHELL,
    ("kernels.gpu.Gpu.load", "cuModuleLoadData"): "a kernel's first use, of most before anybody is served",
    (
        "transports.gpu_launcher.GpuLauncher.drain",
        "Gpu.finish",
    ): "a launch of which nobody knows any more if it was made",
    ("transports.gpu_launcher.GpuLauncher.try_out", "Gpu.allocate"): _START,
    ("transports.engines.card.CudaCard.open", "cuIpcCloseMemHandle"): _ENGINES,
    ("transports.engines.card_probe.main", "Gpu.allocate"): _ENGINES,
    ("transports.gpu_launcher.GpuLauncher.try_out", "Gpu.free"): _START,
    ("adapters.kit.cache_memory.made_in_one_piece", "empty_cache"): _START,
    ("memory.hbm.Hbm.of_gpu", "Gpu.allocate"): _START,
    ("memory.hbm.Hbm.of_gpu", "Gpu.free"): "at the end",
    ("hisparse.hot_tables.HotTables.__init__", "Gpu.pinned"): _START,
    ("kernels.pools.Progress.__init__", "Gpu.allocate"): _START,
    ("kernels.pools.Progress.__init__", "Gpu.pinned"): _START,
    ("kernels.pools.PinnedCancel.__init__", "Gpu.pinned"): "one in a thousand pins memory; words are used again",
    ("kernels.ring.lanes.StagingRing.slots", "Gpu.allocate"): "a ring's first use",
    ("kernels.staging.Staging.put", "Gpu.allocate"): _GROWS,
    ("kernels.staging.Staging.put", "Gpu.pinned"): _GROWS,
    ("transports.gpu_launcher.GpuLauncher.fetch", "Gpu.pinned"): _GROWS,
    ("transports.gpu_launcher.WriterGpu.host_register", "Gpu.host_register"): _APART,
    ("transports.gpu_launcher.WriterGpu.host_unregister", "Gpu.host_unregister"): _APART,
    ("kernels.registered.RegisteredMemory.add", "Gpu.host_register"): _APART,
    ("kernels.registered.RegisteredMemory.close", "Gpu.host_unregister"): _APART,
    ("memory.cuda_ipc._take", "Gpu.ipc_open"): _APART,
    ("memory.cuda_ipc._release", "Gpu.ipc_close"): _APART,
}

# A wait for one stream inside the driver, which may hold up who asks it for an event; others sleep until theirs fires.
WAITS_FOR_A_STREAM = {
    "kernels.gpu.DeviceTables.acquire": "for an upload of some KiB, on a stream of its own",
    "kernels.gpu.Gpu.clear": "at the start",
    "kernels.ring.lanes.StagingRing.run": "where a launch has failed",
    "transports.gpu_launcher.GpuLauncher.fetch": "where every byte is read back to be summed",
    "transports.gpu_launcher.GpuLauncher.try_out": "at the start",
}

# Copies from and to pageable memory, inside of which torch waits for the stream, and whoever asks the driver meanwhile
# may wait as well: an engine sends by `upload`, and fetches by `Download`.
WAITS_INSIDE_THE_DRIVER = {
    ("pdtransfer_lab.models.cache.Cache.digests", "cpu"): "once a request, when it has ended",
    ("serve.engines.transformers.checkpoint._load", "to"): "at the start",
    ("serve.engines.transformers.checkpoint.placed", "to"): "at the start",
    ("serve.engines.transformers.checkpoint._digest", "cpu"): "at the start",
    ("serve.engines.transformers.factory._prove", "tensor"): "at the start",
    ("serve.engines.shell.torch_memory.TensorPool.__init__", "synchronize"): "at the start",
    ("pdtransfer_lab.models.indexer.IndexCache.digest", "cpu"): "once a request, when it has ended",
    ("pdtransfer_lab.models.indexer.IndexCache.__init__", "to"): "at the start",
    ("pdtransfer_lab.models.architecture.Weights.draw.normal", "as_tensor"): "at the start",
    ("hisparse.hot_step.HotStep.__init__", "to"): "at the start",
    ("pdtransfer_lab.models.numerics.Rope.__init__", "to"): "at the start",
    ("pdtransfer_lab.models.numerics.first_product", "synchronize"): "at the start",
    (
        "hisparse.hot_pool.HotPool.counters",
        "cpu",
    ): "when a request has ended, and every few steps, after all that they queue",
    ("kernels.stream.DeviceSpans.anchor", "synchronize"): "while the device has nothing to do",
    ("kernels.plane_views.device_tensor", "as_tensor"): "nothing is copied: it is the GPU's already",
}
# Where an engine sends and fetches tensors.
OF_ENGINES = (
    "pdtransfer_lab.models.",
    "pdtransfer.hisparse.hot_",
    "pdtransfer.kernels.stream",
    "pdtransfer.kernels.plane",
    "pdtransfer.serve.engines.shell.",
    "pdtransfer.serve.engines.transformers.",
)

# What runs on a loop. It asks events (`query`); whoever waits for a GPU has a thread of its own.
ON_THE_LOOP = re.compile(
    r"pdtransfer\.(client|handoff|bus|serve\.worker\.(service|router_link)|transports\.(device_events|select|shm|engines))\b"
)


def waits_for_a_device(node: ast.AST) -> str:
    """The name in DEVICE_WIDE of what is called, or named to the driver; empty for anything else."""
    name = ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = _called(node, node.func)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cu"):
        name = node.value
    return name if name in DEVICE_WIDE else ""


def _called(call: ast.Call, called: ast.Attribute) -> str:
    """As DEVICE_WIDE has it."""
    of = called.value.func if isinstance(called.value, ast.Call) else called.value
    owner = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    if owner == "cuda" or called.attr.startswith("cu"):
        return called.attr
    streams = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "stream")]
    if owner not in _GPUS or (called.attr in ("free", "allocate") and streams):
        return ""
    if called.attr == "synchronise" and ast.unparse(call.args[0]) != "0":
        return ""
    return f"Gpu.{called.attr}"


def waits_for_a_stream(node: ast.AST) -> str:
    is_wait = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "synchronise"
    return "synchronise" if is_wait else ""


def crosses_pageable(node: ast.AST) -> str:
    """How a tensor crosses in such a way, or empty."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return ""
    name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
    moves = "device" in keywords or any(ast.unparse(argument).endswith("device") for argument in node.args)
    sends = name in ("to", "tensor", "as_tensor") and moves and "non_blocking" not in keywords
    return name if sends or name in ("cpu", "item", "synchronize") else ""


def _complaints(
    files: Iterable[Source], wait: Callable[[ast.AST], str], reasons: Mapping[tuple[str, str], str], rule: str
) -> Iterator[str]:
    """Each wait without a reason, and each reason of which there is no wait any more."""
    seen: set[tuple[str, str]] = set()
    for source in files:
        for scope, node in source.scoped(ast.Call, ast.Constant):
            if name := wait(node):
                where = (source.module.removeprefix("pdtransfer.") + scope, name)
                seen.add(where)
                if where not in reasons:
                    yield source.complaint(node, f"{rule}: {name} in {where[0]}")
    for where in reasons.keys() - seen:
        yield f"tools/lint/device_waits.py:1: {where} does not wait any more"


def device_wide(files: Iterable[Source]) -> Iterator[str]:
    """A step, a push and a copy up wait for what they have queued, and for nobody else's work. Benches may."""
    served = (source for source in files if not source.module.startswith("pdtransfer_lab.bench"))
    yield from _complaints(served, waits_for_a_device, MAY_WAIT_FOR_A_WHOLE_DEVICE, "waits for a whole device")


def streams(files: Iterable[Source]) -> Iterator[str]:
    """Who waits for a stream asks its events."""
    served = (source for source in files if not source.module.startswith("pdtransfer_lab.bench"))
    reasons = {(where, "synchronise"): reason for where, reason in WAITS_FOR_A_STREAM.items()}
    yield from _complaints(served, waits_for_a_stream, reasons, "waits for a stream inside the driver")


def engines(files: Iterable[Source]) -> Iterator[str]:
    """An engine waits for its GPU by asking it."""
    engines = (source for source in files if source.module.startswith(OF_ENGINES))
    yield from _complaints(engines, crosses_pageable, WAITS_INSIDE_THE_DRIVER, "waits inside the driver")


def loops(files: Iterable[Source]) -> Iterator[str]:
    """What runs on the loop waits for no GPU."""
    for source in files:
        if ON_THE_LOOP.match(source.module):
            for node in source.nodes(ast.Attribute):
                if node.attr in {"synchronise", "synchronize", "cuEventSynchronize"}:
                    yield source.complaint(node, "what runs on the loop waits for no GPU")
