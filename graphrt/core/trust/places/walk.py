"""The walk from a forward to everything that its Python side holds.

1. `Walk.run` takes the nearest object that was not read yet from a queue, so that an object gets
   the shortest path, and calls the method for its kind, once an object.
2. That returns the slots of the object, and `take` sorts them: plain values, tensors, arrays, and
   objects, which join the queue.
3. `Places.links` finds afterwards, if somebody asks, which slots lead to a tensor.

Code is read as its names say: globals, modules there, and methods of classes. What an object of a
type is to a walk is told by its type alone, its `Shape`: no object is asked.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import enum
import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from graphrt.core.base import tree
from graphrt.core.trust.places import slots
from graphrt.core.trust.places.slots import FIXED, Place, bases_of, name_of, namespace_of

# Types -------------------------------------------------------------------------------------------


Kind = enum.Enum(
    "Kind",
    "PLAIN TENSOR MODULE OBJECT CONTAINER FUNCTION BOUND PARTIAL CLASS DESCRIPTOR PROXY REFERENCE "
    "CACHED WRAPPER PACKED ARRAY SKIPPED",
)
"""What an object is to a walk."""


class Shape(NamedTuple):
    """What a walk knows of a type."""

    kind: Kind
    base: Any = None
    """The type that decides this: of a container Python's own, by whose methods it is read, as a
    subclass may have its own."""
    dict_of: Callable[[Any], dict[str, Any]] | None = None
    """Returns an object's `__dict__`; None if it has none."""
    slots: tuple[tuple[str, Any], ...] = ()
    """Its `__slots__`, by name, with their descriptors."""
    users: tuple[type, ...] = ()
    """The classes among itself and its bases that a user wrote."""
    draws: bool = False
    """Whether random numbers are drawn from its objects."""
    defaults: tuple[str, ...] = ()
    """The class attributes of `users` that are numbers: defaults of an object's attributes."""


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_CHANGING = (dict, list, set, collections.deque)
_BY_C = (types.MemberDescriptorType, types.GetSetDescriptorType)
_CACHED = type(functools.lru_cache(len))
_EXACT: dict[type, Kind] = {
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
    # Of C++: quantized weights, packed for their operators, are such.
    torch.ScriptObject: Kind.PACKED,
}
_local_dict = threading.local.__getattribute__
# The first that is a base decides. Without one, objects of users' classes are entered, and others
# are skipped.
_KINDS: tuple[tuple[type, Kind], ...] = (
    # A subclass may run its `__init__` where a thread looks at it first.
    (threading.local, Kind.SKIPPED),
    (torch.Tensor, Kind.TENSOR),
    (enum.EnumMeta, Kind.SKIPPED),
    (enum.Enum, Kind.PLAIN),
    (type, Kind.CLASS),
    (torch.nn.Module, Kind.MODULE),
    (functools.partial, Kind.PARTIAL),
    # Only read where code names what is in it.
    (types.ModuleType, Kind.SKIPPED),
    (weakref.ref, Kind.REFERENCE),
    (staticmethod, Kind.DESCRIPTOR),
    (classmethod, Kind.DESCRIPTOR),
    (property, Kind.DESCRIPTOR),
    *((base, Kind.CONTAINER) for base in _CONTAINERS),
    *((base, Kind.PLAIN) for base in (int, float, complex, str, bytes)),
)
_ENTERED: frozenset[type] = frozenset({
    types.SimpleNamespace, argparse.Namespace, functools.partialmethod,
    collections.UserDict, collections.UserList, collections.ChainMap,
    weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet,
})  # fmt: skip
"""Types of the standard library whose objects hold what a user put in."""

