"""Faults that must not pass silently: overlapping steps, half-done captures, leaking state."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from test_runner import rows, runner

from graphrt import (
    UNCHANGED,
    Batch,
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    Host,
    HostArg,
    InputSpec,
    Reason,
    State,
    UpdatableTask,
    carry_context,
    current_context,
    eager_break,
    forward_context,
)
from graphrt.core.base.errors import (
    BreakError,
    CaptureError,
    GraphsDroppedWarning,
    InvalidBatchError,
    InvalidInputError,
    InvalidOptionError,
    InvalidUpdateError,
    MissingUpdateError,
    OutputError,
    PageableCopyError,
    PoolBusyError,
    PoolClosedError,
    StaleInputError,
)
from graphrt.core.device.contract import Capability, EndedCaptureError
from graphrt.core.replay.recording import current_capture
from graphrt.cpu import CPUGraphWrapper, CpuPlatform
from graphrt.cuda.explain import explain


def in_thread(call: Any) -> Any:
    """What `call` raised in another thread, or what it returned."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def interrupted(meanwhile: Any) -> tuple[Any, list[Any]]:
    """A PIECEWISE runner that calls `meanwhile` in the middle of a step with metadata "go"."""
    results: list[Any] = []

    @eager_break
    def middle(hidden):
        if current_context().metadata == "go":
            results.append(meanwhile())
        return hidden * 1

    captured = runner(lambda x: middle(x + 1) + x, mode="PIECEWISE")
    captured.capture()
    return captured, results


@pytest.mark.parametrize("what", ["unpadded", "capture", "release", "close"])
def test_another_threads_step_recapture_release_or_close_during_a_step_is_refused(what):
    calls = {
        "unpadded": lambda: captured(
            Batch(2, 2, 1, exclude=frozenset({GraphMode.PIECEWISE})), x=rows(2, 100.0)
        ),
        "capture": lambda: captured.recapture(),
        "release": lambda: captured.release(),
        "close": lambda: captured.close(),
    }
    captured, results = interrupted(lambda: in_thread(calls[what]))
    assert torch.equal(captured(x=rows(2), metadata="go"), rows(2, 3.0))
    assert isinstance(results[0], PoolBusyError)
    assert torch.equal(captured(x=rows(2)), rows(2, 3.0))


def test_another_threads_step_inside_bind_is_refused_and_leaves_the_buffers():
    results = []

    def bind(buffers, descriptor, phase):
        if buffers["x"][0, 0] == 1 and phase == "replay":
            results.append(in_thread(lambda: captured(x=rows(2, 100.0))))

    captured = runner(host=Host(bind=bind))
    captured.capture()
    assert torch.equal(captured(x=rows(2)), rows(2, 2.0))
    assert isinstance(results[0], PoolBusyError)
    assert "while a step, or a capture, of a runner is under way" in str(results[0])


