"""`layers`: milliseconds of each module of a replay, by a second graph."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from graphrt import Batch, GraphOptions, GraphRunner, Host, InputSpec, eager_break
from graphrt.core.base.errors import CaptureError, InvalidOptionError
from graphrt.observe import layers, page
from tests import alone
from tests.observe.test_ranges import Model, forked, runner_of

GRAPH = "FULL [4 tokens 4 reqs]"


def test_each_layer_and_what_is_between_has_a_time():
    runner = runner_of(Model(3))
    runner.capture()
    times = layers(runner, Batch(4))
    names = [row.name for row in times.rows]
    assert names == ["layers.0", "layers.1", "layers.2", "head", "(after head)"]
    assert all(row.ms > 0 for row in times.rows) and times.graph == GRAPH
    assert sum(row.ms for row in times.rows) == pytest.approx(times.total_ms)
    assert str(times).splitlines()[2].split() == ["module", "ms", "share"]
    assert json.loads(json.dumps(times.to_dict()))["graph"] == GRAPH


def test_a_slow_layer_takes_its_time():
    model = Model(2)
    big = torch.randn(800, 800)
    model.layers[1].register_forward_hook(lambda module, args, out: out + (big @ big)[:1, :8])
    runner = runner_of(model)
    runner.capture()
    rows = {row.name: row.ms for row in layers(runner, Batch(4)).rows}
    assert rows["layers.1"] > 3 * rows["layers.0"]


def test_modules_at_another_depth_are_timed_when_asked():
    runner = runner_of(Model())
    runner.capture()
    assert [row.name for row in layers(runner, Batch(4), depth=0).rows] == ["Model"]
    names = [row.name for row in layers(runner, Batch(4), depth=2).rows]
    assert names[:3] == ["layers.0.up", "(after layers.0.up)", "layers.0.norm"]


def test_served_graphs_and_state_stay_as_they_were():
    count = torch.zeros(1)

    class Counting(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return super().forward(x) + count

    runner = GraphRunner(
        Counting(),
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 4),
        platform="cpu",
        options=GraphOptions(check="first"),
    )
    runner.capture()
    x = torch.rand(3, 8)
    with torch.no_grad():
        out = runner(x=x)
        was, graphs = out.clone(), [entry.graph for entry in runner.graphs.entries()]
        layers(runner, x=x)
        assert torch.equal(out, was) and count.item() == 1
        assert [entry.graph for entry in runner.graphs.entries()] == graphs
        torch.testing.assert_close(runner(x=x), was + 1)
    assert runner.report().trust.trials[0].failure is None and not runner.look()


def test_eager_parts_between_graphs_have_their_own_row():
    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(part(self.layers[1](self.layers[0](x))))

    runner = runner_of(Broken(), mode="PIECEWISE")
    runner.capture()
    names = [row.name for row in layers(runner, Batch(4)).rows]
    assert names == ["layers.0", "layers.1", "(eager part)", "head"]


def test_the_page_has_a_table_of_the_layers():
    runner = runner_of(Model())
    runner.capture()
    html = page(runner.report(), times=[layers(runner, Batch(4))])
    assert f"Layers of a replay of {GRAPH}" in html and "layers.1" in html


def test_batches_without_a_graph_and_ranks_are_refused():
    runner = runner_of(Model())
    with pytest.raises(InvalidOptionError, match=r"capture\(\) first"):
        layers(runner, Batch(4))
    runner.capture()
    with pytest.raises(InvalidOptionError, match="a batch that a graph serves"):
        layers(runner, Batch(8))
    with pytest.raises(InvalidOptionError, match="runner"):
        layers(Model(), Batch(8))  # type: ignore[arg-type]


def test_inputs_are_those_of_the_step_else_the_example_else_padding():
    seen = torch.zeros(1)

    class Seeing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    runner = GraphRunner(
        Seeing(),
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 4),
        platform="cpu",
        host=Host(bind=lambda buffers, descriptor, phase: seen.copy_(buffers["x"].sum())),
    )
    runner.capture()
    layers(runner, x=torch.full((4, 8), 2.0))
    assert seen.item() == 64
    layers(runner, Batch(4))
    assert seen.item() == 0


@pytest.mark.cuda
def test_layers_of_a_cuda_graph_take_their_kernels_time():
    """Of equal layers the first too, while whose kernels run the host launches the others."""
    alone.skip_beside_others("times")
    torch.manual_seed(0)
    with torch.device("cuda"):
        wide = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(1024, 16) for _ in range(16)))
    runner = GraphRunner(
        wide.bfloat16().eval(),
        mode="FULL",
        sizes=[64],
        inputs={"input": InputSpec(torch.bfloat16, ("tokens", 1024))},
        outputs=("tokens", 1024),
        platform="cuda",
    )
    runner.capture()
    times = layers(runner, Batch(64))
    first, *others = [row.ms for row in times.rows if row.name.isdecimal()]
    assert len(others) == 15
    assert first == pytest.approx(statistics.median(others), rel=0.1, abs=0.003)
    assert sum(row.ms for row in times.rows) == pytest.approx(times.total_ms)


@pytest.mark.cuda
def test_a_layer_on_a_side_stream_is_refused():
    runner = runner_of(forked().cuda(), "cuda")
    runner.capture()
    with pytest.raises(CaptureError, match="side stream"):
        layers(runner, Batch(4))
    with torch.no_grad():
        runner(x=torch.ones(4, 8, device="cuda"))
    assert runner.last_dispatch is not None and runner.last_dispatch.reason.name == "HIT"
    assert [row.name for row in layers(runner, Batch(4), depth=0).rows][-1] == "Forked"


@pytest.mark.parametrize("depth", ["a", 1.5, -1, 9])
def test_a_depth_that_is_no_count_is_named(depth):
    runner = GraphRunner(
        torch.nn.Linear(8, 4),
        mode="FULL",
        sizes=[4],
        inputs={"input": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 4),
        platform="cpu",
    )
    runner.capture()
    with pytest.raises(InvalidOptionError, match="depth"):
        layers(runner, Batch(4), depth=depth)
    with pytest.raises(InvalidOptionError, match="times"):
        page(runner.report(), times=layers(runner, Batch(4)))


def test_an_input_that_the_step_leaves_out_is_padding():
    runner = GraphRunner(
        lambda x, factor: x * factor,
        mode="FULL",
        sizes=[4],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", 8)),
            "factor": InputSpec(torch.float32, ("tokens", 1), pad=1.0, optional=True),
        },
        outputs=("tokens", 8),
        platform="cpu",
    )
    runner.capture()
    assert layers(runner, x=torch.ones(3, 8)).total_ms > 0
