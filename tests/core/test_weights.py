"""`weights_changed()` finds weights that moved since the capture, or says they are untracked."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from test_runner import INPUTS, rows, runner
from torch import nn

from graphrt import (
    Batch,
    Example,
    GraphOptions,
    GraphPool,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    State,
    current_context,
    eager_break,
    errors,
)
from graphrt.core.base.errors import StaleInputError, UntrackedWeightsError
from graphrt.lowlevel import current_capture


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Engine:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


KNOWN = {
    "module": lambda model: model,
    "method": lambda model: model.step,
    "partial of a method": lambda model: functools.partial(model.step),
    "partial with a module": lambda model: functools.partial(lambda net, x: net(x), model),
}
UNKNOWN = {
    "function": lambda model: lambda x: model(x),
    "engine's method": lambda model: Engine(model).step,
    "partial with a tensor": lambda model: functools.partial(
        lambda weight, scale, x: x @ weight * scale, model.linear.weight, model.scale
    ),
}


UNCHECKED = GraphOptions(check="off")
"""No warm-up is watched: nobody says what graphs read, but for the weights of modules."""


def replace_weight(model: Scaled) -> None:
    model.linear.weight = nn.Parameter(torch.eye(4) * 3)


def replace_data(model: Scaled) -> None:
    model.linear.weight.data = torch.eye(4) * 3


def replace_buffer(model: Scaled) -> None:
    model.scale = torch.full((4,), 3.0)


def load_assigned(model: Scaled) -> None:
    model.load_state_dict(Scaled().state_dict(), assign=True)


CHANGES = [replace_weight, replace_data, replace_buffer, load_assigned]


def write(model: Scaled) -> None:
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(4))


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", KNOWN)
def test_weights_changed_finds_a_replaced_weight_of_a_module_forward(way, change, mode):
    model = Scaled()
    run = runner(KNOWN[way](model), mode=mode)
    run.weights_changed()
    run.capture()
    run.weights_changed()
    write(model)
    run.weights_changed()
    assert torch.equal(run(x=rows(2)), rows(2))
    change(model)
    with pytest.raises(StaleInputError, match=r"linear\.weight|scale"):
        run.weights_changed()
    assert torch.equal(run(x=rows(2)), model(rows(2)))
    assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.QUARANTINED
    run.recapture()
    run.weights_changed()
    assert torch.equal(run(x=rows(2)), model(rows(2)))
    assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("way", UNKNOWN)
def test_weights_changed_raises_untracked_for_functions_with_checks_off(way, mode):
    model = Scaled()
    run = runner(UNKNOWN[way](model), mode=mode, options=UNCHECKED)
    run.weights_changed()
    run.capture()
    with pytest.raises(UntrackedWeightsError, match='check="capture"'):
        run.weights_changed()
    run.release()
    run.weights_changed()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_weights_of_a_scripted_module_are_tracked_only_through_its_parent_module():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.script(Scaled())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Holder()
    run, by_function = runner(model), runner(lambda x: model.inner(x))
    run.capture()
    by_function.capture()
    run.weights_changed()
    with pytest.raises(UntrackedWeightsError):
        by_function.weights_changed()
    model.inner.linear.weight.data = torch.zeros_like(model.inner.linear.weight)
    with pytest.raises(StaleInputError, match=r"inner\.linear\.weight"):
        run.weights_changed()


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["function", "engine's method"])
def test_a_watched_warm_up_finds_the_weights_that_a_function_reads(way, change, mode):
    model = Scaled()
    run = runner(UNKNOWN[way](model), mode=mode)
    run.capture()
    run.weights_changed()
    write(model)
    run.weights_changed()
    change(model)
    with pytest.raises(StaleInputError, match=r"model\.(linear\.weight|scale)"):
        run.weights_changed()
    run.recapture()
    run.weights_changed()


@pytest.mark.trust
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_weights_changed_finds_a_replaced_weight_in_a_list_or_dict(kind):
    weights: Any = {"w": torch.ones(4)} if kind == "dict" else [torch.ones(4)]
    key = "w" if kind == "dict" else 0
    run = runner(lambda x: x * weights[key])
    run.capture()
    run.weights_changed()
    weights[key] = torch.zeros(4)
    with pytest.raises(StaleInputError, match=str(key)):
        run.weights_changed()


@pytest.mark.trust
def test_weights_changed_accepts_a_forward_that_reads_no_weights():
    def forward(x):
        return (x + 1).softmax(0) * torch.tensor([1.0, 2.0, 3.0, 4.0]) * 2.0

    run = runner(forward)
    run.capture()
    run.weights_changed()
    assert torch.equal(run(x=rows(2)), forward(rows(2)))
    assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.trust
def test_weights_changed_raises_untracked_for_a_weight_in_an_iterator():
    weights = itertools.repeat(torch.ones(4))
    run = runner(lambda x: x * next(weights))
    run.capture()
    with pytest.raises(UntrackedWeightsError, match=r"float32 \(4,\).*test_weights\.py:\d+"):
        run.weights_changed()


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("outputs", ["pool", "static", "clone"])
def test_inputs_state_and_eager_part_results_are_not_taken_for_weights(mode, outputs):
    counter, table = torch.zeros(4), torch.zeros(3, 4)

    @eager_break
    def middle(x):
        return x * 2

    def forward(x, y):
        counter.add_(1)
        table[:1] += 1
        return middle(x + y) + counter

    run = GraphRunner(
        forward,
        inputs={**INPUTS, "y": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        mode=mode,
        sizes=[2, 4],
        platform="cpu",
        options=GraphOptions(outputs=outputs),
        host=Host(state=[counter, State(table[:1])]),
    )
    run.capture()
    run.weights_changed()
    assert torch.equal(run(x=rows(2), y=rows(2)), rows(2, 5.0))
    assert run.last_dispatch.reason is Reason.HIT


def test_an_untracked_weight_read_only_by_an_eager_part_raises():
    weights = itertools.repeat(torch.ones(4))

    @eager_break
    def middle(x, w):
        return x * w

    run = runner(lambda x: middle(x + 1, next(weights)) + 1, mode="PIECEWISE")
    run.capture()
    with pytest.raises(UntrackedWeightsError):
        run.weights_changed()


@pytest.mark.trust
def test_the_untracked_weights_error_names_the_tensor_and_its_reading_line():
    weights = itertools.repeat(torch.ones(4))
    run = runner(lambda x: x * next(weights))
    run.capture()
    with pytest.raises(UntrackedWeightsError, match=r"float32 \(4,\).*test_weights\.py:\d+"):
        run.weights_changed()


def test_weights_changed_in_mode_none_raises_nothing():
    model = Scaled()
    run = runner(lambda x: model(x), mode="NONE")
    run.capture()
    run.weights_changed()
    replace_weight(model)
    run.weights_changed()
    assert torch.equal(run(Batch(2, 2, 1), x=rows(2)), rows(2, 3.0))


def test_a_lazy_capture_succeeds_with_untracked_weights():
    model = Scaled()
    run = runner(lambda x: model(x), options=UNCHECKED.merged({"lazy": True}))
    run(x=rows(1))
    run(x=rows(3))
    assert len(run.report().graphs) == 2
    with pytest.raises(UntrackedWeightsError):
        run.weights_changed()


# Only what is outdated ----------------------------------------------------------------------------


class Adapted(nn.Module):
    """A quantized layer, and an adapter that only some graphs read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.adapter = nn.Parameter(torch.ones(4))
        self.int8, self.step, self.merged = torch.ones(4, dtype=torch.int8), torch.ones(1), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        descriptor = current_context().descriptor
        y = x @ self.weight * (self.int8 * self.step)
        if descriptor is not None and descriptor.num_active_loras and not self.merged:
            y = y + x * self.adapter
        return y

    def of(self, x: torch.Tensor, loras: int) -> torch.Tensor:
        y = x @ self.weight.detach() * (self.int8 * self.step)
        return y if self.merged or not loras else y + x * self.adapter.detach()


