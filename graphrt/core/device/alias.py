"""Tensors that use memory without keeping it in use."""

from __future__ import annotations

import torch

from graphrt.core.base.homes import public
from graphrt.core.base.torch_names import storage_at


@public("graphrt.platforms")
def weak_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor`, of its dtype, shape and strides, without keeping it in use.

    Raises what torch raises where the device's tensors cannot be made of an address, and
    `MissingTorchNameError` where torch cannot do it for any.
    """
    owner = tensor.untyped_storage()
    storage = storage_at(owner.data_ptr(), tensor.device, owner.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
