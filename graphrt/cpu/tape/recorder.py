"""The recorder: every operator of a forward runs once, into memory that replays reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import TaskContractError
from graphrt.core.base.thread_mode import ThreadMode
from graphrt.core.capture.refusals import Source, user_source
from graphrt.cpu.arena import Arena
from graphrt.cpu.private_torch import dense_kernel, disabled_dispatch
from graphrt.cpu.tape.aliases import PLAIN, Aliases, fresh_among, unexpanded, with_replaced
from graphrt.cpu.tape.constants import OwnTensors, TapeConstants, changes_metadata
from graphrt.cpu.tape.lowering import (
    Call,
    Lowered,
    lower_again,
    lower_functional,
    lower_in_place,
    replay_guard,
)
from graphrt.cpu.tape.operators import Operator, operator_of
from graphrt.cpu.tape.refusals import (
    CHANGED_METADATA,
    CHOICE,
    GROWN_TENSOR,
    HIGHER_ORDER,
    HOST_READ,
    INDEXED,
    LOOP,
    MASK_DTYPES,
    ONE_HOT,
    OUTPUT_OF_NO_TAPE,
    UNREAD_VECTORS,
    VALUE_READS,
    Rule,
    reads_allowed,
    rule_of,
)

# Operator -> positions of the vectors among its results. Under a dispatch mode torch also computes
# vectors that nobody asked for (svdvals, eigvalsh, cond, the nuclear norm).
_FACTORS = {"aten::_linalg_svd": (0, 2), "aten::_linalg_eigh": (1,), "aten::linalg_eig": (1,)}

_MINIMUMS = frozenset({"aten::aminmax", "aten::min"})
"""`one_hot` computes the smallest of its numbers by one of these, and reads it on the host."""

ValuesBefore = Callable[[Operator, tuple[Any, ...], dict[str, Any]], list[torch.Tensor]]


@dataclass
class Step:
    """One operator of a replay, as it was called at capture; `lowered` has the call of a replay.

    Updates of tasks compare with `args` and `kwargs` and replace them. `source` is the user's line.
    """

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lowered: Lowered
    source: Source | None
    tokens: tuple[int, ...] = ()
    """The arena block of each copy: `Tape.finish` drops the copy if nothing reads the block."""
    values: list[torch.Tensor] = field(default_factory=list)
    """What `tensors` held before, until the capture ends; only for operators that may be loops."""

    @property
    def label(self) -> str:
        return self.op.label

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The arguments that are tensors."""
        return tree.tensors(self.args, self.kwargs)


