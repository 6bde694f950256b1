from __future__ import annotations

import pytest
import torch
from cpu_capturing import capture, same

from graphrt.core.base.errors import CaptureError
from graphrt.cpu import Arena
from tests.models.llama import Llama, step_inputs


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def llama(dim: int = 64) -> Llama:
    return Llama(layers=4, dim=dim, attention="inline")


def inputs(batch: int, step: int) -> list[torch.Tensor]:
    """In the order of the model's arguments."""
    return list(step_inputs(batch, step, seed=step).values())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager_bit_for_bit_on_a_paged_llama(inference, batch, dtype):
    model, static = llama().to(dtype), inputs(batch, 0)
    arena = Arena()
    graph, out = capture(model, *static, arena=arena, inference=inference)
    with torch.inference_mode(inference), torch.no_grad():
        for step in range(1, 8):
            for old, new in zip(static, inputs(batch, step), strict=True):
                old.copy_(new)
            before = [b.clone() for b in model.buffers()]
            graph.replay()
            replayed, caches = out.clone(), [b.clone() for b in model.buffers()]
            for buffer, saved in zip(model.buffers(), before, strict=True):
                buffer.copy_(saved)
            assert same(replayed, model(*static))
            assert all(map(same, caches, model.buffers()))


def test_the_capturing_call_itself_returns_what_eager_returns():
    model, static = llama(), inputs(2, 0)
    with torch.no_grad():
        expected = model(*static)
    _, out = capture(model, *static)
    assert same(out, expected)


def test_the_arena_needs_less_than_half_the_memory_of_all_outputs():
    arena, sizes = Arena(), list[int]()
    allocate = arena._allocate
    arena._allocate = lambda nbytes: sizes.append(nbytes) or allocate(nbytes)  # type: ignore
    capture(llama(dim=256), *inputs(8, 0), arena=arena)
    assert arena.reserved_bytes < sum(sizes) / 2


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_replay_does_not_depend_on_the_modes_of_the_caller(inference):
    model, static = llama(), inputs(2, 0)

    def forward():
        return model(*static) + torch.zeros(4096).sum()

    graph, out = capture(forward, inference=inference)
    expected = out.clone()
    callers = [
        torch.enable_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ]
    for caller in callers:
        with torch.inference_mode(inference):
            out.zero_()
        with caller:
            grad = torch.is_grad_enabled()
            graph.replay()
            assert torch.is_grad_enabled() == grad
        assert same(out, expected), caller
        assert not out.requires_grad


def test_a_graph_captured_in_inference_mode_replays_outside_inference_mode():
    with torch.inference_mode():
        cache, x = torch.zeros(4), torch.ones(4)

    def forward():
        cache.add_(x)
        return cache * 2

    graph, out = capture(forward, inference=True)
    graph.replay()
    assert out.tolist() == [4.0] * 4


def test_replaying_one_graph_overwrites_the_output_of_another_in_its_arena():
    arena, x = Arena(), torch.arange(8.0)
    first, out = capture(lambda: (x + 1) * 2, arena=arena)
    kept = arena.alias(out)
    del out
    second, other = capture(lambda: (x + 5) * 3, arena=arena)
    first.replay()
    assert kept.tolist() == ((x + 1) * 2).tolist()
    second.replay()
    assert kept.tolist() != ((x + 1) * 2).tolist()
    assert other.tolist() == ((x + 5) * 3).tolist()


def test_an_output_that_the_caller_keeps_is_not_overwritten():
    arena, x = Arena(), torch.arange(8.0)
    _, out = capture(lambda: (x + 1) * 2, arena=arena)
    second, _ = capture(lambda: (x + 5) * 3, arena=arena)
    second.replay()
    assert out.tolist() == ((x + 1) * 2).tolist()


def test_a_block_dropped_inside_a_capture_is_reused_in_that_capture():
    x, addresses = torch.ones(100), []

    def forward():
        y = x
        for _ in range(6):
            y = y + 1
            addresses.append(y.data_ptr())
        return y

    graph, out = capture(forward)
    assert len(set(addresses)) == 2
    graph.replay()
    assert out.eq(7).all()


def test_a_segment_uses_the_arena_of_the_segment_before():
    arena, x = Arena(), torch.arange(4.0)
    first, a = capture(lambda: x + 1, arena=arena)
    eager = torch.zeros(4)
    with torch.no_grad():
        eager.copy_(a).mul_(10)
    second, b = capture(lambda: eager + a, arena=arena)
    x.fill_(5)
    first.replay()
    eager.copy_(a).mul_(10)
    second.replay()
    assert b.tolist() == [66.0] * 4


def test_random_operators_draw_fresh_numbers_and_capture_draws_once():
    def forward():
        return torch.rand(4), torch.nn.functional.dropout(torch.ones(64), 0.5)

    torch.manual_seed(5)
    expected = [forward() for _ in range(3)]
    torch.manual_seed(5)
    graph, out = capture(forward)
    assert all(map(same, out, expected[0]))
    for step in expected[1:]:
        graph.replay()
        assert all(map(same, out, step))


def test_an_in_place_operator_runs_once_when_captured():
    counter = torch.zeros(3)
    graph, _ = capture(lambda: counter.add_(1))
    assert counter.tolist() == [1.0] * 3
    graph.replay()
    assert counter.tolist() == [2.0] * 3


def test_batch_norm_in_training_updates_its_statistics_once_per_call():
    x, eager = torch.randn(8, 3, 4), torch.nn.BatchNorm1d(3)
    captured = torch.nn.BatchNorm1d(3)
    with torch.no_grad():
        eager(x), eager(x)
    graph, _ = capture(captured, x)
    graph.replay()
    for a, b in zip(eager.buffers(), captured.buffers(), strict=True):
        assert same(a, b)


def test_a_reset_graph_refuses_to_replay():
    graph, _ = capture(lambda: torch.ones(3) + 1)
    graph.reset()
    with pytest.raises(CaptureError, match="nothing was captured"):
        graph.replay()
    assert graph.kernels == 0
