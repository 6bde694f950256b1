"""Outputs of a runner hold the live rows; a later step that overwrites them makes them raise."""

import collections
import contextlib
import gc
import sys
import weakref
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # teaches the pickler what a tensor is
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt import GraphOptions, GraphPool, GraphRunner, Host, InputSpec, eager_break
from graphrt.core.base.torch_names import can_mark_unreadable
from graphrt.core.replay import handout
from graphrt.errors import OutputError, OverwrittenOutputError

WIDTH = 6
X = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
XS = {**X, "last": InputSpec(torch.int64, ("reqs",), pad=0)}
MODES = ["FULL", "PIECEWISE"]
OUTPUTS = ["pool", "static", "clone"]

marks = pytest.mark.skipif(
    not can_mark_unreadable, reason="this torch was built without CUDA, and cannot mark a storage"
)
copies = pytest.mark.skipif(can_mark_unreadable, reason="this torch can mark a storage")


def runner(forward, **keywords):
    defaults = {"mode": "FULL", "sizes": [2, 4, 8], "inputs": X}
    made = GraphRunner(forward, **{**defaults, **keywords})
    made.capture()
    return made


def rows(count, value=1.0):
    return torch.full((count, WIDTH), float(value))


# What is handed out ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize(
    "edit",
    [
        lambda out: out.unsqueeze_(0),
        lambda out: out.t_(),
        lambda out: setattr(out, "data", torch.zeros(1)),
        lambda out: out.resize_(1),
        lambda out: out.requires_grad_(),
        lambda out: out.set_(torch.zeros(3)),
        lambda out: out.add_(100),
    ],
    ids=["unsqueeze_", "t_", "data", "resize_", "requires_grad_", "set_", "add_"],
)
def test_an_in_place_edit_of_an_output_does_not_change_the_next_steps_output(mode, outputs, edit):
    run = runner(lambda x: x * 2, mode=mode, options=GraphOptions(outputs=outputs))
    for count in (2, 3, 9):
        for _ in range(2):
            out = run(x=rows(count))
            assert torch.equal(out, rows(count, 2)) and not out.requires_grad
            edit(out)


@pytest.mark.parametrize("count", [2, 9])
def test_reshaping_an_output_in_place_keeps_the_shape_of_the_forwards_own_tensor(count):
    held = torch.arange(3.0)
    run = runner(lambda x: (x + 1, held), outputs=(("tokens", WIDTH), (3,)))
    run(x=rows(count))[1].unsqueeze_(0)
    assert held.shape == (3,) and torch.equal(run(x=rows(count))[1], torch.arange(3.0))


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_forward_that_returns_its_input_does_not_hand_out_the_callers_tensor(count, outputs):
    run = runner(lambda x: x, options=GraphOptions(outputs=outputs))
    argument = rows(count)
    run(x=argument).add_(1)
    assert torch.equal(argument, rows(count))


def test_an_input_view_returned_by_an_eager_step_outlives_the_next_step():
    run = GraphRunner(lambda x: x[:], mode="FULL", sizes=[8], inputs=X)
    first = run(x=rows(2))
    run(x=rows(2, 5))
    assert torch.equal(first, rows(2))


@pytest.mark.parametrize("count", [2, 3, 9])
def test_a_forward_that_edits_its_input_in_place_leaves_the_callers_tensor_unchanged(count):
    run = runner(lambda x: x.add_(1))
    argument = rows(count)
    assert torch.equal(run(x=argument), rows(count, 2))
    assert torch.equal(argument, rows(count))


def test_an_eager_step_larger_than_the_buffers_refuses_an_input_of_wrong_dtype():
    run = runner(lambda x: x + 1)
    with pytest.raises(ValueError, match="dtype"):
        run(x=torch.ones(9, WIDTH, dtype=torch.float64))


