"""What the deep model and its pushes are on a GPU: the textbook's numbers, and no byte before its producer's event."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pdtransfer_lab.models.deep import create

from pdtransfer.kernels import driver
from pdtransfer.serve.tracing.spans import Timeline
from tests.lab.models.deep_model import OPTIONS, kv_of, model_of, near, textbook
from tests.support.client_pair import Expected, client_pair, slots_of_pages
from tests.support.engine_pair import config, heads_of, places, prompts, request
from tests.support.late_producer import STALE, layer_bytes
from tests.support.layout_tensors import mla

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_prompts_of_one_length_go_by_graphs_and_each_has_its_own_rows(attention: str) -> None:
    """The second of a row count is captured, the third replayed; two at a time share what graphs read."""
    timeline = Timeline("prefill")
    engine = create(config(attention=attention, options=OPTIONS[attention], device="cuda", slots=4_096, spans=timeline))
    engine.model.flat.fill_(float("nan"))
    rooms = [request(index, prompt) for index, prompt in enumerate(prompts(3, (200, 230, 250, 250, 256, 193)))]
    pages: dict[int, np.ndarray] = {}
    for together in (rooms[:1], rooms[1:2], rooms[2:4], rooms[4:]):
        for one in together:
            assert engine.admit(one)
        while not engine.idle:
            for latest in engine.step():
                if hasattr(latest, "pages"):
                    pages[latest.room] = latest.pages
    model, memory = model_of(engine), engine.model.flat.cpu().numpy()
    assert list(model._graphs._sizes._kept) == [256]
    for one in rooms:
        wanted, _ = textbook(model, one.prompt)
        slots = slots_of_pages(pages[one.room], 16, len(one.prompt))
        found = kv_of(memory, engine.description.components[0].layout, slots)
        for key, rows in wanted.items():
            near(found[key].cuda(), rows)
    own = np.ones(len(memory), bool)  # no padding row is written anywhere
    layout = engine.description.components[0].layout
    for one in rooms:
        for each in heads_of(layout):
            own[places(layout, *each, slots_of_pages(pages[one.room], 16, len(one.prompt)))] = False
    assert np.isnan(memory[own]).all()
    for one in rooms:
        engine.free(one.room)
    while not engine.idle:
        engine.step()
    recorded = timeline.take()
    assert {(span.room, span.layer) for span in recorded} >= {(room, layer) for room in range(6) for layer in range(3)}
    assert all(span.seconds >= 0 for span in recorded)


@pytest.mark.parametrize("chunk_tokens", [512, 128])
@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_a_cards_pool_holds_the_textbooks_rows_in_one_chunk_and_in_many(attention: str, chunk_tokens: int) -> None:
    engine = create(
        config(attention=attention, options=OPTIONS[attention], device="cuda", chunk_tokens=chunk_tokens, slots=1_024)
    )
    engine.model.flat.fill_(float("nan"))
    one = request(1, prompts(0, (500,))[0])
    assert engine.admit(one)
    pages = [
        latest.pages for _ in range(64) if not engine.idle for latest in engine.step() if hasattr(latest, "pages")
    ][-1]
    wanted, _ = textbook(model_of(engine), one.prompt)
    found = kv_of(
        engine.model.flat.cpu().numpy(), engine.description.components[0].layout, slots_of_pages(pages, 16, 500)
    )
    for key, rows in wanted.items():
        near(found[key].cuda(), rows)


@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_prompts_are_admitted_and_computed_without_a_wait_inside_the_driver(attention: str) -> None:
    engine = create(config(attention=attention, options=OPTIONS[attention], device="cuda", slots=4_096))
    engine.warm_up()
    for index, prompt in enumerate(
        prompts(3, (200, 230, 250, 500))
    ):  # kernel by kernel, captured, replayed, and longer
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        try:
            assert engine.admit(request(index, prompt))
            while not engine.idle:
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_layer_that_is_late_is_not_sent_before_it_is_written() -> None:
    """A kernel keeps the compute stream busy for long after the push was asked for; the rows are written behind it."""
    model = mla(layers=range(4))
    with client_pair(model=model) as plain:
        size = len(plain.source.memory)
    held = torch.full((size,), STALE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with client_pair(model=model, held=held) as pair:
        right = torch.from_numpy(pair.source.memory).cuda()
        rows = [torch.from_numpy(np.flatnonzero(layer_bytes(pair, layer))).cuda() for layer in range(4)]
        torch.cuda.synchronize()
        for room in (1, 2, 3):  # the first may have to wait for other things as well
            held.fill_(STALE)
            torch.cuda.synchronize()
            pages = pair.pages(room, 200)
            pair.expect(room, 200)
            pair.prefill.open(room, tokens=200)
            events = []
            for layer in range(4):
                torch.cuda._sleep(200_000_000)  # some 0.1 s
                held.index_copy_(0, rows[layer], right[rows[layer]])
                events.append(torch.cuda.Event())
                events[-1].record()
                pair.prefill.push(room, pages, rows=(0, 200), layers=(layer, layer + 1), after=events[-1])
            assert not events[0].query(), "the producer was not late"
            pair.prefill.finish(room, after=events[-1])
            ready = pair.ready(room)
            expected = Expected(pair.target)
            expected.land(slots_of_pages(pages, 16, 200), ready.slots["kv"])
            slots = ready.slots["kv"][:200]
            for number in range(4):
                places = pair.target.layout.address(number, slots)[:, None] + np.arange(1_152)
                assert np.array_equal(pair.arena[places], expected.pool.memory[places]), (room, number)
            pair.decode.release(room)
