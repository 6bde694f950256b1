"""The door to names of torch that are not public, for the CPU: see
`graphrt.core.base.private_torch`.

What a replay calls is bound here once, so that it costs what the bare call does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import torch

from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.private_torch import PrivateNames
from graphrt.core.base.torch_names import has_kernel, key_named

NAMES = PrivateNames()

_NO_CAPTURES = "nothing can be captured on the CPU"
_NO_REPLAYS = "nothing can be replayed on the CPU"

# What is switched on in this thread --------------------------------------------------------------

count_function_modes: Callable[[], int] = NAMES.take(
    "torch._C._len_torch_function_stack", without=_NO_REPLAYS
)
set_grad_enabled: Callable[[bool], None] = NAMES.take(
    "torch._C._set_grad_enabled", without=_NO_REPLAYS
)
no_torch_function: Callable[[], AbstractContextManager[object]] = NAMES.take(
    "torch._C.DisableTorchFunction",
    without="nothing can be replayed inside a torch-function mode or autocast",
)
below_autograd: Callable[[], AbstractContextManager[object]] = NAMES.take(
    "torch._C._AutoDispatchBelowADInplaceOrView", without=_NO_CAPTURES
)
inference_mode: Callable[[bool], AbstractContextManager[object]] = NAMES.take(
    "torch._C._InferenceMode", without="nothing can be captured under inference mode"
)
disabled_dispatch: object = NAMES.take(
    "torch._C._disabled_torch_dispatch_impl",
    without="parameters and other subclasses without a dispatch of their own are not captured",
)
"""The `__torch_dispatch__` of a tensor subclass that has none."""

# Operators ---------------------------------------------------------------------------------------

_OVERLOAD = "torch.ops.aten.add.Tensor"
_overload_type = NAMES.declare("torch._ops.OpOverload", without=_NO_CAPTURES)
NAMES.declare(f"{_OVERLOAD}._schema", without=_NO_CAPTURES)
NAMES.declare(f"{_OVERLOAD}._op", without=_NO_CAPTURES)


def schema_of(overload: Any) -> Any:
    """The schema of an operator's overload."""
    return overload._schema


def builtin_of(overload: Any) -> Callable[..., Any]:
    """The C function to which a call of the overload is forwarded; any other callable itself."""
    is_overload = type(overload) is _overload_type.find()
    builtin: Callable[..., Any] = overload._op if is_overload else overload
    return builtin


def is_composite(overload: Any) -> bool:
    """Whether an operator's only kernel is made of other operators. torch's decompositions in
    Python are for tracing, and do not compute the same bits."""
    name = overload.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def dense_kernel(higher_order: Any) -> Callable[..., Any] | None:
    """The Python function of a higher-order operator that calls other operators; None if it has
    none."""
    kernels: dict[Any, Callable[..., Any]] = higher_order.py_kernels
    return kernels.get(key_named("CompositeExplicitAutograd"))


_SLOW = "some operators are replayed by slower calls"
_functions = NAMES.declare("torch._C._VariableFunctions", without=_SLOW)
_function_homes = [
    _functions,
    *(
        NAMES.declare(f"torch._C.{home}", without=_SLOW)
        for home in ("_nn", "_linalg", "_special", "_fft")
    ),
]
_methods = NAMES.declare("torch._C.TensorBase", without=_SLOW)


def bindings_of(name: str, *, in_place: bool) -> tuple[Callable[..., Any], ...]:
    """torch's C functions of this name, and its methods if `in_place`: they cost less to call than
    the operator does."""
    bindings = []
    for home in (_methods, *_function_homes) if in_place else _function_homes:
        try:
            binding = getattr(home.find(), name, None)
        except MissingTorchNameError:
            continue
        if binding is not None:
            bindings.append(binding)
    return tuple(bindings)


# Tensors -----------------------------------------------------------------------------------------

conjugated: Callable[[torch.Tensor], torch.Tensor] = NAMES.take(
    "torch._conj", without="conjugated tensors cannot be captured"
)
negated: Callable[[torch.Tensor], torch.Tensor] = NAMES.take(
    "torch._neg_view", without="negated views cannot be captured"
)

NAMES.declare("torch.UntypedStorage._cdata", without=_NO_CAPTURES)


