"""Changes between two calls of a compiled module that a guard of `torch.compile` would catch.

Each is a generator: it yields a forward and the arguments of the first call, makes its change, and
yields the arguments of the second one, or a function that makes them where they share memory.
`python -m tests.compile.guard_changes inductor` prints what comes of each.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import math
import types
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphrt.compile import CompiledModule, CompileOptions, compile_module
from graphrt.core.base import tree
from graphrt.core.base.errors import GraphRTError

Steps = Generator[Any, None, None]


@dataclass(frozen=True)
class Change:
    """`where` says what changes: "outside" the arguments, "ambient" state, or the "call"."""

    name: str
    where: str
    steps: Callable[[], Steps]


CHANGES: list[Change] = []


def change(where: str) -> Callable[[Callable[[], Steps]], Callable[[], Steps]]:
    def add(steps: Callable[[], Steps]) -> Callable[[], Steps]:
        CHANGES.append(Change(steps.__name__.replace("_", " "), where, steps))
        return steps

    return add


def rows(count: int = 6) -> torch.Tensor:
    return torch.linspace(-2, 2, count * 4).reshape(count, 4)


class Net(nn.Module):
    """A forward that looks at much of what a Python program can change."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.scale: Any = 2.0
        self.count, self.name, self.flag = 3, "relu", True
        self.maybe: Any = None
        self.zero = 0.0
        self.table = {"a": 3.0, "b": 2.0}
        self.items = [1.0, 2.0]
        self.pair = (1.0, 2.0)
        self.config = types.SimpleNamespace(eps=0.5, inner=types.SimpleNamespace(power=2))
        self.function = torch.sin
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Scaled(Net):
    def forward(self, x):
        return self.first(x) * self.scale


class Counted(Net):
    def forward(self, x):
        for _ in range(self.count):
            x = self.first(x)
        return x


class Named(Net):
    def forward(self, x):
        return getattr(torch, self.name)(self.first(x))


class Flagged(Net):
    def forward(self, x):
        return self.first(x) if self.flag else self.last(x)


class Maybe(Net):
    def forward(self, x):
        return x + 1 if self.maybe is None else x + self.maybe


class Zero(Net):
    def forward(self, x):
        return x * 0 + math.copysign(1.0, self.zero)


class Table(Net):
    def forward(self, x):
        for key, value in self.table.items():
            x = x * value if key == "a" else x + value
        return x


class Items(Net):
    def forward(self, x):
        for value in (*self.items, *self.pair):
            x = x + value
        return x


class Config(Net):
    def forward(self, x):
        return (x + self.config.eps) ** self.config.inner.power


class Function(Net):
    def forward(self, x):
        return self.function(x)


class ClassFactor(Net):
    def forward(self, x):
        return x * self.factor