_LIBRARIES = sys.stdlib_module_names | {
    "builtins", "torch", "torch_npu", "torchvision", "torchaudio", "numpy", "triton", "cuda",
    "pluggy", "typing_extensions", "pytest", "_pytest",
}  # fmt: skip
_PARTS_WITH_MODELS = ("demo", "testing", "attention", "hosts.transformers", "hosts.vllm")
"""Parts of graphrt that hold models; the others are the runtime, and no user's forward."""
_RUNTIMES = tuple(f"hosts.transformers.{name}" for name in ("seam", "graphs", "encoders"))
"""Modules of these parts that are runtime all the same. A model leads to its graphs, and these to
the cache of the sequence under way, which is another one at the next: it would count as moved."""


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether a module of this dotted name holds no code of a user."""
    root, _, rest = module.partition(".")
    if root == "graphrt":
        return rest in _RUNTIMES or not rest.startswith(_PARTS_WITH_MODELS)
    return root in _LIBRARIES


# Only types that live as long as their library: kept here, a class that a user's program makes
# would keep what it holds alive, tensors included.
_known: dict[type, Shape] = {
    **{of: Shape(kind) for of, kind in _EXACT.items()},
    types.FunctionType: Shape(Kind.FUNCTION, dict_of=vars(types.FunctionType)["__dict__"].__get__),
    _CACHED: Shape(Kind.CACHED, dict_of=vars(_CACHED)["__dict__"].__get__),
    threading.local: Shape(Kind.OBJECT, dict_of=lambda held: _local_dict(held, "__dict__")),
}


class Shapes(dict[type, Shape]):
    """What one walk does with objects of each type, which it looks at once."""

    def __init__(self) -> None:
        super().__init__(_known)

    def __missing__(self, of: type) -> Shape:
        shape = self[of] = shape_of(of)
        return shape


def shape_of(of: type) -> Shape:
    """What a walk does with objects of the type `of`."""
    shape = _known.get(of)
    if shape is None:
        shape, module = _shape_of(of), slots.module_of(of)
        home = sys.modules.get(module) if is_library(module) else None
        if isinstance(home, types.ModuleType) and slots.module_globals(home).get(name_of(of)) is of:
            _known[of] = shape
    return shape


def _shape_of(of: type) -> Shape:
    decides, kind = _kind_by_base(of)
    if kind is Kind.PLAIN or kind is Kind.SKIPPED:
        return Shape(kind)
    dict_of, slots, users = None, [], []
    for base in bases_of(of):
        names = namespace_of(base)
        attributes, module = names.get("__dict__"), names.get("__module__")
        # A property of that name is the user's, and is not run.
        if dict_of is None and type(attributes) in _BY_C and base is not type:
            dict_of = attributes.__get__
        if "__slots__" in names:
            slots += [each for each in names.items() if type(each[1]) is _BY_C[0]]
        if type(module) is str and not is_library(module):
            users.append(base)
    if kind is None:
        kind = _kind_of_object(of, users, bool(dict_of or slots))
    defaults = () if dict_of is None else _defaults(users)
    return Shape(kind, decides, dict_of, tuple(slots), tuple(users), _draws(of), defaults)


def _kind_by_base(of: type) -> tuple[type | None, Kind | None]:
    for base, kind in _KINDS:
        if issubclass(of, base):
            return base, kind
    numbers = getattr(sys.modules.get("numpy"), "generic", ())
    return None, Kind.PLAIN if issubclass(of, numbers) else None


def _defaults(users: list[type]) -> tuple[str, ...]:
    """The names of numbers that classes have, which a first `self.steps += 1` hides."""
    names: dict[str, None] = {}
    for base in users:
        for name, value in namespace_of(base).items():
            if type(value) in (bool, int, float) and not name.startswith("__"):
                names[name] = None
    return tuple(names)


def _kind_of_object(of: type, users: list[type], has_attributes: bool) -> Kind:
    for base in bases_of(of):
        if "unwrap" in namespace_of(base):
            if base not in users and slots.module_of(base).partition(".")[0] == "graphrt":
                return Kind.WRAPPER
            break
    if is_array(of):
        return Kind.ARRAY
    # Of torch only masks of attention and what is like them: streams, graphs and what the compiler
    # keeps are no state of a model.
    entered = of in users or slots.module_of(of).startswith("torch.nn.")
    return Kind.OBJECT if of in _ENTERED or (entered and has_attributes) else Kind.SKIPPED


def _draws(of: type) -> bool:
    """Whether random numbers are drawn from its objects, with a state that can be read and set."""
    numpy = sys.modules.get("numpy.random")
    numpys = getattr(numpy, "Generator", ()), getattr(numpy, "RandomState", ())
    # The system's own randomness has no state.
    drawn = issubclass(of, (torch.Generator, random.Random, numpys))
    return drawn and not issubclass(of, random.SystemRandom)


def is_array(kind: type) -> bool:
    """Whether `kind` is NumPy's type of arrays, which need not be installed."""
    return kind is getattr(sys.modules.get("numpy"), "ndarray", None)


