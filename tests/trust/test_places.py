"""What the Python side of a forward holds is found, named, and seen to change."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import threading
import types
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture.wrapper import GraphWrapper
from graphrt.core.replay.pool import GraphPool
from graphrt.trust.host_watch import HostWatch
from graphrt.trust.picture import Picture
from graphrt.trust.places.slots import MISSING, same_value
from graphrt.trust.places.walk import Places, places_of
from graphrt.trust.snapshot import described

SCALE = torch.ones(2)
FACTOR = 3
STEP = contextvars.ContextVar("STEP")


class Box:
    """An object with attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("scale",)


class Scaler:
    scale: Any = None

    def __call__(self, x):
        return x * self.scale


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Data:
    scale: Any


@dataclasses.dataclass(frozen=True)
class FrozenData:
    scale: Any


class Listed(list):
    pass


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(2))
        self.position = 0

    def forward(self, x):
        return self.linear(x) + self.table + self.position


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tensor() -> torch.Tensor:
    return torch.ones(2)


class Looked:
    """What later looks compare with: all that a walk has found."""

    def __init__(self, places: Places) -> None:
        self.host = HostWatch()
        self.host.aim(places)

    def broken(self) -> list[str]:
        """The paths at which something else is since the last time."""
        changes = self.host.take()
        return [] if changes is None else [*changes.changes]


def changed(values: Picture) -> list[str]:
    """The paths of numbers, objects and lengths that have changed."""
    was, values.was = values.was, values.take()
    return [place.path for place, _, _ in values.changes(was, values.was)]


def values_of(places: Places) -> list[object]:
    """The plain values as they are now, in the order of `numbers`."""
    return [place.get() for place in places.numbers]


# Where a value can live: each makes a forward that holds `value`, with how a user would write the
# place, and a function that puts another value there.


def in_closure(value):
    scale = value

    def forward(x):
        return x * scale

    def put(new):
        nonlocal scale
        scale = new

    return forward, "closure scale", put


def in_global(value):
    def forward(x):
        return x * HELD  # noqa: F821

    def put(new):
        globals()["HELD"] = new

    put(value)
    return forward, "global HELD", put


def in_default(value):
    def forward(x, shift=1, scale=value):
        return x * scale

    return forward, "default scale", lambda new: setattr(forward, "__defaults__", (1, new))


def in_keyword_default(value):
    def forward(x, *, scale=value):
        return x * scale

    return forward, "default scale", lambda new: forward.__kwdefaults__.update(scale=new)


def in_function_attribute(value):
    def forward(x):
        return x * forward.scale

    forward.scale = value
    return forward, "forward.scale", lambda new: setattr(forward, "scale", new)


def in_helper(value):
    scale = value

    def helper(x):
        return x * scale

    def forward(x):
        return helper(x)

    def put(new):
        nonlocal scale
        scale = new

    return forward, "closure helper, closure scale", put


def in_decorated(value):
    inner, _, put = in_closure(value)

    @functools.wraps(inner)
    def forward(*args):
        return inner(*args)

    return forward, "closure inner, closure scale", put


def in_wrapped_by_torch(value):
    inner, _, put = in_closure(value)
    return torch.no_grad()(inner), "closure func, closure scale", put


def in_partial(value):
    forward = functools.partial(torch.mul, other=value)
    return forward, "partial.keywords['other']", lambda new: forward.keywords.update(other=new)


def in_callable(value):
    forward = Scaler()
    forward.scale = value
    return forward, "self.scale", lambda new: setattr(forward, "scale", new)


def in_method(value):
    owner = Scaler()
    owner.scale = value
    return owner.__call__, "self.scale", lambda new: setattr(owner, "scale", new)


def in_class(value):
    class Own(Scaler):
        scale = value

    return Own(), "Own.scale", lambda new: setattr(Own, "scale", new)


def in_class_that_code_names(value):
    class Config:
        scale = value

    def forward(x):
        return x * Config.scale

    return forward, "Config.scale", lambda new: setattr(Config, "scale", new)


def in_module_attribute(value):
    model = Model()
    layer = model.layers[1]
    layer.__dict__["scale"] = value
    return model, "model.layers[1].scale", lambda new: layer.__dict__.update(scale=new)


def in_bound_forward(value):
    model = Model()
    layer = model.layers[1]
    layer.__dict__["scale"] = value
    return model.forward, "model.layers[1].scale", lambda new: layer.__dict__.update(scale=new)


