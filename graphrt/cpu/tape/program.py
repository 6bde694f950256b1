"""Straight-line code that replays the steps of a tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import IN_PIECES, CaptureError
from graphrt.cpu.tape.aliases import core
from graphrt.cpu.tape.lowering import Call
from graphrt.cpu.tape.recorder import Step


class TaskCall:
    """The call of an operator of a task; an update exchanges `issue`."""

    __slots__ = ("issue",)

    def __init__(self, call: Call) -> None:
        self.issue: Callable[[], object] = call.bound()


class _Names:
    """One global name per object that the code refers to."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"copy": torch.Tensor.copy_, "checked": _checked_copies}
        self._by_id: dict[int, str] = {}

    def of(self, *values: object) -> list[str]:
        texts = []
        for value in values:
            if value is None or value is True or value is False:
                texts.append(repr(value))
                continue
            name = self._by_id.get(id(value))
            if name is None:
                name = self._by_id[id(value)] = f"v{len(self._by_id)}"
                self.namespace[name] = value
            texts.append(name)
        return texts


def assemble(
    steps: Sequence[Step], tasks: dict[int, TaskCall], before: Sequence[Call] = ()
) -> Callable[[], None]:
    """A function that issues the calls `before`, then every step in order; `tasks` are the steps
    that may be exchanged."""
    names = _Names()
    lines = ["def run():", *(f"    {_spell(call, names)}" for call in before)]
    for index, step in enumerate(steps):
        task = tasks.get(index)
        if task is not None:
            (name,) = names.of(task)
            lines.append(f"    {name}.issue()")
            continue
        lowered = step.lowered
        call = _spell(lowered.call, names)
        if not lowered.copies:
            lines.append(f"    {call}")
        elif lowered.checked:
            copies, described = names.of(lowered.copies, step)
            lines.append(f"    checked({call}, {copies}, {described})")
        elif not lowered.flat:
            (out,) = names.of(lowered.copies[0][1])
            lines.append(f"    copy({out}, {call})")
        else:
            lines.append(f"    r = {call}")
            outs = names.of(*(out for _, out in lowered.copies))
            for (position, _), out in zip(lowered.copies, outs, strict=True):
                lines.append(f"    copy({out}, r[{position}])")
            lines.append("    r = None")
    lines.append("    return None")
    exec(compile("\n".join(lines), "<graphrt replay>", "exec"), names.namespace)
    run: Callable[[], None] = names.namespace["run"]
    return run


def _spell(call: Call, names: _Names) -> str:
    fn, *values = names.of(call.fn, *call.args, *call.kwargs.values())
    for index, keyword in enumerate(call.kwargs, len(call.args)):
        values[index] = f"{keyword}={values[index]}"
    return f"{fn}({', '.join(values)})"


def _checked_copies(result: Any, copies: tuple[tuple[int, torch.Tensor], ...], step: Step) -> None:
    fresh = tree.tensors(result)
    for position, out in copies:
        new = fresh[position]
        if new.size() != out.size() or new.dtype != out.dtype:
            raise CaptureError(
                "an operator returned another shape than when it was captured",
                op=step.label,
                source=None if step.source is None else str(step.source),
                got=f"{new.dtype} {tuple(new.size())}",
                expected=f"{out.dtype} {tuple(out.size())}",
                advice=IN_PIECES,
            )
        if new.data_ptr() != out.data_ptr():
            core(out).copy_(core(new))
