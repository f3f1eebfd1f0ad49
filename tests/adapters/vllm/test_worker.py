"""A worker's side with real clients on either end, and numpy arrays in place of vLLM's KV caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pdtransfer.adapters.heads import Heads
from pdtransfer.adapters.vllm import figures, worker
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Refuse, Rows
from pdtransfer.adapters.vllm.pools import Pools, pools
from pdtransfer.adapters.vllm.worker import Results, WorkerSide
from pdtransfer.client import ArenaMemory, DecodeClient, NodeSettings, PrefillClient, WriterOptions, room_id
from pdtransfer.handoff import cell_sizes
from pdtransfer.wire import Ranks
from tests.support.client_pair import LIMITS, Late
from tests.support.waiting import wait_for

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 16, 2, 16, 8
SHAPE = LAYERS, BLOCKS, HEADS, TOKENS, WIDTH
NAMES = [f"model.layers.{at}.attn" for at in range(LAYERS)]


def described(cache: np.ndarray, base: int) -> Pools:
    """A component of the cache: float32 (layers, blocks, heads, tokens, width)."""
    views = dict(zip(NAMES, torch.from_numpy(cache), strict=True))
    return pools(views, [(KVGroup(0, TOKENS), NAMES)], blocks=BLOCKS, base=base, heads=Heads(HEADS, Ranks()))


class Site:
    """Prefill's and decode's worker, and both KV caches."""

    def __init__(self, source: np.ndarray, target: np.ndarray, prefill: PrefillClient, decode: DecodeClient) -> None:
        self.source, self.target = source, target
        made = described(source, source.ctypes.data)

        def side(**client: Any) -> WorkerSide:
            return WorkerSide(
                pools=made, time_left_s=20.0, **{"prefill": None, "decode": None} | client
            )  # fmt: skip

        self.prefill, self.decode = side(prefill=prefill), side(decode=decode)
        self.endpoint, self.client = prefill.endpoint, prefill
        self.sent, self.received = Results(), Results()
        self.figures = figures.empty()

    def receive(self, name: str, label: str, tokens: int, blocks: list[int], **more: Any) -> Receive:
        return Receive(
            name, room_id(label), (self.endpoint,), tokens, **{"prefix": 0, "slots": (tuple(blocks),)} | more
        )

    def send(
        self, name: str, label: str, tokens: int, blocks: list[int], after: Callable[[], Any] = lambda: None
    ) -> None:
        """One step that computes a whole prompt, and reports all layers but the last."""
        orders = Orders(
            opens=[Open(name, label, tokens)],
            chunks=[Chunk(name, (Rows(0, 0, len(blocks), tuple(blocks)),), last=True)],
        )
        self.prefill.quiesce(orders)
        self.prefill.begin(orders)
        for layer in NAMES[:-1]:
            self.prefill.save(layer, after)
        self.prefill.end(after)

    def poll(self, finished: tuple[str, ...] = ()) -> None:
        for side, seen in ((self.prefill, self.sent), (self.decode, self.received)):
            found = side.results(finished)
            assert not seen.sent & found.sent
            assert not seen.received & found.received
            seen.sent |= found.sent
            seen.received |= found.received
            seen.failed |= found.failed
            seen.failed_blocks |= found.failed_blocks
            if (data := side.take_figures()) is not None:
                figures.add(self.figures, data)

    def until(self, condition: Callable[[], object]) -> None:
        def polled() -> object:
            self.poll()
            return condition()

        wait_for(polled)


class LateEvents:
    """Makes events, which fire when the test says so."""

    def __init__(self) -> None:
        self.made: list[Late] = []

    def make(self) -> Late:
        self.made.append(Late())
        return self.made[-1]


@pytest.fixture
def site() -> Iterator[Site]:
    with made_site() as made:
        yield made


@contextmanager
def made_site() -> Iterator[Site]:
    source = np.random.default_rng(1).random(SHAPE, np.float32)
    arena = ArenaMemory.create(source.nbytes)
    target = np.frombuffer(arena.mapping.view, np.float32, source.size).reshape(SHAPE)
    options: dict[str, Any] = {"model": "m", "weights": b"w", "limits": LIMITS}
    made = described(source, source.ctypes.data)
    prefill = PrefillClient(
        NodeSettings(node="p", **options), made.components, writer=WriterOptions(pool_address=source.ctypes.data)
    )
    landing = described(target, arena.mapping.address)
    decode = DecodeClient(
        NodeSettings(node="d", **options), landing.components, arena, engine_slots=True, prefix_cache=False, verify=True
    )
    with prefill, decode:
        yield Site(source, target, prefill, decode)


def test_blocks_land_where_decode_wants_them(site: Site) -> None:
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    site.send("p", "room", 40, [7, 3, 5])
    site.until(lambda: site.received.received)
    assert (site.received.received, site.received.failed) == ({"d"}, set())
    assert np.array_equal(site.target[:, [4, 9, 2]], site.source[:, [7, 3, 5]])
    assert not site.target[:, [block for block in range(BLOCKS) if block not in (4, 9, 2)]].any()
    site.poll(("p", "another"))
    site.until(lambda: site.sent.sent == {"p"})
    byte_count = site.source[:, :3].nbytes
    assert site.figures["rooms"] == {"sent": 1, "received": 1}
    assert site.figures["bytes"] == {"sent": byte_count, "received": byte_count}
    assert len(site.figures["seconds"]) == 1
    assert figures.summary(site.figures)["rooms received"] == 1


def test_a_request_is_not_reported_before_it_has_ended(site: Site) -> None:
    """vLLM asserts that a request whose sending is finished has finished itself."""
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    site.send("p", "room", 40, [7, 3, 5])
    site.until(lambda: site.received.received)
    time.sleep(0.1)
    site.poll()
    assert site.sent.sent == set()
    site.poll(("p",))
    assert site.sent.sent == {"p"}
    site.poll(("p",))


def test_every_layer_of_a_large_chunk_waits_for_its_own_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_sizes, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(worker, "CELL_BYTES_MIN", 1)
    events = LateEvents()
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    site.send("p", "room", 40, [7, 3, 5], events.make)
    assert len(events.made) == LAYERS, "two by their names, and what was not reported with the end of the step"
    for event in events.made[:-1]:
        event.fired = True
    wait_for(lambda: np.array_equal(site.target[:2, [4, 9, 2]], site.source[:2, [7, 3, 5]]))
    site.poll()
    assert not site.received.received
    events.made[-1].fired = True
    site.until(lambda: site.received.received)
    assert np.array_equal(site.target[:, [4, 9, 2]], site.source[:, [7, 3, 5]])


def test_layers_of_a_small_chunk_leave_together(site: Site) -> None:
    events = LateEvents()
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    site.send("p", "room", 40, [7, 3, 5], events.make)
    assert len(events.made) == 1, "an event of the last layer alone"
    time.sleep(0.05)
    assert not site.target.any()
    events.made[0].fired = True
    site.until(lambda: site.received.received)
    assert np.array_equal(site.target[:, [4, 9, 2]], site.source[:, [7, 3, 5]])


def test_a_layer_that_was_left_out_leaves_by_itself(site: Site) -> None:
    """What is reported in another order, or late, is pushed once all the same."""
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    orders = Orders(
        opens=[Open("p", "room", 40)], chunks=[Chunk("p", (Rows(0, 0, 3, (7, 3, 5)),), last=True)],
    )  # fmt: skip
    site.prefill.begin(orders)
    for at in (2, 0, 2):
        site.prefill.save(NAMES[at], lambda: None)
    site.prefill.end(lambda: None)
    site.until(lambda: site.received.received)
    assert np.array_equal(site.target[:, [4, 9, 2]], site.source[:, [7, 3, 5]])


def test_rows_that_decode_has_do_not_cross(site: Site) -> None:
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2], prefix=16)]))
    site.send("p", "room", 40, [7, 3, 5])
    site.until(lambda: site.received.received)
    assert not site.target[:, 4].any()
    assert np.array_equal(site.target[:, [9, 2]], site.source[:, [3, 5]])


def test_a_request_that_needs_nothing_frees_prefill_and_is_never_reported(site: Site) -> None:
    site.send("p", "room", 40, [7, 3, 5])
    site.poll(("p",))
    time.sleep(0.1)
    site.poll()
    assert not site.sent.sent
    orders = Orders(receives=[site.receive("d", "room", 40, [-1, -1, -1], prefix=40, awaited=False)])
    site.decode.begin(orders)
    site.until(lambda: site.sent.sent == {"p"})
    site.until(lambda: site.figures["rooms"].get("received") == 1)
    assert site.received == Results()


def test_decode_that_gives_up_is_reported_once_and_has_not_failed(site: Site) -> None:
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    site.decode.begin(Orders(aborts=["d", "unknown"]))
    site.until(lambda: site.received.received == {"d"})
    assert not site.received.failed
    site.decode.begin(Orders(aborts=["d"]))
    site.poll()


def test_a_notice_of_a_label_that_was_asked_for_is_no_failure(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves has vLLM abort its request, and then notify the connector of it once more."""
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    notice = site.receive("another", "room", 1, [-1], prefix=1, awaited=False)
    site.decode.begin(Orders(aborts=["d"], receives=[notice]))
    site.until(lambda: site.received.received)
    assert site.received == Results(received={"d"})
    assert site.figures["causes"] == {"aborted": 1}
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_prefill_that_gives_up_fails_decodes_load(site: Site) -> None:
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [-1, 4, 2])]))
    site.prefill.begin(Orders(opens=[Open("p", "room", 40)]))
    site.prefill.end(lambda: None)
    site.prefill.begin(Orders(aborts=["p"]))
    site.poll(("p",))
    site.until(lambda: site.received.received == {"d"} and site.sent.sent == {"p"})
    assert (site.received.failed, site.received.failed_blocks) == ({"d"}, {4, 2})
    assert site.figures["causes"] == {"aborted": 2}


