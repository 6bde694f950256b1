"""Walks the Python objects behind a forward, and lists each tensor and plain value that it reaches.

A graph goes on with the numbers and the tensors that the forward found there at its capture. So
checks compare the listed places with what is there later.

1. `places_of` starts a `Walk`. `Walk.run` takes objects from a queue, nearest first, so that each
   gets its shortest path. It calls the method for the object's kind, once an object.
2. That method returns the object's slots: attributes, items, closure cells. `Walk.take` sorts them
   into the lists of `Places`. Objects among them join the queue.

Code leads to globals, attributes of modules and methods that it names, and to no others. The type
alone decides how an object is read (`Shape`), so no code of a user runs.
"""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import gc
import io
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from graphrt.core.base import tree
from graphrt.core.base.torch_names import global_hooks
from graphrt.trust.places import slots
from graphrt.trust.places.libraries import is_library, is_library_class, is_machinery
from graphrt.trust.places.slots import FIXED, Place, PlaceValue, bases_of, name_of, namespace_of

# Types -------------------------------------------------------------------------------------------


Kind = enum.Enum(
    "Kind",
    "PLAIN TENSOR MODULE OBJECT CONTAINER FUNCTION BOUND PARTIAL CLASS DESCRIPTOR PROXY REFERENCE "
    "CACHED WRAPPER PACKED ARRAY MEMORY IMPORTED SKIPPED",
)
"""How a walk treats an object. It lists PLAIN values, NumPy's ARRAYs, torch's PACKED C++ objects
and the contents of MEMORY, enters no SKIPPED object, and reads the slots of all others by a method
of `_READERS`."""


class Shape(NamedTuple):
    """How a walk reads the objects of one type."""

    kind: Kind
    base: Any = None
    """The base class that decided the kind. A container is read by the methods of this class, as a
    user's subclass may have its own."""
    dict_of: Callable[[Any], dict[str, Any]] | None = None
    """Returns an object's `__dict__`; None if it has none."""
    slots: tuple[tuple[str, Any], ...] = ()
    """Name and descriptor of each of its `__slots__`."""
    users: tuple[type, ...] = ()
    """The classes among itself and its bases that a user wrote."""
    draws: bool = False
    """Whether its objects are generators of random numbers."""
    is_value: bool = False
    """Whether another one of its objects, which are not entered, counts as a change."""
    defaults: tuple[str, ...] = ()
    """Numbers that `users` define: an object has them until it sets its own (`self.steps += 1`)."""


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_RESIZABLE = (dict, list, set, collections.deque)
_C_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
LRU_CACHE = type(functools.lru_cache(len))
_KIND_OF_TYPE: dict[type, Kind] = {
    **dict.fromkeys((int, float, complex, bool, str, bytes, type(None), type(...)), Kind.PLAIN),
    **dict.fromkeys((torch.dtype, torch.device, torch.Size, torch.layout), Kind.PLAIN),
    **dict.fromkeys((torch.memory_format, range, slice), Kind.PLAIN),
    **dict.fromkeys(slots.PLAIN_BY_TEXT, Kind.PLAIN),
    types.FunctionType: Kind.FUNCTION,
    types.MethodType: Kind.BOUND,
    types.BuiltinMethodType: Kind.BOUND,
    types.MethodWrapperType: Kind.BOUND,
    types.MappingProxyType: Kind.PROXY,
    contextvars.ContextVar: Kind.REFERENCE,
    functools.cached_property: Kind.DESCRIPTOR,
    # In C++: such as quantized weights, packed for their operators.
    torch.ScriptObject: Kind.PACKED,
    **dict.fromkeys((bytearray, array.array), Kind.MEMORY),
}
# Returns the `__dict__` that a `threading.local` has in this thread.
_local_dict = threading.local.__getattribute__
# The first base class in this list decides. For a type without one, `_kind_of_object` does.
_KIND_OF_BASE: tuple[tuple[type, Kind], ...] = (
    # Of a user's subclass: a thread's first look at such an object runs its `__init__`.
    (threading.local, Kind.SKIPPED),
    (torch.Tensor, Kind.TENSOR),
    (enum.EnumMeta, Kind.SKIPPED),
    (enum.Enum, Kind.PLAIN),
    (type, Kind.CLASS),
    # Its tensors are in C: another one in its place is a change. In Python it leads to the module
    # that it was made of, which keeps the old weight when the scripted one is given another.
    (torch.jit.ScriptModule, Kind.PACKED),
    (torch.nn.Module, Kind.MODULE),
    (functools.partial, Kind.PARTIAL),
    (types.ModuleType, Kind.IMPORTED),
    (weakref.ref, Kind.REFERENCE),
    (staticmethod, Kind.DESCRIPTOR),
    (classmethod, Kind.DESCRIPTOR),
    (property, Kind.DESCRIPTOR),
    *((base, Kind.CONTAINER) for base in _CONTAINERS),
    *((base, Kind.PLAIN) for base in (int, float, complex, str, bytes)),
    *((base, Kind.MEMORY) for base in (io.StringIO, io.BytesIO, slots.CData)),
)