def test_an_output_tensor_whose_data_is_replaced_at_every_step_has_that_steps_values():
    held = torch.zeros(3)

    def forward(x):
        held.data = x.sum(0)[:3] * 1
        return held

    run = runner(forward, mode="PIECEWISE", outputs=(3,))
    for value in (1.0, 2.0, 5.0):
        assert torch.equal(run(x=rows(4, value)), torch.full((3,), 4 * value))


def test_the_output_of_a_step_can_be_the_input_of_the_next_step():
    run = runner(lambda x: x * 2)
    value = rows(3)
    for step in range(4):
        value = run(x=value)
        assert torch.equal(value, rows(3, 2.0 ** (step + 1)))


@pytest.mark.parametrize("mode", MODES)
def test_conjugated_and_negated_outputs_have_the_values_of_eager(mode):
    spec = {"x": InputSpec(torch.complex64, ("tokens",))}
    run = runner(lambda x: {"c": x.mul(2).conj(), "i": x.conj().imag}, mode=mode, inputs=spec)
    argument = torch.tensor([1 + 2j, 3 - 1j, 2j], dtype=torch.complex64)
    for count in (3, 2):
        out = run(x=argument[:count])
        assert torch.equal(out["c"].resolve_conj(), (argument[:count] * 2).conj().resolve_conj())
        assert torch.equal(out["i"].resolve_neg(), argument[:count].conj().imag.resolve_neg())


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, torch._neg_view], ids=["conj", "neg"])
def test_lazily_conjugated_or_negated_outputs_are_handed_out_with_their_values(monkeypatch, lazy):
    monkeypatch.setattr(handout, "can_mark_unreadable", True)
    output = lazy(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64))
    out = handout.handout_of(output, raw_storages=True)((2,), [])
    assert out.tolist() == output.tolist()


def test_an_output_that_the_caller_still_holds_is_marked_unreadable_exactly_once(monkeypatch):
    marked = []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))
    pool, memory = GraphPool("cpu"), torch.ones(3)
    out = handout.Shell(memory).hand_out((3,), pool.handed_out)
    pool._expire_outputs()
    assert (marked, pool.handed_out) == ([out.untyped_storage()._cdata], [])
    pool._expire_outputs()
    assert len(marked) == 1


HOLDERS = {
    "the tensor": lambda out: out,
    "a view": lambda out: out[:1],
    "an alias": lambda out: out.detach(),
    "its storage": lambda out: out.untyped_storage(),
    "an array": lambda out: out.numpy(),
    "a capsule": lambda out: torch.utils.dlpack.to_dlpack(out),
    "a sum that autograd will differentiate": lambda out: out.requires_grad_().square(),
    "a closure": lambda out: lambda: out,
}


@pytest.mark.parametrize("held", HOLDERS)
def test_held_output_storages_are_marked_unreadable_and_free_ones_are_reused(monkeypatch, held):
    marked = []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))
    memory, handed_out = torch.arange(4.0), []
    shell = handout.Shell(memory)

    def step(rows):
        handout.expire(handed_out)
        return shell.hand_out((rows,), handed_out)

    names = []
    for rows in (4, 2, 4, 2, 3):
        out = step(rows)
        assert out.tolist() == memory[:rows].tolist() and out.data_ptr() == memory.data_ptr()
        names.append(out.untyped_storage()._cdata)
        del out
    assert marked == [] and len(set(names)) == 1
    for _ in range(2):
        holder = HOLDERS[held](step(4))
        step(4)
        assert len(marked) == 1
        marked.clear()
        del holder
    assert step(4).tolist() == memory.tolist()


OWNED = {
    "shared": lambda out: out.share_memory_(),
    "its storage shared": lambda out: out.untyped_storage().share_memory_(),
    "pickled for another process": lambda out: ForkingPickler.dumps(out),
    "a note on its storage": lambda out: setattr(out.untyped_storage(), "note", 1),
}


