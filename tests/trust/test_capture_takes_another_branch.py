"""Forwards that call other operators while they are captured, as transformers' do on a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, eager_break
from graphrt.core.replay.recording import current_capture
from graphrt.errors import GraphQuarantinedWarning
from graphrt.trust.compare import rounding_of
from tests.trust.scenario import WIDTH, X

ROWS = (4, 4, 3, 2, 1, 4, 3)
WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / 3


def captured() -> bool:
    """As `torch.cuda.is_current_stream_capturing()`, which transformers asks."""
    return current_capture() is not None


class Rounds:
    """In a capture the product is the sum of two, which rounds otherwise."""

    def __call__(self, x):
        if captured():
            half = WIDTH // 2
            y = x[:, :half] @ WEIGHT[:half] + x[:, half:] @ WEIGHT[half:]
        else:
            y = x @ WEIGHT
        return self.last(y)

    def last(self, y):
        return y * 2


class RoundsBesideAPart(Rounds):
    @eager_break
    def last(self, y):
        return y * 2


class RoundsState(Rounds):
    def __init__(self):
        self.state = torch.zeros(8, WIDTH)

    def last(self, y):
        self.state[: len(y)].copy_(y)
        return y * 2


class IsWrong(Rounds):
    def __call__(self, x):
        return (x @ WEIGHT * 1.01) if captured() else x @ WEIGHT


class IsWrongByTheSameOperators(Rounds):
    """One bit: by its operators alone it is known not to be rounding."""

    def __call__(self, x):
        return x @ WEIGHT * (1.0 + 2.0**-22 if captured() else 1.0)


def runner_of(forward, mode="FULL", outputs="pool"):
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[1, 2, 4],
        inputs={"x": X},
        outputs=("tokens", WIDTH),
        options=GraphOptions(outputs=outputs),
    )
    runner.capture()
    return runner


def steps(runner):
    generator = torch.Generator().manual_seed(3)
    reasons = []
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, generator=generator)
        torch.testing.assert_close(runner(x=x), x @ WEIGHT * 2)
        reasons.append(runner.last_dispatch.reason.name)
    return reasons


@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
@pytest.mark.parametrize(
    ("forward", "mode"),
    [
        (Rounds, "FULL"),
        (Rounds, "PIECEWISE"),
        (RoundsBesideAPart, "PIECEWISE"),
        (RoundsState, "FULL"),
        (Rounds, "FULL_AND_PIECEWISE"),
    ],
)
def test_a_capture_by_other_operators_may_differ_by_rounding_and_is_noted(forward, mode, outputs):
    runner = runner_of(forward(), mode, outputs)
    assert set(steps(runner)) == {"HIT"}
    trials = [each for each in runner.report().trust.trials if each.status == "tried"]
    notes = " ".join(note for each in trials for note in each.notes)
    assert trials and all(each.deterministic for each in trials)
    assert "takes another way while it is captured, first aten.mm" in notes
    assert (
        "where the graph has aten.slice" in notes
        and "test_capture_takes_another_branch.py" in notes
    )


def test_a_capture_that_differs_beyond_rounding_is_quarantined_naming_the_operator():
    runner = runner_of(IsWrong())
    with pytest.warns(GraphQuarantinedWarning, match="the graph has aten.mul"):
        runner(x=torch.randn(4, WIDTH))
    assert runner.last_dispatch.reason.name == "QUARANTINED"


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_capture_by_the_same_operators_must_give_equal_bits(mode):
    runner = runner_of(IsWrongByTheSameOperators(), mode)
    with pytest.warns(GraphQuarantinedWarning, match="expected: equal bits"):
        runner(x=torch.randn(4, WIDTH))


class Parts:
    """What graphrt itself issues in a capture: copies to bridges and to static buffers."""

    def __init__(self):
        self.table = None
        self.norm = torch.nn.LayerNorm(WIDTH).requires_grad_(False)

    def __call__(self, x):
        if self.table is None:  # by the first run alone
            self.table = torch.ones(WIDTH) * 2
        y = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        y = self.part(y, y.mean(1, keepdim=True))[0]
        return torch.einsum("ij,jk->ik", self.norm(y) + torch.tensor(2.0), WEIGHT) * self.table

    @eager_break
    def part(self, y, mean):
        return y * 2, mean * 3


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("outputs", ["pool", "static"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_capture_records_the_operators_of_the_eager_warm_up(mode, outputs, inference):
    forward = Parts()
    forward(torch.ones(1, WIDTH))
    with torch.inference_mode(inference):
        runner = runner_of(forward, mode, outputs)
    (warm,) = runner.graphs.checks.warmed_up.values()
    (captured_operators,) = warm.captured.values()
    assert captured_operators == [op.func for op in warm.trace]


@contextmanager
def attribute(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


CONVOLUTION, PRODUCT = torch.ops.aten.convolution.default, torch.ops.aten.mm.default


def test_the_float32_precision_of_convolutions_counts_only_with_convolutions():
    def precision(use: str) -> str:
        return "tf32" if use == "convolution" else "ieee"

    assert rounding_of([torch.float32], [PRODUCT], precision) == 2e-4
    assert rounding_of([torch.float32], [PRODUCT, CONVOLUTION], precision) == 1e-2
    assert rounding_of([torch.bfloat16], [CONVOLUTION], precision) == 1e-1


def test_the_cpu_platform_reads_float32_precision_from_mkldnn():
    from graphrt.platforms import get_platform

    mkldnn, of = torch.backends.mkldnn, get_platform("cpu").float32_precision
    with attribute(mkldnn.matmul, "fp32_precision", "bf16"):
        assert of("matmul") == "bf16"
    with attribute(mkldnn.conv, "fp32_precision", "tf32"):
        assert of("convolution") == "tf32" and of("rnn") != "tf32"


@pytest.mark.cuda
def test_the_gpu_platform_reads_float32_precision_of_matmuls_and_convolutions():
    from graphrt.platforms import get_platform

    of = get_platform("cuda").float32_precision
    for use, owner in {
        "matmul": torch.backends.cuda.matmul,
        "convolution": torch.backends.cudnn.conv,
        "rnn": torch.backends.cudnn.rnn,
    }.items():
        for value in ("tf32", "ieee"):
            with attribute(owner, "fp32_precision", value):
                assert of(use) == value