class Layers(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Drop(Net):
    def forward(self, x):
        return nn.functional.dropout(self.first(x), 1.0, self.training)


class Plain(Net):
    def forward(self, x):
        return self.last(self.inner(x))

    def inner(self, x):
        return self.first(x).relu()


class Shifted(Net):
    def forward(self, x):
        return x + self.shift


def net(kind: type[Net]) -> Net:
    return kind().eval()


@change("outside")
def a_float_attribute() -> Steps:
    yield (model := net(Scaled)), (rows(),)
    model.scale = 3.0
    yield (rows(),)


@change("outside")
def a_float_attribute_becomes_an_int() -> Steps:
    yield (model := net(Scaled)), (rows(),)
    model.scale = 2
    yield (rows(),)


@change("outside")
def a_float_attribute_becomes_a_tensor() -> Steps:
    yield (model := net(Scaled)), (rows(),)
    model.scale = torch.tensor(3.0)
    yield (rows(),)


@change("outside")
def a_float_attribute_becomes_minus_zero() -> Steps:
    yield (model := net(Zero)), (rows(),)
    model.zero = -0.0
    yield (rows(),)


@change("outside")
def an_int_attribute() -> Steps:
    yield (model := net(Counted)), (rows(),)
    model.count = 1
    yield (rows(),)


@change("outside")
def a_text_attribute() -> Steps:
    yield (model := net(Named)), (rows(),)
    model.name = "tanh"
    yield (rows(),)


@change("outside")
def a_flag() -> Steps:
    yield (model := net(Flagged)), (rows(),)
    model.flag = False
    yield (rows(),)


@change("outside")
def an_attribute_that_was_none() -> Steps:
    yield (model := net(Maybe)), (rows(),)
    model.maybe = torch.full((4,), 5.0)
    yield (rows(),)


@change("outside")
def a_value_of_a_dict() -> Steps:
    yield (model := net(Table)), (rows(),)
    model.table["a"] = 7.0
    yield (rows(),)


@change("outside")
def a_new_key_of_a_dict() -> Steps:
    yield (model := net(Table)), (rows(),)
    model.table["c"] = 7.0
    yield (rows(),)


@change("outside")
def the_order_of_a_dict() -> Steps:
    yield (model := net(Table)), (rows(),)
    model.table["a"] = model.table.pop("a")
    yield (rows(),)


@change("outside")
def an_element_of_a_list() -> Steps:
    yield (model := net(Items)), (rows(),)
    model.items[1] = 9.0
    yield (rows(),)


@change("outside")
def the_length_of_a_list() -> Steps:
    yield (model := net(Items)), (rows(),)
    model.items.append(9.0)
    yield (rows(),)


@change("outside")
def another_tuple() -> Steps:
    yield (model := net(Items)), (rows(),)
    model.pair = (1.0, 9.0)
    yield (rows(),)


@change("outside")
def an_attribute_of_a_config() -> Steps:
    yield (model := net(Config)), (rows(),)
    model.config.eps = 0.25
    yield (rows(),)


@change("outside")
def an_attribute_of_an_inner_config() -> Steps:
    yield (model := net(Config)), (rows(),)
    model.config.inner.power = 3
    yield (rows(),)


@change("outside")
def another_config_object() -> Steps:
    yield (model := net(Config)), (rows(),)
    model.config = types.SimpleNamespace(eps=0.5, inner=types.SimpleNamespace(power=3))
    yield (rows(),)


@change("outside")
def another_function_as_attribute() -> Steps:
    yield (model := net(Function)), (rows(),)
    model.function = torch.cos
    yield (rows(),)


@change("outside")
def an_attribute_of_a_class() -> Steps:
    model = type("Own", (ClassFactor,), {"factor": 2.0})().eval()
    yield model, (rows(),)
    type(model).factor = 5.0
    yield (rows(),)


@change("outside")
def an_attribute_that_hides_one_of_its_class() -> Steps:
    yield (model := net(ClassFactor)), (rows(),)
    model.factor = 5.0
    yield (rows(),)


@change("outside")
def a_method_of_a_class() -> Steps:
    model = type("Own", (Plain,), {"inner": Plain.inner})().eval()
    yield model, (rows(),)
    type(model).inner = lambda self, x: self.first(x).tanh()
    yield (rows(),)


@change("outside")
def a_method_of_an_object() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.inner = lambda x: x * 3
    yield (rows(),)


@change("outside")
def the_forward_of_a_submodule() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first.forward = lambda x: x * 3
    yield (rows(),)


@change("outside")
def the_forward_of_a_class() -> Steps:
    model = type("Own", (Plain,), {"forward": Plain.forward})().eval()
    yield model, (rows(),)
    type(model).forward = lambda self, x: x * 3
    yield (rows(),)


@change("outside")
def training() -> Steps:
    yield (model := net(Drop)), (rows(),)
    model.train()
    yield (rows(),)


@change("outside")
def training_of_a_submodule() -> Steps:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).eval()
    yield model, (rows(),)
    model[1].train()
    yield (rows(),)