@pytest.mark.parametrize("change", OWNED)
def test_a_storage_that_was_shared_pickled_or_annotated_is_not_reused_for_outputs(
    monkeypatch, change
):
    marked = []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))
    memory, handed_out = torch.zeros(4), []
    shell = handout.Shell(memory)
    for step in range(5):
        memory.fill_(step)
        out = shell.hand_out((4,), handed_out)
        assert out.tolist() == [step] * 4 and not hasattr(out.untyped_storage(), "note")
        OWNED[change](out)
        del out
        handout.expire(handed_out)
    assert len(marked) == 5


def test_a_finalizer_on_an_output_storage_runs_when_its_step_expires(monkeypatch):
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: None)
    ended, handed_out = [], []
    shell = handout.Shell(torch.zeros(4))
    for step in range(4):
        storage = shell.hand_out((4,), handed_out).untyped_storage()
        weakref.finalize(storage, ended.append, step)
        weak = weakref.ref(storage)
        del storage
        handout.expire(handed_out)
        assert ended == [*range(step + 1)] and weak() is None


def test_an_output_storage_is_replaced_after_a_limited_number_of_steps(monkeypatch):
    marked = []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))
    monkeypatch.setattr(handout, "_MOST_STEPS", 3)
    handed_out = []
    shell = handout.Shell(torch.arange(4.0))
    for _ in range(9):
        assert shell.hand_out((4,), handed_out).tolist() == [0, 1, 2, 3]
        handout.expire(handed_out)
    assert 1 <= len(marked) <= 3


@pytest.mark.parametrize("keeps", [False, True])
def test_an_output_is_an_inference_tensor_exactly_when_its_step_ran_in_inference_mode(
    monkeypatch, keeps
):
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: None)
    handed_out, kept = [], None
    shell = handout.Shell(torch.arange(4.0))
    for mode in (True, True, False, False, True, False, True, True, True, False):
        with torch.inference_mode(mode):
            out = shell.hand_out((4,), handed_out)
            assert out.is_inference() is mode
            if keeps:
                kept = out
            del out
        handout.expire(handed_out)
    assert (kept is None) is not keeps


def test_a_storage_kept_by_a_dispatch_mode_is_not_reused_for_later_outputs(monkeypatch):
    marked, kept, handed_out = [], [], []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))

    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if "set_" in str(func):
                kept.append(result)
            return result

    shell = handout.Shell(torch.arange(4.0))
    with Keeps():
        shell.hand_out((4,), handed_out)
    handout.expire(handed_out)
    storages = {each.untyped_storage()._cdata for each in kept}
    assert marked or shell._cdata not in storages


def test_keeping_fifty_outputs_leaves_at_most_one_registered_output_shell(monkeypatch):
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: None)
    before, handed_out, outs = len(handout._shells), [], []
    shell = handout.Shell(torch.arange(4.0))
    for step in range(50):
        outs.append(shell.hand_out((4,), handed_out))
        if step % 5 == 0:
            outs.clear()
        handout.expire(handed_out)
    assert len(handout._shells) - before <= 1


@pytest.mark.parametrize("at", range(12))
def test_an_interrupt_while_the_first_output_is_made_leaves_later_outputs_right(monkeypatch, at):
    marked = []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))
    memory, handed_out, lines = torch.arange(4.0), [], []
    shell = handout.Shell(memory)

    def trace(frame, event, _):
        if frame.f_code is handout.Shell._anew.__code__ and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == at + 1:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            shell.hand_out((4,), handed_out)
    finally:
        sys.settrace(None)
    handout.expire(handed_out)
    assert 0 not in marked
    for _ in range(3):
        assert shell.hand_out((4,), handed_out).tolist() == [0, 1, 2, 3]
        handout.expire(handed_out)
    out = shell.hand_out((4,), handed_out)
    before = len(marked)
    handout.expire(handed_out)
    assert len(marked) == before + 1 and out is not None


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("was_held", [False, True])
@pytest.mark.parametrize("rows", [(4, 4), (4, 2)])
def test_holding_either_of_two_outputs_of_a_step_marks_its_storage(
    monkeypatch, was_held, kept, rows
):
    marked = []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))
    memory, handed_out = torch.arange(4.0), []
    shell = handout.Shell(memory)
    if was_held:
        out = shell.hand_out((4,), handed_out)
        handout.expire(handed_out)
        assert len(marked) == 1
    for turn in range(3):
        both = [shell.hand_out((each,), handed_out) for each in rows]
        out = both[kept]
        del both
        handout.expire(handed_out)
        assert len(marked) == 1 + turn + was_held and out is not None


