"""A warning names the host's line and keeps no tensor of the step alive."""

from __future__ import annotations

import gc
import warnings
import weakref

import torch

from graphrt.core.base.errors import warn_caller


def test_warn_caller_keeps_no_tensors_of_the_calling_frames_alive() -> None:
    def step() -> weakref.ref[torch.Tensor]:
        value = torch.ones(1)
        warn_caller("the step runs eagerly", UserWarning)
        return weakref.ref(value)

    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = step()
        assert kept() is None
    finally:
        gc.enable()
