"""Random numbers of padded steps, Python state and normalized weights, on a GPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason, eager_break
from graphrt.errors import CaptureError, GraphQuarantinedWarning

pytestmark = pytest.mark.cuda

WIDTH = 64
X = InputSpec(torch.float32, ("tokens", WIDTH))
COUNTS = (4, 3, 2, 8, 5, 3, 1, 12, 7, 4)


def runner_of(forward: Callable[..., Any], mode: str) -> GraphRunner:
    runner = GraphRunner(forward, mode=mode, sizes=[4, 8], inputs={"x": X}, platform="cuda")
    runner.capture()
    return runner


def goes_on(forward: Callable[..., Any], mode: str = "FULL") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphQuarantinedWarning)
        runner = runner_of(forward, mode)
        for count in COUNTS:
            runner(x=torch.randn(count, WIDTH, device="cuda"))
            wanted = Reason.HIT if count <= 8 else Reason.TOO_LARGE
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is wanted


DRAWING = {
    "randn_like": lambda x: torch.randn_like(x) + x * torch.randn_like(x),
    "dropout": lambda x: functional.dropout(functional.dropout(x, 0.5, True), 0.5, True),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) + torch.rand_like(x),
    "exponential": lambda x: (
        (torch.softmax(x, -1) / torch.empty_like(x).exponential_()).argmax(-1)
        + torch.randint(0, 3, (x.shape[0],), device=x.device)
    ),
}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_in_padded_rows_do_not_count_as_mixed_rows(name, mode):
    part = eager_break(DRAWING[name])
    goes_on(DRAWING[name] if mode == "FULL" else lambda x: part(x + 1) * 2, mode)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_generator_of_the_forwards_own_goes_on_from_step_to_step(mode):
    own, twin = (torch.Generator("cuda").manual_seed(3) for _ in range(2))

    def forward(x, generator=own):
        return x + torch.rand(x.shape, generator=generator, device=x.device)

    runner = runner_of(forward, mode)
    for count in (8, 8, 4, 8, 4, 4):
        x = torch.randn(count, WIDTH, device="cuda")
        assert torch.equal(runner(x=x), forward(x, twin))
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.reason is Reason.HIT
    # The host seeds it between two steps.
    own.manual_seed(5)
    twin.manual_seed(5)
    assert torch.equal(runner(x=x), forward(x, twin))


def test_a_generator_that_no_warm_up_was_given_is_named_at_the_capture():
    own = torch.Generator("cuda")
    options = GraphOptions(check="off")
    runner = GraphRunner(
        lambda x: x + torch.rand(x.shape, generator=own, device=x.device),
        mode="FULL",
        sizes=[4],
        inputs={"x": X},
        options=options,
        platform="cuda",
    )
    with pytest.raises(CaptureError, match="random generator that no watched warm-up"):
        runner.capture()


def test_an_eager_part_may_draw_random_numbers_and_read_the_clock():
    own = torch.Generator("cuda").manual_seed(3)
    part = eager_break(
        lambda x: x + torch.rand(x.shape, generator=own, device=x.device) + time.perf_counter() % 1
    )
    goes_on(lambda x: part(x + 1) * 2, "PIECEWISE")


def test_mixed_rows_are_found_in_a_forward_with_random_numbers():
    runner = runner_of(lambda x: x - x.mean(0) + torch.rand_like(x), "FULL")
    runner(x=torch.randn(8, WIDTH, device="cuda"))
    with pytest.warns(GraphQuarantinedWarning, match="other padding rows change"):
        runner(x=torch.randn(3, WIDTH, device="cuda"))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weight_and_spectral_norm_layers_are_replayed(norm, train):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = norm(nn.Linear(WIDTH, WIDTH).cuda()).train(train)
    with torch.no_grad():
        goes_on(lambda x: layer(x))


def test_a_number_changed_by_an_eager_step_is_found_by_the_trial():
    held = SimpleNamespace(scale=1.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 8:
            held.scale += 1.0
        return x * held.scale

    runner = runner_of(forward, "FULL")
    for count in (4, 8, 3, 12):
        runner(x=torch.randn(count, WIDTH, device="cuda"))
    x = torch.randn(4, WIDTH, device="cuda")
    with pytest.warns(GraphQuarantinedWarning, match=r"held\.scale"):
        assert torch.equal(runner(x=x), x * 2)


def test_python_state_advanced_by_padding_rows_is_found_by_the_trial():
    held = SimpleNamespace(seen=0)

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        held.seen += x.shape[0]
        return x + held.seen

    runner = runner_of(lambda x: part(x * 2) + 1, "PIECEWISE")
    runner(x=torch.randn(8, WIDTH, device="cuda"))
    x = torch.randn(3, WIDTH, device="cuda")
    with pytest.warns(GraphQuarantinedWarning, match=r"held\.seen"):
        out = runner(x=x)
    assert torch.allclose(out, x * 2 + 11 + 1, atol=1e-4)
