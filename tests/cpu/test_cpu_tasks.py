from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cpu_capturing import capture, modes_left

from graphrt.core.base.errors import TaskContractError
from graphrt.cpu import Arena, CpuPlatform, TapeGraph


@torch.library.custom_op("graphrt_cpu_test::attend", mutates_args=("out",))
def attend(x: torch.Tensor, lengths: list[int], scale: float, out: torch.Tensor) -> None:
    out.zero_()
    for row, length in enumerate(lengths):
        out[row] = x[row, :length].sum() * scale


class Captured:
    """x -> task -> + 1, with the task's lengths as host arguments."""

    def __init__(self, inference: bool = False) -> None:
        self.x = torch.arange(12.0).view(3, 4)
        self.out = torch.zeros(3)
        self.graph = TapeGraph()
        self.graph, self.result = self._capture(inference)

    def _capture(self, inference):
        graph = TapeGraph()
        with torch.inference_mode(inference), torch.no_grad():
            graph.capture_begin(Arena())
            self.hidden = self.x * 1
            graph.task_begin()
            attend(self.hidden, [1, 1, 1], 1.0, out=self.out)
            self.out.view(3).mul_(2.0)
            self.handle = graph.task_end()
            result = self.out + 1
            graph.capture_end()
        return graph, result

    def issue(self, lengths, factor=2.0, out=None, extra=None):
        def run():
            attend(self.hidden, lengths, 1.0, out=self.out if out is None else out)
            self.out.view(3).mul_(factor)
            if extra is not None:
                extra()

        return run

    def expected(self, lengths, factor=2.0):
        return [self.x[i, :n].sum().item() * factor + 1 for i, n in enumerate(lengths)]


@pytest.mark.parametrize("inference", [False, True])
def test_new_host_arguments_are_used_by_later_replays(inference):
    task = Captured(inference)
    for lengths, factor in (([1, 2, 3], 2.0), ([4, 4, 4], 0.5), ([0, 1, 2], 3.0)):
        task.x.add_(1)
        before = task.out.clone()
        task.graph.update_task(task.handle, task.issue(lengths, factor))
        assert task.out.equal(before)
        task.graph.replay()
        assert task.result.tolist() == task.expected(lengths, factor)
    task.graph.replay()
    assert task.result.tolist() == task.expected([0, 1, 2], 3.0)


def test_a_list_changed_after_the_update_does_not_reach_the_graph():
    task, lengths = Captured(), [1, 2, 3]
    task.graph.update_task(task.handle, task.issue(lengths))
    lengths[:] = [4, 4, 4]
    task.graph.replay()
    assert task.result.tolist() == task.expected([1, 2, 3])


def violations(task):
    other = torch.zeros(3)
    return {
        "another tensor": task.issue([1, 1, 1], out=other),
        "one operator more": task.issue([1, 1, 1], extra=lambda: task.out.add_(1)),
        "fewer": lambda: attend(task.hidden, [1, 1, 1], 1.0, out=task.out),
        "other operator": lambda: task.out.zero_(),
        "allocation": lambda: torch.empty(3),
        "new output": lambda: task.hidden + 1,
        "host read": lambda: task.out.sum(),
        "other shape": lambda: attend(task.hidden[:2], [1, 1], 1.0, out=task.out),
        "other order": lambda: (task.out.mul_(2.0), attend(task.hidden, [1], 1.0, out=task.out)),
    }


@pytest.mark.parametrize("name", list(violations(Captured())))
def test_a_refused_task_update_names_got_and_expected_and_changes_nothing(name):
    task = Captured()
    task.graph.update_task(task.handle, task.issue([1, 2, 3]))
    with pytest.raises(TaskContractError) as caught:
        task.graph.update_task(task.handle, violations(task)[name])
    assert caught.value.got
    assert caught.value.expected
    assert modes_left() == 0
    task.graph.replay()
    assert task.result.tolist() == task.expected([1, 2, 3])


