"""Steady steps: the graph of each size against the same full batch run eagerly.

Both are warm, and they take turns, so that a slow moment of the machine hits both. Of all turns the
fastest counts: other work on the machine only adds time. Eager steps are those of a runner without
graphs: they have no padding, and the same inputs on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from graphrt import Batch, GraphMode, GraphRunner
from graphrt.demo.report import Setup, example_step

_WARM = 2
_LEAST, _MOST = 7, 60
"""Turns of a size."""
_ENOUGH_S = 1.0
"""No more turns after this time, but for the least."""
_MUCH_LONGER = 3
"""Steps that take so many times those of the smallest size do not wait for launches."""


@dataclass(frozen=True)
class SteadySize:
    """One graph: its mode, its tokens, its fastest step and the fastest eager one, in seconds."""

    mode: GraphMode
    tokens: int
    graph_s: float
    eager_s: float
    noise_s: float
    """From the fastest step to the median: of the two ways the larger."""

    @property
    def gain(self) -> float:
        """How many times as fast the graph is."""
        return self.eager_s / self.graph_s


@torch.no_grad()
def measure_steady(setup: Setup, graphs: GraphRunner, eager: GraphRunner) -> list[SteadySize]:
    """Time all graphs of a captured runner, by mode and size, and note it for its report. `eager`
    captures none.

    Writes to the caches of both, so no request may be under way.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    measured = []
    for mode, descriptor in graphs.plan.keys:
        tokens, query_len = descriptor.num_tokens, None
        # A mixed step has parts of a few prompts.
        reqs = min(max(tokens // 8, 1), setup.limits.max_num_reqs)
        if descriptor.uniform and descriptor.query_len is not None:
            query_len = descriptor.query_len
            reqs = tokens // query_len
        batch = Batch(tokens, reqs, query_len)
        found = graphs.dispatcher.dispatch(batch)
        if found.mode is not mode:
            # No memory was left to capture it.
            continue
        step = example_step(setup, batch, generator)
        inputs = dict(step.values)
        updates = {} if step.updates is None else {"updates": step.updates}
        times: dict[GraphRunner, list[float]] = {graphs: [], eager: []}
        began = perf_counter()
        for turn in range(-_WARM, _MOST):
            if turn >= _LEAST and perf_counter() - began > _ENOUGH_S:
                break
            # In turns first: the machine may halt whoever is second.
            for runner in (graphs, eager) if turn % 2 else (eager, graphs):
                start = perf_counter()
                runner(batch, **updates, **inputs)
                setup.platform.synchronize()
                if turn >= 0:
                    times[runner].append(perf_counter() - start)
        noise_s = max(median(each) - min(each) for each in times.values())
        fastest = min(times[graphs]), min(times[eager])
        graphs.graphs.note_times(found, fastest[1], fastest[0])
        measured.append(SteadySize(mode, tokens, *fastest, noise_s))
    return sorted(measured, key=lambda each: (each.mode.name, each.tokens))


def cause_of(size: SteadySize, sizes: list[SteadySize]) -> str:
    """Why a graph is not faster, in five words; "" if it is."""
    if size.gain > 1:
        return ""
    if size.graph_s - size.eager_s <= size.noise_s:
        return "no more than the noise"
    if size.eager_s > _MUCH_LONGER * min(each.eager_s for each in sizes):
        return "operators take nearly all time"
    if size.mode is GraphMode.PIECEWISE:
        return "eager attention between the pieces"
    return "copies outweigh the saved launches"
