"""The advice in error messages works: each case fails, follows the advice, and then runs."""

from __future__ import annotations

import functools
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, List, Optional  # noqa: UP035 - what an operator's schema takes

import pytest
import torch
from test_runner import INPUTS, rows, runner

import graphrt.compile
from graphrt import (
    Batch,
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    GraphRTError,
    GraphRunner,
    GraphWrapper,
    Host,
    HostArg,
    InputSpec,
    KeyedGraphs,
    Plan,
    Reason,
    State,
    UpdatableTask,
    current_context,
    eager_break,
    errors,
    forward_context,
    get_platform,
    wrapper_class,
)
from graphrt.observe import findings

X = INPUTS["x"]


def advice_of(call: Callable[..., Any], *args: Any, **keywords: Any) -> str:
    with pytest.raises(GraphRTError) as caught:
        call(*args, **keywords)
    advice = caught.value.advice
    assert advice is not None and advice in str(caught.value)
    return advice


def captured(*args: Any, **keywords: Any) -> GraphRunner:
    run = runner(*args, **keywords)
    run.capture()
    return run


def test_the_advice_for_a_bound_that_is_no_list_is_a_list_of_bounds():
    assert advice_of(captured, sizes=[4], bounds=[4]) == "bounds=[(4096,)]"
    assert captured(sizes=[4], bounds=[(4096,)]).report().graphs


def test_a_host_read_in_a_graph_by_key_is_not_advised_a_mode():
    graphs, x = KeyedGraphs(GraphPool("cpu")), rows(3)
    read = eager_break(lambda: x * x.sum().item())
    advice = advice_of(graphs.run, 3, read)
    assert "PIECEWISE" not in advice.partition("GraphRunner")[0] and "graphs by key" in advice
    assert "torch.where" in advice


# Captures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(
    ("read", "result"),
    [
        (lambda x: x * x.sum().item(), 36.0),
        (lambda x: x * float(x.sum()), 36.0),
        (lambda x: x * len(torch.nonzero(x)), 18.0),
    ],
)
def test_a_host_read_in_the_forward_is_advised_eager_break_with_mode_piecewise(mode, read, result):
    advice = advice_of(captured, read, mode=mode, sizes=[3])
    if "nonzero_static" in advice:  # a case with an advice of its own
        return
    assert '@eager_break and capture in pieces (mode="PIECEWISE")' in advice
    marked = eager_break(read)
    run = captured(lambda x: marked(x) + 0, mode="PIECEWISE", sizes=[3])
    assert torch.equal(run(x=rows(3)), rows(3, result / 3))
    assert run.last_dispatch.reason is Reason.HIT


def test_a_marked_eager_break_under_mode_full_is_advised_mode_piecewise():
    marked = eager_break(lambda x: x * x.sum().item())
    assert 'mode="PIECEWISE"' in advice_of(captured, marked, mode="FULL", sizes=[3])


def test_wrapper_class_with_a_wrong_platform_advises_get_platform():
    assert wrapper_class("cpu") is wrapper_class(get_platform("cpu"))
    advice = advice_of(wrapper_class, 3)
    assert advice == 'platform=get_platform("cpu")'
    assert wrapper_class(**eval(f"dict({advice})"))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("outputs", [None, ("tokens", 4)])
def test_indexing_with_a_boolean_mask_is_advised_torch_where(mode, outputs):
    forward = lambda x: x[x[:, 0] > 0]  # noqa: E731
    assert "torch.where(mask, x, fill)" in advice_of(captured, forward, mode=mode, outputs=outputs)
    run = captured(
        lambda x: torch.where(x[:, :1] > 0, x, 0) + 0,
        mode=mode,
        outputs=outputs,
        pieces="breakable",
    )
    assert torch.equal(run(x=rows(3)), rows(3))


# Inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [(4, 4), (2, 4)])
def test_inputs_with_more_or_fewer_rows_than_the_batch_get_working_advice(given):
    run, x = captured(), torch.ones(given)
    assert "the live rows of x alone" in advice_of(run, Batch(3, 3, 1), x=x)
    assert torch.equal(run(Batch(given[0]), x=x), x + 1)


def test_an_input_over_one_row_more_than_the_requests_is_advised_that_row_too():
    """As a block table: its live rows alone are what the host has passed."""
    run = captured(
        lambda x, table: x + table[-1],
        inputs={"x": X, "table": InputSpec(torch.float32, ("reqs+1", 4))},
        options=GraphOptions(check="off"),
    )
    x = torch.ones(3, 4)
    advice = advice_of(run, Batch(3, 3, 1), x=x, table=torch.zeros(3, 4))
    assert "the live rows of table and the 1 more of 'reqs+1'" in advice
    assert torch.equal(run(Batch(3, 3, 1), x=x, table=torch.zeros(4, 4)), x)


