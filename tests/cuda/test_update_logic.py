"""What an update of a task gives to the nodes of its graph, and what it refuses, on any machine."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nodes import CHILD, EMPTY, HOST, MEMCPY, MEMSET, FakeNodes, Node, kernel, words

from graphrt.core.base.errors import TaskContractError
from graphrt.core.device.contract import UpdateFigures
from graphrt.cuda.driver import api
from graphrt.cuda.platform import CudaPlatform
from graphrt.cuda.update import tasks
from graphrt.cuda.update.addresses import Homes

ADDRESS = 0x7F10_0000_0000
EXECUTABLE = 7


def attention(row: int) -> list[Node]:
    """Two kernels: one with a struct of addresses and scalars, one whose grid changes."""
    return [
        kernel(struct.pack("<i", row), words(ADDRESS, ADDRESS + 512 * row), b"\x01"),
        kernel(words(ADDRESS), function=1002, grid=row + 1),
    ]


def copies(row: int) -> list[Node]:
    """A fill, a copy, and a node that only orders others."""
    return [
        Node(MEMSET, [words(ADDRESS, row)]),
        Node(MEMCPY, [words(ADDRESS + 512 * row, 64).ljust(256, b"\0")]),
        Node(EMPTY),
    ]


class Task:
    """A task of a captured graph, issued as `issue(row)`, by which it is updated."""

    def __init__(self, driver: FakeNodes, issue: Callable[[int], Sequence[Node]]) -> None:
        self.name, self.issue_at, self.row = f"layer.{len(driver.graphs)}", issue, 0
        graph = 1 + len(driver.graphs)
        driver.graphs[graph] = list(issue(0))
        nodes = [10 * graph + place for place in range(len(driver.graphs[graph]))]
        self.handle = tasks.TaskHandle(nodes, None, UpdateFigures())

    def issue(self) -> Sequence[Node]:
        return self.issue_at(self.row)

    def tensors(self) -> list[torch.Tensor]:
        return []


class Updates:
    """Tasks of one graph on a fake driver; `memory` are the blocks of its allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *issues: Callable[[int], Any]) -> None:
        self.driver = FakeNodes({})
        self.allocations = 0
        self.memory = [(ADDRESS, ADDRESS + 512 * 100), (ADDRESS + 512 * 100, ADDRESS + 512 * 200)]
        monkeypatch.setattr(api, "_library", lambda: self.driver)
        monkeypatch.setattr(tasks, "_allocations", lambda: self.allocations)
        monkeypatch.setattr(tasks, "_record", self._record)
        monkeypatch.setattr(tasks, "block_of", self._block_of)
        self.tasks = [Task(self.driver, issue) for issue in issues]

    def _record(self, update: Task, stream: Any) -> int:
        self.driver.graphs[99] = list(update.issue())
        return 99

    def _block_of(self, address: int) -> tuple[int, int] | None:
        return next((each for each in self.memory if each[0] <= address < each[1]), None)

    def step(self, row: int) -> None:
        for task in self.tasks:
            task.row = row
        tasks.update_tasks(EXECUTABLE, self.tasks)

    def right(self) -> bool:
        """Whether each node has the parameters that its task issues at its row."""
        expected = {
            node: issued.arguments[0].ljust(256, b"\0")
            if issued.kind in (MEMCPY, MEMSET)
            else (issued.function % 1000, issued.grid, *issued.arguments)
            for task in self.tasks
            for node, issued in zip(task.handle.nodes, task.issue_at(task.row), strict=True)
            if issued.kind != EMPTY
        }
        return self.driver.executable == expected


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Updates]:
    return lambda *issues: Updates(monkeypatch, *issues)


def test_every_node_gets_the_parameters_of_its_task_issued_again(updates):
    made = updates(attention, copies, attention)
    for row in (3, 1, 1, 0, 99):
        made.step(row)
        assert made.right()
    figures = made.tasks[0].handle.counts
    assert (figures.reissues, figures.patches, figures.failed) == (5, 10, 0)


def changed(at: int, node: Node | None) -> Callable[[int], list[Node]]:
    """`attention`, at row 5 with another node at a place; None: without it."""

    def issue(row: int) -> list[Node]:
        nodes = attention(row)
        if row == 5:
            nodes[at : at + 1] = [] if node is None else [node]
        return nodes

    return issue


def one_more(row: int) -> list[Node]:
    return attention(row) + [kernel(words(ADDRESS))] * (row == 5)


