"""Which values of functions and operators that are called, not traced, enter the cache key.

Whole starts of a process are in `edits.py`."""

from __future__ import annotations

import functools
import gc
import operator
import warnings
import weakref
from collections import deque
from dataclasses import fields
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.compiler.config
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import graphrt
from graphrt.compile import CompileOptions, compile_module
from graphrt.compile.cache.key.parts import (
    NOT_IN_KEY,
    PARTS,
    Compilation,
    code_settings,
    compiler_variables,
)
from graphrt.compile.cache.key.values import Values
from graphrt.compile.cache.store import CompileCacheWarning
from graphrt.compile.private_torch.inductor import compiler_caches_apart
from graphrt.compile.private_torch.registered import (
    has_compiled_kernels,
    registrations,
    triton_call,
)
from graphrt.compile.split.identity import fingerprint

OTHER: dict[str, Any] = {
    "backend": "inductor",
    "compile_sizes": (7,),
    "dynamic_shapes": "unbacked",
    "splitting_ops": ("aten::mm",),
    "use_inductor_graph_partition": True,
    "cache_dir": "/elsewhere",
    "save_format": "unpacked",
    "autotune": False,
    "full": "pieces",
}
"""Another value for each option."""


def described(value: Any) -> tuple[str, list[str]]:
    values = Values()
    return values.of(value), values.unknown


# The list ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [each.name for each in fields(CompileOptions)])
def test_every_compile_option_is_in_the_key_or_listed_as_not_in_key(name: str):
    assert name in OTHER, "a new option: give it another value here"
    changed = code_settings(CompileOptions(**{name: OTHER[name]})) != code_settings(
        CompileOptions()
    )
    assert changed == (name not in NOT_IN_KEY)


def test_every_option_listed_as_not_in_key_exists_and_has_a_reason():
    assert NOT_IN_KEY.keys() <= {each.name for each in fields(CompileOptions)}
    assert all(NOT_IN_KEY.values())


def test_every_documented_part_of_the_key_is_in_the_key():
    graph = fx.symbolic_trace(lambda x: x + 1)
    compile_options = Compilation(CompileOptions(), graph)
    assert compile_options.key().groups.keys() == PARTS.keys()
    assert compile_options.values.unknown == []


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("TRITON_F32_DEFAULT", True),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("TRITON_CACHE_DIR", False),
        ("TORCHINDUCTOR_COMPILE_THREADS", False),
        ("TRITON_PRINT_AUTOTUNING", False),
        ("HOME", False),
    ],
)
def test_only_environment_variables_that_change_code_enter_the_key(name: str, counts: bool):
    assert (name in compiler_variables({name: "1"})) == counts


# Values --------------------------------------------------------------------------------------


class Holder:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.other = object()

    def apply(self, x: Any) -> Any:
        return x * self.factor


def closed_over(value: Any) -> Any:
    return lambda x: x * value


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Percent(float):
    def __repr__(self) -> str:
        return "some percent"


def reads_an_attribute(holder: Any) -> Any:
    return lambda x: x * holder.factor


def reads_an_attribute_by_text(holder: Any) -> Any:
    return lambda x: x * getattr(holder, "factor", 1.0)


@functools.cache
def kept(factor: float) -> Holder:
    """One that lives on."""
    return Holder(factor)


@pytest.mark.parametrize(
    "of",
    [
        closed_over,
        lambda n: reads_an_attribute(Holder(n)),
        lambda n: Holder(n).apply,
        lambda n: functools.partial(closed_over(1), n),
        lambda n: functools.lru_cache(closed_over(n)),
        lambda n: closed_over([1, {"a": n}]),
        lambda n: closed_over(torch.tensor([1.0, n])),
        lambda n: closed_over(closed_over(n)),
        lambda n: closed_over(staticmethod(closed_over(n))),
        lambda n: closed_over(deque([n])),
        lambda n: closed_over(operator.itemgetter(int(n))),
        lambda n: closed_over(operator.attrgetter(f"factor_{int(n)}")),
        lambda n: closed_over(bytearray([int(n)])),
        lambda n: closed_over(Fraction(n)),
        lambda n: closed_over(Percent(n)),
        lambda n: reads_an_attribute(weakref.ref(kept(n))),
        lambda n: reads_an_attribute(Slotted(n)),
        lambda n: reads_an_attribute_by_text(Holder(n)),
    ],
)
def test_values_held_by_a_called_function_change_the_key(of: Any):
    (one, unknown), (same, _), (other, _) = described(of(2.0)), described(of(2.0)), described(of(3))
    assert one == same != other
    assert unknown == []