def storage_ids(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A number for the storage of each tensor, equal if two share one, even an empty one. A tensor
    that is not strided has a number of its own."""
    ids = []
    for tensor in tensors:
        strided = tensor.layout is torch.strided
        ids.append(int(tensor.untyped_storage()._cdata) if strided else -id(tensor))
    return ids


def replace_reads(
    methods: Sequence[str],
    functions: Sequence[str],
    guarded: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    restores: list[Callable[[], object]],
) -> None:
    """Replace these methods of `torch.Tensor` and functions of `torch` by the results of `guarded`,
    until the functions added to `restores` are called, the last first.

    Each is added before its change is made, and may be called twice.
    """
    # A method that torch.Tensor inherits is restored by deleting the guard. Some versions of torch
    # lack a method.
    existing = [name for name in methods if hasattr(torch.Tensor, name)]
    restores.append(partial(_put_back, {name: vars(torch.Tensor).get(name) for name in existing}))
    for name in existing:
        setattr(torch.Tensor, name, guarded(name, getattr(torch.Tensor, name)))
    for name in functions:
        function = getattr(torch, name, None)
        if function is not None:
            restores.append(partial(setattr, torch, name, function))
            setattr(torch, name, guarded(name, function))


def _put_back(methods: dict[str, Any]) -> None:
    for name, original in methods.items():
        if original is not None:
            setattr(torch.Tensor, name, original)
        elif name in vars(torch.Tensor):
            delattr(torch.Tensor, name)


# Dynamo ------------------------------------------------------------------------------------------

_DYNAMO = "torch._dynamo.eval_frame"
_from_stance = NAMES.declare(
    f"{_DYNAMO}._callback_from_stance",
    without="compiled calls are recorded operator by operator, Inductor's refused",
)


_INDUCTOR = "torch._inductor.output_code"
_UNSEEN = "a capture does not notice a forward's calls of Inductor's code without Dynamo"
_inductor_code = NAMES.declare(f"{_INDUCTOR}.CompiledFxGraph", without=_UNSEEN)
_NO_AOTI = "a capture does not notice a forward's calls of code that AOTInductor compiled"
_aoti_code = [
    NAMES.take(f"torch._C._aoti.{kind}", without=_NO_AOTI)
    for kind in ("AOTIModelPackageLoader", "AOTIModelContainerRunnerCpu")
]


def inductor_loaded() -> bool:
    """Whether Inductor may have compiled something in this process."""
    return _INDUCTOR in sys.modules


def hook_compiled_code(before: Callable[[], None], restores: list[Callable[[], object]]) -> None:
    """Have each call of Inductor's code call `before` first, until the functions added to
    `restores` are called; none is added if Inductor is loaded and its code cannot be hooked.

    Each is added before its change is made, and may be called twice.
    """
    kinds: list[Any] = []
    if inductor_loaded():
        try:
            kinds.append(_inductor_code.find())
        except MissingTorchNameError:
            return
    kinds += filter(None, _aoti_code)
    for kind in kinds:
        for method in ("__call__",) if kind.__module__ == _INDUCTOR else ("run", "boxed_run"):
            original = getattr(kind, method, None)
            if original is not None:
                restores.append(partial(setattr, kind, method, original))
                setattr(kind, method, _preceded(original, before))


def _preceded(original: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    return call


_COMPILING = ("torch._higher_order_ops.", "torch.nn.attention.flex_attention")


def compiles_higher_order(frame: FrameType | None) -> bool:
    """Whether torch itself compiles, in the call of Dynamo at `frame`: it does so for a
    higher-order operator that is called eagerly, such as `torch.cond`."""
    while frame is not None and frame.f_globals.get("__name__") == _DYNAMO:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_COMPILING)


def hook_compiled_calls(
    entering: Callable[[Callable[[Any], Any]], Callable[[Any], Any]],
    restores: list[Callable[[], object]],
) -> None:
    """Replace the function that Dynamo calls right before a compiled one by `entering` of it, until
    the function added to `restores` is called; none is if Dynamo is not loaded or lacks it."""
    module: Any = sys.modules.get(_DYNAMO)
    if module is not None and _from_stance:
        original = _from_stance.find()
        restores.append(partial(setattr, module, "_callback_from_stance", original))
        module._callback_from_stance = entering(original)
