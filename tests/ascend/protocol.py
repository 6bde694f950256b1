"""The update protocol under one schedule of the device: run by `test_tasks.py` under many."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from attention_models import Decoder, differing, eager_outputs, replay_all, replayed, runner, steps

from graphrt import (
    UNCHANGED,
    Batch,
    GraphOptions,
    GraphPool,
    GraphRunner,
    HostArg,
    InputSpec,
    UpdatableTask,
)
from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.core.base.errors import DeviceHangError, MissingUpdateError, TaskContractError

WAYS = [
    {"update_order": order, "update_strategy": strategy}
    for order in ("replay_first", "update_first")
    for strategy in ("groups", "auto_dispatch")
]


def platforms() -> list[AscendPlatform]:
    return [AscendPlatform(AscendOptions(**way)) for way in WAYS]


def equals_eager(layers: int, count: int, platform: AscendPlatform) -> None:
    """The host waits for nothing between the first step and the last one."""
    with runner(Decoder(layers), platform=platform) as run:
        run.capture()
        todo = steps(count, most=8, seed=layers)
        # Every third step repeats the lengths before it, half of these without passing them.
        for place in range(2, count, 3):
            todo[place] = todo[place - 1]
        outputs: list[torch.Tensor] = []
        for place, step in enumerate(todo):
            repeats = place % 6 == 5
            outputs.append(replayed(run, step, UNCHANGED if repeats else None))
        assert differing([out.cpu() for out in outputs], eager_outputs(run, todo)) == []


def two_graphs_in_one_pool(platform: AscendPlatform, count: int = 120) -> None:
    pool = GraphPool(platform)
    runs = [runner(Decoder(4, seed=seed), pool=pool) for seed in range(2)]
    for run in runs:
        run.capture()
    rng = random.Random(0)
    todo = [(rng.choice(runs), step) for step in steps(count, most=8)]
    outputs = [replayed(run, step) for run, step in todo]
    expected = [eager_outputs(run, [step])[0] for run, step in todo]
    assert differing([out.cpu() for out in outputs], expected) == []
    pool.close()


def two_threads(platform: AscendPlatform, count: int = 100) -> None:
    runs = [runner(Decoder(4, seed=seed), platform=platform) for seed in range(2)]
    for run in runs:
        run.capture()
    todo = [steps(count, most=8, seed=seed) for seed in range(2)]
    expected = [eager_outputs(run, own) for run, own in zip(runs, todo, strict=True)]
    results: dict[int, Any] = {}

    def work(place: int) -> None:
        torch.npu.set_device(0)
        try:
            with torch.npu.stream(torch.npu.Stream()):
                results[place] = replay_all(runs[place], todo[place], every=count)
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for place in range(2):
        if isinstance(results.get(place), BaseException):
            raise results[place]
        assert differing(results[place], expected[place]) == []


def beside_new_streams(*, before_updates: bool, waits: bool, count: int = 150) -> None:
    """Steps of one thread, and work of another one on each stream that torch_npu hands out, made
    before the first update or after it. With `waits` that work comes behind the steps."""
    with runner(Decoder(4)) as run:
        run.capture()
        todo = steps(count, most=8, seed=3)
        expected = eager_outputs(run, todo)
        if not before_updates:
            replayed(run, todo[0])
        streams, own = [torch.npu.Stream() for _ in range(40)], torch.npu.Stream()
        is_over, wrong = threading.Event(), []

        def work() -> None:
            torch.npu.set_device(0)
            x, place = torch.ones(64, device="npu"), 0
            torch.npu.synchronize()
            while not is_over.is_set():
                place += 1
                with torch.npu.stream(streams[place % 40]):
                    if waits:
                        torch.npu.current_stream().wait_stream(own)
                    wrong.append(x * place != place)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            with torch.npu.stream(own):
                outputs = replay_all(run, todo, every=count)
        finally:
            is_over.set()
            thread.join()
        torch.npu.synchronize()
        assert differing(outputs, expected) == []
        assert wrong and not any(each.any() for each in wrong)


class Boom(Exception):
    pass


class Failing(Decoder):
    """Raises in the update of one layer, before or after its operator was issued."""

    layer: str | None = None
    late = False
    error: type[BaseException] = Boom

    def __post_init__(self) -> None:
        super().__post_init__()
        issue, calls = self.task.issue, [0]

        def issue_or_fail(*args: Any, **kwargs: Any) -> None:
            calls[0] += 1
            fails = self.layer == f"layers.{(calls[0] - 1) % self.layers}"
            if fails and not self.late:
                calls[0] = 0
                raise self.error(self.layer)
            issue(*args, **kwargs)
            if fails:
                calls[0] = 0
                raise self.error(self.layer)

        self.task.issue = issue_or_fail

    def watch(self, run: GraphRunner) -> None:
        """Fail in torch_npu's own records too, which do not come back here."""
        (wrapper,) = run.graphs.owners()
        for entry in wrapper.entries.values():
            for task in entry.tasks:
                if task.handle.record is not None:
                    task.handle.record.op_cache_entry = _Record(self, task)


