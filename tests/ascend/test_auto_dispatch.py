"""Tasks that torch_npu brackets and updates by itself: what is handed to it, and taken back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_models import Decoder, runner
from fake_npu import FakeGraph, FakeNpu, FakeSignal
from protocol import Twice

from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.ascend.update.brackets import AutoDispatch, TaskHandle
from graphrt.core.base.errors import InvalidUpdateError, MissingCapabilityError, TaskContractError
from graphrt.core.replay.tasks import UpdatableTask


class Mode:
    """torch_npu's dispatch mode of one graph."""

    def __init__(self, npu: FakeNpu) -> None:
        self.npu = npu
        self.update_stream = "torch_npu's"
        self.graph_dispatch_records: list[Any] = []

    def __enter__(self) -> None:
        self.npu.log.append("mode entered")

    def __exit__(self, *error: object) -> None:
        self.npu.log.append("mode left")


class Graph(FakeGraph):
    """One that torch_npu can update; `boom` is raised by its operator."""

    boom: BaseException | None = None

    def __init__(self, npu: FakeNpu) -> None:
        super().__init__(npu)
        self.auto_dispatch_capture = False
        self.graph_dispatch_mode = Mode(npu)

    def update(self, values: list[dict[str, Any]]) -> None:
        mode = self.graph_dispatch_mode
        names = [record.name for record in mode.graph_dispatch_records]
        self.npu.log.append(f"{mode.update_stream} updates {names} to {values}")
        if self.boom is not None:
            raise self.boom


class Npu(FakeNpu):
    def NPUGraph(self) -> Graph:
        return Graph(self)


def record(npu: FakeNpu, name: str) -> Any:
    """A call `operator(query, lengths, scale=1)`, as torch_npu notes it."""
    arguments = [SimpleNamespace(name=each) for each in ("query", "lengths")]
    entry = SimpleNamespace(__name__=name, _schema=SimpleNamespace(arguments=arguments))
    return SimpleNamespace(
        name=name,
        op_cache_entry=entry,
        args=["query", torch.zeros(2, dtype=torch.int32)],
        kwargs={"scale": 1},
        handle=f"group of {name}",
        event=FakeSignal(npu, name),
    )


class World:
    def __init__(self) -> None:
        self.npu = Npu()
        self.graph = self.npu.NPUGraph()
        self.records = self.graph.graph_dispatch_mode.graph_dispatch_records
        self.brackets = AutoDispatch(self.npu)

    def task(self, *names: str) -> TaskHandle:
        self.brackets.begin(self.graph)
        self.records += [record(self.npu, name) for name in names]
        return self.brackets.end(self.graph)

    def update(self, handle: TaskHandle, **values: Any) -> list[str]:
        update: Any = SimpleNamespace(name="task", handle=handle, values=values)
        self.npu.told()
        self.brackets.issue(self.graph, self.npu.pool[0], update)
        return self.npu.told()


def test_each_task_keeps_the_record_its_operator_left():
    world = World()
    first, second = world.task("first"), world.task("second")
    assert world.npu.told() == ["mode entered", "mode left"] * 2
    assert world.graph.auto_dispatch_capture
    assert (first.group, second.group) == ("group of first", "group of second")
    assert [first.record, second.record] == world.records


@pytest.mark.parametrize("names", [(), ("one", "two")])
def test_a_task_of_zero_or_several_operators_is_refused(names):
    world = World()
    world.task("before")
    with pytest.raises(TaskContractError, match="not one operator") as caught:
        world.task(*names)
    assert str(list(names)) in str(caught.value)
    world.npu.told()
    world.brackets.abort(world.graph)
    assert world.npu.told() == []


def test_an_update_changes_only_its_task_record_on_the_pools_stream():
    world = World()
    world.task("first")
    handle = world.task("second")
    (told,) = world.update(handle, lengths=[3, 4], scale=2)
    assert told == (
        "S0 updates ['second'] to [{'lengths': tensor([3, 4], dtype=torch.int32), 'scale': 2}]"
    )
    assert [each.name for each in world.records] == ["first", "second"]
    assert world.graph.graph_dispatch_mode.graph_dispatch_records is world.records


def test_an_update_argument_that_torch_npu_would_ignore_is_refused():
    world = World()
    handle = world.task("only")
    with pytest.raises(InvalidUpdateError, match="'mask'"):
        world.update(handle, mask=1)
    assert world.npu.told() == []


@pytest.mark.parametrize("boom", [ValueError("boom"), KeyboardInterrupt()])
def test_a_failed_update_is_closed_and_keeps_all_records(boom):
    world = World()
    world.task("first")
    handle = world.task("second")
    world.graph.boom = boom
    with pytest.raises(type(boom)):
        world.update(handle, scale=2)
    assert world.npu.told()[1:] == ["S0 end"]
    assert [each.name for each in world.records] == ["first", "second"]
    assert world.graph.graph_dispatch_mode.graph_dispatch_records is world.records


def test_aborting_a_task_leaves_its_dispatch_mode_and_group():
    world = World()
    world.brackets.abort(world.graph)
    assert world.npu.told() == []
    world.brackets.begin(world.graph)
    world.npu.told()
    for _ in range(2):
        world.brackets.abort(world.graph)
    assert world.npu.told() == ["mode left", "C group end"]


def test_a_torch_npu_without_auto_dispatch_is_refused():
    npu = Npu()
    npu.NPUGraph = lambda: object()  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(MissingCapabilityError, match="auto_dispatch"):
        AutoDispatch(npu)


AUTO = AscendOptions(update_strategy="auto_dispatch")


@pytest.mark.npu
def test_a_task_of_two_operators_is_refused_at_capture():
    decoder = Twice(4)
    with runner(decoder, sizes=(8,), platform=AscendPlatform(AUTO)) as run:
        decoder.active = True
        with pytest.raises(TaskContractError, match="not one operator"):
            run.capture()
        decoder.active = False
        run.capture()


@pytest.mark.npu
def test_an_operator_without_a_handler_is_refused_at_capture():
    decoder = Decoder(2)

    def issue(query: Any, *args: Any, out: list[torch.Tensor], **kwargs: Any) -> None:
        torch.add(query, 1, out=out[0])

    task = UpdatableTask("attention", issue, decoder.task.host_args)
    task.at_capture = decoder.task.at_capture
    decoder.task = task  # type: ignore[assignment]
    run = runner(decoder, sizes=(8,), platform=AscendPlatform(AUTO))
    with pytest.raises(TaskContractError, match="not one operator"):
        run.capture()
    run.close()
