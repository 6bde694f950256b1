"""ATB's paged and latent attention, captured in graphs and updated at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from atb_models import LatentDecoder, PagedDecoder, runner, steps
from attention_models import differing, eager_outputs, replayed
from protocol import WAYS
from schedules import SCHEDULES, need_simulator, scheduled

from graphrt import UNCHANGED
from graphrt.ascend import AscendOptions, AscendPlatform
from graphrt.core.base.errors import InvalidUpdateError, TaskContractError

pytestmark = pytest.mark.npu

KINDS: dict[str, Any] = {
    "paged": PagedDecoder,
    "latent": LatentDecoder,
    "speculative": lambda layers: LatentDecoder(layers, queries=2),
    "sums": lambda layers: LatentDecoder(layers, sums=True),
}
GROUPS = [way for way in WAYS if way["update_strategy"] == "groups"]
PLACES = [(kind, way) for kind in KINDS for way in (WAYS if kind == "paged" else GROUPS)]


def platform_of(way: dict[str, str]) -> AscendPlatform:
    return AscendPlatform(AscendOptions(**way))  # type: ignore[arg-type]


def equals_eager(kind: str, way: dict[str, str], count: int, layers: int = 3) -> None:
    """The host waits for nothing between the first step and the last one."""
    decoder = KINDS[kind](layers)
    with runner(decoder, platform_of(way)) as run:
        run.capture()
        assert len(run.report().graphs) == 2
        todo, outputs = steps(decoder, count), []
        for place in range(2, count, 3):
            todo[place] = todo[place - 1]
        for place, step in enumerate(todo):
            # Every sixth step keeps the lengths of the one before without passing them.
            outputs.append(replayed(run, step, UNCHANGED if place % 6 == 5 else None))
        assert differing([out.cpu() for out in outputs], eager_outputs(run, todo)) == []
        assert len({str(step.updates) for step in todo}) > count / 2


def ids(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value.values())


@pytest.mark.parametrize(("kind", "way"), PLACES, ids=ids)
def test_atb_attention_with_new_lengths_each_step_equals_eager(kind, way):
    equals_eager(kind, way, 24)


# One place each, so that all meet many schedules; the long test takes every pair.
@pytest.mark.parametrize(
    ("schedule", "place"),
    [(schedule, PLACES[index % len(PLACES)]) for index, schedule in enumerate(SCHEDULES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(ids, value)),
)
def test_atb_attention_equals_eager_under_every_device_schedule(schedule, place):
    need_simulator()
    with scheduled(schedule):
        equals_eager(*place, 24)


def test_query_lengths_left_out_of_updates_are_those_of_the_graph():
    decoder = KINDS["speculative"](2)
    with runner(decoder, platform_of(WAYS[0])) as run:
        run.capture()
        todo = steps(decoder, 8)
        outputs = []
        for place, step in enumerate(todo):
            if place % 3:
                del step.updates["attention"]["qseqlen"]
            outputs.append(replayed(run, step))
        assert differing([out.cpu() for out in outputs], eager_outputs(run, todo)) == []


def test_query_lengths_that_are_not_the_batchs_are_refused_before_the_launch():
    """A sum that ATB cannot serve would end torch_npu's launch queue."""
    decoder = KINDS["speculative"](2)
    with runner(decoder, platform_of(WAYS[0])) as run:
        run.capture()
        step = next(each for each in steps(decoder, 20) if each.batch.num_reqs == 3)
        right = step.updates["attention"]
        for wrong in ([0, 2, 4], [1, 1, 1], [2, 4, 6], [3, 3, 3]):
            updates = {"attention": {**right, "qseqlen": wrong}}
            with pytest.raises(InvalidUpdateError, match="add up"):
                run(step.batch, updates=updates, **step.values)
        assert differing([replayed(run, step).cpu()], eager_outputs(run, [step])) == []


@pytest.mark.long
@pytest.mark.parametrize(("kind", "way"), PLACES, ids=ids)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_300_steps_of_atb_attention_equal_eager_under_every_schedule(schedule, kind, way):
    need_simulator()
    with scheduled(schedule):
        equals_eager(kind, way, 300)


def test_auto_dispatch_refuses_latent_attention_with_a_workspace_at_capture():
    """Its handler is for the overload without one, whose updates allocate."""
    way = {"update_order": "replay_first", "update_strategy": "auto_dispatch"}
    with runner(LatentDecoder(2), platform_of(way)) as run:
        with pytest.raises(TaskContractError, match=r"(?s)handler for.*update_strategy='groups'"):
            run.capture()
        step = steps(LatentDecoder(2), 1)[0]
        assert run(step.batch, updates=step.updates, **step.values).shape[0] == step.batch.num_reqs


@pytest.mark.parametrize("kind", KINDS)
def test_atb_tasks_keep_their_workspaces_across_empty_cache(kind):
    decoder = KINDS[kind](3)
    with runner(decoder, platform_of(WAYS[0])) as run:
        run.capture()
        (wrapper,) = run.graphs.owners()
        tasks = [task for entry in wrapper.entries.values() for task in entry.tasks]
        assert len(tasks) == 6
        assert all(run.platform.owns(run.pool.memory, task.kwargs["workspace"]) for task in tasks)
        todo = steps(decoder, 8)
        expected = eager_outputs(run, todo)
        outputs = []
        for step in todo:
            outputs.append(replayed(run, step))
            torch.npu.empty_cache()
        assert differing([out.cpu() for out in outputs], expected) == []


@pytest.mark.parametrize("kind", ["paged", "latent"])
def test_an_atb_update_that_allocates_its_own_workspace_raises(kind):
    decoder = KINDS[kind](2)
    decoder.given = {"workspace": None}
    run = runner(decoder, platform_of(WAYS[0]))
    run.capture()
    with pytest.raises(TaskContractError, match=r"(?s)layers\.0"):
        replayed(run, steps(decoder, 1)[0])
    torch.npu.synchronize()
    run.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [0, -1, 49, 1.5, None])
def test_invalid_context_lengths_are_refused_before_launch(kind, keys):
    decoder = KINDS[kind](2)
    with runner(decoder, platform_of(WAYS[0])) as run:
        run.capture()
        step = next(step for step in steps(decoder, 20) if step.batch.num_reqs == 3)
        good = step.updates["attention"]
        wrong = {**good, "context_lens": [7, keys, 9]}
        with pytest.raises(InvalidUpdateError, match="context_lens"):
            replayed(run, step, {"attention": wrong})
        assert differing([replayed(run, step).cpu()], eager_outputs(run, [step])) == []
