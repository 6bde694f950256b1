"""Updatable tasks: operators whose host-side arguments change at every step.

Eager, a task is just issued. Captured, the platform brackets it as a task group that the captured
entry owns. Replayed, the new host arguments come with the context's `updates`; they are padded to
the graph and validated first, and then the platform applies them in the order that its device
needs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, NamedTuple

import torch

from graphrt.core.base import option_values, tree
from graphrt.core.base._undo import Undo, note, undoing
from graphrt.core.base.errors import (
    InvalidOptionError,
    InvalidUpdateError,
    MissingUpdateError,
    TaskContractError,
)
from graphrt.core.batch.context import ForwardContext, current_context
from graphrt.core.batch.descriptor import Axis, Batch, BatchDescriptor, live_query_len
from graphrt.core.replay.recording import counted, current_capture, in_task

HostValues = Mapping[str, Any]
"""The host arguments of one task by name."""


Updates = Mapping[str, HostValues]
"""The host values of a step by the name of their task or its group."""


class _Marker:
    """A value that `updates=` may have in place of a mapping; compared by identity."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


UNCHANGED: Final = _Marker("UNCHANGED")
"""As `updates=`: every task keeps the host arguments of the step before; to a wrapper by itself, of
the replay before of the same graph."""


WORST_CASE: Final = _Marker("WORST_CASE")
"""As `updates=`: every task takes its `at_capture` arguments, as in warm-ups and measurements."""


DEFERRED: Final = _Marker("DEFERRED")
"""As `updates=` to a wrapper whose device can wait for them (Ascend's): they come after the call,
with its `update`. Until then nothing else may run in its pool."""


class _Fault(NamedTuple):
    """What is wrong with a list of host values, as `InvalidUpdateError` says it."""

    what: str
    expected: str
    advice: str = (
        "pass one value for each live request, in the order of the batch; cumulative ones are the "
        "running sum of its query lengths, others no sum"
    )