def test_a_refused_load_fails_at_once(site: Site) -> None:
    wrong = site.receive("twice", "room", 40, [4, 4, 2])
    site.decode.begin(Orders(refusals=[Refuse("d", (1, 2))], receives=[wrong]))
    site.poll()
    assert site.received.received == site.received.failed == {"d", "twice"}
    assert site.received.failed_blocks == {1, 2, 4}
    assert site.figures["causes"] == {"refused": 2}


def test_a_label_that_was_used_hands_nothing_over_and_keeps_no_block(site: Site) -> None:
    site.send("p", "room", 40, [7, 3, 5])
    site.send("q", "room", 40, [1, 2, 4])
    site.poll(("q",))
    assert site.sent.sent == {"q"}


def test_quiesce_returns_once_nothing_reads_the_blocks(site: Site) -> None:
    late, later = Late(), Late()
    site.decode.begin(Orders(receives=[site.receive("d", "room", 40, [4, 9, 2])]))
    site.send("p", "room", 40, [7, 3, 5], lambda: late)
    site.prefill.quiesce(Orders(quiesce=["p", "unknown"]))
    site.send("p", "another", 40, [7, 3, 5], lambda: later)  # the request comes back, in a room of its own
    site.poll(("p",))
    site.until(lambda: site.received.failed == {"d"})
    assert not site.sent.sent, "of the first room vLLM has the blocks, of the second it has not"
    site.decode.begin(Orders(receives=[site.receive("e", "another", 40, [1, 3, 6])]))
    later.fired = True
    site.until(lambda: "e" in site.received.received and site.sent.sent == {"p"})
    assert site.received.failed == {"d"}


def test_figures_of_ranks_and_intervals_add_up() -> None:
    one, two = figures.empty(), figures.empty()
    figures.count(one, "rooms", "sent")
    figures.count(two, "rooms", "sent", 2)
    figures.count(two, "causes", "deadline")
    two["seconds"] = [0.25] * figures.SECONDS_MAX
    one["seconds"] = [0.5]
    figures.add(one, two)
    assert (one["rooms"], one["causes"]) == ({"sent": 3}, {"deadline": 1})
    assert len(one["seconds"]) == figures.SECONDS_MAX
    assert figures.summary(one) == {"rooms sent": 3, "p50 transfer ms": 250.0, "max transfer ms": 500.0}
    assert figures.is_empty(figures.empty())
    assert not figures.is_empty(one)