FAR = ADDRESS + 512 * 150
REFUSED = {
    "another kernel": (changed(1, kernel(words(ADDRESS), function=3)), "another kernel"),
    "fewer": (changed(1, None), "1 nodes where it captured 2"),
    "more": (one_more, "3 nodes where it captured 2"),
    "another kind": (changed(1, Node(MEMSET, [words(ADDRESS)])), "a node of kind 2 where"),
    "another tensor": (changed(1, kernel(words(FAR), function=1002)), f"captured with.*{FAR:#x}"),
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_a_task_that_no_longer_fits_its_graph_is_refused_by_name_and_the_next_step_is_right(
    updates, refusal
):
    issue, text = REFUSED[refusal]
    made = updates(attention, issue)
    made.step(2)
    with pytest.raises(TaskContractError, match=f"(?s)layer.1.*{text}.*pass lengths as tensors"):
        made.step(5)
    # The task before it has its new parameters already: the next update sets all nodes.
    made.step(2)
    assert made.right()
    assert made.tasks[1].handle.counts.failed == 1


@pytest.mark.parametrize("kind", [HOST, CHILD, 13])
def test_a_task_with_a_node_that_the_driver_cannot_set_is_refused(updates, kind):
    made = updates(lambda row: [*attention(row), Node(kind)])
    with pytest.raises(TaskContractError, match=f"a node of kind {kind}, which cannot be updated"):
        made.step(1)
    assert made.driver.executable == {}


def test_a_task_that_allocates_is_refused(updates):
    made = updates(attention)

    def allocates(row: int) -> list[Node]:
        made.allocations += row == 5
        return attention(row)

    made.tasks[0].issue_at = allocates
    with pytest.raises(TaskContractError, match="memory that the task allocates"):
        made.step(5)
    made.step(1)
    assert made.right()


def test_a_kernel_that_is_launched_in_another_cluster_is_refused(updates):
    made = updates(attention)
    made.step(1)
    made.driver.clusters.add(1)
    with pytest.raises(TaskContractError, match="another cluster"):
        made.step(2)


@pytest.mark.parametrize("issue", [attention, copies])
@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (1, TaskContractError, "the driver does not set"),
        (910, TaskContractError, "the driver does not set"),
        (2, api.DriverError, "CUresult 2"),  # no memory, which says nothing of the task
    ],
)
def test_parameters_that_the_driver_does_not_take_are_refused(updates, issue, status, error, text):
    made = updates(issue)
    made.driver.refuses = status
    with pytest.raises(error, match=text):
        made.step(1)
    made.driver.refuses = 0
    made.step(1)
    assert made.right()


def test_a_task_that_raises_leaves_its_nodes_and_the_next_step_is_right(updates):
    made = updates(attention, attention)
    made.step(1)
    before = dict(made.driver.executable)

    def fails(row: int) -> list[Node]:
        raise RuntimeError("in the task")

    made.tasks[0].issue_at = fails
    with pytest.raises(RuntimeError, match="in the task"):
        made.step(2)
    assert made.driver.executable == before
    made.tasks[0].issue_at = attention
    made.step(2)
    assert made.right()


def test_kernels_whose_arguments_cannot_be_read_are_updated(updates):
    made = updates(attention)
    made.driver.cuFuncGetParamInfo = None
    made.step(4)
    assert made.right()


def test_templates_of_updates_are_destroyed(updates):
    made = updates(attention, REFUSED["more"][0])
    with pytest.raises(TaskContractError):
        made.step(5)
    assert sorted(made.driver.graphs) == [1, 2]


def test_update_figures_are_absent_before_the_first_task():
    memory: Any = SimpleNamespace(updates=UpdateFigures())
    assert CudaPlatform().update_figures(memory) is None
    memory.updates.tasks = 1
    figures = CudaPlatform().update_figures(memory)
    memory.updates.patches = 5
    assert figures == UpdateFigures(tasks=1)


@pytest.mark.parametrize(
    ("old", "new", "strange"),
    [
        (ADDRESS, ADDRESS + 32, False),  # within its block
        (ADDRESS, ADDRESS + 64, True),  # in the next block
        (ADDRESS, ADDRESS + 512, False),  # in a captured tensor
        (ADDRESS + 512, ADDRESS + 640, True),  # out of a captured tensor, within its block
        (ADDRESS, 0, False),  # nothing
        (ADDRESS, ADDRESS + 4096, False),  # no memory
        (0, ADDRESS, False),
        (5, 6, False),
        (1 << 40, ADDRESS, False),  # was no address
    ],
)
def test_an_address_may_move_only_within_its_block_or_captured_tensors(old, new, strange):
    blocks = [
        (ADDRESS, ADDRESS + 64),
        (ADDRESS + 64, ADDRESS + 128),
        (ADDRESS + 512, ADDRESS + 1024),
    ]
    homes = Homes(
        [(ADDRESS + 512, ADDRESS + 640)],
        lambda address: next((b for b in blocks if b[0] <= address < b[1]), None),
    )
    assert homes.stranger([1, 2, old], [1, 2, new]) == (new if strange else None)
