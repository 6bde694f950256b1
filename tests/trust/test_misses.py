"""Steps that no graph serves: the forward reads inputs in the caller's memory, where it can."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt import Batch, GraphOptions, GraphRunner, Host, InputSpec
from graphrt.core.runner.contract import Step
from graphrt.errors import InvalidInputError, StaleTensorWarning, VerificationError

pytestmark = pytest.mark.filterwarnings("error::graphrt.errors.StaleTensorWarning")
ROWS = 7
"""More rows than any graph has."""
SPECS = {
    "x": InputSpec(torch.float32, ("tokens", 3)),
    "y": InputSpec(torch.float32, ("tokens", 3)),
    "ids": InputSpec(torch.int64, ("tokens",)),
}


def captured(forward: Callable[..., Any], **options: Any) -> GraphRunner:
    runner = GraphRunner(
        forward,
        inputs=SPECS,
        mode="FULL",
        sizes=[2, 4],
        platform="cpu",
        options=GraphOptions(**options) if options else None,
    )
    runner.capture()
    return runner


def inputs(rows: int = ROWS) -> dict[str, torch.Tensor]:
    x, y = torch.randn(2, rows, 3)
    return {"x": x.clone(), "y": y.clone(), "ids": torch.randint(0, 9, (rows,))}


class Seen:
    """A forward that notes where its inputs were at each miss; `then` does more with them."""

    def __init__(self, then: Callable[..., Any] = lambda x, y, ids: None) -> None:
        self.addresses: list[dict[str, int]] = []
        self.then = then

    def __call__(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> Any:
        if len(x) == ROWS:
            self.addresses.append({"x": x.data_ptr(), "y": y.data_ptr(), "ids": ids.data_ptr()})
            self.then(x, y, ids)
        return x * 2 + y + ids[:, None]

    def lent(self, given: dict[str, torch.Tensor]) -> set[str]:
        """The inputs that the last miss read in the caller's memory."""
        last = self.addresses[-1]
        return {name for name, value in given.items() if value.data_ptr() == last[name]}


def test_a_miss_reads_inputs_in_the_callers_memory():
    forward = Seen()
    with captured(forward) as runner:
        for _ in range(3):
            given = inputs()
            before = {name: value.clone() for name, value in given.items()}
            outputs = runner(**given)
            assert forward.lent(given) == {*given}
            assert torch.equal(outputs, before["x"] * 2 + before["y"] + before["ids"][:, None])


def negated(value: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-value)


