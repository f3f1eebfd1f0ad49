"""Daemons on two devices answer as one process on one does: layouts, page sizes, chunks, cells, transports, ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.two_gpu.matrix import MATRIX, TEXTS, Case, answered, fleet_of, missing
from tests.support.fleets import Site, running

CASES = MATRIX


async def test_prompts_are_answered_as_by_a_single_process(
    case: Case, devices: tuple[str, str], tmp_path: Path
) -> None:
    if reason := missing(case):
        pytest.skip(reason)

    async def asked(site: Site) -> None:
        await answered(site, case, devices)
        await site.settled()
        m = await site.metrics(site.decode)
        assert m[f"pdtransfer_transport_sessions{{{case.transport}}}"] == case.tp * case.pp
        # Rows for HBM land there where the writer's GPU reaches decode's; elsewhere, and under the eye of a checksum,
        # in the arena first. Whoever has no GPU has no HBM, and nothing to copy.
        lifted = m["pdtransfer_dense_copies_total"], m["pdtransfer_index_copies_total"]
        through_dram = case.sparse and devices[1] != "cpu" and (case.verify or case.transport != "shm")
        assert all(count >= len(TEXTS) for count in lifted) if through_dram else lifted == (0, 0), lifted
        if case.sparse:
            planned = ("preloaded", "index_copied", "dense_copied")
            assert m["pdtransfer_admission_bytes_total"] == sum(m[f"pdtransfer_{each}_bytes_total"] for each in planned)
            assert m["pdtransfer_hot_misses_total"] > 0
        if case.verify:
            assert m["pdtransfer_grants_verified_total"] >= len(TEXTS)
            assert m["pdtransfer_grants_mismatched_total"] == 0

    async with running(tmp_path, **fleet_of(case, devices)) as site:
        await asked(site)
