"""What finding the graph of a batch costs: hits and misses, with all that narrows the choice.

    python3 -m benchmarks.dispatch [--graphs 86 430 860] [--rounds 25] [--json FILE]

Each row is the least of many rounds, in microseconds a call above a call of an empty function. A
round calls with 64 different batches, once before; "first time" rows with 2,048, more than are
remembered. Half of the graphs are PIECEWISE and half FULL; "arbitrary" are graphs whose numbers are
drawn at random, and "many kinds" such that have a bound of their own each, so that no table is used
twice. The first row is the machine's own speed: a look into a dict.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import environment, finish, show
from graphrt import Batch, BatchDescriptor, GraphDispatcher, GraphMode

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE
BATCHES, MANY = 64, 2048
Case = tuple[Callable[[Batch], object], list[Batch]]
"""What is called, and with which batches."""


def dispatcher_of(
    keys: Iterable[tuple[GraphMode, BatchDescriptor]], max_padding: float | None = None
) -> GraphDispatcher:
    dispatcher = GraphDispatcher("FULL_AND_PIECEWISE", max_padding=max_padding)
    for key in keys:
        dispatcher.publish(*key)
    return dispatcher


def ladder(graphs: int, kinds: tuple[dict[str, Any], ...]) -> tuple[GraphDispatcher, int]:
    """A dispatcher of so many graphs in all, of each kind equally many; and its largest size."""
    sizes = [8 * step for step in range(1, graphs // 2 // len(kinds) + 1)]

    def keys() -> Iterator[tuple[GraphMode, BatchDescriptor]]:
        for kind in kinds:
            for size in sizes:
                yield PIECEWISE, BatchDescriptor(size, **kind)
                yield FULL, BatchDescriptor(size, size, uniform=True, query_len=1, **kind)

    return dispatcher_of(keys()), sizes[-1]


def decode(low: int, high: int, count: int = BATCHES, **numbers: Any) -> list[Batch]:
    """Decode batches of `low` to `high` tokens."""
    drawn = random.Random(1)
    sizes = [drawn.randint(low, high) for _ in range(count)]
    return [Batch(size, size, 1, **numbers) for size in sizes]


def growing(batches: list[Batch], low: int) -> list[Batch]:
    """The same with a longest context that grows from batch to batch."""
    return [batch._replace(bounds=(low + step,)) for step, batch in enumerate(batches)]


def limited_cases(graphs: int) -> dict[str, Case]:
    dispatcher, most = ladder(graphs, ({},))
    dispatch = dispatcher.dispatch
    inside, above = decode(1, most), decode(most + 1, 2 * most)
    between = [Batch(size - 1, size - 1, 1) for size in range(8, most + 1, 8)][:BATCHES]
    others, _ = ladder(graphs, ({},))
    mixed = [Batch(most + 1 + step, 3) for step in range(MANY)]
    sizes = range(1, most + 1)
    within = [Batch(tokens, reqs) for reqs in range(1, MANY // most + 2) for tokens in sizes]
    agreed, missing = BatchDescriptor(most), BatchDescriptor(most - 3)
    close = dispatcher_of([graph[:2] for graph in dispatcher.published], max_padding=1.0)
    reserved = GraphDispatcher("FULL_AND_PIECEWISE")
    for each in dispatcher.published:
        reserved.reserve(each.mode, each.descriptor)
    return {
        "hit": (lambda batch: dispatch(batch), inside),
        "hit, agreed=": (lambda batch: dispatch(batch, agreed=agreed), inside),
        "hit, excluded in the batch": (
            lambda batch: dispatch(batch),
            [batch._replace(exclude=frozenset({FULL})) for batch in inside],
        ),
        "miss, too large": (lambda batch: dispatch(batch), above),
        "miss, not captured": (lambda batch: reserved.dispatch(batch), inside),
        "miss, excluded in the batch": (
            lambda batch: dispatch(batch),
            [batch._replace(exclude=frozenset({FULL, PIECEWISE})) for batch in inside],
        ),
        "miss, agreed=": (lambda batch: dispatch(batch, agreed=missing), inside),
        "miss, padding": (lambda batch: close.dispatch(batch), between),
        "miss, too large, first time": (lambda batch: others.dispatch(batch), mixed),
        "miss, agreed=, first time": (
            lambda batch: others.dispatch(batch, agreed=missing),
            mixed,
        ),
        "hit, first time": (lambda batch: others.dispatch(batch), within),
        "hit, agreed=, first time": (
            lambda batch: others.dispatch(batch, agreed=agreed),
            within,
        ),
    }


def kind_cases(graphs: int) -> dict[str, Case]:
    loras, most = ladder(graphs, ({}, {"num_active_loras": 4}))
    bounds, _ = ladder(graphs, ({"bounds": (4096,)}, {"bounds": (65536,)}))
    variants, _ = ladder(graphs, ({}, {"variant": "draft"}))
    inside = decode(1, most)
    return {
        "hit, LoRAs": (
            lambda batch: loras.dispatch(batch),
            decode(1, most, num_active_loras=3),
        ),
        "hit, bounds": (lambda batch: bounds.dispatch(batch), growing(inside, 4064)),
        "hit, variant": (
            lambda batch: variants.dispatch(batch),
            decode(1, most, variant="draft"),
        ),
        "miss, LoRAs": (
            lambda batch: loras.dispatch(batch),
            decode(1, most, num_active_loras=5),
        ),
        "miss, bounds": (lambda batch: bounds.dispatch(batch), growing(inside, 65537)),
        "miss, variant": (
            lambda batch: variants.dispatch(batch),
            decode(1, most, variant="other"),
        ),
        "miss, bounds, first time": (
            lambda batch: bounds.dispatch(batch),
            growing(decode(1, most, MANY), 65537),
        ),
    }


def arbitrary_cases(name: str, graphs: int, bounds: list[int]) -> dict[str, Case]:
    """Hits and misses among graphs of random numbers, whose bounds are some of `bounds`."""
    drawn = random.Random(2)

    def numbers(most_reqs: int) -> tuple[int, int, int | None]:
        query_len = drawn.choice((None, 1, 2, 4))
        reqs = drawn.randint(1, most_reqs // (query_len or 4))
        return reqs * (query_len or drawn.randint(1, 4)), reqs, query_len

    def key() -> tuple[GraphMode, BatchDescriptor]:
        tokens, reqs, query_len = numbers(4096)
        return drawn.choice((FULL, PIECEWISE)), BatchDescriptor(
            tokens,
            drawn.choice((None, reqs)),
            uniform=query_len is not None,
            query_len=query_len,
            num_active_loras=drawn.choice((0, 2, 8)),
            bounds=(drawn.choice(bounds),),
            variant=drawn.choice((None, "draft")),
        )

    def batch() -> Batch:
        tokens, reqs, query_len = numbers(6000)
        longest, loras = drawn.randint(1, 70000), drawn.randint(0, 9)
        return Batch(tokens, reqs, query_len, (longest,), loras, drawn.choice((None, "draft")))

    dispatcher = dispatcher_of(key() for _ in range(graphs))
    found: dict[bool, list[Batch]] = {True: [], False: []}
    while min(map(len, found.values())) < BATCHES:
        each = batch()
        found[dispatcher.dispatch(each).slot >= 0].append(each)
    return {
        f"hit, {name}": (lambda batch: dispatcher.dispatch(batch), found[True][:BATCHES]),
        f"miss, {name}": (lambda batch: dispatcher.dispatch(batch), found[False][:BATCHES]),
    }


def least_us(cases: dict[str, Case], rounds: int) -> dict[str, float]:
    """Minima of all cases, in turns."""
    found = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, (call, batches) in cases.items():
            for batch in batches:
                call(batch)
            started = time.perf_counter()
            for batch in batches:
                call(batch)
            taken = (time.perf_counter() - started) / len(batches) * 1e6
            found[name] = min(found[name], taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, nargs="+", default=[86, 430, 860])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    keys = decode(1, 1 << 20)
    table = dict.fromkeys(keys)
    results: dict[str, dict[int, float]] = {}
    for graphs in options.graphs:
        cases: dict[str, Case] = {
            "empty": (lambda batch: None, keys),
            "a look into a dict": (lambda batch: table[batch], keys),
            **limited_cases(graphs),
            **kind_cases(graphs),
            **arbitrary_cases("arbitrary", graphs, [1024, 4096, 65536]),
            **arbitrary_cases("many kinds", graphs, list(range(1, 70000))),
        }
        least = least_us(cases, options.rounds)
        empty = least.pop("empty")
        for name, value in least.items():
            results.setdefault(name, {})[graphs] = value - empty
    columns = ("microseconds", *(f"{graphs} graphs" for graphs in options.graphs))
    show("Dispatch", columns, [(name, *row.values()) for name, row in results.items()])
    finish("dispatch", options, environment("cpu"), results)


if __name__ == "__main__":
    main()
