"""What hosts do to modules: hooks, train(), replaced parts, and weights that move.

A weight that moved is found by the pointer that rotates over them, some steps late.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.trust.scenario import CHANGE, LONG, Net, Scenario, at_change, defect


class Model(nn.Module):
    """Two layers, a norm and a buffer: six tensors that a graph reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x) * self.scale


def changed(change, **more) -> Scenario:
    """A model whose host calls `change(model)` once."""
    model = Model()
    return Scenario(model, between=at_change(lambda: change(model)), **more)


def moved(change) -> Scenario:
    """The same, with steps enough after it to look at every weight."""
    return changed(change, rows=LONG)


@defect("hook", "silent")
def forward_hook_registered(device):
    return changed(lambda m: m.layers[0].register_forward_hook(lambda mod, args, out: out * 3))


@defect("hook", "silent")
def forward_pre_hook_registered(device):
    return changed(lambda m: m.norm.register_forward_pre_hook(lambda mod, args: (args[0].relu(),)))


@defect("hook", "silent")
def hook_removed(device):
    model = Model()
    handle = model.layers[1].register_forward_hook(lambda mod, args, out: out * 3)
    return Scenario(model, between=at_change(handle.remove))


@defect("hook", "named", drifts=True)
def hook_that_decays_by_itself(device):
    model, scale = Model(), [1.0]

    def decay(module, args, out):
        scale[0] *= 0.5
        return out * scale[0]

    model.layers[0].register_forward_hook(decay)
    return Scenario(model)