@dataclass(frozen=True)
class HostArg:
    """One host argument of a task.

    `axis` None is a scalar. A list over "reqs" or "tokens" is padded to the graph's size: with
    `pad` "zero", with "repeat" of its last value, or as query lengths, which must add up to the
    batch and the graph: "query_len" ones are the tokens of each request, "cumulative" ones their
    running sum. In a uniform graph each padding request has its query length. In others it has no
    token, but the last one of "cumulative" lengths has all of the padding. "reqs+1" has room for
    one request more, to which padding tokens can belong when all requests are live. An `optional`
    one may be left out of updates: everywhere, at capture too, or, with `pad` "query_len", where
    the graph or the batch has one query length. `least` and `most` bound every value of a list.

    Raises `InvalidInputError` for an axis that does not exist, `InvalidOptionError` for a `least`
    above `most`.
    """

    axis: str | None = "reqs"
    pad: Literal["zero", "repeat", "cumulative", "query_len"] = "zero"
    optional: bool = False
    least: int | None = None
    most: int | None = None
    _axis: Axis | None = field(init=False, repr=False, compare=False)
    """`axis`, parsed; None for a scalar."""

    def __post_init__(self) -> None:
        option_values.choice("zero", "repeat", "cumulative", "query_len")("pad", self.pad)
        option_values.flag("optional", self.optional)
        for name in ("least", "most"):
            option_values.check_kind(name, getattr(self, name), int)
        if self.least is not None and self.most is not None and self.least > self.most:
            raise InvalidOptionError(
                "no value of a host argument can be right",
                got=f"least={self.least}, most={self.most}",
                expected="a least value that is at most the largest one",
                advice=f"HostArg(least={self.most}, most={self.least})",
            )
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(self, "_axis", None if self.axis is None else Axis.parse(self.axis))

    def fitted(
        self,
        key: str,
        value: Any,
        tokens: int,
        reqs: int | None,
        *,
        query_len: int | None = None,
        live: Batch | None = None,
    ) -> Any:
        """`value` padded for a graph of `tokens` and `reqs`; raises `InvalidUpdateError`.

        `query_len` is that of a uniform graph, `live` the batch that the step serves.
        """
        axis = self._axis
        if axis is None:
            # A copy, so that a list that the host changes in place is seen as changed.
            return value if type(value) is int else copy.copy(value)
        values = _whole(key, value, axis.name)
        # The graph has no number of requests: the list stays as long as it is.
        is_open = reqs is None and axis.name == "reqs"
        missing = 0 if is_open else axis.size(tokens, reqs or 0) - len(values)
        is_of_tokens = axis.counts == "tokens"
        needed = 0 if live is None else (live.num_tokens if is_of_tokens else live.num_reqs) or 0
        fault = self._fault(axis, values, missing, needed)
        if fault is None and self.pad in ("cumulative", "query_len"):
            fault = self._uneven(values, missing, tokens, query_len, needed, live)
        if fault is not None:
            raise InvalidUpdateError(
                f"host argument {key!r} {fault.what}",
                got=f"{len(values)} values: {values}",
                expected=fault.expected,
                advice=fault.advice,
            )
        return values + self._padding(values, missing, tokens, query_len)

    def _padding(
        self, values: list[int], missing: int, tokens: int, query_len: int | None
    ) -> list[int]:
        last = values[-1]
        if self.pad == "cumulative" and query_len is None:
            return [last] * (missing - 1) + [tokens] * (missing > 0)
        if self.pad == "cumulative" and query_len is not None:
            return [min(tokens, last + query_len * (i + 1)) for i in range(missing)]
        if self.pad == "query_len" and query_len is not None:
            left_over = tokens - sum(values)
            return [max(0, min(query_len, left_over - query_len * i)) for i in range(missing)]
        return [last if self.pad == "repeat" else 0] * missing

    def _fault(self, axis: Axis, values: list[int], missing: int, needed: int) -> _Fault | None:
        """What is wrong with `values`, or None. They are `missing` values shorter than the graph's
        list; `needed` are live."""
        least, most = self.least, self.most
        if not values or missing < 0:
            expected = f"1 to {len(values) + missing} ({axis} of the graph)"
            return _Fault("has the wrong length", expected)
        if (least is not None and min(values) < least) or (most is not None and max(values) > most):
            return _Fault("has a value out of its bounds", f"each from {least} to {most}")
        if len(values) < needed:
            return _Fault(f"leaves out live {axis.name}", f"one for each of {needed}")
        return None

    def _uneven(
        self,
        values: list[int],
        missing: int,
        tokens: int,
        query_len: int | None,
        needed: int,
        live: Batch | None,
    ) -> _Fault | None:
        """What is wrong with query lengths: see `_fault`."""
        is_sum = self.pad == "cumulative"
        ends = values if is_sum else list(accumulate(values))
        lengths = [b - a for a, b in pairwise([0, *values])] if is_sum else values
        left_over = tokens - ends[-1]
        # No request of a graph has more.
        most = query_len or tokens
        if min(lengths) < 0 or max(lengths) > most or left_over < 0:
            expected = f"at most {most} tokens for each request, in all at most {tokens}"
            return _Fault("does not add up", expected)
        if live and needed and ends[needed - 1] != live.num_tokens:
            expected = f"{live.num_tokens} tokens up to request {needed}"
            return _Fault("does not add up to the batch", expected)
        # Without a query length a graph has no token for the padding requests of "query_len".
        if left_over > most * missing and (is_sum or query_len is not None):
            expected = f"at least {tokens - most * missing} tokens up to request {len(values)}"
            if query_len is not None:
                return _Fault("does not add up", expected)
            return _Fault(
                "does not add up: no request is left that the padding tokens could belong to",
                f"{expected}, or one request of padding",
                'declare host arguments over "reqs+1" (attention tasks: spare_request=True), and '
                "the block table too",
            )
        return None


def _whole(key: str, value: Any, axis: str) -> list[int]:
    """The values of a host argument as ints; raises `InvalidUpdateError` for what is no list of
    whole numbers on the host."""
    cause = None
    try:
        if isinstance(value, torch.Tensor):
            # Reading one on the device would wait for it.
            is_list = value.device.type == "cpu" and value.dtype is not torch.bool
        else:
            # A set or a generator has no places that say which value is whose.
            is_list = hasattr(value, "__getitem__") and not isinstance(value, Mapping)
            # Python takes flags for whole numbers.
            is_list = is_list and not (len(value) and type(value[0]) is bool)
        if is_list:
            return list(map(operator.index, value))
    except TypeError as error:
        cause = error
    raise InvalidUpdateError(
        f"host argument {key!r} is no list of whole numbers",
        got=f"a tensor on {value.device}"
        if isinstance(value, torch.Tensor)
        else option_values.shown(value),
        expected=f"one whole number for each of the {axis}, on the host",
        advice="pass the list of ints that the scheduler has",
    ) from cause


