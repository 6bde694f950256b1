"""Repeated batches and inputs take a fast path: each step still gets its own values and checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphMode, GraphOptions, GraphRunner, InputSpec, Reason
from graphrt.core.base._native_door import NativeWriter
from graphrt.core.inputs.buffers import StaticInputs
from graphrt.cuda.ring.writers import MOST_KINDS, MOST_MADE
from graphrt.errors import (
    InvalidBatchError,
    InvalidInputError,
    InvalidModeError,
    OverwrittenOutputError,
    PoolBusyError,
)
from tests.core.soft_ring import RingPlatform

compiled = pytest.mark.skipif(
    NativeWriter is None, reason="native/ is not built; test_native.py runs this with it"
)
SPECS = {
    "ids": InputSpec(torch.int64, ("tokens",), pad=-7),
    "table": InputSpec(torch.int32, ("reqs", 3), pad=-1),
    "starts": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
}
BATCH = Batch(3, 3, 1)


def runner_of(specs: dict[str, InputSpec] = SPECS, **settings: Any) -> GraphRunner:
    """A runner whose output is all that its forward reads, padding and all."""
    runner = GraphRunner(
        lambda **inputs: torch.cat([value.double().flatten() for value in inputs.values()]),
        inputs=specs,
        outputs=(None,),
        mode="FULL",
        sizes=[2, 4, 8],
        max_num_reqs=8,
        platform=RingPlatform(),
        options=GraphOptions(inputs_in_graph=True, check="off"),
        **settings,
    )
    runner.capture()
    return runner


THREE = {name: InputSpec(torch.int64, ("tokens",)) for name in "abc"}


def runner_of_four_tokens(forward: Callable[..., torch.Tensor], inputs: Any) -> GraphRunner:
    runner = GraphRunner(
        forward,
        inputs=inputs,
        outputs=("tokens",),
        mode="FULL",
        sizes=[4],
        platform=RingPlatform(),
        options=GraphOptions(inputs_in_graph=True, check="off"),
    )
    runner.capture()
    return runner


def kind_of_three(kind: int, value: int) -> dict[str, torch.Tensor]:
    """Inputs of one value, of which the bits of `kind` say which were made in inference mode."""
    inputs = {}
    for number, name in enumerate("abc"):
        with torch.inference_mode(bool(kind >> number & 1)):
            inputs[name] = torch.full((3,), value + number)
    return inputs


def values(rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 99, (rows,), generator=rng),
        "table": torch.randint(0, 99, (rows, 3), generator=rng, dtype=torch.int32),
        "starts": torch.arange(rows + 1, dtype=torch.int32) + seed,
    }


def padded(inputs: dict[str, torch.Tensor], size: int) -> torch.Tensor:
    """What the forward of `runner_of` sees of these rows."""
    ids, table, starts = inputs["ids"], inputs["table"], inputs["starts"]
    rest = size - len(ids)
    parts = [ids, torch.full((rest,), -7), table, torch.full((rest, 3), -1)]
    parts += [starts, starts[-1:].repeat(rest)]
    return torch.cat([part.double().flatten() for part in parts])


def check(runner: GraphRunner, inputs: dict[str, torch.Tensor], size: int = 4) -> None:
    rows = len(inputs["ids"])
    assert torch.equal(runner(Batch(rows, rows, 1), **inputs), padded(inputs, size))


@pytest.fixture
def warm() -> tuple[GraphRunner, dict[str, torch.Tensor]]:
    """A runner that has seen these very tensors in several steps."""
    runner, inputs = runner_of(), values()
    for _ in range(4):
        check(runner, inputs)
    return runner, inputs


def test_new_values_written_into_the_same_input_tensors_reach_the_step(warm):
    runner, inputs = warm
    for seed in range(1, 5):
        for name, value in values(3, seed).items():
            inputs[name].copy_(value)
        check(runner, inputs)


def test_an_input_resized_in_place_is_refused_and_served_with_a_matching_batch(warm):
    runner, inputs = warm
    inputs["ids"].resize_(4)
    with pytest.raises(InvalidInputError, match=r"'ids' has the wrong shape"):
        runner(BATCH, **inputs)
    for name, value in values(4, 3).items():
        inputs[name].resize_(value.shape).copy_(value)
    check(runner, inputs)


def test_an_input_whose_data_got_another_dtype_is_refused(warm):
    runner, inputs = warm
    inputs["ids"].data = inputs["ids"].to(torch.int32)
    with pytest.raises(InvalidInputError, match=r"'ids' has the wrong dtype"):
        runner(BATCH, **inputs)


@pytest.mark.parametrize("how", ["data", "set_"])
def test_an_input_whose_storage_was_replaced_is_read_from_the_new_storage(warm, how):
    runner, inputs = warm
    other = values(3, 9)["ids"] + 1000
    if how == "data":
        inputs["ids"].data = other
    else:
        inputs["ids"].set_(other.untyped_storage(), 0, (3,), (1,))
    check(runner, inputs)
    assert int(runner(BATCH, **inputs)[0]) >= 1000


def test_a_new_input_tensor_with_a_reused_python_id_is_read(warm):
    runner, inputs = warm
    for seed in range(20):
        # The object before is freed first, so its `id` is given again.
        del inputs["ids"]
        inputs["ids"] = torch.full((3,), seed)
        check(runner, inputs)


def test_strided_and_expanded_input_views_are_read_with_their_values(warm):
    runner, inputs = warm
    check(runner, {**inputs, "ids": torch.arange(100, 106)[::2]})
    check(runner, {**inputs, "table": torch.arange(9, dtype=torch.int32).view(3, 3).t()})
    check(runner, {**inputs, "ids": torch.tensor(5).expand(3)})
    check(runner, inputs)


def test_an_input_whose_storage_was_resized_to_zero_raises(warm):
    runner, inputs = warm
    inputs["table"].untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match="no rows in memory"):
        runner(BATCH, **inputs)
    check(runner, values())


@pytest.mark.parametrize("fetched", [True, False])
@pytest.mark.parametrize(
    "behind",
    [
        lambda: torch.ones(2, 6)[:, 3:],
        lambda: torch.ones(4, 3)[2:],
        lambda: torch.ones(3).expand(2, 3),
        lambda: torch.ones(1 << 16, 3)[-2:],
    ],
    ids=["gap", "rows", "expanded", "end of a large tensor"],
)
def test_an_input_view_whose_storage_was_resized_to_zero_raises_at_any_offset(behind, fetched):
    runner = GraphRunner(
        lambda x: x + 1,
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        outputs=("tokens", 3),
        mode="FULL",
        sizes=[2],
        platform=RingPlatform(),
        options=GraphOptions(inputs_in_graph=fetched),
    )
    runner.capture()
    x = behind()
    for _ in range(3):
        assert torch.equal(runner(Batch(2), x=x), x + 1)
    x.untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match="no rows in memory"):
        runner(Batch(2), x=x)
    assert torch.equal(runner(Batch(2), x=behind()), behind() + 1)


def test_a_batch_subclass_that_equals_everything_is_not_taken_for_the_last_batch():
    class Any3(Batch):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = Batch.__hash__

    runner = GraphRunner(
        lambda x: x + 1,
        inputs={"x": InputSpec(torch.float32, ("tokens",))},
        outputs=("tokens",),
        mode="FULL",
        sizes=[2, 4],
        platform="cpu",
        options=GraphOptions(check="off"),
    )
    runner.capture()
    runner(Any3(3, 3, 1), x=torch.zeros(3))
    assert runner(Batch(2, 2, 1), x=torch.ones(2)).tolist() == [2.0, 2.0]
    runner(Batch(2, 2, 1), x=torch.ones(2))
    assert runner(Any3(3, 3, 1), x=torch.zeros(3)).tolist() == [1.0] * 3
    with pytest.raises(InvalidInputError):
        runner(Batch(2, 2, 1), x=torch.ones(3))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda inputs: inputs.pop("ids"), "not the declared ones"),
        (lambda inputs: inputs.update(other=torch.zeros(3)), "not the declared ones"),
        (lambda inputs: inputs.update(other=inputs.pop("ids")), "not the declared ones"),
        (lambda inputs: inputs.update(ids=[1, 2, 3]), "'ids' is no tensor"),
        (lambda inputs: inputs.update(ids=inputs["ids"].to("meta")), "no rows in memory"),
        (lambda inputs: inputs.update(ids=inputs["ids"].to_sparse()), "no rows in memory"),
        (lambda inputs: inputs.update(ids=inputs["ids"][:2]), "wrong shape"),
    ],
)
def test_malformed_inputs_are_refused_after_several_good_steps(warm, change, word):
    runner, inputs = warm
    wrong = dict(inputs)
    change(wrong)
    ring = runner.inputs.transport.ring
    before = ring.count
    with pytest.raises(InvalidInputError, match=word):
        runner(BATCH, **wrong)
    assert ring.count == before
    check(runner, inputs)


def test_nested_inputs_of_repeated_steps_have_each_steps_values():
    runner = runner_of_four_tokens(lambda outer: outer["ids"] + 1, {"outer": SPECS})
    for seed in range(5):
        inputs = values(3, seed)
        assert torch.equal(runner(BATCH, outer=inputs), inputs["ids"] + 1)


def moves_of(runner: GraphRunner) -> Any:
    return runner.inputs.layout(4, 4).known[3, 3]


@compiled
def test_entering_inference_mode_adds_a_single_compiled_writer_for_later_steps(warm):
    runner, inputs = warm
    before = len(moves_of(runner).prepared.writers)
    with torch.inference_mode():
        for _ in range(3):
            check(runner, inputs)
        assert len(moves_of(runner).prepared.writers) == before + 1
        assert moves_of(runner).alike(inputs, runner.inputs.layout(4, 4).fetch, False)


@compiled
def test_alternating_kinds_of_inputs_keep_their_compiled_writers(warm):
    runner, inputs = warm
    with torch.inference_mode():
        inside = values()
    in_place = {
        name: view[: len(inputs[name])] for name, view in runner.inputs.layout(4, 4).views.items()
    }
    for turn in range(10):
        for kind in (inputs, inside, in_place):
            if kind is in_place:
                for name, value in values(3, turn).items():
                    kind[name].copy_(value)
            with torch.inference_mode(kind is inside):
                check(runner, kind)
        if turn == 1:
            known = list(moves_of(runner).prepared.writers)
    assert moves_of(runner).prepared.writers == known and 2 <= len(known) < MOST_KINDS
    for kind, writer in ((inputs, known[0]), (inside, known[1])):
        with torch.inference_mode(kind is inside):
            check(runner, kind)
        assert moves_of(runner).alike is writer


def test_inputs_with_an_empty_tensor_leave_no_compiled_writers():
    specs = {**SPECS, "none": InputSpec(torch.float32, ("tokens", 0))}
    runner = runner_of(specs)
    for seed in range(8):
        inputs = values(3, seed)
        out = runner(BATCH, **inputs, none=torch.empty(3, 0))
        assert torch.equal(out, padded(inputs, 4))
    assert moves_of(runner).prepared.writers == []


class Anything:
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize("field", ["bounds", "variant", "exclude"])
def test_a_batch_field_that_equals_everything_is_still_checked(warm, field):
    runner, inputs = warm
    with pytest.raises((InvalidBatchError, InvalidModeError)):
        runner(BATCH._replace(**{field: Anything()}), **inputs)
    check(runner, inputs)


@compiled
def test_compiled_writers_of_old_input_kinds_are_replaced_by_new_kinds():
    runner = runner_of_four_tokens(lambda a, b, c: a + b + c, THREE)
    made = set()
    for turn in range(100):
        inputs = kind_of_three(min(turn, 7), turn)
        assert runner(BATCH, **inputs).tolist() == [3 * turn + 3] * 3
        made.add(moves_of(runner).prepared.made)
        if turn == MOST_KINDS - 1:
            first = list(moves_of(runner).prepared.writers)
    moves = moves_of(runner)
    assert moves.alike is moves.prepared.writers[-1] and max(made) == 8 < MOST_MADE
    assert len(moves.prepared.writers) == MOST_KINDS and not set(first) & set(
        moves.prepared.writers
    )


@compiled
def test_eight_alternating_input_kinds_keep_a_limited_number_of_compiled_writers():
    runner = runner_of_four_tokens(lambda a, b, c: a + b + c, THREE)
    for _ in range(3):
        for kind in range(8):
            assert runner(BATCH, **kind_of_three(kind, kind)).tolist() == [3 * kind + 3] * 3
    assert len(moves_of(runner).prepared.writers) == MOST_KINDS


@pytest.mark.parametrize(
    ("dtype", "inner"),
    [
        (torch.bool, ()),
        (torch.int8, ()),
        (torch.int16, ()),
        (torch.float32, ()),
        (torch.int64, ()),
        (torch.int32, (2,)),
        (torch.int8, (3,)),
        (torch.int64, (5,)),
    ],
)
@pytest.mark.parametrize("outer", [(), (2,)])
def test_repeat_padding_copies_the_last_row_for_every_dtype_and_row_size(dtype, inner, outer):
    spec = InputSpec(dtype, (*outer, "tokens", *inner), pad="repeat")
    platform = RingPlatform()
    inputs = StaticInputs(
        {"x": spec}, platform=platform, tokens=8, reqs=8, device="cpu", fetched=True
    )
    layout, dim = inputs.layout(8, 8), len(outer)
    for live in (1, 3, 8, 5, 7):
        for seed in range(3):
            rng = torch.Generator().manual_seed(seed)
            x = torch.randint(0, 100, spec.sizes(live, live), generator=rng).to(dtype)
            inputs.fill({"x": x}, layout, live, live)
            assert torch.equal(layout.views["x"].narrow(dim, 0, live), x)
            last = x.narrow(dim, live - 1, 1)
            rest = layout.views["x"].narrow(dim, live, 8 - live)
            assert torch.equal(rest, last.expand_as(rest))


def test_repeat_padding_beyond_the_moves_of_a_slot_has_the_right_values():
    spec = InputSpec(torch.int32, (70, "tokens"), pad="repeat")
    inputs = StaticInputs(
        {"x": spec}, platform=RingPlatform(), tokens=4, reqs=4, device="cpu", fetched=True
    )
    layout = inputs.layout(4, 4)
    for seed in range(3):
        x = torch.arange(140, dtype=torch.int32).view(70, 2) + seed
        inputs.fill({"x": x}, layout, 2, 2)
        assert torch.equal(layout.views["x"], x[:, [0, 1, 1, 1]])


def test_each_step_of_an_equal_batch_is_counted_as_a_hit(warm):
    runner, inputs = warm
    counts = runner.dispatcher.counts()[Reason.HIT]
    for step in range(1, 6):
        runner(Batch(3, 3, 1), **inputs)
        assert runner.dispatcher.counts()[Reason.HIT] == counts + step
        assert runner.last_dispatch is not None
        assert runner.last_dispatch.descriptor.num_tokens == 4
    assert runner.report().reasons[Reason.HIT] == counts + 5


def test_a_withdrawn_graph_no_longer_serves_an_equal_batch(warm):
    runner, inputs = warm
    dispatch = runner.dispatcher.dispatch(BATCH)
    runner.dispatcher.withdraw(dispatch.mode, dispatch.descriptor)
    check(runner, inputs, size=8)
    runner.dispatcher.publish(dispatch.mode, dispatch.descriptor)
    check(runner, inputs, size=4)
    runner.release()
    assert torch.equal(runner(BATCH, **inputs), padded(inputs, 3))
    runner.capture()
    check(runner, inputs, size=4)


def test_batches_of_changing_sizes_get_the_smallest_fitting_graph_each_step(warm):
    runner, _ = warm
    for rows in (3, 2, 3, 3, 8, 5, 3, 4, 4, 1, 3):
        check(runner, values(rows, rows), size=next(size for size in (2, 4, 8) if size >= rows))


def test_tuples_and_unhashable_variants_like_the_last_batch_are_refused(warm):
    runner, inputs = warm
    for wrong in (
        tuple(BATCH),
        BATCH._replace(variant=[1]),
    ):
        with pytest.raises(InvalidBatchError):
            runner(wrong, **inputs)
        check(runner, inputs)
    left_out = BATCH._replace(exclude=frozenset({GraphMode.FULL}))
    assert torch.equal(runner(left_out, **inputs), padded(inputs, 3))


class Odd:
    """A variant that is equal to nothing, and says so loudly."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    def __hash__(self) -> int:
        return 3