@pytest.mark.parametrize("names", [("xs",), ("x", "y"), ()])
def test_a_step_with_missing_or_unknown_inputs_names_them(names):
    missing, unknown = sorted({"x"} - {*names}), sorted({*names} - {"x"})
    run = captured()
    with pytest.raises(errors.InvalidInputError) as caught:
        run(Batch(3), **{name: rows(3) for name in names})
    assert caught.value.got == f"missing {missing}, unknown {unknown}"
    # The forward has no more of them, so there is nothing to declare.
    assert caught.value.advice.startswith("pass each declared input")
    assert torch.equal(run(Batch(3), x=rows(3)), rows(3, 2.0))


@pytest.mark.parametrize(
    ("forward", "names", "named"),
    [
        (lambda input_ids: input_ids + 1, ("inputs_ids",), "(input_ids)"),
        (lambda x: x + 1, ("x", "positions"), "'positions'"),
        (lambda x, scale: x * scale, ("x",), "'scale'"),
        (lambda *given: given[0] + 1, ("x",), "(*given)"),
    ],
)
def test_declaring_an_input_that_the_forward_does_not_take_raises(forward, names, named):
    module = torch.nn.Module()
    module.forward = forward
    for each in forward, module:
        with pytest.raises(errors.InvalidInputError, match=re.escape(named)):
            runner(each, inputs=dict.fromkeys(names, X))


def test_binding_an_undeclared_forward_argument_with_partial_works_as_advised():
    forward = lambda x, scale: x * scale  # noqa: E731
    assert "partial" in advice_of(runner, forward)
    run = captured(functools.partial(forward, scale=3.0))
    assert torch.equal(run(x=rows(3)), rows(3, 3.0))


def test_wrapped_hooked_and_scripted_forwards_are_accepted_without_a_signature_check():
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            return function(*args, scale=2.0, **keywords)

        return call

    @decorated
    def scaled(x, scale):
        return x * scale

    class Hooked(torch.nn.Module):
        def forward(self, hidden):
            return hidden * 2

    hooked = Hooked()
    hooked.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"hidden": kwargs["x"]}), with_kwargs=True
    )
    for forward in (scaled, hooked, torch.jit.script(torch.nn.Identity()), decorated(scaled)):
        runner(forward, inputs={"x": X} if forward is not torch.neg else {"input": X})
    for forward in (scaled, hooked):
        assert torch.equal(captured(forward)(x=rows(3)), rows(3, 2.0))


def test_inputs_without_a_batch_axis_are_advised_to_pass_a_batch():
    spec = InputSpec(torch.float32, (3, 4))
    run = captured(inputs={"x": spec}, outputs=(3, 4))
    advice = advice_of(run, x=rows(3))
    assert advice.startswith("runner(Batch(num_tokens, num_reqs)")
    assert torch.equal(run(Batch(2, 2), x=rows(3)), rows(3, 2.0))


def test_a_step_of_zero_tokens_is_advised_to_be_skipped():
    run = captured()
    assert advice_of(run, x=rows(0)).startswith("skip the step")
    assert "skip" not in advice_of(run, Batch(-1), x=rows(1))


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("token", "tokens"),
        ("Tokens", "tokens"),
        ("requests", "reqs"),
        ("req+1", "reqs+1"),
        ("num_tokens", "tokens"),
    ],
)
def test_a_typo_in_an_axis_name_is_advised_the_right_name(typo, meant):
    assert advice_of(InputSpec, torch.float32, (typo, 4)) == f'"{meant}"'
    assert advice_of(runner, outputs=(typo, 4)) == f'"{meant}"'
    assert advice_of(HostArg, typo) == f'"{meant}"'
    assert InputSpec(torch.float32, (meant, 4)).sizes(2, 2)[1:] == (4,)


def test_a_sparse_input_is_advised_a_conversion_that_works():
    run, x = captured(), torch.ones(3, 4).to_sparse()
    made = eval(advice_of(run, x=x).partition(" of a sparse one")[0], {"x": x})
    assert run(x=made).shape == (3, 4)


# Hooks ------------------------------------------------------------------------------------------


def nothing() -> None:
    """Takes nothing."""


def hook(name: str, value: Any) -> Callable[[], Any]:
    return lambda: Host(**{name: value})


