"""Ranks on GPUs of their own, with NCCL in FULL graphs or between pieces, and votes over gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphrt import Batch, GraphRunner, Host, InputSpec, eager_break
from graphrt.errors import GraphRTError
from graphrt.ranks import Agreement
from tests.ranks.launching import PATIENCE

WIDTH, SIZES, RANKS = 256, [1, 2, 4, 8, 16], 2

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


def rank_of(rank: int, port: int, mode: str, steps: int, dies_at: int | None) -> dict[str, Any]:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH

    def summed(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    sum_over_ranks = eager_break(summed) if mode == "PIECEWISE" else summed

    def forward(x: torch.Tensor) -> torch.Tensor:
        numbers = sum_over_ranks(torch.ones_like(x) * (rank + 1))
        return torch.tanh(x @ weight) + numbers

    chosen, seen, wrong, began = random.Random(rank), [], 0, 0.0
    spec = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
    try:
        with (
            Agreement(timeout_s=6, abort=[dist.group.WORLD]) as agreement,
            GraphRunner(
                forward,
                mode=mode,
                sizes=SIZES,
                inputs=spec,
                outputs=("tokens", WIDTH),
                host=Host(ranks=agreement),
            ) as runner,
        ):
            runner.capture()
            for number in range(steps):
                began = time.monotonic()
                if number == dies_at and rank == RANKS - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                tokens = chosen.randrange(17)
                if tokens == 0:
                    seen.append(agreement.idle(runner).descriptor.num_tokens)
                    continue
                x = torch.randn(tokens, WIDTH, device="cuda")
                y = runner(Batch(tokens, tokens), x=x)
                expected = torch.tanh(x @ weight) + RANKS * (RANKS + 1) / 2
                wrong += not torch.allclose(y, expected, atol=1e-3)
                seen.append(runner.last_dispatch.descriptor.num_tokens)
    except GraphRTError as error:
        return {"error": type(error).__name__, "text": str(error), "took": time.monotonic() - began}
    return {"steps": seen, "wrong": wrong}


def run(rank: int, folder: str, *rest: Any) -> None:
    try:
        seen = rank_of(rank, *rest)
    except BaseException:
        seen = {"raw": traceback.format_exc()}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    os._exit(0)


def launch(folder: Path, mode: str, steps: int, dies_at: int | None = None) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=run, args=(rank, str(folder), port, mode, steps, dies_at))
        for rank in range(RANKS)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    hang = [rank for rank, process in enumerate(started) if process.is_alive()]
    for process in started:
        process.kill()
    assert not hang
    paths = [Path(folder, f"{rank}.json") for rank in range(RANKS)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in paths]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_ranks_with_nccl_replay_the_same_graphs_for_random_batches(
    tmp_path: Path, mode: str
) -> None:
    first, second = launch(tmp_path, mode, 500)
    assert first == second, (first, second)
    assert first["wrong"] == 0
    assert set(first["steps"]) <= set(SIZES)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_killed_rank_is_named_by_the_remaining_rank_within_the_timeout(
    tmp_path: Path, mode: str
) -> None:
    first, second = launch(tmp_path, mode, 500, dies_at=50)
    assert second == {}
    assert first["error"] == "RankLostError", first
    assert "rank 1" in first["text"]
    assert first["took"] < 12 * PATIENCE