def test_a_batch_variant_whose_comparison_raises_runs_eagerly(warm):
    runner, inputs = warm
    odd = BATCH._replace(variant=Odd())
    assert torch.equal(runner(odd, **inputs), padded(inputs, 3))
    check(runner, inputs)


def test_the_agreed_graph_of_ranks_is_dispatched_anew_at_every_step(warm):
    runner, inputs = warm
    named = [graph.descriptor for graph in runner.dispatcher.published]
    eight = next(each for each in named if each.num_tokens == 8)
    for _ in range(3):
        assert torch.equal(runner(BATCH, **inputs), padded(inputs, 4))
        assert torch.equal(runner(BATCH, **inputs, agreed=eight), padded(inputs, 8))
        eager = runner(BATCH, **inputs, agreed=eight._replace(num_tokens=7, num_reqs=7))
        assert torch.equal(eager, padded(inputs, 3))


def test_steps_of_two_threads_never_mix_their_rows():
    runner = runner_of()
    wrong: list[object] = []
    done = [0, 0]

    def steps(number: int, rows: int) -> None:
        for seed in range(400):
            inputs = values(rows, seed + 1000 * number)
            try:
                seen = runner(Batch(rows, rows, 1), **inputs).clone()
            except PoolBusyError:
                # The other one's trial takes longer than all these steps, refused at once, do.
                time.sleep(0.0002)
                continue
            except BaseException as error:
                # The other thread's step came before the clone, where torch can mark outputs.
                if OverwrittenOutputError.__name__ not in str(error):
                    wrong.append(error)
                    return
                continue
            done[number] += 1
            # Or it has written the memory since, with all of its rows.
            size = {2: 2, 3: 4}[rows]
            if seen.numel() != padded(inputs, size).numel():
                wrong.append((rows, seen))

    threads = [threading.Thread(target=steps, args=(n, rows)) for n, rows in enumerate((2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert min(done) > 0
    check(runner, values(3))


def slot_of(runner: GraphRunner, inputs: dict[str, torch.Tensor]) -> Any:
    rows = len(inputs["ids"])
    slot = runner.slot(Batch(rows, rows, 1))
    for name, value in inputs.items():
        slot[name].copy_(value)
    return slot


def test_slots_of_an_equal_batch_are_dispatched_anew_when_graphs_change(warm):
    runner, inputs = warm
    dispatch = runner.dispatcher.dispatch(BATCH)
    counts = runner.dispatcher.counts()[Reason.HIT]
    for step in range(1, 4):
        assert torch.equal(runner(slot_of(runner, inputs)), padded(inputs, 4))
        assert runner.dispatcher.counts()[Reason.HIT] == counts + step
    runner.dispatcher.withdraw(dispatch.mode, dispatch.descriptor)
    assert torch.equal(runner(slot_of(runner, inputs)), padded(inputs, 8))
    runner.dispatcher.publish(dispatch.mode, dispatch.descriptor)
    assert torch.equal(runner(slot_of(runner, inputs)), padded(inputs, 4))
    runner.recapture()
    assert torch.equal(runner(slot_of(runner, inputs)), padded(inputs, 4))
    # Made for the graph of before, and served as its values.
    slot = slot_of(runner, inputs)
    runner.release()
    assert torch.equal(runner(slot), padded(inputs, 3))
    with pytest.raises(InvalidBatchError):
        runner.slot(BATCH._replace(num_tokens=3.0))


def test_alternating_slots_and_calls_of_the_same_batch_have_right_values(warm):
    runner, _ = warm
    for seed in range(20):
        inputs = values(3 + seed % 2, seed)
        if seed % 3:
            assert torch.equal(runner(slot_of(runner, inputs)), padded(inputs, 4))
        else:
            check(runner, inputs)


@pytest.mark.parametrize("by_slot", [False, True])
def test_bounds_of_a_batch_changed_in_place_change_its_dispatch(by_slot):
    runner, inputs = runner_of(bounds=[(4,), (100,)]), values()
    needed: Any = [3]
    batch = Batch(3, 3, 1, bounds=needed)
    for bound, reason in ((3, Reason.HIT), (50, Reason.HIT), (500, Reason.NO_GRAPH)):
        needed[0] = bound
        for _ in range(3):
            if by_slot:
                slot = runner.slot(batch)
                for name, value in inputs.items():
                    slot[name].copy_(value)
                runner(slot)
            else:
                runner(batch, **inputs)
            dispatch = runner.last_dispatch
            assert dispatch is not None
            assert dispatch.reason is reason
            assert reason is not Reason.HIT or dispatch.descriptor.bounds[0] >= bound
