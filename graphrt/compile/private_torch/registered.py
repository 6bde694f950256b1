"""An operator's registrations: its schema, and the Python functions behind it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx

from graphrt.compile.private_torch.names import NAMES, private_attribute
from graphrt.compile.private_torch.operators import is_higher_order, overload_name
from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.private_torch import PrivateName
from graphrt.core.base.thread_mode import FREE_KEYS

_NO_KEY = "compiled code that calls operators of others is not kept"
_FEWER = "what is registered there is not in the key of compiled code"
_BUILTIN = NAMES.declare("torch._library.utils.is_builtin", without=_NO_KEY)
_DUMP = NAMES.declare("torch._C._dispatch_dump", without=_NO_KEY)
_CUSTOM = NAMES.declare("torch._library.custom_ops.OPDEFS", without=_NO_KEY)
_SIMPLE = NAMES.declare("torch._library.simple_registry.singleton", without=_NO_KEY)
_KERNELS = NAMES.declare("torch._library.triton.triton_ops_to_kernels", without=_FEWER)
_SIDE_TABLE = NAMES.declare(
    "torch._higher_order_ops.triton_kernel_wrap.kernel_side_table", without=_NO_KEY
)
_TABLES = {
    "decompositions": NAMES.declare("torch._decomp.decomposition_table", without=_FEWER),
    "meta": NAMES.declare("torch._decomp.meta_table", without=_FEWER),
    "inductor": NAMES.declare("torch._inductor.decomposition.decompositions", without=_FEWER),
    "lowerings": NAMES.declare("torch._inductor.lowering.lowerings", without=_FEWER),
    "user lowerings": NAMES.declare(
        "torch._inductor.lowering.user_lowerings",
        without="nobody can have added to it",
        seen=("2.12", "2.13", "2.14", "2.15"),
    ),
}
_MODE = NAMES.declare("torch.utils._python_dispatch.TorchDispatchMode", without=_NO_KEY)
_OVERLOAD = NAMES.declare("torch._ops.OpOverload", without=_NO_KEY)
_IMPLS = NAMES.declare("torch.library._impls", without=_NO_KEY)
_LOCATION = re.compile(r"registered at .*?:\d+(?= ::|$)", re.DOTALL | re.MULTILINE)

_functions: dict[str, tuple[Any, ...]] = {}
"""Operator of `opaque`, "ns::op" -> its function, and the one for fake tensors."""


def remember_functions(operator: str, run: Any, fake: Any) -> None:
    """Note the functions of an operator of `opaque`, "ns::op": torch does not tell them."""
    _functions[operator] = run, fake


def is_torchs_own(operator: Any) -> bool:
    """Whether an overload comes with torch, whose version says what it is."""
    return bool(_BUILTIN.find()(operator))


def registrations(operator: Any) -> list[str]:
    """The schema and tags of an overload, and for which dispatch keys it has kernels; equal
    wherever the program is installed."""
    tags = sorted(str(tag) for tag in operator.tags)
    schema = str(private_attribute(operator, "_schema", _NO_KEY))
    return [schema, *tags, *_dispatch_lines(operator)]


def has_compiled_kernels(operator: Any) -> bool:
    """Whether an overload has kernels that are no Python functions."""
    name = str(private_attribute(operator, "_name", _NO_KEY)).replace("::", "/")
    kernels = [line for line in _dispatch_lines(operator) if "[ " in line]
    keys = {re.split(r"[\[:]", line)[0] for line in kernels}
    in_python = {each.removeprefix(f"{name}/") for each in _IMPLS.find()}
    # An `impl` without a key has "" there.
    return not keys <= in_python | ({"CompositeImplicitAutograd"} if "" in in_python else set())


def _dispatch_lines(operator: Any) -> list[str]:
    """The dispatcher's lines about an overload, without graphrt's own kernels: these come with the
    first capture, and would change the key."""
    try:
        text = str(_DUMP.find()(str(private_attribute(operator, "_name", _NO_KEY))))
    except UnicodeDecodeError as error:
        text = error.object.decode(errors="replace")
    # Left out: which file registered a kernel. For a library in Python torch prints freed memory,
    # sometimes bytes that are no text.
    lines = _LOCATION.sub("registered", text).splitlines()
    return [line for line in lines if not line.startswith(FREE_KEYS)]


def python_functions(operator: Any) -> list[Any]:
    """The Python functions and Triton kernels behind an overload that a compiler may take into its
    code: not those that are called when the code runs, such as the body of an opaque operator."""
    name = overload_name(operator) or ""
    custom = _CUSTOM.find().get(name)
    entries = private_attribute(
        _SIMPLE.find(), "_data", _NO_KEY
    )  # to look it up by name would add it, in 2.11
    entry = entries.get(str(private_attribute(operator, "_name", _NO_KEY)).removesuffix(".default"))
    run, fake = _functions.get(name, (None, None))
    functions = [fake, *_value_of(_KERNELS, {}).get(name, ())]
    if entry is not None:
        functions += _callables(vars(private_attribute(entry, "fake_impl", _NO_KEY)))
        functions += _callables(vars(private_attribute(entry, "torch_dispatch_rules", _NO_KEY)))
    functions += _callables(private_attribute(operator, "py_kernels", _NO_KEY))
    # Inductor computes constants by such an operator while it compiles.
    if torch.Tag.pointwise in operator.tags:
        functions += [run, *([] if custom is None else _callables(vars(custom)))]
    return functions


def tables() -> Iterator[tuple[str, Any]]:
    """Decompositions, meta functions and lowerings, by their names."""
    for kind, table in _TABLES.items():
        # Imported here if it is not yet: every start finds the same.
        for target, function in _value_of(table, {}).items():
            yield f"{kind} {target}", function


def triton_call(node: fx.Node) -> tuple[dict[str, Any], tuple[Any, Any]] | None:
    """For a node that calls a user's Triton kernel: its arguments without the two indices that mean
    something in this process only; and what these stand for: kernel and constant arguments."""
    if "kernel_idx" not in node.kwargs or not is_higher_order(node.target):
        return None
    table, arguments = _SIDE_TABLE.find(), dict(node.kwargs)
    kernel = table.get_kernel(arguments.pop("kernel_idx"))
    return arguments, (kernel, table.get_constant_args(arguments.pop("constant_args_idx")))


def ignoring_new_sizes(fake_mode: Any) -> AbstractContextManager[Any]:
    """The shape environment forgets data-dependent sizes that the block makes. It would else look
    for them in an operator's results, and raise."""
    block: AbstractContextManager[Any] = private_attribute(
        fake_mode.shape_env, "ignore_fresh_unbacked_symbols", _NO_KEY
    )()
    return block


@contextmanager
def operators_called() -> Iterator[list[Any]]:
    """The operator overloads that are called in the block, as a dispatch mode sees them: below
    autograd, and composite operators in their parts."""
    operators: list[Any] = []
    mode: Any = _MODE.find()

    class Collecting(mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            operators.append(func)
            return func(*args, **(kwargs or {}))

    with Collecting():
        yield operators


@contextmanager
def python_calls(note: Callable[[FrameType], None]) -> Iterator[None]:
    """`note` gets the frame of each Python function that this thread calls in the block."""
    before = sys.getprofile()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            note(frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def _callables(held: Any) -> list[Any]:
    """The functions in a dict, also those in its inner dicts and in `func` of its values."""
    functions = []
    for value in held.values():
        inner = getattr(value, "func", None)
        if isinstance(value, dict):
            functions += _callables(value)
        elif inner is not None:
            functions.append(inner)
        elif callable(value) and not isinstance(value, (type, _OVERLOAD.find())):
            functions.append(value)
    return functions


def _value_of(name: PrivateName, without: Any) -> Any:
    try:
        return name.find()
    except MissingTorchNameError:
        return without
