"""Which host-to-device copies of a capture read page-locked memory; the device is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.core.capture.constants import Constants
from graphrt.cpu import CpuPlatform
from graphrt.errors import PageableCopyError

FULL, TO = torch.ops.aten.full.default, torch.ops.aten._to_copy.default
COPY = torch.ops.aten.copy_.default
Copy = Callable[[Constants, torch.Tensor, str], torch.Tensor]


class Device(CpuPlatform):
    """A device whose tensors have no memory."""

    device_type = "meta"

    def __init__(self) -> None:
        super().__init__()
        self.buffers = 0

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers += 1
        return super().host_buffer(nbytes)


class Pool:
    def __init__(self) -> None:
        self.platform = Device()


def to(constants: Constants, tensor: torch.Tensor, device: str) -> Any:
    return constants.run(TO, (tensor,), {"device": torch.device(device)})


def copied(constants: Constants, tensor: torch.Tensor, device: str) -> Any:
    return constants.run(COPY, (torch.empty(2, device=device), tensor), {})


@pytest.mark.parametrize("copy", [to, copied])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_constant_copied_to_the_device_uses_page_locked_memory(copy: Copy, device: str) -> None:
    pool: Any = Pool()
    constants = Constants(pool)
    constant = constants.run(FULL, ([2], 7.0), {})
    assert copy(constants, constant, device).device.type == device
    assert pool.platform.buffers == (1 if device == "meta" else 0)


@pytest.mark.parametrize("copy", [to, copied])
def test_copying_a_host_tensor_to_the_device_during_a_capture_is_refused(copy: Copy) -> None:
    pool: Any = Pool()
    constants, tensor = Constants(pool), torch.ones(2)
    assert torch.equal(copy(constants, tensor, "cpu"), tensor)
    with pytest.raises(PageableCopyError, match="the host writes"):
        copy(constants, tensor, "meta")
    assert pool.platform.buffers == 0


ATEN = torch.ops.aten
INDEXING: dict[str, Callable[[Constants, torch.Tensor, torch.Tensor], Any]] = {
    "read": lambda made, x, at: made.run(ATEN.index.Tensor, (x, [at]), {}),
    "read unchecked": lambda made, x, at: made.run(ATEN._unsafe_index.Tensor, (x, [at]), {}),
    "written": lambda made, x, at: made.run(ATEN.index_put_.default, (x, [at], x[:2]), {}),
    "copied and written": lambda made, x, at: made.run(
        ATEN.index_put.default, (x, [at], x[:2]), {}
    ),
    "accumulated": lambda made, x, at: made.run(
        ATEN._index_put_impl_.default, (x, [None, at], x[:, :2], True), {}
    ),
}


@pytest.mark.parametrize("indexed", INDEXING.values(), ids=INDEXING)
def test_a_constant_host_index_of_a_device_tensor_uses_page_locked_memory(
    indexed: Callable[[Constants, torch.Tensor, torch.Tensor], Any],
) -> None:
    pool: Any = Pool()
    constants = Constants(pool)
    x, whole = torch.empty(4, 4, device="meta"), {"dtype": torch.int64}
    at = constants.run(FULL, ([2], 3), whole)
    assert indexed(constants, x, at).device.type == "meta"
    assert pool.platform.buffers == 1
    with pytest.raises(PageableCopyError, match="the host writes"):
        indexed(constants, x, torch.ones(2, **whole))