@pytest.mark.parametrize("change", ["t_", "squeeze_", "zero rows", "set_", "attribute"])
def test_the_next_output_has_no_shape_or_attribute_change_of_the_last_output(monkeypatch, change):
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: pytest.fail("was held"))
    memory, handed_out = torch.ones(1, 4), []
    shell = handout.Shell(memory)
    for _ in range(2):
        out = shell.hand_out((1, 4), handed_out)
        assert out.shape == (1, 4) and not hasattr(out, "mine") and out._version == 0
        if change == "zero rows":
            out.resize_(0, 4)
        elif change == "set_":
            out.set_(torch.zeros(2))
        elif change == "attribute":
            out.mine = 1
        else:
            getattr(out, change)()
        del out
        handout.expire(handed_out)


# Stale outputs -----------------------------------------------------------------------------------


def stale(outputs="pool", **keywords):
    # What a step hands out that is tried is no graph's.
    options = GraphOptions(outputs=outputs, check="off")
    run = runner(lambda x: {"y": x * 2}, options=options, **keywords)
    return run, run(x=rows(3))["y"]


TOUCHES = {
    "add": lambda out: out + 1,
    "view": lambda out: out.view(-1)[0].item(),
    "tolist": lambda out: out.tolist(),
    "detach": lambda out: out.detach().sum(),
    "cat": lambda out: torch.cat([out, out]),
    "write": lambda out: out.add_(1),
    "copy": lambda out: torch.empty_like(out).copy_(out),
    "data_ptr": lambda out: out.data_ptr(),
    "numpy": lambda out: out.numpy(),
    "repr": lambda out: repr(out),
}


@marks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs", ["pool", "static"])
@pytest.mark.parametrize("touch", list(TOUCHES.values()), ids=list(TOUCHES))
def test_reading_or_writing_an_output_of_an_earlier_step_raises(mode, outputs, touch):
    run, old = stale(outputs, mode=mode)
    early_view = old[:1]
    new = run(x=rows(3, 5))["y"]
    for tensor in (old, early_view):
        with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
            touch(tensor)
    assert torch.equal(new, rows(3, 10))


@marks
@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_any_next_step_replayed_or_eager_makes_the_previous_output_unreadable(count):
    run, old = stale()
    run(x=rows(count))
    with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
        old.sum()


@marks
def test_passing_an_overwritten_output_as_an_input_raises_and_names_the_input():
    run, old = stale()
    run(x=rows(3))
    with pytest.raises(OverwrittenOutputError, match="'x'"):
        run(x=old)
    assert torch.equal(run(x=rows(3))["y"], rows(3, 2))


@marks
def test_a_step_of_another_runner_of_the_pool_makes_outputs_unreadable():
    pool = GraphPool("cpu")
    options = GraphOptions(check="off")
    target = runner(lambda x: x * 2, pool=pool, options=options)
    draft = runner(lambda x: x * 3, pool=pool, options=options)
    old = target(x=rows(3))
    draft(x=rows(3))
    with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
        old.sum()


@marks
@pytest.mark.parametrize(
    "end",
    [
        lambda run: run.release(),
        lambda run: run.close(),
        lambda run: run.recapture(),
    ],
    ids=["release", "close", "recapture"],
)
def test_releasing_closing_or_recapturing_a_runner_makes_its_last_output_unreadable(end):
    run, old = stale()
    end(run)
    with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
        old.sum()


@marks
def test_an_output_becomes_unreadable_when_its_runner_is_garbage_collected():
    run, old = stale()
    del run
    gc.collect()
    with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
        old.sum()


