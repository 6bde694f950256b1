"""Memory that compiled code allocates behind the back of every dispatch mode is no state."""

from __future__ import annotations

import pytest
import torch

from graphrt import GraphOptions, GraphPool, GraphRunner, InputSpec
from graphrt.core.base.thread_mode import unseen
from graphrt.trust.snapshot import Left
from graphrt.trust.trial import Run, _memory
from graphrt.trust.watching.watch import Watch
from graphrt.trust.watching.writes import SavedWrites

X = {"x": InputSpec(torch.float32, ("tokens", 4))}


@torch.library.custom_op("graphrt_tests::doubled_into", mutates_args=("out",))
def doubled_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def hidden(x: torch.Tensor, fill: float) -> torch.Tensor:
    """Memory as a compiled kernel makes it: no mode sees it, and it holds whatever was there."""
    return unseen(lambda: torch.full(x.shape, fill))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("check", ["capture", "always"])
def test_hidden_memory_freed_after_the_run_is_not_compared(mode, check):
    fills = iter(range(1, 1000))

    def forward(x):
        out = hidden(x, float(next(fills)))
        doubled_into(x, out)
        return out + 1

    with GraphRunner(
        forward,
        inputs=X,
        mode=mode,
        sizes=[4],
        pool=GraphPool("cpu"),
        options=GraphOptions(check=check),
    ) as runner:
        runner.capture()
        for _ in range(3):
            x = torch.randn(4, 4)
            assert torch.equal(runner(x=x), x * 2 + 1)
            assert runner.last_dispatch.reason.name == "HIT"


def test_a_second_storage_at_a_reused_address_is_saved_separately():
    saves, state = SavedWrites(1 << 20), torch.zeros(4)
    with torch.no_grad():
        Watch(saves=saves).around(lambda: state.add_(1))
        first = saves.take()
        place = state.data_ptr()
        # Another storage at the same address, as an allocator gives it out again.
        again = torch.frombuffer(memoryview(state.numpy()), dtype=torch.float32)
        assert again.data_ptr() == place
        Watch(saves=saves).around(lambda: again.add_(1))
        assert len(saves.take()) == len(first) + 1
        saves.restore()
    assert torch.equal(again, torch.zeros(4))


def test_freed_tensors_are_left_out_of_a_comparison_of_state():
    saves = SavedWrites(1 << 20)
    state, passing = torch.zeros(2), [torch.zeros(3)]
    with torch.no_grad():
        Watch(saves=saves).around(lambda: (state.add_(1), passing[0].add_(1)))
        before = saves.take()
        passing.clear()
        now = saves.take()
        saves.restore()
    runs = [Run(None, Left(each, [], [], [], []), Watch()) for each in (before, now)]
    assert [len(each) for each in (before, *_memory(*runs))] == [2, 1, 1]
    assert torch.equal(state, torch.zeros(2))
