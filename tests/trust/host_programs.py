"""Programs whose host changes something between two steps, after all graphs were tried."""

from __future__ import annotations

import contextvars
import ctypes
import dataclasses
import functools
import gc
import itertools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

WIDTH = 8

Change = tuple[Callable[..., Any], Callable[[], object]]
"""A forward of `x`, and what the host does."""


class Program(NamedTuple):
    """`seen`: at the next step, if CPython tells of changes of "dict"s; by a "glance"; or it makes
    no difference, "none"."""

    name: str
    seen: str
    build: Callable[[], Change]


PROGRAMS: list[Program] = []


def program(seen: str) -> Callable[[Callable[[], Change]], Callable[[], Change]]:
    def add(build: Callable[[], Change]) -> Callable[[], Change]:
        PROGRAMS.append(Program(build.__name__.replace("_", " "), seen, build))
        return build

    return add


class Lora(nn.Module):
    """A layer with two adapters, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleDict({name: nn.Linear(WIDTH, 2, bias=False) for name in "ab"})
        self.up = nn.ModuleDict({name: nn.Linear(2, WIDTH, bias=False) for name in "ab"})
        self.scaling = {"a": 0.5, "b": 2.0}
        self.active = "a"
        self.merged = False
        self.disabled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        if self.disabled or self.merged:
            return y
        return y + self.up[self.active](self.down[self.active](x)) * self.scaling[self.active]


class Config:
    """Attributes, as they are given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Net(nn.Module):
    """Two blocks, an adapter, and Python state of all kinds."""

    counter: ClassVar[int] = 3
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lora = Lora()
        self.register_buffer("shift", torch.randn(WIDTH))
        self.scale = 1.0
        self.flag = False
        self.name = "relu"
        self.steering: torch.Tensor | None = None
        self.config = Config(alpha=1.0, deep=types.SimpleNamespace(beta=1.0))
        self.table = {"gain": 1.0, "act": torch.relu}
        self.scales = [1.0, 1.0]
        self.unused = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale + self.shift
        for block, scale in zip(self.blocks, self.scales, strict=False):
            x = self.helper(self.table["act"](block(x))) * scale
        if self.flag:
            x = x * 2
        if self.steering is not None:
            x = x + self.steering
        x = self.lora(x) * self.config.alpha * self.config.deep.beta * self.table["gain"]
        return (self.norm(getattr(torch, self.name)(x)) + self.counter) * self.gain

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5


def on_net(seen: str, **changes: Callable[[Net], object]) -> None:
    """Programs by name, each of which changes a `Net`."""

    def build(change: Callable[[Net], object]) -> Change:
        # A class of its own, so that a change of it is nobody else's.
        net = type("Net", (Net,), {"__module__": __name__, **vars_of_net()})()
        return net, functools.partial(change, net)

    for name, change in changes.items():
        PROGRAMS.append(Program(name.replace("_", " "), seen, functools.partial(build, change)))


def vars_of_net() -> dict[str, Any]:
    return {"counter": 3, "gain": 1.0, "helper": lambda self, x: x + 0.5}


def twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def replaced(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each * 1.5 + 0.1 for name, each in module.state_dict().items()}


def hooks_of(hook: Callable[..., Any]) -> OrderedDict[int, Any]:
    """As a module has them, for keys that no handle has."""
    return OrderedDict({-1: hook})


def doubled(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: nn.Parameter(each * 2) for name, each in parameters.items()}