@copies
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_copies_if_torch_cannot_mark_storages_unreadable(mode, outputs):
    run, old = stale(outputs, mode=mode)
    for count in (1, 3, 8, 9):
        run(x=rows(count, 7))
        assert torch.equal(old, rows(3, 2))
    run.close()
    assert torch.equal(old, rows(3, 2))


def test_cloned_outputs_stay_readable_after_the_next_step():
    run, old = stale("clone")
    run(x=rows(3, 5))
    assert torch.equal(old, rows(3, 2))


def test_the_pool_keeps_no_outputs_of_a_hundred_past_steps():
    run = runner(lambda x: {"y": x * 2, "z": [x + 1]})
    for _ in range(100):
        run(x=rows(3))
    assert len(run.pool.handed_out) <= 2


# Batch axes --------------------------------------------------------------------------------------


def last_rows(x, last):
    return x[last] * 2


@pytest.mark.parametrize(
    ("forward", "live"),
    [
        (lambda x, last: x.t() * 2, (WIDTH, 3)),
        (lambda x, last: torch.stack([x, x * 2]), (2, 3, WIDTH)),
        (lambda x, last: x @ x.t(), (3, 3)),
        (last_rows, (2, WIDTH)),
        (lambda x, last: torch.ones(8, 2), (8, 2)),
        (lambda x, last: torch.ones(4) * x.sum(), (4,)),
        (lambda x, last: x.sum(), ()),
        (lambda x, last: torch.cat([x, x], 1), (3, 2 * WIDTH)),
        (lambda x, last: x.unsqueeze(0), (1, 3, WIDTH)),
        (lambda x, last: last.float().unsqueeze(1) + x[:1, 0], (2, 1)),
    ],
    ids=[
        "transposed", "stack of layers", "square", "requests", "constant of the largest size",
        "constant of the size", "scalar", "wide", "front axis", "column",
    ],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [[4], [8], [4, 8], [2, 4, 8]])
def test_undeclared_batch_axes_of_outputs_are_found_by_comparing_captured_sizes(
    forward, live, sizes
):
    run = runner(forward, inputs=XS, sizes=sizes, max_num_reqs=4)
    x, last = torch.rand(3, WIDTH), torch.tensor([0, 2])
    out = run(x=x, last=last)
    assert run.last_dispatch.reason.name == "HIT"
    assert tuple(out.shape) == live


@pytest.mark.parametrize("sizes", [[8], [4, 8]])
def test_an_output_key_without_declared_axes_is_cut_to_the_live_rows(sizes):
    run = runner(
        lambda x: {"y": x * 2, "hidden": x.t()}, outputs={"y": ("tokens", WIDTH)}, sizes=sizes
    )
    out = run(x=rows(3))
    assert (out["y"].shape, out["hidden"].shape) == ((3, WIDTH), (WIDTH, 3))


@pytest.mark.parametrize(
    ("forward", "outputs"),
    [
        (lambda x: x.t(), ("tokens", WIDTH)),
        (lambda x: torch.stack([x, x]), ("tokens", WIDTH)),
        (lambda x: x, ("tokens", WIDTH + 1)),
        (lambda x: x, ("tokens", WIDTH, 1)),
        (lambda x: x, ("tokens+1", WIDTH)),
        (lambda x: {"y": x}, {"z": ("tokens", WIDTH)}),
        (lambda x: (x, x), (("tokens",), ("tokens",), ("tokens",))),
        (lambda x: x.repeat(2, 1), None),
        (lambda x: x[0] if len(x) == 2 else x, None),
        (lambda x: [x] * len(x), None),
    ],
    ids=[
        "transposed", "stack", "width", "rank", "extra", "other key",
        "too few", "twice the tokens", "squeezed", "as many tensors as tokens",
    ],
)  # fmt: skip
def test_outputs_that_lack_their_declared_axes_are_refused_at_capture(forward, outputs):
    run = GraphRunner(forward, mode="FULL", sizes=[2, 4, 8], inputs=X, outputs=outputs)
    with pytest.raises(OutputError):
        run.capture()
    run(x=rows(9))  # it serves eagerly, and what was captured before serves too


