"""Weights, buffers and layers that are replaced under compiled code: steps have eager's values."""

from __future__ import annotations

import copy
import itertools
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphOptions, GraphPool, GraphRunner, InputSpec, Reason
from graphrt.compile import CompileOptions, RetraceError, compile_module, opaque
from graphrt.core.base.errors import GraphQuarantinedWarning, StaleInputError
from tests.draws import rest_long

WIDTH = 8
SIZES = (4, 3, 2, 1)
pytestmark = pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)


@opaque("graphrt_replaced::half_more", mutates=["out"])
def half_more(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 1.5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.shift
        out = torch.empty_like(hidden)
        half_more(hidden, out)
        return self.second(out)


class Model(nn.Module):
    """Two layers in a list, one in a dict, and a weight that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.named = nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH)})
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.named["one"](x))


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH))


def other_weight(model: Model) -> None:
    model.layers[0].first.weight = weight()


def registered(model: Model) -> None:
    model.layers[0].first.register_parameter("weight", weight())


def other_data(model: Model) -> None:
    model.layers[0].first.weight.data = torch.randn(WIDTH, WIDTH)


def other_buffer(model: Model) -> None:
    model.layers[0].shift = torch.randn(WIDTH)


def registered_buffer(model: Model) -> None:
    model.layers[0].register_buffer("shift", torch.randn(WIDTH))


def other_layer(model: Model) -> None:
    model.layers[0] = Layer()


def swapped_layers(model: Model) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def other_list(model: Model) -> None:
    model.layers = nn.ModuleList([Layer(), Layer()])


def other_entry(model: Model) -> None:
    model.named["one"] = nn.Linear(WIDTH, WIDTH)


def other_attribute(model: Model) -> None:
    model.layers[1].second = nn.Linear(WIDTH, WIDTH)


def tied(model: Model) -> None:
    model.layers[0].first.weight = model.layers[1].first.weight


def tied_to_another(model: Model) -> None:
    model.embed.weight = weight()
    model.head.weight = model.embed.weight


def untied(model: Model) -> None:
    model.head.weight = weight()


def untied_at_its_root(model: Model) -> None:
    model.embed.weight = weight()


def loaded(model: Model) -> None:
    """As reloads do: it unties too."""
    new = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(new, assign=True)


def no_bias(model: Model) -> None:
    model.layers[0].first.bias = None


def more_layers(model: Model) -> None:
    model.layers.append(Layer())


FOLLOWED = (
    other_weight,
    registered,
    other_data,
    other_buffer,
    registered_buffer,
    other_layer,
    swapped_layers,
    other_list,
    other_entry,
    other_attribute,
    tied,
    tied_to_another,
)
"""Compiled code takes these over."""
OTHERS = (untied, untied_at_its_root, loaded, no_bias)
"""For these another trace would be needed."""
UNSEEN = (more_layers,)
"""Nothing that graphs read is elsewhere: the host has to say it."""
ONE_OF_EACH = (
    other_weight,
    other_data,
    other_buffer,
    other_layer,
    other_list,
    tied,
    untied,
    no_bias,
)
Change = Callable[[Model], None]


def in_both_modes(changes: Sequence[Change], whole: Sequence[Change]) -> list[Any]:
    """Changes in whole graphs and in pieces, which read the same places. Beyond `whole`, and one
    of each sort in pieces, they are for `-m long`."""
    pieces = [change for change in (other_weight, other_layer, untied) if change in changes]
    kept = [*((change, "FULL") for change in whole), *((change, "PIECEWISE") for change in pieces)]
    return rest_long(itertools.product(changes, ("FULL", "PIECEWISE")), *kept)


def captured(
    change: Change, mode: str, backend: str, level: str, cache: str
) -> tuple[Model, GraphRunner]:
    """A model and its runner, which has served before `change` was made."""
    torch.manual_seed(0)
    model, pool = Model().eval(), GraphPool("cpu")
    compile_module(
        model, ["x"], pool=pool, options=CompileOptions(backend=backend, cache_dir=cache)
    )
    runner = GraphRunner(
        model,
        mode=mode,
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        pool=pool,
        options=GraphOptions(check=level),
    )
    runner.capture()
    for _ in range(2):
        for rows in SIZES:
            step(model, runner, rows)
    assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT
    torch.manual_seed(1)
    change(model)
    return model, runner


def step(model: Model, runner: GraphRunner, rows: int) -> bool:
    """Whether a step of the runner has eager's values."""
    x = torch.randn(rows, WIDTH)
    with torch.no_grad():
        expected = Model.forward(model, x)
        return torch.allclose(runner(Batch(rows, rows, 1), x=x), expected, atol=1e-5)


@pytest.mark.parametrize(("change", "mode"), in_both_modes([*FOLLOWED, *OTHERS], ONE_OF_EACH))
def test_after_a_replacement_quarantined_steps_use_the_new_weights(change, mode, tmp_path):
    model, runner = captured(change, mode, "eager", "capture", str(tmp_path))
    with runner:
        for _ in range(60):
            right = step(model, runner, 4)
            if runner.last_dispatch.reason is Reason.QUARANTINED:
                break
        assert right and all(step(model, runner, rows) for rows in SIZES)


@pytest.mark.parametrize("level", ["capture", pytest.param("always", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("change", "mode"), in_both_modes([*FOLLOWED, *OTHERS, *UNSEEN], [*ONE_OF_EACH, *UNSEEN])
)
def test_weights_changed_raises_for_a_replacement_and_steps_use_the_new_weights(
    change, mode, level, tmp_path
):
    model, runner = captured(change, mode, "eager", level, str(tmp_path))
    with runner:
        with pytest.raises((StaleInputError, RetraceError)):
            runner.weights_changed()
        for rows in SIZES * 2:
            assert step(model, runner, rows)
            assert runner.last_dispatch.reason is Reason.QUARANTINED


@pytest.mark.parametrize("change", [other_weight, untied, more_layers])
def test_weights_changed_raises_for_a_replacement_with_checks_off(change, tmp_path):
    _, runner = captured(change, "FULL", "eager", "off", str(tmp_path))
    with runner, pytest.raises((StaleInputError, RetraceError)):
        runner.weights_changed()


def test_new_weights_of_a_compiled_module_outdate_its_graph_unless_written_in_place(tmp_path):
    def write(model: Model) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(2)

    model, runner = captured(write, "FULL", "eager", "capture", str(tmp_path))
    with runner:
        for count in (1, 2):
            runner.recapture(only_outdated=True)
            assert runner.pool.captures == count
            for rows in SIZES:
                assert step(model, runner, rows)
                assert runner.last_dispatch.reason is Reason.HIT
            other_weight(model)


@pytest.mark.parametrize("change", rest_long(FOLLOWED, *set(ONE_OF_EACH) & {*FOLLOWED}))
def test_a_recapture_serves_replaced_weights_from_graphs(change, tmp_path):
    model, runner = captured(change, "FULL", "eager", "capture", str(tmp_path))
    with runner:
        with pytest.raises(StaleInputError, match="recapture"):
            runner.weights_changed()
        runner.recapture()
        runner.weights_changed()
        for rows in SIZES * 2:
            assert step(model, runner, rows)
            assert runner.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("only_outdated", [False, True])
@pytest.mark.parametrize("change", OTHERS)
def test_a_recapture_that_would_need_another_trace_raises_retrace_error(
    change, only_outdated, tmp_path
):
    _, runner = captured(change, "FULL", "eager", "capture", str(tmp_path))
    with runner, pytest.raises(RetraceError, match="compile a new instance"):
        runner.recapture(only_outdated=only_outdated)


@pytest.mark.parametrize("change", [*FOLLOWED, *OTHERS, *UNSEEN])
def test_a_sealed_module_uses_replaced_weights_or_raises_retrace_error(change):
    torch.manual_seed(0)
    model = Model().eval()
    compiled = compile_module(model, ["x"], in_place=False)
    x = torch.randn(4, WIDTH)
    compiled(x)
    compiled.seal()
    change(model)
    if change in FOLLOWED:
        compiled.weights_changed()
        with torch.no_grad():
            assert torch.equal(compiled(x), copy.deepcopy(model)(x))
        return
    for told in (compiled.weights_changed, lambda: compiled(x)):
        with pytest.raises(RetraceError):
            told()


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_weights_changed_raises_for_a_replacement_with_inductor(mode, tmp_path):
    for change in (*FOLLOWED, *OTHERS, *UNSEEN):
        model, runner = captured(change, mode, "inductor", "capture", str(tmp_path))
        with runner:
            with pytest.raises((StaleInputError, RetraceError)):
                runner.weights_changed()
            assert all(step(model, runner, rows) for rows in SIZES), change


def test_weights_written_in_place_keep_graphs_replaying(tmp_path):
    def written(model: Model) -> None:
        with torch.no_grad():
            model.layers[0].first.weight.copy_(weight())

    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphQuarantinedWarning)
        model, runner = captured(written, "FULL", "eager", "always", str(tmp_path))
        with runner:
            runner.weights_changed()
            for rows in SIZES:
                assert step(model, runner, rows)
                assert runner.last_dispatch.reason is Reason.HIT


def test_a_batch_too_large_for_graphs_uses_replaced_weights_with_checks_off(tmp_path):
    model, runner = captured(other_weight, "FULL", "eager", "off", str(tmp_path))
    with runner:
        assert step(model, runner, 4) is False, "nothing looks at the level off"
        with torch.no_grad():
            x = torch.randn(6, WIDTH)
            assert torch.allclose(runner(Batch(6, 6, 1), x=x), Model.forward(model, x), atol=1e-5)
        assert runner.last_dispatch.reason is Reason.TOO_LARGE


def by_its_stride(x: torch.Tensor) -> torch.Tensor:
    return x * x.stride(0)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_stride_that_the_forward_reads_is_compared_even_for_a_single_row(rows, backend, tmp_path):
    options = CompileOptions(backend=backend, cache_dir=str(tmp_path))
    compiled = compile_module(by_its_stride, ["x"], options=options)
    x = torch.randn(rows, 4)
    assert torch.equal(compiled(x), by_its_stride(x))
    cut = torch.randn(1, 8)[:, :4]
    assert cut.is_contiguous() and cut.stride() != x.stride()
    with pytest.raises(RetraceError, match="strides"):
        compiled(cut)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_sliced_tensor_whose_stride_the_forward_reads_is_compiled_with_that_stride(rows):
    compiled = compile_module(by_its_stride, ["x"])
    # Of the first call code is made for one row too, which is contiguous, with the cut's stride.
    for x in (torch.randn(4, 6)[:, :3], torch.randn(rows, 6)[:, :3]):
        assert torch.equal(compiled(x), by_its_stride(x))
    for x in (torch.randn(rows, 8)[:, :3], torch.randn(rows, 3)):
        with pytest.raises(RetraceError, match="strides"):
            compiled(x)


def test_the_stride_of_a_single_row_is_ignored_unless_the_forward_reads_strides():
    compiled = compile_module(lambda x: x * 2, ["x"])
    compiled(torch.randn(4, 4))
    cut = torch.randn(1, 8)[:, :4]
    assert torch.equal(compiled(cut), cut * 2)


@opaque("graphrt_replaced::stored", mutates=["kept"])
def stored(x: torch.Tensor, kept: torch.Tensor) -> None:
    kept[: len(x)].copy_(x)


class Norm(nn.Module):
    """Only kernels of Inductor read its weight, in a whole graph that writes state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight
        stored(x, self.kept)
        return self.second(x)


@needs_compiler
def test_a_weight_that_only_kernels_of_a_whole_graph_read_is_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    model, pool = Norm().eval().requires_grad_(False), GraphPool("cpu")
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path / "kept"))
    compile_module(model, ["x"], pool=pool, options=options)
    runner = GraphRunner(
        model,
        mode="FULL",
        sizes=[4, 8],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
        pool=pool,
    )
    runner.capture()
    x = torch.randn(3, WIDTH)
    runner(Batch(3, 3, 1), x=x)
    model.weight.data = torch.rand(WIDTH)
    plain = Norm().eval().requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(runner(Batch(3, 3, 1), x=x), plain(x))
    assert runner.last_dispatch.reason is Reason.QUARANTINED