@pytest.mark.parametrize(
    "make",
    [
        hook("bind", 3),
        hook("example", 3),
        hook("metadata", 3),
        hook("around_capture", 3),
        lambda: State(save=3, restore=nothing),
        lambda: UpdatableTask("t", print, {}, at_capture=3),
        lambda: runner().capture(3),
        lambda: GraphWrapper(nothing, "FULL", pool=GraphPool("cpu"), read_context=3),
    ],
)
def test_a_hook_that_is_not_callable_is_advised_its_signature(make):
    advice = advice_of(make)
    assert advice.startswith("def ")
    compile(advice, "advice", "exec")


def test_a_bind_hook_with_the_advised_signature_works():
    advice = advice_of(hook("bind", 3))
    space: dict[str, Any] = {}
    exec(advice, space)
    run = captured(host=Host(bind=space["bind"]))
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))


# Operators, wrappers, state ---------------------------------------------------------------------


@pytest.mark.parametrize("default", [(1, 2), [1, 2], (1.5,)], ids=str)
def test_an_opaque_operator_with_a_list_default_is_advised_an_optional_argument(default):
    name = f"following::op{abs(hash(str(default)))}"

    def scale(x: torch.Tensor, out: torch.Tensor, by: Any = default) -> None:
        out.copy_(x * by[0])

    kind = List[int] if type(default[0]) is int else List[float]  # noqa: UP006
    scale.__annotations__ = {"x": torch.Tensor, "out": torch.Tensor, "by": kind, "return": None}
    advice = advice_of(graphrt.compile.opaque(name, mutates=["out"]), scale)
    assert f"Optional[List[{type(default[0]).__name__}]] = None" in advice

    def mended(x, out, by=None):
        by = default if by is None else by
        out.copy_(x * by[0])

    annotation = eval(
        advice.removeprefix("by: ").partition(" = ")[0], {"List": list, "Optional": Optional}
    )
    mended.__annotations__ = {**scale.__annotations__, "by": annotation}
    out = torch.empty(2)
    graphrt.compile.opaque(name, mutates=["out"])(mended)(torch.ones(2), out)
    assert out.tolist() == [default[0]] * 2


def test_a_moved_argument_raises_with_the_wrappers_name_and_advises_copy():
    def layer_seven(x):
        return x + 1

    wrapper = GraphWrapper(
        layer_seven, "FULL", pool=GraphPool("cpu"), options=GraphOptions(lazy=True)
    )
    x, descriptor = rows(2), BatchDescriptor(2, 2)

    def step(value: torch.Tensor) -> torch.Tensor:
        with forward_context("FULL", descriptor):
            return wrapper(value)

    step(x)
    advice = advice_of(step, rows(2, 5.0))
    with pytest.raises(errors.StaleInputError, match="layer_seven"):
        step(rows(2, 5.0))
    assert advice.startswith("copy_() into the tensor that it was captured with")
    x.copy_(rows(2, 5.0))
    assert torch.equal(step(x), rows(2, 6.0))


def test_a_growing_cache_is_advised_a_static_cache_that_works():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=32, num_attention_heads=2, num_key_value_heads=2, **sizes
    )
    model = transformers.LlamaForCausalLM(config).eval()

    def made(cache: Any) -> GraphRunner:
        return captured(
            lambda ids: model(ids[None], past_key_values=cache).logits[0],
            inputs={"ids": InputSpec(torch.int64, ("tokens",))},
            outputs=("tokens", 32),
            sizes=[1],
        )

    advice = advice_of(made, transformers.DynamicCache(config=config))
    assert "StaticCache" in advice and "call the forward once" in advice
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    token = torch.tensor([3])
    with torch.no_grad():
        model(token[None], past_key_values=cache)
    run = made(cache)
    grown = transformers.DynamicCache(config=config)
    with torch.no_grad():
        expected = [model(token[None], past_key_values=grown).logits[0] for _ in range(4)][1:]
    for want in expected:
        assert torch.allclose(run(ids=token), want, atol=1e-5)
        assert run.last_dispatch.reason is Reason.HIT
    # And what it returns beside logits is left out, as advised.
    whole = lambda ids: model(ids[None])  # noqa: E731
    advice = advice_of(
        captured, whole, inputs={"ids": InputSpec(torch.int64, ("tokens",))}, outputs=None
    )
    assert "result.logits alone" in advice and "use_cache=False" in advice


