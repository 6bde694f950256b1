"""Outputs that share memory, as the same tensor or as views, have the values of eager."""

from __future__ import annotations

import pytest
import torch

from graphrt import GraphOptions, GraphPool, GraphRunner, InputSpec, KeyedGraphs, eager_break
from graphrt.core.replay import handout
from graphrt.lowlevel import OutputBuffer

WIDTH = 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
MODES = ["FULL", "PIECEWISE"]
OUTPUTS = ["pool", "static", "clone"]
ROWS = (4, 3, 1, 2, 4, 3, 9)


class Forward:
    def __init__(self, device):
        self.weight = torch.randn(WIDTH, 2 * WIDTH, device=device)
        self.cache = torch.zeros(16, WIDTH, device=device)

    def once(self, x):
        return x @ self.weight

    def twice(self, x):
        y = self.once(x)
        return y, y

    def nested(self, x):
        y = self.once(x)
        return {"a": y, "b": [y, {"c": y}], "d": x * 2}

    def views(self, x):
        y = self.once(x)
        return {"left": y[:, :WIDTH], "all": y, "folded": y.view(-1, 2, WIDTH), "last": y[:, -1]}

    def halves(self, x):
        return list(self.once(x).split(WIDTH, 1))

    def stacked(self, x):
        return torch.stack([x, x * 2]).unbind(0)

    def other_dtype(self, x):
        y = self.once(x)
        return y, torch.view_as_complex(y.view(-1, WIDTH, 2))

    def expanded(self, x):
        y = self.once(x)
        return y, y[:, :1].expand(-1, 5), y.t()

    def inputs(self, x):
        return {"x": x, "part": x[:, :3], "again": x, "new": x + 1}

    def state(self, x):
        self.cache[: len(x)] = x
        return self.cache[: len(x)], self.cache[: len(x), :4]

    def of_a_part(self, x):
        y = self.part(x @ self.weight)
        return y, y[:, 1:], y

    @eager_break
    def part(self, y):
        return y * 2


CASES = [name for name in vars(Forward) if name[0] != "_" and name not in ("once", "part")]


def tensors(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for value in values for tensor in tensors(value)]


def runner_of(forward, device, mode, outputs, axes=None):
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[1, 2, 4],
        platform=device,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=axes,
        options=GraphOptions(outputs=outputs),
    )
    runner.capture()
    return runner


AXES = {"expanded": [("tokens", 16), ("tokens", 5), (16, "tokens")]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_outputs_that_share_memory_have_the_values_of_eager(device, case, mode, outputs):
    torch.manual_seed(0)
    eager, model = Forward(device), Forward(device)
    model.weight.copy_(eager.weight)
    runner = runner_of(getattr(model, case), device, mode, outputs, AXES.get(case))
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, device=device)
        right, out = getattr(eager, case)(x.clone()), runner(x=x)
        for ours, theirs in zip(tensors(out), tensors(right), strict=True):
            torch.testing.assert_close(ours, theirs)
    runner.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_held_output_that_shares_memory_is_marked_unreadable(case, mode, monkeypatch):
    """As on CUDA, but that nothing is marked: this torch may have been built without it."""
    marked = []
    monkeypatch.setattr(handout, "can_mark_unreadable", True)
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: marked.append(storage))
    torch.manual_seed(0)
    eager, model = Forward("cpu"), Forward("cpu")
    model.weight.copy_(eager.weight)
    runner = runner_of(getattr(model, case), "cpu", mode, "pool")
    for step, rows in enumerate(ROWS * 2):
        x = torch.randn(rows, WIDTH)
        right, out = getattr(eager, case)(x.clone()), runner(x=x)
        for ours, theirs in zip(tensors(out), tensors(right), strict=True):
            torch.testing.assert_close(ours, theirs)
        kept = tensors(out)[-1]
        storage = kept.untyped_storage()._cdata
        del right, out, ours
        # A storage of a step before may have had this address.
        marked.clear()
        runner(x=x)
        # Before, some were trials, which hand out copies.
        assert step < len(ROWS) or (storage in marked) == (rows < 5)
        del kept
    runner.close()


def test_cloned_outputs_that_were_views_of_each_other_are_independent():
    runner = runner_of(Forward("cpu").views, "cpu", "FULL", "clone")
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        out = runner(x=x)
    kept = out["all"].clone()
    out["left"].zero_()
    assert torch.equal(out["all"], kept)
    runner(x=x * 2)
    assert torch.equal(out["all"], kept)
    runner.close()


@pytest.mark.parametrize("outputs", ["pool", "clone"])
def test_a_tensor_and_its_conjugate_both_have_right_output_values(outputs):
    def forward(x):
        y = torch.view_as_complex(x.view(-1, WIDTH // 2, 2) * 2)
        return y, y.conj()

    runner = runner_of(forward, "cpu", "FULL", outputs)
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        y, conjugate = runner(x=x)
        assert torch.equal(y, forward(x)[0])
        assert torch.equal(conjugate, forward(x)[1])
    runner.close()


# One buffer for several runners ------------------------------------------------------------------


def at_first(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_one_buffer_holds_the_outputs_of_all_sizes_of_keyed_graphs_and_runners(device):
    buffer, pool = OutputBuffer(), GraphPool(device)
    forward, x = Forward(device), torch.zeros(16, WIDTH, device=device)

    def held(call, size):
        return lambda: buffer.hold(call(x[:size]))

    # As two runners of a host, each with graphs for sizes of its own.
    hosts = {forward.once: KeyedGraphs(pool), forward.views: KeyedGraphs(pool)}
    for size in (16, 4, 1):
        for call, graphs in hosts.items():
            held(call, size)()
            graphs.capture(size, held(call, size))
    runner = GraphRunner(
        lambda x: buffer.hold(forward.once(x)),
        mode="FULL",
        sizes=[4, 8],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        pool=pool,
    )
    runner.capture()
    places = set()
    for size in (4, 16, 1, 4):
        x.normal_()
        for call, graphs in hosts.items():
            ours, right = tensors(graphs[size].replay()), tensors(call(x[:size]))
            for one, other in zip(ours, right, strict=True):
                torch.testing.assert_close(one, other)
            places.add(at_first(ours[0]))
        # A runner may hand out copies: what it leaves in the buffer is the same.
        ours = runner(x=x[:4].clone())
        torch.testing.assert_close(ours, forward.once(x[:4]))
        assert torch.equal(hosts[forward.once][4].outputs, ours)
    assert len(places) == 1


def test_a_larger_size_that_comes_later_gets_new_memory_and_the_graphs_before_stay_right():
    buffer, graphs = OutputBuffer(), KeyedGraphs(GraphPool("cpu"))
    x = torch.zeros(16, WIDTH)
    for size in (4, 16):
        graphs.capture(size, lambda size=size: buffer.hold({"y": x[:size] * 2, "n": size}))
    for size in (4, 16, 4):
        x.normal_()
        outputs = graphs[size].replay()
        assert torch.equal(outputs["y"], x[:size] * 2) and outputs["n"] == size


def test_an_eager_call_leaves_its_outputs_in_the_buffer_too():
    buffer = OutputBuffer()
    first = buffer.hold(torch.ones(4, WIDTH))
    second = buffer.hold(torch.full((2, WIDTH), 2.0))
    assert at_first(first) == at_first(second)
    assert torch.equal(first[:2], second)
