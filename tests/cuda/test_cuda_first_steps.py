"""The first steps after a capture on a GPU: ordered behind it on any stream, nothing waited for."""

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, Host, InputSpec
from tests import starts

pytestmark = pytest.mark.cuda

WIDTH = 1 << 18


def runner(**keywords):
    """A forward that takes a GPU a while, so that an unordered step is a wrong one."""
    state = torch.zeros(WIDTH, device="cuda")

    def forward(x):
        hidden = x
        for _ in range(40):
            hidden = torch.sin(hidden) + x
        state.add_(1)
        return hidden + state

    run = GraphRunner(
        forward,
        mode=keywords.pop("mode", "FULL"),
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        host=Host(state=[state]),
        platform="cuda",
        **keywords,
    )
    return run, forward, state


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("kind", ["capture", "recapture", "lazy"])
@pytest.mark.parametrize("same_stream", [True, False])
def test_the_first_steps_after_a_capture_are_right_on_any_stream(mode, kind, same_stream):
    options = GraphOptions(lazy=kind == "lazy")
    for turn in range(4):
        run, forward, state = runner(mode=mode, options=options)
        x = torch.randn(3, WIDTH, device="cuda") * (turn + 1)
        expected = forward(x)
        state.zero_()
        stream = torch.cuda.current_stream() if same_stream else torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        if kind != "lazy":
            run.capture()
        if kind == "recapture":
            run.recapture()
        with torch.cuda.stream(stream):
            output = run(x=x).clone()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(output, expected), (output - expected).abs().max()


def test_a_nested_runner_becomes_part_of_the_outer_graph():
    spec = {"x": InputSpec(torch.float32, ("tokens", 4))}
    inner = GraphRunner(lambda x: x * 10, mode="FULL", sizes=[2, 4], inputs=spec, platform="cuda")
    inner.capture()
    outer = GraphRunner(
        lambda x: inner(x=x + 1) + x, mode="FULL", sizes=[2, 4], inputs=spec, platform="cuda"
    )
    outer.capture()
    for count in (1, 2, 3, 4, 9):
        for value in (1.0, -3.0):
            out = outer(x=torch.full((count, 4), value))
            assert torch.equal(out.cpu(), torch.full((count, 4), (value + 1) * 10 + value))
            own = inner(x=torch.full((count, 4), value))
            assert torch.equal(own.cpu(), torch.full((count, 4), value * 10))


FIRST = """
import torch
from graphrt import BatchDescriptor, GraphOptions, GraphPool, GraphWrapper, forward_context

torch.cuda.init()
weight, x = torch.eye(8, device="cuda"), torch.ones(2, 8, device="cuda")
wrapper = GraphWrapper(
    lambda x: torch.mm(x, weight),
    "FULL",
    pool=GraphPool("cuda"),
    options=GraphOptions(warmups=0, lazy=True),
)
for _ in range(2):
    with forward_context("FULL", BatchDescriptor(2)):
        print(wrapper(x).sum().item())
print(torch.linalg.qr(torch.randn(8, 2, 4, device="cuda"))[0].shape)
"""


def test_the_first_use_of_cublas_may_be_in_a_capture():
    """torch raises where cuBLAS is set up in a capture, and batched QR fails then for good."""
    done = starts.run("-c", FIRST)
    assert done.stdout.splitlines() == ["16.0", "16.0", "torch.Size([8, 2, 2])"], done.stderr