class _Record:
    """The operator of one of torch_npu's records."""

    def __init__(self, decoder: Failing, task: Any) -> None:
        self._decoder, self._task = decoder, task
        self._operator = task.handle.record.op_cache_entry
        self.__name__, self._schema = self._operator.__name__, self._operator._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fails = self._decoder.layer == self._task.name
        if fails and not self._decoder.late:
            raise self._decoder.error(self._task.name)
        output = self._operator(*args, **kwargs)
        if fails:
            raise self._decoder.error(self._task.name)
        return output


def a_failing_update_leaves_a_usable_device(
    platform: AscendPlatform, *, waits: bool = True
) -> None:
    """Each layer fails before its operator is issued, and after; where the host `waits` the steps
    begin on a device that has settled too, else nothing waits from the first to the last."""
    decoder = Failing(4)
    with runner(decoder, sizes=(8,), platform=platform) as run:
        run.capture()
        decoder.watch(run)
        todo = steps(4 * 8, most=8)
        expected = eager_outputs(run, todo)
        outputs = []
        for place in range(0, len(todo), 4):
            outputs.append(replayed(run, todo[place]))
            decoder.layer, decoder.late = f"layers.{place // 4 % 4}", place >= 16
            with pytest.raises(Boom, match="layers"):
                replayed(run, todo[place + 1])
            decoder.layer = None
            with pytest.raises(MissingUpdateError, match="half-way"):
                replayed(run, todo[place], UNCHANGED)
            # Once right behind the failure, and once after everything has settled.
            outputs.append(replayed(run, todo[place + 1]))
            outputs.append(replayed(run, todo[place + 2]))
            if waits:
                torch.npu.synchronize()
            outputs.append(replayed(run, todo[place + 3]))
        assert differing([out.cpu() for out in outputs], expected) == []


def new_streams(platform: AscendPlatform, count: int = 70) -> None:
    """Each step on another stream; torch_npu's 33rd is its first."""
    with runner(Decoder(3), platform=platform) as run:
        run.capture()
        todo, outputs = steps(count, most=8), []
        for step in todo:
            before = torch.npu.current_stream()
            with torch.npu.stream(torch.npu.Stream()):
                torch.npu.current_stream().wait_stream(before)
                outputs.append(replayed(run, step))
                # As a host's next step would, or as its sampler does.
                before.wait_stream(torch.npu.current_stream())
        assert differing([out.cpu() for out in outputs], eager_outputs(run, todo)) == []


def captured_between(platform: AscendPlatform) -> None:
    """Captures of one runner between steps of another one, whose updates are under way."""
    with runner(Decoder(3), platform=platform) as run:
        run.capture()
        todo = steps(24, most=8)
        replays = []
        for place, step in enumerate(todo):
            replays.append(replayed(run, step))
            if place % 8 == 7:
                with runner(Decoder(2, seed=place), sizes=(8,), platform=platform) as other:
                    other.capture()
                    own = steps(3, most=8, seed=place)
                    outputs = [replayed(other, each) for each in own]
                    assert differing([o.cpu() for o in outputs], eager_outputs(other, own)) == []
        assert differing([out.cpu() for out in replays], eager_outputs(run, todo)) == []


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
        outputs = [replayed(run, todo[0])]
        decoder.active = True
        # A trial of the changed attribute may have counted calls before the update does.
        with pytest.raises(TaskContractError, match=r"layers\.\d"):
            replayed(run, todo[1])
        decoder.active = False
        outputs += [replayed(run, step) for step in todo[1:]]
        assert differing([out.cpu() for out in outputs], expected) == []


def another_number_of_kernels(count: int, queue: str) -> None:
    """The device answers 507000 and the next step is right; not where the queue of launches has
    taken one kernel too many, as that ends it."""

    def issue(x: torch.Tensor, out: torch.Tensor, *, times: int) -> None:
        for _ in range(times):
            torch.add(x, 1, out=out)

    spec = {"times": HostArg(axis=None)}
    task = UpdatableTask("adds", issue, spec, at_capture=lambda _: {"times": 2})
    buffer = torch.zeros(4, device="npu")

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = buffer[: len(x)]
        task(x, out)
        return out * 2

    inputs = {"x": InputSpec(torch.float32, ("tokens",))}
    run = GraphRunner(forward, sizes=[4], inputs=inputs, options=GraphOptions(check="off"))
    run.capture()
    x = torch.arange(4.0, device="npu")
    ends = queue == "1" and count > 2
    error = DeviceHangError if ends else TaskContractError
    with pytest.raises(error, match="adds"):
        run(Batch(4), updates={"adds": {"times": count}}, x=x)
    if not ends:
        torch.npu.synchronize()
        right = run(Batch(4), updates={"adds": {"times": 2}}, x=x)
        assert right.tolist() == [2, 4, 6, 8]


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


def all_of_it(platform: AscendPlatform, *, layers: int = 4, count: int = 300) -> None:
    """Every check of the protocol that one process can make."""
    equals_eager(layers, count, platform)
    two_graphs_in_one_pool(platform, count)
    two_threads(platform, count)
    for waits in (True, False):
        a_failing_update_leaves_a_usable_device(platform, waits=waits)
    new_streams(platform, min(count, 70))
    captured_between(platform)
