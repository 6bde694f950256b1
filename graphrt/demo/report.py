"""Serves the prompts, with graphs or without, and compares two runs bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

import torch
from torch import Tensor

from graphrt import (
    AttentionSupport,
    Batch,
    Example,
    GraphMode,
    GraphOptions,
    GraphRunner,
    Host,
    InputSpec,
    Plan,
    Platform,
)
from graphrt.core.plan.plan import PlanArguments
from graphrt.demo.engine import Engine, EngineLimits, StepRecord, inputs_of, random_step
from graphrt.demo.model import Decoder, new_cache
from graphrt.observe.tap import Observer, StepSeen, attach


@dataclass(frozen=True)
class Setup:
    """What all runs share, so that only the way the steps are launched differs.

    `graphs` are further arguments of the plan, such as its mode and sizes.
    """

    decoder: Decoder
    platform: Platform
    limits: EngineLimits
    prompts: list[list[int]]
    max_new_tokens: int
    eos_ids: frozenset[int]
    graphs: PlanArguments = field(default_factory=PlanArguments)


@dataclass(frozen=True)
class Run:
    """One pass over all prompts: the generated ids of each, and every step."""

    generated: list[list[int]]
    steps: list[StepRecord]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of model and sampling time."""
        return sum(map(len, self.generated)) / sum(step.seconds for step in self.steps)


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same steps on the same padded inputs, token by token and row by row.

    `replayed` steps of the first used a graph; without any, equality says nothing about graphs.
    """

    replayed: int
    tokens: int
    wrong_tokens: int
    rows: int
    wrong_rows: int
    same_steps: bool

    @property
    def equal(self) -> bool:
        return self.same_steps and self.wrong_tokens == self.wrong_rows == 0


def make_runner(setup: Setup, options: GraphOptions) -> GraphRunner:
    """A runner of the decoder over an empty cache, with every input of a paged batch declared."""
    limits, config = setup.limits, setup.decoder.config
    cache = new_cache(config, limits.num_pages, limits.page_size, setup.decoder.embedding)
    per_token = InputSpec(torch.int64, ("tokens",))
    blocks = ("reqs", limits.pages(limits.context))
    graphs: PlanArguments = {
        "max_num_reqs": limits.max_num_reqs,
        "max_num_tokens": limits.max_num_tokens,
        "attention": (
            AttentionSupport.ALWAYS
            if setup.decoder.decode_attention is None
            else AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
        ),
        **setup.graphs,
    }
    return GraphRunner(
        functools.partial(setup.decoder, cache),
        Plan(**graphs, platform=setup.platform),
        platform=setup.platform,
        options=options,
        inputs={
            "input_ids": per_token,
            "positions": per_token,
            "slot_mapping": InputSpec(torch.int64, ("tokens",), pad=0, index=True),
            "block_table": InputSpec(torch.int64, blocks, pad=0, index=True),
            "query_start_loc": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
        },
        outputs=("reqs", config.vocab_size),
        # Graphs are tried as they are captured, and not by the first steps that are served. The
        # cache is empty then, so that all of it is scratch memory.
        host=Host(example=functools.partial(example_step, setup)),
    )


def example_step(setup: Setup, batch: Batch, generator: torch.Generator) -> Example:
    """A random step of `batch`. It writes to pages of the cache that requests may have."""
    scheduled = random_step(batch, setup.limits, setup.decoder.config.vocab_size, generator)
    fused, updates = setup.decoder.decode_attention, None
    if fused is not None and batch.query_len == 1:
        updates = fused.updates([request.computed + 1 for request, _ in scheduled])
    return Example(inputs_of(scheduled, setup.limits), updates)


class _Trials(Observer):
    """Notes of each step of a runner whether it was a trial."""

    def __init__(self) -> None:
        self.tried: list[bool] = []

    def step(self, seen: StepSeen) -> None:
        self.tried.append(seen.tried)


def serve_prompts(
    setup: Setup, runner: GraphRunner, *, eager: bool = False, keep_logits: bool = False
) -> Run:
    """Generate with a captured runner until every prompt is finished; with `eager` by eager steps
    on the padded inputs that its graphs would read. Earlier contents of its cache have no effect.
    """
    fused = setup.decoder.decode_attention
    in_full = fused is not None and runner.mode.decode_mode is not GraphMode.PIECEWISE
    updates = fused.updates if fused is not None and in_full else None
    engine = Engine(runner, setup.limits, setup.eos_ids, keep_logits, updates, eager=eager)
    requests = [engine.submit(prompt, setup.max_new_tokens) for prompt in setup.prompts]
    trials = _Trials()
    detach = attach(runner, trials)
    try:
        while engine.waiting or engine.running:
            engine.step()
    finally:
        detach()
    steps = engine.steps
    if not eager:
        steps = [
            step._replace(tried=tried) for step, tried in zip(steps, trials.tried, strict=True)
        ]
    return Run([request.generated for request in requests], steps)


def compare(graphs: Run, eager: Run) -> Comparison:
    """Every generated token and, with `torch.equal`, every row of logits."""
    tokens = [
        ours == theirs
        for pair in zip(graphs.generated, eager.generated, strict=True)
        for ours, theirs in zip_longest(*pair)
    ]
    rows = [
        ours is not None and theirs is not None and torch.equal(ours, theirs)
        for pair in zip_longest(_logits(graphs), _logits(eager), fillvalue=())
        for ours, theirs in zip_longest(*pair)
    ]
    same_steps = [step[:3] for step in graphs.steps] == [step[:3] for step in eager.steps]
    replayed = sum(step.dispatch.mode is not GraphMode.NONE for step in graphs.steps)
    wrong_tokens, wrong_rows = tokens.count(False), rows.count(False)
    return Comparison(replayed, len(tokens), wrong_tokens, len(rows), wrong_rows, same_steps)


def _logits(run: Run) -> list[Tensor]:
    return [step.logits for step in run.steps if step.logits is not None]


def group_steps(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """The steps by mode, padded size, reason and whether they were trials, in that order."""

    def key(step: StepRecord) -> tuple[str, int, str, bool]:
        mode, descriptor, reason = step.dispatch[:3]
        return mode.name, descriptor.num_tokens, reason.name, step.tried

    return [list(group) for _, group in groupby(sorted(steps, key=key), key)]