@change("outside")
def another_probability_of_a_dropout() -> Steps:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1e-9)).train()
    yield model, (rows(),)
    model[1].p = 1.0
    yield (rows(),)


@change("outside")
def a_forward_hook() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.register_forward_hook(lambda module, args, result: result * 3)
    yield (rows(),)


@change("outside")
def a_forward_hook_of_a_submodule() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first.register_forward_hook(lambda module, args, result: result * 3)
    yield (rows(),)


@change("outside")
def a_hook_before_the_forward_of_a_submodule() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    yield (rows(),)


@change("outside")
def a_hook_that_is_removed() -> Steps:
    model = net(Plain)
    handle = model.first.register_forward_hook(lambda module, args, result: result * 3)
    yield model, (rows(),)
    handle.remove()
    yield (rows(),)


@change("outside")
def another_submodule_of_another_class() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    yield (rows(),)


@change("outside")
def another_submodule_without_weights() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first = nn.Identity()
    yield (rows(),)


@change("outside")
def another_submodule_of_the_same_kind() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first = nn.Linear(4, 4)
    yield (rows(),)


@change("outside")
def another_activation() -> Steps:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    yield model, (rows(),)
    model[1] = nn.Tanh()
    yield (rows(),)


@change("outside")
def a_setting_of_a_submodule() -> Steps:
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-5)).eval()
    yield model, (rows(),)
    model[0].eps = 10.0
    yield (rows(),)


@change("outside")
def one_more_layer() -> Steps:
    yield (model := net(Layers)), (rows(),)
    model.layers.append(nn.Linear(4, 4))
    yield (rows(),)


@change("outside")
def one_layer_less() -> Steps:
    yield (model := net(Layers)), (rows(),)
    del model.layers[1]
    yield (rows(),)


@change("outside")
def layers_in_another_order() -> Steps:
    yield (model := net(Layers)), (rows(),)
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    yield (rows(),)


@change("outside")
def a_bias_that_is_gone() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first.bias = None
    yield (rows(),)


@change("outside")
def other_weights() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.first.weight = nn.Parameter(torch.full((4, 4), 0.5))
    yield (rows(),)


@change("outside")
def weights_that_become_tied() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.last.weight = model.first.weight
    yield (rows(),)


@change("outside")
def a_buffer_of_another_shape() -> Steps:
    yield (model := net(Shifted)), (rows(),)
    model.shift = torch.full((1,), 3.0)
    yield (rows(),)


@change("outside")
def another_dtype_of_a_module() -> Steps:
    yield (model := net(Plain)), (rows(),)
    model.double()
    yield (rows().double(),)


