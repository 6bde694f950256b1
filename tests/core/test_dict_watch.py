"""The C extension's watch of changed dicts, and its glances: quick checks of the host's objects."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphrt.core.base._native_door import NativeGlances, NativeWatch, native_state
from tests import starts

watched = pytest.mark.skipif(
    NativeWatch is None,
    reason=f"dicts are watched in C, on Python 3.12 and 3.13: {native_state}",
)


class Holder:
    def __init__(self) -> None:
        self.scale = 1.0
        self.name = "a"


def watch_of(*dicts: Any, keys: frozenset[Any] | None = None) -> Any:
    watch = NativeWatch(itertools.repeat(True))
    watch.aim({id(each): (each, keys) for each in dicts})
    return watch


def keys_of(watch: Any) -> list[Any]:
    return sorted((key for _, key in watch.take()), key=repr)


def set_in_a_loop(held: Holder) -> None:
    for number in range(3000):
        held.scale = number


CHANGES: dict[str, tuple[Callable[[Holder], object], list[Any]]] = {
    "attribute": (lambda held: setattr(held, "scale", 2.0), ["scale"]),
    "attribute, in a specialised loop": (set_in_a_loop, ["scale"]),
    "object.__setattr__": (lambda held: object.__setattr__(held, "scale", 2.0), ["scale"]),
    "a new attribute": (lambda held: setattr(held, "other", 2.0), ["other"]),
    "deleted": (lambda held: delattr(held, "scale"), ["scale"]),
    "through the dict": (lambda held: vars(held).update(scale=3, name=4), ["name", "scale"]),
    "a key that is equal, and another object": (
        lambda held: vars(held).__setitem__("".join(["sca", "le"]), 4),
        ["scale"],
    ),
    "cleared": (lambda held: vars(held).clear(), [None]),
    "the same object again": (lambda held: setattr(held, "name", held.name), []),
    "popped": (lambda held: vars(held).pop("name"), ["name"]),
}


@watched
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_watched_dict_is_noted_once_for_the_next_look(name: str) -> None:
    change, keys = CHANGES[name]
    held = Holder()
    watch = watch_of(vars(held))
    assert next(watch) and not watch.has_change
    change(held)
    assert watch.has_change == bool(keys)
    assert next(watch) is (not keys)
    assert keys_of(watch) == keys
    assert next(watch) is True
    watch.stop()
    held.scale = held.other = 7.0  # type: ignore[attr-defined]
    assert not watch.has_change


@watched
def test_an_unchanged_watch_yields_the_values_of_its_inner_iterator() -> None:
    held = Holder()
    watch = watch_of(vars(held))
    watch.looks = iter([True, False])
    assert [next(watch), next(watch)] == [True, False]
    with pytest.raises(StopIteration):
        next(watch)
    held.scale = 2
    assert next(watch) is False
    with pytest.raises(TypeError, match="iterator"):
        watch.looks = []


@watched
def test_starting_a_watch_keeps_attribute_order_and_values() -> None:
    class Many:
        pass

    for count in (0, 1, 2, 29, 30, 31, 100):
        held = Many()
        for number in range(count):
            setattr(held, f"a{number}", [number])
        before = [*vars(held).items()]
        watch = watch_of(vars(held))
        assert [*vars(held).items()] == before
        assert not watch.has_change
        held.last = 1
        assert keys_of(watch) == ["last"]


@watched
def test_classes_named_globals_and_ordered_dicts_can_be_watched() -> None:
    class Model:
        scale = 1

        def forward(self) -> int:
            return 1

    watch = watch_of(Model)
    Model.scale = 2
    Model.forward = lambda self: 2  # type: ignore[method-assign]
    assert sorted(watch.take(), key=str) == [(Model, "forward"), (Model, "scale")]
    Model.added = 1  # type: ignore[attr-defined]
    assert keys_of(watch) == ["added"]

    watch = watch_of(globals(), keys=frozenset({"NAMED"}))
    globals()["UNNAMED"] = 1
    assert not watch.has_change
    globals()["NAMED"] = 1
    assert keys_of(watch) == ["NAMED"]
    del globals()["NAMED"], globals()["UNNAMED"]
    assert keys_of(watch) == ["NAMED"]

    hooks: OrderedDict[int, Any] = OrderedDict()
    watch = watch_of(hooks)
    hooks[3] = print
    del hooks[3]
    assert keys_of(watch) == [3]


@watched
def test_a_watch_calls_no_hash_or_eq_and_keeps_no_values_alive() -> None:
    calls: list[str] = []

    class Key:
        def __hash__(self) -> int:
            calls.append("hash")
            return 7

        def __eq__(self, other: object) -> bool:
            calls.append("eq")
            return self is other

    class Text(str):
        __slots__ = ()

        def __hash__(self) -> int:
            calls.append("hash")
            return str.__hash__(self)

        def __eq__(self, other: object) -> bool:
            calls.append("eq")
            return str.__eq__(self, other)

    class Value:
        def __eq__(self, other: object) -> bool:
            calls.append("eq of a value")
            return True

    plain: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    watch = watch_of(seen, keys=frozenset({"a"}))
    counts = []
    for held in (plain, seen):
        calls.clear()
        for key in (Key(), Text("a"), Text("b")):
            held[key] = Value()
            held[key] = Value()
            del held[key]
        counts.append([*calls])
    assert counts[0] == counts[1]
    # What is no plain key may be any.
    assert keys_of(watch) == [None]
    value = Value()
    gone = weakref.ref(value)
    seen["a"] = value
    del seen["a"], value
    assert gone() is None
    assert keys_of(watch) == ["a"]


@watched
def test_a_dict_change_during_an_exception_leaves_the_exception_unchanged() -> None:
    held = Holder()
    watch = watch_of(vars(held))

    class Leaves:
        def __del__(self) -> None:
            held.scale = 3

    def fails() -> None:
        leaves = Leaves()  # noqa: F841 - its end changes the dict while the error passes
        raise KeyError("the error")

    with pytest.raises(KeyError, match="the error"):
        fails()
    gc.collect()
    assert keys_of(watch) == ["scale"]


@watched
def test_changes_of_an_ignored_key_are_not_noted() -> None:
    held = Holder()
    watch = watch_of(vars(held))
    watch.ignore(vars(held), "scale")
    held.scale = 5
    assert not watch.has_change
    held.third = 1
    assert keys_of(watch) == ["third"]
    watch.stop()
    watch.aim({0: (vars(held), None)})
    held.scale = 6
    assert keys_of(watch) == ["scale"]


@watched
def test_two_watches_of_the_same_dict_both_note_changes_and_stop_independently() -> None:
    held = Holder()
    one, two = watch_of(vars(held)), watch_of(vars(held))
    held.scale = 2
    assert keys_of(one) == keys_of(two) == ["scale"]
    one.stop()
    held.scale = 3
    assert not one.has_change
    assert keys_of(two) == ["scale"]
    one.aim({0: (vars(held), None)})
    del two
    gc.collect()
    held.scale = 4
    assert keys_of(one) == ["scale"]
    one.aim({})
    held.scale = 5
    assert not one.has_change
    assert one.count == 0


@watched
def test_more_than_a_thousand_changes_are_cut_to_a_single_unnamed_change() -> None:
    held: dict[int, int] = {}
    watch = watch_of(held)
    for number in range(5000):
        held[number] = number
    changes = watch.take()
    assert len(changes) == 1025
    assert (held, None) in changes


@pytest.mark.trust
@watched
def test_all_watches_share_a_single_python_watcher_id() -> None:
    # In a process of its own: a runner that another test has left holds an id.
    script = """
