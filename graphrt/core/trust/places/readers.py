"""Readers of objects, containers and code: each returns the slots of one object.

What code refers to is read as its names say: globals, modules there, and methods of classes.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from graphrt.core.trust.places.kinds import Kind, Shape, hashes_plainly, is_library, shape_of
from graphrt.core.trust.places.slots import (
    CELL,
    CLASS_ATTRIBUTE,
    CONTEXT_VALUE,
    ELEMENT,
    FIELD,
    FIXED,
    FROZEN_FIELD,
    FROZEN_ITEM,
    ITEM,
    MEMBER,
    MEMBERS,
    ODD_ITEM,
    SCRIPT_TENSOR,
    TARGET,
    TUPLE_ITEM,
    Place,
    bases_of,
    module_globals,
    module_of,
    name_of,
    namespace_of,
)
from graphrt.core.trust.places.walk import BASES, INNER, MOST_HOPS, Places, Reader, Walk

_MOST_ODD = 64
_PLAIN_KEYS = {str, int}
_EVERY_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
_FUNCTION = vars(types.FunctionType)
_RUN_UNSEEN = frozenset(("__init__", "__new__", "__repr__", "__del__", "__post_init__"))
"""Methods that are only read where code says their name, though Python runs them unasked."""
_PARTIAL = vars(functools.partial)

Slots = list[tuple[Place, Any]]


def places_of(forward: Any, *, limit: int = 20_000) -> Places:
    """Walk from `forward` to the tensors and plain values that it can reach.

    `forward` is a function, method, module, partial or other callable. Nothing of it is called,
    and no code of a user runs. At most about `limit` slots are looked at, nearest first.

    Seen are attributes, closures, defaults, what code names of globals and of modules, class
    attributes, hooks, and what all these hold. Not entered are torch, NumPy and the standard
    library, methods whose name no code says that was read, and code more than a few calls away.
    Paths read like `model.layers[0].scale`, `closure scale`, `global SCALE`, `default scale`.
    """
    while shape_of(type(forward)).kind is Kind.WRAPPER:
        forward = forward.unwrap()
    walk = Walk(_READERS, limit)
    walk.take([(Place(None, _name_of_root(forward), FIXED, forward), forward)])
    walk.run()
    return walk.places


def _name_of_root(forward: Any) -> str:
    kind = shape_of(type(forward)).kind
    if kind is Kind.FUNCTION:
        return str(forward.__name__)
    if kind is Kind.BOUND:
        return _name_of_root(forward.__self__)
    names = {Kind.MODULE: "model", Kind.SCRIPT: "model", Kind.PARTIAL: "partial"}
    return names.get(kind, "self")


# Objects and containers --------------------------------------------------------------------------


def _attributes(
    walk: Walk, value: Any, place: Place, shape: Shape, skipped: frozenset[str] = frozenset()
) -> Slots:
    """An object's `__dict__`, slots and class."""
    found: Slots = []
    if shape.dict_of is not None:
        way, held = FROZEN_ITEM if shape.frozen else ITEM, shape.dict_of(value)
        for name, each in dict.items(held):
            if name not in skipped and type(name) is str:
                found.append((Place(place, f".{name}", way, held, name), each))
    for name, descriptor in shape.slots:
        way = FROZEN_FIELD if shape.frozen else FIELD
        slot = Place(place, f".{name}", way, value, descriptor)
        found.append((slot, slot.get()))
    for base in shape.users:
        found.append((Place(place, name_of(base), FIXED, base), base))
    return found