# Shapes of types of libraries, for all walks. A user's class in this dict would never be freed, nor
# would the tensors that it holds.
_library_shapes: dict[type, Shape] = {
    **{of: Shape(kind) for of, kind in _KIND_OF_TYPE.items()},
    types.FunctionType: Shape(Kind.FUNCTION, dict_of=vars(types.FunctionType)["__dict__"].__get__),
    LRU_CACHE: Shape(Kind.CACHED, dict_of=vars(LRU_CACHE)["__dict__"].__get__),
    # With the `__dict__` of the calling thread.
    threading.local: Shape(Kind.OBJECT, dict_of=lambda held: _local_dict(held, "__dict__")),
}


class Shapes(dict[type, Shape]):
    """The shape of each type that one walk has met."""

    def __init__(self) -> None:
        super().__init__(_library_shapes)

    def __missing__(self, of: type) -> Shape:
        shape = self[of] = shape_of(of)
        return shape


def shape_of(of: type) -> Shape:
    """How a walk reads objects of the type `of`."""
    shape = _library_shapes.get(of)
    if shape is None:
        shape, module = _new_shape(of), slots.module_of(of)
        home = sys.modules.get(module) if is_library_class(of) else None
        if isinstance(home, types.ModuleType) and slots.module_globals(home).get(name_of(of)) is of:
            _library_shapes[of] = shape
    return shape


def _new_shape(of: type) -> Shape:
    base, kind = _kind_of_base(of)
    if kind is Kind.PLAIN or kind is Kind.SKIPPED:
        return Shape(kind)
    dict_of, members, users = None, [], []
    for parent in bases_of(of):
        namespace = namespace_of(parent)
        dict_attribute = namespace.get("__dict__")
        # A user's property named `__dict__` is not run.
        if dict_of is None and type(dict_attribute) in _C_DESCRIPTORS and parent is not type:
            dict_of = dict_attribute.__get__
        if "__slots__" in namespace:
            members += [each for each in namespace.items() if type(each[1]) is _C_DESCRIPTORS[0]]
        if not is_library_class(parent):
            users.append(parent)
    draws = _is_generator(of)
    if draws and not users:
        # Its state is saved as one; attributes such as `gauss_next` are part of it.
        return Shape(Kind.SKIPPED, draws=True)
    if kind is None:
        base, kind = _kind_of_object(of, users, bool(dict_of or members))
    if kind is Kind.SKIPPED:
        return Shape(kind, draws=draws, is_value=_is_value(of))
    defaults = () if dict_of is None else _defaults(users)
    return Shape(kind, base, dict_of, tuple(members), tuple(users), draws, defaults=defaults)


_OPERATORS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
"""The types of torch's operators, and of one overload."""


def _is_value(of: type) -> bool:
    """Whether a forward does something else with another object of a type that is not entered: an
    operator of torch, a compiled pattern. A host replaces streams and iterators at each step."""
    return issubclass(of, _OPERATORS) or (
        not is_machinery(slots.module_of(of)) and "__next__" not in namespace_of(of)
    )


def _kind_of_base(of: type) -> tuple[type | None, Kind | None]:
    """The base class that decides a type's kind, and the kind; None where no base class does."""
    for base, kind in _KIND_OF_BASE:
        if issubclass(of, base):
            return base, kind
    numpy_scalars = getattr(sys.modules.get("numpy"), "generic", ())
    return None, Kind.PLAIN if issubclass(of, numpy_scalars) else None


def _defaults(users: list[type]) -> tuple[str, ...]:
    """The names of class attributes that are numbers."""
    names: dict[str, None] = {}
    for base in users:
        for name, value in namespace_of(base).items():
            if type(value) in (bool, int, float) and not name.startswith("__"):
                names[name] = None
    return tuple(names)


def _kind_of_object(of: type, users: list[type], has_attributes: bool) -> tuple[type | None, Kind]:
    """The kind of objects whose type has no base class of `_KIND_OF_BASE`; of a wrapper also the
    class of graphrt that says what it wraps."""
    for base in bases_of(of):
        is_graphrts = slots.module_of(base).partition(".")[0] == "graphrt"
        if is_graphrts and base not in users and "unwrap" in namespace_of(base):
            return base, Kind.WRAPPER
    if is_array(of):
        return None, Kind.ARRAY
    may_be_state = has_attributes and (of in users or not is_machinery(slots.module_of(of)))
    return None, Kind.OBJECT if may_be_state else Kind.SKIPPED


def _is_generator(of: type) -> bool:
    """Whether its objects are generators of random numbers, whose state can be read and set."""
    numpy = sys.modules.get("numpy.random")
    generators = getattr(numpy, "Generator", ()), getattr(numpy, "RandomState", ())
    draws = issubclass(of, (torch.Generator, random.Random, generators))
    return draws and not issubclass(of, random.SystemRandom)


def is_array(kind: type) -> bool:
    """Whether `kind` is NumPy's type of arrays, which need not be installed."""
    return kind is getattr(sys.modules.get("numpy"), "ndarray", None)


