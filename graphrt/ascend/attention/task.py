"""Any attention operator with lengths as an updatable task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal

import torch

from graphrt.core.base.errors import InvalidUpdateError
from graphrt.core.base.option_values import check_kind, count_of, flag, shown
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.replay.tasks import HostArg, HostValues, UpdatableTask

Room = Callable[[tuple[Any, ...], dict[str, Any]], int | None]
"""(args, kwargs) of a call -> how many keys a row of its block table takes; None: unknown."""


class AttentionTask(UpdatableTask):
    """A task whose host arguments are the lengths of the queries and of the keys.

    `queries` and `keys` are the operator's names of them; `queries` is None if it takes none.
    """

    queries: str | None = None
    keys: str = ""
    room: Room | None = None

    @property
    def adds_up(self) -> bool:
        """Whether its query lengths are a running sum."""
        return self.queries is not None and self.host_args[self.queries].pad == "cumulative"

    def lengths(self, keys: Any, queries: Any = None) -> HostValues:
        """The update of this task; tensors on the host become lists.

        Raises `InvalidUpdateError` for tensors on the device, and for values that are no list.
        """
        values = {self.keys: listed(self.keys, keys)}
        if self.queries is not None and queries is not None:
            values[self.queries] = listed(self.queries, queries)
        return values

    def check_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], values: HostValues
    ) -> None:
        """Raise `InvalidUpdateError` for keys beyond the block table, which an operator would read
        from memory of others."""
        room = None if self.room is None else self.room(args, kwargs)
        if room is not None and max(values[self.keys], default=0) > room:
            raise InvalidUpdateError(
                f"the lengths {self.keys!r} of task {name!r} are beyond its block table",
                got=max(values[self.keys]),
                expected=f"at most {room}, what one row of the table has room for",
                advice="give it a wider block table, or a smaller max_kv_len",
            )


def attention_task(
    group: str,
    issue: Callable[..., object],
    *,
    keys: str,
    queries: str | None = None,
    max_kv_len: int,
    cumulative: bool = False,
    spare_request: bool = False,
    least_kv_len: int = 0,
    workspace: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    room: Room | None = None,
) -> AttentionTask:
    """A task of any operator with lengths: `issue(*args, **lengths, **kwargs)` calls it.

    `max_kv_len` is the number of keys of every request at warm-up and capture, and no step may have
    more. `cumulative` says that `queries` is a running sum, which must end at the number of tokens.
    Other `queries` are the tokens of each request, and an update may leave them out where the graph
    or the batch has one query length. With `spare_request` the lists have one entry more than the
    graph has requests, to which padding tokens belong when all requests are live: for graphs of
    mixed batches. No live request may have fewer than `least_kv_len` keys. `workspace` is that of
    `UpdatableTask`; `room` tells how many keys the block table of a call has room for.

    Raises `InvalidOptionError`.
    """
    check_kind("keys", keys, str, optional=False)
    check_kind("queries", queries, str)
    max_kv_len = count_of("max_kv_len", max_kv_len, least=1)
    least_kv_len = count_of("least_kv_len", least_kv_len, least=0)
    flag("cumulative", cumulative)
    flag("spare_request", spare_request)
    axis: Literal["reqs", "reqs+1"] = "reqs+1" if spare_request else "reqs"
    pad: Literal["cumulative", "query_len"] = "cumulative" if cumulative else "query_len"

    def at_capture(descriptor: BatchDescriptor) -> HostValues:
        # One entry for each request: `HostArg` pads the lists, and adds the entry of "reqs+1".
        tokens = descriptor.num_tokens
        reqs = descriptor.num_reqs or tokens // (descriptor.query_len or tokens)
        worst: dict[str, Any] = {keys: [max_kv_len] * reqs}
        if queries is not None:
            query_len = descriptor.query_len or tokens // reqs
            # The last request has the rest: 5 tokens of 2 requests end at [2, 5].
            ends = [*(min(tokens, query_len * (i + 1)) for i in range(reqs - 1)), tokens]
            lengths = [end - start for start, end in pairwise([0, *ends])]
            worst[queries] = ends if cumulative else lengths
        return worst

    host_args = {keys: HostArg(axis, "zero", least=least_kv_len, most=max_kv_len)}
    if queries is not None:
        host_args[queries] = HostArg(axis, pad, optional=not cumulative, least=0)
    task = AttentionTask(group, issue, host_args, at_capture=at_capture, workspace=workspace)
    task.queries, task.keys, task.room = queries, keys, room
    return task


def listed(name: str, lengths: Any) -> list[int]:
    """Lengths of any kind as a list; raises `InvalidUpdateError` for those on the device."""
    if isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu":
            raise InvalidUpdateError(
                f"the lengths {name!r} are on the device, where reading them would wait for it",
                got=str(lengths.device),
                expected="a list, or a tensor on the host",
                advice="keep the scheduler's own list of them",
            )
        lengths = lengths.tolist()
    try:
        return list(lengths)
    except TypeError as error:
        raise InvalidUpdateError(
            f"the lengths {name!r} are no list",
            got=shown(lengths),
            expected="one whole number for each request",
            advice="pass the scheduler's own list of them",
        ) from error
