"""What a capture on a device must leave alone of what its caller gives it."""

from __future__ import annotations

import pytest
import torch

from graphrt.core.base.errors import RefusedOpError
from graphrt.core.capture.guard import CallerTensors

ADD, VIEW = torch.ops.aten.add.Tensor, torch.ops.aten.view.default


def test_a_tensor_of_the_host_is_not_read_by_a_graph_of_a_device():
    tensor, other = torch.ones(4), torch.ones(4)
    watched = CallerTensors((tensor,), "cuda")
    watched.check(ADD, (other, other), {})
    watched.check(VIEW, (tensor, [2, 2]), {})
    with pytest.raises(RefusedOpError, match="lies on the host"):
        watched.check(ADD, (other, tensor.view(2, 2)[0]), {})


def test_a_host_that_tells_them_apart_has_numbers_of_the_capture():
    tensor = torch.ones(4)
    watched = CallerTensors((tensor,), "cuda", bake=True)
    watched.check(ADD, (tensor, tensor), {})
    watched.begin()
    tensor.unsqueeze_(0)
    with pytest.raises(RefusedOpError, match="another shape"):
        watched.end()


def test_an_empty_tensor_of_the_host_has_nothing_to_read():
    watched = CallerTensors((torch.ones(0),), "cuda")
    watched.check(ADD, (torch.ones(0), torch.ones(0)), {})


@pytest.mark.parametrize("own", [False, True])
def test_a_new_shape_is_refused_unless_the_tensor_was_made_for_the_call(own):
    tensor = torch.ones(4)
    watched = CallerTensors((tensor,), "cuda", owned=own)
    watched.begin()
    tensor.unsqueeze_(0)
    if own:
        watched.end()
    else:
        with pytest.raises(RefusedOpError, match="another shape"):
            watched.end()


RAND = torch.ops.aten.rand.default


def test_random_numbers_of_the_host_are_refused():
    watched = CallerTensors((), "cuda")
    watched.check(ADD, (torch.ones(1), torch.ones(1)), {})
    watched.check(RAND, ([1],), {"device": "cuda"})
    with pytest.raises(RefusedOpError, match="drawn on the host"):
        watched.check(RAND, ([1],), {})


def test_operators_are_looked_at_only_where_one_may_use_numbers_of_the_host():
    given = torch.ones(4)
    assert CallerTensors((), "cuda").looks
    assert not CallerTensors((), "cuda", may_draw=False).looks
    assert CallerTensors((given,), "cuda", may_draw=False).looks
    assert not CallerTensors((given,), "cuda", bake=True, may_draw=False).looks
    assert not CallerTensors((given,), "cpu").looks


def test_draws_of_other_threads_are_none_of_a_captures():
    watched = CallerTensors((), "cuda")
    watched.begin()
    torch.rand(1)
    watched.end()
