"""A walk runs nothing of a user, ends, costs little, and says what it could not look into."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import sys
import threading
import time
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphrt.trust.picture import Picture
from graphrt.trust.places.slots import MISSING, same_value
from graphrt.trust.places.walk import places_of
from tests.trust.test_places import Looked, changed, values_of


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("something of the user was run")


class Refusing:
    """Everything that Python could run by the way raises."""

    __eq__ = __ne__ = __hash__ = __len__ = __bool__ = __iter__ = __getitem__ = refuse
    __contains__ = __repr__ = __str__ = __getattr__ = __lt__ = __format__ = refuse
    __class__ = property(refuse)  # type: ignore[assignment]
    scale = property(refuse)

    def __getattribute__(self, name: str) -> Any:
        return refuse()

    def __init__(self, inside: Any = None) -> None:
        held = vars(Refusing)["__dict__"].__get__(self)
        held["inside"] = inside


class RefusingDict(dict):
    __eq__ = __ne__ = __len__ = __iter__ = __getitem__ = __contains__ = refuse
    __bool__ = items = keys = values = get = __repr__ = __getattribute__ = refuse


class RefusingList(list):
    __eq__ = __ne__ = __len__ = __iter__ = __getitem__ = __contains__ = refuse
    __bool__ = __repr__ = __getattribute__ = refuse


class RefusingTuple(tuple):
    __eq__ = __ne__ = __len__ = __iter__ = __getitem__ = __contains__ = __hash__ = refuse
    __bool__ = __repr__ = __getattribute__ = refuse


class RefusingSet(set):
    __eq__ = __ne__ = __len__ = __iter__ = __contains__ = __bool__ = __repr__ = refuse
    __getattribute__ = refuse


class RefusingMeta(type):
    __eq__ = __hash__ = __len__ = __iter__ = __getattr__ = __instancecheck__ = refuse
    __subclasscheck__ = __getattribute__ = __repr__ = __bool__ = refuse


class OfRefusingMeta(metaclass=RefusingMeta):
    pass


class RefusingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return refuse()


class RefusingModule(nn.Linear):
    __len__ = __bool__ = __iter__ = named_parameters = parameters = refuse
    __getattr__ = __getattribute__ = __setattr__ = __call__ = forward = refuse
    bias = property(refuse)


class RefusingKey:
    """A key whose hash is its own, and stops working."""

    works = True

    def __hash__(self) -> int:
        return hash("a") if RefusingKey.works else refuse()

    def __eq__(self, other: object) -> Any:
        return self is other if RefusingKey.works else refuse()


class Frozen(int):
    __eq__ = __hash__ = refuse


def paths(found: Any) -> list[str]:
    return [place.path for place, _ in found]


@pytest.mark.parametrize(
    "wrap",
    [
        Refusing,
        lambda held: RefusingDict(a=held),
        lambda held: RefusingList([held]),
        lambda held: RefusingTuple((held, object())),
        lambda held: collections.deque([held]),
        lambda held: Refusing(Refusing(RefusingDict(b=RefusingList([held])))),
    ],
    ids=["object", "dict", "list", "tuple", "deque", "nested"],
)
def test_the_walk_calls_no_code_of_user_classes(wrap):
    value, number = torch.ones(1), [5, 6]
    held, numbers = wrap(value), wrap(number)
    places = places_of(lambda x: (held, numbers))
    assert any(each is value for _, each in places.tensors)
    assert Looked(places).broken() == []
    assert all(place.get() is held for place, held in places.objects)
    assert [each for each in values_of(places) if type(each) is int] == [5, 6]
    for place in places.numbers:
        if place.writable:
            place.set(place.get())


def test_the_walk_calls_no_methods_of_user_sets_metaclasses_modules_or_numbers():
    held = RefusingSet([1, 2])
    number = Frozen(3)
    cls, model = OfRefusingMeta, nn.Linear(1, 1)
    value = torch.ones(2).as_subclass(RefusingTensor)
    model.__class__ = RefusingModule
    places = places_of(lambda x: (held, number, cls, OfRefusingMeta, model, value))
    assert set(paths(places.tensors)) == {
        "closure model.weight",
        "closure model.bias",
        "closure value",
    }
    assert Looked(places).broken() == []
    assert all(place.get() is held for place, held in places.objects)
    assert frozenset({1, 2}) in [each for each in values_of(places) if type(each) is frozenset]
    before = values_of(places)
    assert all(map(same_value, before, values_of(places)))


def test_dict_keys_with_a_custom_hash_are_found_by_identity():
    key, value = RefusingKey(), torch.ones(1)
    held = {key: 7, "a": 8, RefusingKey(): value}
    RefusingKey.works = False
    try:
        places = places_of(lambda x: held)
        assert sorted(values_of(places)) == [7, 8]
        assert len(places.tensors) == 1
        assert Looked(places).broken() == []
    finally:
        RefusingKey.works = True
    held[key] = 9
    assert sorted(values_of(places)) == [8, 9]
    del held[key]
    assert MISSING in values_of(places)


def test_a_moved_tensor_of_a_subclass_is_reported():
    class Marked(torch.Tensor):
        pass

    for kind in (Marked, RefusingTensor):
        value = torch.ones(2).as_subclass(kind)
        looked = Looked(places_of(lambda x, value=value: value))
        torch.Tensor.__torch_function__(torch.Tensor.set_, (), (value, torch.zeros(2)))
        assert looked.broken() == ["default value"]


def test_the_walk_ends_for_circular_and_deeply_nested_containers():
    deep: Any = torch.ones(1)
    for _ in range(5000):
        deep = [deep]
    circle: Any = {"self": None, "deep": deep}
    circle["self"] = circle
    places = places_of(lambda x: circle)
    assert len(places.tensors) == 1


@pytest.mark.parametrize(
    "held",
    [
        [*range(1_000_000)],
        {str(i): i for i in range(100_000)},
        set(range(100_000)),
        tuple(range(100_000)),
        frozenset(range(100_000)),
        collections.deque(range(100_000)),
    ],
    ids=lambda held: type(held).__name__,
)
def test_long_containers_of_numbers_are_watched_by_length_alone_and_quickly(held):
    took = []
    for _ in range(3):
        started = time.thread_time()
        places = places_of(lambda x: held)
        took.append(time.thread_time() - started)
    assert min(took) < 0.01
    assert not values_of(places)
    if hasattr(held, "pop"):
        values = Picture(places)
        held.pop(*([] if not isinstance(held, dict) else ["0"]))
        assert changed(values) == ["len(closure held)"]


def test_the_walk_reads_every_tensor_of_a_long_list():
    held = [torch.ones(1)] * 5000
    assert len(places_of(lambda x: held).tensors) == 5000


def test_the_walk_stops_at_its_limit_of_objects():
    held = [[i] for i in range(3000)]
    places = places_of(lambda x: held, limit=100)
    assert len(places.numbers) < 200
    assert len(places_of(lambda x: held).numbers) == 3000


def test_the_walk_skips_iterators_and_lists_arrays():
    generator = (i for i in range(3))
    iterator, array = iter([1]), np.ones(2)
    held = functools.lru_cache(lambda x: x)
    places = places_of(lambda x: (generator, iterator, array, held))
    assert [(place.path, found) for place, found in places.arrays] == [("closure array", array)]
    objects = {place.path for place, _ in places.objects}
    code = {"<lambda>.__code__", "closure held.__code__"}
    assert objects == {"closure array", "closure held"} | code
    assert next(generator) == 0 and next(iterator) == 1


@pytest.mark.parametrize("size", [None, 4])
def test_tensors_held_by_a_cached_function_are_found(size):
    scale = torch.ones(1)

    @functools.lru_cache(maxsize=size)
    def table(length):
        return torch.arange(length) * scale

    cached = table(3)
    places = places_of(lambda x: x + table(3))
    assert "closure table, closure scale" in paths(places.tensors)
    assert "closure table, cached" in paths([(p, t) for p, t in places.tensors if t is cached])


def test_numpy_scalars_are_watched_as_numbers():
    held = [np.float32(0.5), np.int64(3)]
    places = places_of(lambda x: held)
    before = values_of(places)
    held[:] = [np.float32(0.5), np.int64(4)]
    assert [*map(same_value, before, values_of(places))] == [True, False]


def test_the_walk_skips_locks_and_libraries_and_does_not_look_into_generators():
    lock, rng, stream = threading.Lock(), torch.Generator(), torch.nn.functional
    places = places_of(lambda x: (lock, rng, stream, torch, np, sys, gc.collect, torch.relu))
    assert places.numbers == [] and places.tensors == []
    found = {place.path for place, _ in places.objects}
    assert found == {"<lambda>.__code__", "closure stream", "closure rng"}
    assert places.generators == [rng]


def test_a_module_that_an_object_holds_is_read_by_the_names_in_code_and_a_library_not_at_all():
    knobs = types.ModuleType("knobs_of_user")
    knobs.scale, knobs.unread, knobs.other = 1.0, 2.0, [3.0]

    class Own:
        def __init__(self) -> None:
            self.np, self.functional, self.knobs = np, nn.functional, knobs

        def __call__(self, x):
            return self.functional.relu(x) * self.np.pi * self.read()

        def read(self):
            return self.knobs.scale

    own = Own()
    assert paths_of_numbers(own) == ["self.knobs.scale"]
    # The same names, if the code that spells them is read first.
    assert paths_of_numbers(lambda x, own=own: own(x)) == ["default own.knobs.scale"]


def test_what_a_function_of_ctypes_refers_to_is_not_read():
    function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 3)
    held = ctypes.CDLL(None).abs
    places = places_of(lambda x: function() * held(2))
    assert not any("[" in place.path for place, _ in places.slots)


def test_the_walk_does_not_look_into_operators_whose_caches_calls_fill():
    operator = torch.ops.aten.relu
    assert paths_of_numbers(lambda x: (operator, operator.default)) == []
    places = places_of(types.SimpleNamespace(of=operator, overload=operator.default))
    assert places.containers == [] and places.numbers == []


def test_methods_that_no_called_code_names_are_not_read():
    class Own:
        def __call__(self, x):
            return self.used(x)

        def used(self, x, scale=2):
            return x * scale

        def unused(self, x, other=3):
            return x * other

    assert paths_of_numbers(Own()) == ["Own.used, default scale"]


def test_helper_functions_are_read_up_to_a_depth_of_calls():
    source = "\n".join(f"def f{i}(x, at={i}): return f{i + 1}(x)" for i in range(8))
    names: dict[str, Any] = {"__name__": "helpers_of_user", "f8": 8}
    exec(source, names)
    found = paths_of_numbers(names["f0"])
    assert found == ["default at", *(f"global f{i}, default at" for i in range(1, 4))]
    # Whoever is near enough reads it, even where another one was too far away.
    names["far"], names["near"] = names["f0"], names["f4"]
    exec("def forward(x): return far(x) + near(x)", names)
    assert "global near, default at" in paths_of_numbers(names["forward"])


def paths_of_numbers(forward: Any) -> list[str]:
    return [place.path for place in places_of(forward).numbers]


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1, True, False),
        (1, 1.0, False),
        ("a" * 3, "".join(["aa", "a"]), True),
        ((1, 2.0), (1, 2.0), True),
        ((1, 2.0), (1, 2), False),
        (frozenset([1]), frozenset([1]), True),
        (torch.device("cpu"), torch.device("cpu"), True),
        (Frozen(3), Frozen(3), True),
        (Frozen(3), Frozen(4), False),
        (slice(1, 2), slice(1, 2), True),
        (slice(1, 2), slice(1, 2.0), False),
        (MISSING, None, False),
        ([1], [1], False),
    ],
)
def test_same_value_compares_type_and_value_of_immutables(before, after, same):
    assert same_value(before, after) is same


def test_dropping_the_places_frees_the_model():
    model = nn.Sequential(nn.Linear(2, 2))
    places = places_of(model)
    seen = weakref.ref(model)
    del model
    assert seen() is not None
    gc.disable()
    try:
        del places
        assert seen() is None
    finally:
        gc.enable()


def test_a_dict_that_another_thread_changes_does_not_break_the_walk():
    held = {i: [i] for i in range(1000)}
    stop = threading.Event()

    def change() -> None:
        i = 1000
        while not stop.is_set():
            held[i] = [i]
            held.pop(i - 500, None)
            i += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(30):
            places = places_of(lambda x: held)
            assert len(values_of(places)) > 100
            Looked(places).broken()
    finally:
        stop.set()
        thread.join()


# Random containers -------------------------------------------------------------------------------


class Leaf:
    """One slot that a test writes, with the value that it holds."""

    def __init__(self, put: Any) -> None:
        self.put = put


class Plain:
    pass


def build(draw: Any, depth: int, leaves: list[Any], make: Any) -> Any:
    """A random container; `leaves` gets a function for each slot that puts a value there."""
    kind = draw(st.sampled_from(["dict", "list", "object", "deque", "ordered", "module"]))
    holder: Any = {
        "dict": dict,
        "list": list,
        "object": Plain,
        "deque": collections.deque,
        "ordered": collections.OrderedDict,
        "module": nn.Module,
    }[kind]()
    for index in range(draw(st.integers(1, 4))):
        is_leaf = depth == 0 or draw(st.booleans())
        value = make() if is_leaf else build(draw, depth - 1, leaves, make)
        if kind in ("dict", "ordered"):
            holder[f"k{index}"] = value
            put = functools.partial(holder.__setitem__, f"k{index}")
        elif kind in ("list", "deque"):
            holder.append(value)
            put = functools.partial(holder.__setitem__, index)
        else:
            setattr(holder, f"k{index}", value)
            put = functools.partial(setattr, holder, f"k{index}")
        if is_leaf:
            leaves.append((value, put))
    return holder


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_in_random_containers_exactly_the_changed_slot_is_reported(data):
    counter = iter(range(10**6))
    leaves: list[Any] = []

    def make() -> Any:
        number = next(counter)
        return torch.full((1,), float(number)) if number % 2 else (number, str(number))

    root = build(data.draw, 3, leaves, make)
    places = places_of(lambda x: root)
    tensors = [value for value, _ in leaves if isinstance(value, torch.Tensor)]
    assert sorted(map(id, tensors)) == sorted(id(value) for _, value in places.tensors)
    before = values_of(places)
    assert {*map(id, before)} >= {id(value) for value, _ in leaves if isinstance(value, tuple)}
    objects = places.objects

    value, put = data.draw(st.sampled_from(leaves))
    put(torch.zeros(1) if isinstance(value, torch.Tensor) else "another")
    assert all(place.get() is held for place, held in objects)
    broken = [place.path for place, held in places.tensors if place.get() is not held]
    moved = [
        place.path
        for place, old, new in zip(places.numbers, before, values_of(places), strict=True)
        if not same_value(old, new)
    ]
    if isinstance(value, torch.Tensor):
        assert broken == [place.path for place, each in places.tensors if each is value]
        assert moved == []
    else:
        assert broken == [] and len(moved) == 1

    fresh = places_of(lambda x: root)
    assert len(fresh.tensors) == len(places.tensors)
    assert [place.path for place in fresh.numbers] == [place.path for place in places.numbers]