# What an operator's body hands on to what it calls.


def scaled(x: Any, holder: Any) -> Any:
    return x * holder.factor


def hands_on(holder: Any) -> Any:
    return lambda x: scaled(x, holder)


def by_keyword(value: Any) -> Any:
    def body(x: Any, *, by: Any = value) -> Any:
        return x * by

    return body


def by_default(value: Any) -> Any:
    def body(x: Any, by: Any = value) -> Any:
        return x if by is None else x * 2

    return body


def key_of_operator(body: Any) -> tuple[str, list[str]]:
    """The key of a graph that calls a composite operator of that body."""
    with torch.library._scoped_library("test_called_body", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", body, "CompositeImplicitAutograd")
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = FakeTensorMode().from_tensor(torch.ones(2))
        graph.output(graph.call_function(torch.ops.test_called_body.op.default, (x,)))
        compilation = Compilation(CompileOptions(), fx.GraphModule({}, graph))
        return compilation.key().digest, compilation.values.unknown


class Finalized:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.itself = None


def test_finalizers_of_garbage_collected_during_tracing_leave_the_key() -> None:
    def body(x: Any) -> Any:
        gc.collect()
        return x * 2

    without_garbage = key_of_operator(body)
    gc.disable()
    try:
        Finalized()
        assert key_of_operator(body) == without_garbage
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "of",
    [
        by_keyword,
        lambda n: by_default((n, 1.0)),
        lambda n: by_default([{"a": n}]),
        lambda n: by_default(torch.float16 if n == 2 else torch.float32),
        lambda n: by_default(np.array(n)),
        lambda n: by_default(Percent(n)),
        lambda n: by_default(Fraction(n)),
        lambda n: hands_on(Holder(n)),
        lambda n: hands_on(Slotted(n)),
        lambda n: hands_on(SimpleNamespace(factor=n)),
        lambda n: hands_on(type("Settings", (), {"factor": n})),
        lambda n: hands_on(type("Settings", (), {"factor": n})()),
    ],
)
def test_values_used_in_the_body_of_an_operator_change_the_key(of: Any):
    one, same, other = key_of_operator(of(2.0)), key_of_operator(of(2.0)), key_of_operator(of(3.0))
    assert one == same and one[0] != other[0]
    assert one[1] == other[1] == []


def test_constants_of_different_type_give_different_keys():
    assert len({described(closed_over(n))[0] for n in (1, 1.0, True, "1", None)}) == 5
    assert described(closed_over(0.0))[0] != described(closed_over(-0.0))[0]


def test_a_list_that_contains_itself_has_a_finite_description():
    held: list[Any] = [1]
    held.append(held)
    assert described(closed_over(held)) == described(closed_over(held))


def test_a_global_counter_that_the_function_advances_leaves_the_key():
    space: dict[str, Any] = {"count": 0, "FACTOR": 2}
    exec("def f(x):\n    global count\n    count += 1\n    return x * FACTOR", space)
    before = described(space["f"])
    space["count"] = 7
    assert described(space["f"]) == before
    space["FACTOR"] = 3
    assert described(space["f"]) != before


def test_a_tensor_too_large_to_read_is_named_as_unknown():
    assert described(closed_over(torch.empty(1 << 23)))[1]
    assert "content of a tensor" in described(closed_over(torch.empty(1 << 23)))[1][0]


# In a graph ----------------------------------------------------------------------------------


def scaled_by(factor: float) -> Any:
    @torch.compiler.allow_in_graph
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return scaled


twice, thrice = scaled_by(2.0), scaled_by(3.0)


