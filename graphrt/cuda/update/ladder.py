"""Gives an executable new parameters: node by node, else all at once, else as a new executable."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from graphrt.core.base.errors import IN_PIECES, TaskError
from graphrt.core.device.contract import UpdateFigures
from graphrt.cuda.update.images import EMPTY, KERNEL, SKIPPED, Image
from graphrt.cuda.update.node_parameters import Setting, WholeSetting


@dataclass(slots=True)
class UpdateCounts:
    """Counts the updates of one memory's tasks: `UpdateFigures` says what each count is."""

    patches: int = 0
    shared_patches: int = 0
    reissues: int = 0
    memo_hits: int = 0
    self_checks: int = 0
    self_check_failures: int = 0
    whole_updates: int = 0
    rebuilds: int = 0
    failed: int = 0
    tasks: int = 0

    def figures(self) -> UpdateFigures | None:
        """The counts as they are now; None if no task was captured."""
        if not self.tasks:
            return None
        return UpdateFigures(**{each.name: getattr(self, each.name) for each in _FIGURES})


_FIGURES = fields(UpdateFigures)


class Calls(Protocol):
    """The driver's calls that a ladder needs: see `NodeCalls`."""

    set_kernel: Any

    def set_memory(self, kind: int, executable: Any, node: Any, parameters: Any) -> int: ...

    def set_enabled(self, executable: Any, node: Any, enabled: bool) -> int: ...

    def set_template(self, kind: int, node: Any, parameters: Any) -> int: ...

    def update_whole(self, executable: int, template: int) -> bool: ...

    def can_instantiate(self, template: int) -> bool: ...


class TaskNode:
    """A node of a captured task: its parameters at the capture (`base`) and now (`applied`).

    `base` is None if the driver does not tell; `Ladder.give_directly` sets such a node.
    """

    __slots__ = ("_whole", "applied", "base", "in_template", "kind", "off", "pointer", "setting")

    def __init__(self, node: int, kind: int) -> None:
        self.pointer = ctypes.c_void_p(node)
        self.kind = kind
        # Whether it is switched off in the executable; a template has no such state.
        self.off = False
        self._whole: WholeSetting | None = None
        self.captured_as(None)

    def captured_as(self, base: Image | None) -> None:
        """Note the parameters that executable and template have from the capture."""
        self.base = self.applied = base
        # The buffer that `applied` was loaded into; None while that is `base`.
        self.setting: Setting | None = None
        # The template's parameters. They follow `applied` only once the driver refused a node.
        self.in_template = base

    def whole(self, image: Image) -> WholeSetting:
        """This node's own buffer for images whose arguments have the sizes of `image`'s."""
        if self._whole is None or self._whole.image.sizes != image.sizes:
            assert self.base is not None
            self._whole = WholeSetting(self.base if image.launch is SKIPPED else image)
        return self._whole