on_net(
    "dict",
    number=lambda n: setattr(n, "scale", 2.0),
    number_of_another_type=lambda n: setattr(n, "scale", 2),
    flag=lambda n: setattr(n, "flag", True),
    text=lambda n: setattr(n, "name", "tanh"),
    attribute_through_object=lambda n: object.__setattr__(n, "scale", 2.0),
    attribute_through_the_dict=lambda n: n.__dict__.update(scale=2.0),
    attribute_in_a_loop=lambda n: [setattr(n, "scale", float(at)) for at in range(2, 2000)],
    new_attribute_over_a_class=lambda n: setattr(n, "gain", 2.0),
    class_attribute=lambda n: setattr(type(n), "gain", 2.0),
    class_counter=lambda n: setattr(type(n), "counter", -4),
    method_of_the_class=lambda n: setattr(type(n), "helper", lambda self, x: x * 3),
    method_of_the_instance=lambda n: setattr(n, "helper", twice),
    forward_of_the_instance=lambda n: setattr(n, "forward", lambda x: twice(x)),
    forward_of_a_submodule=lambda n: setattr(n.blocks[1], "forward", twice),
    steering_vector=lambda n: setattr(n, "steering", torch.ones(WIDTH)),
    weight=lambda n: setattr(n.first, "weight", nn.Parameter(n.first.weight * 2)),
    weight_in_parameters=lambda n: n.first._parameters.update(
        weight=nn.Parameter(n.first.weight * 2)
    ),
    bias_dropped=lambda n: setattr(n.first, "bias", None),
    all_weights_assigned=lambda n: n.load_state_dict(replaced(n), assign=True),
    buffer=lambda n: setattr(n, "shift", n.shift * 2),
    buffer_in_buffers=lambda n: n._buffers.update(shift=n.shift * 2),
    submodule=lambda n: setattr(n, "first", nn.Linear(WIDTH, WIDTH)),
    submodule_of_a_list=lambda n: n.blocks.__setitem__(0, nn.Linear(WIDTH, WIDTH)),
    norm_off=lambda n: setattr(n, "norm", nn.Identity()),
    submodule_deleted_from_a_list=lambda n: n.blocks.__delitem__(1),
    hook=lambda n: n.blocks[0].register_forward_hook(lambda m, a, out: out * 3),
    pre_hook=lambda n: n.norm.register_forward_pre_hook(lambda m, a: (a[0].flip(-1),)),
    hook_as_small_as_rounding=lambda n: n.register_forward_hook(lambda m, a, out: out + 1e-4),
    hooks_replaced=lambda n: setattr(n.norm, "_forward_hooks", hooks_of(lambda m, a, out: out * 3)),
    parameters_replaced=lambda n: setattr(n.first, "_parameters", doubled(n.first._parameters)),
    hook_of_the_model=lambda n: n.register_forward_hook(lambda m, a, out: out * 3),
    parametrization=lambda n: parametrize.register_parametrization(n.first, "weight", Doubled()),
    weight_norm=lambda n: nn.utils.parametrizations.weight_norm(n.blocks[0]),
    dict_value=lambda n: n.table.update(gain=2.0),
    dict_function=lambda n: n.table.update(act=torch.tanh),
    dict_replaced=lambda n: setattr(n, "table", {"gain": 3.0, "act": torch.relu}),
    nested_object=lambda n: setattr(n.config, "alpha", 2.0),
    deeper_object=lambda n: setattr(n.config.deep, "beta", 2.0),
    object_replaced=lambda n: setattr(n.config, "deep", types.SimpleNamespace(beta=2.0)),
    list_replaced=lambda n: setattr(n, "scales", [2.0, 1.0]),
    adapter=lambda n: setattr(n.lora, "active", "b"),
    adapter_scale=lambda n: n.lora.scaling.update(a=3.0),
    adapter_disabled=lambda n: setattr(n.lora, "disabled", True),
    adapter_merged=lambda n: setattr(n.lora, "merged", True),
    adapter_weights=lambda n: n.lora.down.__setitem__("a", nn.Linear(WIDTH, 2, bias=False)),
    eps_of_a_norm=lambda n: setattr(n.norm, "eps", 1.0),
    functional_patched_by_name=lambda n: setattr(n, "name", "sigmoid"),
)
on_net(
    "glance",
    list_element=lambda n: n.scales.__setitem__(1, 2.0),
    list_shorter=lambda n: n.scales.pop(),
    data_of_a_weight=lambda n: setattr(n.first.weight, "data", n.first.weight.data * 2),
    data_of_all=lambda n: [setattr(p, "data", p.data * 2) for p in n.parameters()],
    set_of_a_weight=lambda n: n.first.weight.set_(torch.ones(WIDTH, WIDTH)),
    data_transposed_where_it_is=lambda n: setattr(n.first.weight, "data", n.first.weight.data.t()),
    set_to_other_strides=lambda n: n.first.weight.set_(
        n.first.weight.untyped_storage(), 0, (WIDTH, WIDTH), (1, WIDTH)
    ),
    class_of_a_submodule=lambda n: setattr(n.norm, "__class__", NormByThree),
    class_of_an_object=lambda n: setattr(n.config, "__class__", ConfigOfTwo),
    dict_of_an_object_replaced=lambda n: setattr(
        n.config, "__dict__", {**vars(n.config), "alpha": 2.0}
    ),
)
on_net(
    "none",
    unused_number=lambda n: setattr(n, "unused", n.unused + 1),
    unused_new_attribute=lambda n: setattr(n, "another", object()),
    the_other_adapter=lambda n: n.lora.scaling.update(b=7.0),
    a_third_adapter=lambda n: n.lora.scaling.update(c=7.0),
    an_equal_number=lambda n: setattr(n, "scale", float("1.0")),
    weights_in_place=lambda n: n.load_state_dict(replaced(n)),
    weights_by_copy=lambda n: [p.data.copy_(p.data * 2) for p in n.parameters()],
    hook_that_looks=lambda n: n.register_forward_hook(lambda m, a, out: None),
    hook_added_and_removed=lambda n: n.register_forward_hook(lambda m, a, o: o * 2).remove(),
    undone=lambda n: (setattr(n, "scale", 9.0), setattr(n, "scale", 1.0)),
    weight_undone=lambda n: exchange_and_back(n.first, "weight", torch.ones(WIDTH, WIDTH)),
    submodule_undone=lambda n: exchange_and_back(n, "first", nn.Identity()),
    list_undone=lambda n: (n.scales.append(3.0), n.scales.pop()),
    eval_mode=lambda n: n.train(not n.training),
    the_same_weights_assigned=lambda n: n.load_state_dict(n.state_dict(), assign=False),
    requires_grad=lambda n: n.requires_grad_(False),
    attribute_of_a_submodule=lambda n: setattr(n.first, "note", "seen"),
)