def in_cache_of_module(value):
    model = Model()
    model.layers[0].cache = Box(scale=value)
    cache = model.layers[0].cache
    return model, "model.layers[0].cache.scale", lambda new: setattr(cache, "scale", new)


def in_hook(value):
    scale = value

    def hook(module, args):
        return args[0] * scale

    def put(new):
        nonlocal scale
        scale = new

    model = Model()
    handle = model.register_forward_pre_hook(hook)
    return model, f"model._forward_pre_hooks[{handle.id}], closure scale", put


def in_dict(value):
    box = Box(held={"a": 1, "scale": value})
    return lambda x: box, "closure box.held['scale']", lambda new: box.held.update(scale=new)


def in_ordered_dict(value):
    box = Box(held=collections.OrderedDict(scale=value))
    return lambda x: box, "closure box.held['scale']", lambda new: box.held.update(scale=new)


def in_list(value):
    box = Box(held=[0, value])
    return lambda x: box, "closure box.held[1]", lambda new: box.held.__setitem__(1, new)


def in_subclass_of_list(value):
    held = Listed([0])
    held.scale = value
    return lambda x: held, "closure held.scale", lambda new: setattr(held, "scale", new)


def in_deque(value):
    held = collections.deque([0, value])
    return lambda x: held, "closure held[1]", lambda new: held.__setitem__(1, new)


def in_slot(value):
    held = Slotted()
    held.scale = value
    return lambda x: held, "closure held.scale", lambda new: setattr(held, "scale", new)


def in_dataclass(value):
    held = Data(value)
    return lambda x: held, "closure held.scale", lambda new: setattr(held, "scale", new)


def in_namespace(value):
    held = types.SimpleNamespace(scale=value)
    return lambda x: held, "closure held.scale", lambda new: setattr(held, "scale", new)


def in_user_dict(value):
    held = collections.UserDict(scale=value)
    return lambda x: held, "closure held.data['scale']", lambda new: held.update(scale=new)


def in_thread_local(value):
    held = threading.local()
    held.scale = value
    return lambda x: held, "closure held.scale", lambda new: setattr(held, "scale", new)


def in_weakly_referenced(value):
    held = Box(scale=value)
    ref = weakref.ref(held)

    def put(new):
        held.scale = new  # which also keeps it alive

    return lambda x: ref(), "closure ref().scale", put


def in_mapping_proxy(value):
    held = {"scale": value}
    proxy = types.MappingProxyType(held)
    return lambda x: proxy, "closure proxy['scale']", lambda new: held.update(scale=new)


def in_context_variable(value):
    STEP.set(value)
    return lambda x: STEP.get(), "global STEP.get()", STEP.set


def in_module_of_user(value):
    module = types.ModuleType("settings_of_user")
    module.scale = value
    forward = eval("lambda x: x * settings_of_user.scale", {"settings_of_user": module})
    put = functools.partial(setattr, module, "scale")
    return forward, "global settings_of_user.scale", put


def in_tensor_attribute(value):
    held = torch.zeros(2)
    held.scale = value
    return lambda x: held, "closure held.scale", lambda new: setattr(held, "scale", new)


def in_property(value):
    class Own:
        @property
        def scale(self):
            return HELD_BY_PROPERTY  # noqa: F821

        def __call__(self, x):
            return x * self.scale

    def put(new):
        globals()["HELD_BY_PROPERTY"] = new

    put(value)
    return Own(), "global HELD_BY_PROPERTY", put


def in_cached_property(value):
    class Own:
        @functools.cached_property
        def scale(self):
            return HELD_BY_CACHED_PROPERTY  # noqa: F821

        def __call__(self, x):
            return x * self.scale

    def put(new):
        globals()["HELD_BY_CACHED_PROPERTY"] = new

    put(value)
    # Once anybody has read its `__dict__`, the garbage collector tells of that alone.
    assert "func" in vars(Own.__dict__["scale"])
    return Own(), "global HELD_BY_CACHED_PROPERTY", put


def in_static_method(value):
    class Own:
        @staticmethod
        def scaled(x, *, scale=value):
            return x * scale

        def __call__(self, x):
            return self.scaled(x)

    put = functools.partial(Own.scaled.__kwdefaults__.__setitem__, "scale")
    return Own(), "Own.scaled, default scale", put


WRITABLE = [value for name, value in globals().items() if name.startswith("in_")]
READ_ONLY_FOR_US = (in_default,)


def in_tuple(value):
    box = Box(held=(object(), value))
    return lambda x: box, "closure box.held[1]", lambda new: setattr(box, "held", (0, new))