class Asked(nn.Module):
    """Decides by a weight that no operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.unread.dtype == torch.float16
        return (x * 2 if low else x) + self.table.shape[0]


@change("outside")
def the_dtype_of_a_weight_that_is_not_read() -> Steps:
    yield (model := net(Asked)), (rows(),)
    model.unread.data = model.unread.data.half()
    yield (rows(),)


@change("outside")
def the_dtype_of_a_tensor_in_a_dict_that_is_not_read() -> Steps:
    class Own(Net):
        def forward(self, x):
            return x * (2 if self.table["kind"].dtype is torch.float16 else 3)

    model = net(Own)
    model.table = {"kind": torch.ones(2)}
    yield model, (rows(),)
    model.table["kind"].data = model.table["kind"].half()
    yield (rows(),)


@change("outside")
def the_shape_of_a_buffer_that_is_not_read() -> Steps:
    yield (model := net(Asked)), (rows(),)
    model.table = torch.ones(5)
    yield (rows(),)


GLOBAL, GLOBAL_TABLE = 2.0, {"scale": 2.0}
GLOBAL_TENSOR = torch.ones(4)


def global_function(x):
    return x.relu()


def function_with_default(x, scale=2.0):
    return x * scale


@change("outside")
def a_global_number() -> Steps:
    global GLOBAL
    yield (lambda x: x * GLOBAL), (rows(),)
    GLOBAL = 3.0
    yield (rows(),)
    GLOBAL = 2.0


@change("outside")
def an_element_of_a_global_dict() -> Steps:
    yield (lambda x: x * GLOBAL_TABLE["scale"]), (rows(),)
    GLOBAL_TABLE["scale"] = 3.0
    yield (rows(),)
    GLOBAL_TABLE["scale"] = 2.0


@change("outside")
def another_global_tensor() -> Steps:
    global GLOBAL_TENSOR
    yield (lambda x: x + GLOBAL_TENSOR), (rows(),)
    GLOBAL_TENSOR = torch.full((4,), 9.0)
    yield (rows(),)
    GLOBAL_TENSOR = torch.ones(4)


@change("outside")
def another_global_function() -> Steps:
    global global_function
    yield (lambda x: global_function(x + 1)), (rows(),)
    kept, global_function = global_function, torch.tanh
    yield (rows(),)
    global_function = kept


@change("outside")
def a_closure() -> Steps:
    scale = 2.0

    def forward(x):
        return x * scale

    yield forward, (rows(),)
    scale = 3.0
    yield (rows(),)


@change("outside")
def a_tensor_in_a_closure() -> Steps:
    held = torch.ones(4)

    def forward(x):
        return x * held

    yield forward, (rows(),)
    held = torch.full((4,), 3.0)
    yield (rows(),)


@change("outside")
def a_default_of_an_inner_function() -> Steps:
    def inner(x, scale=2.0):
        return x * scale

    def forward(x):
        return inner(x)

    yield forward, (rows(),)
    inner.__defaults__ = (3.0,)
    yield (rows(),)


@change("outside")
def a_keyword_default_of_an_inner_function() -> Steps:
    def inner(x, *, scale=2.0):
        return x * scale

    def forward(x):
        return inner(x)

    yield forward, (rows(),)
    inner.__kwdefaults__ = {"scale": 3.0}
    yield (rows(),)


@change("outside")
def one_more_default_of_an_inner_function() -> Steps:
    def inner(x, shift, scale=2.0):
        return x * scale + shift

    def forward(x):
        return inner(x, 1.0)

    yield forward, (rows(),)
    inner.__defaults__ = (2.0, 3.0)
    yield (rows(),)


@change("outside")
def a_default_of_a_global_function() -> Steps:
    yield (lambda x: function_with_default(x)), (rows(),)
    function_with_default.__defaults__ = (3.0,)
    yield (rows(),)
    function_with_default.__defaults__ = (2.0,)


@change("outside")
def a_default_of_a_method() -> Steps:
    class Own(Net):
        def forward(self, x):
            return self.scaled(x)

        def scaled(self, x, by=2.0):
            return x * by

    yield net(Own), (rows(),)
    Own.scaled.__defaults__ = (3.0,)
    yield (rows(),)


@change("outside")
def a_default_of_the_forward() -> Steps:
    def forward(x, scale=2.0):
        return x * scale

    yield forward, (rows(),)
    forward.__defaults__ = (3.0,)
    yield (rows(),)


@change("outside")
def a_keyword_default_of_the_forward_of_a_class() -> Steps:
    class Own(Net):
        def forward(self, x, *, scale=2.0):
            return x * scale

    yield net(Own), (rows(),)
    Own.forward.__kwdefaults__ = {"scale": 3.0}
    yield (rows(),)


@change("outside")
def the_code_of_an_inner_function() -> Steps:
    def inner(x):
        return x * 2

    def forward(x):
        return inner(x)

    yield forward, (rows(),)
    inner.__code__ = (lambda x: x * 3).__code__
    yield (rows(),)


@change("ambient")
def autocast() -> Steps:
    yield nn.Linear(4, 4), (rows(),)
    with torch.autocast("cpu", torch.bfloat16):
        yield (rows(),)


@change("ambient")
def autocast_that_ends() -> Steps:
    with torch.autocast("cpu", torch.bfloat16):
        yield nn.Linear(4, 4), (rows(),)
    yield (rows(),)


@change("ambient")
def another_dtype_of_autocast() -> Steps:
    with torch.autocast("cpu", torch.bfloat16):
        yield nn.Linear(4, 4), (rows(),)
    with torch.autocast("cpu", torch.float16):
        yield (rows(),)


@change("ambient")
def a_default_dtype() -> Steps:
    yield (lambda x: x + torch.full((4,), 1 / 3)), (rows(),)
    torch.set_default_dtype(torch.float64)
    yield (rows().float(),)
    torch.set_default_dtype(torch.float32)


@change("ambient")
def a_default_device() -> Steps:
    yield (lambda x: x.sum(1) * 0 + torch.ones(1).is_meta), (rows(),)
    torch.set_default_device("meta")
    yield (torch.ones(6, 4, device="cpu"),)
    torch.set_default_device(None)


@change("ambient")
def deterministic_algorithms() -> Steps:
    def forward(x):
        return x + torch.are_deterministic_algorithms_enabled()

    yield forward, (rows(),)
    torch.use_deterministic_algorithms(True)
    yield (rows(),)
    torch.use_deterministic_algorithms(False)


@change("ambient")
def gradients() -> Steps:
    yield (lambda x: x * 2), (rows(),)
    with torch.enable_grad():
        yield (rows().requires_grad_(),)


@change("ambient")
def inference_mode() -> Steps:
    yield (lambda x: x + torch.is_inference_mode_enabled()), (rows(),)
    with torch.inference_mode():
        yield (rows(),)


@change("ambient")
def a_matmul_precision() -> Steps:
    def forward(x):
        return x + (torch.get_float32_matmul_precision() == "medium")

    yield forward, (rows(),)
    torch.set_float32_matmul_precision("medium")
    yield (rows(),)
    torch.set_float32_matmul_precision("highest")


@change("ambient")
def an_attention_kernel() -> Steps:
    def forward(x):
        return x + torch.backends.cuda.flash_sdp_enabled()

    yield forward, (rows(),)
    torch.backends.cuda.enable_flash_sdp(False)
    yield (rows(),)
    torch.backends.cuda.enable_flash_sdp(True)


class Halved(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.sin else result


@change("ambient")
def a_torch_function_mode() -> Steps:
    yield torch.nn.Sequential(Sine()), (rows(),)
    with Halved():
        yield (rows(),)


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


@change("call")
def a_size_of_one() -> Steps:
    yield (lambda x: x * 2 if x.shape[0] == 1 else x * 3), (rows(),)
    yield (rows(1),)


@change("call")
def a_size_of_one_at_first() -> Steps:
    yield (lambda x: x * 2 if x.shape[0] == 1 else x * 3), (rows(1),)
    yield (rows(5),)


@change("call")
def a_size_of_one_is_squeezed() -> Steps:
    yield (lambda x: x.squeeze(0) + 1), (rows(),)
    yield (rows(1),)


@change("call")
def a_size_of_one_in_a_reduction() -> Steps:
    yield (lambda x: x.sum(0) / max(x.shape[0] - 1, 1) + max(x.shape[0], 2)), (rows(),)
    yield (rows(1),)


@change("call")
def a_size_of_nothing() -> Steps:
    yield (lambda x: x.sum(0) + (1 if x.shape[0] == 0 else 2)), (rows(),)
    yield (rows()[:0],)


@change("call")
def a_truth_of_a_size() -> Steps:
    yield (lambda x: x.sum(0) + 1 if x.shape[0] else x.sum(0) - 1), (rows(),)
    yield (rows()[:0],)


@change("call")
def an_odd_size() -> Steps:
    yield (lambda x: x * 2 if x.shape[0] % 2 else x * 3), (rows(),)
    yield (rows(5),)


@change("call")
def an_even_size() -> Steps:
    yield (lambda x: x * 2 if x.shape[0] % 2 != 0 else x * 3), (rows(5),)
    yield (rows(6),)


@change("call")
def a_remainder_of_one() -> Steps:
    yield (lambda x: x * 2 if x.shape[0] % 4 == 1 else x * 3), (rows(6),)
    yield (rows(9),)


@change("call")
def a_large_size() -> Steps:
    yield (lambda x: x * 2 if x.shape[0] > 8 else x * 3), (rows(6),)
    yield (rows(9),)


@change("call")
def a_size_that_is_excluded() -> Steps:
    yield (lambda x: x * 2 if x.shape[0] == 16 else x * 3), (rows(6),)
    yield (rows(16),)


@change("call")
def the_size_of_a_tensor_that_is_not_read() -> Steps:
    def forward(x, unused):
        return x * 2 if unused.shape[0] > 8 else x * 3

    yield forward, (rows(), torch.ones(6, 2)), {"x": {0: "a"}, "unused": {0: "b"}}
    yield (rows(), torch.ones(9, 2))


@change("call")
def a_size_of_one_of_a_tensor_that_is_not_read() -> Steps:
    def forward(x, unused):
        return x * 2 if unused.shape[0] == 1 else x * 3

    yield forward, (rows(), torch.ones(6, 2)), {"x": {0: "a"}, "unused": {0: "b"}}
    yield (rows(), torch.ones(1, 2))


@change("call")
def two_axes_that_become_equal() -> Steps:
    def forward(x, y):
        return x.sum(0) + y.sum(0) + (1 if x.shape[0] == y.shape[0] else 2)

    yield forward, (rows(6), rows(3)), {"x": {0: "a"}, "y": {0: "b"}}
    yield (rows(6), rows(6))


@change("call")
def a_broadcast_of_one_axis() -> Steps:
    def forward(x, y):
        return x * (y if y.shape[0] == x.shape[0] else y.sum(0))

    yield forward, (rows(6), rows(3)), {"x": {0: "a"}, "y": {0: "b"}}
    yield (rows(6), rows(1))


@change("call")
def a_dtype() -> Steps:
    yield (lambda x: x * 2 if x.dtype is torch.float32 else x * 3), (rows(),)
    yield (rows().double(),)


@change("call")
def strides() -> Steps:
    yield (lambda x: x.as_strided((6, 4), (4, 1)) + 0), (rows(),)
    yield (torch.linspace(-2, 2, 24).reshape(4, 6).t(),)


@change("call")
def another_rank() -> Steps:
    yield (lambda x: x * x.dim()), (rows(),)
    yield (rows()[None],)


@change("call")
def a_size_that_is_no_batch_dimension() -> Steps:
    yield (lambda x: x * x.shape[1]), (rows(),)
    yield (torch.ones(6, 5),)


@change("call")
def an_argument_that_becomes_none() -> Steps:
    yield (lambda x, y: x if y is None else x + y), (rows(), rows()), ["x", "y"]
    yield (rows(), None)


@change("call")
def an_argument_that_was_none() -> Steps:
    yield (lambda x, y: x if y is None else x + y), (rows(), None), ["x"]
    yield (rows(), rows())


@change("call")
def a_number() -> Steps:
    yield (lambda x, scale: x * scale), (rows(), 2.0), ["x"]
    yield (rows(), 3.0)


@change("call")
def a_number_of_another_type() -> Steps:
    def forward(x, scale):
        return (x * scale).to(torch.float32) + isinstance(scale, bool)

    yield forward, (rows(), 1), ["x"]
    yield (rows(), True)


@change("call")
def minus_zero() -> Steps:
    yield (lambda x, zero: x * 0 + math.copysign(1.0, zero)), (rows(), 0.0), ["x"]
    yield (rows(), -0.0)


@change("call")
def minus_zero_in_a_tuple() -> Steps:
    yield (lambda x, pair: x * 0 + math.copysign(1.0, pair[0])), (rows(), (0.0, 1)), ["x"]
    yield (rows(), (-0.0, 1))


@change("call")
def an_attribute_of_an_argument() -> Steps:
    config = types.SimpleNamespace(eps=0.5)
    yield (lambda x, config: x + config.eps), (rows(), config), ["x"]
    config.eps = 3.0
    yield (rows(), config)


@change("call")
def a_key_of_an_argument() -> Steps:
    def forward(x, meta):
        return x * len(meta) if "b" in meta else x

    yield forward, (rows(), {"a": 1}), ["x"]
    yield (rows(), {"a": 1, "b": 2})


@change("call")
def another_module_as_argument() -> Steps:
    yield (lambda x, layer: layer(x)), (rows(), nn.ReLU()), ["x"]
    yield (rows(), nn.Tanh())


class Doubled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.sin else result


@change("call")
def a_subclass_of_tensor() -> Steps:
    yield (lambda x: torch.sin(x) + 0), (rows(),)
    yield (rows().as_subclass(Doubled),)


@change("call")
def a_conjugate() -> Steps:
    yield (lambda x: x * 2 if x.is_conj() else x * 3), (torch.randn(6, 4) * 1j,)
    yield ((torch.ones(6, 4) * (1 + 1j)).conj(),)


@change("call")
def a_sparse_tensor() -> Steps:
    yield (lambda x: x * (2 if x.is_sparse else 3)), (rows(),)
    yield (rows().to_sparse(),)


@change("call")
def gradients_of_an_argument() -> Steps:
    yield (lambda x: x * 2 if x.requires_grad else x * 3), (rows(),)
    yield (rows().requires_grad_(),)


def writing(x, y):
    x.add_(1)
    y.mul_(2)
    return x + y


@change("call")
def arguments_that_become_one() -> Steps:
    yield writing, (rows(), rows())
    yield lambda: (x := rows(), x)


@change("call")
def arguments_that_overlap() -> Steps:
    yield writing, (rows(), rows())
    yield lambda: ((x := rows(8))[:6], x[2:])


@change("call")
def an_argument_that_overlaps_a_weight() -> Steps:
    class Own(Net):
        def forward(self, x):
            x.add_(1)
            return x.sum(0) * self.shift + self.shift

    model = net(Own)
    yield model, (rows(),)
    yield lambda: (model.shift.view(1, 4).expand(6, 4)[:1],)


@change("call")
def a_weight_that_is_given_as_an_argument() -> Steps:
    class Own(Net):
        def forward(self, x):
            self.shift.add_(1)
            return x + self.shift

    model = net(Own)
    yield model, (torch.zeros(6, 4),)
    yield (model.shift.expand(6, 4),)


class Lists(nn.Module):
    """Tensors in containers, and modules under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.items = [torch.ones(4), 2.0]
        self.by_name = {"deep": [torch.ones(4)]}
        self.inner = nn.Identity()
        self.again = self.inner
        self.numbers = [1.0]
        self.same_numbers = self.numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.items[0] * self.items[1] + self.by_name["deep"][0]
        if self.again is self.inner:
            x = x * 2
        if self.same_numbers is self.numbers:
            x = x + 1
        return self.inner(x)


