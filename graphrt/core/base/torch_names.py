"""Core's door to names of torch that are not public: see `private_torch`.

What is called at every step is bound here once, so that it costs what the bare call does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from graphrt.core.base.private_torch import PrivateNames

NAMES = PrivateNames()

Manager: TypeAlias = AbstractContextManager[object]
F = TypeVar("F", bound=Callable[..., Any])
_SEEN = "2.11", "2.13"

# Each of these takes names of torch without which the same feature is missing.
_capture = partial(NAMES.take, without="nothing can be captured")
_mode = partial(NAMES.take, without="captures on the CPU, and captures with breaks, fail")
_break = partial(
    NAMES.take, without="GraphOptions.breaks cannot be checked, so a capture with some fails"
)
_attention = partial(
    NAMES.take,
    without="sdpa_kernel() entered around an eager part is not on in it at replay",
    seen=_SEEN,
)
_lifting = partial(
    NAMES.take, without="a forward that makes tensors of Python data cannot be captured on a GPU"
)

# Dispatch modes ----------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    # Where a torch lacks it, `ThreadMode` is still a class, so that graphrt imports; captures raise
    # `MissingTorchNameError`, as `push_dispatch_mode` is missing there too.
    TorchDispatchMode = _mode("torch.utils._python_dispatch.TorchDispatchMode") or object

count_dispatch_modes: Callable[[], int] = _mode("torch._C._len_torch_dispatch_stack")
without_dispatch_modes: Callable[[], Manager] = _mode(
    "torch.utils._python_dispatch._disable_current_modes"
)
dispatch_modes: Callable[[], list[TorchDispatchMode]] = _mode(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
"""The dispatch modes of this thread, innermost last: another list at each call."""
push_dispatch_mode: Callable[[TorchDispatchMode], None] = _mode(
    "torch.utils._python_dispatch._push_mode"
)
pop_dispatch_mode: Callable[[], TorchDispatchMode] = _mode("torch.utils._python_dispatch._pop_mode")


_without_dynamo = partial(
    NAMES.take, without="Dynamo may trace, or fail in, graphrt's own handlers"
)
_set_strategy = _without_dynamo("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy = _without_dynamo("torch._C._dynamo.eval_frame._FrameExecStrategy")
_skipped = _without_dynamo("torch._C._dynamo.eval_frame._FrameAction.SKIP")


def untraced(function: F) -> F:
    """Have Dynamo compile neither `function` nor the functions that it calls. A host's code calls
    it between operators.

    Where Dynamo gives up on a frame, as after a graph break, it goes on with the frames that this
    one calls: the code object has a mark. Else it traces into functions, unless they have the
    attribute. Marks cost nothing, and `torch._disable_dynamo` would import all of Dynamo.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    if _set_strategy and _Strategy and _skipped:
        _set_strategy(function.__code__, _Strategy(_skipped, _skipped))
    return function