def adapted(model: nn.Module, **more: Any) -> GraphRunner[torch.Tensor]:
    """A runner with graphs of three sizes without adapters, and three with them."""
    run = runner(model, **{"sizes": [1, 2, 4], "loras": (0, 4), **more})
    run.capture()
    assert run.pool.captures == 6
    return run


def update_in_place(model: Adapted) -> None:
    with torch.no_grad():
        model.weight.copy_(torch.randn(4, 4))
        model.adapter.copy_(torch.randn(4))


def replace_adapter(model: Adapted) -> None:
    model.adapter = nn.Parameter(torch.randn(4))


def replace(model: Adapted) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)


def merge(model: Adapted) -> None:
    with torch.no_grad():
        model.weight.add_(torch.diag(model.adapter))
    model.merged = True


def merge_in_tensors(model: Adapted) -> None:
    with torch.no_grad():
        model.weight.add_(torch.diag(model.adapter))
        model.adapter.zero_()


def quantize(model: Adapted) -> None:
    model.int8, model.step = torch.full((4,), 3, dtype=torch.int8), torch.full((1,), 0.5)


def quantize_in_place(model: Adapted) -> None:
    model.int8.fill_(3)
    model.step.fill_(0.5)


def nothing(model: Adapted) -> None:
    pass


