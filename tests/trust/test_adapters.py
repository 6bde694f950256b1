"""Adapters that come and go in a plain runner: what no graph reads changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphrt import Batch, GraphRunner, InputSpec, Reason
from graphrt.errors import GraphQuarantinedWarning, StaleInputError

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Adapted(nn.Module):
    """A layer with adapters by name, of which one is active or none."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.active = base_layer, ""
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()

    def add(self, name: str) -> None:
        self.down[name] = torch.randn(WIDTH, 2)
        self.up[name] = torch.zeros(2, WIDTH)  # as training begins

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        return out + x @ self.down[self.active] @ self.up[self.active] if self.active else out


def captured(net: Callable[[Tensor], Tensor], *, tried: bool = True) -> GraphRunner[Tensor]:
    """Graphs of a forward, all `tried` or none."""
    runner = GraphRunner(
        net,
        mode="FULL",
        sizes=[1, 2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens", WIDTH),
    )
    runner.capture()
    for size in (4, 2, 1) if tried else ():
        runner.verify(Batch(size), x=torch.randn(size, WIDTH))
        reasons_of(runner, net)
    return runner


def reasons_of(
    runner: GraphRunner[Tensor], net: Callable[[Tensor], Tensor], steps: int = 12
) -> set[Reason]:
    """The reasons of right steps; a wrong one fails."""
    reasons = set()
    for step in range(steps):
        x = torch.randn(1 + step % 4, WIDTH)
        torch.testing.assert_close(runner(Batch(len(x)), x=x).clone(), net(x))
        assert runner.last_dispatch is not None
        reasons.add(runner.last_dispatch.reason)
    return reasons


@pytest.fixture(autouse=True)
def _without_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def wrap(net: Net, layer: type[Adapted] = Adapted) -> Adapted:
    net.head = layer(net.head)
    net.head.add("a")
    return net.head


def test_a_layer_wrapped_without_an_active_adapter_keeps_all_graphs_and_so_does_its_unwrapping():
    net = Net()
    runner = captured(net)
    head = wrap(net)
    captures = runner.pool.captures
    for change in (runner.weights_changed, lambda: setattr(net, "head", head.base_layer)):
        change()
        assert reasons_of(runner, net) == {Reason.HIT}
        runner.recapture(only_outdated=True)
    assert runner.pool.captures == captures


def test_a_layer_wrapped_with_an_active_adapter_is_found_though_it_adds_zero():
    net = Net()
    runner = captured(net)
    wrap(net).active = "a"
    runner.weights_changed()
    with pytest.warns(GraphQuarantinedWarning, match=r"head"):
        assert reasons_of(runner, net) == {Reason.QUARANTINED}
    runner.recapture(only_outdated=True)
    net.head.up["a"].normal_()
    assert reasons_of(runner, net) == {Reason.HIT}


def test_a_layer_wrapped_around_a_copy_of_it_is_stale():
    net = Net()
    runner = captured(net)
    wrap(net).base_layer = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(StaleInputError, match=r"head\.weight"):
        runner.weights_changed()


@pytest.mark.parametrize("tried", [False, True])
def test_a_copy_in_the_place_of_a_layer_that_is_kept_elsewhere_is_stale(tried: bool):
    """The graphs' tensors are still there, and the forward reads others of equal values."""
    net = Net()
    runner = captured(net, tried=tried)
    net.archive, net.head = net.head, nn.Linear(WIDTH, WIDTH)
    net.head.load_state_dict(net.archive.state_dict())
    with pytest.raises(StaleInputError, match=r"head\.weight"):
        runner.weights_changed()
    assert reasons_of(runner, net) == {Reason.QUARANTINED}


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("tried", [False, True])
def test_an_adapter_moved_between_tables_is_found_though_both_add_zero(tried: bool):
    net = Net()
    adapted = wrap(net)
    up = adapted.up["a"]
    tables = net.tables = {"live": {"a": adapted.down["a"]}, "idle": {"b": torch.randn(WIDTH, 2)}}

    def forward(x: Tensor) -> Tensor:
        (down,) = net.tables["live"].values()
        return net(x) + x @ down @ up

    runner = captured(forward, tried=tried)
    tables["idle"]["a"] = tables["live"].pop("a")
    tables["live"]["b"] = tables["idle"].pop("b")
    with contextlib.suppress(StaleInputError):
        runner.weights_changed()
    assert reasons_of(runner, forward) == {Reason.QUARANTINED}
    up.normal_()
    assert reasons_of(runner, forward) == {Reason.QUARANTINED}


# PEFT ---------------------------------------------------------------------------------------------


def lora(**fields: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    fields = {"target_modules": r"layers\.\d+", "init_lora_weights": False, **fields}
    return peft.LoraConfig(**fields)


def with_peft() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(Net(), lora(), adapter_name="one").eval()
    model.add_adapter("two", lora(r=4))
    model.set_adapter("one")
    return model


QUIET: dict[str, Callable[[Any], object]] = {
    "added": lambda model: model.add_adapter("three", lora()),
    "added_elsewhere": lambda model: model.add_adapter("three", lora(target_modules=["head"])),
    "deleted": lambda model: model.delete_adapter("two"),
    "loaded_again": lambda model: (
        model.delete_adapter("two"),
        model.add_adapter("two", lora(r=2)),
    ),
    "there_and_back": lambda model: (model.set_adapter("two"), model.set_adapter("one")),
    "disabled_and_enabled": lambda model: (
        model.base_model.disable_adapter_layers(),
        model.base_model.enable_adapter_layers(),
    ),
    "merged_and_unmerged": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
}
SWITCHES: dict[str, Callable[[Any], object]] = {
    "switched": lambda model: model.set_adapter("two"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "deleted": lambda model: model.delete_adapter("one"),
    "rescaled": lambda model: [
        each.scaling.update(one=9.0) for each in model.modules() if hasattr(each, "lora_A")
    ],
}


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("name", QUIET)
def test_a_change_of_an_adapter_of_peft_that_no_graph_reads_keeps_all_graphs(name: str):
    model = with_peft()
    runner = captured(model)
    QUIET[name](model)
    assert reasons_of(runner, model, 40) == {Reason.HIT}
    captures = runner.pool.captures
    runner.recapture(only_outdated=True)
    assert runner.pool.captures == captures


@pytest.mark.filterwarnings("ignore:Adapter one was active")
@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("name", SWITCHES)
def test_an_announced_switch_of_peft_gives_no_wrong_step(name: str):
    model = with_peft()
    runner = captured(model)
    SWITCHES[name](model)
    assert runner.look()
    with contextlib.suppress(StaleInputError):
        runner.weights_changed()
    assert reasons_of(runner, model, 40) == {Reason.QUARANTINED}
    runner.recapture(only_outdated=True)
    assert reasons_of(runner, model, 40) == {Reason.HIT}


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
def test_adapters_swapped_in_place_by_peft_are_served_by_one_graph():
    hotswap = pytest.importorskip("peft.utils.hotswap", reason="peft is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def with_one(rank: int, alpha: int) -> Any:
        torch.manual_seed(0)
        config = lora(r=rank, lora_alpha=alpha)
        return peft.get_peft_model(Net(), config, adapter_name="one").eval()

    others = [with_one(4, 8), with_one(8, 4), with_one(2, 16)]
    model = with_one(4, 8)
    hotswap.prepare_model_for_compiled_hotswap(model, target_rank=8)
    runner = captured(model)
    for step in range(30):
        other = others[step % 3]
        for weight in (each for name, each in other.named_parameters() if "lora" in name):
            weight.normal_()
        state = {name: each for name, each in other.state_dict().items() if "lora" in name}
        config = other.peft_config["one"]
        hotswap.hotswap_adapter_from_state_dict(model, dict(state), "one", config=config)
        x = torch.randn(1 + step % 4, WIDTH)
        torch.testing.assert_close(
            runner(Batch(len(x)), x=x).clone(), other(x), rtol=1e-3, atol=1e-3
        )
        assert runner.last_dispatch is not None and runner.last_dispatch.reason is Reason.HIT