class Tape(ThreadMode):
    """Records the operators that its thread runs between begin and end of a capture.

    Results that the forward gets keep their block of the arena in use, so a block is reused as soon
    as the forward drops its tensor. The tape's own references keep no block in use (`Aliases`), but
    keep all other tensors alive.
    """

    supports_higher_order_operators = True
    takes_apart = False  # some rules refuse a composite operator: `one_hot` under inference mode

    def __init__(
        self, arena: Arena, *, inference: bool, values_before: ValuesBefore | None = None
    ) -> None:
        """`values_before` copies an operator's arguments for `Step.values`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._values_before = values_before
        self._values: list[torch.Tensor] = []
        self.arena = arena
        self.steps: list[Step] = []
        """The operators so far that a replay issues, in order."""
        self.in_task = False
        """Whether an updatable task is issued now: its operators may allocate nothing."""
        self.failure: Exception | None = None
        """An error that could not be raised where it arose; the next operator raises it."""
        self._guard = replay_guard(inference=inference)
        self.aliases = Aliases(arena)
        self.constants = TapeConstants(arena)
        self.own_tensors = OwnTensors(arena)
        self._factors: list[tuple[Operator, Source | None, list[int]]] = []
        """Each operator of `_FACTORS`, its line, and the arena blocks of its vectors. Eager code
        that wants no vectors calls another routine, so `finish` refuses vectors that nothing reads.
        """

    def handle(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operator of the forward and record how a replay repeats it; raises the refusal of
        one that no replay can repeat. Composite operators are recorded in their parts."""
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types) and any(map(_has_own_dispatch, types)):
            return NotImplemented
        if self.failure is not None:
            raise self.failure
        if getattr(func, "_schema", None) is None:
            return self._higher_order(func, args, kwargs)
        op = operator_of(func)
        rule = rule_of(op)
        if (
            rule is not None
            and op.name in VALUE_READS
            and self.constants.are_constant((args, kwargs))
        ):
            # `int(torch.tensor(3))`: every replay would read the same value.
            return func(*args, **kwargs)
        if rule is not None:
            args = self._checked_arguments(rule, op, args, kwargs)
        if op.composite:
            return self.take_apart(func, args, kwargs)
        if op.name == "aten::lift_fresh":
            return self.own_tensors.note(self.constants.take(args[0]))
        if op.metadata_only:
            return self._change_metadata(op, args, kwargs)
        if self._values_before is not None:
            self._values = self._values_before(op, args, kwargs)
        if op.mutates:
            return self._mutate(op, args, kwargs)
        result = self._compute(op, args, kwargs)
        self.constants.derive(op, (args, kwargs), result)
        return self.own_tensors.note(result)

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the operators that a higher-order one calls: those of `flex_attention`, and those
        of the branch of a `cond` that every replay takes."""
        name = func.name()
        if name == "cond":
            chosen, *branches, operands = args
            if not self.constants.are_constant(chosen):
                raise CHOICE(op="torch.cond")
            with self:
                return branches[0 if chosen else 1](*operands)
        dense = dense_kernel(func) if name == "flex_attention" else None
        if dense is None:
            raise (LOOP if name == "while_loop" else HIGHER_ORDER)(op=name)
        with self:
            return dense(*args, **kwargs)

    def _checked_arguments(
        self, rule: Rule, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments to record; raises the rule's refusal if they break the rule."""
        if op.name in INDEXED:
            args = self._without_constant_masks(args)
        if rule.is_broken(args, kwargs):
            source = user_source()
            refusal = ONE_HOT if self._is_one_hot(rule, source) else rule.refusal
            raise refusal(op=op.label, source=source)
        return args

    def _is_one_hot(self, rule: Rule, source: Source | None) -> bool:
        """Whether `one_hot` reads the smallest of its numbers. It consists of other operators, so
        only the user's source line has its name."""
        if rule.refusal is not HOST_READ or not self.steps:
            return False
        after_minimum = self.steps[-1].op.name in _MINIMUMS
        return after_minimum and source is not None and "one_hot(" in str(source)

    def _without_constant_masks(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of an index operator, with each constant mask replaced by the indices of its
        true elements. The operator does the same, but reads the mask on the host."""
        if len(args) < 2 or not isinstance(args[1], list | tuple):
            return args
        indices: list[Any] = []
        for index in args[1]:
            is_mask = isinstance(index, torch.Tensor) and index.dtype in MASK_DTYPES
            true_indices = self._true_indices(index) if is_mask else None
            indices += [index] if true_indices is None else true_indices
        return (args[0], indices, *args[2:])

    def _true_indices(self, mask: torch.Tensor) -> list[torch.Tensor] | None:
        """The indices of a constant mask's true elements, as constants; None for other masks."""
        if not self.constants.are_constant(mask):
            return None
        columns = mask.nonzero().unbind(1)
        return [self.own_tensors.note(self.constants.take(column.clone())) for column in columns]

    def finish(self) -> list[Step]:
        """The steps, without copies of outputs that nothing ever read."""
        self._check_factors()
        for step in self.steps:
            copies = step.lowered.copies
            if not copies:
                continue
            read = tuple(
                copy
                for copy, token in zip(copies, step.tokens, strict=True)
                if token == 0 or self.aliases.was_read(token) or self.arena.is_live(token)
            )
            if len(read) < len(copies):
                old = step.lowered
                step.lowered = Lowered(old.kind, old.call, read, old.flat, old.checked)
        self.aliases.clear()
        self.own_tensors.clear()
        return self.steps

    # The kinds of operators -------------------------------------------------------------------

    def _change_metadata(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # No step: later steps have the tensor's new shape, and a replayed `t_()` would undo it.
        if not self.own_tensors.has(args[0]) and changes_metadata(op, args, kwargs):
            raise CHANGED_METADATA(op=op.label)
        try:
            return op.func(*args, **kwargs)
        except RuntimeError as error:
            if self.arena.owns(args[0]):
                raise GROWN_TENSOR(op=op.label) from error
            raise

    def _mutate(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that writes arguments, and record it: a replay writes them again."""
        self.constants.note_write(op, (args, kwargs), op.written_arguments(args, kwargs))
        result = _run(op, args, kwargs)
        fresh = fresh_among(tree.tensors(result), (args, kwargs))
        if fresh:
            if self.in_task:
                _refuse_allocation(op)
            return self._record_again(op, args, kwargs, result, fresh, {})
        weak_args, weak_kwargs = self.aliases.weak(args, kwargs)
        with self._guard():
            call = _with_autocast(op, lower_in_place(op, weak_args, weak_kwargs))
        self._add(op, weak_args, weak_kwargs, Lowered("in_place", call))
        return result

    def _compute(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that writes no argument, and record a step for its new tensors."""
        result = _run(op, args, kwargs)
        tensors = tree.tensors(result)
        fresh = [t for t in fresh_among(tensors, (args, kwargs)) if t.device.type != "meta"]
        if not fresh and (tensors or op.schema.returns):
            # A view, or a number: nothing to replay. One without results may have an effect.
            return result
        if self.in_task:
            _refuse_allocation(op)
        if op.allocates:
            # `empty`: its values are undefined, so a replay has nothing to compute.
            return with_replaced(result, {id(t): self.place(t, op) for t in fresh})
        # id of a result -> its output in the arena.
        placed: dict[int, torch.Tensor] = {}
        all_fresh = bool(fresh) and len(fresh) == len(tensors)
        if all_fresh and op.repeatable and not torch.is_autocast_enabled("cpu"):
            outs = [self.place(t, op) for t in fresh]
            placed = dict(zip(map(id, fresh), outs, strict=True))
            if self._record_into(outs, op, args, kwargs, fresh):
                return with_replaced(result, placed)
        return self._record_again(op, args, kwargs, result, fresh, placed)

    def _record_into(
        self,
        outs: Sequence[torch.Tensor],
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[torch.Tensor],
    ) -> bool:
        """Replay by a call that writes `results` straight into `outs`; False if there is none."""
        weak_args, weak_kwargs = self.aliases.weak(args, kwargs)
        weak_outs = [self.aliases.weak_output(out) for out in outs]
        with self._guard():
            lowered = lower_functional(op, weak_args, weak_kwargs, results, weak_outs)
        if lowered is None:
            return False
        self._add(op, weak_args, weak_kwargs, lowered)
        if op.name in _FACTORS:
            self._note_factors(op, outs)
        return True

    def _record_again(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        fresh: list[torch.Tensor],
        placed: dict[int, torch.Tensor],
    ) -> Any:
        """Replay by running the operator again and copying its `fresh` results into the arena."""
        if not op.mutates:
            self.constants.note_write(op, (args, kwargs), op.written_arguments(args, kwargs))
        weak_args, weak_kwargs = self.aliases.weak(args, kwargs)
        with self._guard():
            call = _with_autocast(op, lower_again(op, weak_args, weak_kwargs, result))
        replaced, copies, tokens = self.copy_fresh(result, fresh, op, placed)
        if op.name in _FACTORS:
            self._note_factors(op, tree.tensors(replaced))
        # A replay compares shapes unless the operator is torch's own, its result is a tensor or a
        # flat list, and no output is expanded (stride 0), as `copy_` refuses those.
        flat = isinstance(result, list | tuple) and all(isinstance(t, torch.Tensor) for t in result)
        simple = op.built_in and (flat or isinstance(result, torch.Tensor))
        simple = simple and not any(0 in out.stride() for _, out in copies)
        lowered = Lowered("again", call, copies, flat=flat, checked=not simple)
        self._add(op, weak_args, weak_kwargs, lowered, tokens)
        return replaced

    def _add(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lowered: Lowered,
        tokens: tuple[int, ...] = (),
    ) -> None:
        step = Step(op, args, kwargs, lowered, user_source(), tokens, self._values)
        self.steps.append(step)

    def _note_factors(self, op: Operator, outs: Sequence[torch.Tensor]) -> None:
        tokens = [self.arena.token_of(outs[i]) for i in _FACTORS[op.name] if outs[i].numel()]
        if tokens:
            self._factors.append((op, user_source(), tokens))

    def _check_factors(self) -> None:
        for op, source, tokens in self._factors:
            if any(self.aliases.was_read(t) or self.arena.is_live(t) for t in tokens):
                continue
            raise UNREAD_VECTORS(op=op.label, source=source)

    # Memory -----------------------------------------------------------------------------------

    def copy_fresh(
        self,
        result: Any,
        fresh: list[torch.Tensor],
        op: Operator,
        placed: dict[int, torch.Tensor],
    ) -> tuple[Any, tuple[tuple[int, torch.Tensor], ...], tuple[int, ...]]:
        """Copy the fresh tensors of `result` into the arena: to the output that `placed` has under
        a tensor's id, else to a new one. Returns the result with these copies, the (position,
        output) pairs that a replay copies, and the block of each output (0: it is empty)."""
        wanted = {id(t) for t in fresh if t.device.type != "meta"}
        replaced: dict[int, torch.Tensor] = {}
        copies: list[tuple[int, torch.Tensor]] = []
        tokens: list[int] = []
        for position, tensor in enumerate(tree.tensors(result)):
            if id(tensor) not in wanted or id(tensor) in replaced:
                continue
            out = placed.get(id(tensor))
            if out is None:
                out = self.place(tensor, op)
            unexpanded(out).copy_(unexpanded(tensor))
            replaced[id(tensor)] = out
            copies.append((position, self.aliases.weak_output(out)))
            tokens.append(self.arena.token_of(out) if out.numel() else 0)
        return with_replaced(result, replaced), tuple(copies), tuple(tokens)

    def place(self, like: torch.Tensor, op: Operator) -> torch.Tensor:
        """Arena memory for an output with the sizes and strides of `like`."""
        if like.is_nested:
            raise OUTPUT_OF_NO_TAPE("a nested tensor", op=op.label)
        if like.layout is not torch.strided or like.device.type != "cpu" or like.is_quantized:
            raise OUTPUT_OF_NO_TAPE(f"layout {like.layout}, device {like.device}", op=op.label)
        return self.arena.empty_strided(like.size(), like.stride(), like.dtype)


def _run(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op.built_in:
        return op.func(*args, **kwargs)
    # The body of a custom operator is Python, and runs again at every replay.
    with reads_allowed():
        return op.func(*args, **kwargs)


def _has_own_dispatch(kind: type) -> bool:
    if kind in PLAIN:
        return False
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not disabled_dispatch


def _with_autocast(op: Operator, call: Call) -> Call:
    # The recorded arguments are cast already. Operators that a custom operator's body calls are
    # not: without autocast at replay they would compute in another dtype.
    if not torch.is_autocast_enabled("cpu"):
        return call
    return Call(_under_autocast, (torch.get_autocast_dtype("cpu"), call))


def _under_autocast(dtype: torch.dtype, call: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", dtype=dtype):
        return call()


def _refuse_allocation(op: Operator) -> NoReturn:
    raise TaskContractError(
        "a task may not allocate",
        got=f"{op.label} with a new output, at {user_source()}",
        expected="operators that write into given outputs and workspace",
        advice="allocate outputs and workspace before the task begins",
    )
