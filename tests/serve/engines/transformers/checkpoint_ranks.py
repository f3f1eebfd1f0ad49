"""Tensor-parallel ranks of a checkpoint as threads of this process, and the hand-off between two such workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdtransfer.layout.layout import slots_of_rows
from pdtransfer.serve.engine_api import Computed, Prefilled, Request, Token
from pdtransfer.serve.engines.transformers import create
from tests.support.checkpoints import components_of, config, move
from tests.support.engine_group import Threads, together


def workers(directory: Path, role: str, tp: int, **more: Any) -> list[Any]:
    """The engines of all ranks of one worker."""
    groups = Threads(tp=tp).groups()
    return together([lambda group=group: create(config(directory, role, group=group, **more)) for group in groups])


def computed(engine: Any, requests: list[Request]) -> tuple[dict[int, bytes], list[Computed]]:
    """What a prefill rank makes of all these prompts at once: the aux of each room, and its cells."""
    aux, cells = {}, []
    assert all(engine.admit(request) for request in requests)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Prefilled):
                aux[event.room] = event.aux
            else:
                assert isinstance(event, Computed), event
                cells.append(event)
    return aux, cells


def decoded(engine: Any) -> dict[int, list[int]]:
    """What a decode rank generates, by room."""
    tokens: dict[int, list[int]] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Token):
                tokens.setdefault(event.room, []).append(event.id)
    return tokens


def generated_by_ranks(sources: list[Any], targets: list[Any], requests: list[Request]) -> list[dict[int, list[int]]]:
    """The tokens of each decode rank. Its arena has its own rows, from whichever prefill rank has them."""
    made = together([lambda engine=engine: computed(engine, requests) for engine in sources])
    assert all(aux == made[0][0] for aux, _ in made), "every rank picks the same first token"
    kept = []
    for target in targets:
        sizes = {"dram": target.description.memory_bytes, "hbm": target.description.hbm_bytes}
        arena = {name: np.full(size, 0xFF, np.uint8) for name, size in sizes.items()}
        target.attach(memoryview(arena["dram"]), hbm=memoryview(arena["hbm"]) if sizes["hbm"] else None)
        kept.append(arena)  # it outlives its engine's steps
        random = np.random.default_rng(3)
        free = {
            (component.name, component.memory): random.permutation(component.layout.slots).tolist()
            for component in target.description.components
        }
        for request in requests:
            tokens = len(request.prompt) + request.sampling.max_tokens
            own = components_of(target.description, request)
            slots = {
                name: np.array([free[name, each.memory].pop() for _ in range(each.rows(tokens))], np.int64)
                for name, each in own.items()
            }
            for engine, (_, cells) in zip(sources, made, strict=True):
                ours = {component.name: component.layout for component in engine.description.components}
                memory = np.frombuffer(engine.pool.view, np.uint8)
                for cell in cells:
                    if cell.room == request.room:
                        source = ours[cell.component]
                        held = slots_of_rows(cell.pages, source.page_size, cell.rows, skip=cell.skip)
                        place = slots[cell.component][cell.rows[0] : cell.rows[1]]
                        there = own[cell.component]
                        move((memory, source), held, (arena[there.memory], there.layout), place, cell.layers)
            target.admit(request, slots, made[0][0][request.room])
    for engine in sources:
        for request in requests:
            engine.free(request.room)
    return together([lambda engine=engine: decoded(engine) for engine in targets])


def generated_from_rests(targets: list[Any], first: Request, further: list[int]) -> list[list[int]]:
    """The tokens of each decode rank of a prompt that no prefill computes, and of the next turn, behind its rows."""
    tokens = list[list[int]]()
    arenas = [np.full(target.description.memory_bytes, 0xFF, np.uint8) for target in targets]
    slots = np.random.default_rng(3).permutation(targets[0].description.components[0].layout.slots)
    for target, arena in zip(targets, arenas, strict=True):
        target.attach(memoryview(arena))
        own = slots[: len(first.prompt) + first.sampling.max_tokens]
        target.admit_rest(first, {component.name: own for component in target.description.components}, 0)
    answers = [ranks[first.room] for ranks in together([lambda engine=engine: decoded(engine) for engine in targets])]
    tokens += answers
    done = np.concatenate((first.prompt, answers[0][:-1]))
    turn = replace(first, room=first.room + 1, prompt=np.concatenate((done, answers[0][-1:], further)))
    for target in targets:
        own = np.concatenate((slots[: len(done)], slots[-len(turn.prompt) - turn.sampling.max_tokens + len(done) :]))
        target.admit_rest(turn, {component.name: own for component in target.description.components}, len(done))
    return tokens + [
        ranks[turn.room] for ranks in together([lambda engine=engine: decoded(engine) for engine in targets])
    ]