def made_in_inference_mode(value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return value.clone()


COPIED = {
    "other strides": lambda value: value.t().contiguous().t(),
    "a gradient": lambda value: value.requires_grad_(),
    "a parameter": torch.nn.Parameter,
    "lazily negated": negated,
    "made in inference mode": made_in_inference_mode,
    "in foreign memory": lambda value: torch.frombuffer(
        bytearray(value.numpy().tobytes()), dtype=value.dtype
    ).view(value.shape),
}


@pytest.mark.parametrize("change", COPIED)
def test_an_input_that_a_copy_would_change_is_copied(change: str) -> None:
    forward = Seen()
    with captured(forward) as runner:
        given = inputs()
        given["x"] = COPIED[change](given["x"])
        expected = (given["x"] * 2 + given["y"] + given["ids"][:, None]).detach()
        outputs = runner(**given)
        assert torch.equal(outputs, expected)
        # A parameter is no plain tensor: then all are copied.
        assert forward.lent(given) == (set() if change == "a parameter" else {"y", "ids"})


def test_an_input_in_the_runners_buffers_or_an_output_of_the_last_step_is_copied() -> None:
    forward = Seen()
    runner = GraphRunner(
        forward, inputs=SPECS, mode="FULL", sizes=[2, 8], max_num_tokens=8, platform="cpu"
    )
    runner.capture()
    given = inputs(8)
    step = runner(**given)
    given = {"x": step[:ROWS], "y": runner.inputs.buffers["y"][:ROWS], "ids": given["ids"][:ROWS]}
    expected = given["x"] * 2 + given["y"] + given["ids"][:, None]
    eager = Batch(ROWS, exclude=frozenset({runner.mode}))
    assert torch.equal(runner(eager, **given), expected)
    assert "y" not in forward.lent(given) and "ids" in forward.lent(given)


@pytest.mark.parametrize("options", [{"check": "off"}, {"check": "always"}])
def test_without_checks_and_in_trials_a_miss_runs_on_copies(options: dict[str, Any]) -> None:
    forward = Seen(lambda x, y, ids: x.add_(1) if options["check"] == "off" else None)
    with captured(forward, **options) as runner:
        given = inputs()
        before = given["x"].clone()
        runner(**given)
        assert torch.equal(given["x"], before)
        if options["check"] == "off":
            assert forward.lent(given) == set()


def test_a_forward_whose_watched_run_writes_an_input_has_copies() -> None:
    addresses = []

    def forward(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        addresses.append(x.data_ptr())
        return x.add_(y) + ids[:, None]

    with captured(forward) as runner:
        given = inputs()
        before = given["x"].clone()
        outputs = runner(**given)
        assert torch.equal(outputs, before + given["y"] + given["ids"][:, None])
        assert torch.equal(given["x"], before)


def test_a_write_at_a_miss_alone_names_the_input_and_later_misses_run_on_copies() -> None:
    forward = Seen(lambda x, y, ids: y.add_(1))
    with captured(forward) as runner:
        with pytest.raises(VerificationError, match="written input 'y'"):
            runner(**inputs())
        for _ in range(2):
            given = inputs()
            before = given["y"].clone()
            outputs = runner(**given)
            assert torch.equal(given["y"], before)
            assert torch.equal(outputs, given["x"] * 2 + (before + 1) + given["ids"][:, None])
            assert forward.lent(given) == set()


def test_an_input_reshaped_in_place_at_a_miss_keeps_its_shape_for_the_caller() -> None:
    forward = Seen()

    def reshaping(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if len(x) == ROWS:
            x.t_()
            x = x.t()
        return forward(x, y, ids)

    with captured(reshaping) as runner:
        for _ in range(2):
            given = inputs()
            outputs = runner(**given)
            assert torch.equal(outputs, given["x"] * 2 + given["y"] + given["ids"][:, None])
            assert given["x"].shape == (ROWS, 3)
            assert forward.lent(given) == {*given}


def test_an_output_that_shares_memory_with_an_input_is_a_clone() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> Any:
        return {"x": x, "part": y[:, 1:], "sum": x + y}

    with captured(forward) as runner:
        given = inputs()
        before = {name: value.clone() for name, value in given.items()}
        outputs = runner(**given)
        for value in outputs.values():
            value.zero_()
        assert all(torch.equal(given[name], before[name]) for name in given)


def test_an_input_that_the_forward_keeps_is_named_once_and_later_misses_run_on_copies() -> None:
    kept: dict[str, torch.Tensor] = {}
    forward = Seen(lambda x, y, ids: kept.update(last=y[1:]))
    forward.kept = kept  # type: ignore[attr-defined]
    with captured(forward) as runner:
        with pytest.warns(StaleTensorWarning, match=r"'y' at .*last"):
            runner(**inputs())
        with warnings.catch_warnings():
            warnings.simplefilter("error", StaleTensorWarning)
            given = inputs()
            runner(**given)
        assert forward.lent(given) == set()
        assert torch.equal(kept["last"], given["y"][1:])


def test_garbage_that_holds_an_input_is_no_finding() -> None:
    def cycle(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
        held: list[Any] = [x]
        held.append(held)

    gc.disable()
    try:
        with captured(Seen(cycle)) as runner, warnings.catch_warnings():
            warnings.simplefilter("error", StaleTensorWarning)
            for _ in range(3):
                runner(**inputs())
    finally:
        gc.enable()


def test_an_input_in_memory_that_the_forward_holds_is_copied() -> None:
    """Of a KV cache the host may give a part as an input, which the forward writes as its state."""
    cache = torch.zeros(20, 3)

    def forward(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        cache[: len(x)].add_(1)
        return x + y + ids[:, None]

    with captured(forward) as runner:
        cache.zero_()
        given = inputs() | {"x": cache[:ROWS]}
        assert torch.equal(runner(**given), given["y"] + given["ids"][:, None])
        assert torch.equal(cache[:ROWS], torch.ones(ROWS, 3))


def test_rows_with_gaps_are_copied_after_one_row_of_the_same_stride() -> None:
    """A row alone is contiguous whatever its stride."""
    forward = Seen()
    rows = {ROWS: torch.randn(ROWS, 6)[:, :3]}
    rows[1] = rows[ROWS][:1]
    with captured(forward) as runner:
        for count in (1, ROWS, 1, ROWS):
            given = inputs(count) | {"x": rows[count]}
            batch = Batch(count, exclude=frozenset({runner.mode}))
            expected = given["x"] * 2 + given["y"] + given["ids"][:, None]
            assert torch.equal(runner(batch, **given), expected)
        assert forward.lent(given) == {"y", "ids"}


def test_a_bind_and_trials_get_copies() -> None:
    bound: list[int] = []
    forward = Seen()
    runner = GraphRunner(
        forward,
        inputs=SPECS,
        mode="FULL",
        sizes=[2, 8],
        platform="cpu",
        host=Host(bind=lambda views, *_: bound.append(views["x"].data_ptr())),
    )
    runner.capture()
    given, eager = inputs(), Batch(ROWS, exclude=frozenset({runner.mode}))
    runner(eager, **given)
    assert bound[-1] != given["x"].data_ptr()
    with captured(forward) as runner:
        assert runner.graphs.checks.lends() is not None
        batch = Batch(ROWS)
        step = Step(batch, runner.dispatcher.dispatch(batch), given)
        # As a trial does, which runs it under a watch.
        runner._in_turn(lambda: runner._executor.run_unpadded(step, lambda run: run()))
        assert forward.lent(given) == set()


class Operators(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_host_sees_the_operators_of_the_forward_alone() -> None:
    with captured(lambda x, y, ids: x * 2 + y + ids[:, None]) as runner:
        given = inputs()
        with Operators() as mode:
            runner(**given)
        assert [name for name in mode.seen if "detach" not in name] == [
            "aten::mul.Tensor",
            "aten::add.Tensor",
            "aten::unsqueeze",
            "aten::add.Tensor",
        ]
        assert sum("detach" in name for name in mode.seen) <= 1  # of the output


def test_an_input_whose_memory_was_freed_is_named() -> None:
    with captured(Seen()) as runner:
        given = inputs()
        runner(**given)
        given["x"].untyped_storage().resize_(0)
        with pytest.raises(InvalidInputError, match="'x' has no rows in memory"):
            runner(**given)


LAYOUTS = ("fresh", "sliced", "strided", "alias", "gradient", "inference", "negated", "output")


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_misses_equal_eager_on_the_same_inputs(data: st.DataObject) -> None:
    """Of random layouts, dtypes and aliases; of forwards that write, return or reshape them."""
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
              for _ in range(3)]  # fmt: skip
    specs = {f"x{n}": InputSpec(dtype, ("tokens", 2)) for n, dtype in enumerate(dtypes)}
    written = data.draw(st.sampled_from([None, *specs]))
    returned = data.draw(st.lists(st.sampled_from([*specs]), max_size=2))
    when = data.draw(st.sampled_from(["always", "at misses"]))

    def forward(**given: torch.Tensor) -> Any:
        rows = len(given["x0"])
        if written is not None and (when == "always" or rows > 4):
            given[written].copy_(given[written].flip(0))
        total = sum(value.double() * (n + 1) for n, value in enumerate(given.values()))
        return [total, *(given[name][:, :1] for name in returned)]

    runner = GraphRunner(forward, inputs=specs, mode="FULL", sizes=[2, 4], platform="cpu")
    runner.capture()
    last: Any = None
    for _ in range(4):
        rows = data.draw(st.integers(5, 9))
        given = {}
        for name, spec in specs.items():
            given[name] = laid_out(data, spec.dtype, rows, given, last)
        before = {name: value.detach().clone() for name, value in given.items()}
        expected = forward(**{name: value.clone() for name, value in before.items()})
        try:
            last = runner(**given)
        except VerificationError as error:
            named = str(error)
        else:
            named = ""
        if named:
            assert when == "at misses" and f"{written!r}" in named
            return
        assert all(map(torch.equal, last, expected))
        for each in last:
            each.clone()
            each.zero_()
        assert all(torch.equal(given[name].detach(), before[name]) for name in given)
        last = expected


def laid_out(
    data: st.DataObject, dtype: torch.dtype, rows: int, others: dict[str, Any], last: Any
) -> torch.Tensor:
    value = torch.randint(0, 5, (rows, 2)).to(dtype)
    layout = data.draw(st.sampled_from(LAYOUTS))
    if layout == "sliced":
        return torch.cat([value, value])[1 : rows + 1]
    if layout == "strided":
        return value.t().contiguous().t()
    if layout == "alias":
        return next((each.detach() for each in others.values() if each.dtype is dtype), value)
    if layout == "gradient" and dtype.is_floating_point:
        return value.requires_grad_()
    if layout == "inference":
        return made_in_inference_mode(value)
    if layout == "negated" and dtype.is_floating_point:
        return negated(value)
    if layout == "output" and last is not None and last[0].dtype is dtype:
        return last[0] if len(last[0]) == rows else value
    return value
