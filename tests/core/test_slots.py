"""`runner.slot`: a step's inputs, written in place in host memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphOptions, GraphRunner, InputSlot, InputSpec, Reason, get_platform
from graphrt.errors import InvalidBatchError
from tests.core.ring_steps import Log, mixed_steps
from tests.core.soft_ring import RingPlatform


def staging() -> RingPlatform:
    """A platform that fetches nothing but the smallest steps, and stages the others."""
    platform = RingPlatform()
    platform.fetched_bytes = 1100
    return platform


PLACES: dict[str, Any] = {
    "slab": lambda: get_platform("cpu"),
    "ring": RingPlatform,
    "staging": staging,
}


@pytest.fixture(params=PLACES)
def platform(request: pytest.FixtureRequest) -> Any:
    return PLACES[request.param]()


SPECS = {
    "ids": InputSpec(torch.int64, ("tokens",)),
    "table": InputSpec(torch.int32, (2, "reqs"), pad=-1),
    "starts": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
    "own": InputSpec(torch.float32, ("tokens", 2)),
}


def forward(
    ids: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, own: torch.Tensor
) -> dict[str, torch.Tensor]:
    return {
        "rows": ids + table.sum(0) + starts[1:] + own.sum(1),
        "seen": torch.cat([ids.double(), table.double().flatten(), starts.double()]),
    }


def rows_alone(**inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"rows": forward(**inputs)["rows"]}


def runner_of(platform: Any, **settings: Any) -> GraphRunner:
    settings.setdefault("options", GraphOptions(inputs_in_graph=True, check="off"))
    runner = GraphRunner(
        forward,
        inputs=SPECS,
        outputs={"rows": ("tokens",), "seen": (None,)},
        mode="FULL",
        sizes=[2, 4, 8],
        max_num_reqs=8,
        platform=platform,
        **settings,
    )
    runner.capture()
    return runner


def values(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 99, (rows,), generator=rng),
        "table": torch.randint(0, 99, (2, rows), generator=rng, dtype=torch.int32),
        "starts": torch.arange(rows + 1, dtype=torch.int32) + seed,
        "own": torch.rand(rows, 2, generator=rng),
    }


def written(slot: InputSlot, inputs: dict[str, torch.Tensor]) -> InputSlot:
    for name, value in inputs.items():
        slot[name].copy_(value)
    return slot


@pytest.mark.parametrize("rows", [2, 3, 7, 8, 9, 20])
def test_a_step_by_slot_equals_a_step_by_values(platform, rows):
    by_slot, by_value = runner_of(platform), runner_of(platform)
    for seed in range(3):
        inputs, batch = values(rows, seed), Batch(rows, rows, 1)
        if rows > 8:
            # More rows than there are buffers for.
            output = by_slot(written(by_slot.slot(batch), inputs))
            expected = forward(**inputs)
        else:
            output = by_slot(written(by_slot.slot(batch), inputs))
            expected = by_value(batch, **inputs)
        assert torch.equal(output["rows"], expected["rows"])
        assert torch.equal(output["seen"], expected["seen"])
        assert by_slot.last_dispatch.reason is (Reason.HIT if rows <= 8 else Reason.TOO_LARGE)


def test_a_new_slot_maps_input_names_to_live_rows_filled_with_padding(platform):
    runner = runner_of(platform)
    slot = runner.slot(Batch(3, 3, 1))
    assert list(slot) == list(SPECS)
    assert len(slot) == 4
    assert {name: tuple(slot[name].shape) for name in slot} == {
        "ids": (3,),
        "table": (2, 3),
        "starts": (4,),
        "own": (3, 2),
    }
    for name, spec in SPECS.items():
        assert slot[name].dtype is spec.dtype and slot[name].is_cpu
        assert slot[name].eq(spec.pad_value).all()
    assert torch.equal(runner(slot)["rows"], forward(**{name: slot[name] for name in slot})["rows"])


def test_a_slot_can_be_reused_and_keyword_inputs_override_its_values(platform):
    runner, other = runner_of(platform), runner_of(platform)
    slot = runner.slot(Batch(3, 3, 1))
    for seed in range(5):
        inputs = values(3, seed)
        written(slot, inputs)
        assert torch.equal(runner(slot)["rows"], forward(**inputs)["rows"])
        assert torch.equal(other(slot)["rows"], forward(**inputs)["rows"])
        more = {**inputs, "ids": inputs["ids"] + 7}
        assert torch.equal(runner(slot, ids=more["ids"])["rows"], forward(**more)["rows"])
        assert torch.equal(slot["ids"], inputs["ids"])
    with pytest.raises(InvalidBatchError, match="before inputs say"):
        runner.slot(Batch(3))


def test_padding_rows_are_rewritten_at_each_step_by_slot(platform):
    runner = runner_of(platform)
    for rows in (8, 5, 8, 6, 7, 5) * 15:
        inputs = values(rows, rows)
        seen = runner(written(runner.slot(Batch(rows, rows, 1)), inputs))["seen"]
        size = 8
        ids = torch.cat([inputs["ids"], torch.zeros(size - rows, dtype=torch.int64)])
        table = torch.cat([inputs["table"], torch.full((2, size - rows), -1)], 1)
        starts = torch.cat([inputs["starts"], inputs["starts"][-1:].repeat(size - rows)])
        expected = torch.cat([ids.double(), table.double().flatten(), starts.double()])
        assert torch.equal(seen, expected)


def test_a_slot_made_before_release_runs_eagerly_with_its_values(platform):
    runner, inputs = runner_of(platform), values(3)
    slot = written(runner.slot(Batch(3, 3, 1)), inputs)
    runner.release()
    assert torch.equal(runner(slot)["rows"], forward(**inputs)["rows"])


def runner_of_rows(platform, **options):
    return GraphRunner(
        rows_alone,
        inputs=SPECS,
        outputs={"rows": ("tokens",)},
        mode="FULL",
        sizes=[2, 4, 8],
        max_num_reqs=8,
        platform=platform,
        options=GraphOptions(**options),
    )


@pytest.mark.trust
def test_the_first_steps_by_slot_are_trials(platform):
    runner = runner_of_rows(platform, strict=True)
    runner.capture()
    for rows in (8, 2, 5, 3, 8):
        inputs = values(rows, rows)
        output = runner(written(runner.slot(Batch(rows, rows, 1)), inputs))
        assert torch.equal(output["rows"], forward(**inputs)["rows"])
    assert {each.status for each in runner.report().trust.trials} == {"tried", "untried"}


def test_a_lazy_capture_triggered_by_a_slot_keeps_the_slots_values(platform):
    runner = runner_of_rows(platform, lazy=True)
    for rows in (3, 8, 1, 3, 5):
        inputs = values(rows, rows)
        output = runner(written(runner.slot(Batch(rows, rows, 1)), inputs))
        assert torch.equal(output["rows"], forward(**inputs)["rows"])
    assert runner.report().reasons[Reason.HIT] > 0


@pytest.mark.parametrize("how", [{"inputs_in_graph": True}, {"inputs_in_graph": False}])
def test_mixed_steps_by_slot_and_by_values_read_their_own_inputs(platform, how):
    log = Log(platform, "cpu", 150, **how)
    mixed_steps(log, 150, 9, aborts=0.1, recaptures=0.01, slots=0.7)


def test_a_step_by_slot_after_an_aborted_step_reads_its_own_inputs(platform):
    log, rng = Log(platform, "cpu", 20, mode="FULL"), random.Random(4)
    for step in range(20):
        log.abort(rng, step, slot=True)
        log.run(rng, step, slot=True)
    log.check(20)


def test_a_slot_names_nested_inputs_with_dots():
    runner = GraphRunner(
        lambda hidden: hidden["a"] + hidden["b"],
        inputs={"hidden": {name: InputSpec(torch.float32, ("tokens",)) for name in "ab"}},
        outputs=("tokens",),
        sizes=[4],
        mode="FULL",
        platform=RingPlatform(),
    )
    runner.capture()
    slot = runner.slot(Batch(3))
    assert list(slot) == ["hidden.a", "hidden.b"]
    slot["hidden.a"].fill_(2)
    slot["hidden.b"].fill_(5)
    assert runner(slot).tolist() == [7, 7, 7]