class UpdatableTask:
    """An operator with host arguments, declared once and called in the forward.

    `issue(*tensors, **host_values)` calls the operator into given outputs and workspace: it may not
    allocate, synchronise, or touch other tensors than those it was captured with. With other host
    values it launches as many kernels as at its capture, of the same kind, on CUDA the same ones;
    others are a `TaskContractError`. On Ascend (the device answers 507000) one too many may end
    torch_npu's launch queue, a `DeviceHangError`. `at_capture` gives the worst-case host values for
    a descriptor, which warm-up and capture use.
    """

    def __init__(
        self,
        group: str,
        issue: Callable[..., object],
        host_args: Mapping[str, HostArg],
        *,
        at_capture: Callable[[BatchDescriptor], HostValues] | None = None,
        workspace: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """`group` is the name of a task that is given none; updates of the group reach all of its
        tasks. `host_args` are the keywords of `issue` that a step's updates give, by name.

        `workspace(*args, **kwargs, **worst_case)` is asked at capture, with what `issue` is given
        and the host values of `at_capture`, for the scratch memory that the operator needs at most:
        keywords which this task is then issued with at every replay. A call that brings its own
        `workspace=`, or None for none, is not asked for.
        """
        option_values.check_kind("group", group, str, optional=False)
        option_values.check_callable("issue", issue)
        option_values.check_takes("at_capture", at_capture, "at_capture(descriptor)", optional=True)
        if workspace is not None:
            option_values.check_callable("workspace", workspace)
        option_values.check_kind("host_args", host_args, Mapping, optional=False)
        for name, argument in host_args.items():
            option_values.check_kind("a name in host_args", name, str, optional=False)
            option_values.check_kind(f"host_args[{name!r}]", argument, HostArg, optional=False)
        self.group = group
        self.issue = issue
        self.host_args = dict(host_args)
        self.at_capture = at_capture
        self.workspace = workspace

    def __call__(self, *args: Any, task: str | None = None, **kwargs: Any) -> None:
        """Issue, or capture, the task `task` of this group with this step's host values.

        Raises `MissingUpdateError` if the step has none, `InvalidUpdateError` if they do not fit,
        `TaskContractError` inside of another task's `issue`.
        """
        name = self.group if task is None else task
        if in_task.get():
            raise TaskContractError(
                f"task {name!r} is called inside of another task's issue",
                expected="operators alone in what issues a task",
                advice="call the one task behind the other in the forward",
            )
        context = current_context()
        capture = current_capture()
        if context is not None and context.capture is not None:
            context.capture.task_names.update((name, self.group))
        values = self._values(context, name)
        self.check_call(name, args, kwargs, values)
        if capture is None:
            work = counted.get()
            if work is not None:
                work.tasks += 1
            self._issued(partial(self.issue, *args, **kwargs, **values))
            return
        assert context is not None
        worst = values
        if self.at_capture is not None and context.descriptor is not None:
            worst = self.fitted(self.at_capture(context.descriptor), context, any_batch=True)
        self.check_call(name, args, kwargs, worst)
        if self.workspace is not None and "workspace" not in kwargs:
            # Before the bracket begins, in which nothing may be allocated.
            scratch: object = self.workspace(*args, **kwargs, **worst)
            if not isinstance(scratch, Mapping):
                what, advice = "a mapping of keywords", 'return {"workspace": tensor}'
                raise option_values.refused(
                    f"workspace() of task {name!r} returns no mapping", scratch, what, advice
                )
            kwargs = {**kwargs, **scratch}
        capture.check_read((args, kwargs), f"task {name!r} is given")
        issue = partial(self.issue, *args, **kwargs, **values)
        handle = self._issued(partial(capture.bracketed, issue))
        args, kwargs = tree.map_leaves(capture.captured_ref, (args, kwargs))
        capture.add_task(CapturedTask(self, name, handle, args, kwargs, values))

    @undoing
    def _issued(self, undo: Undo, issue: Callable[[], object]) -> object:
        undo.set(in_task, True)
        return issue()

    def check_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], values: HostValues
    ) -> None:
        """Raise where this call's tensors have no room for `values`; a declaration may say how.

        Called before anything is issued, and at capture with the worst case too.
        """

    def _values(self, context: ForwardContext | None, name: str) -> HostValues:
        """The host values of task `name` in this step, checked and padded: from the updates, or in
        a warm-up or capture from `at_capture`. Raises as `__call__` does."""
        descriptor = None if context is None else context.descriptor
        updates = None if context is None else context.updates
        if updates is None and context is not None and context.capture is not None:
            updates = WORST_CASE
        if updates is WORST_CASE and self.at_capture is not None and descriptor is not None:
            updates = {name: self.at_capture(descriptor)}
        if context is None or descriptor is None or not isinstance(updates, Mapping):
            raise MissingUpdateError(
                f"task {name!r} needs its host arguments",
                got=option_values.shown(updates),
                expected=f"updates={{{self.group!r}: {{{', '.join(self.host_args)}}}}}",
                advice="pass updates= to the runner or forward_context(), and at_capture= to the "
                "task for warm-up and capture",
            )
        return self.fitted(self.values_for(name, updates), context)

    def values_for(self, name: str, updates: Mapping[str, HostValues]) -> HostValues:
        """The host values of task `name` as passed, by its own name or else its group's.

        Raises `MissingUpdateError` if there are none, `InvalidUpdateError` for wrong keys.
        """
        values = updates.get(name)
        if values is None:
            values = updates.get(self.group)
        if values is None:
            raise MissingUpdateError(
                f"no update for task {name!r}",
                got=sorted(updates),
                expected=f"{name!r} or its group {self.group!r}",
                advice=f"updates={{{self.group!r}: {{{', '.join(self.host_args)}}}}}, or "
                "updates=UNCHANGED",
            )
        declared = self.host_args
        keys = values.keys() if isinstance(values, Mapping) else None
        if keys == declared.keys():
            return values
        needed = {key for key, arg in declared.items() if not arg.optional}
        if keys is None or not needed <= keys or not keys <= declared.keys():
            raise InvalidUpdateError(
                f"the update of task {name!r} is no mapping, or has the wrong keys",
                got=option_values.shown(values),
                expected=", ".join(
                    f"{key!r}{' (optional)' * arg.optional}" for key, arg in declared.items()
                ),
                advice=f"updates={{{name!r}: {{...}}}} with exactly the declared host arguments",
            )
        return values

    def fitted(
        self, values: HostValues, context: ForwardContext, *, any_batch: bool = False
    ) -> HostValues:
        """`values` padded to the graph of the context; raises `InvalidUpdateError` where they do
        not fit it, or its live batch, unless they are of `any_batch`."""
        descriptor = context.descriptor
        assert descriptor is not None
        tokens, query_len = descriptor.num_tokens, descriptor.query_len
        reqs = context.num_reqs if descriptor.num_reqs is None else descriptor.num_reqs
        live = None if any_batch else context.live
        left_out = [
            key
            for key, host_arg in self.host_args.items()
            if host_arg.optional and host_arg.pad == "query_len" and key not in values
        ]
        # Filled in: an operator may not lose an argument that it had at its capture.
        each = query_len or (None if live is None else live_query_len(live))
        if left_out and each is None:
            raise InvalidUpdateError(
                "query lengths are left out of a step whose requests may have others",
                got=sorted(values),
                expected=", ".join(left_out),
                advice="pass the tokens of each request, or a Batch with its query_len where they "
                "all have that many",
            )
        if left_out and each is not None:
            lengths = [each] * ((tokens if live is None else live.num_tokens) // each)
            values = {**values, **dict.fromkeys(left_out, lengths)}
        return {
            key: host_arg.fitted(key, values[key], tokens, reqs, query_len=query_len, live=live)
            for key, host_arg in self.host_args.items()
            if key in values
        }


@dataclass(eq=False, repr=False)
class CapturedTask:
    """One task of a captured segment: its `handle` is what the platform's bracket returned, its
    `values` are those of the last replay, and `issue` issues it again.

    It is the `TaskUpdate` of every replay itself, as building one would cost more than the rest of
    a replay whose arguments did not change.
    """

    spec: UpdatableTask
    name: str
    handle: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: HostValues

    def issue(self) -> None:
        """Issue the operator with the present values."""
        try:
            self.spec.issue(*self.args, **self.kwargs, **self.values)
        except Exception as error:
            note(error, f"while updating task {self.name!r}")
            raise

    def is_changed_by(self, new: HostValues) -> bool:
        """Whether `new` values are others than those of the replay before; raises
        `InvalidUpdateError` where other arguments are left out than at capture."""
        old = self.values
        if new.keys() != old.keys():
            raise InvalidUpdateError(
                f"the update of task {self.name!r} has other keys than its capture",
                got=sorted(new),
                expected=sorted(old),
                advice="leave an optional host argument out everywhere, at_capture too, or nowhere",
            )
        scalars = [key for key in new if self.spec.host_args[key].axis is None]
        # -0.0 equals 0.0, and 1.0 and True equal 1; an operator may tell them apart.
        return new != old or any(repr(new[key]) != repr(old[key]) for key in scalars)

    def tensors(self) -> list[torch.Tensor]:
        """See `TaskUpdate`."""
        return tree.tensors(self.args, self.kwargs)


def failed_half_way() -> MissingUpdateError:
    """The error for UNCHANGED after a step that failed: nobody knows what its tasks have."""
    return MissingUpdateError(
        "the step before failed half-way, so its host arguments cannot be repeated",
        got="UNCHANGED",
        expected="updates for every task",
        advice="pass the updates of this step",
    )


def check_names(updates: Updates, known: frozenset[str]) -> None:
    """Raise `InvalidUpdateError` for updates of tasks that the step does not have."""
    if not updates.keys() <= known:
        raise InvalidUpdateError(
            "updates name tasks that the graph does not have",
            got=sorted(updates.keys() - known),
            expected=sorted(known),
            advice="use the group's name to reach all of its layers",
        )
