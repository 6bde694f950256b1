"""Private names of operators, modules and tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from graphrt.compile.private_torch.names import NAMES, private_attribute

_NO_SPLIT = "graphs cannot be split"
_OVERLOAD = NAMES.declare("torch._ops.OpOverload", without=_NO_SPLIT)
_PACKET = NAMES.declare("torch._ops.OpOverloadPacket", without=_NO_SPLIT)
_HIGHER_ORDER = NAMES.declare("torch._ops.HigherOrderOperator", without=_NO_SPLIT)
_schemas = NAMES.take(
    "torch._C._jit_get_schemas_for_operator", without="opaque operators cannot be defined"
)
_CALL = NAMES.declare("torch.nn.Module._call_impl", without="modules cannot be compiled")
_COMPILED_CALL = NAMES.declare(
    "torch.nn.Module._compiled_call_impl", without="pass in_place=False to compile_module"
)
_VERSION = NAMES.declare(
    "torch.Tensor._version", without="arguments that share memory are not told apart"
)
_STORAGE = NAMES.declare("torch.UntypedStorage._cdata", without="pieces cannot be compared")
_AUTOCAST = NAMES.declare("torch.amp.autocast_mode._enter_autocast", without=_NO_SPLIT)
_NO_AUTOCAST = NAMES.declare("torch.amp.autocast_mode._exit_autocast", without=_NO_SPLIT)
_INFERENCE = NAMES.declare("torch.autograd.grad_mode._enter_inference_mode", without=_NO_SPLIT)
_NO_INFERENCE = NAMES.declare("torch.autograd.grad_mode._exit_inference_mode", without=_NO_SPLIT)
_WRAPPED = NAMES.declare("torch._C._functorch.is_functorch_wrapped_tensor", without=_NO_SPLIT)


def overload_name(target: object) -> str | None:
    """ "ns::op" for an operator's overload, as a node of a graph calls it; else None."""
    if not isinstance(target, _overload_type()):
        return None
    return str(private_attribute(target, "_schema", _NO_SPLIT).name)


def operator_names(target: object) -> tuple[str, ...]:
    """ "ns::op" and "ns::op.overload", or "ns::op" for all overloads; empty for no operator."""
    name = overload_name(target)
    if name is not None:
        return (name, f"{name}.{private_attribute(target, '_overloadname', _NO_SPLIT)}")
    if isinstance(target, _packet_type()):
        return (str(private_attribute(target, "_qualified_op_name", _NO_SPLIT)),)
    return ()


def written_arguments(target: object) -> tuple[tuple[int, str], ...] | None:
    """The arguments, by index and name, that an operator writes by its schema; of a packet, those
    that any of its overloads writes. None for no operator."""
    if not operator_names(target):
        return None
    arguments: dict[tuple[int, str], None] = {}
    for each in overloads(target):
        for index, argument in enumerate(private_attribute(each, "_schema", _NO_SPLIT).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                arguments[index, argument.name] = None
    return tuple(arguments)


def returns(target: object) -> tuple[bool, ...] | None:
    """Whether each result of an operator shares memory with an argument, by its schema; of a
    packet, by its first overload. None for no operator."""
    if not operator_names(target):
        return None
    schema = private_attribute(overloads(target)[0], "_schema", _NO_SPLIT)
    return tuple(each.alias_info is not None for each in schema.returns)


def is_higher_order(target: object) -> bool:
    """Whether something is an operator that takes functions, or a kernel of Triton's."""
    return isinstance(target, _higher_order_type())


def overloads(target: Any) -> list[Any]:
    """The overloads that an operator stands for, which may be itself."""
    if isinstance(target, _packet_type()):
        packet: Any = target
        return [getattr(packet, name) for name in packet.overloads()]
    return [target]


def is_registered(operator: str) -> bool:
    """Whether there is an operator "ns::op"."""
    return bool(_schemas(operator))


def call_of(module: nn.Module) -> Callable[..., Any]:
    """A module's call with its hooks, whatever `call_instead` has put in its place."""
    _CALL.find()
    return module._call_impl


def call_instead(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make calls of a module run `call`, by the attribute that `Module.compile` sets: torch leaves
    it out of copies and checkpoints."""
    _COMPILED_CALL.find()
    module._compiled_call_impl = call


def held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its parameters, its buffers and its modules."""
    return module._parameters, module._buffers, module._modules


def storage_identity(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones too, as long as they live."""
    return int(private_attribute(tensor.untyped_storage(), "_cdata", _STORAGE.without))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory, as in a trace."""
    return hasattr(tensor, "fake_mode")


def tensor_text(tensor: torch.Tensor) -> str:
    """A tensor's kind, dtype, device, layout, shape and strides as text. Not in it: values, shared
    memory, and the parts of a subclass (`inner_tensors`)."""
    kind = "Parameter" if isinstance(tensor, torch.nn.Parameter) else type(tensor).__qualname__
    kind += " conjugated" * tensor.is_conj() + " negated" * tensor.is_neg()
    strides = tensor.stride() if tensor.layout is torch.strided else ""
    shape = tuple(tensor.shape)
    return f"{kind} {tensor.dtype} {tensor.device} {tensor.layout} {shape} {strides}"


def inner_tensors(tensor: torch.Tensor) -> list[Any]:
    """The parts of a tensor of a subclass that is made of others, and what else it is made of; none
    of another tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, context = flatten()
    return [context, *names, *(getattr(tensor, name) for name in names)]


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform of `torch.func`, such as a row of `vmap`, whose
    memory is unknown."""
    return bool(_WRAPPED.find()(tensor))


@cache
def autocast_calls() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions by which a traced graph enters autocast, and leaves it."""
    return _AUTOCAST.find(), _NO_AUTOCAST.find()


@cache
def inference_mode_calls() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions by which a traced graph enters inference mode, and leaves it."""
    return _INFERENCE.find(), _NO_INFERENCE.find()


@cache
def _overload_type() -> type:
    kind: type = _OVERLOAD.find()
    return kind


@cache
def _higher_order_type() -> type:
    kind: type = _HIGHER_ORDER.find()
    return kind


@cache
def _packet_type() -> type:
    kind: type = _PACKET.find()
    return kind


def was_written(tensor: torch.Tensor) -> bool:
    """Whether anything has been written into a tensor, or a view of it, since it was made."""
    return bool(_VERSION.find().__get__(tensor))