@change("outside")
def a_tensor_in_a_list() -> Steps:
    net = Lists()
    yield net, (rows(),)
    net.items[0] = torch.full((4,), 7.0)
    yield (rows(),)


@change("outside")
def a_tensor_in_a_list_in_a_dict() -> Steps:
    net = Lists()
    yield net, (rows(),)
    net.by_name["deep"].clear()
    net.by_name["deep"].append(torch.full((4,), 7.0))
    yield (rows(),)


@change("outside")
def a_module_of_two_names_that_are_two_now() -> Steps:
    net = Lists()
    yield net, (rows(),)
    net.again = nn.Identity()
    yield (rows(),)


@change("outside")
def a_list_of_two_names_that_are_two_now() -> Steps:
    net = Lists()
    yield net, (rows(),)
    net.same_numbers = [1.0]
    yield (rows(),)


@change("outside")
def a_hook_of_all_modules() -> Steps:
    yield Lists(), (rows(),)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 5)
    try:
        yield (rows(),)
    finally:
        hook.remove()


def outcome(each: Change, backend: str, *, sealed: bool = False) -> str:
    """ "right", the name of graphrt's error, "both raise", "silent", or "raw" and the name of an
    error that eager does not raise. With `sealed`, `weights_changed()` is asked before the call."""
    torch._dynamo.reset()
    with torch.no_grad(), closing(each.steps()) as steps:
        forward, args, *dims = next(steps)
        names = inspect.signature(forward.forward if isinstance(forward, nn.Module) else forward)
        tensors = [
            n for n, v in zip(names.parameters, args, strict=False) if isinstance(v, torch.Tensor)
        ]
        compiled = compile_module(
            forward,
            dims[0] if dims else tensors,
            options=CompileOptions(backend=backend),
            in_place=False,
        )
        try:
            compiled(*args)
        except GraphRTError as error:
            return f"at compile time: {type(error).__name__}"
        if sealed:
            compiled.seal()
        step = next(steps)
        make = step if callable(step) else lambda: tree.map_leaves(_copied, step)
        got: Any = _what_changed(compiled) if sealed else None
        got = got or _result(compiled, make)
        expected = _result(forward, make)
        list(steps)
    return _verdict(got, expected, 0.0 if backend == "eager" else 1e-5)