def test_a_function_of_carry_context_can_run_in_two_threads_at_once():
    meet = threading.Barrier(2, timeout=10)

    def work():
        meet.wait()
        return current_context().metadata

    with forward_context("NONE", metadata="step"):
        carried = carry_context(work)
    results = []
    threads = [threading.Thread(target=lambda: results.append(carried())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["step", "step"]


def test_a_draft_runner_called_inside_its_targets_step_needs_its_own_pool():
    pool = GraphPool("cpu")
    draft = runner(lambda x: x * 1000, pool=pool)
    draft.capture()

    @eager_break
    def middle(hidden):
        if current_context().metadata == "go":
            draft(x=rows(2))
        return hidden * 1

    target = runner(lambda x: middle(x + 1) + x, mode="PIECEWISE", pool=pool)
    target.capture()
    with pytest.raises(PoolBusyError, match="GraphPool of its own"):
        target(x=rows(2), metadata="go")
    assert torch.equal(target(x=rows(2)), rows(2, 3.0))
    assert torch.equal(draft(x=rows(2)), rows(2, 1000.0))


def test_padding_rows_are_refilled_after_a_forward_that_advances_its_inputs_in_place():
    writes = torch.zeros(8)

    def forward(slot):
        writes.index_add_(0, slot, torch.ones(4))
        slot.add_(1)
        return slot * 1

    captured = runner(
        forward,
        inputs={"slot": InputSpec(torch.int64, ("tokens",), pad=0, index=True)},
        outputs=("tokens",),
        sizes=[4],
        host=Host(state=[writes]),
    )
    captured.capture()
    for _ in range(3):
        captured(slot=torch.tensor([5]))
    assert writes.tolist() == [9, 0, 0, 0, 0, 3, 0, 0]


def pieces(pool: GraphPool, *functions: Any) -> list[CPUGraphWrapper]:
    return [
        CPUGraphWrapper(function, "PIECEWISE", pool=pool, options=GraphOptions())
        for function in functions
    ]


def chain(wrappers: list[CPUGraphWrapper]) -> Any:
    def forward(x):
        for wrapper in wrappers:
            x = wrapper(x)
        return x

    return forward


def test_a_runner_rolls_back_every_piece_when_the_third_of_five_fails():
    fail = [True]

    def third(x):
        if fail[0] and current_context().mode is GraphMode.PIECEWISE:
            raise ValueError("third")
        return x + 1

    pool = GraphPool("cpu")
    plain = [lambda x: x + 1] * 2
    wrappers = pieces(pool, *plain, third, *plain)
    captured = runner(chain(wrappers), mode="PIECEWISE", pieces="fx", pool=pool)
    with pytest.raises(ValueError, match="third"):
        captured.capture()
    assert [len(wrapper.entries) for wrapper in wrappers] == [0] * 5
    assert captured.dispatcher.published == ()
    fail[0] = False
    captured.capture()
    assert torch.equal(captured(x=rows(2)), rows(2, 6.0))


def test_a_retried_piecewise_capture_captures_its_first_piece_again():
    """The first piece had captured, and is to capture once more."""
    tries = []

    def second(x):
        if current_capture() is not None:
            tries.append(1)
            if len(tries) == 2:
                raise PageableCopyError("at the first try of the second graph")
        return x + 1

    pool = GraphPool("cpu")
    first, last = pieces(pool, lambda x: x * 2, second)
    captured = runner(chain([first, last]), mode="PIECEWISE", pieces="fx", pool=pool, sizes=[2, 4])
    captured.capture()
    assert len(tries) == 3
    assert [len(first.entries), len(last.entries)] == [2, 2]
    for count in (2, 4):
        assert torch.equal(captured(x=rows(count)), rows(count, 3.0))
        assert captured.last_dispatch.reason is Reason.HIT


def test_a_piecewise_capture_without_any_captured_piece_raises_and_publishes_no_graph():
    captured = runner(lambda x: x + 1, mode="PIECEWISE", pieces="fx")
    with pytest.raises(CaptureError, match="no wrapper in the forward captured"):
        captured.capture()
    assert captured.dispatcher.published == ()
    assert torch.equal(captured(x=rows(2)), rows(2, 2.0))


def test_releasing_a_runner_keeps_the_pieces_that_another_runner_captured():
    pool = GraphPool("cpu")
    calls = []

    def piece(x):
        calls.append(1)
        return x + 1

    wrappers = pieces(pool, piece)
    options = {"mode": "PIECEWISE", "pieces": "fx", "pool": pool}
    options["options"] = GraphOptions(check="off")
    first = runner(chain(wrappers), sizes=[4], **options)
    second = runner(chain(wrappers), sizes=[2], **options)
    first.capture()
    second.capture()
    first.release()
    calls.clear()
    assert torch.equal(second(x=rows(2)), rows(2, 2.0))
    assert calls == []


def test_every_warm_up_and_capture_starts_from_the_declared_state_and_padding_inputs():
    counter, seen = torch.zeros(()), []

    def forward(x):
        counter.add_(1)
        x.add_(7)
        return x + counter

    captured = runner(
        forward,
        host=Host(
            state=[counter],
            bind=lambda buffers, _, phase: seen.append((phase, counter.item(), buffers["x"].sum())),
        ),
        options=GraphOptions(warmups=2),
        sizes=[2],
    )
    captured(x=rows(2))
    counter.zero_()
    captured.capture()
    assert seen[1:] == [("warmup", 0, 0), ("warmup", 0, 0), ("capture", 0, 0)]
    assert captured.inputs.buffers["x"].sum() == 0
    assert counter == 0


def test_a_state_restore_that_raises_fails_the_capture_which_can_be_repeated():
    fail = [False]

    def restore(_):
        if fail[0]:
            raise RuntimeError("restore")

    captured = runner(
        host=Host(state=[State(save=lambda: None, restore=restore)]),
        options=GraphOptions(warmups=0),
    )
    fail[0] = True
    with pytest.raises(RuntimeError, match="restore"):
        captured.capture()
    fail[0] = False
    captured.capture()
    assert len(captured.dispatcher.published) == 2


def test_the_garbage_collector_is_disabled_only_during_a_capture():
    enabled = []
    captured = runner(lambda x: (enabled.append(gc.isenabled()), x + 1)[1], sizes=[2])
    captured.capture()
    assert enabled == [False, False]
    assert gc.isenabled()


def test_warm_ups_captures_replays_and_eager_steps_run_without_gradients():
    weight = torch.nn.Parameter(torch.ones(4))
    cache, grads = torch.zeros(2, 4), []

    def forward(x):
        grads.append(torch.is_grad_enabled())
        if x.shape[0] == 2:
            cache.copy_(x * weight)
        return x * weight

    captured = runner(forward, sizes=[2])
    captured(x=rows(1).requires_grad_())
    captured.capture()
    for _ in range(3):
        captured(x=rows(2).requires_grad_())
    captured(x=rows(5))
    assert not any(grads)
    assert not cache.requires_grad
    assert captured.inputs.buffers["x"].grad_fn is None


def test_a_runner_captured_in_inference_mode_serves_steps_outside_of_inference_mode():
    with torch.inference_mode():
        captured = runner()
        captured.capture()
    assert torch.equal(captured(x=rows(1)), rows(1, 2.0))


def test_deleting_a_runner_frees_its_pool_memory_without_garbage_collection():
    gc.disable()
    try:
        captured = runner(mode="FULL_AND_PIECEWISE")
        captured.capture()
        captured(x=rows(3))
        memory = weakref.ref(captured.pool.memory)
        del captured
        assert memory() is None
    finally:
        gc.enable()


def test_release_destroys_a_runners_graphs_and_empties_its_report():
    captured = runner()
    captured.capture()
    (wrapper,) = captured.graphs.owners()
    graph = next(iter(wrapper.entries.values())).parts[0]
    captured.release()
    assert captured.report().graphs == ()
    with pytest.raises(CaptureError, match="nothing was captured"):
        graph.replay()
    captured.recapture()
    assert len(captured.report().graphs) == 2


def test_a_step_after_its_shared_pool_was_closed_raises():
    pool = GraphPool("cpu")
    captured = runner(pool=pool)
    captured.capture()
    pool.close()
    with pytest.raises(PoolClosedError):
        captured(x=rows(2))


def test_editing_returned_output_containers_does_not_change_the_next_steps_output():
    captured = runner(lambda x: {"y": x * 2, "z": [x]}, outputs={"y": ("tokens", 4)}, sizes=[2])
    captured.capture()
    for count in (1, 2):
        out = captured(x=rows(count, 3.0))
        out["y"] = out.pop("y") * 100
        out["z"].clear()
        assert torch.equal(captured(x=rows(count, 3.0))["y"], rows(count, 6.0))


def test_cloned_outputs_of_eager_and_replayed_steps_keep_their_values():
    captured = runner(lambda x: x[:, :], options=GraphOptions(outputs="clone"))
    kept = captured(x=rows(9, 7.0)), captured(x=rows(3, 7.0))
    captured(x=rows(3, 1.0))
    assert [tensor[0, 0].item() for tensor in kept] == [7, 7]


def test_each_element_of_a_tuple_output_is_cut_along_its_own_axes():
    captured = runner(lambda x: (x + 1, x.sum(1)), outputs=(("tokens", 4), ("tokens",)), sizes=[4])
    captured.capture()
    first, second = captured(x=rows(3))
    assert (first.shape, second.shape) == ((3, 4), (3,))


def test_declaring_an_output_that_the_forward_does_not_return_raises_at_capture():
    captured = runner(lambda x: {"y": x}, outputs={"z": ("tokens", 4)}, sizes=[4])
    with pytest.raises(OutputError, match="'z'"):
        captured.capture()
    assert torch.equal(captured(x=rows(3))["y"], rows(3)), "it serves eagerly"


def test_a_lazy_step_captures_the_graph_that_the_ranks_agreed_on():
    lazy = runner(mode="FULL_AND_PIECEWISE", options=GraphOptions(lazy=True), sizes=[2, 4])
    lazy(Batch(2, 2, 1), x=rows(2), agreed=BatchDescriptor(4))
    dispatch = lazy.last_dispatch
    assert (dispatch.mode, dispatch.descriptor.num_tokens) == (GraphMode.PIECEWISE, 4)
    assert len(lazy.report().graphs) == 1


def test_a_lazy_runner_captures_a_smaller_graph_for_a_smaller_batch():
    lazy = runner(options=GraphOptions(lazy=True), sizes=[2, 4])
    served = []
    for count in (4, 1):
        lazy(x=rows(count))
        served.append(lazy.last_dispatch.descriptor.num_tokens)
    assert served == [4, 2]


def test_a_lazy_capture_that_fails_is_not_tried_at_every_step():
    def forward(x):
        if torch._C._len_torch_dispatch_stack():
            raise ValueError("cannot be captured")
        return x + 1

    lazy = runner(forward, options=GraphOptions(lazy=True, check="off"), sizes=[2])
    with pytest.raises(ValueError, match="cannot be captured"):
        lazy(x=rows(2))
    assert torch.equal(lazy(x=rows(2)), rows(2, 2.0))
    assert lazy.last_dispatch.reason is Reason.NOT_CAPTURED


@pytest.mark.parametrize(
    ("name", "text"),
    [("aten::sigmoidd", "no operator"), ("aten::softmax", "composite"), ("aten::linear", "comp")],
)
def test_an_unknown_or_composite_operator_in_breaks_is_refused(name, text):
    captured = runner(mode="PIECEWISE", options=GraphOptions(breaks=(name,)))
    with pytest.raises(InvalidOptionError, match=text):
        captured.capture()


def test_a_batch_without_requests_is_refused():
    captured = runner(mode="PIECEWISE", max_num_reqs=4)
    captured.capture()
    with pytest.raises(InvalidBatchError):
        captured(Batch(2, 0), x=rows(2))


# Tasks ---------------------------------------------------------------------------------------


def scaling(group: str, issued: list[Any] | None = None) -> UpdatableTask:
    """out = x * (1 + sum of the lengths)."""

    def issue(x, out, lengths):
        if issued is not None:
            issued.append(list(lengths))
        if sum(lengths) == 99:
            raise ValueError("refused")
        torch.add(x, x, alpha=sum(lengths), out=out)

    return UpdatableTask(
        group,
        issue,
        {"lengths": HostArg("reqs")},
        at_capture=lambda descriptor: {"lengths": [1000]},
    )


def apply(task: UpdatableTask, x: torch.Tensor, name: str) -> torch.Tensor:
    out = torch.empty_like(x)
    task(x, out, task=name)
    return out


def test_updates_reach_tasks_of_all_pieces_and_unknown_task_names_are_refused():
    task, pool = scaling("attention"), GraphPool("cpu")
    wrappers = pieces(
        pool, lambda x: apply(task, x, "layer.0"), lambda x: apply(task, x, "layer.1")
    )
    tasked = runner(chain(wrappers), mode="PIECEWISE", pieces="fx", pool=pool, sizes=[2])
    tasked.capture()
    own = {"layer.0": {"lengths": [1]}, "layer.1": {"lengths": [2]}}
    assert torch.equal(tasked(x=rows(2), updates=own), rows(2, 6.0))
    with pytest.raises(InvalidUpdateError, match="mlp"):
        tasked(x=rows(2), updates={**own, "mlp": {"lengths": [1]}})


def test_host_arguments_get_the_same_padding_in_full_and_piecewise_graphs():
    seen: list[Any] = []
    task = scaling("attention", seen)
    tasked = runner(
        lambda x: apply(task, x, "layer.0"),
        mode="FULL_AND_PIECEWISE",
        sizes=[4],
        max_num_reqs=4,
        options=GraphOptions(check="off"),
    )
    tasked.capture()
    for query_len in (1, None):
        seen.clear()
        tasked(Batch(3, 3, query_len), x=rows(3), updates={"attention": {"lengths": [1, 2, 3]}})
        assert seen == [[1, 2, 3, 0]]


def test_a_step_without_updates_raises_and_unchanged_repeats_the_last_updates():
    tasked = runner(lambda x: apply(scaling("attention"), x, "layer.0"), sizes=[2])
    with pytest.raises(MissingUpdateError):
        tasked(x=rows(2))
    with pytest.raises(MissingUpdateError):
        tasked(x=rows(2), updates=UNCHANGED)
    tasked.capture()
    tasked(x=rows(2), updates={"attention": {"lengths": [4]}})
    assert torch.equal(tasked(x=rows(2), updates=UNCHANGED), rows(2, 5.0))
    assert torch.equal(tasked(x=rows(9), updates=UNCHANGED), rows(9, 5.0))
    # An eager step in between counts as a step, though no graph was given its values.
    assert torch.equal(tasked(x=rows(9), updates={"attention": {"lengths": [6]}}), rows(9, 7.0))
    assert torch.equal(tasked(x=rows(2), updates=UNCHANGED), rows(2, 7.0))


def test_unchanged_after_a_recapture_repeats_the_last_step_and_never_the_capture_values() -> None:
    tasked = runner(lambda x: apply(scaling("attention"), x, "layer.0"), sizes=[2])
    tasked.capture()
    with pytest.raises(MissingUpdateError):
        tasked(x=rows(2), updates=UNCHANGED)
    tasked(x=rows(2), updates={"attention": {"lengths": [4]}})
    tasked.recapture()
    assert torch.equal(tasked(x=rows(2), updates=UNCHANGED), rows(2, 5.0))


@pytest.mark.parametrize("edit", ["list", "values", "updates"])
@pytest.mark.parametrize("count", [2, 4, 9])
def test_unchanged_repeats_the_given_updates_though_the_host_edits_them_in_place(edit, count):
    tasked = runner(lambda x: apply(scaling("attention"), x, "layer.0"), sizes=[2, 4])
    tasked.capture()
    updates = {"attention": {"lengths": [4]}}
    tasked(x=rows(2), updates=updates)
    if edit == "list":
        updates["attention"]["lengths"][0] = 9
    elif edit == "values":
        updates["attention"]["lengths"] = [9]
    else:
        updates["attention"] = {"lengths": [9]}
    assert torch.equal(tasked(x=rows(count), updates=UNCHANGED), rows(count, 5.0))


def test_unchanged_is_refused_after_an_update_that_failed_half_way():
    task = scaling("attention")
    tasked = runner(lambda x: apply(task, apply(task, x, "a"), "b"), sizes=[2])
    tasked.capture()
    tasked(x=rows(2), updates={"attention": {"lengths": [1]}})
    with pytest.raises(ValueError, match="refused"):
        tasked(x=rows(2), updates={"a": {"lengths": [2]}, "b": {"lengths": [99]}})
    with pytest.raises(MissingUpdateError, match="half-way"):
        tasked(x=rows(2), updates=UNCHANGED)
    assert torch.equal(tasked(x=rows(2), updates={"attention": {"lengths": [1]}}), rows(2, 4.0))


def test_a_step_of_a_closed_runner_raises_pool_closed_with_any_updates():
    closed = runner(sizes=[2])
    closed.capture()
    closed.close()
    for updates in (None, UNCHANGED, {}, UNCHANGED):  # the last after a step that failed
        with pytest.raises(PoolClosedError, match="the runner is closed"):
            closed(x=rows(2), updates=updates)


def test_segment_hooks_also_run_for_graphs_with_updatable_tasks():
    events: list[str] = []

    class Hooks:
        def before_capture(self):
            events.append("capture")

        def end_of_capture(self):
            events.append("end")

        def before_replay(self):
            events.append("replay")

    task = scaling("attention")
    tasked = runner(lambda x: apply(task, x, "a"), sizes=[2], host=Host(around_graph=Hooks()))
    tasked.capture()
    tasked(x=rows(2), updates={"attention": {"lengths": [1]}})
    assert events == ["capture", "end", "replay"]


def test_a_bind_hook_that_replaces_an_input_view_raises():
    def bind(views, descriptor, phase):
        views["x"] = views["x"] * 2

    with pytest.raises(TypeError, match="mappingproxy"):
        runner(host=Host(bind=bind), sizes=[2]).capture()


@pytest.mark.parametrize(
    "updates",
    [
        {"attention": 5},
        {"attention": {"lengths": None}},
        {"attention": {"lengths": 5}},
        {"attention": {"lengths": "abc"}},
        {"attention": {"lengths": [2.7]}},
        {"attention": {"lengths": torch.tensor([2.7])}},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [2, 9])
def test_malformed_host_arguments_raise_and_the_next_step_works(updates, count):
    tasked = runner(lambda x: apply(scaling("attention"), x, "layer.0"), sizes=[2])
    tasked.capture()
    with pytest.raises(InvalidUpdateError):
        tasked(x=rows(count), updates=updates)
    right = {"attention": {"lengths": [4]}}
    assert torch.equal(tasked(x=rows(count), updates=right), rows(count, 5.0))


@pytest.mark.parametrize("value", [float("nan"), 3, None, "text", torch.arange(3).numpy()], ids=str)
def test_an_eager_part_may_return_the_same_plain_value_as_at_capture(value):
    part = eager_break(lambda x: (x + 1, value))
    run = runner(lambda x: part(x)[0] * 2, mode="PIECEWISE", sizes=[2])
    run.capture()
    assert torch.equal(run(x=rows(2)), rows(2, 4.0))


def test_an_eager_part_that_returns_a_sparse_tensor_in_a_replay_raises():
    sparse = []
    part = eager_break(lambda x: (x + 1).to_sparse() if sparse else x + 1)
    unchecked = GraphOptions(check="off")
    run = runner(lambda x: part(x) * 2, mode="PIECEWISE", sizes=[2], options=unchecked)
    run.capture()
    sparse.append(True)
    with pytest.raises(BreakError, match="sparse"):
        run(x=rows(2))


def test_the_error_of_an_unnamed_eager_part_shows_its_python_repr():
    changed: list[bool] = []
    part = eager_break(partial(lambda changed, x: (x,) if changed else x, changed))
    run = runner(
        lambda x: part(x) * 2, mode="PIECEWISE", sizes=[2], options=GraphOptions(check="off")
    )
    run.capture()
    changed.append(True)
    with pytest.raises(BreakError, match=r"functools\.partial"):
        run(x=rows(2))


@pytest.mark.parametrize("name", ["self", "updates", "metadata"])
def test_an_input_named_like_a_parameter_of_the_runners_call_is_refused(name):
    with pytest.raises(InvalidInputError, match=name):
        runner(inputs={name: InputSpec(torch.float32, ("tokens", 4))})


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("warmups", [0, 1, 2])
@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.t_().softmax(0).t(),
        lambda x: x.unsqueeze_(0)[0] * 2,
        lambda x: setattr(x, "data", x * 2) or x + 1,
        lambda x: x.set_(x * 2) + 1,
        lambda x: x.resize_(len(x) * 4).view(-1, 4) * 2,
    ],
    ids=["t_", "unsqueeze_", "data", "set_", "resize_"],
)
def test_a_forward_that_reshapes_its_inputs_in_place_leaves_the_buffers_shapes(
    forward, warmups, mode
):
    run = runner(
        forward, mode=mode, outputs=None, options=GraphOptions(warmups=warmups), sizes=[2, 3]
    )
    for _ in range(2):
        for count in (1, 2, 3, 9):
            x = torch.rand(count, 4)
            assert torch.allclose(run(x=x), forward(x.clone()))
        run.capture()


@pytest.mark.parametrize("edit", ["data", "set_", "resize_"])
def test_a_forward_that_gives_declared_state_other_memory_is_refused_at_capture(edit):
    state = torch.zeros(4)

    def forward(x):
        new = state * 0.5 + x.sum(0)
        if edit == "data":
            state.data = new
        elif edit == "set_":
            state.set_(new)
        else:
            state.resize_(2)
        return x + new

    run = runner(forward, host=Host(state=[state]), sizes=[2])
    with pytest.raises(StaleInputError, match="declared state"):
        run.capture()
    assert torch.equal(state, torch.zeros(4))


@pytest.mark.parametrize("at", ["begin", "forward"])
def test_the_error_of_a_capture_is_raised_even_if_its_abort_fails(at):
    class Failing(CpuPlatform):
        def begin_capture(self, graph: Any, memory: Any) -> None:
            super().begin_capture(graph, memory)
            if at == "begin":
                raise ZeroDivisionError("the first")

        def abort_capture(self, graph: Any) -> None:
            super().abort_capture(graph)
            raise RuntimeError("the second")

    def forward(x):
        if current_context().mode is GraphMode.FULL:
            raise ZeroDivisionError("the first")
        return x + 1

    run = runner(forward, platform=Failing(), sizes=[4])
    with pytest.raises(ZeroDivisionError, match="the first") as raised:
        run.capture()
    notes = "".join(getattr(raised.value, "__notes__", ["RuntimeError: the second"]))
    assert "RuntimeError: the second" in notes
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))