def _module(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    assert shape.dict_of is not None
    held = shape.dict_of(value)
    found: Slots = []
    for name in INNER:
        inner: Any = held.get(name)
        if not issubclass(type(inner), dict):
            continue
        before = f".{name}" if name.endswith("hooks") else ""
        for key, each in dict.items(inner):
            where = f".{key}" if type(key) is str and not key.isdigit() else f"[{key}]"
            found.append((Place(place, before + where, ITEM, inner, key), each))
    return found + _attributes(walk, value, place, shape, _EVERY_MODULES)


def _script(walk: Walk, value: torch.jit.ScriptModule, place: Place, shape: Shape) -> Slots:
    return [
        (Place(place, f".{name}", SCRIPT_TENSOR, value, name), tensor)
        for named in (value.named_parameters, value.named_buffers)
        for name, tensor in named()
    ]


def _items(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    found: Slots = []
    if not walk.is_too_long(dict.values(value), dict.__len__(value)):
        items = list(islice(dict.items(value), max(walk.left, 0)))
        way = ITEM
        keys = [key for key, _ in items]
        # One odd key is enough: a look-up of any other may compare with it.
        if not {*map(type, keys)} <= _PLAIN_KEYS and not all(map(hashes_plainly, keys)):
            # Every look at one is a search.
            way, items = ODD_ITEM, items[:_MOST_ODD]
        for key, each in items:
            text = repr(key) if type(key) in (str, int) else f"<{name_of(type(key))}>"
            found.append((Place(place, f"[{text}]", way, value, key), each))
    return found + (_attributes(walk, value, place, shape) if shape.users else [])


def _elements(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    """A list, deque, tuple or set."""
    found: Slots = []
    base, kind = BASES[shape.kind], shape.kind
    if not walk.is_too_long(base.__iter__(value), base.__len__(value)):
        held = list(islice(base.__iter__(value), max(walk.left, 0)))
        if kind is Kind.LIST or kind is Kind.DEQUE:
            places = [Place(place, f"[{i}]", ELEMENT, value, i) for i in range(len(held))]
        elif kind is Kind.TUPLE:
            fields = namespace_of(type(value)).get("_fields")
            labels = [f".{name}" for name in fields] if type(fields) is tuple else []
            labels += [f"[{i}]" for i in range(len(labels), len(held))]
            places = [Place(place, labels[i], TUPLE_ITEM, place, i) for i in range(len(held))]
        elif kind is Kind.SET and all(shape_of(type(e)).kind is Kind.PLAIN for e in held):
            walk.places.numbers.append(Place(place, "", MEMBERS, value))
            places = []
        else:
            places = [Place(place, f"{{{i}}}", MEMBER, value, e) for i, e in enumerate(held)]
        found += zip(places, held, strict=False)
    return found + (_attributes(walk, value, place, shape) if shape.users else [])


def _proxied(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    # The proxy's methods would run the mapping's own.
    return [(Place(place, "", FIXED, inner), inner) for inner in gc.get_referents(value)]


def _target(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    found = Place(place, "()", TARGET, value)
    return [(found, found.get())]


def _context_value(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    found = Place(place, ".get()", CONTEXT_VALUE, value)
    return [(found, found.get())]


# Code --------------------------------------------------------------------------------------------


def _function(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    """A function's closure; and if it is a user's, its defaults, attributes and globals too."""
    before, code = "" if place.owner is None else ", ", value.__code__
    library = is_library(str(value.__globals__.get("__name__")))
    found: Slots = []
    for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
        slot = Place(place, f"{before}closure {name}", CELL, cell)
        each = slot.get()
        # A decorator of torch wraps what is the user's, and has numbers of its own.
        if not library or shape_of(type(each)).kind is not Kind.PLAIN:
            found.append((slot, each))
    found += _attributes(walk, value, place, shape)
    if library:
        return found
    walk.places.code.append((Place(place, ".__code__", FIELD, value, _FUNCTION["__code__"]), code))
    given = value.__defaults__ or ()
    defaults = Place(place, ".__defaults__", FIELD, value, _FUNCTION["__defaults__"])
    with_default = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    for index, (name, each) in enumerate(zip(with_default, given, strict=False)):
        found.append((Place(place, f"{before}default {name}", TUPLE_ITEM, defaults, index), each))
    named = value.__kwdefaults__ or {}
    for name, each in dict.items(named):
        found.append((Place(place, f"{before}default {name}", ITEM, named, name), each))
    walk.take(found)
    names = {*_names_in(code)}
    _say(walk, names)
    _globals(walk, place, value.__globals__, names)
    return []


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names_in(constant)


def _say(walk: Walk, names: set[str]) -> None:
    """Read the methods of these names, which waited for that."""
    if walk.hops >= MOST_HOPS:
        return
    news = names - walk.said
    walk.said |= news
    for name in sorted(news & walk.unsaid.keys()):
        for place, value in walk.unsaid.pop(name):
            _method(walk, place, value)


def _globals(walk: Walk, owner: Place, held: dict[str, Any], names: set[str]) -> None:
    """What `names` are among the globals `held` of a user's module, and in modules there."""
    if walk.main_globals is None:
        walk.main_globals = held
    module = "" if held is walk.main_globals else f"{held.get('__name__')}."
    # Of all functions of a module the globals are one object, for which this place stands: they
    # grow with every import.
    own = walk.places.first.setdefault(id(held), Place(owner, "", FIXED, held))
    walk.places.first[id(own)] = own
    walk.places.slots.append((Place(owner, "", FIXED, own), own))
    for name in sorted(names & held.keys()):
        value, key = held.get(name), (id(held), name)
        if key in walk.globals_read or _is_module(value):
            continue
        if walk.by_name(Place(own, f"global {module}{name}", ITEM, held, name), value):
            walk.globals_read.add(key)
    for name in sorted(names):
        # A module may also be imported in the function itself.
        found = held.get(name, sys.modules.get(name))
        if _is_module(found):
            inner = module_globals(found)
            entry = (id(inner), frozenset(names))
            if not is_library(str(inner.get("__name__"))) and entry not in walk.modules_read:
                walk.modules_read.add(entry)
                _globals(walk, own, inner, names)


def _is_module(value: object) -> bool:
    return issubclass(type(value), types.ModuleType)


def _bound(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    """A bound method, whose object and function stay what they are."""
    owner, root = value.__self__, place.owner is None
    found = [(Place(place, "" if root else ".__self__", FIXED, owner), owner)]
    if type(value) is types.MethodType:
        method = value.__func__
        named = root and type(method) is types.FunctionType
        label = f".{method.__name__}" if named else ""
        found.append((Place(place, label, FIXED, method), method))
    return found


def _partial(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    func, args, keywords = (_PARTIAL[n].__get__(value) for n in ("func", "args", "keywords"))
    found: Slots = [(Place(place, ".func", FIXED, func), func)]
    found += [(Place(place, f".args[{i}]", FIXED, each), each) for i, each in enumerate(args)]
    found.append((Place(place, ".keywords", FIXED, keywords), keywords))
    return found + _attributes(walk, value, place, shape)


def _class_attributes(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    """The values of a user's class, and those of its methods whose name some code says."""
    found: Slots = []
    path = name_of(value)
    for name, each in namespace_of(value).copy().items():
        kind = shape_of(type(each)).kind
        dunder = name.startswith("__") and name.endswith("__")
        slot = Place(place, f"{path}.{name}", CLASS_ATTRIBUTE, value, name)
        if kind is not Kind.FUNCTION and kind is not Kind.DESCRIPTOR and kind is not Kind.CLASS:
            if not dunder:
                found.append((slot, each))
        elif name in walk.said or (dunder and name not in _RUN_UNSEEN) or name == "forward":
            _method(walk, slot, each)
        else:
            walk.unsaid.setdefault(name, []).append((slot, each))
    return found


def _method(walk: Walk, place: Place, value: Any) -> None:
    walk.places.code.append((place, value))
    walk.by_name(Place(place.owner, place.label, FIXED, value), value)


def _descriptor(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    """The function in a property, a static or a class method."""
    inner = [
        namespace_of(base)[name].__get__(value)
        for base in bases_of(type(value))
        for name in ("fget", "func", "__func__")
        if is_library(module_of(base)) and name in namespace_of(base)
    ]
    if type(value) is functools.cached_property:
        inner.append(vars(value)["func"])
    return [(Place(place, "", FIXED, each), each) for each in inner]


def _cached(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    """A function with an `lru_cache`: what is in the cache now, and the function."""
    assert shape.dict_of is not None
    held = gc.get_referents(value)
    # Without a size the results are in a dict, else they are held one by one.
    held += [each for table in held if type(table) is dict for each in dict.values(table)]
    found: Slots = [
        (Place(place, ", cached", FIXED, each), each)
        for each in held
        if type(each) is tuple or shape_of(type(each)).kind is Kind.TENSOR
    ]
    inner = shape.dict_of(value).get("__wrapped__")
    return [*found, (Place(place, "", FIXED, inner), inner)]


def _wrapper(walk: Walk, value: Any, place: Place, shape: Shape) -> Slots:
    """A wrapper of graphrt, which is seen through."""
    inner = value.unwrap()
    return [(Place(place, "", FIXED, inner), inner)]


_READERS: dict[Kind, Reader] = {
    Kind.MODULE: _module,
    Kind.SCRIPT: _script,
    Kind.OBJECT: _attributes,
    Kind.TENSOR: _attributes,
    Kind.DICT: _items,
    Kind.LIST: _elements,
    Kind.DEQUE: _elements,
    Kind.TUPLE: _elements,
    Kind.SET: _elements,
    Kind.FROZENSET: _elements,
    Kind.PROXY: _proxied,
    Kind.REF: _target,
    Kind.CONTEXT_VARIABLE: _context_value,
    Kind.FUNCTION: _function,
    Kind.BOUND: _bound,
    Kind.PARTIAL: _partial,
    Kind.CLASS: _class_attributes,
    Kind.DESCRIPTOR: _descriptor,
    Kind.CACHED: _cached,
    Kind.WRAPPER: _wrapper,
}
