"""The advice in error messages works: each case fails, follows the advice, and then runs."""

from __future__ import annotations

import functools
import re
import traceback
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
    Plan,
    Reason,
    State,
    UpdatableTask,
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
    advice = advice_of(run, x=rows(3))
    assert advice == "return one dtype at every step: .to(torch.float32)"
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
    assert "return a fresh tensor always (y.clone()" in advice_of(run, x=rows(3, 4.0))
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


def test_opaque_applied_to_a_non_callable_raises():
    with pytest.raises(GraphRTError, match="'function' cannot be called"):
        graphrt.opaque("graphrt_following::none", mutates=[])(None)