def _what_changed(compiled: CompiledModule) -> GraphRTError | None:
    try:
        compiled.weights_changed()
    except GraphRTError as error:
        return error
    return None


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if type(tensor) is torch.Tensor and tensor.is_leaf else tensor


def _result(forward: Callable[..., Any], make: Callable[[], Any]) -> Any:
    """What a call returns, or raises, and its arguments afterwards; modules keep their state."""
    module = forward.module if isinstance(forward, CompiledModule) else forward
    held = list(module.state_dict().values()) if isinstance(module, nn.Module) else []
    kept = [value.clone() for value in held]
    torch.manual_seed(0)
    args = make()
    try:
        return forward(*args), args
    except Exception as error:
        return error
    finally:
        with torch.inference_mode(torch.is_inference_mode_enabled()), torch.no_grad():
            for value, before in zip(held, kept, strict=True):
                value.copy_(before)


def _verdict(got: Any, expected: Any, tolerance: float) -> str:
    if isinstance(got, GraphRTError):
        return type(got).__name__
    if isinstance(got, Exception):
        return "both raise" if isinstance(expected, Exception) else f"raw {type(got).__name__}"
    if isinstance(expected, Exception):
        return "silent"
    return "right" if _same(got, expected, tolerance) else "silent"


def _same(got: Any, expected: Any, tolerance: float) -> bool:
    ours, theirs = list(tree.tensors(got)), list(tree.tensors(expected))
    return len(ours) == len(theirs) and all(
        type(a) is type(b)
        and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        and (a.is_meta or torch.allclose(_dense(a), _dense(b), tolerance, tolerance))
        for a, b in zip(ours, theirs, strict=True)
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=("eager", "inductor"))
    parser.add_argument("--sealed", action="store_true", help="the change comes after seal()")
    arguments = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    for each in CHANGES:
        what = outcome(each, arguments.backend, sealed=arguments.sealed)
        counts[what] += 1
        print(f"{each.where:8} {each.name:50} {what}", flush=True)
    print(f"{len(CHANGES)} changes: " + ", ".join(f"{n} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    main()