CASES = {
    nothing: 0,
    update_in_place: 0,
    merge_in_tensors: 0,
    quantize_in_place: 0,
    replace_adapter: 3,
    replace: 6,
    merge: 6,
    quantize: 6,
}
"""A change of weights, and how many of six graphs it outdates."""


def are_right(run: GraphRunner[torch.Tensor], model: Any) -> None:
    """Replays of each graph equal the forward."""
    for tokens in (4, 2, 1):
        for loras in (0, min(tokens, 4)):
            x = torch.randn(tokens, 4)
            out = run(Batch(tokens, num_active_loras=loras), x=x)
            assert torch.equal(out, model.of(x, loras))
            assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.HIT
    assert all(each.failure is None for each in run.report().trust.trials)


@pytest.mark.trust
@pytest.mark.parametrize("change", CASES)
def test_only_graphs_that_a_change_of_weights_outdates_are_captured_again(change):
    torch.manual_seed(0)
    model = Adapted()
    run = adapted(model)
    are_right(run, model)
    for _ in range(2):
        before = run.pool.captures
        change(model)
        run.recapture(only_outdated=True)
        again = 0 if change is merge and before > 6 else CASES[change]
        assert run.pool.captures - before == again
        are_right(run, model)
        trials = run.report().trust.trials
        run.weights_changed()
        are_right(run, model)
        assert run.report().trust.trials == trials
    assert len(run.report().graphs) == 6


@pytest.mark.trust
def test_the_largest_graph_of_each_kind_is_tried_after_weights_were_written_in_place():
    model = Adapted()
    run = adapted(model)
    are_right(run, model)

    def trials() -> dict[str, int]:
        return {str(each.descriptor): each.steps for each in run.report().trust.trials}

    before = trials()
    update_in_place(model)
    run.recapture(only_outdated=True)
    are_right(run, model)
    again = {name: count - before[name] for name, count in trials().items()}
    # Adapters bound the kind, so each of their sizes is the largest of one.
    assert [name for name, count in again.items() if count] == [
        "4 tokens 4 reqs loras<=4",
        "4 tokens 4 reqs",
        "2 tokens 2 reqs loras<=2",
        "1 tokens 1 reqs loras<=1",
    ]


@pytest.mark.trust
def test_a_graph_of_another_size_that_reads_a_replaced_tensor_is_found_by_its_trial():
    class Model(Adapted):
        def forward(self, x):
            # Only the largest size of a kind is watched.
            return super().forward(x) + (self.adapter if x.shape[0] == 2 else 0)

        def of(self, x, loras):
            return super().of(x, loras) + (self.adapter.detach() if x.shape[0] == 2 else 0)

    model = Model()
    run = adapted(model)
    replace_adapter(model)
    run.recapture(only_outdated=True)
    x = torch.randn(2, 4)
    with pytest.warns(errors.GraphQuarantinedWarning):
        assert torch.equal(run(x=x), model.of(x, 0))
    run.recapture(only_outdated=True)
    are_right(run, model)


@pytest.mark.trust
def test_a_counter_that_three_trials_have_shown_to_be_harmless_captures_nothing():
    model = Adapted()
    model.version = 0
    run = adapted(model)
    for load in range(6):
        model.version += 1
        update_in_place(model)
        run.weights_changed() if load < 4 else run.recapture(only_outdated=True)
        are_right(run, model)
    assert run.pool.captures == 6 and run.report().trust.harmless == ("model.version",)


@pytest.mark.trust
def test_graphs_in_quarantine_are_captured_again():
    model = Adapted()
    run = adapted(model)
    replace_adapter(model)
    with pytest.raises(StaleInputError):
        run.weights_changed()
    run.recapture(only_outdated=True)
    assert run.pool.captures == 12
    are_right(run, model)


