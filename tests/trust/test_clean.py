"""What hosts' forwards do beside computing (count, log, time, build tables at their first call)
raises no alarm, nor does what mixes rows by design and says so."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphRunner, Host, InputSpec, Reason

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DIM, POSITIONS, STEPS = 16, 64, 12
INPUTS = {
    "x": InputSpec(torch.float32, ("tokens", DIM)),
    "positions": InputSpec(torch.int64, ("tokens",)),
}
logger = logging.getLogger(__name__)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)


class Counters(Layer):
    """Numbers of what was done, which decide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last_seconds = 0.0
        self.tokens_by_size: dict[int, int] = {}
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x, positions):
        began = time.perf_counter()
        self.calls += 1
        self.tokens_by_size[len(x)] = self.tokens_by_size.get(len(x), 0) + len(x)
        self.shapes.append(tuple(x.shape))
        out = self.linear(x).relu()
        self.last_seconds = time.perf_counter() - began
        return out


class Logging(Layer):
    """Lines of a log, every one with another number, and a warning at the first call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.warned = 0, False

    def forward(self, x, positions):
        self.step += 1
        logger.info("step %d of %d rows, %s", self.step, len(x), x.dtype)
        if not self.warned:
            logger.warning("the first step")
            self.warned = True
        return self.linear(x).tanh()


class LazyRope(Layer):
    """Tables that the first call builds, one a kind of element, and builds again if too short."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.tables: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, x, positions):
        if self.longest < POSITIONS or x.dtype not in self.tables:
            steps = torch.arange(0, DIM, 2, device=x.device) / DIM
            angles = torch.outer(torch.arange(POSITIONS, device=x.device).float(), 100.0**-steps)
            self.tables[x.dtype] = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            self.longest = POSITIONS
        cos, sin = (table[positions] for table in self.tables[x.dtype])
        a, b = self.linear(x).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LazyConstant(Layer):
    """A constant from Python's numbers, made once and kept."""

    scale: torch.Tensor | None = None

    def forward(self, x, positions):
        if self.scale is None:
            self.scale = torch.tensor([0.5 + i for i in range(DIM)], device=x.device)
        return self.linear(x) * self.scale


@functools.lru_cache
def mask_of(rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(DIM, device=device).expand(rows, DIM) % 3 > 0


class MaskBySize(Layer):
    """A mask for each size, in a cache of functools."""

    def forward(self, x, positions):
        return self.linear(x).where(mask_of(len(x), x.device), 0.0)


class Workspace(Layer):
    """Scratch memory that is kept: written by every call before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch: dict[int, torch.Tensor] = {}

    def forward(self, x, positions):
        scratch = self.scratch.setdefault(len(x), torch.empty_like(x))
        torch.mul(x, 2, out=scratch)
        return self.linear(scratch) + scratch


class CapacityExperts(Layer):
    """Each expert takes the rows that want it most, of all rows, and no more than it has room for:
    which rows an expert leaves out depends on the others."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, experts)
        self.weights = nn.Parameter(torch.randn(experts, DIM, DIM) / DIM**0.5)

    def forward(self, x, positions):
        weights = self.router(x).softmax(-1)
        room = max(1, len(x) // 2)
        taken, rows = weights.topk(room, dim=0)
        out = self.linear(x)
        # One after the other: a GPU adds to a row in any order.
        for expert, weight in enumerate(self.weights):
            found = x[rows[:, expert]] @ weight
            out = out.index_add(0, rows[:, expert], found * taken[:, expert, None])
        return out


class DynamicQuantisation(Layer):
    """Eight bits with one scale for all rows: the largest value of any of them."""

    def forward(self, x, positions):
        scale = x.abs().amax().clamp(min=1e-6) / 127
        return self.linear((x / scale).round().clamp(-127, 127) * scale)


PLAIN = [Counters, Logging, LazyRope, LazyConstant, MaskBySize, Workspace]
MIXING = [CapacityExperts, DynamicQuantisation]


def mixing() -> Host:
    known = {each.name for each in dataclasses.fields(Host)}
    return Host(**({"mixes_rows": True} if "mixes_rows" in known else {}))


def random_step(rows: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, DIM, generator=generator)
    positions = torch.randint(POSITIONS, (rows,), generator=generator)
    return {"x": x.to(device), "positions": positions.to(device)}


def check_no_alarm(layer: type[Layer], host: Host, device: str) -> None:
    torch.manual_seed(0)
    module = layer().eval().to(device).requires_grad_(False)
    runner = GraphRunner(
        module,
        inputs=INPUTS,
        outputs=("tokens", DIM),
        mode="FULL",
        sizes=[2, 4, 8],
        host=host,
        platform=device,
    )
    with runner, warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.capture()
        for seed in range(STEPS):
            rows = 1 + seed % 8
            inputs = random_step(rows, seed, device)
            replayed = runner(**inputs).clone()
            found: Any = runner.last_dispatch
            assert found.reason is Reason.HIT
            eager = runner.run_padded_eagerly(Batch(rows, rows, 1), found, inputs)
            assert torch.equal(replayed, eager), rows
        reasons = {reason: count for reason, count in runner.report().reasons.items() if count}
    assert reasons == {Reason.HIT: STEPS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", PLAIN)
def test_counting_logging_and_timing_in_a_forward_raise_no_alarm(layer, device):
    check_no_alarm(layer, Host(), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", MIXING)
def test_mixed_rows_declared_as_by_design_raise_no_alarm(layer, device):
    check_no_alarm(layer, mixing(), device)


@pytest.mark.parametrize("layer", MIXING)
def test_the_mixing_forwards_of_this_file_do_mix_rows(layer):
    torch.manual_seed(0)
    module = layer().eval()
    inputs = random_step(4, 0, "cpu")
    before = module(**inputs)[:2]
    inputs["x"][2:] *= 10
    assert not torch.equal(module(**inputs)[:2], before)