class Remembers(torch.nn.Module):
    """Adds what it kept from the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.h: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = 0 if self.h is None else self.h
        self.h = x * 2
        return x + kept


def test_a_tensor_replaced_at_every_step_is_advised_copy_into_a_kept_tensor():
    replaced, copied = Remembers(), Remembers()
    assert "self.h.copy_(new) in place of self.h = new" in advice_of(captured, replaced, sizes=[3])
    copied.h = torch.zeros(3, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert copied.h is not None
        out = x + copied.h
        copied.h.copy_(x * 2)
        return out

    run = captured(forward, sizes=[3])
    for last, now in [(0.0, 1.0), (1.0, 5.0), (5.0, 2.0)]:
        assert torch.equal(run(x=rows(3, now)), rows(3, now + 2 * last))
        assert run.last_dispatch.reason is Reason.HIT


def test_an_eager_part_whose_dtype_changes_is_advised_to_return_a_fixed_dtype():
    doubles: list[bool] = []
    part = eager_break(lambda x: x.double() if doubles else x + 0)
    run = captured(lambda x: part(x) * 2, mode="PIECEWISE", sizes=[3])
    run(x=rows(3))
    doubles.append(True)
    advice = "return one dtype at every step: .to(torch.float32)"
    with pytest.warns(errors.GraphQuarantinedWarning, match=re.escape(advice)):
        assert torch.equal(run(x=rows(3)), rows(3, 2.0))
    part = eager_break(lambda x: (x.double() if doubles else x + 0).to(torch.float32))
    run = captured(lambda x: part(x) * 2, mode="PIECEWISE", sizes=[3])
    doubles.clear()
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))


def test_an_eager_part_that_sometimes_returns_its_argument_is_advised_to_clone():
    @eager_break
    def flips(y: torch.Tensor) -> torch.Tensor:
        if y.abs().max() > 1:
            y = y / y.abs().max()
        return y

    @eager_break
    def clones(y: torch.Tensor) -> torch.Tensor:
        return y / y.abs().max() if y.abs().max() > 1 else y.clone()

    @eager_break
    def limited(y: torch.Tensor) -> torch.Tensor:
        return y / y.abs().max().clamp(min=1)

    run = captured(lambda x: flips(x * 1) * 2, mode="PIECEWISE", sizes=[3])
    assert torch.equal(run(x=rows(3)), rows(3, 2.0))
    advice = "return a fresh tensor always (y.clone() in place of y)"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        # A step that is no trial: its result is right too, and it is told once.
        for value in (4.0, 8.0):
            assert torch.equal(run(x=rows(3, value)), rows(3, 2.0))
    assert len(warned) == 1 and advice in str(warned[0].message)
    for part in (clones, limited):
        run = captured(lambda x, part=part: part(x * 1) * 2, mode="PIECEWISE", sizes=[3])
        for value, result in [(1.0, 2.0), (4.0, 2.0), (0.5, 1.0)]:
            assert torch.equal(run(x=rows(3, value)), rows(3, result))
            assert run.last_dispatch.reason is Reason.HIT


def test_a_batch_norm_in_training_mode_is_advised_eval():
    model = torch.nn.BatchNorm1d(4)
    run = captured(lambda x: model(x), sizes=[4])
    with pytest.warns(errors.GraphQuarantinedWarning, match=r"call eval\(\)"), torch.no_grad():
        run(x=torch.randn(3, 4))
    assert "call eval()" in findings(run.report())[0].advice
    model.eval()
    run.recapture()
    with torch.no_grad():
        run(x=torch.randn(3, 4))
    assert run.last_dispatch.reason is Reason.HIT
    (ended,) = findings(run.report())
    assert ended.level == "note" and "has ended: 1 step ran eagerly" in ended.what


# A forward's own exceptions ---------------------------------------------------------------------


class Own(Exception):
    """The host's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"own {code}")
        self.code = code


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("when", ["warm-up", "capture", "eager part", "trial", "too large"])
@pytest.mark.parametrize("error", [Own(7), TypeError("a keyword argument"), RuntimeError("x")])
def test_an_exception_raised_by_the_forward_is_raised_unchanged(mode, when, error):
    calls = []

    def raise_own(x):
        raise error

    part = eager_break(raise_own)

    def forward(x):
        calls.append(tuple(x.shape))
        at = {"warm-up": 1, "capture": 2, "trial": 3}.get(when)
        if when == "eager part":
            return part(x)
        if at == len(calls) or (when == "too large" and x.shape[0] == 9):
            return raise_own(x)
        return x + 1

    run = runner(forward, mode=mode, outputs=("tokens", 4), pieces="breakable")
    try:
        run.capture()
        for count in (3, 9, 1):
            run(x=rows(count))
    except type(error) as found:
        same = found is error
        frames = [frame.name for frame in traceback.extract_tb(found.__traceback__)]
        assert same and frames[-1] == "raise_own"
    else:
        # Piecewise without a break, or no graph, calls the forward fewer times.
        assert when in ("capture", "trial") or len(calls) < 3


def test_the_advice_of_a_wrong_plan_argument_works():
    advice = advice_of(Plan, mode="FULL", sizes=3)
    assert Plan(mode="FULL", platform="cpu", **eval(f"dict({advice})")).keys


