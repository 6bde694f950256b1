"""Running out of streams in the middle of `capture()`: run in processes with few streams."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphMode, GraphOptions, GraphRunner, InputSpec
from graphrt.ascend import AscendPlatform
from graphrt.ascend.driver.library import available_streams
from graphrt.core.base.errors import CaptureError, GraphsDroppedWarning, ResourceExhaustedError

SIZES = list(range(1, 21))


def pieces(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x + 1) + 1


def forked(x: torch.Tensor) -> torch.Tensor:
    """Holds two streams: one is taken at the begin of the capture, one in its middle."""
    current, side = torch.npu.current_stream(), forked.side  # type: ignore[attr-defined]
    side.wait_stream(current)
    with torch.npu.stream(side):
        other = x * 2
    here = x + 1
    current.wait_stream(side)
    return here + other


def spare(streams: int) -> None:
    """Leave so many streams free, and hold the others."""
    global _held
    _held = []
    hold_all_but(streams)


def hold_all_but(streams: int | None) -> None:
    """Hold more streams, or fewer, until so many are free; None is all."""
    while _held and (streams is None or (available_streams() or 0) < streams):
        _held.pop().reset()
    while streams is not None and (available_streams() or 0) > streams:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.zeros(1, device="npu")
        _held.append(graph)


_held: list[Any] = []


def check(mode: str, free: int, *, side: bool = False) -> None:
    """Two of 20 sizes fit; 18 run eagerly, nothing is lost, and all fit when there is room."""
    platform = AscendPlatform()
    forward: Any = forked if side else pieces
    assert platform.availability().available
    torch.zeros(1, device="npu")
    forked.side = torch.npu.Stream()  # type: ignore[attr-defined]
    run = GraphRunner(
        forward,
        mode=mode,
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform=platform,
        options=GraphOptions(breaks=("aten::sigmoid",)),
    )
    runtime_mode = GraphMode[mode]
    spare(free)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.capture()
    assert any(each.category is GraphsDroppedWarning for each in told), told
    report = run.report()
    assert len(report.graphs) == 2, [str(record.descriptor) for record in report.graphs]
    assert len(report.dropped) == 18
    for dropped in report.dropped:
        assert "stream" in dropped.reason, dropped.reason
    left = available_streams()
    assert left is not None
    assert not torch.npu.is_current_stream_capturing()
    assert torch.npu.current_stream() == torch.npu.default_stream()
    served = {}
    for tokens in SIZES:
        x = torch.arange(tokens * 8.0).view(tokens, 8)
        out = run(Batch(tokens, tokens, 1), x=x)
        assert torch.equal(out.cpu(), forward(x.to("npu")).cpu())
        served[tokens] = run.last_dispatch.mode if run.last_dispatch else None
    # Padded up to a captured size, or eager.
    assert list(served.values()).count(runtime_mode) == 20
    assert available_streams() == left
    run.release()
    assert available_streams() == free, (available_streams(), free)
    for graph in _held:
        graph.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.capture()
    assert len(run.report().graphs) == 20 and not run.report().dropped


def ended_queue() -> None:
    """The first capture, of which no warm-up has told anything, finds no side stream, which ends
    torch_npu's queue: no drop hides that."""
    run = _forked_runner(GraphOptions(warmups=0))
    spare(1)
    for _ in range(2):
        with pytest.raises(CaptureError, match="start the process anew") as caught:
            run.capture()
        assert not isinstance(caught.value, ResourceExhaustedError)


def too_few_for_a_fork() -> None:
    """The warm-up has told that a graph takes a side stream too: none is begun, and all serve."""
    with _forked_runner(GraphOptions()) as run:
        spare(1)
        with pytest.warns(GraphsDroppedWarning, match="20 of 20 graphs"):
            run.capture()
        assert available_streams() == 1
        for tokens in SIZES:
            x = torch.arange(tokens * 8.0).view(tokens, 8)
            assert torch.equal(run(Batch(tokens, tokens, 1), x=x).cpu(), forked(x.to("npu")).cpu())
        hold_all_but(None)
        run.capture()
        assert len(run.report().graphs) == 20


def _forked_runner(options: GraphOptions) -> GraphRunner:
    torch.zeros(1, device="npu")
    forked.side = torch.npu.Stream()  # type: ignore[attr-defined]
    return GraphRunner(
        forked,
        mode="FULL",
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform=AscendPlatform(),
        options=options,
    )
