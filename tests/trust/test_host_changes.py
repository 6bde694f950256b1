"""What a host changes in Python between two steps, when all graphs were tried: right at the next
step where CPython tells of it, else named within the steps that the report says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from itertools import product, repeat, takewhile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphOptions, GraphRunner, Host, InputSpec, current_context
from graphrt.core.base._native_door import NativeGlances, NativeWatch, native_state
from graphrt.core.dispatch.reasons import Reason
from graphrt.errors import GraphQuarantinedWarning, StaleInputError, VerificationError
from graphrt.observe import report_text
from graphrt.trust import glances, host_watch
from graphrt.trust import reads as reads_module
from graphrt.trust.host_watch import watch_state
from graphrt.trust.places.walk import where_is
from tests.draws import rest_long
from tests.trust import library_programs  # noqa: F401 - adds programs
from tests.trust.host_programs import (
    HANDLES,
    PROGRAMS,
    WIDTH,
    Net,
    Program,
    all_ids_taken,
    restored,
)

IS_TOLD = NativeWatch is not None
SIZES = (2, 4)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    names = [*globals_of_programs()]
    before = {name: globals_of_programs()[name] for name in names}
    yield
    while HANDLES:
        HANDLES.pop().remove()
    now = globals_of_programs()
    for name in [*now]:
        if name not in before:
            del now[name]
    now.update(before)
    restored("TABLE")


def globals_of_programs() -> dict[str, Any]:
    import tests.trust.host_programs as programs

    return vars(programs)


def untried_runner(forward: Callable[..., Any], **options: Any) -> GraphRunner[Any]:
    """A runner whose graphs were all captured."""
    runner = GraphRunner(
        forward,
        mode=options.pop("mode", "FULL"),
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        options=GraphOptions(**options),
        platform="cpu",
    )
    runner.capture()
    return runner


def runner_of(forward: Callable[..., Any], **options: Any) -> GraphRunner[Any]:
    """A runner whose graphs were all captured, and tried with and without padding."""
    runner = untried_runner(forward, **options)
    for rows in (4, 3, 2, 1, 4, 3, 2, 1):
        runner(x=torch.randn(rows, WIDTH))
    assert {record.status for record in runner.report().trust.trials} == {"tried"}
    return runner


class Steps:
    """Runs steps beside the forward itself; `wrong` are the numbers of steps with other values,
    `said` the warnings."""

    def __init__(self, runner: GraphRunner[Any], forward: Callable[..., Any]) -> None:
        self.runner, self.forward = runner, forward
        self.wrong: list[int] = []
        self.said: list[str] = []
        self.count = 0

    def run(self, count: int, rows: int | None = None) -> None:
        for _ in range(count):
            x = torch.randn(rows or (4, 3, 2, 1)[self.count % 4], WIDTH)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                outputs = self.runner(x=x)
            self.said += [str(each.message) for each in caught]
            if not torch.allclose(outputs, self.forward(x), atol=1e-5):
                self.wrong.append(self.count)
            self.count += 1

    @property
    def reason(self) -> Reason:
        assert self.runner.last_dispatch is not None
        return self.runner.last_dispatch.reason


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


IN_PIECES = PROGRAMS[::8]
"""How a change is noticed does not depend on the mode."""


@pytest.mark.parametrize(
    ("each", "mode"),
    rest_long(
        product(PROGRAMS, ("FULL", "PIECEWISE")),
        *((each.name, "FULL") for each in PROGRAMS),
        *((each.name, "PIECEWISE") for each in IN_PIECES),
        name=lambda case: (case[0].name, case[1]),
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_after_a_change_steps_are_right_or_the_change_is_named_in_time(
    each: Program, mode: str
) -> None:
    torch.manual_seed(0)
    forward, change = each.build()
    runner = runner_of(forward, mode=mode)
    trust = runner.report().trust
    assert bool(trust.watched) == IS_TOLD, trust.not_watched
    steps = Steps(runner, forward)
    steps.run(4)
    assert (steps.wrong, steps.said) == ([], [])
    change()
    steps.run(trust.glance_steps + 8)
    if each.seen == "none":
        assert (steps.wrong, steps.said) == ([], [])
        assert steps.reason is Reason.HIT
    else:
        late = 0 if IS_TOLD and each.seen == "dict" else trust.glance_steps
        assert all(step < 4 + late for step in steps.wrong), steps.wrong
        assert steps.said
        assert steps.reason is Reason.QUARANTINED
    runner.close()


def test_the_table_has_many_programs_for_each_way_of_noticing_a_change() -> None:
    counts = {
        seen: sum(each.seen == seen for each in PROGRAMS) for seen in ("dict", "glance", "none")
    }
    assert counts["dict"] >= 60 and counts["glance"] >= 15 and counts["none"] >= 15, counts


def test_a_changed_attribute_is_named_with_both_values_and_recapture_ends_the_quarantine() -> None:
    net = Net()
    steps = Steps(runner_of(net), net)
    net.config.deep.beta = 3.0
    # Whatever Python is: `weights_changed` looks at all at once.
    steps.runner.weights_changed()
    steps.run(4)
    assert steps.wrong == []
    assert len(steps.said) == 1
    assert "model.config.deep.beta = 1.0, then 3.0" in steps.said[0]
    steps.runner.recapture()
    steps.run(4)
    assert steps.reason is Reason.HIT
    assert steps.wrong == []


def test_an_added_hook_was_nothing_before_and_a_removed_hook_is_nothing_now() -> None:
    net = Net()
    steps = Steps(runner_of(net), net)
    handle = net.norm.register_forward_hook(lambda module, arguments, out: out * 3)
    steps.runner.weights_changed()
    steps.run(4)
    (said,) = steps.said
    # Where CPython tells of the key, a tensor may have been there.
    assert re.search(r"_forward_hooks \(keys\) = nothing(, or a tensor)?, then function \S+", said)
    steps.said.clear()
    steps.runner.recapture()
    steps.run(4)
    handle.remove()
    steps.runner.weights_changed()
    steps.run(4)
    (said,) = steps.said
    assert re.search(r"_forward_hooks\[\d+\] = function \S+, then nothing", said)
    assert "nothing, then nothing" not in said


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        (lambda net: net.first.weight.copy_(torch.ones(WIDTH, WIDTH)), False),
        (lambda net: net.load_state_dict(net.state_dict()), False),
        (lambda net: net.first.weight.data.mul_(2), False),
        (lambda net: net.lora.down["a"].weight.mul_(2), False),
        (lambda net: net.lora.scaling.update(a=7.0), False),
        (lambda net: setattr(net.lora, "active", "b"), False),
        (lambda net: net.load_state_dict(net.state_dict(), assign=True), False),
        (lambda net: net.load_state_dict(copies_of(net), assign=True), True),
        (lambda net: setattr(net.first.weight, "data", torch.ones(WIDTH, WIDTH)), True),
        (lambda net: net.first.weight.set_(torch.ones(WIDTH, WIDTH)), True),
        (lambda net: setattr(net, "shift", net.shift.clone()), True),
        (lambda net: net.double().float(), True),
    ],
)
def test_weights_changed_raises_only_for_moved_weights_and_the_next_steps_are_right(
    change: Callable[[Net], object], moves: bool
) -> None:
    net = Net()
    runner = runner_of(net)
    change(net)
    if moves:
        with pytest.raises(StaleInputError):
            runner.weights_changed()
    else:
        runner.weights_changed()
    steps = Steps(runner, net)
    steps.run(8)
    assert steps.wrong == []


def copies_of(net: Net) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in net.state_dict().items()}


def test_with_strict_a_step_after_a_changed_attribute_raises() -> None:
    net = Net()
    runner = runner_of(net, strict=True)
    net.lora.active = "b"
    runner.weights_changed()
    with pytest.raises(VerificationError, match=r"model\.lora\.active = 'a', then 'b'"):
        runner(x=torch.randn(4, WIDTH))


def test_an_unused_attribute_costs_three_trials_a_graph_and_is_reported_as_harmless() -> None:
    net = Net()
    steps = Steps(runner_of(net), net)
    runner = steps.runner
    before = {record.descriptor: record.steps for record in runner.report().trust.trials}
    for number in range(12):
        net.unused = number
        runner.weights_changed()
        steps.run(4)
    after = {record.descriptor: record.steps for record in runner.report().trust.trials}
    counts = sorted(after[each] - before[each] for each in before)
    assert counts[0] >= 1 and counts[-1] <= 3, counts
    assert (steps.wrong, steps.said, steps.reason) == ([], [], Reason.HIT)
    assert runner.report().trust.harmless == ("model.unused",)
    assert "model.unused" in report_text(runner.report())
    net.scale = 2.0
    runner.weights_changed()
    steps.run(4)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED


@pytest.mark.parametrize("values", [(2.0, 1.0), (2.0, 3.0, 4.0, 1.0)])
def test_a_graph_is_tried_with_a_changed_value_before_the_value_counts_as_harmless(
    values: tuple[float, ...],
) -> None:
    held = SimpleNamespace(scale=1.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * held.scale if x.shape[0] > 2 else x * 1.0

    runner = untried_runner(forward)
    steps = Steps(runner, forward)
    # The step of four always has the value of its capture, that of two has others too.
    for _ in range(8):
        for value in values:
            held.scale = value
            runner.weights_changed()
            steps.run(1, rows=2)
        steps.run(1, rows=4)
    assert (steps.wrong, steps.said) == ([], [])
    held.scale = 5.0
    runner.weights_changed()
    steps.run(2, rows=4)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED


class Slotted:
    __slots__ = ("kept",)


@pytest.mark.parametrize("where", ["take", "walk", "settle"])
@pytest.mark.parametrize("of", ["number", "object", "tensor", "equal object"])
def test_an_interrupted_check_for_changes_puts_the_graphs_in_quarantine(
    of: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0), tensor=torch.ones(WIDTH))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * held.tensor * held.scale * held.inner.scale

    runner = runner_of(forward)
    if of == "number":
        held.scale = 2.0
    elif of == "tensor":
        held.tensor = torch.full((WIDTH,), 2.0)
    else:
        held.inner = SimpleNamespace(scale=2.0 if of == "object" else 1.0)
    runner.graphs.checks.pending = dict.fromkeys(runner.graphs.checks.records, -1)
    owner = host_watch.HostWatch if where == "take" else reads_module.ReadSet
    real = getattr(owner, where)

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    is_interrupted = False
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(owner, where, interrupted)
        try:
            runner(x=torch.ones(4, WIDTH))
        except KeyboardInterrupt:
            is_interrupted = True
    # A number is told by itself, without a walk; a tensor is given up before.
    asks = (of, where) not in {("number", "walk"), ("number", "settle"), ("tensor", "settle")}
    assert is_interrupted is asks
    failures = {record.failure for record in runner.report().trust.trials}
    if is_interrupted:
        (failure,) = failures
        assert "a look at what the host has changed ended in KeyboardInterrupt()" in failure
        (warning,) = [each for each in told if each.category is GraphQuarantinedWarning]
        assert failure in str(warning.message)
    steps = Steps(runner, forward)
    steps.run(4)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED
    runner.recapture()
    steps.run(4)
    assert steps.wrong == [] and steps.reason is Reason.HIT


@pytest.mark.parametrize("of", ["attribute", "slot", "item"])
def test_a_value_emptied_by_the_host_and_refilled_by_the_forward_is_watched(of: str) -> None:
    held: Any = Slotted() if of == "slot" else SimpleNamespace(kept={} if of == "item" else None)

    def put(value: float | None) -> None:
        if of == "item":
            held.kept.clear()
            held.kept.update({} if value is None else {"scale": value})
        elif value is None and of == "slot":
            del held.kept
        else:
            held.kept = value

    def get() -> Any:
        return held.kept.get("scale") if of == "item" else getattr(held, "kept", None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if get() is None:
            put(2.0)
        return x * get()

    runner = runner_of(forward)
    for _ in range(2):
        put(None)
        runner.weights_changed()
        for rows in (4, 2):
            runner(x=torch.ones(rows, WIDTH))
    put(3.0)
    runner.weights_changed()
    steps = Steps(runner, forward)
    steps.run(4)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED


def test_a_dict_to_which_the_forward_adds_is_watched() -> None:
    scales: dict[int, float] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        # A trial of a padded step adds the size of the step without padding.
        return x * scales.setdefault(x.shape[0], 2.0)

    runner = runner_of(forward)
    scales[4] = 3.0
    if not IS_TOLD:
        runner.weights_changed()
    steps = Steps(runner, forward)
    steps.run(2, rows=4)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED


def test_a_changed_key_of_globals_held_as_a_dict_is_named_by_the_warning() -> None:
    module: dict[str, Any] = {"scale": 2.0, "other": 1.0}
    exec("def forward(x): return x * held[0]['scale'] * other", module)
    module["held"] = [module]
    runner = runner_of(module["forward"])
    module["scale"] = 3.0
    x = torch.randn(3, WIDTH)
    steps = runner.report().trust.glance_steps + 1
    with pytest.warns(GraphQuarantinedWarning, match="scale"):
        outputs = [runner(x=x) for _ in range(steps)]
    assert torch.equal(outputs[-1], x * 3.0)


def test_a_filled_slot_and_a_replaced_keyword_default_are_named_by_the_warning() -> None:
    def scaled(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    held = Slotted()
    changes: list[Callable[[], object]] = [
        lambda: setattr(held, "kept", 3.0),
        lambda: setattr(scaled, "__kwdefaults__", {"scale": 3.0}),
    ]
    for change in changes:

        def forward(x: torch.Tensor) -> torch.Tensor:
            return scaled(x) * getattr(held, "kept", 1.0)

        runner = runner_of(forward)
        change()
        steps = Steps(runner, forward)
        steps.run(runner.report().trust.glance_steps + 4)
        assert steps.said and steps.reason is Reason.QUARANTINED


def test_a_deleted_class_attribute_is_named_by_the_warning() -> None:
    class Scaler:
        scale = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * getattr(self, "scale", 3.0)

    forward = Scaler()
    steps = Steps(runner_of(forward), forward)
    del Scaler.scale
    steps.run(steps.runner.report().trust.glance_steps + 4)
    assert "Scaler.scale = 2.0, then nothing" in steps.said[0]
    assert steps.reason is Reason.QUARANTINED


def test_a_replaced_set_with_equal_members_is_no_change() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left_out = {"head"}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if "head" in self.left_out else x * 3

    model = Model()
    runner = runner_of(model)
    steps = Steps(runner, model)
    checks = runner.graphs.checks
    looks = checks.glances.looks
    for _ in range(3):
        checks.look_at_host()
    # Looks are made again for each change: of a large model that takes milliseconds.
    assert checks.glances.looks is looks
    model.left_out.discard("head")
    runner.weights_changed()
    steps.run(2)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED


class Held(torch.Tensor):
    """A tensor of a class of its own."""


HERE: list[Callable[[torch.Tensor], object]] = [
    lambda t: None,
    lambda t: t.mul_(2),
    lambda t: setattr(t, "data", t.data.t()),
    lambda t: setattr(t, "data", t.data[:2]),
    lambda t: setattr(t, "data", t.data.view(torch.int32)),
    lambda t: setattr(t, "data", t.data.clone()),
    lambda t: t.set_(t.untyped_storage(), 0, (4, 4), (0, 1)),
    lambda t: t.set_(t.untyped_storage(), 4, (3, 4), (4, 1)),
    lambda t: t.set_(t.untyped_storage(), 0, (4, 4), (4, 1)),
    lambda t: t.resize_(2),
    lambda t: t.resize_(2, 8),
    lambda t: t.requires_grad_(True),
]
"""What a host does with a tensor of 4 x 4, of which most keep its address."""


@pytest.mark.skipif(NativeGlances is None, reason=f"glances in C: {native_state}")
@pytest.mark.parametrize(
    "made",
    [
        lambda t: t,
        lambda t: nn.Parameter(t, requires_grad=False),
        lambda t: t.as_subclass(Held),
    ],
    ids=["tensor", "parameter", "subclass"],
)
@pytest.mark.parametrize("change", range(len(HERE)))
def test_checks_of_a_tensor_in_c_and_in_python_find_the_same_changes(
    made: Callable[[torch.Tensor], torch.Tensor], change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(3):
        held = [made(torch.randn(4, 4)) for _ in range(3)]

        def forward(x: torch.Tensor, held: list[torch.Tensor] = held) -> torch.Tensor:
            total = sum(each.as_subclass(torch.Tensor).sum() for each in held)
            return x * total

        runner = runner_of(forward)
        reads = runner.graphs.checks.glances.reads
        assert reads is not None
        looks = [reads.glances(repeat(True))]
        with monkeypatch.context() as patch:
            patch.setattr(glances, "NativeGlances", None)
            looks.append(reads.glances(repeat(True)))
        assert type(looks[0]) is not type(looks[1])
        was = where_is(held[at])
        HERE[change](held[at])
        answers = [[next(each) for _ in range(reads.rounds)] for each in looks]
        until = [[*takewhile(bool, each)] for each in answers]
        assert until[0] == until[1]
        assert all(answers[0]) == (where_is(held[at]) == was)
        runner.close()


def test_a_graph_unused_during_a_change_is_tried_at_its_next_use() -> None:
    holder = SimpleNamespace(limit=4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] <= holder.limit else x * 3

    runner = runner_of(forward)
    steps = Steps(runner, forward)
    for limit in (5, 6, 7, 8, 2):
        # Only the graph of 4 rows goes by it.
        holder.limit = limit
        runner.weights_changed()
        steps.run(2, rows=2)
    assert steps.reason is Reason.HIT
    steps.run(2, rows=4)
    assert steps.wrong == []
    assert steps.reason is Reason.QUARANTINED


@pytest.mark.parametrize("after_trials", [False, True])
@pytest.mark.parametrize("table", [torch.linspace, torch.empty], ids=["table", "scratch"])
def test_a_change_that_a_forward_with_a_lazy_table_never_reads_costs_no_graph(
    table: Callable[..., torch.Tensor], after_trials: bool
) -> None:
    """The warm-up makes the table; graphs, and all steps, read it."""
    holder = SimpleNamespace(table=None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if holder.table is None:
            holder.table = table(0, 1, WIDTH) if table is torch.linspace else table(WIDTH)
        if table is torch.empty:
            holder.table.fill_(2.0)
        return x + holder.table

    make = runner_of if after_trials else untried_runner
    steps = Steps(make(forward), forward)
    holder.note = None
    for rows in (4, 2, 4, 2, 4, 2):
        steps.run(1, rows=rows)
        assert steps.reason is Reason.HIT
    assert steps.wrong == []


def test_after_a_lazy_table_a_changed_number_is_found_though_results_are_equal() -> None:
    holder = SimpleNamespace(bound=100.0, table=None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if holder.table is None:
            holder.table = torch.linspace(0, 1, WIDTH)
        return (x + holder.table).clamp(max=holder.bound)

    runner = runner_of(forward)
    steps = Steps(runner, forward)
    steps.run(2, rows=4)
    holder.bound = 50.0
    runner.weights_changed()
    steps.run(2, rows=4)
    assert steps.reason is Reason.QUARANTINED


def test_a_changed_number_of_an_operator_is_found_though_results_are_equal() -> None:
    holder = SimpleNamespace(bound=100.0)
    # Outside of the forward, so that no step moves it.
    scale = torch.ones(())

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * scale).clamp(max=holder.bound)

    runner = runner_of(forward)
    steps = Steps(runner, forward)
    holder.bound = 50.0
    runner.weights_changed()
    steps.run(2, rows=4)
    assert steps.reason is Reason.QUARANTINED
    failure = next(each.failure for each in runner.report().trust.trials if each.failure)
    assert "clamp" in failure and "50.0 where the graph has 100.0" in failure
    assert "holder.bound = 100.0, then 50.0" in failure
    scale.fill_(1000.0)
    steps.run(2, rows=4)
    runner.recapture()
    steps.run(4, rows=4)
    assert (steps.wrong, steps.reason) == ([], Reason.HIT)


def with_metadata(forward: Callable[..., Any], *, at_capture: int) -> GraphRunner[Any]:
    """A captured runner of one size, none of whose steps was tried."""
    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        host=Host(metadata=lambda descriptor: at_capture),
        platform="cpu",
    )
    runner.capture()
    return runner


def test_numbers_from_the_metadata_of_each_step_are_no_host_change() -> None:
    holder = SimpleNamespace(unused=0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        context = current_context()
        assert context is not None and holder.unused < 2
        return x.clamp(max=100.0 + context.metadata)

    runner = with_metadata(forward, at_capture=100)
    for number in range(12):
        if number == 6:
            holder.unused = 1
            runner.weights_changed()
        x = torch.rand(4, WIDTH)
        assert torch.equal(runner(x=x, metadata=number), x)
        assert runner.last_dispatch.reason is Reason.HIT
    assert sum(each.steps for each in runner.report().trust.trials) == 2


@pytest.mark.parametrize("order", [(8, 8, 8, -1, 8, 4, 8, 4), (8, 4, 8, 4, -1, 8, 4, 8, 4)])
def test_operators_that_depend_on_the_batch_size_are_no_host_change(order) -> None:
    holder = SimpleNamespace(unused=0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert holder.unused < 2
        return x * 2 if len(x) > 4 else x + x

    inputs = {"x": InputSpec(torch.float32, ("tokens", WIDTH))}
    runner = GraphRunner(forward, mode="FULL", sizes=[4, 8], inputs=inputs, platform="cpu")
    runner.capture()
    for rows in order:
        if rows < 0:
            holder.unused += 1
            runner.weights_changed()
            continue
        x = torch.rand(rows, WIDTH)
        assert torch.equal(runner(x=x), x * 2)
        assert runner.last_dispatch.reason is Reason.HIT


def test_a_change_before_the_first_step_is_found_at_the_fourth_with_metadata() -> None:
    holder = SimpleNamespace(bound=100.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        context = current_context()
        assert context is not None
        return x.clamp(max=holder.bound + context.metadata)

    runner = with_metadata(forward, at_capture=0)
    holder.bound = 2.0
    runner.weights_changed()
    for _ in range(3):
        assert torch.equal(runner(x=torch.zeros(4, WIDTH), metadata=0), torch.zeros(4, WIDTH))
    x = torch.full((4, WIDTH), 5.0)
    assert torch.equal(runner(x=x, metadata=0), torch.full((4, WIDTH), 2.0))
    assert runner.report().trust.trials[0].status == "quarantined"


def test_a_change_undone_before_a_graph_is_used_costs_no_trial() -> None:
    net = Net()
    runner = runner_of(net)
    steps = Steps(runner, net)
    trials = [record.steps for record in runner.report().trust.trials]
    for _ in range(5):
        net.scale = 7.0
        runner.weights_changed()
        net.scale = 1.0
        runner.weights_changed()
        steps.run(4)
    assert [record.steps for record in runner.report().trust.trials] == trials
    assert steps.wrong == []


def test_a_change_followed_by_an_eager_step_or_another_capture_is_still_found() -> None:
    net = Net()
    runner = GraphRunner(
        net,
        mode="FULL",
        sizes=SIZES,
        inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
        platform="cpu",
    )
    runner.capture_next()
    x = torch.randn(4, WIDTH)
    runner(x=x)
    net.scale = 2.0
    while runner.capture_next().left:
        pass
    with pytest.warns(Warning, match=r"model\.scale"):
        outputs = runner(x=x)
    assert torch.allclose(outputs, net(x))

    runner.recapture()
    steps = Steps(runner, net)
    steps.run(8)
    net.scale = 3.0
    runner(x=torch.randn(9, WIDTH))
    steps.run(4)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED


# Right hosts -------------------------------------------------------------------------------------


class Engine:
    """A host whose forward is a method of its own: all that it keeps is in reach."""

    def __init__(self) -> None:
        self.net = Net()
        self.steps = 0
        self.requests: dict[str, Any] = {}
        self.waiting: list[Any] = []
        self.times: list[float] = []
        self.stats = {"tokens": 0}
        self.metadata: Any = None
        self.log: Any = SimpleNamespace(lines=[], level="info")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def between(self, step: int) -> None:
        self.steps += 1
        self.stats["tokens"] += 4
        self.metadata = SimpleNamespace(step=step)
        self.requests[f"request {step}"] = SimpleNamespace(done=0)
        for request in self.requests.values():
            request.done += 1
        if step >= 3:
            del self.requests[f"request {step - 3}"]
        self.waiting.append(step)
        if step % 3 == 0:
            self.waiting.clear()
        self.times.append(step / 7)
        self.log.lines.append(f"step {step}")


def test_trials_end_for_a_host_whose_own_state_the_forward_can_reach() -> None:
    engine = Engine()
    steps = Steps(runner_of(engine.forward), engine.forward)
    for number in range(150):
        engine.between(number)
        steps.run(1)
    trials = sum(record.steps for record in steps.runner.report().trust.trials)
    for number in range(150, 220):
        engine.between(number)
        steps.run(1)
    assert (steps.wrong, steps.said, steps.reason) == ([], [], Reason.HIT)
    assert sum(record.steps for record in steps.runner.report().trust.trials) <= trials + 6
    engine.net.scale = 2.0
    steps.runner.weights_changed()
    steps.run(4)
    assert steps.wrong == [] and steps.reason is Reason.QUARANTINED


def test_a_counting_forward_that_its_host_also_calls_directly_is_replayed() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.calls = 0
            self.seen: list[int] = []
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen = [*self.seen[-3:], x.shape[0]]
            self.last = x.shape
            return self.linear(x)

    net = Counts()
    steps = Steps(runner_of(net), net)
    steps.run(60)
    assert (steps.wrong, steps.said, steps.reason) == ([], [], Reason.HIT)


def test_a_host_that_switches_adapters_in_place_is_replayed() -> None:
    net = Net()
    weights = {name: net.lora.down[name].weight.clone() for name in "ab"}
    steps = Steps(runner_of(net), net)
    for number in range(20):
        net.lora.down["a"].weight.copy_(weights["ab"[number % 2]])
        net.unused = number
        steps.run(1)
    assert (steps.wrong, steps.said, steps.reason) == ([], [], Reason.HIT)


# Whom it runs with -------------------------------------------------------------------------------


def test_a_change_to_a_shared_model_is_found_by_each_runner() -> None:
    net = Net()
    one, two = Steps(runner_of(net), net), Steps(runner_of(net), net)
    one.run(4), two.run(4)
    net.scale = 2.0
    one.runner.weights_changed(), two.runner.weights_changed()
    one.run(2)
    one.runner.close()
    two.run(2)
    assert one.wrong == two.wrong == []
    assert one.said and two.said


def test_after_release_no_dict_of_the_model_is_watched() -> None:
    net = Net()
    runner = runner_of(net)
    watched = runner.report().trust.watched
    assert bool(watched) == IS_TOLD
    runner.release()
    assert runner.report().trust.watched == 0
    net.scale = 2.0
    x = torch.randn(3, WIDTH)
    assert torch.equal(runner(x=x), net(x))
    runner.recapture()
    assert runner.report().trust.watched == watched


@pytest.mark.skipif(not IS_TOLD, reason="dicts are watched on Python 3.12 and 3.13 alone")
def test_without_a_free_dict_watcher_glances_find_changes_and_the_report_gives_the_reason() -> None:
    assert watch_state() == ""
    with all_ids_taken():
        assert "no watcher of dicts is left" in watch_state()
        net = Net()
        runner = runner_of(net)
        trust = runner.report().trust
        assert trust.watched == 0
        assert "no watcher of dicts is left" in trust.not_watched
        assert "no watcher of dicts is left" in report_text(runner.report())
        steps = Steps(runner, net)
        net.scale = 2.0
        steps.run(trust.glance_steps + 4)
        assert len(steps.wrong) <= trust.glance_steps
        assert steps.reason is Reason.QUARANTINED


def test_after_a_change_a_step_agreed_with_other_ranks_is_not_tried() -> None:
    net = Net()
    runner = runner_of(net)
    runs: list[int] = []
    net.unused = 5
    runner.weights_changed()
    x = torch.randn(4, WIDTH)
    agreed = runner.dispatcher.dispatch(Batch(4, 4))
    before = sum(record.steps for record in runner.report().trust.trials)
    with pytest.warns(Warning, match=r"agreed[\s\S]*model\.unused = 0, then 5"):
        outputs = runner(Batch(4, 4), agreed=agreed, x=x)
    assert torch.allclose(outputs, net(x))
    assert sum(record.steps for record in runner.report().trust.trials) == before
    assert runs == []


def test_state_too_large_for_a_trial_to_save_is_no_error() -> None:
    memory = torch.zeros(4096, WIDTH)
    net = SimpleNamespace(scale=1.0)

    def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        memory.index_copy_(0, rows, x)
        return memory.index_select(0, rows) * net.scale

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[2],
        inputs={
            "x": InputSpec(torch.float32, ("tokens", WIDTH)),
            "rows": InputSpec(torch.int64, ("tokens",), index=True, pad=0),
        },
        options=GraphOptions(state_limit_bytes=1024),
        platform="cpu",
    )
    runner.capture()
    values = {"x": torch.ones(2, WIDTH), "rows": torch.tensor([1, 2])}
    runner(**values)
    net.scale = 2.0
    runner.weights_changed()
    # As on a device that has no memory left.
    object.__setattr__(runner.graphs.setup.options, "state_limit_bytes", 8)
    with pytest.warns(Warning, match=r"cannot be tried[\s\S]*net\.scale = 1\.0, then 2\.0"):
        outputs = runner(**values)
    assert torch.equal(outputs, values["x"] * 2)
    assert runner.last_dispatch.reason is Reason.QUARANTINED
