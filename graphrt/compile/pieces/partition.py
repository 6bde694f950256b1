"""Inductor's own partition: code of one whole graph, of which the parts between the splitting
operators are captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from graphrt.compile.backend.choice import backend_for
from graphrt.compile.errors import CompileError
from graphrt.compile.locks import process_lock
from graphrt.compile.options import CompileOptions
from graphrt.compile.pieces.wrapping import Wrapping, is_fixed
from graphrt.compile.private_torch.patches import (
    PartitionFunction,
    lacks_partitions,
    partitions_taken,
)
from graphrt.core.base import tree
from graphrt.core.base.errors import BakedScalarError, BreakError
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.recorder import Bridges, separate_strides
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.replay.entry import advice_for_another

# Inductor's hook for its partitions is process-wide.
_lock = process_lock()
_ALIGNMENT = 16
"""Bytes; Inductor's kernels rely on it."""


class Partition:
    """One partition, called as Inductor does: with one list, which the callee may empty.

    Calls go to `run`: Inductor's `function`, until `Partitioned.capture_in` replaces it.
    """

    def __init__(self, function: PartitionFunction) -> None:
        self.function = function
        self.run = function

    def __call__(self, args: list[Any]) -> Any:
        return self.run(args)


class Partitioned:
    """Compiled code of a whole graph; its partitions are captured once `capture_in` is called.

    A partition's inputs must be where its graph reads them. Weights, arguments of the step and
    results of other partitions are. Any other input, such as the result of a splitting operator, is
    copied to a fixed buffer before the partition, and back after it, as it may be written too.
    """

    def __init__(self, run: Callable[..., Any], partitions: Sequence[Partition]) -> None:
        self.partitions = tuple(partitions)
        self.conditions: Sequence[Any] = getattr(run, "conditions", ())
        self._run = run
        self._wrapping: Wrapping | None = None
        # Buffers of results, for the option outputs="static".
        self._result_buffers = Bridges()
        # Addresses of the storages of this step's arguments, which stay where they are.
        self._step_storages: set[int] = set()

    def __call__(self, *args: Any) -> Any:
        wrapping = self._wrapping
        context = None if wrapping is None else wrapping.read_context()
        if wrapping is None or context is None or context.mode is not GraphMode.PIECEWISE:
            return self._run_aligned(args)
        self._step_storages = {_storage(each) for each in args if isinstance(each, torch.Tensor)}
        result = self._run(*args)
        if wrapping.options.outputs == "clone":
            return tree.cloned(result)
        return self._in_static_buffers(result) if wrapping.options.outputs == "static" else result

    def capture_in(self, wrapping: Wrapping, splitting: frozenset[str]) -> list[GraphWrapper]:
        """Put each partition into a PIECEWISE wrapper, and return the wrappers. The operators
        `splitting` may not run inside of one."""
        self._wrapping = wrapping
        options = replace(wrapping.options, outputs="pool", breaks=tuple(sorted(splitting)))
        wrappers = []
        for partition in self.partitions:
            wrapper = wrapping.wrap(_with_list(partition.function), options)
            partition.run = _Captured(partition.function, wrapper, wrapping, self.is_fixed)
            wrappers.append(wrapper)
        return wrappers

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a partition's input is at one address in every step like this one."""
        assert self._wrapping is not None
        return is_fixed(tensor, self._step_storages, self._wrapping.pool)

    def _run_aligned(self, args: tuple[Any, ...]) -> Any:
        """Run with copies of misaligned tensors, and copy them back.

        Inductor's code does that itself, but not if its partitions are called by a hook.
        """
        misaligned = [
            index
            for index, each in enumerate(args)
            if isinstance(each, torch.Tensor) and each.is_cuda and each.data_ptr() % _ALIGNMENT
        ]
        if not misaligned:
            return self._run(*args)
        copies = list(args)
        for index in misaligned:
            copies[index] = args[index].clone()
        result = self._run(*copies)
        for index in misaligned:
            args[index].copy_(copies[index])
        return result

    def _in_static_buffers(self, result: Any) -> Any:
        fixed, _ = self._result_buffers.fix(0, result, stays=lambda path, tensor: False)
        return fixed


