"""Collectives in a captured forward go on behind the call, so they are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from cpu_capturing import capture, modes_left

from graphrt.core.base.errors import RefusedOpError

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "functional"])
def test_a_collective_whose_wait_no_replay_would_see_is_refused(group, name):
    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = x + 1
        if name == "all_gather":
            dist.all_gather([torch.empty_like(hidden)], hidden)
        elif name == "functional":
            hidden = collectives.all_reduce(hidden, "sum", dist.group.WORLD)
        elif name == "broadcast":
            dist.broadcast(hidden, 0)
        else:
            dist.all_reduce(hidden)
        return hidden * 2

    with pytest.raises(RefusedOpError, match="collective"):
        capture(forward, torch.ones(4))
    assert not modes_left()