@pytest.mark.trust
def test_an_old_adapter_is_freed_with_the_graphs_that_read_it():
    model = Adapted()
    run = adapted(model)
    old = weakref.ref(model.adapter.untyped_storage())
    replace_adapter(model)
    assert old() is not None
    run.recapture(only_outdated=True)
    are_right(run, model)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("forward", [lambda model: model, lambda model: lambda x: model(x)])
def test_without_checks_all_graphs_are_captured_again_if_one_weight_may_have_moved(forward):
    model = Adapted()
    run = adapted(forward(model), options=UNCHECKED)
    is_known = isinstance(forward(model), nn.Module)
    run.recapture(only_outdated=True)
    assert run.pool.captures == (6 if is_known else 12)
    replace_adapter(model)
    run.recapture(only_outdated=True)
    assert run.pool.captures == (12 if is_known else 18)


@pytest.mark.trust
def test_all_graphs_are_captured_again_where_nobody_can_tell_what_they_read():
    weights = itertools.repeat(torch.ones(4))
    run = adapted(lambda x: x * next(weights))
    run.recapture(only_outdated=True)
    assert run.pool.captures == 12


@pytest.mark.trust
def test_examples_are_tried_at_once_after_new_weights():
    model, calls = Adapted(), []

    def example(batch, generator):
        calls.append(batch.num_tokens)
        return Example({"x": torch.randn(batch.num_tokens, 4, generator=generator)})

    run = adapted(model, host=Host(example=example))
    calls.clear()
    update_in_place(model)
    run.recapture(only_outdated=True)
    assert len(calls) == 4 and run.pool.captures == 6


@pytest.mark.trust
def test_the_graphs_of_a_draft_stay_where_its_target_has_new_weights():
    target, draft = Adapted(), Adapted()
    pool = GraphPool("cpu")
    runs = {model: runner(model, sizes=[1, 2, 4], pool=pool) for model in (target, draft)}
    for run in runs.values():
        run.capture()
    replace(target)
    for run in runs.values():
        run.recapture(only_outdated=True)
    assert pool.captures == 9
    for model, run in runs.items():
        assert torch.equal(run(x=rows(4)), model.of(rows(4), 0))


@pytest.mark.trust
def test_a_graph_whose_capture_failed_at_new_weights_comes_back_with_the_next():
    model, fails = Adapted(), [False]

    def forward(x):
        if fails[0] and x.shape[0] == 2 and current_capture() is not None:
            raise ValueError("not now")
        return model(x)

    run = runner(forward, sizes=[1, 2, 4])
    run.capture()
    replace(model)
    fails[0] = True
    with pytest.raises(ValueError, match="not now"):
        run.recapture(only_outdated=True)
    fails[0] = False
    replace(model)
    run.recapture(only_outdated=True)
    assert sizes_of(run) == [1, 2, 4]
    assert torch.equal(run(x=rows(2)), model.of(rows(2), 0))


def sizes_of(run: GraphRunner[torch.Tensor]) -> list[int]:
    return sorted(each.descriptor.num_tokens for each in run.report().graphs)


@pytest.mark.trust
@pytest.mark.parametrize("change", [update_in_place, replace])
@pytest.mark.parametrize("limit", [{}, {"max_graphs": 4}])
def test_new_weights_capture_the_graphs_that_lazy_steps_had_captured(change, limit):
    model = Adapted()
    run = runner(model, sizes=range(1, 17), options=GraphOptions(lazy=True, **limit))
    for tokens in (16, 3, 7):
        run(x=rows(tokens))
    change(model)
    before = run.pool.captures
    run.recapture(only_outdated=True)
    assert sizes_of(run) == [3, 7, 16]
    assert run.pool.captures - before == (3 if change is replace else 0)
    run(x=rows(5))
    assert sizes_of(run) == [3, 5, 7, 16]
    for tokens in (16, 3, 7, 5):
        assert torch.equal(run(x=rows(tokens)), model.of(rows(tokens), 0))
        assert run.last_dispatch.reason is Reason.HIT


@pytest.mark.trust
def test_a_graph_that_a_limit_has_ended_stays_away_at_new_weights():
    model = Adapted()
    run = runner(model, sizes=range(1, 9), options=GraphOptions(lazy=True, max_graphs=2))
    for tokens in (3, *[5] * 300):
        run(x=rows(tokens))
    assert sizes_of(run) == [5, 8]
    replace(model)
    run.recapture(only_outdated=True)
    assert sizes_of(run) == [5, 8]