def compiled_frames() -> int:
    """How many frames Dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


# Left in C, which no interrupt prevents; what `torch.inference_mode` leaves undone comes back
# when the traceback that holds it is dropped.
inference_guard: Callable[[bool], Manager] = _capture("torch._C._InferenceMode")

below_autograd: Callable[[], Manager] = NAMES.take(
    "torch._C._AutoDispatchBelowAutograd", without="no trial shows that a forward asks for them"
)
"""No graph of gradients is made, whatever the grad mode is, as under inference mode."""

delayed_error: Callable[[str, int], Callable[..., Any]] = NAMES.take(
    "torch._C._functions.DelayedError", without="gradients that end at a runner say nothing"
)
"""`delayed_error(text, n)` is a function of n tensors: it returns tensors over the same memory that
depend on all of them, and whose `backward` raises a `RuntimeError`."""


# Dispatch keys -----------------------------------------------------------------------------------

included_keys: Callable[[], Any] = _mode("torch._C._dispatch_tls_local_include_set")
excluded_keys: Callable[[], Any] = _mode("torch._C._dispatch_tls_local_exclude_set")
_put_off_keys = [_mode(f"torch._C.DispatchKey.{key}") for key in ("Conjugate", "Negative")]
dispatch_keys: Callable[[Any, Any], Manager] = _mode("torch._C._ForceDispatchKeyGuard")
"""Dispatches by these sets of keys, as `included_keys` and `excluded_keys` give them."""


@cache
def conjugation_resolved(excluded: int) -> Any:
    """For the number of the set of excluded keys of this thread: the set in which conjugations and
    negations are resolved that torch has put off.

    A mode handles operators in it. torch switches that off there, and a kernel that makes such a
    view for itself (pinv does) would compute with the numbers before it. Sets are few, and putting
    one together takes longer than finding it.
    """
    resolved = excluded_keys()
    for put_off in _put_off_keys:
        resolved = resolved.remove(put_off)
    return resolved


_watch = partial(
    NAMES.take, without="what a warm-up writes cannot be saved, so captures with checks fail"
)
key_named: Callable[[str], Any] = _watch("torch._C._dispatch_key_parse")
include_key: Callable[[Any, bool], object] = _watch(
    "torch._C._dispatch_tls_set_dispatch_key_included"
)
is_included: Callable[[Any], bool] = _watch("torch._C._dispatch_tls_is_dispatch_key_included")
kernel_library: Callable[[str, str, str], Any] = _watch("torch._C._dispatch_library")
operator_names: Callable[[], list[str]] = _watch("torch._C._dispatch_get_all_op_names")
higher_order_operators: dict[str, Any] = _watch("torch._ops._higher_order_ops")
fallthrough_of_new_ones: list[Any] = _watch(
    "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS"
)
"""The dispatch keys that new higher-order operators have no kernels for, and skip."""

# Modules -----------------------------------------------------------------------------------------

_hooks = partial(NAMES.take, without="a hook for all modules that a host adds is not seen")
_every_hooks: dict[str, Any] = {
    "global pre-hooks": _hooks("torch.nn.modules.module._global_forward_pre_hooks"),
    "global hooks": _hooks("torch.nn.modules.module._global_forward_hooks"),
}
global_hooks: dict[str, dict[int, Any]] = {
    name: each for name, each in _every_hooks.items() if isinstance(each, dict)
}
"""The hooks that are called around the forward of every module."""


def runs_hooks(forward: Any) -> bool:
    """Whether hooks are called around a forward: of a module, in a partial or compiled too. They
    see which inputs are given by position."""
    while isinstance(forward, partial):
        forward = forward.func
    owner = getattr(forward, "__self__", forward)
    if not isinstance(owner, torch.nn.Module) or getattr(forward, "__name__", "") == "forward":
        return False
    modules = owner, getattr(owner, "_orig_mod", owner)
    return any(global_hooks.values()) or any(
        each._forward_pre_hooks or each._forward_hooks for each in modules
    )


# Settings ----------------------------------------------------------------------------------------

attention_kernels: Any = _attention("torch.nn.attention._cur_sdpa_kernel_backends")
set_attention_kernels: Any = _attention("torch.nn.attention._sdpa_kernel")
attention_order: Any = _attention("torch._C._get_sdp_priority_order")
set_attention_order: Any = _attention("torch._C._set_sdp_priority_order")
_FUNCTION_MODES: Any = {
    "without": "a torch function mode around an eager part is not on in it at replay",
    "seen": _SEEN,
}
all_function_modes: Callable[[], list[Any]] = (
    NAMES.take("torch.overrides._get_current_function_mode_stack", **_FUNCTION_MODES) or list
)
"""The torch function modes of this thread."""
function_mode_is_on: Any = NAMES.take(
    "torch._C._is_torch_function_mode_enabled",
    without="a torch function mode around a step is not on in it",
    seen=_SEEN,
)
_DEFAULT_DEVICE = NAMES.declare("torch.utils._device.DeviceContext", **_FUNCTION_MODES)


def function_modes() -> list[Any]:
    """The torch function modes of this thread, but those that set a default device."""
    modes = all_function_modes()
    if modes:
        modes = [each for each in modes if not isinstance(each, _DEFAULT_DEVICE.find())]
    return modes


# Operators ---------------------------------------------------------------------------------------

_innermost_transform: Any = NAMES.take(
    "torch._C._functorch.peek_interpreter_stack",
    without="an eager part inside of torch.func's transforms fails with an error of torch's",
    seen=_SEEN,
)


def in_transform() -> bool:
    """Whether this thread is in a transform of `torch.func`."""
    return bool(_innermost_transform) and _innermost_transform() is not None


schemas_of_operator: Callable[[str], list[Any]] = _break("torch._C._jit_get_schemas_for_operator")
has_kernel: Callable[[str, str], bool] = _break("torch._C._dispatch_has_kernel_for_dispatch_key")

_composite = NAMES.declare(
    "torch._C.DispatchKey.CompositeImplicitAutograd", without="nothing can be captured"
)
_capture("torch.ops.aten.add.Tensor._op_dk")
as_it_was_called: Callable[[], Manager] = NAMES.take(
    "torch._C._RestorePythonTLSSnapshot", without="nothing can be captured under inference mode"
)
"""In the handler of a dispatch mode: the settings, such as autocast, with which it was called."""


def run_composite(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Issue the operators that a composite one is made of."""
    return overload._op_dk(_composite.find(), *args, **kwargs)