def hashes_plainly(key: object) -> bool:
    """Whether a dict can look `key` up without running a user's `__hash__` or `__eq__`."""
    of = type(key)
    if _EXACT.get(of) is Kind.PLAIN:
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
"""A container of more plain values than this is known by its identity and length only."""
_SAMPLE = 64
"""Values of a long container that are looked at to see whether all are plain."""
_MOST_ODD = 64
"""Items that are read of a dict whose keys may run a user's `__hash__` or `__eq__`: each look at
one is a search of all."""

_MOST_HOPS = 3
"""Code is read that is so many calls away from the forward, or from a method of what it holds; a
walk without this end would read all of an installed package."""

INNER = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
"""Attributes of a module that matter to a forward, of those that torch gives to all of them."""
# The attributes that torch gives to every module: no state of a forward but for `INNER`.
_OWN_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}

_PLAINLY: Any = torch.Tensor.__torch_function__
_PLAIN_KEYS = {str, int}
_LEAVES = (Kind.ARRAY, Kind.PACKED)
_CODE = (Kind.FUNCTION, Kind.CLASS, Kind.BOUND, Kind.DESCRIPTOR, Kind.CACHED)
_OFTEN_SKIPPED = (Kind.SKIPPED, Kind.CLASS, Kind.BOUND)
_WITHOUT_OUTLINE = (types.FunctionType, threading.local)
"""Their class stays what it is, and of a `threading.local` each thread has another dict."""
_FUNCTION = vars(types.FunctionType)
_ONLY_IF_NAMED = frozenset(("__init__", "__new__", "__repr__", "__del__", "__post_init__"))
"""Special methods that are read only if some code names them; other special methods always are, as
Python runs them unnamed."""

_ROOTS = {Kind.MODULE: "model", Kind.PARTIAL: "partial"}

Slots = list[tuple[Place, Any]]


def where_is(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What a graph bakes in about a tensor, see `tree.identity`; None if it has no memory that may
    be read. Runs no `__torch_function__`."""
    try:
        if type(tensor) in tree.BARE:
            return tree.identity(tensor)
        identity: tuple[object, ...] = _PLAINLY(tree.identity, (), (tensor,))
        return identity
    except RuntimeError:
        return None


Keyed = list[tuple[Place, torch.Tensor, int]]
"""Tensors that have memory, each with its `storage_key`."""


def with_keys(tensors: Iterable[tuple[Place, torch.Tensor]]) -> Keyed:
    """The tensors that have memory, with their keys."""
    tensors = [*tensors]
    keyed: Keyed = []
    placed = tree.placed(map(itemgetter(1), tensors))
    for (place, held), (_, key, _) in zip(tensors, placed, strict=True):
        if key is not None:
            keyed.append((place, held, key))
    return keyed


class Places:
    """What the Python side of a forward holds, mostly as pairs of a place and what is there.

    It keeps the containers and tensors that it lists alive for as long as it lives itself.

    A slot is looked up where the walk found it. Where a container was replaced since, a place still
    looks into the old one: its link does not hold any more, and a new walk is needed.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[Place, torch.Tensor]] = []
        """Every slot with a tensor; a tensor with several places is in it several times."""
        self.packed: Slots = []
        """Objects of C++ that operators may be given in place of tensors."""
        self.code: Slots = []
        """The code that was read, of functions and in classes."""
        self.outline: Slots = []
        """Classes of objects, their `__dict__`, and the dicts in which modules register."""
        self.slots: Slots = []
        """Objects that were entered, holders before what they hold."""
        self.containers: Slots = []
        """Those of them that may get longer or shorter."""
        self.numbers: list[Place] = []
        """Every slot with a plain value: a number, text, None, dtype, device, size, member of an
        enum, or a tuple of such. A set of them is one place, and its value a frozenset."""
        self.arrays: Slots = []
        """Arrays of NumPy's."""
        self.generators: list[Any] = []
        """Generators of random numbers, torch's, Python's and NumPy's."""
        self.named: dict[int, tuple[dict[str, Any], set[str], str]] = {}
        """By the id of a module's globals: these, the names that code has looked up there, and what
        stands before a name in its place's label."""
        self.shapes = Shapes()
        self._keyed: Keyed | None = None

    @property
    def keyed(self) -> Keyed:
        """The tensors with memory, as it was when this was first asked."""
        # No `cached_property`: before Python 3.12 it has a lock, which another thread may hold
        # while the process forks, and then the child waits for ever.
        if self._keyed is None:
            self._keyed = with_keys(self.tensors)
        return self._keyed

    @property
    def objects(self) -> Slots:
        """Everything but tensors that the forward gets at through a slot: another object may be
        there at another time."""
        changing = [each for each in self.slots if each[0].way is not FIXED]
        return [*self.code, *changing, *self.packed]


