"""Tensors that an eager part leaves outside of its results: refused when a graph reads them."""

from __future__ import annotations

import copy
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import (
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    GraphRunner,
    HostArg,
    InputSpec,
    Reason,
    UpdatableTask,
    eager_break,
    forward_context,
)
from graphrt.core.base.thread_mode import unseen
from graphrt.core.base.torch_names import dispatch_modes
from graphrt.core.batch.context import CaptureTransaction, ForwardContext, current_context
from graphrt.core.capture.guard import SideDoors, hand_back, in_eager_part, withhold
from graphrt.core.capture.recorder import can_change
from graphrt.core.replay.recording import warming_up
from graphrt.cpu import CPUGraphWrapper
from graphrt.errors import (
    BreakError,
    FrozenMetadataError,
    PythonStateError,
    RefusedOpError,
    SideDoorError,
)

D4 = BatchDescriptor(4)


def capture(forward: Any, *args: Any, **options: Any) -> CPUGraphWrapper:
    wrapper = CPUGraphWrapper(
        forward, "PIECEWISE", pool=GraphPool("cpu"), breakable=True, options=GraphOptions(**options)
    )
    context = ForwardContext(wrapper.runtime_mode, D4, capture=CaptureTransaction())
    with context:
        wrapper(*args)
    return wrapper


_library = torch.library.Library("graphrt_side_doors", "FRAGMENT")
_library.define("copied(Tensor(a) x) -> Tensor(a)")
_library.impl("copied", lambda x: x.clone(), "CompositeExplicitAutograd")
_registry: dict[str, torch.Tensor] = {}
_library.define("fetched(str name) -> Tensor")
_library.impl("fetched", lambda name: _registry[name], "CompositeExplicitAutograd")

