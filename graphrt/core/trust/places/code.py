"""Readers of what code refers to: closures, defaults, globals, methods of classes."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

from graphrt.core.trust.places.contents import attributes
from graphrt.core.trust.places.kinds import Kind, Shape, is_library, module_of
from graphrt.core.trust.places.links import LengthLink, SlotLink
from graphrt.core.trust.places.slots import (
    Cell,
    ClassAttribute,
    Field,
    Fixed,
    Item,
    Place,
    TupleItem,
    bases_of,
    items_of,
    module_globals,
    name_of,
    namespace_of,
)
from graphrt.core.trust.places.walk import MOST_HOPS, Walk

_FUNCTION = vars(types.FunctionType)
_RUN_UNSEEN = frozenset(("__init__", "__new__", "__repr__", "__del__", "__post_init__"))
"""Methods that are only read where code says their name, though Python runs them unasked."""


def function(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """A function's closure; and if it is a user's, its defaults, attributes and globals too."""
    own, path = id(value), place.path
    before = "" if type(place) is Fixed and path == value.__name__ else f"{path}, "
    cells = value.__closure__ or ()
    library = is_library(str(value.__globals__.get("__name__")))
    for name, cell in zip(value.__code__.co_freevars, cells, strict=False):
        found: Place = Cell(f"{before}closure {name}", cell)
        # A decorator of torch wraps what is the user's, and has numbers of its own.
        if not library or walk.shape(type(found.get())).kind is not Kind.PLAIN:
            walk.slot(own, found, found.get())
    attributes(walk, value, place, shape)
    if library:
        return
    code = Field(f"{path}.__code__", value, _FUNCTION["__code__"])
    walk.code_links.append(SlotLink(code, value.__code__))
    defaults = Field(f"{path}.__defaults__", value, _FUNCTION["__defaults__"])
    for index, name in _arguments_with_defaults(value):
        found = TupleItem(f"{before}default {name}", defaults, index)
        walk.slot(own, found, found.get())
    named = value.__kwdefaults__ or {}
    for name, each in items_of(named) or ():
        walk.slot(own, Item(f"{before}default {name}", named, name), each)
    names = {*_names_in(value.__code__)}
    _say(walk, names)
    _globals(walk, own, value.__globals__, names)


def _arguments_with_defaults(value: Any) -> Iterator[tuple[int, str]]:
    code, defaults = value.__code__, value.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    return enumerate(code.co_varnames[first : code.co_argcount])


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names_in(constant)


def _say(walk: Walk, names: set[str]) -> None:
    """Read the methods of these names, which waited for that."""
    if walk.hops >= MOST_HOPS:
        return
    for name in sorted(names - walk.said):
        walk.said.add(name)
        for owner, place, value in walk.unsaid.pop(name, ()):
            _method(walk, owner, place, value)


def _globals(walk: Walk, owner: int, held: dict[str, Any], names: set[str]) -> None:
    """What `names` are among the globals `held` of a user's module, and in modules there."""
    if walk.main_globals is None:
        walk.main_globals = held
    module = "" if held is walk.main_globals else f"{held.get('__name__')}."
    own = walk.keep(held)
    walk.held_by.append((owner, own))
    read = walk.globals_read.setdefault(own, set())
    for name in sorted(names - read):
        if name in held and not _is_module(held[name]):
            place = Item(f"global {module}{name}", held, name)
            if walk.by_name(own, place, held[name]):
                read.add(name)
    for name in sorted(names):
        # A module may also be imported in the function itself.
        found = held.get(name, sys.modules.get(name))
        if _is_module(found):
            inner = module_globals(found)
            key = (id(inner), frozenset(names))
            if not is_library(str(inner.get("__name__"))) and key not in walk.modules_read:
                walk.modules_read.add(key)
                _globals(walk, own, inner, names)


def _is_module(value: object) -> bool:
    return types.ModuleType in bases_of(type(value))


def bound(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """A bound method, whose object and function stay what they are."""
    own, path, owner = id(value), place.path, value.__self__
    root = type(place) is Fixed and path in ("model", "self")
    walk.slot(own, Fixed(path if root else f"{path}.__self__", owner), owner)
    if type(value) is types.MethodType:
        method = value.__func__
        named = f"{path}.{method.__name__}" if type(method) is types.FunctionType and root else path
        walk.slot(own, Fixed(named, method), method)


def partial(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    own, path = id(value), place.path
    fields = vars(functools.partial)
    func, args, keywords = (fields[n].__get__(value) for n in ("func", "args", "keywords"))
    walk.slot(own, Fixed(f"{path}.func", func), func)
    for index, each in enumerate(args):
        walk.slot(own, Fixed(f"{path}.args[{index}]", each), each)
    walk.guards.append((own, LengthLink(f"{path}.keywords", keywords, dict)))
    for name, each in items_of(keywords) or ():
        walk.slot(own, Item(f"{path}.keywords[{name!r}]", keywords, name), each)
    attributes(walk, value, place, shape)


def class_attributes(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """The values of a user's class, and those of its methods whose name some code says."""
    own, path = id(value), name_of(value)
    for name, each in namespace_of(value).copy().items():
        kind = walk.shape(type(each)).kind
        dunder = name.startswith("__") and name.endswith("__")
        found = ClassAttribute(f"{path}.{name}", value, name)
        if kind is not Kind.FUNCTION and kind is not Kind.DESCRIPTOR and kind is not Kind.CLASS:
            if not dunder:
                walk.slot(own, found, each)
        elif name in walk.said or (dunder and name not in _RUN_UNSEEN) or name == "forward":
            _method(walk, own, found, each)
        else:
            walk.unsaid.setdefault(name, []).append((own, found, each))


def _method(walk: Walk, owner: int, place: Place, value: object) -> None:
    walk.code_links.append(SlotLink(place, value))
    walk.by_name(owner, Fixed(place.path, value), value)


def descriptor(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """The function in a property, a static or a class method."""
    for base in bases_of(type(value)):
        for name in ("fget", "func", "__func__") if is_library(module_of(base)) else ():
            if name in namespace_of(base):
                inner = namespace_of(base)[name].__get__(value)
                walk.slot(id(value), Fixed(place.path, inner), inner)
    if type(value) is functools.cached_property:
        inner = vars(value)["func"]
        walk.slot(id(value), Fixed(place.path, inner), inner)


def cached(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """A function with an `lru_cache`: what is in the cache now, and the function."""
    assert shape.dict_of is not None
    own, path = id(value), place.path
    walk.opaque.append((path, "lru_cache"))
    held = gc.get_referents(value)
    # Without a size the results are in a dict, else they are held one by one.
    tables = [items_of(each) or () for each in held if type(each) is dict]
    for each in held + [result for table in tables for _, result in table]:
        if walk.shape(type(each)).kind is Kind.TENSOR or type(each) is tuple:
            walk.slot(own, Fixed(f"{path}, cached", each), each)
    inner = shape.dict_of(value).get("__wrapped__")
    walk.slot(own, Fixed(path, inner), inner)


def wrapper(walk: Walk, value: Any, place: Place, shape: Shape) -> None:
    """A wrapper of graphrt, which is seen through."""
    inner = value.unwrap()
    walk.slot(id(value), Fixed(place.path, inner), inner)
