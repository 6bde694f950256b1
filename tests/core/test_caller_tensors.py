"""What a capture refuses: host tensors in device graphs, reshaped arguments, host random draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import BatchDescriptor, ForwardContext, GraphMode, GraphPool
from graphrt.core.base.errors import RefusedOpError
from graphrt.core.batch.context import CaptureTransaction
from graphrt.core.capture.guard import host_check
from graphrt.core.capture.wrapper import GraphWrapper

ADD, VIEW = torch.ops.aten.add.Tensor, torch.ops.aten.view.default


def check(tensors: list[torch.Tensor], func: Any, args: Any, kwargs: Any = None) -> None:
    looked = host_check(tensors, RefusedOpError, may_draw=True)
    assert looked is not None
    looked(func, args, kwargs or {})


def test_a_device_graph_that_reads_a_host_argument_tensor_is_refused():
    tensor, other = torch.ones(4), torch.ones(4)
    check([tensor], ADD, (other, other))
    check([tensor], VIEW, (tensor, [2, 2]))
    with pytest.raises(RefusedOpError, match="is a tensor on the host"):
        check([tensor], ADD, (other, tensor.view(2, 2)[0]))


def test_an_empty_host_argument_tensor_is_allowed_in_a_device_graph():
    empty, full = torch.ones(0), torch.ones(4)
    check([empty], ADD, (empty, empty))
    with pytest.raises(RefusedOpError, match="is a tensor on the host"):
        check([empty, full], ADD, (empty, full))


@pytest.mark.parametrize("own", [False, True])
def test_reshaping_an_argument_in_place_is_refused_except_for_a_runners_own_tensors(own):
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        tensor.data = torch.ones(2, 2)
        return tensor + 1

    wrapper = GraphWrapper(forward, "FULL", pool=GraphPool("cpu"))
    if own:
        wrapper.serve_owner()
    with ForwardContext(GraphMode.FULL, BatchDescriptor(4), capture=CaptureTransaction()):
        if own:
            wrapper(torch.ones(4))
        else:
            with pytest.raises(RefusedOpError, match="changes the shape or the memory"):
                wrapper(torch.ones(4))


RAND = torch.ops.aten.rand.default


def test_drawing_random_numbers_on_the_host_during_a_capture_is_refused():
    check([], ADD, (torch.ones(1), torch.ones(1)))
    check([], RAND, ([1],), {"device": "cuda"})
    with pytest.raises(RefusedOpError, match="drawn on the host"):
        check([], RAND, ([1],))


def test_operators_are_checked_only_if_host_tensors_or_random_numbers_are_possible():
    assert host_check([], RefusedOpError, may_draw=True)
    assert not host_check([], RefusedOpError, may_draw=False)
    assert host_check([torch.ones(4)], RefusedOpError, may_draw=False)
    assert not host_check([torch.ones(0)], RefusedOpError, may_draw=False)