@graphrt.opaque("test_key_of_called_code::between", mutates=["out"])
def between(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


def two_closures(x):
    first = twice(x)
    out = torch.empty_like(first)
    between(first, out)
    return thrice(out)


def test_pieces_with_different_closures_of_the_same_name_are_distinct():
    compiled = compile_module(two_closures, ["x"])
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), two_closures(x))
    assert compiled.figures.distinct_pieces == 2


def test_caches_of_torch_are_kept_apart_by_the_key():
    before = torch.compiler.config.cache_key_tag
    with compiler_caches_apart("digest"):
        assert "digest" in torch.compiler.config.cache_key_tag
    assert torch.compiler.config.cache_key_tag == before


# Triton --------------------------------------------------------------------------------------


def launched(kernel: Any, **constants: Any) -> fx.GraphModule:
    """A graph as Dynamo makes it of a launch."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_mutation,
    )

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(4)
    graph.call_function(
        triton_kernel_wrapper_mutation,
        (),
        {
            "kernel_idx": kernel_side_table.add_kernel(kernel),
            "constant_args_idx": kernel_side_table.add_constant_args(constants),
            "grid": [(4, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": {"x": x},
        },
    )
    graph.output(x)
    return fx.GraphModule({}, graph)


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    from tests.compile import triton_kernels

    return triton_kernels


def test_the_fingerprint_of_a_kernel_launch_is_that_of_kernel_and_constants(kernels: Any):
    first = fingerprint(launched(kernels.doubled, BLOCK=64))
    assert fingerprint(launched(kernels.doubled, BLOCK=64)) == first, "in a later process too"
    assert fingerprint(launched(kernels.doubled, BLOCK=128)) != first
    assert fingerprint(launched(kernels.tripled, BLOCK=64)) != first


def test_a_triton_call_separates_kernel_and_constants_from_arguments(kernels: Any):
    node = next(n for n in launched(kernels.doubled, BLOCK=8).graph.nodes if n.kwargs)
    call = triton_call(node)
    assert call is not None and call[1] == (kernels.doubled, {"BLOCK": 8})
    assert set(call[0]) == {"grid", "tma_descriptor_metadata", "kwargs"}


@pytest.mark.cuda
def test_user_kernels_are_compiled_once_and_then_loaded(kernels: Any, tmp_path: Any):
    options = CompileOptions(backend="inductor", cache_dir=str(tmp_path))
    x = torch.randn(8, 16, device="cuda")
    expected = kernels.forward(x)
    starts = []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompileCacheWarning)
            compiled = compile_module(kernels.forward, ["x"], options=options)
            torch.testing.assert_close(compiled(x), expected)
        starts.append((compiled.figures.compilations, compiled.figures.loads))
        torch._dynamo.reset()
    # Code for one row is made apart where its strides are others.
    made = starts[0][0]
    assert made in (1, 2) and starts == [(made, 0), (0, made)]


@graphrt.opaque("graphrt_called::copied", mutates=["out"])
def copied(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


@pytest.mark.parametrize(
    "file",
    [b"\xc0\x80\xff", b"", b"lib.so", b"a\n:: [ b.cpp"],
    ids=["raw", "none", "other", "lines"],
)
def test_the_file_that_torch_prints_of_an_operator_in_python_does_not_count(file, monkeypatch):
    """torch has let go of its name, and prints what is there by now."""
    named = torch.ops.graphrt_called.copied.default
    expected = registrations(named)
    dump = torch._C._dispatch_dump("graphrt_called::copied").encode()
    at = dump.index(b"registered at ") + len("registered at ")
    of_today = dump[at : dump.index(b"define.py:") + len("define.py")]
    assert dump.count(of_today) > 1
    monkeypatch.setattr(torch._C, "_dispatch_dump", lambda _: dump.replace(of_today, file).decode())
    assert registrations(named) == expected
    assert not has_compiled_kernels(named)


def test_kernels_of_torch_are_compiled_ones():
    assert has_compiled_kernels(torch.ops.aten.mm.default)


def test_a_kernel_in_python_that_is_registered_for_no_key_is_no_compiled_one():
    with torch.library._scoped_library("graphrt_called", "FRAGMENT") as library:
        library.define("any_key(Tensor x) -> Tensor")
        library.impl("any_key", lambda x: x.clone())
        assert not has_compiled_kernels(torch.ops.graphrt_called.any_key.default)
