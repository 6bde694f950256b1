"""Outputs that are one tensor, or views of one, come back as they are in eager."""

from __future__ import annotations

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec, eager_break
from graphrt.core.base.sharing import cloned, together
from graphrt.core.replay import handout
from graphrt.errors import OutputError

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


def sharing(outputs):
    """Which are one object, and which lie in one storage."""
    found = tensors(outputs)
    storages = [tensor.untyped_storage().data_ptr() for tensor in found]
    return (
        [[a is b for a in found] for b in found],
        [[a == b for a in storages] for b in storages],
    )


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_so_where_storages_are_handed_out(case, mode, monkeypatch):
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
        assert sharing(out) == sharing(right)
        for ours, theirs in zip(tensors(out), tensors(right), strict=True):
            torch.testing.assert_close(ours, theirs)
        kept = tensors(out)[-1]
        storage = kept.untyped_storage()._cdata
        del right, out, ours
        runner(x=x)
        # Before, some were trials, which hand out copies.
        assert step < len(ROWS) or (storage in marked) == (rows < 5)
        del kept
    runner.close()


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_one_in_eager_is_one_at_every_step(device, case, mode, outputs):
    torch.manual_seed(0)
    eager, model = Forward(device), Forward(device)
    model.weight.copy_(eager.weight)
    runner = runner_of(getattr(model, case), device, mode, outputs)
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, device=device)
        # Of its own memory, as a runner's inputs are.
        right, out = getattr(eager, case)(x.clone()), runner(x=x)
        assert sharing(out) == sharing(right)
        for _ in range(2):
            for ours, theirs in zip(tensors(out), tensors(right), strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=True)
            # What is written into one is in the others.
            tensors(out)[-1].copy_(tensors(out)[-1].clone() + 1)
            tensors(right)[-1].copy_(tensors(right)[-1].clone() + 1)
            if case in ("expanded", "state", "other_dtype"):
                break
        assert runner.last_dispatch.reason.name == ("HIT" if rows < 5 else "TOO_LARGE")
    runner.close()


@pytest.mark.parametrize("device", DEVICES)
def test_one_tensor_at_places_of_other_rows_is_two_views(device):
    def forward(x):
        y = x * 2
        return y, y

    axes = [("tokens", WIDTH), (None, WIDTH)]
    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[4],
        platform=device,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        outputs=axes,
        options=GraphOptions(check="off"),
    )
    runner.capture()
    for _ in range(3):
        live, whole = runner(x=torch.ones(3, WIDTH, device=device))
        live.fill_(7)
        assert len(live) == 3 and len(whole) == 4 and (whole[:3] == 7).all()


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_conjugate_beside_its_own_is_refused_by_name(outputs):
    def forward(x):
        y = torch.complex(x, x)
        return y, y.conj()

    if outputs == "pool":
        with pytest.raises(OutputError, match="its conjugate"):
            runner_of(forward, "cpu", "FULL", outputs)


def test_what_is_handed_out_is_kept_by_nobody():
    runner = runner_of(Forward("cpu").views, "cpu", "FULL", "pool")
    kept, storages = [], set()
    for _ in range(4):
        kept.append(runner(x=torch.randn(4, WIDTH))["all"])
        # The storage's own name: where torch can mark storages, all are over the graph's memory.
        storages.add(kept[-1].untyped_storage()._cdata)
    assert len(storages) == 4


def test_two_rows_of_a_large_cache_are_not_copied_with_all_in_between():
    cache = torch.zeros(10, 1000, 4)
    copies = cloned((cache[:, 0], cache[:, 999]))
    assert all(each.untyped_storage().nbytes() == 10 * 4 * 4 for each in copies)
    groups = together([cache[:, 0:2], cache[:, 1:3], cache[:, 500:501]])
    assert sorted(len(group.places) for group in groups) == [1, 2]


def test_copies_begin_where_every_dtype_can():
    octets = torch.zeros(64, dtype=torch.uint8)
    numbers = octets[24:40].view(torch.float64)
    copied, its = cloned((octets[21:40], numbers))
    its.fill_(1)
    assert copied[3:].view(torch.uint8).sum() and copied[:3].sum() == 0
