"""Weights that move: the pointer that rotates over them finds it, some steps late."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.trust.modules import Model, moved
from tests.trust.scenario import LONG, Net, Scenario, at_change, defect


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


@defect("moved weight", "named")
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


# The next two: graphs of the CPU have the storage itself, wherever its memory is.
@defect("moved weight", "named", on_cuda="late")
def storage_of_a_weight_resized(device):
    def change(model):
        storage = model.scale.untyped_storage()
        storage.resize_(0)
        # So that the allocator cannot give the same memory again.
        model.occupied = torch.zeros(8)
        storage.resize_(1 << 16)
        model.scale.fill_(3)

    return moved(change)


@defect("moved weight", "named", on_cuda="late")
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


@defect("moved weight", "late")
def weight_that_turns_into_a_number(device):
    model = SimpleNamespace(scale=torch.full((8,), 2.0))
    return Scenario(
        lambda x: x * model.scale, between=at_change(lambda: setattr(model, "scale", 3.0))
    )


@defect("moved weight", "late")
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


@defect("parametrized weight", "late")
def parametrization_registered(device):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    model = nn.Linear(8, 8)
    change = at_change(lambda: parametrize.register_parametrization(model, "weight", Symmetric()))
    return Scenario(Net(model), between=change, rows=LONG)


@defect("parametrized weight", "late", long=True)
def quantised_weight_with_a_python_scale(device):
    model = SimpleNamespace(weight=torch.randint(-127, 127, (8, 8)).to(torch.int8), scale=0.01)

    def change():
        model.weight.mul_(0).add_(5)
        model.scale = 0.5

    return Scenario(lambda x: x @ (model.weight.float() * model.scale), between=at_change(change))
