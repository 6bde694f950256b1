"""A platform of no more than the abstract methods passes the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphrt.errors import CaptureSyncError, PlatformError
from graphrt.platforms import (
    Availability,
    Capability,
    GraphWrapper,
    Platform,
    wrapper_class,
)
from graphrt.testing import PlatformConformance


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Runs operators and keeps those that make or write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise CaptureSyncError("a capture cannot read a tensor on the host")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            # Made of Python data, by no operator: a replay begins with its values.
            self.calls.append((torch.ops.aten.copy_.default, (out, out.clone()), {}, None))
        storages = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        writes = any(
            each.alias_info and each.alias_info.is_write for each in func._schema.arguments
        )
        if writes:
            self.calls.append((func, args, kwargs, None))
        elif any(each.untyped_storage().data_ptr() not in storages for each in tensors_in(out)):
            self.calls.append((func, args, kwargs, out))
        return out


class Calls:
    def __init__(self) -> None:
        self.recorder = Recorder()

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, out in self.recorder.calls:
                new = func(*args, **kwargs)
                for place, value in zip(tensors_in(out), tensors_in(new), strict=False):
                    place.copy_(value)

    def reset(self) -> None:
        self.recorder.calls.clear()


class LeastWrapper(GraphWrapper):
    platform_name = "least"


class LeastPlatform(Platform):
    name = "least"
    device_type = "cpu"
    contract_version = 1
    capabilities = frozenset({Capability.CAPTURE})
    capture_executes = True

    def availability(self) -> Availability:
        return Availability(True)

    def get_static_graph_wrapper_cls(self) -> str:
        return f"{__name__}.LeastWrapper"

    def new_memory(self) -> object:
        return object()

    def new_graph(self) -> Calls:
        return Calls()

    def begin_capture(self, graph: Calls, memory: object) -> None:
        graph.recorder.__enter__()

    def end_capture(self, graph: Calls) -> bool:
        graph.recorder.__exit__(None, None, None)
        return bool(graph.recorder.calls)

    def abort_capture(self, graph: Calls) -> None:
        graph.recorder.__exit__(None, None, None)
        graph.reset()


class TestLeastPlatform(PlatformConformance):
    platform = LeastPlatform()


class OfAnother(LeastPlatform):
    """What a plugin's author forgets: whose wrapper it is."""

    name = "another"


class NoWrapper(LeastPlatform):
    def get_static_graph_wrapper_cls(self) -> str:
        return f"{__name__}.Calls"


class Nameless(LeastPlatform):
    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt.GraphWrapper"


@pytest.mark.parametrize(
    ("platform", "got"),
    [
        (OfAnother(), "platform_name = 'least'"),
        (Nameless(), "platform_name = None"),
        (NoWrapper(), "Calls"),
    ],
)
def test_a_wrapper_of_another_platform_is_refused_and_fails_the_suite(platform, got):
    with pytest.raises(PlatformError, match=got):
        wrapper_class(platform)
    suite = TestLeastPlatform()
    suite.platform = platform
    with pytest.raises(PlatformError, match="get_static_graph_wrapper_cls"):
        suite.test_the_wrapper_class_names_this_platform()


def test_the_advice_of_that_error_works():
    class Own(LeastWrapper):
        platform_name = "another"

    globals()["Own"] = Own

    class Advised(OfAnother):
        def get_static_graph_wrapper_cls(self) -> str:
            return f"{__name__}.Own"

    assert wrapper_class(Advised()) is Own