def captured_task(issue, inference):
    """A task of operators on `hidden`, its two halves and `out`, and how to issue others."""
    graph, x, out = TapeGraph(), torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
    with torch.inference_mode(inference), torch.no_grad():
        graph.capture_begin(Arena())
        hidden = x * 1
        tensors = hidden, hidden[:, :2], hidden[:, 2:], out
        graph.task_begin()
        issue(*tensors)
        handle = graph.task_end()
        graph.capture_end()
    return graph, out, lambda other: graph.update_task(handle, lambda: other(*tensors))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (
            lambda h, a, b, out: out.copy_(h).clamp_(2),
            lambda h, a, b, out: out.copy_(h).clamp_(2, 5),
        ),
        (
            lambda h, a, b, out: out.copy_(h).clamp_(2, 5),
            lambda h, a, b, out: out.copy_(h).clamp_(2),
        ),
        (
            lambda h, a, b, out: out.fill_(1).flatten().add_(1),
            lambda h, a, b, out: out.fill_(1).flatten().add_(3),
        ),
        (
            lambda h, a, b, out: torch.cat([a, b], 1, out=out),
            lambda h, a, b, out: torch.cat([a, b], dim=-1, out=out),
        ),
    ],
    ids=["a default given", "a default left", "composite", "tensors in a list"],
)
def test_a_task_update_replaces_default_arguments_and_keeps_tensor_lists(first, then, inference):
    graph, out, update = captured_task(first, inference)
    update(then)
    x, expected = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
    then(x, x[:, :2], x[:, 2:], expected)
    graph.replay()
    assert out.equal(expected)


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        (
            lambda h, a, b, out: torch.cat([a, b], 1, out=out),
            lambda h, a, b, out: torch.cat([b, a], 1, out=out),
            "'tensors' is another tensor than",
        ),
        (
            lambda h, a, b, out: torch.cat([a, b], 1, out=out),
            lambda h, a, b, out: torch.cat([h], 1, out=out),
            "'tensors' is another list of tensors",
        ),
        (
            lambda h, a, b, out: torch.clamp(h, h, out=out),
            lambda h, a, b, out: torch.clamp(h, max=h, out=out),
            "'min' changed between tensor and host value",
        ),
    ],
)
def test_a_task_update_with_different_tensors_is_refused_naming_the_argument(first, then, told):
    graph, out, update = captured_task(first, False)
    graph.replay()
    before = out.clone()
    with pytest.raises(TaskContractError, match=told) as caught:
        update(then)
    assert "stride (4, 1) at 0x" in caught.value.got + caught.value.expected
    assert "tensor(" not in caught.value.got + caught.value.expected, "no values of the pool"
    graph.replay()
    assert out.equal(before)


def test_an_error_inside_issue_of_a_task_changes_nothing():
    task = Captured()

    def fails():
        task.issue([4, 4, 4])()
        raise KeyError("lengths")

    with pytest.raises(KeyError):
        task.graph.update_task(task.handle, fails)
    task.graph.replay()
    assert task.result.tolist() == task.expected([1, 1, 1])


def test_an_allocation_inside_a_task_is_refused_at_capture():
    x = torch.ones(3)

    def forward(graph):
        graph.task_begin()
        return x + 1

    graph = TapeGraph()
    with torch.no_grad():
        graph.capture_begin(Arena())
        with pytest.raises(TaskContractError, match="may not allocate"):
            forward(graph)
        graph.capture_abort()


def test_a_capture_that_ends_inside_a_task_is_refused():
    graph = TapeGraph()
    graph.capture_begin(Arena())
    graph.task_begin()
    with pytest.raises(TaskContractError, match="inside a task"):
        graph.capture_end()
    graph.capture_abort()


def test_a_handle_of_another_graph_is_refused():
    task = Captured()
    other, _ = capture(lambda: torch.ones(3) + 1)
    with pytest.raises(TaskContractError, match="another graph"):
        other.update_task(task.handle, task.issue([1, 1, 1]))


def test_the_platform_applies_a_task_update_only_if_changed():
    task, platform = Captured(), CpuPlatform()
    update = [SimpleNamespace(handle=task.handle, issue=task.issue([2, 2, 2]))]
    platform.replay_updated(task.graph, update, changed=True)
    assert task.result.tolist() == task.expected([2, 2, 2])
    ignored = [SimpleNamespace(handle=task.handle, issue=task.issue([3, 3, 3]))]
    platform.replay_updated(task.graph, ignored, changed=False)
    assert task.result.tolist() == task.expected([2, 2, 2])