def hashes_plainly(key: object) -> bool:
    """Whether a dict can look `key` up without running a user's `__hash__` or `__eq__`."""
    of = type(key)
    # A tensor's hash is its identity, so that no two are compared: optimizers have such keys.
    if _KIND_OF_TYPE.get(of) is Kind.PLAIN or of in tree.BARE:
        return True
    if of is tuple:
        return all(map(hashes_plainly, key))  # type: ignore[call-overload]
    for name in ("__hash__", "__eq__"):
        home = next(base for base in bases_of(of) if name in namespace_of(base))
        if home is not object and not (home is enum.Enum or home is type):
            return False
    return True


# The walk -----------------------------------------------------------------------------------------

_MOST_PLAIN = 4096
"""A container of more plain values than this is not read: only its identity and length count."""
_SAMPLE = 64
"""Values of a long container that are looked at to see whether all are plain."""
_MOST_SEARCHED = 64
"""How many items are read of a dict with keys that may run a user's `__hash__` or `__eq__`: to find
one of them again, the whole dict is searched."""

_MOST_HOPS = 3
"""How many calls away from the forward code is still read. Without a limit a walk would read all of
an installed package."""

INNER = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
"""Of the attributes that torch gives to every module, those that matter to a forward."""
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) - {"training"}

_default_torch_function: Any = torch.Tensor.__torch_function__
_SHOWN_KEYS = {str, int, bytes}
"""Types of keys that paths show; of other keys they show the type."""
_CODE = (Kind.FUNCTION, Kind.CLASS, Kind.BOUND, Kind.DESCRIPTOR, Kind.CACHED)
"""Kinds that lead to code, each one hop away from the code that names it: see `_MOST_HOPS`."""
_MAY_BE_SKIPPED = (Kind.SKIPPED, Kind.CLASS, Kind.BOUND, Kind.IMPORTED)
"""Kinds of objects that `_is_skipped` is asked about."""
_NO_OUTLINE = (types.FunctionType, threading.local)
"""Types left out of `Places.outline`: a function's class cannot change, and a `threading.local` has
another dict in each thread."""
_FUNCTION = vars(types.FunctionType)
_ONLY_IF_NAMED = frozenset(("__init__", "__new__", "__repr__", "__del__", "__post_init__"))
"""Special methods that are read only if some code names them; other special methods always are, as
Python runs them unnamed."""

_CONSTRUCTORS = ("__new__", "__init__", "__post_init__")
"""Of these, the methods that make an object of a class: read if something holds the class."""

_ENVIRONMENT = frozenset((
    "environ", "environb", "getenv", "getenvb", "expandvars", "expanduser",
))  # fmt: skip
"""Names by which code reads environment variables."""
_LOOK_UP = frozenset(("globals", "modules", "import_module", "__import__"))
"""Names by which code looks up modules and globals by texts. Not `getattr`: libraries ask by it for
much that no forward reads."""

_ROOT_NAMES = {Kind.MODULE: "model", Kind.PARTIAL: "partial"}
"""With which name paths begin; for other kinds it is `self`, or a function's own name."""

PlaceValues: TypeAlias = list[PlaceValue]
"""Places, each with the value that the walk found there."""


def where_is(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What a graph bakes in about a tensor, see `tree.identity`; None if it has no memory that may
    be read. Runs no `__torch_function__`."""
    try:
        if type(tensor) in tree.BARE:
            return tree.identity(tensor)
        identity: tuple[object, ...] = _default_torch_function(tree.identity, (), (tensor,))
        return identity
    except RuntimeError:
        return None


Keyed = list[tuple[Place, torch.Tensor, int]]
"""Tensors that have memory, each with its place and its `storage_key`."""


def with_keys(tensors: Iterable[tuple[Place, torch.Tensor]]) -> Keyed:
    """Those of the tensors that have memory, with the keys of their storages."""
    tensors = [*tensors]
    keyed: Keyed = []
    placed = tree.placed(map(itemgetter(1), tensors))
    for (place, held), (_, key, _) in zip(tensors, placed, strict=True):
        if key is not None:
            keyed.append((place, held, key))
    return keyed


class Places:
    """What one walk has found: lists of places, most of them with the value that was there.

    It keeps the containers and tensors that it lists alive. A place looks into the container in
    which the walk found it. Once the host has replaced that container, the place still looks into
    the old one, and a new walk is needed.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Place, torch.Tensor]] = []
        """Every slot with a tensor; a tensor with several places is in it several times."""
        self.packed: PlaceValues = []
        """C++ objects that operators take in place of tensors, such as packed weights."""
        self.code: PlaceValues = []
        """Code of functions, methods in classes; functions and classes of libraries in slots."""
        self.outline: PlaceValues = []
        """The class and `__dict__` of each object; a module's dicts of `INNER`."""
        self.slots: PlaceValues = []
        """Objects and containers, a holder before what it holds."""
        self.containers: PlaceValues = []
        """The dicts, lists, sets and deques: they may get longer or shorter."""
        self.numbers: list[Place] = []
        """Every slot with a plain value: a number, text, None, dtype, device, size, member of an
        enum, or a tuple of such. A set of them is one place, and its value a frozenset."""
        self.arrays: PlaceValues = []
        """Arrays of NumPy's."""
        self.generators: list[Any] = []
        """Generators of random numbers, torch's, Python's and NumPy's."""
        self.named: dict[int, tuple[dict[str, Any], set[str], str]] = {}
        """id of a module's globals -> the globals, the names that code looks up there, and what
        such a name has before it in paths."""
        self.keys: dict[int, Place] = {}
        """id of a dict or class -> its place of `KEYS`: of objects, modules and their registries,
        classes, containers, hooks of all modules, and globals by the names that code has."""
        self.aside: list[Place] = []
        """What no code names: methods of classes, and globals that the walk does not follow."""
        self.unread = ""
        """An object that could change without a sign; empty where the walk has met none."""
        self.shapes = Shapes()
        self._keyed: Keyed | None = None

    @property
    def keyed(self) -> Keyed:
        """`with_keys` of the tensors, as of the first call."""
        # No `cached_property`: before Python 3.12 it has a lock, which another thread may hold
        # while the process forks, and then the child waits for ever.
        if self._keyed is None:
            self._keyed = with_keys(self.tensors)
        return self._keyed

    @property
    def objects(self) -> PlaceValues:
        """The slots, but those of tensors, in which another object may be at another time."""
        changing = [each for each in self.slots if each[0].way not in (FIXED, slots.BASE)]
        return [*self.code, *changing, *self.packed, *self.arrays]


