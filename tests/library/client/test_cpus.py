"""A client's threads do not stay on the core to which an engine's OpenMP runtime has bound the engine's own thread."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from pdtransfer import threads
from pdtransfer.errors import ConfigError
from pdtransfer.threads import AUTO, INHERIT, cpus_of, run_on, started_with
from tests.support.client_pair import Pair, client_pair

ALL = frozenset(os.sched_getaffinity(0))
ONE = frozenset([min(ALL)])

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")


@pytest.fixture
def bound() -> Iterator[None]:
    """This thread is bound to one core, as the main thread of vLLM's workers on CPUs is."""
    os.sched_setaffinity(0, ONE)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ALL)


def cpus_of_threads(pair: Pair) -> set[frozenset[int]]:
    """The CPUs of the clients' own threads, and of those that they have started."""
    names = {each.native_id for each in threading.enumerate() if each.name.startswith("pdtransfer")}
    assert len(names) >= 2, "a thread for each client at least"
    return {frozenset(os.sched_getaffinity(name)) for name in names if name is not None}


@pytest.mark.parametrize(("cpus", "wanted"), [(AUTO, ALL), (INHERIT, ONE), (str(max(ALL)), frozenset([max(ALL)]))])
def test_the_threads_of_a_client_run_where_its_settings_put_them(
    bound: None, monkeypatch: pytest.MonkeyPatch, cpus: str, wanted: frozenset[int]
) -> None:
    monkeypatch.setattr("tests.support.client_pair.CPUS", cpus)
    with client_pair() as pair:
        pair.moved(1, 16)
        assert cpus_of_threads(pair) == {wanted}
    assert os.sched_getaffinity(0) == ONE, "the engine's own thread stays where it is"


def test_what_a_program_was_started_with_is_known_in_the_process_that_it_spawns() -> None:
    """The child was bound before it imported anything of ours, and has no other thread."""
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    os.sched_setaffinity(0, ONE)
    try:  # a child inherits the core; its parent's main thread then has the rest again
        child = multiprocessing.get_context("spawn").Process(target=_send_cpus, args=(sender, ALL))
        child.start()
    finally:
        os.sched_setaffinity(0, ALL)
    assert receiver.recv() == (ONE, ALL)
    child.join()


def _send_cpus(pipe: Connection, wanted: frozenset[int]) -> None:
    while os.sched_getaffinity(os.getppid()) != wanted:
        time.sleep(0.01)
    pipe.send((frozenset(os.sched_getaffinity(0)), started_with()))


def test_no_cpu_is_added_that_taskset_took_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads of the program have the same one, as has whoever started it."""
    monkeypatch.setattr(threads, "_AT_IMPORT", ONE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ONE))
    assert started_with() == ONE


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0-2", {0, 1, 2}), ("0,2-3", {0, 2, 3}), (INHERIT, None), (AUTO, set(ALL))]
)
def test_cpus_are_named_as_taskset_names_them(text: str, cpus: set[int] | None) -> None:
    assert cpus_of(text) == (None if cpus is None else frozenset(cpus))


@pytest.mark.parametrize("text", ["", "all", "1-", "-1", "0;1", "3-1", "0-99999999999", "1,,2"])
def test_other_texts_are_refused_with_the_name_of_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="client_cpus = "):
        cpus_of(text, named="client_cpus")


def test_cpus_that_the_host_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpus = \[4095\]"):
        run_on(frozenset([4095]))
    run_on(None)
    assert frozenset(os.sched_getaffinity(0)) == ALL