# Constants ---------------------------------------------------------------------------------------

make_on_host: Callable[[bool], object] = _lifting("torch._C._set_only_lift_cpu_tensors")
"""Says whether torch makes every tensor of Python data on the host, and copies it to its device by
an operator that modes see."""
is_made_on_host: Callable[[], bool] = _lifting("torch._C._only_lift_cpu_tensors")

# Memory ------------------------------------------------------------------------------------------

copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = NAMES.take(
    "torch._foreach_copy_", without="several inputs of one dtype cannot come from the device"
)
zero_all: Callable[[list[torch.Tensor]], object] = NAMES.take(
    "torch._foreach_zero_", without="several inputs on the device cannot be padded"
)
storage_at: Callable[[int, torch.device, int], torch.UntypedStorage] = NAMES.take(
    "torch._C._construct_storage_from_data_pointer",
    without="CUDA graphs cannot be captured, and other accelerators keep strong references",
)
mark_unreadable: Callable[[int, str], object] = NAMES.take(
    "torch._C._set_storage_data_ptr_access_error_msg",
    without="outputs of a runner are copies",
    build="cuda",
)
can_mark_unreadable = bool(mark_unreadable)  # a torch that was built without CUDA has it not

tensor_guards: Any = NAMES.take(
    "torch._C._dynamo.guards.TensorGuards",
    without="a step's inputs are checked one by one, which takes longer",
)
"""A guard made of tensors: its `check(*others)` says whether others have the same types, dtypes,
devices, dispatch keys, sizes and strides. `dynamic_dims_sizes` and `dynamic_dims_strides` are None.
"""

# Settings ----------------------------------------------------------------------------------------

state_guard: Any = NAMES.take(
    "torch._C._dynamo.guards.GlobalStateGuard",
    without="settings such as autocast are compared one by one at every step, which takes longer",
)
fp32_precision: Callable[[str, str], str] = NAMES.take(
    "torch._C._get_fp32_precision_getter", without="nothing can be captured"
)


def setting_getter(name: str) -> Any:
    """What reads one of torch's global settings in C; false where this torch lacks it."""
    return NAMES.take(f"torch._C._get_{name}", without="nobody notices that it has changed")


storage_use_count: Callable[[int], int] = NAMES.take(
    "torch._C._storage_Use_Count", without="nothing says which memory only graphs keep alive"
)

storage_of_weak: Callable[[int], torch.UntypedStorage | None] = NAMES.take(
    "torch.UntypedStorage._new_with_weak_ptr", without="what graphs read is not kept alive"
)
