"""Where the actions are: the device contract, what is below it on each platform, and torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from graphrt import Platform
from tests.faults.inject import Faults, called_by_graphrt

CONTRACT = {
    "new_memory": "memory",
    "allocate_in": "memory",
    "host_buffer": "buffer",
    "new_graph": "graph",
    "begin_capture": "begin",
    "end_capture": "end",
    "reset_graphs": "reset",
    "release_memory": "reset",
    "synchronize": "reset",
    "new_stream": "stream",
    "on_stream": "stream",
    "current_stream": "stream",
    "order_after": "stream",
    "new_event": "event",
    "owns": "query",
    "weak_ref": "query",
    "memory_bytes": "query",
    "driver_bytes": "query",
    "memory_figures": "query",
    "memory_blocks": "query",
    "pointers": "query",
    "task_begin": "task",
    "task_end": "task",
    "replay_updated": "task",
}
"""Methods of a platform that act on the device, by the kind of action. `abort_capture` takes back
what failed: the contract has it raise nothing."""

BELOW = {
    "cpu": {
        "graphrt.cpu.arena:_map": "memory",
        "graphrt.cpu.arena:Arena._allocate": "memory",
        "graphrt.cpu.graph:TapeGraph.replay": "replay",
        "graphrt.cpu.graph:TapeGraph.update_task": "task",
        "graphrt.cpu.graph:assemble": "instantiate",
    },
    "npu": {
        "torch_npu.npu:NPUGraph.capture_begin": "begin",
        "torch_npu.npu:NPUGraph.capture_end": "end",
        "torch_npu.npu:NPUGraph.replay": "replay",
        "torch_npu.npu:graph_task_group_begin": "task",
        "torch_npu.npu:graph_task_group_end": "task",
        "torch_npu.npu:graph_task_update_begin": "task",
        "torch_npu.npu:graph_task_update_end": "task",
        "torch_npu.npu:ExternalEvent.record": "event",
        "torch_npu.npu:ExternalEvent.wait": "event",
        "torch_npu.npu:ExternalEvent.reset": "event",
        "torch_npu.npu:mem_get_info": "query",
        "torch_npu.npu:memory_snapshot": "query",
    },
    "cuda": {
        "torch.cuda:CUDAGraph.capture_begin": "begin",
        "torch.cuda:CUDAGraph.capture_end": "end",
        "torch.cuda:CUDAGraph.instantiate": "instantiate",
        "torch.cuda:CUDAGraph.replay": "replay",
        "torch.cuda:mem_get_info": "query",
        "torch.cuda:memory_snapshot": "query",
    },
}
"""What platforms do by their own, by device type; looked up when it is called."""

TORCH = {
    "torch:empty": "buffer",
    "torch:zeros": "buffer",
    "torch:full": "buffer",
    "torch:empty_strided": "buffer",
    "torch:Tensor.new_empty": "buffer",
    "torch:Tensor.clone": "copy",
    "torch:Tensor.copy_": "copy",
    "torch:Tensor.__setitem__": "copy",
}
"""Functions of torch, as far as graphrt itself calls them."""

EVENT = ("record", "query", "synchronize")


def faulty(platform: Platform, faults: Faults) -> Platform:
    """The platform itself, every action of which counts in `faults`; nobody else may use it."""
    for name, kind in CONTRACT.items():
        setattr(platform, name, faults.around(kind, getattr(platform, name)))
    new_event: Callable[[], Any] = platform.new_event

    def new_faulty_event() -> Any:
        event = new_event()
        return None if event is None else _Event(faults, event)

    platform.new_event = new_faulty_event  # type: ignore[method-assign]
    return platform


class _Event:
    """A device event whose calls are actions; it may not be subclassed everywhere."""

    def __init__(self, faults: Faults, event: Any) -> None:
        for name in EVENT:
            setattr(self, name, faults.around("event", getattr(event, name)))


@contextmanager
def patched(device_type: str, faults: Faults) -> Iterator[None]:
    """What is below the contract, and torch, with every action counted inside of the block."""
    undo: list[Callable[[], object]] = []
    try:
        for path, kind in BELOW[device_type].items():
            undo.append(_patch(path, partial(faults.around, kind)))
        for path, kind in TORCH.items():
            undo.append(_patch(path, partial(_own, faults, kind)))
        if device_type == "cuda":
            undo.append(_patch_driver(faults))
        yield
    finally:
        for each in reversed(undo):
            each()


def _own(faults: Faults, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    around = faults.around(kind, original)

    def call(*args: Any, **kwargs: Any) -> Any:
        if faults.on and called_by_graphrt():
            return around(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def _patch(path: str, wrap: Callable[[Any], Any]) -> Callable[[], object]:
    module, _, names = path.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = names.split(".")
    for each in outer:
        owner = getattr(owner, each)
    if not hasattr(owner, name):
        return lambda: None  # of another version of torch
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    # What a base class has is not to be copied to this one.
    return lambda: delattr(owner, name) if own is None else setattr(owner, name, own)


class Driver:
    """The CUDA driver's table of functions; one that is to fail returns "out of memory"."""

    def __init__(self, faults: Faults, library: Any) -> None:
        self._faults = faults
        self._library = library

    def __getattr__(self, name: str) -> _DriverFunction:
        return _DriverFunction(self._faults, name, getattr(self._library, name))

    def __getitem__(self, name: str) -> _DriverFunction:
        # A function of its own, as that of a library is: its argument types are set.
        return _DriverFunction(self._faults, name, self._library[name])


class _DriverFunction:
    _CUDA_ERROR_OUT_OF_MEMORY = 2
    _UNDO = ("cuStreamEndCapture", "cuGraphDestroy")
    """What ends or destroys something is how a failure is taken back."""

    def __init__(self, faults: Faults, name: str, function: Any) -> None:
        self._faults = faults
        self._counts = not name.startswith(self._UNDO)
        self._function = function

    @property
    def argtypes(self) -> Any:
        return self._function.argtypes

    @argtypes.setter
    def argtypes(self, types: Any) -> None:
        self._function.argtypes = types

    def __call__(self, *args: Any) -> int:
        if self._counts and self._faults.strikes("driver"):
            return self._CUDA_ERROR_OUT_OF_MEMORY
        status: int = self._function(*args)
        return status


def _patch_driver(faults: Faults) -> Callable[[], object]:
    return _patch(
        "graphrt.cuda.driver.api:_library",
        lambda original: lambda: None if original() is None else Driver(faults, original()),
    )


def seed_device(device_type: str) -> list[torch.Tensor]:
    """The states of the generators that forwards draw from."""
    states = [torch.get_rng_state()]
    if device_type != "cpu":
        states.append(torch.get_device_module(device_type).get_rng_state())
    return states