class Ladder:
    """Gives one graph's executable new parameters, in the first way that the driver accepts.

    A round sets one node after the other, and `settle` ends it. If the driver refused a node, the
    template gets all parameters, and the executable is updated from the whole template, else
    instantiated from it again. If that fails too the graph is given up: later updates raise.
    """

    def __init__(self, calls: Calls, counts: UpdateCounts) -> None:
        self.nodes: list[TaskNode] = []
        """The nodes of all tasks of the graph."""
        self.given_up = False
        self.calls = calls
        self._counts = counts
        # The executable that the present round sets.
        self._executable = ctypes.c_void_p()
        # Whether the driver refused a node in this round: `settle` sets the rest by the template.
        self._refused = False
        # Nodes that were ever switched off or on: an update of the whole graph may turn all on.
        self._switched: set[TaskNode] = set()

    def begin(self, executable: int) -> None:
        """Begin a round; raises `TaskError` if the graph was given up."""
        if self.given_up:
            raise _no_way_left()
        self._executable = ctypes.c_void_p(executable)
        self._refused = False

    def give(self, node: TaskNode, setting: Setting, image: Image) -> None:
        """Give `node` the parameters `image`, by way of the buffer `setting`."""
        node.applied = image
        if node.off or image.launch is SKIPPED:
            self._switch(node, off=image.launch is SKIPPED)
            if node.off:
                return
        node.setting = setting
        if node.kind == KERNEL:
            setting.load(image)
            if self._refused:
                return
            status = self.calls.set_kernel(self._executable, node.pointer, setting.reference)
        elif node.kind == EMPTY or self._refused:
            return
        else:
            setting.load(image)
            status = self.calls.set_memory(
                node.kind, self._executable, node.pointer, setting.reference
            )
        if status:
            self._refused = True
        else:
            self._counts.patches += 1

    def give_all(
        self, nodes: Sequence[tuple[TaskNode, Setting]], numbers: Sequence[int], image: Image
    ) -> int:
        """Give `image` to those of the nodes, all of one kind, that have these numbers; returns how
        many did not have it yet."""
        set_kernel, executable = self.calls.set_kernel, self._executable
        # Refused rounds, copies, fills and switched nodes take more than one call: `give` makes it.
        slow = self._refused or image.kind != KERNEL or image.launch is SKIPPED
        patched = done = 0
        # A step spends most of its time here.
        for number in numbers:
            node, setting = nodes[number]
            if node.applied is image:
                continue
            patched += 1
            if slow or node.off:
                self.give(node, setting, image)
                continue
            setting.load(image)
            node.setting, node.applied = setting, image
            if set_kernel(executable, node.pointer, setting.reference):
                slow = self._refused = True
            else:
                done += 1
        self._counts.patches += done
        return patched

    def give_directly(self, node: TaskNode, reference: Any) -> None:
        """Give `node` parameters whose memory is gone after this call. So the template gets them
        at once: `settle` could not read them any more."""
        if self.calls.set_template(node.kind, node.pointer, reference):
            self._give_up()
        if self._refused:
            return
        if node.kind == KERNEL:
            status = self.calls.set_kernel(self._executable, node.pointer, reference)
        else:
            status = self.calls.set_memory(node.kind, self._executable, node.pointer, reference)
        if status:
            self._refused = True
        else:
            self._counts.patches += 1

    def settle(self, graph: Any) -> None:
        """End the round of `graph`, down the ladder if a node was refused; raises
        `TaskError` if no way was left."""
        if not self._refused:
            return
        template = graph.raw_cuda_graph()
        if not self._bring_up_template():
            self._give_up()
        if self.calls.update_whole(graph.raw_cuda_graph_exec(), template):
            self._counts.whole_updates += 1
            self._switch_again(graph)
            return
        # torch destroys the executable before it makes another, and would have none if that failed.
        if not self.calls.can_instantiate(template):
            self._give_up()
        self.given_up = True
        graph.instantiate()
        self.given_up = False
        self._counts.rebuilds += 1
        self._switch_again(graph)

    def forget(self) -> None:
        """Make the next round set every node, as this one was left half-way."""
        for node in self.nodes:
            node.applied = None

    def _bring_up_template(self) -> bool:
        for node in self.nodes:
            setting, image = node.setting, node.applied
            # Unchanged since the capture or set by `give_directly`; without parameters; or off.
            if setting is None or image is None or node.kind == EMPTY or node.off:
                continue
            if node.in_template is image:
                continue
            setting.load(image)
            if self.calls.set_template(node.kind, node.pointer, setting.reference):
                return False
            node.in_template = image
        return True

    def _switch(self, node: TaskNode, *, off: bool) -> None:
        if node.off is off or node.kind == EMPTY:
            return
        node.off = off
        self._switched.add(node)
        # Neither an update of the whole nor a new executable could switch it.
        if self.calls.set_enabled(self._executable, node.pointer, not off):
            self._give_up()
        self._counts.patches += 1

    def _switch_again(self, graph: Any) -> None:
        """Switch nodes as they were: all may be on after an update of the whole, or when new."""
        executable = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        for node in self._switched:
            if self.calls.set_enabled(executable, node.pointer, not node.off):
                self._give_up()

    def _give_up(self) -> None:
        self.given_up = True
        raise _no_way_left()


def _no_way_left() -> TaskError:
    return TaskError(
        "the driver takes the new parameters of a graph's tasks in no way",
        got="a refusal of a node's, of all parameters at once, and of another executable",
        expected="what it took when the graph was captured",
        advice=f"capture it again, or {IN_PIECES}",
    )
