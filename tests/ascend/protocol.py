"""The update protocol under one schedule of the device: run by `test_tasks.py` under many."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import Decoder, differing, eager_outputs, replay_all, replayed, runner, steps

from graphrt import UNCHANGED, GraphOptions, GraphPool
from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.core.base import DeviceHangError, MissingUpdateError, TaskContractError

WAYS = [
    {"update_order": order, "update_strategy": strategy}
    for order in ("replay_first", "update_first")
    for strategy in ("groups", "auto_dispatch")
]


def platforms() -> list[AscendPlatform]:
    return [AscendPlatform(AscendOptions(**way)) for way in WAYS]


def equals_eager(layers: int, count: int, platform: AscendPlatform) -> None:
    with runner(Decoder(layers), platform=platform) as run:
        run.capture()
        todo = steps(count, most=8, seed=layers)
        # Every third step repeats the lengths before it, half of these without passing them.
        for place in range(2, count, 3):
            todo[place] = todo[place - 1]
        found: list[torch.Tensor] = []
        for place, step in enumerate(todo):
            repeats = place % 6 == 5
            found.append(replayed(run, step, UNCHANGED if repeats else None))
            if place % 5 == 4:
                torch.npu.synchronize()
        assert differing([out.cpu() for out in found], eager_outputs(run, todo)) == []


def two_graphs_in_one_pool(platform: AscendPlatform) -> None:
    pool = GraphPool(platform)
    runs = [runner(Decoder(4, seed=seed), pool=pool) for seed in range(2)]
    for run in runs:
        run.capture()
    rng = random.Random(0)
    todo = [(rng.choice(runs), step) for step in steps(120, most=8)]
    found: list[torch.Tensor] = []
    for place, (run, step) in enumerate(todo):
        found.append(replayed(run, step))
        if place % 10 == 9:
            torch.npu.synchronize()
    expected = [eager_outputs(run, [step])[0] for run, step in todo]
    assert differing([out.cpu() for out in found], expected) == []


def two_threads(platform: AscendPlatform) -> None:
    runs = [runner(Decoder(4, seed=seed), platform=platform) for seed in range(2)]
    for run in runs:
        run.capture()
    todo = [steps(100, most=8, seed=seed) for seed in range(2)]
    expected = [eager_outputs(run, own) for run, own in zip(runs, todo, strict=True)]
    found: dict[int, Any] = {}

    def work(place: int) -> None:
        torch.npu.set_device(0)
        try:
            with torch.npu.stream(torch.npu.Stream()):
                found[place] = replay_all(runs[place], todo[place], every=10)
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for place in range(2):
        if isinstance(found.get(place), BaseException):
            raise found[place]
        assert differing(found[place], expected[place]) == []


class Boom(Exception):
    pass


class Failing(Decoder):
    """Raises in the update of one layer, before or after its operator was issued."""

    layer: str | None = None
    late = False

    def __post_init__(self) -> None:
        super().__post_init__()
        issue, calls = self.task.issue, [0]

        def issue_or_fail(*args: Any, **kwargs: Any) -> None:
            calls[0] += 1
            fails = self.layer == f"layers.{(calls[0] - 1) % self.layers}"
            if fails and not self.late:
                calls[0] = 0
                raise Boom(self.layer)
            issue(*args, **kwargs)
            if fails:
                calls[0] = 0
                raise Boom(self.layer)

        self.task.issue = issue_or_fail


def a_failing_update_leaves_a_usable_device(platform: AscendPlatform) -> None:
    decoder = Failing(4)
    with runner(decoder, sizes=(8,), platform=platform) as run:
        run.capture()
        todo = steps(4 * 8, most=8)
        expected = eager_outputs(run, todo)
        found = []
        for place in range(0, len(todo), 4):
            found.append(replayed(run, todo[place]))
            decoder.layer, decoder.late = f"layers.{place // 4 % 4}", place >= 16
            with pytest.raises(Boom, match="layers"):
                replayed(run, todo[place + 1])
            decoder.layer = None
            with pytest.raises(MissingUpdateError, match="half-way"):
                replayed(run, todo[place], UNCHANGED)
            # Once right behind the failure, and once after everything has settled.
            found.append(replayed(run, todo[place + 1]))
            found.append(replayed(run, todo[place + 2]))
            torch.npu.synchronize()
            found.append(replayed(run, todo[place + 3]))
        assert differing([out.cpu() for out in found], expected) == []


class Twice(Decoder):
    """Issues the operator of its third layer twice, where it is told to."""

    active = False

    def __post_init__(self) -> None:
        super().__post_init__()
        issue, calls = self.task.issue, [0]

        def issue_twice(*args: Any, **kwargs: Any) -> None:
            issue(*args, **kwargs)
            calls[0] = (calls[0] + 1) % self.layers if self.active else 0
            if calls[0] == 3:
                calls[0] = 0
                issue(*args, **kwargs)

        self.task.issue = issue_twice


def another_operator(order: Any) -> None:
    """Where torch_npu has no queue of launches, the next step is served right."""
    platform, decoder = AscendPlatform(AscendOptions(update_order=order)), Twice(4)
    with runner(decoder, sizes=(8,), platform=platform) as run:
        run.capture()
        todo = steps(3, most=8)
        expected = eager_outputs(run, todo)
        found = [replayed(run, todo[0])]
        decoder.active = True
        with pytest.raises(TaskContractError, match=r"layers\.2"):
            replayed(run, todo[1])
        decoder.active = False
        found += [replayed(run, step) for step in todo[1:]]
        assert differing([out.cpu() for out in found], expected) == []


def ended_queue() -> None:
    """Where it has one, that is over."""
    platform, decoder = AscendPlatform(), Twice(4)
    # A trial would meet the failing operator first in a run of its own.
    run = runner(decoder, sizes=(8,), platform=platform, options=GraphOptions(check="off"))
    run.capture()
    (step,) = steps(1, most=8)
    decoder.active = True
    with pytest.raises(DeviceHangError, match=r"layers\.2") as caught:
        replayed(run, step)
    assert caught.value.task == "layers.2"


def every_platform(check: Callable[[AscendPlatform], None]) -> None:
    for platform in platforms():
        check(platform)


def all_of_it() -> None:
    """Everything, in the smaller sizes, with every order and strategy."""
    every_platform(lambda platform: equals_eager(4, 60, platform))
    every_platform(two_graphs_in_one_pool)
    every_platform(two_threads)
    for platform in platforms():
        if platform.options.update_strategy == "groups":
            a_failing_update_leaves_a_usable_device(platform)