def test_verify_on_a_closed_runner_raises_pool_closed():
    served = runner(lambda x: x * 2)
    served.capture()
    served.close()
    with pytest.raises(PoolClosedError, match="runner is closed"):
        served.verify(x=rows(2))


# What ends a capture, or leaves it no room --------------------------------------------------------


class Ended(CpuPlatform):
    """Some captures end as on CUDA when another thread waits for the device."""

    def __init__(self, *ended: int) -> None:
        super().__init__()
        self._ended, self.captures = ended, 0

    def end_capture(self, graph: Any) -> bool:
        self.captures += 1
        if self.captures in self._ended:
            raise EndedCaptureError.of("invalidated")
        return super().end_capture(graph)


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_capture_that_another_thread_has_ended_is_made_once_more(mode):
    count = torch.zeros(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + 1

    platform = Ended(2)
    run = runner(forward, platform=platform, mode=mode, sizes=[2, 4])
    run.capture()
    assert (platform.captures, count.item()) == (3, 0)
    assert torch.equal(run(x=rows(3)), rows(3) + 1)
    assert run.last_dispatch.reason is Reason.HIT


def test_a_capture_that_is_ended_twice_raises_an_error_that_names_the_lock():
    platform = Ended(2, 3)
    run = runner(lambda x: x + 1, platform=platform, sizes=[2, 4])
    with pytest.raises(CaptureError, match="capture_lock"):
        run.capture()
    assert [each.descriptor.num_tokens for each in run.report().graphs] == [4]
    run.capture()
    assert len(run.report().graphs) == 2


class Full(CpuPlatform):
    """Errors are explained as on CUDA."""

    def explain(self, error: BaseException) -> CaptureError:
        return error if isinstance(error, CaptureError) else explain(error)


@pytest.mark.parametrize("check", ["capture", "off"])
@pytest.mark.parametrize("while_captured", [False, True])
def test_the_memory_of_a_graph_without_room_is_free_for_the_smaller_ones(while_captured, check):
    """No garbage is collected during captures, so an error that keeps itself would keep it."""
    large = list[Any]()
    held = list[int]()

    def forward(x: torch.Tensor) -> torch.Tensor:
        held.append(sum(each() is not None for each in large))
        memory = torch.empty(1000)
        large.append(weakref.ref(memory))
        if len(x) > 2 and (current_capture() is not None or not while_captured):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + 1

    options = GraphOptions(check=check)
    run = runner(forward, platform=Full(), sizes=[1, 2, 4, 8], options=options)
    with pytest.warns(GraphsDroppedWarning):
        run.capture()
    assert sum(held) == 0
    assert [each.descriptor.num_tokens for each in run.report().graphs] == [2, 1]


class WithRoomInPool(Full):
    """A full device, of whose memory graphs still have some. `in_pool` says whether allocations
    come from there now."""

    capabilities = Full.capabilities | {Capability.ALLOCATE_IN_POOL}

    def __init__(self) -> None:
        super().__init__()
        self.in_pool = False

    @contextmanager
    def allocate_in(self, memory: Any) -> Iterator[None]:
        self.in_pool = True
        try:
            yield
        finally:
            self.in_pool = False


def with_room_at_two_rows(platform: WithRoomInPool, sizes: list[int], where: set[bool]) -> Any:
    """A runner that has no room for 2 rows but `where` allocations come from the pool, or not."""
    count = torch.zeros(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        if len(x) == 2 and current_capture() is None and platform.in_pool not in where:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + count

    return runner(forward, platform=platform, sizes=sizes, host=Host(state=[count]))


def test_a_size_with_room_in_the_memory_of_larger_graphs_is_warmed_up_there():
    run = with_room_at_two_rows(WithRoomInPool(), [1, 2, 4], {True})
    run.capture()
    assert [each.descriptor.num_tokens for each in run.report().graphs] == [4, 2, 1]
    assert not run.pool.platform.in_pool
    # The first step is a trial, which runs the forward eagerly: at a size that has room.
    for size, count in ((1, 2.0), (2, 3.0)):
        assert torch.equal(run(x=rows(size)), rows(size, count))
        assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize(
    ("sizes", "where", "captured"),
    [([1, 2], {True}, [1]), ([1, 2, 4], set(), [4, 1])],
    ids=["no graph before it", "no room in the pool"],
)
def test_a_size_without_room_for_a_warm_up_in_the_pool_is_dropped(sizes, where, captured):
    run = with_room_at_two_rows(WithRoomInPool(), sizes, where)
    with pytest.warns(GraphsDroppedWarning, match="1 of"):
        run.capture()
    assert [each.descriptor.num_tokens for each in run.report().graphs] == captured
    assert not run.pool.platform.in_pool