def places_of(forward: Any, *, limit: int = 20_000) -> Places:
    """Walk from `forward` to the tensors and plain values that it can reach.

    `forward` is a function, method, module, partial or other callable. Nothing of it is called,
    and no code of a user runs. At most about `limit` slots are looked at, nearest first.

    Seen are attributes, closures, defaults, what code names of globals and of modules, class
    attributes, hooks, and what all these hold. Not entered are torch, NumPy and the standard
    library, methods whose name no code says that was read, and code more than a few calls away.
    Paths read like `model.layers[0].scale`, `closure scale`, `global SCALE`, `default scale`.
    """
    walk = Walk(limit)
    shapes = walk.places.shapes
    while shapes[type(forward)].kind is Kind.WRAPPER:
        forward = forward.unwrap()
    owner = forward
    while shapes[type(owner)].kind is Kind.BOUND:
        owner = owner.__self__
    kind = shapes[type(owner)].kind
    name = owner.__name__ if kind is Kind.FUNCTION else _ROOTS.get(kind, "self")
    walk.take([(Place(None, name, FIXED, forward), forward)])
    walk.run()
    return walk.places


class Walk:
    """One walk. A method for a kind returns the slots of an object that has a place."""

    def __init__(self, limit: int) -> None:
        self.places = Places()
        self._left = limit
        self._hops = 0
        self._queue: collections.deque[tuple[Any, Place, Shape, int]] = collections.deque()
        self._shapes = self.places.shapes
        self._lists = {
            Kind.TENSOR: self.places.tensors,
            Kind.ARRAY: self.places.arrays,
            Kind.PACKED: self.places.packed,
        }
        # The ids of objects that were read, or are in the queue.
        self._read: set[int] = set()
        # Names in code that was read; and by name, methods that wait until one of these is theirs.
        self._named = {"forward"}
        self._unnamed: dict[str, Slots] = {}
        # Names that were looked up in globals, and of modules all names of one function.
        self._looked_up: set[tuple[int, object]] = set()
        self._main_globals: dict[str, Any] | None = None

    def run(self) -> None:
        """Read everything that is found, until nothing or nothing of the limit is left."""
        queue = self._queue
        while queue and self._left > 0:
            value, place, shape, self._hops = queue.popleft()
            if shape.base in _CHANGING:
                self.places.containers.append((place, value))
            for _ in range(4):
                try:
                    self.take(_READERS[shape.kind](self, value, place, shape))
                    break
                except RuntimeError:  # another thread has changed the container meanwhile
                    continue

    def take(self, entries: Iterable[tuple[Place, Any]]) -> None:
        """Sort slots by the kind of what is there, and queue objects that were not read yet."""
        places, shapes = self.places, self._shapes
        for place, value in entries:
            self._left -= 1
            shape = shapes[type(value)]
            kind, base = shape.kind, shape.base
            if shape.draws:
                places.generators.append(value)
            if kind is Kind.PLAIN or (base in (tuple, frozenset) and _is_plain(value, base)):
                places.numbers.append(place)
            elif kind in _OFTEN_SKIPPED and _is_skipped(kind, value):
                if kind is not Kind.SKIPPED and place.way is not FIXED:
                    places.code.append((place, value))
            else:
                self._lists.get(kind, places.slots).append((place, value))
                # Hardly any tensor has attributes.
                is_entered = kind not in _LEAVES and id(value) not in self._read
                if is_entered and (type(value) not in tree.BARE or value.__dict__):
                    self._read.add(id(value))
                    self._queue.append((value, place, shape, self._hops))

    def _by_name(self, place: Place, value: Any) -> bool:
        """`take` a slot that code names. Code in it is one hop further away; False, and nothing is
        taken, if that is too far."""
        further = self._shapes[type(value)].kind in _CODE
        if further and self._hops >= _MOST_HOPS:
            return False
        self._hops += further
        self.take([(place, value)])
        self._hops -= further
        return True

    # Objects and containers ----------------------------------------------------------------------

    def _attributes(self, value: Any, place: Place, shape: Shape) -> Slots:
        """An object's `__dict__`, slots and class; of a module also its parameters, buffers,
        submodules and hooks."""
        held = {} if shape.dict_of is None else shape.dict_of(value)
        attributes: Slots = []
        skipped: Collection[str] = ()
        if shape.kind is Kind.MODULE:
            attributes, skipped = self._registered(held, place), _OWN_OF_MODULES
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
        of = Place(place, ".__class__", slots.TYPE, value)
        for base in shape.users:
            slot = of if base is type(value) else Place(place, name_of(base), FIXED, base)
            attributes.append((slot, base))
        if type(value) not in _WITHOUT_OUTLINE:
            self.places.outline.append((of, type(value)))
            if shape.dict_of is not None:
                slot = Place(place, ".__dict__", slots.ATTRIBUTES, value, shape.dict_of)
                self.places.outline.append((slot, held))
        return attributes

    def _registered(self, held: dict[str, Any], place: Place) -> Slots:
        """What a module has registered: parameters, buffers, submodules, hooks."""
        registered: Slots = []
        for name in INNER:
            inner: Any = dict.get(held, name)
            self.places.outline.append((Place(place, f".{name}", slots.ITEM, held, name), inner))
            before = f".{name}" if name.endswith("hooks") else ""
            for key, each in dict.items(inner) if issubclass(type(inner), dict) else ():
                where = f".{key}" if type(key) is str and not key.isdigit() else f"[{key}]"
                registered.append((Place(place, before + where, slots.ITEM, inner, key), each))
        return registered

    def _contents(self, value: Any, place: Place, shape: Shape) -> Slots:
        """What is in a container; and of one of a user's class its attributes."""
        base, contents = shape.base, Slots()
        if base.__len__(value) <= _MOST_PLAIN or not _looks_plain(value, base):
            read = self._items if base is dict else self._elements
            contents = read(value, place, base)
        return contents + (self._attributes(value, place, shape) if shape.users else [])

    def _items(self, value: Any, place: Place, base: Any) -> Slots:
        items, way = list(islice(dict.items(value), max(self._left, 0))), slots.ITEM
        # One odd key is enough: a look-up of any other may compare with it.
        if not all(hashes_plainly(key) for key, _ in items):
            # Every look at one is a search.
            way, items = slots.ODD_ITEM, items[:_MOST_ODD]
        entries: Slots = []
        for key, each in items:
            text = repr(key) if type(key) in _PLAIN_KEYS else f"<{name_of(type(key))}>"
            entries.append((Place(place, f"[{text}]", way, value, key), each))
        return entries

    def _elements(self, value: Any, place: Place, base: Any) -> Slots:
        """Those of a list, deque, tuple or set."""
        held = list(islice(base.__iter__(value), max(self._left, 0)))
        if base is set and all(self._shapes[type(each)].kind is Kind.PLAIN for each in held):
            self.places.numbers.append(Place(place, "", slots.MEMBERS, value))
            return []
        fields = namespace_of(type(value)).get("_fields") if base is tuple else ()
        elements: Slots = []
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

    def _referred(self, value: Any, place: Place, shape: Shape) -> Slots:
        """What a weak reference or a context variable refers to now."""
        is_weak = shape.base is weakref.ref
        label, way = ("()", slots.TARGET) if is_weak else (".get()", slots.CONTEXT_VALUE)
        slot = Place(place, label, way, value)
        return [(slot, slot.get())]

    def _seen_through(self, value: Any, place: Place, shape: Shape) -> Slots:
        """A wrapper of graphrt; a view of a dict, whose methods would run the mapping's own."""
        inner = [value.unwrap()] if shape.kind is Kind.WRAPPER else gc.get_referents(value)
        return _fixed(place, inner)

    # Code ----------------------------------------------------------------------------------------

    def _function(self, value: Any, place: Place, shape: Shape) -> Slots:
        """A function's closure; and if it is a user's, its defaults, attributes and globals too."""
        before, code = "" if place.owner is None else ", ", value.__code__
        library = is_library(str(value.__globals__.get("__name__")))
        variables: Slots = []
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            slot = Place(place, f"{before}closure {name}", slots.CELL, cell)
            each = slot.get()
            # torch's decorators (`no_grad`) hold the user's function; their numbers are torch's.
            if not library or self._shapes[type(each)].kind is not Kind.PLAIN:
                variables.append((slot, each))
        variables += self._attributes(value, place, shape)
        if library:
            return variables
        slot = Place(place, ".__code__", slots.FIELD, value, _FUNCTION["__code__"])
        self.places.code.append((slot, code))
        values = value.__defaults__ or ()
        defaults = Place(place, "", slots.FIELD, value, _FUNCTION["__defaults__"])
        with_default = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        for index, (name, each) in enumerate(zip(with_default, values, strict=False)):
            slot = Place(place, f"{before}default {name}", slots.TUPLE_ITEM, defaults, index)
            variables.append((slot, each))
        named = value.__kwdefaults__ or {}
        if named:
            slot = Place(place, ".__kwdefaults__", slots.FIELD, value, _FUNCTION["__kwdefaults__"])
            self.places.code.append((slot, named))
        for name, each in dict.items(named):
            slot = Place(place, f"{before}default {name}", slots.ITEM, named, name)
            variables.append((slot, each))
        self.take(variables)
        names = _names_in(code)
        self._read_named(names)
        self._globals(place, value.__globals__, names)
        return []

    def _read_named(self, names: set[str]) -> None:
        """Code that was read names these: read the methods that waited for one of them."""
        if self._hops >= _MOST_HOPS:
            return
        self._named |= names
        for name in sorted(names & self._unnamed.keys()):
            for place, value in self._unnamed.pop(name):
                self._method(place, value)

    def _globals(self, owner: Place, held: dict[str, Any], names: set[str]) -> None:
        """What `names` are among the globals `held` of a user's module, and in modules there."""
        if self._main_globals is None:
            self._main_globals = held
        module = "" if held is self._main_globals else f"{held.get('__name__')}."
        self.places.named.setdefault(id(held), (held, set(), module))[1].update(names)
        for name in sorted(names & held.keys()):
            value, key = held.get(name), (id(held), name)
            if key in self._looked_up or issubclass(type(value), types.ModuleType):
                continue
            if self._by_name(Place(owner, f"global {module}{name}", slots.ITEM, held, name), value):
                self._looked_up.add(key)
        for name in sorted(names):
            # A module may also be imported in the function itself.
            module_named = held.get(name, sys.modules.get(name))
            if issubclass(type(module_named), types.ModuleType):
                inner = slots.module_globals(module_named)
                entry = (id(inner), frozenset(names))
                if not is_library(str(inner.get("__name__"))) and entry not in self._looked_up:
                    self._looked_up.add(entry)
                    self._globals(owner, inner, names)

    def _bound(self, value: Any, place: Place, shape: Shape) -> Slots:
        """A bound method, whose object and function stay what they are."""
        root = place.owner is None
        parts = _fixed(place, [value.__self__], "" if root else ".__self__")
        if type(value) is types.MethodType:
            method = value.__func__
            named = root and type(method) is types.FunctionType
            parts += _fixed(place, [method], f".{method.__name__}" if named else "")
        return parts

    def _partial(self, value: Any, place: Place, shape: Shape) -> Slots:
        parts: Slots = []
        for name in ("func", "args", "keywords"):
            parts += _fixed(place, [vars(functools.partial)[name].__get__(value)], f".{name}")
        return parts + self._attributes(value, place, shape)

    def _class(self, value: Any, place: Place, shape: Shape) -> Slots:
        """The values of a user's class, and those of its methods whose name some code says."""
        values: Slots = []
        for name, each in namespace_of(value).copy().items():
            kind = self._shapes[type(each)].kind
            dunder = name.startswith("__") and name.endswith("__")
            slot = Place(place, f"{name_of(value)}.{name}", slots.CLASS_ATTRIBUTE, value, name)
            if kind is not Kind.FUNCTION and kind is not Kind.DESCRIPTOR and kind is not Kind.CLASS:
                if not dunder:
                    values.append((slot, each))
            elif name in self._named or (dunder and name not in _ONLY_IF_NAMED):
                self._method(slot, each)
            else:
                self._unnamed.setdefault(name, []).append((slot, each))
        return values

    def _method(self, place: Place, value: Any) -> None:
        self.places.code.append((place, value))
        self._by_name(Place(place.owner, place.label, FIXED, value), value)

    def _descriptor(self, value: Any, place: Place, shape: Shape) -> Slots:
        """The functions in a property, a static or a class method."""
        held = gc.get_referents(value)
        if type(value) is functools.cached_property:
            held.append(vars(value)["func"])
        # Beside the functions it has a text and, since it was asked for, a `__dict__`.
        others = (Kind.PLAIN, Kind.CONTAINER)
        return _fixed(place, [each for each in held if self._shapes[type(each)].kind not in others])

    def _cached(self, value: Any, place: Place, shape: Shape) -> Slots:
        """A function with an `lru_cache`: what is in the cache now, and the function."""
        held = gc.get_referents(value)
        # Without a size the results are in a dict, else they are held one by one.
        held += [each for table in held if type(table) is dict for each in dict.values(table)]
        results = [each for each in held if self._shapes[type(each)].base in (torch.Tensor, tuple)]
        return _fixed(place, results, ", cached") + _fixed(place, [value.__wrapped__])