MADE = {
    "operator that says it makes a view": lambda x: torch.ops.graphrt_side_doors.copied(x),
    "operator": lambda x: x * 2,
    "python data": lambda x: torch.tensor([1.0] * 4),
    "legacy constructor": lambda x: torch.Tensor([1.0] * 4),
    "numpy": lambda x: torch.from_numpy(np.ones(4, dtype=np.float32)),
    "as_tensor": lambda x: torch.as_tensor([1.0] * 4),
    "factory": lambda x: torch.ones(4),
    "into fresh memory": lambda x: torch.mul(x, 2, out=torch.empty(0)),
    "clone": lambda x: x.clone(),
    "several": lambda x: x.sort()[0],
    "a parameter": lambda x: torch.nn.Parameter(x * 2),
    "a view": lambda x: (x * 2).view(2, 2).t(),
    "data": lambda x: (x * 2).data,
    "cast": lambda x: x.double().float(),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("inference", [False, True])
def test_a_graph_that_reads_a_tensor_left_by_an_eager_part_is_refused(kind: str, inference: bool):
    layer = SimpleNamespace()

    @eager_break
    def part(x: torch.Tensor) -> None:
        layer.kept = MADE[kind](x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return layer.kept + 1

    with torch.inference_mode(inference), pytest.raises(SideDoorError, match=r"layer\.kept \+ 1"):
        capture(forward, torch.ones(4))


def test_a_graph_that_reads_a_tensor_whose_data_an_eager_part_replaced_is_refused():
    kept = torch.zeros(4)

    @eager_break
    def part(x: torch.Tensor) -> None:
        kept.data = x * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return kept + 1

    with pytest.raises(SideDoorError):
        capture(forward, torch.ones(4))


def test_a_graph_may_read_a_weight_that_an_eager_part_aliased_or_copied():
    weight = torch.ones(4)
    layer = SimpleNamespace()

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        layer.alias = torch.empty(0).set_(weight.untyped_storage(), 0, (4,), (1,))
        layer.copied = copy.deepcopy(weight)
        return x * layer.alias

    ones = torch.ones(4)
    wrapper = capture(lambda x: part(x + 1) + weight + layer.alias, ones)
    with forward_context("PIECEWISE", D4):
        assert wrapper(ones).tolist() == [4.0] * 4


def test_an_operator_break_given_a_tensor_left_by_an_eager_part_is_refused():
    kept: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> None:
        kept[:] = [x * 2]

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return torch.sigmoid(x) + kept[0]

    with pytest.raises(SideDoorError, match="part"):
        capture(forward, torch.ones(4), breaks=("aten::sigmoid",))
    with pytest.raises(SideDoorError, match="eager break aten::sigmoid is given"):
        capture(
            lambda x: part(x + 1) or torch.sigmoid(kept[0]),
            torch.ones(4),
            breaks=("aten::sigmoid",),
        )


def test_an_eager_part_inside_another_eager_part_makes_no_extra_segment():
    kept: list[torch.Tensor] = []

    @eager_break
    def inner(x: torch.Tensor) -> torch.Tensor:
        kept[:] = [x * 2]
        return kept[0] + 1

    @eager_break
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    wrapper = capture(lambda x: outer(x + 1) + 1, torch.ones(4))
    assert len(wrapper.entries[D4].parts) == 3
    with pytest.raises(SideDoorError, match="outer"):
        capture(lambda x: outer(x + 1) + kept[0], torch.ones(4))


def test_an_error_in_an_eager_part_leaves_no_dispatch_mode_active():
    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    with pytest.raises(Exception, match="boom"):
        capture(lambda x: part(x + 1) + 1, torch.ones(4))
    assert not dispatch_modes()


def test_a_weight_at_a_reused_address_is_no_tensor_of_an_eager_part():
    """Addresses come back as soon as a tensor is gone; storages are told apart all the same."""
    weights = [torch.ones(1024) for _ in range(64)]

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = part(x)
            weights[:8] = [torch.ones(1024) for _ in range(8)]
            x = x + weights[0] + weights[-1]
        return x

    x = torch.ones(1024)
    wrapper = capture(forward, x)
    with forward_context("PIECEWISE", D4):
        assert torch.equal(wrapper(x), torch.full_like(x, 3 * 2**16 - 2))


def test_a_tensor_made_by_an_eager_part_of_another_runner_counts_as_a_weight():
    shared = SimpleNamespace(kept=None)

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        shared.kept = x * 2
        return x + 1

    def runner(forward: Any) -> GraphRunner:
        inputs = {"x": InputSpec(torch.float32, ("tokens",))}
        return GraphRunner(
            forward, inputs=inputs, outputs=("tokens",), mode="PIECEWISE", sizes=[4], platform="cpu"
        )

    runner(lambda x: part(x) + 1)(x=torch.ones(4))
    weight = shared.kept
    reading = runner(lambda x: x + weight)
    reading.capture()
    assert torch.equal(reading(x=torch.ones(4)), torch.full((4,), 3.0))
    assert reading.last_dispatch.reason is Reason.HIT


def test_a_tensor_left_by_an_earlier_size_is_refused_without_warm_ups():
    kept = [torch.zeros(1)]

    @eager_break
    def part(x: torch.Tensor) -> None:
        kept[0] = x.new_ones(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        result = x + kept[0]
        part(x)
        return result

    with pytest.raises(SideDoorError, match="made again at every step"):
        sized_runner(forward, "PIECEWISE", warmups=0).capture()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("PIECEWISE", {(False, True)}),
        ("FULL_AND_PIECEWISE", {(False, True), (True, False)}),
        ("FULL_DECODE_ONLY", {(True, False)}),
        ("FULL", {(False, False)}),
    ],
)
def test_eager_parts_are_watched_only_in_warm_ups_before_a_piecewise_capture(
    mode, expected, at_once, tmp_path
):
    # To watch them takes as long as they do, and whole graphs capture them like anything else.
    # In a file: what eager parts put into lists and buffers is put back after a warm-up.
    seen = tmp_path / "seen"
    seen.touch()

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        context = current_context()
        if context is not None and warming_up.get():
            assert context.descriptor is not None
            with seen.open("a") as file:
                print(context.descriptor.uniform, in_eager_part.get() is not None, file=file)
        return x + 1

    runner = sized_runner(lambda x: part(x * 2) + 1, mode)
    if at_once:
        runner.capture()
    while not at_once and runner.capture_next().left:
        pass
    lines = {tuple(line.split()) for line in seen.read_text().splitlines()}
    assert lines == {(str(uniform), str(watched)) for uniform, watched in expected}


def test_a_tensor_that_an_eager_part_leaves_only_at_a_smaller_size_is_refused():
    kept = [torch.zeros(1)]

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4:
            kept[0] = x.new_ones(1)
        return x + 1

    runner = sized_runner(lambda x: part(x + kept[0]), "PIECEWISE")
    # Its warm-up finds it before its capture does, as memory that the first call made.
    with pytest.raises(PythonStateError, match=r"kept\[0\]"):
        runner.capture()
    assert [record.descriptor.num_tokens for record in runner.report().graphs] == [4]

    # As advised: written in place.
    @eager_break
    def in_place(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4:
            kept[0].copy_(x.new_ones(1))
        return x + 1

    kept[0] = torch.zeros(1)
    runner = sized_runner(lambda x: in_place(x + kept[0]), "PIECEWISE")
    runner.capture()
    x = torch.zeros(2)
    assert [runner(x=x)[0].item() for _ in range(3)] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_tensor_that_a_smaller_size_leaves_in_a_queue_is_refused(at_once):
    kept: queue.Queue[torch.Tensor] = queue.Queue()

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4:
            while kept.qsize():
                kept.get()
            kept.put(x.new_ones(1))
        return x + 1

    runner = sized_runner(lambda x: part(x + kept.queue[0] if kept.qsize() else x), "PIECEWISE")
    if not at_once:
        assert runner.capture_next().left == 1
    with pytest.raises(SideDoorError, match="made again at every step"):
        (runner.capture if at_once else runner.capture_next)()
    assert [record.descriptor.num_tokens for record in runner.report().graphs] == [4]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_weight_that_an_operator_looks_up_by_name_may_be_read(at_once):
    weight = torch.ones(1)

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ops.graphrt_side_doors.fetched("weight")

    runner = sized_runner(lambda x: part(x + 1) * weight, "PIECEWISE")
    _registry["weight"] = weight
    try:
        if at_once:
            runner.capture()
        while not at_once and runner.capture_next().left:
            pass
        assert runner(x=torch.ones(2)).tolist() == [3.0, 3.0]
        assert runner.last_dispatch.slot >= 0
    finally:
        _registry.clear()


def sized_runner(forward: Any, mode: str, **options: Any) -> GraphRunner:
    return GraphRunner(
        forward,
        inputs={"x": InputSpec(torch.float32, ("tokens",))},
        outputs=("tokens",),
        mode=mode,
        sizes=[2, 4],
        options=GraphOptions(**options),
        platform="cpu",
    )


def test_tensors_of_eager_parts_that_were_freed_are_forgotten():
    doors = SideDoors()
    kept = doors.watched(lambda: torch.ones(4), (), {})
    assert doors.made
    del kept
    doors.settle()
    assert not doors.made


def opaque(graph: Any, inputs: Any) -> Any:
    """A backend whose code is no operators, as Inductor's is not."""

    def run(*args: Any) -> Any:
        return unseen(lambda: graph.forward(*args))

    return run


class HostContext(ForwardContext):
    """A host's own, with an attribute of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = 1


@pytest.mark.parametrize("kind", [ForwardContext, HostContext])
def test_a_forward_context_keeps_its_class_and_attributes_after_a_capture(
    kind: type[ForwardContext],
):
    def forward(x: torch.Tensor) -> torch.Tensor:
        context = current_context()
        assert isinstance(context, kind)
        assert context.query_len is None and context.mode.name == "PIECEWISE"
        context.metadata = "set by the forward"
        context.query_len = 3
        return x + 1

    wrapper = CPUGraphWrapper(forward, "PIECEWISE", pool=GraphPool("cpu"))
    context = kind(wrapper.runtime_mode, D4, capture=CaptureTransaction(), metadata="before")
    with context:
        wrapper(torch.ones(4))
    assert type(context) is kind
    assert (context.metadata, context.query_len) == ("set by the forward", 3)
    withhold(context)
    withhold(context)
    with pytest.raises(FrozenMetadataError):
        _ = context.metadata
    hand_back(context)
    hand_back(context)
    assert type(context) is kind


def test_a_failed_capture_makes_the_contexts_metadata_readable_again():
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    wrapper = CPUGraphWrapper(forward, "FULL", pool=GraphPool("cpu"))
    context = ForwardContext(wrapper.runtime_mode, D4, capture=CaptureTransaction(), metadata=7)
    with context, pytest.raises(Exception, match="boom"):
        wrapper(torch.ones(4))
    assert context.metadata == 7


def test_overlapping_results_of_an_eager_part_may_be_read_but_not_written():
    @eager_break
    def part(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = x * 2
        return both, both[2:]

    def forward(x: torch.Tensor) -> torch.Tensor:
        whole, half = part(x + 1)
        return whole + half.sum()

    x = torch.ones(4)
    wrapper = capture(forward, x)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        with forward_context("PIECEWISE", D4):
            served = wrapper(x)
        assert torch.equal(served, forward(x))

    def writes(x: torch.Tensor) -> torch.Tensor:
        whole, half = part(x + 1)
        whole += 1
        return half * 1

    with pytest.raises(BreakError, match="returned twice"):
        capture(writes, torch.ones(4))


@pytest.mark.parametrize("kind", [list, dict])
def test_each_replay_gives_an_eager_part_its_container_as_captured(kind: Any):
    """Else the second step would find in it what the first one put there."""
    sizes: list[int] = []

    @eager_break
    def part(x: torch.Tensor, box: Any) -> torch.Tensor:
        sizes.append(len(box))
        if kind is list:
            box.append(x * 10)
            return box[0]
        return box.setdefault("y", x * 10)

    x = torch.ones(4)
    wrapper = capture(lambda x: part(x + 1, kind()) + 1, x)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        with forward_context("PIECEWISE", D4):
            assert wrapper(x).tolist() == [(value + 1) * 10 + 1] * 4
    assert sizes == [0] * 4


@pytest.mark.parametrize(
    "first", [True, False], ids=["changed at the capture", "changed at replays"]
)
@pytest.mark.parametrize("by_name", [True, False])
def test_each_replay_gives_an_eager_part_its_list_of_numbers_as_captured(by_name, first):
    changes = [first]

    @eager_break
    def part(x: torch.Tensor, box: list[int]) -> torch.Tensor:
        if changes[0]:
            box.append(1)
        return x * max(len(box), 1)

    x = torch.ones(4)
    keywords = {"box": []} if by_name else {}
    wrapper = capture(lambda x: part(x + 1, *([] if keywords else [[]]), **keywords) + 1, x)
    changes[0] = True
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        with forward_context("PIECEWISE", D4):
            assert wrapper(x).tolist() == [value + 2] * 4


@pytest.mark.parametrize(
    ("given", "copied"),
    [
        ((torch.ones(1), 3, "layer", None, torch.float32), False),
        ((torch.nn.Linear(1, 1), SimpleNamespace(), torch.Size([1])), False),
        (((torch.ones(1), (2, torch.ones(1))),), False),
        (([torch.ones(1)],), True),
        (({},), True),
        (((1, [2]),), True),
        ((GraphOptions(),), True),
    ],
    ids=["leaves", "objects", "tuples", "a list", "a dict", "a list in a tuple", "a dataclass"],
)
def test_only_arguments_that_hold_mutable_containers_are_copied_at_each_replay(given, copied):
    assert can_change(given, {}) is copied
    assert can_change((), dict(zip("abcdefg", given, strict=False))) is copied


def test_a_task_given_a_tensor_that_an_eager_part_left_is_refused():
    kept: list[torch.Tensor] = []
    no_operator = UpdatableTask("attention", lambda *tensors, **_: None, {"length": HostArg(None)})

    @eager_break
    def part(x: torch.Tensor) -> None:
        kept[:] = [x * 2]

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        no_operator(kept[0])
        return x + 1

    wrapper = CPUGraphWrapper(forward, "PIECEWISE", pool=GraphPool("cpu"), breakable=True)
    context = ForwardContext(wrapper.runtime_mode, D4, capture=CaptureTransaction())
    context.updates = {"attention": {"length": 1}}
    with context, pytest.raises(SideDoorError, match="task 'attention' is given"):
        wrapper(torch.ones(4))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_can_be_an_eager_part():
    compiled = torch.compile(lambda x: x * 2 + 1, backend=opaque)
    part = eager_break(compiled)
    x = torch.ones(4)
    wrapper = capture(lambda x: part(x + 1) + 1, x)
    with forward_context("PIECEWISE", D4):
        assert wrapper(x).tolist() == [6.0] * 4


class Layers:
    """Hands each layer's query to its attention through an attribute, as engines do."""

    def __init__(self) -> None:
        @eager_break
        def attend() -> torch.Tensor:
            return self.query.cumsum(0)

        self.attend = attend

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for factor in (1.0, 2.0):
            self.query = x * factor + factor
            x = self.attend() + x
        return x


@pytest.mark.parametrize("sizes", [[4], [2, 4]])
def test_an_eager_part_that_reads_a_graphs_tensor_through_an_attribute_is_refused(sizes):
    run = GraphRunner(
        Layers(),
        mode="PIECEWISE",
        sizes=sizes,
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        outputs=("tokens", 3),
        platform="cpu",
    )
    with pytest.raises(SideDoorError, match="not given"):
        run.capture()


def test_an_eager_part_whose_operator_finds_a_graphs_tensor_by_name_is_refused():
    """Engines hand an operator the name of a layer."""

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ops.graphrt_side_doors.fetched("query")

    def forward(x: torch.Tensor) -> torch.Tensor:
        _registry["query"] = x * 2
        return part(x + 1) + 1

    try:
        with pytest.raises(SideDoorError, match="not given"):
            capture(forward, torch.ones(4))
    finally:
        _registry.clear()


@pytest.mark.parametrize(
    "edit",
    [
        lambda v, x: v.set_(x),
        lambda v, x: v.unsqueeze_(0).squeeze_(0),
        lambda v, x: setattr(v, "data", x * 3),
        lambda v, x: v.unsqueeze_(0),
    ],
    ids=["set_", "unsqueeze_ then squeeze_", "data", "unsqueeze_"],
)
def test_editing_an_eager_parts_result_in_place_gives_the_eager_values(edit):
    part = eager_break(lambda x: x + 1)

    def forward(x):
        value = part(x)
        edit(value, x)
        return (value + 1).reshape(-1, 3)

    run = GraphRunner(
        forward,
        mode="PIECEWISE",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 3))},
        platform="cpu",
    )
    run.capture()
    for count in (2, 3, 4, 1):
        x = torch.rand(count, 3)
        assert torch.equal(run(x=x), forward(x.clone()))
        assert run.last_dispatch.slot >= 0


@pytest.mark.parametrize("part", [eager_break(lambda x: x), lambda x: x], ids=["part", "argument"])
def test_a_capture_that_reshapes_a_callers_tensor_in_place_is_refused(part):
    x = torch.rand(4)
    with pytest.raises(RefusedOpError, match="no replay repeats"):
        capture(lambda x: part(x).unsqueeze_(0) + 1, x)
    assert x.shape == (4,)