def test_strict_given_to_a_plan_is_advised_the_options_of_a_runner():
    given: Any = {"mode": "FULL", "sizes": [4], "attention": "NEVER"}
    advice = advice_of(Plan, **given, strict=True)
    assert "strict=" in advice and "options=GraphOptions(...), which a runner takes" in advice
    forward = lambda x: x + 1  # noqa: E731
    arguments: Any = {"inputs": INPUTS, "outputs": ("tokens", 4), "platform": "cpu", **given}
    # The runner raises, and its own advice works too.
    advice = advice_of(GraphRunner, forward, **arguments, options=GraphOptions(strict=True))
    assert advice == "mode='PIECEWISE', or strict=False to step down"
    lower = {**arguments, "mode": "PIECEWISE"}
    for made in (
        GraphRunner(forward, **lower, options=GraphOptions(strict=True)),
        GraphRunner(forward, **arguments, options=GraphOptions(strict=False)),
    ):
        made.capture()
        assert torch.equal(made(x=rows(3)), rows(3, 2.0))
        assert made.last_dispatch is not None and made.last_dispatch.reason is Reason.HIT


def test_opaque_applied_to_a_non_callable_raises():
    with pytest.raises(GraphRTError, match="'function' cannot be called"):
        graphrt.opaque("graphrt_following::none", mutates=[])(None)


# State and eager parts --------------------------------------------------------------------------