def in_named_tuple(value):
    box = Box(held=Pair(Box(), value))
    return lambda x: box, "closure box.held.second", lambda new: setattr(box, "held", Pair(0, new))


def in_frozen_dataclass(value):
    held = FrozenData(value)
    put = functools.partial(object.__setattr__, held, "scale")
    return lambda x: held, "closure held.scale", put


def in_set(value):
    held = {value, object()}

    def put(new):
        held.discard(value)
        held.add(new)

    return lambda x: held, "closure held{", put


EVERYWHERE = [*WRITABLE, in_tuple, in_named_tuple, in_frozen_dataclass]


def name(function: Any) -> Any:
    return getattr(function, "__name__", None)


@pytest.mark.parametrize("live", [*EVERYWHERE, in_set], ids=name)
def test_a_tensor_is_found_by_path_and_its_replacement_is_reported(live):
    value = tensor()
    forward, path, put = live(value)
    places = places_of(forward)
    named = [place for place, found in places.tensors if found is value]
    assert any(place.path.startswith(path) for place in named), named
    looked = Looked(places)
    assert looked.broken() == []
    put(tensor())
    broken = looked.broken()
    assert any(each.startswith(path.rpartition("[1]")[0] or path) for each in broken) or (
        live is in_named_tuple and broken
    )


@pytest.mark.parametrize("live", EVERYWHERE, ids=name)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (7, 8),
        (0.5, 0.25),
        ("a", "b"),
        (None, 1),
        (True, 1),
        (torch.float32, torch.float16),
        (Size.SMALL, Size.LARGE),
        ((1, (2, 3)), (1, (2, 4))),
        (torch.Size([2]), torch.Size([3])),
    ],
    ids=str,
)
def test_a_number_is_found_by_path_and_its_change_is_reported(live, before, after):
    forward, path, put = live(before)
    places = places_of(forward)
    indices = [i for i, place in enumerate(places.numbers) if place.path == path]
    assert len(indices) == 1, [place.path for place in places.numbers]
    values = values_of(places)
    assert same_value(values[indices[0]], before)
    put(after)
    now = values_of(places)
    changed = [i for i in range(len(now)) if not same_value(values[i], now[i])]
    # Of a tuple that was replaced, its other items may have changed too.
    assert changed == indices or (indices[0] in changed and live in (in_tuple, in_named_tuple))


@pytest.mark.parametrize("live", EVERYWHERE, ids=name)
def test_a_changed_number_is_put_back_where_its_holder_is_writable(live):
    forward, path, put = live(7)
    places = places_of(forward)
    place = next(place for place in places.numbers if place.path == path)
    put(8)
    if live in (in_tuple, in_named_tuple, *READ_ONLY_FOR_US):
        assert not place.writable
        with pytest.raises(TypeError, match="read-only"):
            place.set(7)
    else:
        assert place.writable
        place.set(7)
        assert place.get() == 7


@pytest.mark.parametrize(
    "live", [in_closure, in_global, in_dict, in_ordered_dict, in_slot, in_class], ids=name
)
def test_an_emptied_attribute_reads_as_missing_and_can_be_set_again(live):
    forward, path, _ = live(7)
    place = next(place for place in places_of(forward).numbers if place.path == path)
    place.set(MISSING)
    assert place.get() is MISSING
    place.set(MISSING)
    place.set(9)
    assert place.get() == 9


def test_an_item_of_a_list_that_became_shorter_is_missing():
    held = [1, 2]
    places = places_of(lambda x: held)
    values = Picture(places)
    held.pop()
    assert values_of(places) == [1, MISSING]
    assert changed(values) == ["closure held[1]", "len(closure held)"]


# Modules -----------------------------------------------------------------------------------------


def replace_data(model):
    model.layers[0].linear.weight.data = torch.zeros(2, 2)


def resize(model):
    model.layers[0].linear.weight.data = model.layers[0].linear.weight.data.t()


def assign_state(model):
    model.load_state_dict(Model().state_dict(), assign=True)


def replace_layer(model):
    model.layers[0] = Block()


def replace_parameter(model):
    model.layers[0].linear.weight = nn.Parameter(torch.zeros(2, 2))


def replace_buffer(model):
    model.layers[0].table = torch.zeros(2)


def delete_parameter(model):
    del model.layers[0].linear.weight


def change_type(model):
    model.double()


def replace_forward(model):
    model.layers[0].forward = lambda x: x


