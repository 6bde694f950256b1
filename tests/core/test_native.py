"""The compiled extension: how it is built and found, and that its writer matches Python's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from graphrt import Batch
from graphrt.core.base.native_sources import fingerprints
from graphrt.core.dispatch.reasons import Dispatch
from tests import starts
from tests.core.native_build import LOAD, ROOT, build, built_by, run

FETCHED = ("test_repeated_steps.py", "test_input_ring.py", "test_slots.py", "test_capture_next.py")

# Says at the end how often the build wrote a slot.
PLUGIN = f"""{LOAD}
calls, writer = [0], module.Writer

def counted(**given):
    write = writer(**given)

    def call(*arguments):
        found = write(*arguments)
        calls[0] += found
        return found

    return call

module.Writer = counted
import pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:-1]])
print("slots:", calls[0])
raise SystemExit(code)
"""


# Where it is built, these run with it as ordinary tests.
@pytest.mark.long
def test_the_tests_of_fetched_inputs_pass_with_the_compiled_extension(built: Path) -> None:
    tests = [ROOT / "tests" / "core" / name for name in FETCHED]
    assert int(run(PLUGIN, *tests, built).rpartition("slots:")[2]) > 1000


@pytest.mark.long
def test_the_tests_of_watched_dicts_pass_with_the_compiled_extension(built: Path) -> None:
    assert " passed" in run(PLUGIN, ROOT / "tests" / "core" / "test_dict_watch.py", built)


def test_the_extension_is_built_by_default_but_not_with_graphrt_native_0(
    built: Path, tmp_path: Path
) -> None:
    assert [path.name for path in build(tmp_path / "default", {})] == [built.name]
    assert build(tmp_path / "off", {"GRAPHRT_NATIVE": "0"}) == []


def test_without_a_compiler_the_extension_is_skipped_with_a_log_line(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    libraries, said = built_by(tmp_path, {"CC": str(tmp_path / "no-compiler")})
    assert libraries == []
    assert [line for line in said.splitlines() if "_native" in line and "failed" in line]


STATE = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from graphrt.core.base._native_door import NativePath, native_state
print(f"{NativePath is None}: {native_state}")
"""


def test_a_package_without_the_extension_says_how_to_build_the_extension(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "graphrt", tmp_path / "graphrt", ignore=left_out)
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "GRAPHRT_NATIVE": ""}
    done = starts.run("-c", STATE, cwd=tmp_path, env=environ, check=True)
    assert done.stdout.startswith("True: it was not built; install graphrt again where there is a")


@pytest.mark.parametrize(
    ("changed", "line", "is_used"),
    [
        ("graphrt/core/runner/engine.py", "", True),
        ("graphrt/core/runner/engine.py", "# A comment.", True),
        ("graphrt/core/runner/engine.py", '"""A text."""', True),
        ("graphrt/core/runner/engine.py", "x = 1", False),
        pytest.param("graphrt/trust/glances.py", "x = 1", False, marks=pytest.mark.trust),
        ("native/path.c", "", False),
    ],
)
def test_an_extension_built_from_other_code_is_not_used(
    built: Path, tmp_path: Path, changed: str, line: str, is_used: bool
) -> None:
    for name in ("native", "graphrt"):
        left_out = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    shutil.copy(built, tmp_path / "graphrt" / "core" / "base")
    with (tmp_path / changed).open("a") as file:
        file.write(f"{line}\n")
    for switch in ("", "0"):
        environ = os.environ | {"PYTHONPATH": str(tmp_path), "GRAPHRT_NATIVE": switch}
        done = starts.run("-c", STATE, cwd=tmp_path, env=environ, check=True)
        lines = done.stdout.splitlines()
        if switch:
            assert lines == ["True: GRAPHRT_NATIVE=0 leaves it out"]
        elif is_used:
            assert lines == ["False: in use"]
        else:
            assert len(lines) == 2
            assert lines[0].startswith("steps run in Python, not in C: it was built from other")
            assert lines[1].startswith("True: it was built from other sources")