class Appends(torch.nn.Module):
    """Returns the sum of all it was given, which it keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.hist: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hist.append(x * 1)
        return torch.stack(self.hist).sum(0)


class AppendsAsAdvised(torch.nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("hist", torch.zeros(length, 3, 4))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = x * 1
        self.hist.index_copy_(0, self.at, new[None])
        self.at.add_(1)
        return self.hist.sum(0)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_list_that_grows_is_advised_a_buffer_and_a_position_that_work(mode):
    advice = advice_of(captured, Appends(), mode=mode, sizes=[3])
    for named in (
        'register_buffer("hist", torch.zeros(length, ...))',
        'register_buffer("at", torch.zeros(1, dtype=torch.int64))',
        "self.hist.index_copy_(0, self.at, new[None]) and self.at.add_(1)",
    ):
        assert named in advice
    run, eager = captured(AppendsAsAdvised(8), mode=mode, sizes=[3]), Appends()
    for value in (1.0, 5.0, 2.0, 7.0):
        assert torch.equal(run(x=rows(3, value)), eager(rows(3, value)))
        assert run.last_dispatch.reason is Reason.HIT


def test_an_item_that_each_size_fills_once_is_advised_a_call_at_each_size_that_works():
    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] not in self.tables:
                self.tables[x.shape[0]] = x * 0 + 3
            return x * self.tables[x.shape[0]]

    advice = advice_of(captured, Tables())
    assert "call the forward once at each size before capture()" in advice
    model = Tables()
    for size in (2, 4):
        model(torch.ones(size, 4))
    run = captured(model)
    for count in (4, 1, 3):
        assert torch.equal(run(x=rows(count)), rows(count, 3.0))
        assert run.last_dispatch.reason is Reason.HIT


def test_a_growing_list_of_numbers_is_advised_a_tensor_that_is_written_in_place():
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []
            self.register_buffer("count", torch.zeros(1))

    class InAList(Counts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(1.0)
            return x * len(self.seen)

    class InATensor(Counts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * self.count

    run = captured(InAList(), sizes=[3])
    with pytest.warns(errors.GraphQuarantinedWarning, match=r"in place \(self\.count\.add_\(1\)"):
        run(x=rows(3))
    run = captured(InATensor(), sizes=[3])
    for call in (1, 2, 3):
        assert torch.equal(run(x=rows(3)), rows(3, float(call)))
        assert run.last_dispatch.reason is Reason.HIT


def test_a_model_that_takes_no_static_cache_is_advised_with_graphs_which_leaves_it_as_it_was():
    transformers = pytest.importorskip("transformers")
    from graphrt.hosts.transformers import graphs_of, with_graphs

    config = transformers.MptConfig(
        vocab_size=32, d_model=16, n_heads=2, n_layers=1, max_seq_len=64, eos_token_id=None
    )
    model = transformers.MptForCausalLM(config).eval()
    prompt = {"input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 8, "do_sample": False}
    before = model.generate(**prompt)

    def made(cache: Any) -> GraphRunner:
        return captured(
            lambda ids: model(ids[None], past_key_values=cache).logits[0],
            inputs={"ids": InputSpec(torch.int64, ("tokens",))},
            outputs=("tokens", 32),
            sizes=[1],
        )

    advice = advice_of(made, transformers.DynamicCache(config=config))
    assert "graphrt.hosts.transformers.with_graphs(model), which says whether" in advice
    # The first half of the advice is not for this model.
    cache = transformers.StaticCache(config=config, max_cache_len=32)
    with torch.no_grad():
        model(torch.tensor([[1]]), past_key_values=cache)
    with pytest.raises(errors.CaptureError):
        made(cache)
    # The second says so, and what to do, which is nothing.
    advice = advice_of(with_graphs, model, max_batch=2, max_len=32, strict=True)
    assert advice.startswith("leave with_graphs() out for this model, which runs as before")
    assert torch.equal(model.generate(**prompt), before)
    assert torch.equal(with_graphs(model, max_batch=2, max_len=32).generate(**prompt), before)
    assert graphs_of(model).report().refused is not None
    fresh = transformers.MptForCausalLM(config).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.generate(**prompt), before)


TENSORS_ALONE = "return tensors alone, in every branch: x.max() in place of float(x.max())"


def test_an_eager_part_that_returns_a_float_is_advised_a_tensor_at_the_capture_and_at_the_step():
    part = eager_break(lambda x: float(x.max()))
    with pytest.warns(errors.BreakWarning, match=re.escape(TENSORS_ALONE)) as warned:
        run = captured(lambda x: x * part(x * 1), mode="PIECEWISE")
    assert len(warned) == 1  # of two sizes
    with pytest.warns(errors.GraphQuarantinedWarning, match=re.escape(TENSORS_ALONE)):
        assert torch.equal(run(x=rows(4, 3.0)), rows(4, 9.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(x=rows(4, 5.0)), rows(4, 25.0))
        part = eager_break(lambda x: x.max())
        run = captured(lambda x: x * part(x * 1), mode="PIECEWISE")
        for value in (3.0, 5.0, 2.0):
            assert torch.equal(run(x=rows(4, value)), rows(4, value * value))
            assert run.last_dispatch.reason is Reason.HIT


def test_an_eager_part_that_returns_a_flag_is_advised_torch_where():
    part = eager_break(lambda x: bool(x.max() > 3))
    forward = lambda x: x * 10 if part(x * 1) else x + 1  # noqa: E731
    with pytest.warns(errors.BreakWarning, match=r"torch\.where\(flag, a, b\)"):
        run = captured(forward, mode="PIECEWISE")
    for value, result in ((1.0, 2.0), (2.0, 3.0)):
        assert torch.equal(run(x=rows(4, value)), rows(4, result))
    # The other branch first runs at a served step, which is no trial: its result is right.
    with pytest.warns(errors.GraphQuarantinedWarning, match=r"torch\.where\(flag, a, b\)"):
        assert torch.equal(run(x=rows(4, 4.0)), rows(4, 40.0))
    flag = eager_break(lambda x: x.max() > 3)
    run = captured(lambda x: torch.where(flag(x * 1), x * 10, x + 1), mode="PIECEWISE")
    for value, result in ((1.0, 2.0), (4.0, 40.0), (2.0, 3.0)):
        assert torch.equal(run(x=rows(4, value)), rows(4, result))
        assert run.last_dispatch.reason is Reason.HIT


def test_a_forward_with_a_branch_on_data_is_advised_an_eager_break_of_new_tensors():
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.max() > 3:
            return x * 10
        return x + 1

    advice = advice_of(captured, forward, mode="FULL")
    assert "@eager_break" in advice and "return new tensors, in every branch" in advice
    run = captured(eager_break(forward), mode="PIECEWISE")
    for value, result in ((1.0, 2.0), (4.0, 40.0), (2.0, 3.0)):
        assert torch.equal(run(x=rows(4, value)), rows(4, result))


def test_a_step_that_has_written_state_before_its_break_is_not_run_twice():
    """Its segments would add to the state again: the error is raised, as nothing else is right."""
    state = torch.zeros(1)
    part = eager_break(lambda x: bool(x.max() > 3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * 10 if part(x * 1) else x + state

    with pytest.warns(errors.BreakWarning):
        run = captured(forward, mode="PIECEWISE")
    for step in (1, 2):
        assert torch.equal(run(x=rows(4)), rows(4, 1.0 + step))
    with pytest.raises(errors.BakedScalarError, match=r"torch\.where"):
        run(x=rows(4, 4.0))
    assert state.item() == 3


# Advice of errors and of docs/troubleshooting.md, as it is told ---------------------------------


def replayed(
    forward: Callable[..., Any], expected: Callable[[torch.Tensor], Any], **options: Any
) -> None:
    """Follow: every step of this forward is a replay, and right."""
    run = captured(forward, **{"sizes": [4], **options})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (1.0, 5.0, 2.0):
            x = rows(4, value)
            assert torch.equal(run(x=x.clone()), expected(x))
            assert run.last_dispatch is not None and run.last_dispatch.reason is Reason.HIT


class Scaled(torch.nn.Module):
    """A Python number that its host changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_changed_number_given_a_variant_that_bind_sets_is_served_by_graphs():
    model = Scaled()
    scales = {"plain": 1.0, "double": 2.0}

    def bind(buffers: Any, descriptor: BatchDescriptor, phase: str) -> None:
        model.scale = scales[descriptor.variant]

    run = captured(model, sizes=[4], variants=list(scales), host=Host(bind=bind))
    for variant in ("plain", "double", "plain", "double"):
        out = run(Batch(4, 4, 1, variant=variant), x=rows(4))
        assert torch.equal(out, rows(4, scales[variant]))
        assert run.last_dispatch.reason is Reason.HIT