class _Captured:
    """Runs a partition through its wrapper, on copies of the inputs that have no fixed address."""

    def __init__(
        self,
        function: PartitionFunction,
        wrapper: GraphWrapper,
        wrapping: Wrapping,
        is_fixed: Callable[[torch.Tensor], bool],
    ) -> None:
        self._function = function
        self._wrapper = wrapper
        self._read_context = wrapping.read_context
        self._is_fixed = is_fixed
        self._bridges = Bridges()
        # Descriptor -> (index of an input, the buffer that the graph reads in its place).
        self._copied_inputs: dict[BatchDescriptor, list[tuple[int, torch.Tensor]]] = {}
        # Descriptor -> the numbers among the inputs, which its graph has baked in.
        self._numbers: dict[BatchDescriptor, list[Any]] = {}

    def __call__(self, args: list[Any]) -> Any:
        context = self._read_context()
        descriptor = None if context is None else context.descriptor
        if context is None or descriptor is None or context.mode is not GraphMode.PIECEWISE:
            return self._function(args)
        numbers = [each for each in args if not isinstance(each, torch.Tensor)]
        if context.capture is not None or descriptor not in self._copied_inputs:
            self._copied_inputs[descriptor] = self._buffers_for(args)
            self._numbers[descriptor] = numbers
        elif numbers != self._numbers[descriptor]:
            raise BakedScalarError(
                "a partition gets another number than its graph has baked in",
                got=numbers,
                expected=self._numbers[descriptor],
                advice="keep sizes that depend on data out of code between splitting operators",
            )
        copies = self._copied_inputs[descriptor]
        originals = [args[index] for index, _ in copies]
        for index, buffer in copies:
            _check_shape(args[index], buffer)
            args[index] = buffer.copy_(args[index])
        result = self._wrapper(*args)
        for original, (_, buffer) in zip(originals, copies, strict=True):
            original.copy_(buffer)
        return result

    def _buffers_for(self, args: list[Any]) -> list[tuple[int, torch.Tensor]]:
        copies: list[tuple[int, torch.Tensor]] = []
        storages: set[int] = set()
        for index, tensor in enumerate(args):
            if not isinstance(tensor, torch.Tensor) or self._is_fixed(tensor):
                continue
            dense = separate_strides(tensor) == tensor.stride()
            if _storage(tensor) in storages or not dense:
                raise CompileError(
                    "a partition reads views of what a splitting operator returned",
                    got=f"input {index}, {'a second one of its storage' if dense else 'expanded'}",
                    expected="separate tensors, which separate buffers can stand for",
                    advice="let the operator write into given tensors, or leave "
                    "use_inductor_graph_partition out",
                )
            storages.add(_storage(tensor))
            copies.append((index, self._bridges.buffer((0, index), tensor)))
        return copies


@contextmanager
def collecting(splitting_ops: Sequence[str]) -> Iterator[list[Partition]]:
    """Let Inductor partition the code that the block compiles or loads; yields its partitions.

    Operators tagged `cudagraph_unsafe` and those in `splitting_ops` stay between them.
    """
    collected: list[Partition] = []
    owner = threading.get_ident()

    def take(function: PartitionFunction, number: int) -> PartitionFunction:
        if threading.get_ident() != owner:
            return function  # of a torch.compile in another thread
        if number == 0:
            collected.clear()
        collected.append(Partition(function))
        return collected[-1]

    with _lock, partitions_taken(take, splitting_ops):
        yield collected


def partitions(options: CompileOptions, device_type: str) -> tuple[bool, str]:
    """Whether Inductor splits the graph; and if not, although that was asked for, why."""
    if not options.use_inductor_graph_partition or options.whole_graph:
        return False, ""
    if options.backend != "inductor":
        return False, f"backend {options.backend!r} partitions nothing"
    if device_type in ("cpu", "mps"):
        return False, f"Inductor leaves code for device type {device_type!r} out of its partitions"
    _, reason = backend_for(options.backend, device_type)
    if reason:
        return False, reason
    if lacks_partitions():
        return False, f"torch {torch.__version__} offers no way to capture Inductor's partitions"
    return True, ""


def _with_list(function: PartitionFunction) -> Callable[..., Any]:
    # Inductor's code empties the list that it is given.
    return lambda *args: function(list(args))


def _check_shape(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
        raise BreakError(
            "a splitting operator returned another tensor than at capture",
            got=f"{tensor.dtype} {tuple(tensor.shape)}",
            expected=f"{buffer.dtype} {tuple(buffer.shape)}",
            advice=advice_for_another(tensor, buffer),
        )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
