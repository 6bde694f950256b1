"""Tensors of graphs that a forward leaves in Python, where no replay makes new ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec, eager_break
from graphrt.errors import StaleTensorWarning

X = InputSpec(torch.float32, ("tokens", 4))


def runner(
    forward: Any, mode: str = "FULL", sizes: Sequence[int] = (1, 2, 4), **options: Any
) -> GraphRunner:
    return GraphRunner(
        forward,
        inputs={"x": X},
        outputs=("tokens", 4),
        sizes=sizes,
        mode=mode,
        platform="cpu",
        options=GraphOptions(**options),
    )


class Leaves(torch.nn.Module):
    """Leaves a tensor by one of the ways to do so."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.hidden: Any = None
        self.by_name: dict[str, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.placed = torch.zeros(4, 4)
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.scale
        if self.way == "attribute":
            self.hidden = h
        if self.way == "new attribute":
            self.late = h
        if self.way == "dict":
            self.by_name["h"] = h
        if self.way == "list":
            self.seen.append(h)
        if self.way == "in place":
            self.placed[: len(h)].copy_(h)
        if self.way == "table" and self.hidden is None:
            self.hidden = torch.arange(4.0)
        if self.way == "eager part":
            h = self.note(h)
        if self.way == "kept by an eager part":
            h = self.keep(h)
        return h + 1

    @eager_break
    def note(self, h: torch.Tensor) -> torch.Tensor:
        self.hidden = h.clone()
        return h * 1

    @eager_break
    def keep(self, h: torch.Tensor) -> torch.Tensor:
        self.hidden = h
        return h * 1


@pytest.mark.parametrize(
    ("way", "path"),
    [
        ("attribute", r"model\.hidden"),
        ("new attribute", r"model\.late"),
        ("dict", r"model\.by_name\['h'\]"),
        ("list", r"model\.seen\[\d\]"),
        ("kept by an eager part", r"model\.hidden"),
    ],
)
def test_a_graph_tensor_left_in_python_by_the_forward_is_named_at_capture(
    way: str, path: str
) -> None:
    mode = "PIECEWISE" if "eager" in way else "FULL"
    run = runner(Leaves(way), mode)
    with pytest.warns(StaleTensorWarning, match=path) as told:
        run.capture()
    assert len(told) == 1
    assert told[0].filename == __file__
    x = torch.randn(3, 4)
    assert torch.equal(run(x=x), x * 2 + 1)


def test_a_tensor_left_under_the_same_path_by_several_runs_is_named_once() -> None:
    run = runner(Leaves("list"), sizes=[4])
    with pytest.warns(StaleTensorWarning) as told:
        run.capture()
    paths = re.findall(r"model\.seen\[\d+\]", str(told[0].message))
    assert len(paths) == len(set(paths)) > 0


@pytest.mark.parametrize("way", ["in place", "table", "eager part", "nothing"])
def test_a_tensor_that_every_step_rewrites_raises_no_stale_tensor_warning(way: str) -> None:
    forward = Leaves(way)
    run = runner(forward, "PIECEWISE" if "eager" in way else "FULL")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleTensorWarning)
        run.capture()
        x = torch.randn(3, 4)
        for _ in range(3):
            assert torch.equal(run(x=x), x * 2 + 1)
    if way == "eager part":
        assert torch.equal(forward.hidden[:3], x * 2)


def test_a_second_capture_does_not_warn_of_tensors_left_by_the_first() -> None:
    forward = Leaves("dict")
    run = runner(forward)
    with pytest.warns(StaleTensorWarning):
        assert run.capture_next() is not None
    forward.way = "nothing"
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleTensorWarning)
        run.capture()


def test_a_table_of_each_size_is_built_by_the_warm_up_of_that_size() -> None:
    """In graph memory an eager step of its size would read what other graphs wrote."""
    tables: dict[int, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows not in tables:
            tables[rows] = torch.arange(rows, dtype=torch.float32)[:, None] * 2 + 1
        return torch.sin(x) * tables[rows]

    x = torch.randn(2, 4)
    whole = runner(forward)
    whole.capture()
    assert torch.equal(whole(x=x), torch.sin(x) * torch.tensor([[1.0], [3.0]]))


def test_a_weight_that_a_hook_recomputes_in_every_run_is_replayed_with_new_values() -> None:
    layer = torch.nn.Linear(4, 4)
    first = layer.weight.detach().clone()
    layer.source = torch.nn.Parameter(first.clone())
    del layer.weight
    layer.weight = first

    def compute(module: Any, _: Any) -> None:
        module.weight = module.source * 2

    layer.register_forward_pre_hook(compute)
    run = runner(lambda x: layer(x))
    with warnings.catch_warnings():
        # It is made of weights alone, so the host has in it what the next run would compute.
        warnings.simplefilter("error")
        run.capture()
    assert layer.weight is first
    with torch.no_grad():
        for rows in (4, 2, 1, 3):
            x = torch.randn(rows, 4)
            # Of the same padding: a product of other rows may be rounded otherwise.
            padded = torch.nn.functional.pad(x, (0, 0, 0, int(rows == 3)))
            expected = torch.nn.functional.linear(padded, layer.source * 2, layer.bias)
            assert torch.equal(run(x=x), expected[:rows])
        layer.source.mul_(3)
        expected = torch.nn.functional.linear(padded, layer.source * 2, layer.bias)
        assert torch.equal(run(x=x), expected[:3])
