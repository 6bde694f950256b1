"""The compiled replay of a step, and what compares batches, do what Python does."""

from __future__ import annotations

from pathlib import Path

from tests.core.native_build import LOAD, run

STEPS = f"""{LOAD}
from tests.core import native_replays
native_replays.main()
"""


def test_random_steps_and_faults_leave_the_same_with_it_and_without(built: Path) -> None:
    fast, _, given = run(STEPS, built).rpartition("fast: ")[2].split()
    assert int(fast) > int(given) / 5


SAME = f"""{LOAD}
import itertools
from graphrt import Batch, GraphMode
from graphrt.core.runner.steps.again import is_plain, same, same_in_python

assert type(same) is module.Same
yes = type("Yes", (), {{"__eq__": lambda *_: True, "__hash__": lambda _: 0}})()
no = type("No", (), {{"__eq__": lambda *_: len(3), "__hash__": lambda _: 0}})()
count = type("Count", (int,), {{}})
plain = Batch(1)
odd = {{
    0: (3, 4, 3.0, True, count(3), yes, no, 2**70),
    1: (3, None, 4, count(3), yes),
    2: (None, 1, 1.0, True, yes),
    3: (plain.bounds, (5,), [], yes),
    4: (0, 1, False, yes),
    5: (None, "a", yes),
    6: (plain.exclude, frozenset({{GraphMode.FULL}}), frozenset(), yes),
}}
made = [tuple.__new__(Batch, fields) for fields in itertools.product(*odd.values())]
lasts = [batch for batch in made if is_plain(batch)] + [Batch(2**70, 3), Batch(3, 3), None]
assert len(lasts) > 10
equal = 0
for batch in [*made, (3, 3), 3, None, plain, Batch(3, 3), Batch(2**70, 3)]:
    for last in lasts:
        assert same(batch, last) is same_in_python(batch, last), (batch, last)
        equal += same(batch, last)
print("equal:", equal)

def fails(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except TypeError:
        return
    raise AssertionError((arguments, named))

fails(same)
fails(same, plain)
fails(same, plain, last=plain)
fails(module.Same, int, (), ())
fails(module.Same, 3, (), ())
"""


def test_batches_are_compared_as_python_compares_them(built: Path) -> None:
    assert int(run(SAME, built).rpartition("equal:")[2]) > 10
