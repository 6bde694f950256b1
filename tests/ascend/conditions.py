"""Forwards with if-nodes, run by `test_conditions` on devices that have them and that do not."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from graphrt import Batch, GraphRunner, InputSpec
from graphrt.core.base.errors import CaptureError, CaptureSyncError


def plain(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    return torch.cond(flag[0], lambda x: x * 2, lambda x: x - 5, (x,)) + 1


def by_torch_npu(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    """Captured as an if-node, by torch_npu's dispatch mode."""
    from torch_npu.npu import _npugraph_conditional_nodes as nodes

    capturing = torch.npu.is_current_stream_capturing()
    with nodes.NPUGraphCaptureControlFlowOpDispatchMode() if capturing else nullcontext():
        return plain(x, flag)


def runner(forward: object) -> GraphRunner:
    return GraphRunner(
        forward,
        mode="FULL",
        sizes=[2, 4],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 4)),
            "flag": InputSpec(torch.bool, (1,)),
        },
        outputs=("tokens", 4),
        platform="ascend-sim",
        max_num_tokens=4,
        max_num_reqs=4,
    )


def serves(run: GraphRunner, *, graphs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, expected = [], []
    for step in range(24):
        tokens, flag = step % 4 + 1, step // 4 % 2 == 0
        x = torch.randn(tokens, 4, generator=generator)
        outputs.append(run(Batch(tokens, tokens, 1), x=x, flag=torch.tensor([flag])).clone())
        expected.append((x * 2 if flag else x - 5) + 1)
        assert run.last_dispatch is not None and (run.last_dispatch.slot >= 0) is graphs
    assert all(torch.equal(a.cpu(), b) for a, b in zip(outputs, expected, strict=True))


def if_nodes_are_replayed() -> None:
    with runner(by_torch_npu) as run:
        run.capture()
        serves(run, graphs=True)


def torch_cond_by_itself_reads_its_predicate() -> None:
    with runner(plain) as run:
        with pytest.raises(CaptureSyncError, match=r"torch\.cond"):
            run.capture()
        serves(run, graphs=False)


def a_device_without_them_says_so() -> None:
    with runner(by_torch_npu) as run:
        with pytest.raises(CaptureError, match="has an if-node"):
            run.capture()
        serves(run, graphs=False)
