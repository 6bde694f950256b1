"""Models this small only lose time to a second CPU thread, above all on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on times, so none is taken longer than it must."""
    monkeypatch.setattr("graphrt.demo.app._ENOUGH_S", 0.0)
    monkeypatch.setattr("graphrt.demo.steady._ENOUGH_S", 0.0)