def _fixed(place: Place, values: Iterable[Any], label: str = "") -> Slots:
    return [(Place(place, label, FIXED, each), each) for each in values]


def _is_skipped(kind: Kind, value: Any) -> bool:
    """Whether an object of these kinds is not entered: a class of a library, a function of C."""
    if kind is Kind.CLASS:
        return is_library(slots.module_of(value))
    if kind is Kind.BOUND:
        return value.__self__ is None or type(value.__self__) is types.ModuleType
    return True


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
    """Whether a long container is not worth reading: of plain values, by a sample."""
    sample = islice(dict.values(value) if base is dict else base.__iter__(value), _SAMPLE)
    return all(shape_of(type(each)).kind is Kind.PLAIN for each in sample)


def _names_in(code: types.CodeType) -> set[str]:
    """Names in code, and in the functions that are in it."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names |= _names_in(constant)
    return names


_READERS: dict[Kind, Callable[[Walk, Any, Place, Shape], Slots]] = {
    **dict.fromkeys((Kind.OBJECT, Kind.MODULE, Kind.TENSOR), Walk._attributes),
    Kind.CONTAINER: Walk._contents,
    Kind.REFERENCE: Walk._referred,
    **dict.fromkeys((Kind.WRAPPER, Kind.PROXY), Walk._seen_through),
    Kind.FUNCTION: Walk._function,
    Kind.BOUND: Walk._bound,
    Kind.PARTIAL: Walk._partial,
    Kind.CLASS: Walk._class,
    Kind.DESCRIPTOR: Walk._descriptor,
    Kind.CACHED: Walk._cached,
}
