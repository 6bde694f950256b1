"""The device behind `torch.accelerator` in these tests."""

from __future__ import annotations

import pytest
from stub_accelerator import StubDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StubDevice:
    stub = StubDevice()
    stub.install(monkeypatch)
    return stub
