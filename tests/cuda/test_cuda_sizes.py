"""The largest capture size that CUDA devices gain from; needs no GPU."""

from __future__ import annotations

import pytest
import torch

from graphrt.cuda import CudaPlatform


@pytest.mark.parametrize(
    ("capability", "size"), [((9, 0), 512), ((10, 0), 1024), ((10, 3), 1024), ((12, 0), 512)]
)
def test_only_datacenter_blackwell_gpus_have_larger_default_capture_sizes(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert CudaPlatform().default_max_size() == size