def holding_itself(kind, x):
    """Outputs that hold themselves."""
    if kind == "dict":
        named = {"y": x + 1}
        named["all"] = named
        return named
    listed = [x + 1]
    listed += [listed, listed] if kind == "twice" else [(listed,)]
    return listed


@pytest.mark.parametrize("kind", ["list", "twice", "dict"])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_hold_themselves_are_refused_by_name(mode, kind):
    run = GraphRunner(partial(holding_itself, kind), mode=mode, sizes=[2, 4], inputs=X)
    for use in (lambda: run(x=rows(3)), run.capture):
        with pytest.raises(OutputError, match="holds itself"):
            use()


@pytest.mark.parametrize("mode", MODES)
def test_an_output_on_the_meta_device_is_refused_by_name(mode):
    run = GraphRunner(
        lambda x: {"y": x + 1, "shape": x.to("meta")}, mode=mode, sizes=[2, 4], inputs=X
    )
    with pytest.raises(OutputError, match=r"no values, at \['shape'\]"):
        run.capture()


def test_a_transposed_output_of_square_size_is_refused_against_its_declared_axes():
    run = GraphRunner(
        lambda x: x.t(), mode="FULL", sizes=[WIDTH], inputs=X, outputs=("tokens", WIDTH)
    )
    with pytest.raises(OutputError):
        run.capture()


def test_an_output_axis_declared_as_none_may_have_any_size():
    by_design = Host(mixes_rows=True)
    run = runner(lambda x: x.repeat(1, len(x)), outputs=("tokens", None), host=by_design)
    assert run(x=rows(3)).shape == (3, 4 * WIDTH)


def test_a_forward_that_runs_at_only_one_size_needs_declared_output_axes():
    def forward(x):
        if len(x) not in (4, 9):
            raise RuntimeError("this forward has one size")
        return x * 2

    run = GraphRunner(forward, mode="FULL", sizes=[4], inputs=X)
    with pytest.raises(OutputError, match="outputs="):
        run.capture()
    declared = runner(forward, sizes=[4], outputs=("tokens", WIDTH))
    assert torch.equal(declared(x=rows(3)), rows(3, 2))


@pytest.mark.parametrize(
    ("mode", "sizes"), [("FULL", [1]), ("FULL_DECODE_ONLY", [1]), ("FULL_DECODE_ONLY", [1, 2])]
)
def test_finding_output_axes_never_calls_the_forward_with_zero_tokens(mode, sizes):
    asked = []
    run = runner(lambda x: asked.append(len(x)) or x.sum(1), mode=mode, sizes=sizes)
    assert torch.equal(run(x=rows(1)), torch.full((1,), float(WIDTH)))
    assert run.last_dispatch.reason.name == "HIT" or mode != "FULL"
    assert min(asked) == 1


def test_a_lazy_capture_finds_undeclared_output_axes():
    run = GraphRunner(
        lambda x: x.t() * 2, mode="FULL", sizes=[4, 8], inputs=X, options=GraphOptions(lazy=True)
    )
    for count in (3, 7, 3, 8):
        assert run(x=rows(count)).shape == (WIDTH, count)
        assert run.last_dispatch.reason.name == "HIT"


def test_graphs_captured_before_a_failed_size_serve_smaller_batches():
    def forward(x):
        if len(x) == 4:
            raise ValueError("no four")
        return x.t() * 2

    run = GraphRunner(forward, mode="FULL", sizes=[4, 8], inputs=X)
    with pytest.raises(ValueError, match="no four"):
        run.capture()
    assert run(x=rows(3)).shape == (WIDTH, 3) and run.last_dispatch.descriptor.num_tokens == 8


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.reshape(-1),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: torch.cat([x, x[:1]]),
        lambda x: x[1:],
        lambda x: x[::2],
        lambda x: torch.cat([x, x]),
        lambda x: (x, x.shape[0]),
        lambda x: (x, x.shape),
        lambda x: {"x": x, "rows": float(len(x))},
    ],
    ids=["flat", "repeated", "longer", "shorter", "halved", "doubled", "count", "shape", "float"],
)
@pytest.mark.parametrize("sizes", [[8], [4], [4, 8]])
@pytest.mark.parametrize("lazy", [False, True])
def test_outputs_that_depend_on_the_batch_size_without_a_batch_axis_are_refused(
    forward, sizes, lazy
):
    run = GraphRunner(forward, mode="FULL", sizes=sizes, inputs=X, options=GraphOptions(lazy=lazy))
    with pytest.raises(OutputError):
        run(x=rows(3)) if lazy else run.capture()


