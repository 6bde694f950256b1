"""The state of a process that serves vLLM: contexts of steps, pools, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphrt import RunnerReport
from graphrt.hosts.table import Table
from graphrt.hosts.vllm.log import VllmEagerSteps
from graphrt.hosts.vllm.pools import Pools
from graphrt.hosts.vllm.report_file import save
from graphrt.hosts.vllm.steps import Steps
from graphrt.hosts.vllm.weights import Weights
from graphrt.hosts.vllm.while_serving import WhileServing


class State:
    """What one process needs to serve vLLM, which has one graph pool and forward context there."""

    def __init__(self) -> None:
        self.serving = False
        """Whether graphrt is installed into vLLM: wrappers that are made now are graphrt's."""
        self.config: Any = None
        """vLLM's config of the engine that made a wrapper or captured last."""
        self.model: Any = None
        """The model whose FULL graphs the V2 runner captures now."""
        self.trying = False
        """Whether a trial runs the model: its runs are no steps of vLLM's."""
        self.in_step = False
        """Whether the V2 runner replays the graph of its own step, not of a speculator's."""
        self.to_try: Any = None
        """`Trials` of that graph, and its dispatch, if it is to be tried after the step."""
        self.eager = VllmEagerSteps()
        self.table = Table()
        self.weights = Weights()
        self.steps = Steps(self.eager, self.table)
        self.count: Callable[[Any], object] = _count_nothing
        """Called with the wrapper of each capture, for vLLM's own counter."""
        self.pools = Pools(
            lambda wrapper: self.count(wrapper), self.table, lambda: save(self.report())
        )
        self.later = WhileServing(self.pools)

    def report(self) -> RunnerReport:
        """The graphs that are captured in this process, and how its steps ran."""
        later = self.later
        return self.table.report(
            self.eager.reasons, self.pools.graph_pools, later.missing, later.dropped
        )

    def not_dispatched(self, num_tokens: int | None) -> None:
        """Count a step that vLLM runs eagerly. Before there are graphs such steps are warm-ups."""
        is_step = not (self.pools.capturing or self.trying)
        if self.serving and self.pools.captures and is_step:
            self.eager.not_dispatched(num_tokens, self.pools.largest)


def _count_nothing(wrapper: Any) -> None:
    """The default, until graphrt is installed into vLLM and finds its counter."""


state = State()
