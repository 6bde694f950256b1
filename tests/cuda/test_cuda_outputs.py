"""Outputs on a GPU: fresh at every step, and unreadable once their memory is the next step's."""

import pytest
import torch

from graphrt import GraphOptions, GraphPool, GraphRunner, InputSpec
from graphrt.errors import OverwrittenOutputError

pytestmark = pytest.mark.cuda

WIDTH = 8
X = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}


def runner(forward=lambda x: x * 2, **keywords):
    defaults = {"mode": "FULL", "sizes": [2, 4, 8], "inputs": X, "platform": "cuda"}
    # What a trial hands out is a copy.
    options = keywords.pop("options", GraphOptions()).merged({"check": "off"})
    made = GraphRunner(forward, options=options, **{**defaults, **keywords})
    made.capture()
    return made


def rows(count, value=1.0):
    return torch.full((count, WIDTH), float(value))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("outputs", ["pool", "static"])
@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_an_output_is_right_until_the_next_step_and_raises_after_it(mode, outputs, count):
    run = runner(mode=mode, options=GraphOptions(outputs=outputs))
    for value in range(1, 6):
        old = run(x=rows(3, value))
        view = old[:1]
        assert torch.equal(old.cpu(), rows(3, 2 * value))
        new = run(x=rows(count, value))
        for tensor in (old, view):
            with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
                tensor.sum()
            with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
                tensor.cpu()
        assert torch.equal(new.cpu(), rows(count, 2 * value))


def test_an_output_of_the_last_step_can_be_the_next_input():
    run = runner()
    value = rows(3)
    for _ in range(5):
        value = run(x=value)
    assert torch.equal(value.cpu(), rows(3, 32.0))
    run(x=rows(3))
    with pytest.raises(OverwrittenOutputError):
        run(x=value)
    assert torch.equal(run(x=rows(3)).cpu(), rows(3, 2))


def test_record_stream_and_copies_on_another_stream_work_on_an_output():
    run = runner()
    side = torch.cuda.Stream()
    for value in range(1, 20):
        out = run(x=rows(3, value))
        side.wait_stream(torch.cuda.current_stream())
        out.record_stream(side)
        with torch.cuda.stream(side):
            copy = out.to("cpu", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        run(x=rows(3, -value))
        torch.cuda.synchronize()
        assert torch.equal(copy, rows(3, 2 * value))


@pytest.mark.parametrize(
    "edit",
    [
        lambda out: out.unsqueeze_(0),
        lambda out: setattr(out, "data", torch.zeros(1, device="cuda")),
        lambda out: out.resize_(1),
        lambda out: out.requires_grad_(),
        lambda out: out.add_(100),
    ],
)
def test_host_edits_of_an_output_never_reach_the_next_step(edit):
    run = runner()
    for count in (2, 3, 9):
        for _ in range(2):
            out = run(x=rows(count))
            assert torch.equal(out.cpu(), rows(count, 2)) and not out.requires_grad
            edit(out)


def test_a_step_of_another_runner_or_a_release_invalidates_old_outputs():
    pool = GraphPool("cuda")
    target = runner(pool=pool, platform=None)
    draft = runner(lambda x: x * 3, pool=pool, platform=None)
    for end in (lambda: draft(x=rows(3)), target.release):
        old = target(x=rows(3))
        end()
        with pytest.raises(RuntimeError, match=OverwrittenOutputError.__name__):
            old.sum()
        target.capture()


@pytest.mark.parametrize("sizes", [[4], [4, 8]])
def test_undeclared_output_axes_are_found_by_comparing_sizes(sizes):
    run = runner(lambda x: {"t": x.t() * 2, "layers": torch.stack([x, x + 1])}, sizes=sizes)
    out = run(x=rows(3))
    assert (out["t"].shape, out["layers"].shape) == ((WIDTH, 3), (2, 3, WIDTH))


def test_an_eager_step_above_the_largest_size_accepts_host_inputs():
    run = runner(lambda x: x.add_(1))
    argument = rows(9)
    assert torch.equal(run(x=argument).cpu(), rows(9, 2)) and torch.equal(argument, rows(9))


def test_a_conjugated_output_keeps_its_conjugate_values():
    run = runner(lambda x: x.mul(2).conj(), inputs={"x": InputSpec(torch.complex64, ("tokens",))})
    argument = torch.tensor([1 + 2j, 3 - 1j, 2j], dtype=torch.complex64)
    for count in (3, 2):
        out = run(x=argument[:count])
        assert torch.equal(out.cpu().resolve_conj(), (argument[:count] * 2).conj().resolve_conj())
