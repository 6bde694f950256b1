"""Padding rows are padding at every step, wherever the live rows come from."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
SPECS = {
    "ids": InputSpec(torch.int64, ("tokens",), pad=7),
    "slots": InputSpec(torch.int64, ("tokens",), pad=-1, index=True),
    "mrope": InputSpec(torch.int64, (3, "tokens"), pad=-1),
    "rope": InputSpec(torch.float32, (2, "tokens", 3), pad="repeat"),
    "hidden": InputSpec(torch.bfloat16, ("tokens", 5), pad="repeat"),
    "flags": InputSpec(torch.bool, ("tokens",), pad=True),
    "table": InputSpec(torch.int32, ("reqs", 2), pad=0, index=True),
    "starts": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
}


def look_and_soil(**inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return all rows as they are, and leave something else in them."""
    seen = {name: tensor.clone() for name, tensor in inputs.items()}
    for tensor in inputs.values():
        tensor.fill_(99)
    return seen


def values(rng: random.Random, tokens: int, reqs: int) -> dict[str, torch.Tensor]:
    made = {}
    for name, spec in SPECS.items():
        rows = {"tokens": tokens, "reqs": reqs, "reqs+1": reqs + 1}
        shape = [size if isinstance(size, int) else rows[size] for size in spec.shape]
        numbers = [rng.randint(0, 50) for _ in range(torch.Size(shape).numel())]
        made[name] = torch.tensor(numbers).view(shape).to(spec.dtype)
    return made


def padded(value: torch.Tensor, spec: InputSpec, rows: int) -> torch.Tensor:
    dim = next(place for place, size in enumerate(spec.shape) if isinstance(size, str))
    missing = rows - value.shape[dim]
    last = value.narrow(dim, value.shape[dim] - 1, 1)
    row = last if spec.pad == "repeat" else torch.full_like(last, spec.pad_value)
    return torch.cat([value] + [row] * missing, dim)


@pytest.mark.parametrize("source", ["host", "device", "mixed"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_padding_rows_hold_the_padding_value_at_every_step(mode: str, source: str) -> None:
    rng = random.Random(3)
    # Dimensions of any size are cut nowhere, so the padding rows come out as well.
    outputs: Any = {name: (None,) * len(spec.shape) for name, spec in SPECS.items()}
    with GraphRunner(
        look_and_soil,
        mode=mode,
        sizes=[2, 4, 8],
        max_num_reqs=8,
        max_num_tokens=8,
        inputs=SPECS,
        outputs=outputs,
        platform=DEVICE,
        options=GraphOptions(check="off"),
    ) as runner:
        runner.capture()
        for _ in range(60):
            tokens = rng.randint(1, 8)
            inputs = values(rng, tokens, reqs=rng.randint(1, tokens))
            on_device = {"host": (), "device": tuple(SPECS), "mixed": rng.sample(list(SPECS), 4)}
            sent = {
                name: value.to(DEVICE) if name in on_device[source] else value
                for name, value in inputs.items()
            }
            seen = runner(**sent)
            dispatch = runner.last_dispatch
            plan = runner.graphs.steps[dispatch.slot]
            rows = {
                "tokens": plan.descriptor.num_tokens,
                "reqs": plan.reqs,
                "reqs+1": plan.reqs + 1,
            }
            for name, spec in SPECS.items():
                axis = next(size for size in spec.shape if isinstance(size, str))
                expected = padded(inputs[name], spec, rows[axis])
                assert torch.equal(seen[name].cpu(), expected), f"{name} at {dispatch.descriptor}"