import ctypes, gc, itertools
import graphrt.trust.host_watch
from graphrt.core.base._native_door import NativeWatch
callback = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p
)(lambda *_: 0)
def taken_id():
    try:
        return ctypes.pythonapi.PyDict_AddWatcher(callback)
    except RuntimeError:
        return None
def watch_of(held):
    watch = NativeWatch(itertools.repeat(True))
    watch.aim({0: (held, None)})
    return watch
taken = list(iter(taken_id, None))
assert len(taken) >= 2
try:
    watch_of({})
except RuntimeError:
    ctypes.pythonapi.PyDict_ClearWatcher(taken.pop())
else:
    raise AssertionError("no id was left for a watch")
watches = [watch_of({}) for _ in range(20)]
assert taken_id() is None
del watches
gc.collect()
assert taken_id() is not None
"""
    done = starts.run("-c", script)
    assert done.returncode == 0, done.stderr


@watched
def test_watching_a_non_dict_raises_and_keeps_the_watch_as_before() -> None:
    held, other = Holder(), Holder()
    watch = watch_of(vars(held))
    for wrong in ({0: (vars(other), None), 1: (3, None)}, {0: (vars(other), "keys")}, [1], {0: 3}):
        with pytest.raises(TypeError):
            watch.aim(wrong)
        other.scale = 2
        assert not watch.has_change
    held.scale = 2
    assert keys_of(watch) == ["scale"]
    with pytest.raises(TypeError):
        NativeWatch([])
    with pytest.raises(TypeError):
        watch.ignore(1)


@watched
def test_a_reference_cycle_through_a_watch_is_garbage_collected() -> None:
    held = Holder()
    watch = watch_of(vars(held))
    held.watch = watch  # type: ignore[attr-defined]
    gone = weakref.ref(held)
    del held, watch
    gc.collect()
    assert gone() is None


@watched
def test_a_watch_stays_right_while_other_threads_change_its_dicts() -> None:
    holders = [Holder() for _ in range(20)]
    watches = [watch_of(*map(vars, holders)) for _ in range(3)]
    done = threading.Event()

    def change() -> None:
        numbers = random.Random(0)
        while not done.is_set():
            held = numbers.choice(holders)
            setattr(held, numbers.choice("abcdef"), object())

    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(2000):
        watch = watches[number % 3]
        some = holders[number % 20 :]
        watch.aim({id(each): (vars(each), None) for each in some})
        watch.take()
        next(watch)
    done.set()
    for thread in threads:
        thread.join()
    holders[-1].scale = 7
    assert all("scale" in keys_of(watch) for watch in watches)


@pytest.mark.trust
@watched
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_notes_no_changes_until_its_watch_is_aimed_again() -> None:
    script = """