def test_a_changed_number_passed_as_an_input_is_served_by_a_graph():
    inputs = {"x": X, "scale": InputSpec(torch.float32, (1,))}
    run = captured(lambda x, scale: x * scale, sizes=[4], inputs=inputs)
    for scale in (1.0, 2.0, 3.0):
        assert torch.equal(run(x=rows(4), scale=torch.tensor([scale])), rows(4, scale))
        assert run.last_dispatch.reason is Reason.HIT


def test_a_tensor_of_a_changed_number_is_advised_fill_of_a_kept_tensor():
    model = Scaled()
    run = captured(lambda x: x * torch.tensor([model.scale]), sizes=[4])
    run(x=rows(4))
    model.scale = 2.0
    with pytest.warns(errors.GraphQuarantinedWarning, match=r"write it in place \(fill_, copy_\)"):
        assert torch.equal(run(x=rows(4)), rows(4, 2.0))
    kept = torch.ones(1)
    run = captured(lambda x: x * kept, sizes=[4])
    for scale in (1.0, 2.0, 3.0):
        kept.fill_(scale)
        assert torch.equal(run(x=rows(4)), rows(4, scale))
        assert run.last_dispatch.reason is Reason.HIT


def test_a_seeded_generator_is_advised_an_eager_break_that_seeds_and_draws():
    generator = torch.Generator()

    def noise(x: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(3)
        return torch.rand(4, generator=generator)

    run = captured(lambda x: x + noise(x), sizes=[4])
    with pytest.warns(errors.GraphQuarantinedWarning, match="or seed and draw in an eager break"):
        run(x=rows(4))
    drawn = noise(rows(1))
    part = eager_break(noise)
    replayed(lambda x: x + part(x * 1), lambda x: x + drawn, mode="PIECEWISE")


def test_a_transform_around_an_eager_part_is_advised_a_mark_on_its_caller():
    part = eager_break(lambda row: row * 2)
    advice = advice_of(captured, lambda x: torch.vmap(part)(x * 1), mode="PIECEWISE")
    assert advice == "mark the function that calls torch.vmap @eager_break"
    whole = eager_break(lambda x: torch.vmap(lambda row: row * 2)(x))
    replayed(lambda x: whole(x * 1) + 0, lambda x: x * 2, mode="PIECEWISE")


def test_a_tensor_that_an_eager_part_reads_by_an_attribute_is_advised_as_an_argument():
    class Hidden(torch.nn.Module):
        query: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.query = x * 2
            return eager_break(lambda y: y + self.query)(x * 1) + 0

    advice = advice_of(captured, Hidden(), mode="PIECEWISE")
    assert advice == "pass it as an argument of the eager part"
    part = eager_break(lambda y, query: y + query)
    replayed(lambda x: part(x * 1, x * 2) + 0, lambda x: x * 3, mode="PIECEWISE")


@pytest.mark.parametrize("how", ["return it", "make it once"])
def test_a_tensor_that_an_eager_part_leaves_in_an_attribute_is_advised_two_ways(how):
    class Leaves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = torch.zeros(4, 4)

        def part(self, y: torch.Tensor) -> torch.Tensor:
            self.key = y * 3
            return y * 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return eager_break(self.part)(x * 1) + self.key

    advice = advice_of(captured, Leaves(), mode="PIECEWISE")
    assert "return it from the eager part" in advice and "write into it (copy_, out=)" in advice
    if how == "return it":
        part = eager_break(lambda y: (y * 1, y * 3))
        replayed(lambda x: sum(part(x * 1)), lambda x: x * 4, mode="PIECEWISE")
        return
    key = torch.zeros(4, 4)

    def writes(y: torch.Tensor) -> torch.Tensor:
        key[: len(y)].copy_(y * 3)
        return y * 1

    part = eager_break(writes)
    replayed(lambda x: part(x * 1) + key[: len(x)], lambda x: x * 4, mode="PIECEWISE")


def test_a_setting_around_an_eager_part_is_advised_to_be_entered_inside():
    math = torch.nn.attention.SDPBackend.MATH

    def around(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(math):
            return eager_break(lambda y: y * 2)(x * 1) + 0

    assert advice_of(captured, around, mode="PIECEWISE").startswith("enter it inside of the eager")

    @eager_break
    def inside(y: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(math):
            return y * 2

    replayed(lambda x: inside(x * 1) + 0, lambda x: x * 2, mode="PIECEWISE")


def test_a_mean_over_rows_is_advised_a_mask_that_works():
    run = captured(lambda x: x - x.mean(0), sizes=[4])
    x = torch.arange(12.0).view(3, 4)
    with pytest.warns(errors.GraphQuarantinedWarning, match="mask the padding rows"):
        run(x=x)
    inputs = {"x": X, "mask": InputSpec(torch.float32, ("tokens", 1), pad=0)}
    run = captured(lambda x, mask: x - (x * mask).sum(0) / mask.sum(0), sizes=[4], inputs=inputs)
    for count in (3, 4, 2):
        x = torch.arange(4.0 * count).view(count, 4)
        assert torch.allclose(run(x=x, mask=torch.ones(count, 1)), x - x.mean(0))
        assert run.last_dispatch.reason is Reason.HIT


def test_metadata_read_in_a_graph_is_advised_an_eager_break_and_a_bound_that_work():
    def scaled(x: torch.Tensor) -> torch.Tensor:
        metadata = current_context().metadata
        return x * (1.0 if metadata is None else metadata["scale"])

    advice = advice_of(captured, scaled)
    assert "in an eager break (under PIECEWISE), where it is None in warm-ups" in advice
    part = eager_break(scaled)
    run = captured(lambda x: part(x * 1) + 0, mode="PIECEWISE", sizes=[4])
    for scale in (1.0, 3.0, 2.0):
        assert torch.equal(run(x=rows(4), metadata={"scale": scale}), rows(4, scale))
        assert run.last_dispatch.reason is Reason.HIT
    assert "Host(metadata=...)" in advice
    bound = Host(metadata=lambda descriptor: {"scale": 5.0})
    replayed(scaled, lambda x: x * 5, host=bound)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes; the log has them")
def test_an_eager_part_without_metadata_in_a_warm_up_is_told_so():
    part = eager_break(lambda x: x * current_context().metadata["scale"])
    with pytest.raises(TypeError) as caught:
        captured(lambda x: part(x * 1), mode="PIECEWISE")
    assert any("current_context().metadata is None" in note for note in caught.value.__notes__)


def test_a_sparse_result_is_advised_to_dense_in_an_eager_break():
    advice = advice_of(captured, lambda x: (x * 1).to_sparse(), outputs=None)
    assert advice.startswith("return to_dense() of it, from an @eager_break if the device cannot")
    part = eager_break(lambda y: y.to_sparse().to_dense())
    replayed(lambda x: part(x * 1), lambda x: x, mode="PIECEWISE")


@pytest.mark.parametrize("how", ["returned", "copied", "left by an eager part"])
def test_a_tensor_left_in_python_is_advised_three_ways(how):
    class Leaves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.zeros(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            self.last = x * 2
            return x + 1

    class Copies(Leaves):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last[: len(x)].copy_(x * 2)
            return x + 1

    class Keeps(Leaves):
        def keep(self, value: torch.Tensor) -> None:
            self.last = value.clone()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            eager_break(self.keep)(x * 2)
            return x + 1

    with pytest.warns(errors.StaleTensorWarning, match="return them, copy_") as warned:
        captured(Leaves(), sizes=[4])
    assert "leave clones of them in an @eager_break" in str(warned[0].message)
    if how == "returned":
        run = captured(lambda x: (x + 1, x * 2), sizes=[4], outputs=None)
        for value in (1.0, 3.0):
            assert torch.equal(run(x=rows(4, value))[1], rows(4, value * 2))
        return
    model = Copies() if how == "copied" else Keeps()
    run = captured(model, sizes=[4], mode="FULL" if how == "copied" else "PIECEWISE")
    for value in (1.0, 3.0, 2.0):
        assert torch.equal(run(x=rows(4, value)), rows(4, value + 1))
        assert torch.equal(model.last, rows(4, value * 2))
        assert run.last_dispatch.reason is Reason.HIT
