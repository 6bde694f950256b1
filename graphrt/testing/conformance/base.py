"""What the conformance tests share: a pool, tensors on the device, capture and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphrt._runner import GraphRunner
from graphrt.core.batch.context import CaptureTransaction, ForwardContext
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.options import GraphOptions
from graphrt.core.capture.wrapper import GraphWrapper, wrapper_class
from graphrt.core.device.contract import Capability
from graphrt.core.device.platform import Platform
from graphrt.core.inputs.spec import InputSpec
from graphrt.core.replay.entry import SegmentHooks
from graphrt.core.replay.pool import GraphPool

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
D4, D2 = BatchDescriptor(4), BatchDescriptor(2)
"""Descriptors of 4 and of 2 tokens."""


class ConformanceBase:
    """The fixtures and steps that all tests share. Only elementary operators are used, so that
    devices whose backend is young can run the suite."""

    platform: Platform
    """The platform under test, which a subclass sets."""

    @pytest.fixture(autouse=True)
    def _available(self) -> None:
        availability = self.platform.availability()
        if not availability.available:
            pytest.skip(f"platform {self.platform.name} is not available: {availability.reason}")

    @property
    def notes_operators(self) -> bool:
        """Whether captures record operators and replays run each as a whole: then no eager part can
        be inside of an operator's kernel."""
        return self.platform.capture_executes

    @pytest.fixture
    def pool(self) -> Iterator[GraphPool]:
        pool = GraphPool(self.platform)
        yield pool
        self.platform.synchronize()

    def need(self, capability: Capability) -> None:
        if capability not in self.platform.capabilities:
            pytest.skip(f"platform {self.platform.name} lacks {capability.name}")

    def tensor(self, *values: float) -> torch.Tensor:
        """A column [len(values), 8] on the device whose rows are filled with `values`."""
        host = torch.tensor(values, dtype=torch.float32).unsqueeze(1).repeat(1, 8)
        return host.to(self.platform.device_type)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not a synchronisation of the device: CUDA forbids that while any thread captures.
        return tensor.detach().cpu().clone()

    def first(self, tensor: torch.Tensor) -> list[float]:
        """The first column: of a tensor made by `tensor`, the value of each row."""
        column: list[float] = self.host(tensor)[:, 0].tolist()
        return column

    def wrap(
        self,
        function: Callable[..., Any],
        mode: GraphMode,
        pool: GraphPool,
        *,
        breakable: bool = False,
        hooks: SegmentHooks | None = None,
        **options: Any,
    ) -> GraphWrapper:
        return wrapper_class(self.platform)(
            function,
            mode,
            pool=pool,
            options=GraphOptions(**options),
            breakable=breakable,
            hooks=hooks,
        )

    def runner_of(self, forward: Callable[..., Any], **arguments: Any) -> GraphRunner:
        """A runner of `forward(x)`, x as `tensor` makes it; by default with one PIECEWISE graph."""
        arguments = {
            "mode": "PIECEWISE", "sizes": [4], "outputs": ("tokens", 8), **arguments
        }  # fmt: skip
        return GraphRunner(
            forward,
            inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
            platform=self.platform,
            **arguments,
        )

    def capture(
        self,
        function: Callable[..., Any],
        mode: GraphMode,
        *args: Any,
        descriptor: BatchDescriptor = D4,
        slot: int = -1,
        metadata: Any = None,
    ) -> Any:
        """Call `function` in a step that captures; rolled back if it fails."""
        transaction = CaptureTransaction(slot)
        context = ForwardContext(mode, descriptor, metadata=metadata, capture=transaction)
        try:
            with context:
                result = function(*args)
        except BaseException:  # an interrupt too takes the capture back
            transaction.rollback()
            raise
        return result

    def step(
        self,
        function: Callable[..., Any],
        mode: GraphMode,
        *args: Any,
        descriptor: BatchDescriptor = D4,
        slot: int = -1,
        updates: Any = None,
        metadata: Any = None,
    ) -> Any:
        """Call `function` in a step that replays what is captured."""
        with ForwardContext(mode, descriptor, slot, updates, metadata):
            return function(*args)


class Counting:
    """A callable that counts how often its Python ran."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)