def places_of(forward: Any, *, limit: int = 20_000) -> Places:
    """Walk from `forward` to the tensors and plain values that it can reach.

    `forward` is a function, method, module, partial or other callable. Nothing of it is called,
    and no code of a user runs. At most about `limit` slots are looked at, nearest first.

    It reads attributes, closures, defaults, class attributes, hooks, the globals and attributes of
    modules that code names, and what all these hold. It does not enter torch, NumPy, the standard
    library, methods that no code names, and code more than a few calls away.
    Paths read like `model.layers[0].scale`, `closure scale`, `global SCALE`, `default scale`.
    """
    walk = Walk(limit)
    shapes = walk.places.shapes
    while (shape := shapes[type(forward)]).kind is Kind.WRAPPER and not shape.users:
        forward = shape.base.unwrap(forward)
    root = forward
    while shapes[type(root)].kind is Kind.BOUND:
        root = root.__self__
    kind = shapes[type(root)].kind
    name = root.__name__ if kind is Kind.FUNCTION else _ROOT_NAMES.get(kind, "self")
    walk.take([(Place(None, name, FIXED, forward), forward)])
    walk.run()
    return walk.places


class Walk:
    """One walk, nearest objects first. A method of `_READERS` is given an object, its place and its
    shape, and returns the object's slots."""

    def __init__(self, limit: int) -> None:
        self.places = Places()
        self._slots_left = limit
        # How many calls away from the forward the object is that is read now.
        self._hops = 0
        # Objects to read: each with its place, its shape and its hops.
        self._queue: collections.deque[tuple[Any, Place, Shape, int]] = collections.deque()
        self._shapes = self.places.shapes
        # kind -> the list of `places` for slots that hold such objects; for others it is `slots`.
        self._lists = {
            Kind.TENSOR: self.places.tensors,
            Kind.ARRAY: self.places.arrays,
            Kind.PACKED: self.places.packed,
        }
        # Ids of objects that were read or are in the queue.
        self._queued: set[int] = set()
        # Names in code that was read; and, by name, the methods that no such code names yet.
        self._names_read = {"forward"}
        # The same with names in code too far away to lead to more code.
        self._names_spelled = set[str]()
        # Ids of classes of which code may make objects.
        self._made: set[int] = set()
        # Modules of users that some object holds, by id: the place and the globals of each.
        self._imported_modules: dict[int, tuple[Place, dict[str, Any]]] = {}
        self._waiting_methods: dict[str, PlaceValues] = {}
        # What `_globals` has done: one name in some globals (by id), or all names of one function
        # in a module.
        self._looked_up: set[tuple[int, object]] = set()
        # Of the first function that was read: paths say no module for its globals.
        self._main_globals: dict[str, Any] | None = None

    def run(self) -> None:
        """Read objects until the queue is empty or the limit is used up."""
        queue = self._queue
        while queue and self._slots_left > 0:
            value, place, shape, self._hops = queue.popleft()
            if shape.base in _RESIZABLE:
                self.places.containers.append((place, value))
            for _ in range(4):  # tries; then the object is left out
                try:
                    self.take(_READERS[shape.kind](self, value, place, shape))
                    break
                except RuntimeError:  # another thread has changed the container meanwhile
                    continue
        if queue:
            self._unread(queue[0][1], "is one of too many values")
        for name, hooks in global_hooks.items():
            self._keys(Place(None, name, FIXED, hooks), hooks, items=True)
        aside = self.places.aside
        for held, names, module in self.places.named.values():
            self._keys(Place(None, f"global {module}", FIXED, held), held, names=names)
            for name in sorted(names & held.keys()):
                if (id(held), name) not in self._looked_up:
                    aside.append(Place(None, f"global {module}{name}", slots.ITEM, held, name))
        aside += [place for methods in self._waiting_methods.values() for place, _ in methods]

    def _keys(
        self, at: Place, held: Any, *, names: set[str] | None = None, items: bool = False
    ) -> None:
        """List a dict or class whose new keys count; their names begin with the path of `at`."""
        table = namespace_of(held) if issubclass(type(held), type) else dict.keys(held)
        keys = slots.Keys(table, (*table,), names, items)
        self.places.keys.setdefault(id(held), Place(at, "", slots.KEYS, held, keys))

    def _unread(self, place: Place, why: str) -> None:
        self.places.unread = self.places.unread or f"{place.path} {why}"

    def take(self, entries: Iterable[tuple[Place, Any]]) -> None:
        """Sort slots by the kind of what is there, and queue objects that were not read yet."""
        places, shapes = self.places, self._shapes
        for place, value in entries:
            self._slots_left -= 1
            shape = shapes[type(value)]
            kind, base = shape.kind, shape.base
            if kind is Kind.CLASS and place.way is not slots.TYPE and place.way is not slots.BASE:
                self._may_be_made(value, place)
            if shape.draws:
                places.generators.append(value)
            if kind is Kind.PLAIN or (base in (tuple, frozenset) and _is_plain(value, base)):
                places.numbers.append(place)
            elif kind in _MAY_BE_SKIPPED and _is_skipped(kind, value):
                if kind is Kind.SKIPPED and _is_opaque(value):
                    self._unread(
                        place, f"is a {slots.module_of(type(value))}.{name_of(type(value))}"
                    )
                # Another generator in its place draws other numbers.
                counts = kind is not Kind.SKIPPED or shape.draws or shape.is_value
                if counts and place.way is not FIXED:
                    places.code.append((place, value))
            else:
                self._lists.get(kind, places.slots).append((place, value))
                # A tensor without attributes, as nearly all are, has no slots to read.
                is_new = kind is not Kind.PACKED and id(value) not in self._queued
                if is_new and (type(value) not in tree.BARE or value.__dict__):
                    self._queued.add(id(value))
                    self._queue.append((value, place, shape, self._hops))

    def _take_named(self, place: Place, value: Any) -> bool:
        """`take` a slot that code names. What it holds is one hop further away if it is code too;
        returns False, and takes nothing, if that is too far."""
        is_code = self._shapes[type(value)].kind in _CODE
        if is_code and self._hops >= _MOST_HOPS:
            return False
        self._hops += is_code
        self.take([(place, value)])
        self._hops -= is_code
        return True

    # Objects and containers ----------------------------------------------------------------------

    def _attributes(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """An object's `__dict__`, slots and class; of a module also its parameters, buffers,
        submodules and hooks."""
        held, attributes = self._dict(value, place, shape), PlaceValues()
        skipped: Collection[str] = ()
        if shape.kind is Kind.MODULE:
            attributes, skipped = self._registered(held, place), _MODULE_ATTRIBUTES
        for name, each in dict.items(held):
            if name not in skipped and type(name) is str:
                attributes.append((Place(place, f".{name}", slots.ITEM, held, name), each))
        for name in shape.defaults:
            if not dict.__contains__(held, name):
                self.places.numbers.append(Place(place, f".{name}", slots.DEFAULT, held, name))
        for name, descriptor in shape.slots:
            slot = Place(place, f".{name}", slots.FIELD, value, descriptor)
            if (each := slot.get()) is slots.MISSING:
                self.places.numbers.append(slot)
            else:
                attributes.append((slot, each))
        class_place = Place(place, ".__class__", slots.TYPE, value)
        for base in shape.users:
            is_own = base is type(value)
            slot = class_place if is_own else Place(place, name_of(base), slots.BASE, base)
            attributes.append((slot, base))
        if type(value) not in _NO_OUTLINE:
            self.places.outline.append((class_place, type(value)))
            if shape.dict_of is not None:
                slot = Place(place, ".__dict__", slots.ATTRIBUTES, value, shape.dict_of)
                self.places.outline.append((slot, held))
        return attributes

    def _dict(self, value: Any, place: Place, shape: Shape) -> dict[str, Any]:
        """The `__dict__` of an object."""
        held = {} if shape.dict_of is None else shape.dict_of(value)
        # Hosts add attributes to weights that say how these are loaded.
        if shape.dict_of is not None and shape.kind is not Kind.TENSOR:
            self._keys(Place(place, ".", FIXED, held), held)
        return held

    def _registered(self, held: dict[str, Any], place: Place) -> PlaceValues:
        """The parameters, buffers, submodules and hooks of a module, whose `__dict__` is `held`."""
        registered: PlaceValues = []
        for name in INNER:
            registry: Any = dict.get(held, name)
            at = Place(place, f".{name}", slots.ITEM, held, name)
            self.places.outline.append((at, registry))
            if not issubclass(type(registry), dict):
                continue
            self._keys(at, registry, items=True)
            prefix = f".{name}" if registry and name.endswith("hooks") else ""
            for key, each in dict.items(registry):
                label = f".{key}" if type(key) is str and not key.isdigit() else f"[{key}]"
                registered.append((Place(place, prefix + label, slots.ITEM, registry, key), each))
        return registered

    def _contents(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The items of a container; and, of a user's subclass, the attributes."""
        base, contents = shape.base, PlaceValues()
        if base.__len__(value) <= _MOST_PLAIN or not _looks_plain(value, base):
            read_items = self._items if base is dict else self._elements
            contents = read_items(value, place, base)
        else:
            self._unread(place, f"has more than {_MOST_PLAIN} values")
        return contents + (self._attributes(value, place, shape) if shape.users else [])

    def _items(self, value: Any, place: Place, base: Any) -> PlaceValues:
        """The values of a dict."""
        items, way = list(islice(dict.items(value), max(self._slots_left, 0))), slots.ITEM
        # One key with a user's `__eq__` is enough: to look up any other may compare with it.
        if not all(hashes_plainly(key) for key, _ in items):
            way, items = slots.ODD_ITEM, items[:_MOST_SEARCHED]
            self.places.aside.append(Place(place, "", slots.IDS, value, dict))
        self._keys(place, value, items=True)
        entries: PlaceValues = []
        for key, each in items:
            text = repr(key) if type(key) in _SHOWN_KEYS else f"<{name_of(type(key))}>"
            entries.append((Place(place, f"[{text}]", way, value, key), each))
        return entries

    def _elements(self, value: Any, place: Place, base: Any) -> PlaceValues:
        """The items of a list, deque, tuple or set."""
        held = list(islice(base.__iter__(value), max(self._slots_left, 0)))
        if base is set and all(self._shapes[type(each)].kind is Kind.PLAIN for each in held):
            self.places.numbers.append(Place(place, "", slots.MEMBERS, value))
            return []
        fields = namespace_of(type(value)).get("_fields") if base is tuple else ()
        elements: PlaceValues = []
        for index, each in enumerate(held):
            label = f"[{index}]"
            if base is list or base is collections.deque:
                slot = Place(place, label, slots.ELEMENT, value, index)
            elif base is tuple:
                if type(fields) is tuple and index < len(fields):
                    label = f".{fields[index]}"
                slot = Place(place, label, slots.TUPLE_ITEM, place, index)
            else:
                slot = Place(place, f"{{{index}}}", slots.MEMBER, value, each)
            elements.append((slot, each))
        return elements

    def _in_array(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The objects in an array of NumPy's. The array's bytes show another one in its place."""
        if not value.dtype.hasobject:
            return []
        if value.size > _MOST_PLAIN:
            self._unread(place, f"has more than {_MOST_PLAIN} values")
            return []
        held = enumerate(value.ravel().tolist())
        return [(Place(place, f".flat[{at}]", FIXED, each), each) for at, each in held]

    def _referent(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """What a weak reference or a context variable refers to at this moment."""
        is_weak = shape.base is weakref.ref
        label, way = ("()", slots.TARGET) if is_weak else (".get()", slots.CONTEXT_VALUE)
        slot = Place(place, label, way, value)
        return [(slot, slot.get())]

    def _memory(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The contents of a buffer, and its attributes."""
        size = slots.size_of(value)
        if size <= _MOST_PLAIN:
            self.places.numbers.append(Place(place, " (contents)", slots.BUFFER, value))
        # A pointer refers to objects; so does a structure or an array that holds one.
        return _fixed(place, slots.pointed_to(value)) + self._attributes(value, place, shape)

    def _proxied(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The dict behind a mapping proxy, whose own methods would run those of a user's
        mapping."""
        return _fixed(place, gc.get_referents(value))

    def _unwrapped(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """What a runner or wrapper of graphrt runs inside of a graph; and what a user's subclass of
        it adds. The rest of it changes at each of its own steps."""
        inner = _fixed(place, [shape.base.unwrap(value)])
        if not shape.users:
            return inner
        names = _names_of(shape.base)
        return inner + [
            each for each in self._attributes(value, place, shape) if each[0].key not in names
        ]

    # Code ----------------------------------------------------------------------------------------

    def _function(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """A function's closure and attributes; of a user's also defaults and the globals used."""
        separator, code = "" if place.owner is None else ", ", value.__code__
        library = is_library(str(value.__globals__.get("__name__")), value.__globals__)
        variables: PlaceValues = []
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            slot = Place(place, f"{separator}closure {name}", slots.CELL, cell)
            each = slot.get()
            # A decorator of torch (`no_grad`) holds the user's function, beside torch's numbers.
            if not library or self._shapes[type(each)].kind is not Kind.PLAIN:
                variables.append((slot, each))
        keyword_defaults = value.__kwdefaults__ or {}
        if keyword_defaults:
            self._keys(Place(place, f"{separator}default ", FIXED, value), keyword_defaults)
        variables += self._attributes(value, place, shape)
        names = _names_in(code)
        if library:
            # `getenv = os.getenv`: code that calls it need not name what it reads.
            if value.__globals__ is vars(os) or value.__globals__ is vars(os.path):
                self._state_of_python(place, names)
            return variables
        slot = Place(place, ".__code__", slots.FIELD, value, _FUNCTION["__code__"])
        self.places.code.append((slot, code))
        defaults = value.__defaults__ or ()
        at = Place(place, "", slots.FIELD, value, _FUNCTION["__defaults__"])
        with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for index, (name, each) in enumerate(zip(with_default, defaults, strict=False)):
            slot = Place(place, f"{separator}default {name}", slots.TUPLE_ITEM, at, index)
            variables.append((slot, each))
        if keyword_defaults:
            slot = Place(place, ".__kwdefaults__", slots.FIELD, value, _FUNCTION["__kwdefaults__"])
            self.places.code.append((slot, keyword_defaults))
        for name, each in dict.items(keyword_defaults):
            slot = Place(place, f"{separator}default {name}", slots.ITEM, keyword_defaults, name)
            variables.append((slot, each))
        self.take(variables)
        self._read_waiting(names)
        self._globals(place, value.__globals__, names)
        self._state_of_python(place, names)
        return []

    def _state_of_python(self, place: Place, names: set[str]) -> None:
        """Environment variables and the command line, if the `names` in code tell of them."""
        if not names.isdisjoint(_ENVIRONMENT):
            self.take([(Place(place, "os.environ", FIXED, os.environ), os.environ)])
        if "argv" in names:
            self.take([(Place(place, "sys.argv", slots.ITEM, vars(sys), "argv"), sys.argv)])

    def _imported(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """A user's module that is held as an object: what some code names, whichever it is."""
        held = slots.module_globals(value)
        self._imported_modules[id(value)] = place, held
        self._named_in_module(place, held, self._names_spelled)
        return []

    def _named_in_module(self, place: Place, held: dict[str, Any], names: set[str]) -> None:
        """Take the `names` that are in the module at `place`, whose globals are `held`."""
        prefix = f"{held.get('__name__')}."
        self.places.named.setdefault(id(held), (held, set(), prefix))[1].update(names)
        for name in sorted(names & held.keys()):
            if self._take_named(Place(place, f".{name}", slots.ITEM, held, name), held.get(name)):
                self._looked_up.add((id(held), name))

    def _read_waiting(self, names: set[str]) -> None:
        """Code that was read names `names`: read the methods that waited for one of these, and what
        modules have by these names."""
        new = names - self._names_spelled
        self._names_spelled |= new
        for place, held in [*self._imported_modules.values()] if new else ():
            self._named_in_module(place, held, new)
        if self._hops >= _MOST_HOPS:
            return
        self._names_read |= names
        for name in sorted(names & self._waiting_methods.keys()):
            for place, value in self._waiting_methods.pop(name):
                self._method(place, value)

    def _globals(self, owner: Place, held: dict[str, Any], names: set[str]) -> None:
        """Take the `names` that are among the globals `held` of a user's module; if one is a
        module, also take those that are among its globals."""
        if self._main_globals is None:
            self._main_globals = held
        prefix = "" if held is self._main_globals else f"{held.get('__name__')}."
        self.places.named.setdefault(id(held), (held, set(), prefix))[1].update(names)
        for name in sorted(names & held.keys()):
            value, key = held.get(name), (id(held), name)
            if key in self._looked_up or issubclass(type(value), types.ModuleType):
                continue
            slot = Place(owner, f"global {prefix}{name}", slots.ITEM, held, name)
            if self._take_named(slot, value):
                self._looked_up.add(key)
        for name in sorted(names):
            module_named = _module_named(name, held)
            if issubclass(type(module_named), types.ModuleType):
                inner = slots.module_globals(module_named)
                all_names = (id(inner), frozenset(names))
                library = is_library(str(inner.get("__name__")), inner)
                if not library and all_names not in self._looked_up:
                    self._looked_up.add(all_names)
                    self._globals(owner, inner, names)

    def _bound(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The object and the function of a bound method: it never gets others."""
        is_root = place.owner is None
        parts = _fixed(place, [value.__self__], "" if is_root else ".__self__")
        if type(value) is types.MethodType:
            function = value.__func__
            is_named = is_root and type(function) is types.FunctionType
            parts += _fixed(place, [function], f".{function.__name__}" if is_named else "")
        return parts

    def _partial(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The function of a `partial`, its arguments, and its attributes."""
        parts: PlaceValues = []
        for name in ("func", "args", "keywords"):
            parts += _fixed(place, [vars(functools.partial)[name].__get__(value)], f".{name}")
        return parts + self._attributes(value, place, shape)

    def _class(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The attributes of a user's class, and the methods that code names; other methods wait."""
        values: PlaceValues = []
        self._keys(Place(None, f"{name_of(value)}.", FIXED, value), value)
        for name, each in namespace_of(value).copy().items():
            kind = self._shapes[type(each)].kind
            is_special = name.startswith("__") and name.endswith("__")
            slot = Place(place, f"{name_of(value)}.{name}", slots.CLASS_ATTRIBUTE, value, name)
            if kind is not Kind.FUNCTION and kind is not Kind.DESCRIPTOR and kind is not Kind.CLASS:
                if not is_special:
                    values.append((slot, each))
            elif name in self._names_read or (is_special and name not in _ONLY_IF_NAMED):
                self._method(slot, each)
            else:
                self._waiting_methods.setdefault(name, []).append((slot, each))
        return values

    def _may_be_made(self, value: Any, place: Place) -> None:
        """Something holds a class, so code may make objects of it: read what runs then."""
        # Few forwards make modules, and each layer's code names its own. `super()` has `__class__`.
        if issubclass(value, torch.nn.Module) or place.label.endswith("closure __class__"):
            return
        for base in () if id(value) in self._made else bases_of(value):
            if id(base) in self._made or is_library_class(base):
                continue
            self._made.add(id(base))
            if base is not value:
                self.take([(Place(place, name_of(base), slots.BASE, base), base)])
            for name in _CONSTRUCTORS:
                if (each := namespace_of(base).get(name)) is not None:
                    label = f"{name_of(base)}.{name}"
                    self._method(Place(place, label, slots.CLASS_ATTRIBUTE, base, name), each)

    def _method(self, place: Place, value: Any) -> None:
        """Take a method of a class that code names."""
        self.places.code.append((place, value))
        self._take_named(Place(place.owner, place.label, FIXED, value), value)

    def _descriptor(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """The functions in a property, a static or a class method."""
        self._dict(value, place, shape)
        held = gc.get_referents(value)
        if type(value) is functools.cached_property:
            held.append(vars(value)["func"])
        # It also refers to its docstring and, once anybody has read that, to its `__dict__`.
        others = (Kind.PLAIN, Kind.CONTAINER)
        return _fixed(place, [each for each in held if self._shapes[type(each)].kind not in others])

    def _cached(self, value: Any, place: Place, shape: Shape) -> PlaceValues:
        """A function with an `lru_cache`: what is in the cache now, and the function."""
        self._dict(value, place, shape)
        return _fixed(place, cached_results(value), ", cached") + _fixed(place, [value.__wrapped__])


def cached_results(cache: Any) -> list[Any]:
    """The tensors, and tuples, that a cache of functools holds."""
    held = gc.get_referents(cache)
    # A cache with `maxsize=None` keeps its results in a dict, any other refers to each of them.
    held += [each for table in held if type(table) is dict for each in dict.values(table)]
    return [each for each in held if shape_of(type(each)).base in (torch.Tensor, tuple)]


def _fixed(place: Place, values: Iterable[Any], label: str = "") -> PlaceValues:
    """Slots of the object at `place` that always hold these values."""
    return [(Place(place, label, FIXED, each), each) for each in values]


def _is_skipped(kind: Kind, value: Any) -> bool:
    """Whether an object of such a kind is not entered: a library's class or module, a function in
    C."""
    if kind is Kind.CLASS:
        return is_library_class(value)
    if kind is Kind.BOUND:
        return value.__self__ is None or type(value.__self__) is types.ModuleType
    if kind is Kind.IMPORTED:
        held = slots.module_globals(value)
        return is_library(str(held.get("__name__")), held)
    return True


def _is_opaque(value: Any) -> bool:
    """Whether an object of a user's type has state in C, and none in Python."""
    of = type(value)
    has_state = not issubclass(of, type) and of.__basicsize__ > object.__basicsize__
    return has_state and not is_library_class(of)


def _is_plain(value: Any, base: Any, depth: int = 4) -> bool:
    """Whether a tuple or frozenset holds nothing but plain values, and not too many."""
    if base.__len__(value) > _MOST_PLAIN or depth == 0:
        return False
    for member in base.__iter__(value):
        shape = shape_of(type(member))
        nested = shape.base is tuple and _is_plain(member, tuple, depth - 1)
        if shape.kind is not Kind.PLAIN and not nested:
            return False
    return True


def _looks_plain(value: Any, base: Any) -> bool:
    """Whether a sample of a long container is of plain values alone: then it is not read."""
    sample = islice(dict.values(value) if base is dict else base.__iter__(value), _SAMPLE)
    return all(shape_of(type(each)).kind is Kind.PLAIN for each in sample)


def _names_in(code: types.CodeType) -> set[str]:
    """The names in code, and in functions and lambdas within it. Where it looks modules or globals
    up (`sys.modules["settings"]`), its texts may be names."""
    names = {*code.co_names}
    looks_up = not names.isdisjoint(_LOOK_UP)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names |= _names_in(constant)
        elif looks_up and type(constant) is str:
            names.add(constant)
    return names


def _module_named(name: str, held: dict[str, Any]) -> Any:
    """What a name in a function of a module with the globals `held` may stand for: one of these,
    or a module that the function imports itself, absolutely or from its own package."""
    if name in held:
        return held[name]
    return sys.modules.get(name) or sys.modules.get(f"{held.get('__package__')}.{name}")


@functools.cache
def _names_of(of: type) -> frozenset[str]:
    """The names that methods of a class of graphrt spell, its attributes among them."""
    functions = [f for base in bases_of(of) for f in namespace_of(base).values()]
    return frozenset().union(*(_names_in(f.__code__) for f in functions if hasattr(f, "__code__")))


_READERS: dict[Kind, Callable[[Walk, Any, Place, Shape], PlaceValues]] = {
    **dict.fromkeys((Kind.OBJECT, Kind.MODULE, Kind.TENSOR), Walk._attributes),
    Kind.CONTAINER: Walk._contents,
    Kind.ARRAY: Walk._in_array,
    Kind.REFERENCE: Walk._referent,
    Kind.WRAPPER: Walk._unwrapped,
    Kind.PROXY: Walk._proxied,
    Kind.MEMORY: Walk._memory,
    Kind.IMPORTED: Walk._imported,
    Kind.FUNCTION: Walk._function,
    Kind.BOUND: Walk._bound,
    Kind.PARTIAL: Walk._partial,
    Kind.CLASS: Walk._class,
    Kind.DESCRIPTOR: Walk._descriptor,
    Kind.CACHED: Walk._cached,
}
