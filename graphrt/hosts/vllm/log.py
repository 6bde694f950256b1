"""What vLLM's log says of graphrt: what was captured, and why something ran eagerly."""

from __future__ import annotations

import logging
from collections import Counter

from graphrt import BatchDescriptor, ForwardContext, Reason
from graphrt.hosts.engine import EagerSteps

# A child of vLLM's: its handlers print it.
logger = logging.getLogger("vllm.graphrt")


class Captures:
    """Counts of what was captured, for one line of the log."""

    def __init__(self) -> None:
        # By mode: graphs or pieces, and the batches that have some.
        self.graphs: Counter[str] = Counter()
        self._batches: dict[str, set[BatchDescriptor]] = {}

    def add(self, mode: str, descriptor: BatchDescriptor) -> None:
        """Note one graph, or one piece."""
        self.graphs[mode] += 1
        self._batches.setdefault(mode, set()).add(descriptor)

    def text(self) -> str:
        """`867 PIECEWISE graphs for 51 batches, 35 FULL graphs for 35 batches`."""
        return ", ".join(
            f"{count} {mode} graphs for {len(self._batches[mode])} batches"
            for mode, count in sorted(self.graphs.items(), reverse=True)
        )

    def log(self, seconds: float, pool_bytes: int | None) -> None:
        """Write the counts to the log."""
        if not self.graphs:
            return
        memory = "" if pool_bytes is None else f", {pool_bytes / 2**30:.3f} GiB"
        logger.info("graphrt captured %s in %.2f s%s", self.text(), seconds, memory)


class VllmEagerSteps(EagerSteps):
    """Counts the steps that ran eagerly. Wrappers call `not_replayed` for a step whose graph they
    do not have."""

    def __init__(self) -> None:
        super().__init__(logger)

    def not_replayed(self, context: ForwardContext) -> None:
        """A wrapper had no graph for the step: vLLM asked for one that it never captured."""
        text = f"there is no {context.mode.name} graph for [{context.descriptor}]"
        self.note(Reason.MISSING_GRAPH, text)

    def without_descriptor(self, mode: str) -> None:
        """vLLM asked for a graph in a context that names no batch."""
        text = f"its forward context asks for a {mode} graph and has no batch descriptor"
        self.note(Reason.NO_CONTEXT, text)

    def not_dispatched(self, num_tokens: int | None, largest: int) -> None:
        """vLLM dispatched the step to no graph."""
        size = "" if num_tokens is None else f" ({num_tokens} tokens)"
        if num_tokens is not None and num_tokens > largest:
            text = f"it has more tokens than the largest graph, {largest}"
            self.note(Reason.TOO_LARGE, text, size)
        else:
            self.note(Reason.NO_GRAPH, "vLLM found no graph for a batch of its kind", size)
