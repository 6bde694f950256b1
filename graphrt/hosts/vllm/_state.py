"""What one process that serves vLLM has once: its steps, its pools, its counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphrt.hosts.vllm.log import EagerSteps
from graphrt.hosts.vllm.pools import Pools
from graphrt.hosts.vllm.steps import Steps


class State:
    """vLLM has one pool of graph memory and one forward context for a process, and so has this."""

    def __init__(self) -> None:
        self.serving = False
        self.eager = EagerSteps()
        self.steps = Steps(self.eager)
        self.count: Callable[[Any], object] = _count_nothing
        self.pools = Pools(lambda wrapper: self.count(wrapper))

    def not_dispatched(self, num_tokens: int | None) -> None:
        """vLLM runs a step eagerly; before there are graphs it warms up so."""
        if self.serving and self.pools.captures and not self.pools.capturing:
            self.eager.not_dispatched(num_tokens, self.pools.largest)


def _count_nothing(wrapper: Any) -> None:
    """Before vLLM's counter is there."""


state = State()
