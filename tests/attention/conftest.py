"""Fixtures that several tests of attention share."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(autouse=True)
def _few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the program of each span by itself, the empty ones too."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    from graphrt.attention.triton import backend

    monkeypatch.setattr(backend, "_processors", lambda device: 2)
