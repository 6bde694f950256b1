"""What a seeded defect is: a small program that is built twice, once for graphs, once without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from graphrt import Batch, InputSpec
from graphrt.core.base._native_door import NativeWatch

WIDTH = 8
SIZES = (1, 2, 4, 8)
ROWS = (4, 3, 8, 1, 2, 4, 7, 5, 8, 1, 3, 6)
"""Live rows of each step: every graph has replayed a full batch before the host's change, so that
no level finds it by luck; the first step has no padding rows."""
CHANGE = 5
"""The step before which a host changes what it changes."""
LONG = (*ROWS, 2, 8, 4, 3, 5, 7)
"""Steps enough for a rotating weight pointer to get round."""
LONGER = (*LONG, *LONG, *LONG, *LONG)
"""Steps enough for glances to get round all slots of a model."""

X = InputSpec(torch.float32, ("tokens", WIDTH))

Word = Literal["right", "named", "late", "silent", "crash"]
"""What came of a run. right: every step as the twin's, and nothing said. named: said before, or at
the step in which, a value is wrong. late: said, after wrong values were handed out. silent: wrong,
and nothing said. crash: an error that is nobody's (not graphrt's)."""


class Net(nn.Module):
    """`body`, whose input is called `x`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


Values = dict[str, torch.Tensor]


def rows_of_x(step: int, rows: int, generator: torch.Generator) -> Values:
    """One input `x` of (rows, WIDTH) float32."""
    return {"x": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float32)}


def nothing(step: int) -> None:
    """A host that changes nothing between steps."""


def left_alone(step: int, outputs: Any) -> None:
    """A host that only reads what a step gave."""


def plain_batch(step: int, rows: int) -> None:
    """No batch: the shapes of the inputs say it."""


@dataclass
class Scenario:
    """One program. The host calls `between(step)` before each step, gets the step's inputs of
    `values(step, rows, generator)` (CPU tensors) and runs `forward`; with `rows[step]` live rows.

    `plain` is what the twin runs where that is not `forward` itself. `batch(step, rows)` is the
    step's batch, `metadata(step)` its context's metadata, `state()` tensors that must be equal to
    the twin's after each step too, `judge(step, values, outputs)` decides instead of the twin where
    values are not reproducible; `after(step, outputs)` is what the host does to them. `host` and
    `options` are keywords of `Host` and `GraphOptions`; what this version of them does not have is
    left out.
    """

    forward: Callable[..., Any]
    inputs: Mapping[str, InputSpec] = field(default_factory=lambda: {"x": X})
    values: Callable[[int, int, torch.Generator], Values] = rows_of_x
    between: Callable[[int], None] = nothing
    rows: tuple[int, ...] = ROWS
    outputs: Any = None
    sizes: tuple[int, ...] = SIZES
    mode: str = "FULL"
    host: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    metadata: Callable[[int], Any] | None = None
    after: Callable[[int, Any], None] = left_alone
    batch: Callable[[int, int], Batch | None] = plain_batch
    plain: Callable[..., Any] | None = None
    state: Callable[[], list[torch.Tensor]] = list
    judge: Callable[[int, Values, Any], bool] | None = None
    in_new_threads: bool = False
    """Whether every step is run in a thread of its own."""
    tolerance: float = 1e-3
    """Relative to the rms of the twin's output, for float32; a padded GEMM may cost so much."""


@dataclass(frozen=True)
class Defect:
    """One line of the table; `expected` is what comes of it at the level "capture".

    `on_cuda` is that on CUDA where it differs, `told` where CPython tells of changes (3.12, 3.13):
    there "late" may always be "named". With `drifts`, eager steps after the warning are
    not the twin's either: wrong steps before it have left state behind, a trial has advanced what
    no walk finds, or the forward itself keeps the old weight; else what is handed out with a
    warning, and after it, must be right.
    """

    name: str
    group: str
    build: Callable[[str], Scenario]
    expected: Word
    on_cuda: Word | None = None
    told: Word | None = None
    long: bool = False
    """Whether it takes `LONGER` for glances to get round."""
    drifts: bool = False
    watched: bool = False
    """Of a clean one: on CUDA it is right only where its warm-up is watched, which keeps alive what
    it has made."""
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def clean(self) -> bool:
        """Whether there is nothing wrong with it."""
        return self.group == "clean"

    def expected_on(self, device: str) -> Word:
        """What comes of it there at the level "capture"."""
        expected = self.told if NativeWatch is not None and self.told else self.expected
        return self.on_cuda if device == "cuda" and self.on_cuda is not None else expected


def defect(
    group: str, expected: Word, **more: Any
) -> Callable[[Callable[[str], Scenario]], Defect]:
    """Makes the decorated `build(device)` a `Defect` of the function's name."""

    def made(build: Callable[[str], Scenario]) -> Defect:
        return Defect(build.__name__.replace("_", " "), group, build, expected, **more)

    return made


def at_change(change: Callable[[], object]) -> Callable[[int], None]:
    """A host that does `change` once, before the step CHANGE."""

    def between(step: int) -> None:
        if step == CHANGE:
            change()

    return between