import itertools, os, sys
import graphrt.trust.host_watch
from graphrt.core.base._native_door import NativeWatch
class Holder: pass
held = Holder()
watch = NativeWatch(itertools.repeat(True))
watch.aim({0: (vars(held), None)})
pid = os.fork()
held.scale = 1
if pid == 0:
    before = watch.has_change
    watch.aim({0: (vars(held), None)})
    held.scale = 2
    os._exit(0 if (before, watch.has_change) == (False, True) else 1)
_, status = os.waitpid(pid, 0)
assert watch.has_change
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert starts.run("-c", script).returncode == 0


@pytest.mark.trust
@watched
def test_a_watch_still_active_at_interpreter_exit_causes_no_error() -> None:
    script = """
import itertools
import graphrt.trust.host_watch
from graphrt.core.base._native_door import NativeWatch
class Holder:
    def __del__(self): vars(self).clear(); globals().clear()
held = Holder()
watch = NativeWatch(itertools.repeat(True))
watch.aim({0: (vars(held), None), 1: (globals(), None), 2: (Holder, None)})
vars(held)["self"] = held
print("done", flush=True)
"""
    done = starts.run("-c", script, finalized=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.skipif(NativeGlances is None, reason=f"glances in C: {native_state}")
def test_native_glances_check_a_few_places_each_turn_until_all_were_checked() -> None:
    missing, held = object(), {"a": 1, "b": 2}
    elements = [5, 6]

    def cell() -> int:
        return variable

    variable = 7
    holder = Holder()
    looks: tuple[Any, ...] = (
        (held, "a", held["a"]),
        (held, "c", missing),
        (elements, 1, elements[1]),
        (elements, 2, missing),
        (cell.__closure__[0], None, variable),  # type: ignore[index]
        (lambda: holder.name, None, holder.name),
        (held, "b", held["b"]),
        (holder, Holder, vars(holder)),
        ((held, elements, {1}, holder.__dict__), None, (2, 2, 1, 2)),
    )

    def until_found() -> int | None:
        glances: Iterator[bool] = NativeGlances(  # type: ignore[misc]
            slots=looks,
            tensors=(),
            looks=(2, 1),
            missing=missing,
            over=itertools.repeat(True),
        )
        return next((at for at in range(5) if not next(glances)), None)

    assert until_found() is None
    held["c"] = 1
    assert until_found() == 0
    del held["c"]
    elements.append(3)
    assert until_found() == 1
    elements.pop()
    held["d"] = 1
    assert until_found() == 4
    del held["d"]
    holder.__dict__ = dict(holder.__dict__)
    assert until_found() == 3
    vars(holder).update(name=vars(holder)["name"])
    looks = (*looks[:-2], (holder, Holder, vars(holder)), looks[-1])
    assert until_found() is None
    holder.__class__ = type("Other", (Holder,), {})
    assert until_found() == 3
    holder.__class__ = Holder
    elements[:] = [5, 7]
    assert until_found() == 1
    elements[1] = 6
    variable = 8
    assert until_found() == 2
    variable = 7
    holder.name = "b"
    assert until_found() == 2
    holder.name = "a"
    held["b"] = 3
    assert until_found() == 3


@pytest.mark.skipif(NativeGlances is None, reason=f"glances in C: {native_state}")
def test_native_glances_distinguish_attributes_of_a_dict_subclass_from_its_items() -> None:
    class Table(dict[Any, Any]):
        pass

    table, by_class = Table(a=1), {Table: 2}
    looks: list[tuple[Any, ...]] = [
        (table, Table, vars(table)),
        (by_class, Table, by_class[Table]),
        (table, "a", table["a"]),
    ]

    def hold() -> list[bool]:
        glances: Iterator[bool] = NativeGlances(  # type: ignore[misc]
            slots=tuple(looks),
            tensors=(),
            looks=(1, 1),
            missing=object(),
            over=itertools.repeat(True),
        )
        return [next(glances) for _ in looks]

    assert hold() == [True, True, True]
    vars(table)["b"] = table["b"] = 1
    assert hold() == [True, True, True]
    by_class[Table], table["a"] = 3, 2
    assert hold() == [True, False, False]
    table.__dict__ = {}
    assert hold() == [False, False, False]


@pytest.mark.skipif(NativeGlances is None, reason=f"glances in C: {native_state}")
def test_native_glances_raise_errors_of_their_looks_and_compare_addresses_as_integers() -> None:
    address = 1 << 60

    def fails(held: object) -> None:
        raise RuntimeError("no memory")

    def glances(*tensors: Any) -> Iterator[bool]:
        return NativeGlances(  # type: ignore[misc]
            slots=(),
            tensors=tensors,
            looks=(1, 1),
            missing=None,
            over=itertools.repeat(True),
        )

    assert next(glances((address, lambda held: held + 1 - 1, address)))
    assert not next(glances((address, lambda held: held + 1, address)))
    assert next(glances()) is True
    with pytest.raises(RuntimeError, match="no memory"):
        next(glances((1, fails, 1)))
    with pytest.raises(TypeError):
        glances((1, 2))


@pytest.mark.skipif(NativeGlances is None, reason=f"glances in C: {native_state}")
@pytest.mark.parametrize("index", [-1, -(1 << 20), 2, (1 << 62)])
def test_native_glances_find_nothing_at_an_index_outside_of_a_list(index: int) -> None:
    missing, items = object(), [object(), object()]
    glances: Iterator[bool] = NativeGlances(  # type: ignore[misc]
        slots=((items, index, missing),),
        tensors=(),
        looks=(1, 1),
        missing=missing,
        over=itertools.repeat(True),
    )
    assert next(glances) is True
