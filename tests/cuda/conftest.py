"""Fixtures that several files of GPU tests use."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Lets torch have so many bytes beyond what it holds now; lifted at the end.

    A tensor that fills the device would take the memory of the tests beside: five failed so in
    one run.
    """

    def set_limit(nbytes: int) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + nbytes
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)
