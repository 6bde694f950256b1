"""Task update on the CPU: issue a task again without running it, and keep its new arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.core.base.errors import TaskContractError
from graphrt.core.base.thread_mode import ThreadMode, without_gradients
from graphrt.cpu.private_torch import inference_mode
from graphrt.cpu.tape.operators import Operator, operator_of
from graphrt.cpu.tape.recorder import Step


@dataclass(frozen=True, eq=False)
class TaskHandle:
    """One task of a graph: its steps are those from index `start` up to `stop`, which is none."""

    start: int
    stop: int


@dataclass(frozen=True)
class NewArguments:
    """What one step of a task is to be called with from now on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def reissue(
    steps: Sequence[Step], issue: Callable[[], object], *, inference: bool
) -> list[NewArguments]:
    """The arguments with which `issue` calls the operators of `steps`; executes none of them.

    Raises `TaskContractError` if it calls others, in another order, or with other tensors.
    """
    mode = _Reissue(steps)
    with inference_mode(inference):
        without_gradients(lambda: mode.around(issue))
    if len(mode.arguments) < len(steps):
        missing = steps[len(mode.arguments)]
        _refuse(
            f"the task issued {len(mode.arguments)} of its {len(steps)} operators",
            got="the end of the task",
            expected=missing.label,
        )
    return mode.arguments


class _Reissue(ThreadMode):
    """Compares the operators that a task issues with those of its capture; executes none."""

    takes_apart = False  # the tape takes composite operators apart itself

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = steps
        self.arguments: list[NewArguments] = []
        """The new arguments of the steps that were issued so far."""

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = operator_of(func)
        if op.composite:
            return self.take_apart(func, args, kwargs)
        if op.view and not op.mutates:
            return func(*args, **kwargs)
        self._match(op, args, kwargs)
        answer = op.returned_arguments(args, kwargs)
        if not answer:
            return None
        return answer[0] if len(answer) == 1 else tuple(answer)

    def _match(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of the next step; refuse another operator, or other tensors."""
        index = len(self.arguments)
        if index == len(self.steps):
            _refuse("the task issued more operators than at capture", op.label, "its end")
        step = self.steps[index]
        if step.op is not op:
            _refuse(
                f"operator {index} of the task is another than at capture", op.label, step.label
            )
        # The dispatcher leaves out arguments that equal their default, so both are completed first.
        args, kwargs = _completed(op, args, kwargs)
        old_args, old_kwargs = _completed(op, step.args, step.kwargs)
        if len(args) != len(old_args) or kwargs.keys() != old_kwargs.keys():
            _refuse(
                f"{op.label} was issued with other arguments than at capture",
                f"{len(args)} positional, keywords {sorted(kwargs)}",
                f"{len(old_args)} positional, keywords {sorted(old_kwargs)}",
            )
        parameters = [a.name for a in op.schema.arguments]
        new_args = tuple(
            _merge(old, new, f"{op.label} argument {name!r}")
            for old, new, name in zip(old_args, args, parameters, strict=False)
        )
        new_kwargs = {
            name: _merge(old_kwargs[name], new, f"{op.label} argument {name!r}")
            for name, new in kwargs.items()
        }
        self.arguments.append(NewArguments(new_args, new_kwargs))


def _completed(
    op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every argument that has a default given."""
    positional, keywords = list(args), dict(kwargs)
    for index, argument in enumerate(op.schema.arguments):
        if index < len(args) or argument.name in kwargs or not argument.has_default_value():
            continue
        if argument.kwarg_only:
            keywords[argument.name] = argument.default_value
        elif index == len(positional):
            positional.append(argument.default_value)
    return tuple(positional), keywords


def _merge(old: Any, new: Any, where: str) -> Any:
    """The captured tensor, or the new host value."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if not _same_tensor(old, new):
            _refuse(f"{where} is another tensor than at capture", _describe(new), _describe(old))
        return old
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        _refuse(f"{where} changed between tensor and host value", _describe(new), _describe(old))
    if not isinstance(new, list | tuple):
        return new
    if not any(isinstance(v, torch.Tensor) for v in (*new, *(old or ()))):
        return list(new)
    if not isinstance(old, list | tuple) or len(old) != len(new):
        _refuse(f"{where} is another list of tensors", _describe(new), _describe(old))
    return [_merge(a, b, where) for a, b in zip(old, new, strict=True)]


def _same_tensor(old: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        old.data_ptr() == new.data_ptr()
        and old.size() == new.size()
        and old.stride() == new.stride()
        and old.dtype == new.dtype
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"{value.dtype} {tuple(value.size())} stride {tuple(value.stride())} "
            f"at {value.data_ptr():#x}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)


def _refuse(what: str, got: str, expected: str) -> None:
    raise TaskContractError(
        what,
        got=got,
        expected=expected,
        advice="issue the same operators on the captured tensors, in the same order; only host "
        "arguments may change, and outputs and workspace are given",
    )