@pytest.mark.trust
@pytest.mark.parametrize("change", [update_in_place, replace])
def test_new_weights_between_two_captures_capture_nothing_that_was_missing(change):
    model = Adapted()
    run = runner(model, sizes=range(1, 9))
    for _ in range(3):
        run.capture_next()
    were = sizes_of(run)
    change(model)
    run.recapture(only_outdated=True)
    assert sizes_of(run) == were
    assert run.capture_next().left == 4
    while run.capture_next():
        pass
    assert sizes_of(run) == [*range(1, 9)]
    assert torch.equal(run(x=rows(5)), model.of(rows(5), 0))


@pytest.mark.trust
def test_new_weights_bring_back_graphs_of_a_release():
    run = adapted(Adapted())
    run.release()
    run.recapture(only_outdated=True)
    assert len(run.report().graphs) == 6


@pytest.mark.trust
def test_a_strict_runner_has_sizes_that_did_not_fit_run_eagerly_after_new_weights_too():
    model = Adapted()

    def forward(x):
        if x.shape[0] == 2 and current_capture() is not None:
            raise errors.ResourceExhaustedError("no room", advice="none")
        return model(x)

    run = runner(forward, sizes=[1, 2, 4], options=GraphOptions(strict=True, max_padding=1.0))
    with pytest.raises(errors.ResourceExhaustedError):
        run.capture()
    replace(model)
    with pytest.raises(errors.ResourceExhaustedError):
        run.recapture(only_outdated=True)
    assert sizes_of(run) == [1, 4]
    assert torch.equal(run(x=rows(2)), model.of(rows(2), 0))


def test_graphs_that_did_not_fit_are_not_tried_again_at_new_weights():
    model, fails = Adapted(), []

    def forward(x):
        if x.shape[0] == 2 and current_capture() is not None:
            fails.append(x.shape[0])
            raise errors.ResourceExhaustedError("no room", advice="none")
        return model(x)

    run = runner(forward, sizes=[1, 2, 4])
    with pytest.warns(errors.GraphsDroppedWarning):
        run.capture()
    count = len(fails)
    update_in_place(model)
    with pytest.warns(errors.GraphsDroppedWarning):
        run.recapture(only_outdated=True)
    assert len(fails) == count


@pytest.mark.trust
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        "dispatcher.withdraw",
        "destroy_leftovers",
        "checks.dropped",
        "checks.forget_kind",
        "reads.forget_kind",
        "checks.outdated",
        "named.record",
    ],
)
def test_after_an_interrupt_no_graph_reads_an_old_adapter(place, before):
    model = Adapted()
    run = adapted(model)
    places = {"dispatcher": run.dispatcher, "checks": run.graphs.checks, "named": run.graphs.named}
    places |= {"": run.graphs, "reads": run.graphs.checks.reads}
    owner, _, name = place.rpartition(".")
    call = getattr(places[owner], name)

    def interrupted(*args: Any) -> Any:
        result = None if before else call(*args)
        delattr(places[owner], name)
        raise KeyboardInterrupt(result)

    replace_adapter(model)
    # On the instance alone: gone after the first call.
    setattr(places[owner], name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.recapture(only_outdated=True)
    for loras in (0, 4):
        x = torch.randn(4, 4)
        assert torch.equal(run(Batch(4, num_active_loras=loras), x=x), model.of(x, loras))
    run.recapture(only_outdated=True)
    are_right(run, model)


@pytest.mark.trust
def test_a_merge_of_peft_outdates_graphs_and_a_load_into_its_adapter_does_not():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).eval()

    def forward(ids):
        return model(input_ids=ids[None], use_cache=False).logits[0]

    def load():
        state = peft.get_peft_model_state_dict(model)
        new = {name: torch.randn_like(tensor) for name, tensor in state.items()}
        peft.set_peft_model_state_dict(model, new)

    inputs = {"ids": InputSpec(torch.int64, ("tokens",))}
    run = runner(forward, sizes=[4, 8], inputs=inputs, outputs=("tokens", 64))
    counts = []
    with torch.no_grad():
        run.capture()
        for change in (load, model.merge_adapter, model.unmerge_adapter, load):
            change()
            before = run.pool.captures
            run.recapture(only_outdated=True)
            counts.append(run.pool.captures - before)
            for tokens in (8, 4, 3):
                ids = torch.randint(0, 64, (tokens,))
                torch.testing.assert_close(run(ids=ids), forward(ids))
                assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.HIT
    assert counts == [0, 2, 2, 0]
