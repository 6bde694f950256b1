"""Task update of a layer's two Triton kernels, like a decode attention that is split by length."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt import Batch, GraphRunner, HostArg, InputSpec, UpdatableTask

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.cuda

WIDTH, LAYERS, LONGEST, SPLIT = 128, 6, 96, 8


@triton.jit(do_not_specialize=["length"])
def sum_split(x, cache, partial, length, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    token, split = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for row in range(ROWS):
        at = split * ROWS + row
        total += tl.load(cache + at * WIDTH + column, mask=(column >= 0) & (at < length), other=0.0)
    scaled = total * tl.load(x + token * WIDTH + column)
    tl.store(partial + (token * tl.num_programs(1) + split) * WIDTH + column, scaled)


@triton.jit(do_not_specialize=["splits"])
def combine(partial, out, splits, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for split in range(splits):
        total += tl.load(partial + (token * splits + split) * WIDTH + column)
    tl.store(out + token * WIDTH + column, total)


def attend(x, cache, partial, out, *, length):
    splits = max(1, -(-length // SPLIT))
    sum_split[(len(x), splits)](x, cache, partial, length, ROWS=SPLIT, WIDTH=WIDTH)
    combine[(len(x),)](partial, out, splits, WIDTH=WIDTH)


def attention_model():
    caches = [torch.randn(LONGEST, WIDTH, device="cuda") for _ in range(LAYERS)]
    partial = torch.empty(4, LONGEST // SPLIT, WIDTH, device="cuda")
    task = UpdatableTask(
        "attention", attend, {"length": HostArg(None)}, at_capture=lambda _: {"length": LONGEST}
    )

    def forward(x):
        for layer, cache in enumerate(caches):
            out = torch.empty_like(x)
            task(x, cache, partial, out, task=f"attention.{layer}")
            x = x * 0.5 + out / (1 + out.abs())
        return x

    return forward


def test_both_kernels_of_each_layer_are_updated_with_their_grids():
    chosen = random.Random(0)
    runner = GraphRunner(
        attention_model(),
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=("tokens",),
        mode="FULL",
        sizes=[4],
        max_num_reqs=4,
        platform="cuda",
    )
    with runner:
        runner.capture()
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        batch, steps = Batch(4, 4, 1), []
        for _ in range(200):
            x, updates = (
                torch.randn(4, WIDTH),
                {"attention": {"length": chosen.randint(1, LONGEST)}},
            )
            steps.append((x, updates, runner(batch, x=x, updates=updates).clone()))
        for x, updates, out in steps:
            dispatch = runner.dispatcher.dispatch(batch)
            assert torch.equal(out, runner.run_padded_eagerly(batch, dispatch, {"x": x}, updates))
        figures = runner.pool.update_figures()
        assert figures is not None
        assert figures.patches == 2 * figures.reissues and figures.failed == 0
