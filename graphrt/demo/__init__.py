"""A small continuous-batching engine on graphrt that compares replay with padded eager at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphrt.demo.engine import Engine, EngineLimits, OutOfPagesError
from graphrt.demo.layer import (
    DecoderConfig,
    LayerWeights,
    attend_grouped,
    finish,
    project,
    rms_norm,
    rotations,
)
from graphrt.demo.model import Decoder, new_cache, tensor_shapes
from graphrt.demo.report import Setup, make_runner

if TYPE_CHECKING:
    from graphrt.demo.app import run_demo
    from graphrt.demo.checkpoint import load_checkpoint, seeded_checkpoint

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Engine",
    "EngineLimits",
    "LayerWeights",
    "OutOfPagesError",
    "Setup",
    "attend_grouped",
    "finish",
    "load_checkpoint",
    "make_runner",
    "new_cache",
    "project",
    "rms_norm",
    "rotations",
    "run_demo",
    "seeded_checkpoint",
    "tensor_shapes",
]


def __getattr__(name: str) -> Any:
    # The terminal and checkpoints need packages that the rest runs without.
    if name == "run_demo":
        from graphrt.demo.app import run_demo

        return run_demo
    if name in ("load_checkpoint", "seeded_checkpoint"):
        from graphrt.demo import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