def test_an_extension_is_used_in_a_package_without_trust(built: Path, tmp_path: Path) -> None:
    for name in ("native", "graphrt"):
        left_out = shutil.ignore_patterns("__pycache__", "*.so", "trust")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    shutil.copy(built, tmp_path / "graphrt" / "core" / "base")
    with (tmp_path / "graphrt/core/runner/engine.py").open("a") as file:
        file.write("\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "GRAPHRT_NATIVE": ""}
    done = starts.run("-c", STATE, cwd=tmp_path, env=environ, check=True)
    assert done.stdout.splitlines() == ["False: in use"]


@pytest.mark.trust
def test_the_package_computes_each_source_fingerprint_of_the_extension() -> None:
    names = fingerprints(ROOT / "graphrt")
    assert {*names} == {"TWINS", "TRUST", "SOURCES"}


def test_the_fields_that_c_reads_by_position_are_where_it_reads_them() -> None:
    """Slots are found by name; of these tuples native/path.c reads the places."""
    assert Batch._fields[:2] == ("num_tokens", "num_reqs")
    assert Dispatch._fields[3] == "slot"


RANDOM_STEPS = f"""{LOAD}
import random, torch
from graphrt import Batch, InputSpec
from graphrt.cuda.ring import writers
from tests.core.test_repeated_steps import runner_of
from tests.core.soft_ring import RingPlatform

native = writers.NativeWriter
assert native is module.Writer
rng = random.Random(7)
DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.float16, torch.float64)
written = 0
for program in range(30):
    specs = {{}}
    for number in range(rng.randint(1, 6)):
        axis, width = rng.choice(("tokens", "reqs", "reqs+1")), rng.choice(((), (1,), (3,), (8,)))
        dtype = rng.choice(DTYPES)
        pad = "repeat" if rng.random() < 0.4 else rng.randint(0, 100)
        specs[f"x{{number}}"] = InputSpec(dtype, (axis, *width), pad=pad)
    seed = rng.randrange(1 << 30)
    found = []
    for kind in (None, native):
        writers.NativeWriter = kind
        torch.manual_seed(seed)
        steps = random.Random(seed)
        runner = runner_of(specs)
        outputs = []
        for _ in range(40):
            rows = steps.choice((3, 3, 3, 4, 5, 8))
            given = {{
                name: torch.randint(0, 99, spec.sizes(rows, rows)).to(spec.dtype)
                for name, spec in specs.items()
            }}
            place = steps.random()
            if place < 0.2:
                views = runner.inputs.layout(rows if rows in (4, 8) else 8, 8).views
                given = {{n: views[n][: len(v)].copy_(v) for n, v in given.items()}}
            # A step writes over views that are of another layout than its own.
            for _ in range(1 if place < 0.2 and rows < 5 else 2):
                outputs.append(runner(Batch(rows, rows, 1), **given).clone())
        moves = runner.inputs.layout(8, 8).known.values()
        written += sum(type(each.alike) is module.Writer for each in moves)
        ring = runner.inputs.transport.ring
        outputs.append(torch.tensor([ring.count, ring.words[0]]))
        found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs), specs
print("writers:", written)
"""


def test_random_steps_have_equal_outputs_with_and_without_the_extension(built: Path) -> None:
    assert int(run(RANDOM_STEPS, built).rpartition("writers:")[2]) > 20


WRONG = f"""{LOAD}
import gc, torch
from graphrt.core.base._native_door import MOST_INPUTS, NativeWriter
from graphrt.cuda.ring.moves import packed
assert NativeWriter is module.Writer

class Ring:
    __slots__ = ("count", "free_until", "unsure", "pending", "cycle", "__weakref__")

    def take(self):
        raise InterruptedError("the device is not ready")

def ring():
    found = Ring()
    found.count, found.free_until, found.unsure, found.pending = 0, 2, False, None
    return found

memory = torch.zeros(64, dtype=torch.int64)
x = torch.arange(2) + 5
checked = [True]
usual = dict(
    ring=ring(), names=("x",), check=lambda *_: checked[0], address_of=torch.Tensor.data_ptr,
    unlike=(KeyError, RuntimeError), memory=memory,
    places=(memory.data_ptr(), 2, 256, 128, 64, 1, 16), bounds=(4096, 0, 0),
    copies=packed([(0, 0, 8, 16)]), apart=(1 << 63, b"", b""), home=None, homes=None,
)

def make(**other):
    return NativeWriter(**(usual | other))

def fails(error, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except error:
        return
    raise AssertionError((error, arguments, named))

class NoSlots:
    count = free_until = unsure = pending = 0

fails(AttributeError, make, ring=object())
fails(TypeError, make, ring=NoSlots())
fails(AttributeError, make(ring=Ring()), {{"x": x}}, list, True)
fails(TypeError, make, names=["x"])
fails(TypeError, make, copies=3)
fails(TypeError, make, places=(1, 2))
fails(ValueError, make, names=("x",) * (MOST_INPUTS + 1))
fails(ValueError, make, home=(0, b"", b""), homes=packed([(1, 2)]))
write, fetched = make(), []
fails(TypeError, write)
fails(TypeError, write, {{"x": x}}, fetched.append)
gone = torch.ones(2)
gone.untyped_storage().resize_(0)
for values in ({{}}, {{"y": x}}, {{"x": gone}}):
    assert write(values, list, True) is False
checked[0] = False
assert write({{"x": x}}, list, True) is False
checked[0] = 1 / 3  # only what is True counts
assert write({{"x": x}}, list, True) is False
checked[0] = True
fails(ZeroDivisionError, make(check=lambda *_: 1 / 0), {{"x": x}}, list, True)
assert make(check=lambda *_: {{}}["a"])({{"x": x}}, list, True) is False
fails(TypeError, write, {{"x": 3}}, list, True)
assert usual["ring"].count == 0 and not usual["ring"].unsure and not memory.any()

assert write({{"x": x}}, list, True) is True
state = usual["ring"]
assert (state.count, state.unsure, state.pending) == (0, True, list)
assert memory[32:42].tolist() == [0, -(1 << 63), 0, 0, 0, 0, 0, 0, 0, 5] and memory[42] == 6
assert memory[16] == 1
fails(InterruptedError, write, {{"x": x}}, list, True)  # the step before is unsure
state.count, state.unsure = 1, False
assert write({{"x": x + 1}}, lambda: fetched.append(state.unsure), False) is True
assert (fetched, state.count, state.unsure, state.pending) == ([True], 2, False, None)
assert memory[48] == 1 and memory[57:59].tolist() == [6, 7]
fails(InterruptedError, write, {{"x": x}}, list, True)  # all slots are in use
state.free_until = 9
memory[1] = 4
fails(InterruptedError, write, {{"x": x}}, list, True)  # the device found a fault
memory[1] = 0
fails(ZeroDivisionError, write, {{"x": x}}, lambda: 1 / 0, False)
assert state.unsure and state.count == 2

state.unsure = False
before = [sys.getrefcount(each) for each in (x, list, usual["check"], None, state)]
for _ in range(2000):
    write({{"x": x}}, list, True)
    state.unsure = False
    write({{"x": gone}}, list, True)
state.pending = None
after = [sys.getrefcount(each) for each in (x, list, usual["check"], None, state)]
assert all(abs(a - b) < 20 for a, b in zip(after, before)), (before, after)

class Names(dict):
    pass

assert make()(Names(x=x), list, True) is True  # any mapping
state.cycle = [make(ring=state)]
import weakref
dies = weakref.ref(state)
del state, write, usual["ring"]
gc.collect()
assert dies() is None
"""


def test_wrong_calls_of_the_compiled_writer_raise_and_write_no_slot(built: Path) -> None:
    run(WRONG, built)
