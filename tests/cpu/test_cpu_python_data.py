"""Memory that a forward makes of Python data, and reads of it that no operator shows."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from cpu_capturing import capture, same

from graphrt.core.base.errors import CaptureSyncError, RefusedOpError
from graphrt.cpu import Arena

ZEROS = [0.0] * 4
SAVED = io.BytesIO()
torch.save(torch.zeros(4), SAVED)

MADE = {
    "tensor": lambda x: torch.tensor(ZEROS),
    "as_tensor": lambda x: torch.as_tensor(ZEROS),
    "asarray": lambda x: torch.asarray(ZEROS),
    "Tensor": lambda x: torch.Tensor(ZEROS),
    "FloatTensor": lambda x: torch.FloatTensor(ZEROS),
    "new_tensor": lambda x: x.new_tensor(ZEROS),
    "new": lambda x: x.new(ZEROS),
    "copied_array": lambda x: torch.tensor(np.zeros(4, np.float32)),
    "parameter": lambda x: torch.nn.Parameter(torch.tensor(ZEROS)),
    "view": lambda x: torch.tensor([ZEROS] * 2)[1],
    "full": lambda x: torch.full((4,), 0.0),
}
WRAPPED = {
    "from_numpy": lambda: torch.from_numpy(np.zeros(4, np.float32)),
    "as_tensor": lambda: torch.as_tensor(np.zeros(4, np.float32)),
    "asarray": lambda: torch.asarray(np.zeros(4, np.float32)),
    "frombuffer": lambda: torch.frombuffer(bytearray(16), dtype=torch.float32),
    "from_dlpack": lambda: torch.from_dlpack(np.zeros(4, np.float32)),
    "load": lambda: torch.load(io.BytesIO(SAVED.getvalue())),
}


def accumulate(make):
    def forward(x):
        total = make(x)
        total += x
        return total * 1

    return forward


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", MADE)
def test_a_constant_that_the_forward_writes_is_reset_at_every_replay(name, inference):
    x = torch.randn(4)
    graph, out = capture(accumulate(MADE[name]), x, inference=inference)
    for _ in range(3):
        x.copy_(torch.randn(4))
        graph.replay()
        assert same(out, x * 1)


def test_a_constant_that_the_caller_overwrites_is_reset_at_the_next_replay():
    graph, out = capture(lambda: torch.tensor([1.0, 2.0]))
    out.zero_()
    graph.replay()
    assert out.tolist() == [1.0, 2.0]


def test_a_constant_that_a_later_segment_writes_is_reset_at_every_step():
    arena, x = Arena(), torch.ones(2)
    first, total = capture(lambda: torch.tensor([1.0, 2.0]), arena=arena)
    second, out = capture(lambda: total.add_(x) * 1, arena=arena)
    for _ in range(2):
        first.replay()
        second.replay()
        assert out.tolist() == [2.0, 3.0]


def test_constants_in_reused_arena_blocks_keep_their_values():
    def forward(x):
        y = torch.zeros(4)
        y[[0, 2]] = torch.tensor([1.0, 2.0])
        y[[1, 3]] += x[[0, 1]]
        return y

    x = torch.randn(4)
    graph, out = capture(forward, x)
    for _ in range(2):
        x.copy_(torch.randn(4))
        graph.replay()
        assert same(out, forward(x))


def test_a_constant_that_is_only_read_adds_no_kernel_to_a_replay():
    graph, _ = capture(lambda x: x + torch.tensor([1.0, 2.0]), torch.ones(2))
    assert graph.kernels == 1


def test_a_constant_silently_updated_by_batch_norm_is_reset_at_every_replay():
    x = torch.ones(3)

    def forward():
        total = torch.tensor([0.0] * 3)
        torch.native_batch_norm(x.view(1, 3, 1), None, None, total, torch.ones(3), True, 0.5, 1e-5)
        return total * 1

    graph, out = capture(forward)
    expected = out.clone()
    graph.replay()
    assert same(out, expected)


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", WRAPPED)
def test_writing_host_memory_wrapped_inside_the_capture_is_refused(name, inference):
    with pytest.raises(RefusedOpError, match="wrapped inside of the capture") as caught:
        capture(accumulate(lambda x: WRAPPED[name]()), torch.ones(4), inference=inference)
    assert "test_cpu_python_data.py" in caught.value.source


def test_host_memory_wrapped_before_the_capture_is_updated_by_replays():
    cache, x = torch.from_numpy(np.zeros(4, np.float32)), torch.ones(4)
    graph, _ = capture(lambda: cache.add_(x))
    graph.replay()
    assert cache.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.tensor([x[0], x[1]]),
        lambda x: torch.as_tensor([x[0], 1.0]),
        lambda x: x.new_tensor([x[0]]),
        lambda x: torch.FloatTensor([x[0]]),
        lambda x: torch.tensor([x.long()[0]]),
        lambda x: torch.tensor([x.bool()[0]]),
        lambda x: torch.zeros(8)[[x.long()[0], x.long()[1]],],
    ],
)
def test_a_tensor_made_of_a_list_of_tensors_is_a_host_read(read):
    with pytest.raises(CaptureSyncError):
        capture(read, torch.ones(4))