def test_numbers_strings_and_none_in_the_output_are_returned_by_replays():
    run = runner(lambda x: (x, 3, "three", None, float("nan")), sizes=[8])
    assert repr(run(x=rows(3))[1:]) == "(3, 'three', None, nan)"
    assert run.last_dispatch.reason.name == "HIT"


# Containers --------------------------------------------------------------------------------------


@dataclass
class Both:
    logits: torch.Tensor
    hidden: torch.Tensor


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class Attributed(collections.OrderedDict):
    """Has its tensors as attributes too, which do not follow its items."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__.update(items)


Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, x * 2),
        lambda x: [x, {"y": x * 2}],
        lambda x: {"a": x, "b": (x * 2,)},
        lambda x: collections.OrderedDict(a=x),
        lambda x: Both(x, x.t()),
        lambda x: Pair(x, None),
        lambda x: {"a": x, "n": 3},
    ],
)
def test_known_output_containers_keep_their_type_and_values_in_replays(make):
    run = runner(make)
    for count in (2, 3, 9):
        argument = torch.rand(count, WIDTH)
        out, expected = run(x=argument), make(argument)
        assert type(out) is type(expected)
        torch.testing.assert_close(_plain(out), _plain(expected), rtol=0, atol=0)


def _plain(value):
    return dict(vars(value)) if isinstance(value, Both) else value


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Opaque(x),
        lambda x: {"out": Opaque(x)},
        lambda x: iter([x]),
        lambda x: {x},
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x[0], x[1]]),
        lambda x: lambda: x,
        lambda x: Attributed(a=x * 2),
    ],
    ids=[
        "object",
        "in a dict",
        "iterator",
        "set",
        "sparse",
        "nested",
        "function",
        "dict with attributes",
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested")
def test_outputs_in_unknown_containers_are_refused_at_capture(make):
    run = GraphRunner(make, mode="FULL", sizes=[2, 4], inputs=X)
    with pytest.raises(OutputError):
        run.capture()


def test_a_forward_or_eager_part_that_returns_a_sparse_tensor_is_refused():
    weight = torch.eye(WIDTH).to_sparse()

    @eager_break
    def multiplied(matrix, x):
        return torch.sparse.mm(matrix, x.t()).t()

    @eager_break
    def made_sparse(x):
        return x.to_sparse()

    for forward in (lambda x: weight, lambda x: multiplied(made_sparse(x.t() @ x), x)):
        with pytest.raises(OutputError, match="no strided memory"):
            runner(forward, mode="PIECEWISE")
    # One that stays where it is may be given to eager parts.
    run = runner(lambda x: multiplied(weight, x) + 1, mode="PIECEWISE")
    assert torch.equal(run(x=rows(3)), rows(3) + 1)


class Labelled(torch.Tensor):
    """What torch makes of it is of its kind."""


@pytest.mark.parametrize("options", [{}, {"outputs": "clone"}], ids=repr)
def test_an_output_of_a_tensor_subclass_is_refused_at_capture(
    options,
):
    weight = torch.nn.Parameter(torch.ones(4, 4).as_subclass(Labelled), requires_grad=False)
    made = GraphRunner(
        lambda x: x @ weight,
        mode="FULL",
        sizes=[2],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        options=GraphOptions(**options),
        platform="cpu",
    )
    with pytest.raises(OutputError, match="tensor subclass"):
        made.capture()