def replace_class(model):
    model.layers[0].__class__ = type("Other", (Block,), {})


def replace_dict(model):
    model.layers[0].__dict__ = dict(model.layers[0].__dict__)


def append_layer(model):
    model.layers.append(Block())


def add_hook(model):
    model.layers[0].linear.register_forward_hook(lambda *args: None)


def add_pre_hook(model):
    model.register_forward_pre_hook(lambda *args: None)


def add_buffer(model):
    model.layers[0].register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (replace_data, "model.layers[0].linear.weight"),
        (resize, "model.layers[0].linear.weight"),
        (assign_state, "model.layers[1].table"),
        (replace_layer, "model.layers[0]"),
        (replace_parameter, "model.layers[0].linear.weight"),
        (replace_buffer, "model.layers[0].table"),
        (delete_parameter, "model.layers[0].linear.weight"),
        (change_type, "model.layers[1].linear.bias"),
        (replace_forward, "model.layers[0]"),
        (replace_class, "model.layers[0]"),
        (replace_dict, "model.layers[0]"),
        (append_layer, "model.layers"),
        (add_hook, "model.layers[0].linear"),
        (add_pre_hook, "model"),
        (add_buffer, "model.layers[0]"),
    ],
    ids=name,
)
def test_each_change_to_a_module_is_reported_with_its_path(change, path):
    model = Model()
    looked = Looked(places_of(model))
    assert looked.broken() == []
    model(torch.ones(1, 2))
    # It counts its calls.
    assert all(each.endswith("position") for each in looked.broken())
    change(model)
    assert any(path in each for each in looked.broken())


def test_every_tensor_of_a_module_is_found_under_every_name():
    model = Model()
    model.layers[1].linear.weight = model.layers[0].linear.weight
    found = {place.path: value for place, value in places_of(model).tensors}
    expected = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    assert {id(value) for value in found.values()} == {id(value) for value in expected.values()}
    assert found["model.layers[1].linear.weight"] is found["model.layers[0].linear.weight"]


def test_a_method_replaced_on_the_class_is_reported(monkeypatch):
    looked = Looked(places_of(Model()))
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    assert looked.broken() == ["Block.forward"]


def test_replaced_code_of_a_function_is_reported():
    def forward(x):
        return x

    looked = Looked(places_of(forward))
    forward.__code__ = (lambda x: x + 1).__code__
    assert looked.broken() == ["forward.__code__"]


def test_the_advanced_position_of_a_sliding_cache_is_named():
    model = Model()
    places = places_of(model)
    before = values_of(places)
    model.layers[1].position += 1
    (moved,) = [
        place.path
        for place, old, new in zip(places.numbers, before, values_of(places), strict=True)
        if not same_value(old, new)
    ]
    assert moved == "model.layers[1].position"


def test_the_training_flag_of_a_module_is_watched_as_a_number():
    model = Model()
    places = places_of(model)
    index = [place.path for place in places.numbers].index("model.layers[0].linear.training")
    model.eval()
    assert values_of(places)[index] is False


def test_a_replaced_container_of_numbers_is_reported():
    model = Model()
    model.state = {"position": 1}
    places = places_of(model)
    values = Picture(places)
    model.state = {"position": 2}
    assert changed(values) == ["model.state"]


def test_tensors_inside_a_torch_compiled_module_are_found():
    compiled = places_of(torch.compile(Model(), backend="eager"))
    assert "model._orig_mod.layers[0].table" in {place.path for place, _ in compiled.tensors}


def test_a_lazy_parameter_is_reported_once_initialized():
    model = nn.LazyLinear(2)
    looked = Looked(places_of(model))
    assert looked.broken() == []
    model(torch.ones(1, 3))
    assert "model.weight" in looked.broken()


def test_tensors_behind_a_graph_wrapper_are_found():
    model = Model()
    wrapper = GraphWrapper(model, GraphMode.FULL, pool=GraphPool())
    inside = Model()
    inside.layers[0].forward = wrapper
    for forward, path in [
        (wrapper, "model.layers[0].table"),
        (inside, "model.layers[0].forward.layers[0].table"),
    ]:
        named = [
            place.path
            for place, each in places_of(forward).tensors
            if each is model.layers[0].table
        ]
        assert path in named


def test_a_missing_attribute_is_described_as_nothing():
    assert described({"model.seen": (MISSING, 3)}) == "model.seen = nothing, then 3"
    assert described({"a": (2, MISSING)}, "{path} = {0}, not {1}") == "a = 2, not nothing"