@defect("train and eval", "silent")
def train_turned_on_after_capture(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()

    def judge(step, values, out):
        # What is dropped is random; that something is, and not all of it, is not.
        kept = model[0](values["x"]).cpu()
        if step < CHANGE:
            return torch.allclose(out, kept, atol=1e-4)
        dropped = out == 0
        some = bool(0 < dropped.sum() < out.numel())
        return some and torch.allclose(out, kept * 2 * ~dropped, atol=1e-3)

    rows = (4, 3, 8, 1, 2, 8, 7, 5, 8, 6, 8, 7)
    net = Net(model).eval()
    return Scenario(net, between=at_change(net.train), judge=judge, rows=rows)


@defect("train and eval", "silent")
def eval_reached_by_a_flag_of_the_layer(device):
    class Layer(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x * 0.5

    model = Layer()
    return Scenario(model, between=at_change(model.eval))


@defect("replaced part", "silent")
def activation_module_replaced(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return Scenario(Net(model), between=at_change(lambda: model.__setitem__(1, nn.Tanh())))


@defect("replaced part", "late")
def submodule_replaced(device):
    def change(model):
        model.norm = nn.LayerNorm(8, eps=0.5)
        model.norm.weight.data.fill_(3)

    return moved(change)


@defect("replaced part", "late")
def item_of_a_module_list_replaced(device):
    return moved(lambda m: m.layers.__setitem__(1, nn.Linear(8, 8)))


@defect("replaced part", "silent")
def layer_appended(device):
    return changed(lambda m: m.layers.append(nn.Linear(8, 8)))


@defect("replaced part", "silent")
def layers_reordered(device):
    model = Model()
    layers = list(model.layers)
    order = SimpleNamespace(layers=layers)

    def forward(x):
        for layer in order.layers:
            x = torch.tanh(layer(x))
        return x

    return Scenario(forward, between=at_change(lambda: setattr(order, "layers", layers[::-1])))


@defect("replaced part", "silent")
def module_of_an_engine_replaced(device):
    engine = SimpleNamespace(worker=SimpleNamespace(model=Model()))

    def change():
        engine.worker.model = Model()

    return Scenario(lambda x: engine.worker.model(x), between=at_change(change), rows=LONG)


@defect("moved weight", "late")
def load_state_dict_assigned(device):
    return moved(lambda m: m.load_state_dict(Model().state_dict(), assign=True))


@defect("moved weight", "late")
def data_of_a_weight_replaced(device):
    def change(model):
        model.layers[0].weight.data = torch.randn(8, 8)

    return moved(change)


@defect("moved weight", "late")
def data_of_every_weight_replaced(device):
    def change(model):
        for weight in model.parameters():
            weight.data = weight.data * 3

    return moved(change)


@defect("moved weight", "late")
def data_of_a_weight_of_a_closure_replaced(device):
    weight = torch.randn(8, 8)

    def change():
        weight.data = torch.randn(8, 8)

    return Scenario(lambda x: x @ weight, between=at_change(change), rows=LONG)


@defect("moved weight", "late")
def weights_converted(device):
    return moved(lambda m: m.to(torch.float64).to(torch.float32).scale.data.mul_(3))


@defect("moved weight", "late")
def dtype_of_the_model_changed(device):
    class Casting(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype)).float()

    model = Casting(8, 8)
    # bfloat16 is off by more than the tolerance.
    change = at_change(lambda: model.to(torch.bfloat16))
    return Scenario(Net(model), between=change, tolerance=1e-4, rows=LONG)


@defect("moved weight", "late")
def parameter_set(device):
    def change(model):
        model.layers[1].weight = nn.Parameter(torch.randn(8, 8))

    return moved(change)


@defect("moved weight", "late")
def buffer_registered_again(device):
    return moved(lambda m: m.register_buffer("scale", torch.full((8,), 3.0)))


@defect("moved weight", "late")
def memory_of_a_weight_given_away(device):
    return moved(lambda m: m.layers[0].weight.set_(torch.randn(8, 8)))


@defect("moved weight", "right", on_cuda="late")
def storage_of_a_weight_resized(device):
    def change(model):
        storage = model.scale.untyped_storage()
        storage.resize_(0)
        # So that the allocator cannot give the same memory again.
        model.occupied = torch.zeros(8)
        storage.resize_(1 << 16)
        model.scale.fill_(3)

    return moved(change)


@defect("moved weight", "right", on_cuda="late")
def buffer_resized(device):
    def change(model):
        model.scale.resize_(4096).fill_(3)
        model.scale.resize_(8)

    return moved(change)


@defect("moved weight", "late")
def two_tensors_swapped(device):
    def change(model):
        torch.utils.swap_tensors(model.layers[0].weight, model.layers[1].weight)

    return moved(change)


@defect("moved weight", "late")
def weight_read_through_another_view(device):
    model = Model()

    def change():
        # The same storage, another part of it.
        both = torch.stack((model.scale, model.scale * 3))
        model.scale = both[1]

    return Scenario(model, between=at_change(change), rows=LONG)


@defect("moved weight", "late")
def tied_weights_untied(device):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 8, bias=False)
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(torch.tanh(self.embed(x)))

    model = Tied()

    def change():
        model.head.weight = nn.Parameter(torch.randn(8, 8))

    return Scenario(model, between=at_change(change), rows=LONG)


@defect("moved weight", "silent")
def weight_that_turns_into_a_number(device):
    model = SimpleNamespace(scale=torch.full((8,), 2.0))
    return Scenario(
        lambda x: x * model.scale, between=at_change(lambda: setattr(model, "scale", 3.0))
    )


@defect("moved weight", "silent")
def weights_in_a_dict_exchanged(device):
    weights = {"a": torch.randn(8, 8), "b": torch.randn(8, 8)}

    def change():
        weights["a"], weights["b"] = weights["b"], weights["a"]

    return Scenario(
        lambda x: torch.tanh(x @ weights["a"]) @ weights["b"], between=at_change(change), rows=LONG
    )


@defect("parametrized weight", "late")
def weight_norm_removed(device):
    model = parametrizations.weight_norm(nn.Linear(8, 8))

    def change():
        parametrize.remove_parametrizations(model, "weight")
        model.weight.data.mul_(3)

    return Scenario(Net(model), between=at_change(change), rows=LONG)


@defect("parametrized weight", "silent")
def parametrization_registered(device):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    model = nn.Linear(8, 8)
    change = at_change(lambda: parametrize.register_parametrization(model, "weight", Symmetric()))
    return Scenario(Net(model), between=change, rows=LONG)


@defect("parametrized weight", "silent")
def quantised_weight_with_a_python_scale(device):
    model = SimpleNamespace(weight=torch.randint(-127, 127, (8, 8)).to(torch.int8), scale=0.01)

    def change():
        model.weight.mul_(0).add_(5)
        model.scale = 0.5

    return Scenario(lambda x: x @ (model.weight.float() * model.scale), between=at_change(change))
