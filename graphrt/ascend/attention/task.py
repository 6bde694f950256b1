"""Any attention operator with lengths as an updatable task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from graphrt.core.base import InvalidUpdateError
from graphrt.core.batch import BatchDescriptor
from graphrt.core.replay import HostArg, HostValues, UpdatableTask


class AttentionTask(UpdatableTask):
    """A task whose host arguments are the lengths of the queries and of the keys.

    `queries` and `keys` are what its operator calls them; `queries` is None where it takes none.
    """

    queries: str | None = None
    keys: str = ""

    def lengths(self, keys: Any, queries: Any = None) -> HostValues:
        """The update of this task; tensors on the host become lists."""
        values = {self.keys: _listed(self.keys, keys)}
        if self.queries is not None and queries is not None:
            values[self.queries] = _listed(self.queries, queries)
        return values


def attention_task(
    group: str,
    issue: Callable[..., object],
    *,
    keys: str,
    queries: str | None = None,
    max_kv_len: int,
    cumulative: bool = False,
    spare_request: bool = False,
) -> AttentionTask:
    """A task of any operator with lengths: `issue(*args, **lengths, **kwargs)` calls it.

    `max_kv_len` is the length of every key at warm-up and capture. `cumulative` says that `queries`
    is a running sum, which must end at the number of tokens. With `spare_request` the lists have
    one entry more than the graph has requests, to which padding tokens belong when all requests are
    live: for graphs of mixed batches.
    """
    axis: Literal["reqs", "reqs+1"] = "reqs+1" if spare_request else "reqs"
    pad: Literal["cumulative", "zero"] = "cumulative" if cumulative else "zero"

    def at_capture(descriptor: BatchDescriptor) -> HostValues:
        reqs, tokens = descriptor.num_reqs or 1, descriptor.num_tokens
        worst: dict[str, Any] = {keys: [max_kv_len] * reqs}
        if queries is not None:
            query_len = descriptor.query_len or tokens // reqs
            ends = [min(tokens, query_len * (i + 1)) for i in range(reqs)]
            worst[queries] = [*ends[:-1], tokens] if cumulative else [query_len] * reqs
        return worst

    host_args = {keys: HostArg(axis, "zero")}
    if queries is not None:
        host_args[queries] = HostArg(axis, pad, optional=not cumulative)
    task = AttentionTask(group, issue, host_args, at_capture=at_capture)
    task.queries, task.keys = queries, keys
    return task


def _listed(name: str, lengths: Any) -> list[int]:
    if isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu":
            raise InvalidUpdateError(
                f"the lengths {name!r} are on the device, where reading them would wait for it",
                got=str(lengths.device),
                expected="a list, or a tensor on the host",
                advice="keep the scheduler's own list of them",
            )
        found: list[int] = lengths.tolist()
        return found
    return list(lengths)
