"""The update protocol under every schedule of the device, in this process."""

from __future__ import annotations

import protocol
import pytest
from attention_models import replayed, runner, steps
from schedules import SCHEDULES, need_simulator, scheduled

from graphrt.ascend import AscendOptions, AscendPlatform
from tests.draws import rest_long

pytestmark = pytest.mark.npu

ALL = ("eager", *SCHEDULES)


def platform_of(way: dict[str, str]) -> AscendPlatform:
    return AscendPlatform(AscendOptions(**way))  # type: ignore[arg-type]


def ids(way: dict[str, str]) -> str:
    return "-".join(way.values())


@pytest.mark.parametrize("way", protocol.WAYS, ids=ids)
@pytest.mark.parametrize("waits", [True, False])
def test_an_update_that_raises_at_any_task_leaves_a_usable_device(way, waits):
    protocol.a_failing_update_leaves_a_usable_device(platform_of(way), waits=waits)


def test_torch_npus_records_of_tasks_stay_the_same_across_steps():
    """A host may update the graph by itself, or look what was captured."""
    decoder = protocol.Failing(3)
    platform = platform_of({"update_strategy": "auto_dispatch"})
    with runner(decoder, sizes=(8,), platform=platform) as run:
        run.capture()
        decoder.watch(run)
        (entry,) = run.graphs.owners()[0].entries.values()
        records = [task.handle.record for task in entry.tasks]
        mode = entry.parts[0].graph.graph_dispatch_mode
        todo = steps(2, most=8)
        replayed(run, todo[0])
        assert mode.graph_dispatch_records == records and len(records) == 3
        decoder.layer = "layers.1"
        with pytest.raises(protocol.Boom):
            replayed(run, todo[1])
        assert mode.graph_dispatch_records == records


# One way each, so that all four meet many; the long tests take every pair.
@pytest.mark.parametrize(
    ("schedule", "way"),
    rest_long(
        [(schedule, protocol.WAYS[place % 4]) for place, schedule in enumerate(SCHEDULES)],
        *(*SCHEDULES[:8], SCHEDULES[-1]),
        name=lambda case: case[0],
    ),
    ids=lambda value: value if isinstance(value, str) else ids(value),
)
def test_task_updates_equal_eager_under_every_device_schedule(schedule, way):
    need_simulator()
    with scheduled(schedule):
        protocol.all_of_it(platform_of(way), count=24)


@pytest.mark.long
@pytest.mark.parametrize("way", protocol.WAYS, ids=ids)
@pytest.mark.parametrize("schedule", ALL)
def test_300_steps_of_task_updates_equal_eager_under_every_schedule(schedule, way):
    need_simulator()
    with scheduled(schedule):
        protocol.all_of_it(platform_of(way))


@pytest.mark.long
@pytest.mark.parametrize("way", protocol.WAYS, ids=ids)
@pytest.mark.parametrize("schedule", ALL)
def test_300_steps_of_64_layers_equal_eager_under_every_schedule(schedule, way):
    need_simulator()
    with scheduled(schedule):
        protocol.equals_eager(64, 300, platform_of(way))