def exchange_and_back(module: nn.Module, name: str, value: Any) -> None:
    before = getattr(module, name)
    after = nn.Parameter(value) if isinstance(value, torch.Tensor) else value
    setattr(module, name, after)
    setattr(module, name, before)


class NormByThree(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


class ConfigOfTwo(Config):
    @property
    def alpha(self) -> float:
        return 2.0


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


SCALE = 1.0
TABLE = {"scale": 1.0}
ACT = torch.relu
_variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


def put(name: str, value: Any) -> None:
    globals()[name] = value


def restored(name: str) -> Any:
    """The value of a global, as at first."""
    put("SCALE", 1.0)
    put("ACT", torch.relu)
    TABLE["scale"] = 1.0
    return globals()[name]


@program("dict")
def global_number() -> Change:
    restored("SCALE")
    return lambda x: x * SCALE, lambda: put("SCALE", 2.0)


@program("dict")
def global_function() -> Change:
    restored("ACT")
    return lambda x: ACT(x), lambda: put("ACT", torch.tanh)


@program("dict")
def global_dict() -> Change:
    restored("TABLE")
    return lambda x: x * TABLE["scale"], lambda: TABLE.update(scale=2.0)


@program("dict")
def global_that_hides_a_builtin() -> Change:
    globals().pop("max", None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * max(1, 2)

    return forward, lambda: put("max", min)


@program("dict")
def number_of_another_module() -> Change:
    settings = types.ModuleType("settings_of_a_test")
    settings.SCALE = 1.0  # type: ignore[attr-defined]
    sys.modules[settings.__name__] = settings

    def forward(x: torch.Tensor) -> torch.Tensor:
        import settings_of_a_test

        return x * settings_of_a_test.SCALE

    return forward, lambda: setattr(settings, "SCALE", 2.0)


@program("none")
def global_that_nobody_names() -> Change:
    return lambda x: x * 2, lambda: put("NOBODY", 2.0)


@program("dict")
def hook_for_all_modules() -> Change:
    layer = Lora()

    def change() -> object:
        handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: out * 2)
        HANDLES.append(handle)
        return handle

    return layer, change


HANDLES: list[Any] = []
"""What a test has to take back."""


@program("dict")
def dataclass_field() -> Change:
    @dataclasses.dataclass
    class Config:
        scale: float = 1.0

    config = Config()
    return lambda x: x * config.scale, lambda: setattr(config, "scale", 2.0)


@program("dict")
def global_that_a_default_factory_reads() -> Change:
    restored("SCALE")

    @dataclasses.dataclass
    class Config:
        scale: float = dataclasses.field(default_factory=lambda: SCALE)

    return lambda x: x * Config().scale, lambda: put("SCALE", 2.0)


@program("dict")
def global_that_the_constructor_of_a_base_class_reads() -> Change:
    restored("SCALE")

    class Base:
        def __init__(self) -> None:
            self.scale = SCALE

    class Config(Base):
        pass

    held = {"of": Config}
    return lambda x: x * held["of"]().scale, lambda: put("SCALE", 2.0)


@program("dict")
def global_that_a_static_method_of_a_base_class_reads() -> Change:
    restored("SCALE")

    class Base:
        @staticmethod
        def scale() -> float:
            return SCALE

    class Config(Base):
        pass

    return lambda x: x * Config.scale(), lambda: put("SCALE", 2.0)


@program("glance")
def dataclass_with_slots() -> Change:
    @dataclasses.dataclass(slots=True)
    class Config:
        scale: float = 1.0

    config = Config()
    return lambda x: x * config.scale, lambda: setattr(config, "scale", 2.0)


@program("dict")
def frozen_dataclass() -> Change:
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float = 1.0

    config = Config()
    return lambda x: x * config.scale, lambda: object.__setattr__(config, "scale", 2.0)


@program("dict")
def dataclass_replaced() -> Change:
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float = 1.0

    held = types.SimpleNamespace(config=Config())
    return lambda x: x * held.config.scale, lambda: setattr(held, "config", Config(2.0))


@program("glance")
def closure_number() -> Change:
    scale = 1.0

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return lambda x: x * scale, change


@program("glance")
def closure_tensor() -> Change:
    weight = torch.randn(WIDTH, WIDTH)

    def change() -> None:
        nonlocal weight
        weight = torch.randn(WIDTH, WIDTH)

    return lambda x: x @ weight, change


@program("glance")
def tensor_cut_short_where_it_is() -> Change:
    weight = torch.randn(WIDTH)
    return lambda x: x * weight.sum(), lambda: weight.resize_(2)


@program("glance")
def tensor_of_another_dtype_where_it_is() -> Change:
    weight = torch.randn(WIDTH)

    def change() -> None:
        weight.data = weight.data.view(torch.int32)

    return lambda x: x * weight.sum(), change


@program("glance")
def closure_object() -> Change:
    layer: Any = nn.Linear(WIDTH, WIDTH)

    def change() -> None:
        nonlocal layer
        layer = nn.Identity()

    return lambda x: layer(x), change


@program("glance")
def default_of_an_argument() -> Change:
    def forward(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    return forward, lambda: setattr(forward, "__defaults__", (2.0,))


@program("glance")
def code_of_a_function() -> Change:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return lambda x: helper(x), lambda: setattr(helper, "__code__", other.__code__)


@program("dict")
def attribute_of_a_function() -> Change:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * forward.scale  # type: ignore[attr-defined]

    forward.scale = 1.0  # type: ignore[attr-defined]
    return forward, lambda: setattr(forward, "scale", 2.0)


@program("dict")
def keyword_of_a_partial() -> Change:
    part = functools.partial(lambda x, scale: x * scale, scale=1.0)
    return part, lambda: part.keywords.update(scale=2.0)


@program("dict")
def keyword_only_default() -> Change:
    def forward(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    return forward, lambda: forward.__kwdefaults__.update(scale=2.0)


@program("glance")
def slot_of_a_class() -> Change:
    class Config:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = 1.0

    config = Config()
    return lambda x: x * config.scale, lambda: setattr(config, "scale", 2.0)


@program("glance")
def element_of_a_nested_list() -> Change:
    scales = [[1.0], [1.0]]
    return lambda x: x * scales[1][0], lambda: scales[1].__setitem__(0, 2.0)


@program("glance")
def deque_of_numbers() -> Change:
    scales = deque([1.0, 1.0])
    return lambda x: x * scales[1], lambda: scales.__setitem__(1, 2.0)


@program("glance")
def set_of_names() -> Change:
    names = {"scaled"}
    return lambda x: x * (2 if "scaled" in names else 1), lambda: names.remove("scaled")


@program("glance")
def list_of_layers() -> Change:
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return forward, lambda: layers.reverse()


@program("dict")
def dict_of_tensors() -> Change:
    weights = {"a": torch.randn(WIDTH, WIDTH)}
    return lambda x: x @ weights["a"], lambda: weights.update(a=torch.randn(WIDTH, WIDTH))


@program("dict")
def ordered_dict_and_defaultdict() -> Change:
    scales: dict[str, Any] = OrderedDict(a=defaultdict(lambda: 1.0, b=1.0))
    return lambda x: x * scales["a"]["b"], lambda: scales["a"].update(b=2.0)


@program("dict")
def key_deleted() -> Change:
    scales = {"a": 2.0}
    return lambda x: x * scales.get("a", 1.0), lambda: scales.pop("a")


@program("dict")
def key_added() -> Change:
    scales: dict[str, float] = {}
    return lambda x: x * scales.get("a", 1.0), lambda: scales.update(a=2.0)


@program("dict")
def dict_cleared() -> Change:
    scales = {"a": 2.0}
    return lambda x: x * scales.get("a", 1.0), scales.clear


@program("dict")
def property_over_an_attribute() -> Change:
    class Config:
        def __init__(self) -> None:
            self._scale = 1.0

        @property
        def scale(self) -> float:
            return self._scale

    config = Config()
    return lambda x: x * config.scale, lambda: setattr(config, "_scale", 2.0)


@program("dict")
def base_class_attribute() -> Change:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    config = Config()
    return lambda x: x * config.scale, lambda: setattr(Base, "scale", 2.0)


@program("glance")
def context_variable() -> Change:
    _variable.set(1.0)
    return lambda x: x * _variable.get(), lambda: _variable.set(2.0)


@contextmanager
def all_ids_taken() -> Iterator[None]:
    callback = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p
    )(lambda *_: 0)
    # Runners of other tests have an id until they are collected.
    gc.collect()
    taken = []
    try:
        for _ in itertools.count():
            taken.append(ctypes.pythonapi.PyDict_AddWatcher(callback))
    except RuntimeError:
        pass
    try:
        yield
    finally:
        for each in taken:
            ctypes.pythonapi.PyDict_ClearWatcher(each)
