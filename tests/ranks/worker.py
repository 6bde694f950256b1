"""One rank of a test: makes steps of its own batches, logs every collective of its forward, and
writes what it saw. Started by `launch`.

The forward sums over ranks in an eager part, so two ranks with other graphs would sum other rows.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphrt import (
    Batch,
    BatchDescriptor,
    Budget,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    current_context,
    eager_break,
    errors,
)
from graphrt.core.base.errors import GraphRTError, PoolAsleepError
from graphrt.core.capture import limit as limits
from graphrt.core.device.contract import Capability
from graphrt.cpu import CpuPlatform
from graphrt.ranks import Agreement

WIDTH = 8


class Tried(CpuPlatform):
    """The CPU, of which a failed capture costs nothing, and which is said to run nothing in it."""

    capture_executes = False
    capabilities = CpuPlatform.capabilities | {Capability.FREE_FAILURES}


class Greedy(CpuPlatform):
    """The CPU, on which memory holds twice as much."""

    def memory_bytes(self, memory: Any) -> int:
        return 2 * super().memory_bytes(memory)


class Driven(CpuPlatform):
    """The CPU, whose driver takes a MiB for each graph."""

    made = 0

    def new_graph(self) -> Any:
        self.made += 1
        return super().new_graph()

    def driver_bytes(self) -> int:
        return self.made << 20


class Forgetful(CpuPlatform):
    """The CPU, on which memory of graphs does not come back after a sleep."""

    def restore(self, memory: Any, saved: Any) -> bool:
        return False


class FirstCalls:
    """A `Host(bind=)` that lets the first capture of a size fail."""

    def __init__(self, fails_at: int = 0, error: str = "") -> None:
        self._fails_at, self._error = fails_at, error

    def __call__(self, buffers: Any, descriptor: BatchDescriptor, phase: str) -> None:
        if phase == "capture" and descriptor.num_tokens == self._fails_at:
            self._fails_at = 0
            raise getattr(errors, self._error)("a first call")


class Model:
    """A scale per rank and layer, and a sum over ranks between two layers."""

    def __init__(self, group: Any, log: list[Any], *, counts: bool) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH)
        self.scale = 1.0
        self.unused = 0
        self.turn = "turn", 0
        self.dies = False
        self.sums_rows = False
        self.is_alone = False
        self._group, self._log, self._counts = group, log, counts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.weight)
        if self.is_alone:
            return hidden * self.scale
        if self._counts:
            name, run = self.turn
            self.turn = name, run + 1
            # Of which a rank whose rows are zeros sees nothing.
            hidden = hidden * 2.0 if run % 3 == 2 else hidden
        return (hidden + self.summed(hidden)) * self.scale

    def summed(self, hidden: torch.Tensor) -> torch.Tensor:
        return _sum_over_ranks(hidden, self)


COLLECTIVES = itertools.count()
"""How many this rank has made. An iterator: trials put back what else they find in Python."""


@eager_break
def _sum_over_ranks(hidden: torch.Tensor, model: Model) -> torch.Tensor:
    if model.dies:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = float(len(hidden))
    if model.sums_rows:
        # Gloo ends all processes if a rank has another number of rows.
        dist.all_reduce(hidden.clone(), group=model._group)
    total = torch.tensor([rows, rows * rows])
    dist.all_reduce(total, group=model._group)
    mean, square = (total / dist.get_world_size()).tolist()
    agree = mean * mean == square
    # Without a graph for all each rank runs its own rows; of one graph all have the same.
    model._log.append(rows if agree else 0)
    next(COLLECTIVES)
    is_replayed = current_context().mode is not GraphMode.NONE
    return torch.zeros(WIDTH) + (float("nan") if is_replayed and not agree else 0.0)


def batches(random_batches: random.Random, case: dict[str, Any]) -> Batch | None:
    """The next batch of a rank; None where it is idle."""
    if random_batches.random() < case.get("idle", 0.0):
        return None
    query_len = random_batches.choice(case.get("query_lens", [1]))
    most = case["sizes"][-1] + case.get("beyond", 0)
    reqs = random_batches.randint(1, max(most // query_len, 1))
    loras = random_batches.choice(case.get("loras", [0]))
    uniform = random_batches.random() < case.get("uniform", 1.0)
    return Batch(reqs * query_len, reqs, query_len if uniform else None, num_active_loras=loras)


def platform_of(case: dict[str, Any], mine: dict[str, Any]) -> CpuPlatform:
    if case.get("tried"):
        return Tried()
    kinds = {"greedy": Greedy, "drives": Driven, "forgets": Forgetful}
    return next((kinds[each]() for each in kinds if mine.get(each)), CpuPlatform())


def main(
    case: dict[str, Any],
    log: list[Any],
    steps: list[Any],
    wrong: list[Any],
    reasons: dict[str, int],
) -> None:
    group = dist.new_group(backend="gloo")
    limits.PACE, limits.REST = case.get("pace", limits.PACE), case.get("pace", limits.REST)
    model = Model(group, log, counts=case.get("counts", False))
    model.sums_rows = case.get("sums_rows", False)
    model.is_alone = case.get("alone", False)
    plan = dict(case.get("plan", {}))
    mine = case.get("of_rank", {}).get(str(dist.get_rank()), {})
    plan.update(mine.get("plan", {}))
    if "device_bytes" in case:
        plan["budget"] = Budget(device_bytes=case["device_bytes"])
    if mine.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    with (
        Agreement(timeout_s=case.get("timeout_s", 20.0), same=mine.get("same")) as agreement,
        GraphRunner(
            model,
            mode=case.get("mode", "PIECEWISE"),
            sizes=case["sizes"],
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            outputs=("tokens", WIDTH),
            options=GraphOptions(
                check=mine.get("check", case.get("check", "capture")),
                lazy=case.get("lazy", False),
                **case.get("limit", {}),
            ),
            host=Host(ranks=agreement, bind=FirstCalls(*mine.get("fails_at", ()))),
            pool=GraphPool(platform_of(case, mine), around_memory=nullcontext),
            **plan,
        ) as runner,
    ):
        # A rank that starts late is none that is lost: under load the first one would give up.
        dist.barrier(group)
        try:
            LAST[0] = time.monotonic()
            if not case.get("lazy") and "next" not in case:
                runner.capture()
            take_steps(case, mine, model, agreement, runner, steps, wrong)
        except GraphRTError:
            LAST[1] = time.monotonic()
            raise
        if case.get("tried"):
            log += [[each.descriptor.num_tokens, each.attempts] for each in runner.report().graphs]
        log += [[key.num_tokens for _, key in runner.plan.keys]] if "device_bytes" in case else []
        if "limit" in case:
            figures = runner.report().limit
            log.append([figures.graphs, figures.captures, figures.evictions])
        reasons.update({reason.name: n for reason, n in runner.report().reasons.items() if n})


def rank_of(case: dict[str, Any]) -> dict[str, Any]:
    """What one rank saw."""
    dist.init_process_group("gloo")
    seen: dict[str, Any] = {"log": [], "steps": [], "wrong": []}
    reasons: dict[str, int] = {}
    try:
        main(case, seen["log"], seen["steps"], seen["wrong"], reasons)
    except GraphRTError as error:
        took = LAST[1] - LAST[0]
        return seen | {"error": type(error).__name__, "text": str(error), "took": took}
    return seen | {"reasons": reasons, "collectives": next(COLLECTIVES)}


LAST = [0.0, 0.0]
"""When the last step, or the capture, began, and when its error was raised."""


def take_steps(
    case: dict[str, Any],
    mine: dict[str, Any],
    model: Model,
    agreement: Agreement,
    runner: GraphRunner[Any],
    steps: list[Any],
    wrong: list[Any],
) -> None:
    chosen = random.Random(f"{case.get('seed', 0)} {agreement.rank}")
    for number in range(case["steps"]):
        LAST[0] = time.monotonic()
        fault = mine.get("fault")
        if fault and fault["at"] == number:
            inject(fault, runner, model)
            if fault["kind"] == "skip":
                continue
        if "next" in case:
            runner.capture_next()
        if number == case.get("sleeps_at"):
            runner.pool.suspend()
            try:
                runner(Batch(1), x=torch.zeros(1, WIDTH))
            except PoolAsleepError:
                runner.pool.resume()
        if number == case.get("recaptures_at"):
            runner.recapture()
        batch = batches(chosen, case)
        if batch is None:
            dispatch = agreement.idle(runner)
        else:
            x = torch.randn(batch.num_tokens, WIDTH) * mine.get("times", 1.0)
            y = runner(batch, x=x)
            expected = torch.tanh(x @ model.weight) * model.scale
            if not torch.allclose(y, expected, atol=1e-5):
                wrong.append(
                    [number, runner.last_dispatch.mode.name, runner.last_dispatch.reason.name]
                )
            dispatch = runner.last_dispatch
        assert dispatch is not None
        # A graph in quarantine on one rank alone runs eagerly there, at the size of the graph.
        mode = dispatch.mode.name
        size = 0 if dispatch.reason is Reason.RANKS_DISAGREE else dispatch.descriptor.num_tokens
        steps.append([mode, size, dispatch.reason.name])


def inject(fault: dict[str, Any], runner: Any, model: Model) -> None:
    kind = fault["kind"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "kill inside":
        model.dies = True
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "delay":
        time.sleep(fault["s"])
    elif kind == "raise":
        raise GraphRTError("a planted error")
    elif kind == "attribute":
        setattr(model, fault["name"], fault["to"])
        if fault.get("told"):
            # Where nobody tells of changes they are found some steps later.
            runner.weights_changed()
    elif kind == "release":
        runner.release()
    elif kind == "drop":
        published = runner.dispatcher.published
        graph = next(each for each in published if each.descriptor.num_tokens == fault["size"])
        runner.dispatcher.withdraw(graph.mode, graph.descriptor)


def run(case: dict[str, Any], folder: str, rank: int, environment: dict[str, str]) -> None:
    """One rank, in its process: writes what it saw into a file of the folder."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        seen = rank_of(case)
    except BaseException:
        seen = {"raw": traceback.format_exc()}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    # What a broken group still waits for is of no interest.
    os._exit(0)
