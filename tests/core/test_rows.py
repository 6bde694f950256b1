"""Models without tokens: their batch axis is called "rows" and works like the token axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import Batch, GraphRunner, HostArg, InputSpec, Reason, current_context
from graphrt.errors import InvalidInputError, OutputError


def classifier() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    ).eval()


def runner_of(model: torch.nn.Module, **more: Any) -> GraphRunner[torch.Tensor]:
    arguments: dict[str, Any] = {
        "mode": "FULL",
        "sizes": [2, 4],
        "inputs": {"images": InputSpec(torch.float32, ("rows", 3, 8, 8))},
        "outputs": ("rows", 5),
        "platform": "cpu",
        **more,
    }
    return GraphRunner(lambda images: model(images), **arguments)


@pytest.mark.parametrize("outputs", [("rows", 5), ("tokens", 5), None])
def test_inputs_with_a_rows_axis_are_padded_and_their_outputs_cut(outputs: Any):
    model = classifier()
    runner = runner_of(model, outputs=outputs)
    runner.capture()
    for rows in (3, 1, 4, 2):
        images = torch.randn(rows, 3, 8, 8)
        scores = runner(images=images)
        assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT
        torch.testing.assert_close(scores, model(images))
        scores = scores.clone()
        assert torch.equal(scores, runner(Batch(rows), images=images))


def test_errors_say_rows_if_the_inputs_declare_rows():
    two = {"a": InputSpec(torch.float32, ("rows", 4)), "b": InputSpec(torch.float32, ("tokens", 4))}
    runner = GraphRunner(lambda a, b: a + b, mode="FULL", sizes=[4], inputs=two, platform="cpu")
    assert torch.equal(runner(a=torch.ones(3, 4), b=torch.ones(3, 4)), torch.full((3, 4), 2.0))
    with pytest.raises(InvalidInputError, match="disagree on the number of tokens"):
        runner(a=torch.ones(3, 4), b=torch.ones(2, 4))
    two["b"] = two["a"]
    runner = GraphRunner(lambda a, b: a + b, mode="FULL", sizes=[4], inputs=two, platform="cpu")
    with pytest.raises(InvalidInputError, match="disagree on the number of rows"):
        runner(a=torch.ones(3, 4), b=torch.ones(2, 4))
    runner = runner_of(classifier(), outputs=("rows", 6))
    with pytest.raises(OutputError, match=r"\(rows, 6\)"):
        runner.capture()
    with pytest.raises(InvalidInputError, match=r'try: "rows"'):
        InputSpec(torch.float32, ("row", 4))
    # A Batch counts them as tokens.
    runner = runner_of(classifier())
    runner.capture()
    with pytest.raises(InvalidInputError, match=r"from \('rows', 3, 8, 8\)"):
        runner(Batch(3), images=torch.ones(2, 3, 8, 8))


def test_a_host_argument_may_have_the_axis_rows():
    assert HostArg(axis="rows").fitted("lengths", [3, 4], 4, None, live=Batch(2)) == [3, 4, 0, 0]


def test_bounds_select_the_graph_by_the_length_of_a_second_axis():
    """docs/how-to/resolutions.md: the input has the longest length, and a graph reads its bound."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).eval()
    ran: list[int] = []

    def encode(features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        (bound,) = current_context().descriptor.bounds or (features.shape[1],)
        ran.append(bound)
        hidden = layer(features[:, :bound])
        live = torch.arange(bound, device=hidden.device) < lengths[:, None]
        return (hidden * live[..., None]).sum(1)

    runner = GraphRunner(
        encode,
        mode="FULL",
        sizes=[2, 4],
        bounds=[(16,), (64,)],
        inputs={
            "features": InputSpec(torch.float32, ("rows", 64, 8)),
            "lengths": InputSpec(torch.int64, ("rows",)),
        },
        outputs=("rows", 8),
        platform="cpu",
    )
    runner.capture()
    assert {16, 64} == set(ran)
    for longest, bound in ((9, 16), (16, 16), (17, 64), (64, 64)):
        features, lengths = torch.randn(3, 64, 8), torch.tensor([longest, 1, 5])
        result = runner(Batch(3, bounds=(longest,)), features=features, lengths=lengths)
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.descriptor.bounds == (bound,)
        assert runner.last_dispatch.reason is Reason.HIT
        expected = [layer(row[:n]).sum(0) for row, n in zip(features, lengths, strict=True)]
        torch.testing.assert_close(result, torch.stack(expected))
