"""`ranges` and `annotate`: the modules and ranges of each kernel of a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from graphrt import GraphOptions, GraphRunner, InputSpec, eager_break
from graphrt.core.base.errors import InvalidOptionError
from graphrt.observe import annotate, ranges
from graphrt.observe.nodes import Kernel
from graphrt.observe.ranges import _Found, _Graph

ORIGINALS = torch.nn.Module.__call__, record_function.__enter__, record_function.__exit__


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("mlp"):
            x = torch.relu(self.up(x))
        return self.norm(x)


class Model(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * 2


def forked() -> Model:
    """A model whose second layer runs on a side stream, beside the first one."""
    side = torch.cuda.Stream()

    class Forked(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = self.layers[1](x)
            x = self.layers[0](x)
            torch.cuda.current_stream().wait_stream(side)
            return self.head(x + other)

    return Forked()


def runner_of(
    model: Any, device: str = "cpu", mode: str = "FULL", sizes: tuple[int, ...] = (4,)
) -> GraphRunner:
    return GraphRunner(
        model,
        mode=mode,
        sizes=[*sizes],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 4),
        platform=device,
        options=GraphOptions(check="off"),
    )


def profiled(runner: GraphRunner, path: Path, sizes: tuple[int, ...] = (4,)) -> dict[str, Any]:
    """A profile of a step of each size, after steps that are not profiled."""
    device = runner.pool.device
    with torch.no_grad():
        for size in sizes * 2:
            runner(x=torch.ones(size, 8, device=device))
        runner.platform.synchronize()
        with profile() as profiler:
            for size in sizes:
                runner(x=torch.ones(size, 8, device=device))
            runner.platform.synchronize()
    profiler.export_chrome_trace(str(path))
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def ranges_of(data: dict[str, Any], category: str = "cpu_op") -> list[tuple[str, list[str]]]:
    events = [e for e in data["traceEvents"] if "graphrt ranges" in e.get("args", {})]
    events.sort(key=lambda each: each["ts"])
    assert all(event["cat"] == category for event in events)
    return [(event["name"], event["args"]["graphrt ranges"]) for event in events]


def test_each_operator_of_a_replay_gets_its_modules_and_ranges(tmp_path: Path):
    runner = runner_of(Model())
    with ranges(runner):
        runner.capture()
    path = tmp_path / "trace.json"
    profiled(runner, path)
    told = annotate(path, runner)
    assert (told.replays, told.kernels, told.annotated, told.unsure) == (1, 8, 8, 0)
    data = json.loads(path.read_text())
    assert ranges_of(data) == [
        *(
            each
            for layer in ("layers.0", "layers.1")
            for each in (
                ("aten::addmm", ["Model", layer, "mlp", f"{layer}.up"]),
                ("aten::relu", ["Model", layer, "mlp"]),
                ("aten::native_layer_norm", ["Model", layer, f"{layer}.norm"]),
            )
        ),
        ("aten::addmm", ["Model", "head"]),
        ("aten::mul", ["Model"]),
    ]
    slices = [each for each in data["traceEvents"] if each.get("cat") == "graphrt range"]
    assert {each["name"] for each in slices} >= {"Model", "layers.1", "mlp", "layers.0.norm"}
    inner = next(each for each in slices if each["name"] == "layers.1.up")
    outer = next(each for each in slices if each["name"] == "layers.1")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_annotating_twice_changes_nothing_more(tmp_path: Path):
    runner = runner_of(Model())
    with ranges(runner):
        runner.capture()
    data = profiled(runner, tmp_path / "trace.json")
    assert annotate(data, runner) == annotate(json.loads(json.dumps(data)), runner)
    once = json.dumps(data)
    annotate(data, runner)
    assert json.dumps(data) == once


def test_nothing_is_wrapped_outside_of_ranges_and_graphs_are_the_same():
    runner, plain = runner_of(Model()), runner_of(Model())
    with ranges(runner):
        runner.capture()
        assert "begin_capture" in vars(runner.platform)
    assert "begin_capture" not in vars(runner.platform)
    now = torch.nn.Module.__call__, record_function.__enter__, record_function.__exit__
    assert now == ORIGINALS
    plain.capture()
    steps = [[e.graph.issued for e in each.graphs.entries()] for each in (runner, plain)]
    assert steps[0] == steps[1]


def test_a_capture_that_fails_leaves_nothing_wrapped():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] * float(x.sum())

    runner = runner_of(forward)
    with ranges(runner), pytest.raises(Exception, match="host"):
        runner.capture()
    now = torch.nn.Module.__call__, record_function.__enter__, record_function.__exit__
    assert now == ORIGINALS and "begin_capture" not in vars(runner.platform)


def test_segments_around_an_eager_part_have_their_own_ranges(tmp_path: Path):
    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(part(self.layers[1](self.layers[0](x))))

    runner = runner_of(Broken(), mode="PIECEWISE")
    with ranges(runner):
        runner.capture()
    path = tmp_path / "trace.json"
    profiled(runner, path)
    told = annotate(path, runner)
    assert told.replays == 2 and told.annotated == 7
    assert ranges_of(json.loads(path.read_text()))[-1] == ("aten::addmm", ["Broken", "head"])


def test_a_check_level_with_trials_sees_no_change_in_python():
    runner = GraphRunner(
        Model(),
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        options=GraphOptions(check="always", strict=True),
        platform="cpu",
    )
    with ranges(runner):
        runner.capture()
    with torch.no_grad():
        for _ in range(3):
            runner(x=torch.rand(4, 8))
    assert not runner.look()


def test_graphs_that_nobody_noted_are_refused(tmp_path: Path):
    runner = runner_of(Model())
    runner.capture()
    with pytest.raises(InvalidOptionError, match="ranges noted"):
        annotate(tmp_path / "trace.json", runner)
    with ranges(runner):
        runner.recapture()
    (tmp_path / "no.json").write_text("[]")
    with pytest.raises(InvalidOptionError, match="no trace can be read"):
        annotate(tmp_path / "no.json", runner)
    for wrong in ({"a": 1}, {"traceEvents": [{"ph": "X"}, 3]}):
        with pytest.raises(InvalidOptionError, match="no Chrome trace"):
            annotate(wrong, runner)


def _graph(names: list[str], *, in_order: bool = True, numbers: bool = False) -> _Graph:
    kernels = [
        Kernel(
            frozenset([name] if name else ()), (at, 1, 1, 32, 1, 1), at, at + 1 if numbers else None
        )
        for at, name in enumerate(names)
    ]
    return _Graph("FULL [1]", kernels, [(f"m{at}",) for at in range(len(names))], in_order, 0)


def _launch(names: list[str], order: list[int], graph_of: int = 7) -> list[dict[str, Any]]:
    """The events of a launch whose kernels ran in this order."""
    call = {"name": "cudaGraphLaunch", "cat": "cuda_runtime", "args": {"correlation": 3}}
    return [call] + [
        {
            "ph": "X", "cat": "kernel", "name": names[at], "pid": 0, "tid": 7, "ts": when, "dur": 1,
            "args": {
                "correlation": 3, "device": 0, "grid": [at, 1, 1], "block": [32, 1, 1],
                "graph node id": (graph_of << 32) | (at + 1),
            },
        }
        for when, at in enumerate(order)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "graph", "order", "found", "unsure"),
    [
        ("aba", _graph([*"aba"]), [0, 1, 2], ["m0", "m1", "m2"], 0),
        # Another stream ran first: numbers tell, names only guess.
        ("aba", _graph([*"aba"], in_order=False, numbers=True), [2, 0, 1], ["m2", "m0", "m1"], 0),
        ("aba", _graph([*"aba"], in_order=False), [2, 0, 1], ["m0", "m2", "m1"], 3),
        # The driver tells no names.
        ("aba", _graph(["", "", ""]), [0, 1, 2], ["m0", "m1", "m2"], 0),
        ("abc", _graph([*"aba"]), [0, 1, 2], [], 0),
        ("ab", _graph([*"aba"]), [0, 1], [], 0),
    ],
)
def test_kernels_of_a_device_are_found_by_number_order_or_name(
    names: str, graph: _Graph, order: list[int], found: list[str], unsure: int
):
    events = _launch([*names], order)
    search = _Found(events)
    search.on_device([graph])
    ranges_found = [
        e["args"]["graphrt ranges"][0] for e in events if "graphrt ranges" in e.get("args", ())
    ]
    told = search.result()
    assert (ranges_found, told.unsure, told.unknown) == (found, unsure, int(not found))


@pytest.mark.cuda
def test_each_kernel_of_a_cuda_graph_gets_its_modules_and_ranges(tmp_path: Path):
    runner = runner_of(Model().cuda(), "cuda", sizes=(2, 4))
    with ranges(runner):
        runner.capture()
    path = tmp_path / "trace.json"
    profiled(runner, path, (4, 2))
    told = annotate(path, runner)
    assert told.replays == 2 and told.unknown == 0 and told.unsure == 0
    found = ranges_of(json.loads(path.read_text()), "kernel")
    # The fetch of the inputs is of no module.
    assert told.annotated == sum(bool(stack) for _, stack in found) >= 16
    for layer in ("layers.0", "layers.1"):
        assert sum(stack[1:2] == [layer] for _, stack in found) >= 2 * 3
    norms = [stack for name, stack in found if "layer_norm" in name]
    assert [each[-1] for each in norms] == ["layers.0.norm", "layers.1.norm"] * 2


@pytest.mark.cuda
def test_kernels_of_two_streams_are_marked_as_unsure_without_numbers(tmp_path: Path):
    runner = runner_of(forked().cuda(), "cuda")
    with ranges(runner):
        runner.capture()
    data = profiled(runner, tmp_path / "trace.json")
    told = annotate(data, runner)
    numbered = any(kernel.number for kernel in _kernels(runner))
    assert told.replays == 1 and told.annotated >= 8
    assert told.unsure == (0 if numbered else told.annotated)


def _kernels(runner: GraphRunner) -> list[Any]:
    from graphrt.observe.nodes import kernels_of

    return [each for entry in runner.graphs.entries() for each in kernels_of(entry.graph).kernels]
