"""What hosts do to modules: hooks, train(), replaced parts."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

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


@defect("hook", "late", long=True)
def forward_hook_registered(device):
    return changed(lambda m: m.layers[0].register_forward_hook(lambda mod, args, out: out * 3))


@defect("hook", "late", long=True)
def forward_pre_hook_registered(device):
    return changed(lambda m: m.norm.register_forward_pre_hook(lambda mod, args: (args[0].relu(),)))


@defect("hook", "late", long=True)
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


@defect("train and eval", "late")
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


@defect("train and eval", "late", long=True)
def eval_reached_by_a_flag_of_the_layer(device):
    class Layer(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x * 0.5

    model = Layer()
    return Scenario(model, between=at_change(model.eval))


@defect("replaced part", "late", long=True)
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


@defect("replaced part", "late", long=True)
def layer_appended(device):
    return changed(lambda m: m.layers.append(nn.Linear(8, 8)))


@defect("replaced part", "late")
def layers_reordered(device):
    model = Model()
    layers = list(model.layers)
    order = SimpleNamespace(layers=layers)

    def forward(x):
        for layer in order.layers:
            x = torch.tanh(layer(x))
        return x

    return Scenario(forward, between=at_change(lambda: setattr(order, "layers", layers[::-1])))


@defect("replaced part", "late")
def module_of_an_engine_replaced(device):
    engine = SimpleNamespace(worker=SimpleNamespace(model=Model()))

    def change():
        engine.worker.model = Model()

    return Scenario(lambda x: engine.worker.model(x), between=at_change(change), rows=LONG)
