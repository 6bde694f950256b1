"""Values that eager parts record of live rows, or beside a clock, cause no quarantine."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason, current_context, eager_break
from graphrt.errors import GraphQuarantinedWarning

WIDTH = 64
X = InputSpec(torch.float32, ("tokens", 16))
COUNTS = (3, 1, 8, 2, 4, 5, 7, 3, 6, 8, 1, 2, 5, 4, 3, 7)


class Noting(nn.Module):
    """A model whose eager part does something with its rows, and is told how many are live."""

    def __init__(self, do: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.do = do
        self.held = SimpleNamespace(
            mean=0.0, scale=1.0, calls=0, rows=[], few=deque(maxlen=3), sizes={}, last=np.zeros(1)
        )

    @eager_break
    def part(self, x: torch.Tensor) -> torch.Tensor:
        context = current_context()
        live = None if context is None else context.live
        count = x.shape[0] if live is None else live.num_tokens
        made = self.do(self.held, x, count)
        return x * 1 if made is None else made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(self.first(x)))


def serve(do: Callable[..., Any], level: str, seed: int = 1) -> GraphRunner:
    model = Noting(do).eval()
    options = GraphOptions(check=level)
    runner = GraphRunner(
        model, mode="PIECEWISE", sizes=[1, 2, 4, 8], inputs={"x": X}, options=options
    )
    runner.capture()
    generator = torch.Generator().manual_seed(seed)
    for count in COUNTS:
        runner(x=torch.randn(count, 16, generator=generator))
    return runner


def rows(held: Any, x: torch.Tensor, count: int) -> None:
    held.rows.extend(x[:count, 0].tolist())


def rows_in_tuples(held: Any, x: torch.Tensor, count: int) -> None:
    held.rows.append((count, tuple(x[:count, 0].tolist())))


def mean(held: Any, x: torch.Tensor, count: int) -> None:
    held.mean = 0.9 * held.mean + 0.1 * x[:count].mean().item()


def arrays(held: Any, x: torch.Tensor, count: int) -> None:
    held.few.append(x[:count].detach().numpy().copy())


def last_array(held: Any, x: torch.Tensor, count: int) -> None:
    held.last = x[:count].detach().numpy().copy()


def used(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    """A scale that live rows move, by which the result goes."""
    held.scale = 0.5 * held.scale + 0.5 * x[:count].square().mean().item()
    return x * held.scale


@pytest.mark.parametrize("level", ["capture", "always"])
@pytest.mark.parametrize("do", [rows, rows_in_tuples, mean, arrays, last_array, used])
def test_numbers_noted_from_live_rows_may_differ_by_rounding_when_padded(do, level):
    """Products of other numbers of rows have other bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = serve(do, level)
    assert set(runner.report().reasons) >= {Reason.HIT}
    assert runner.report().reasons[Reason.HIT] == len(COUNTS)


def padding_rows(held: Any, x: torch.Tensor, count: int) -> None:
    held.rows.extend(x[:, 0].tolist())


def padding_in_the_mean(held: Any, x: torch.Tensor, count: int) -> None:
    held.mean = 0.999 * held.mean + 0.001 * x.mean().item()


def padding_in_an_array(held: Any, x: torch.Tensor, count: int) -> None:
    held.last = x.detach().numpy().copy()


def padding_by_halves(held: Any, x: torch.Tensor, count: int) -> None:
    held.mean = (held.mean or 1000.0) + x.shape[0] * 0.5


@pytest.mark.parametrize(
    "do", [padding_rows, padding_in_the_mean, padding_in_an_array, padding_by_halves]
)
def test_python_numbers_changed_by_padding_rows_are_noted_in_the_report(do):
    notes = [note for each in serve(do, "capture").report().trust.trials for note in each.notes]
    assert any("padded steps leave other Python state" in note for note in notes), notes


# Beside a clock -----------------------------------------------------------------------------------


def now() -> float:
    return time.perf_counter() % 1


def with_a_list(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    held.rows.append(count)
    return x + now()


def with_a_count(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    held.calls += 1
    return x + now()


def with_times(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    held.few.append(now())
    return x + held.few[-1]


def of_the_system(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    held.calls += 1
    return x + torch.from_numpy(np.random.default_rng().standard_normal(x.shape, "float32"))


@pytest.mark.parametrize("level", ["capture", "always"])
@pytest.mark.parametrize("do", [with_a_list, with_a_count, with_times, of_the_system])
def test_an_eager_part_that_counts_and_reads_a_clock_is_replayed_without_warnings(do, level):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = serve(do, level)
    assert runner.report().reasons[Reason.HIT] == len(COUNTS)


def test_a_call_counter_in_a_captured_piece_is_found_beside_a_clock():
    held = SimpleNamespace(calls=0)
    part = eager_break(lambda x: x + now() * 1e-3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        held.calls += 1
        return part(x + 1) * held.calls

    runner = GraphRunner(forward, mode="PIECEWISE", sizes=[4], inputs={"x": X})
    runner.capture()
    with pytest.warns(GraphQuarantinedWarning, match="calls"):
        runner(x=torch.randn(4, 16))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_counter_passed_to_an_eager_part_is_found_before_its_value_changes(by_name: bool) -> None:
    held = SimpleNamespace(calls=0)
    part = eager_break(lambda x, thousands: x + thousands)

    def forward(x: torch.Tensor) -> torch.Tensor:
        held.calls += 1
        thousands = held.calls // 1000
        return (part(x + 1, thousands=thousands) if by_name else part(x + 1, thousands)) * 2

    runner = GraphRunner(forward, mode="PIECEWISE", sizes=[4], inputs={"x": X})
    runner.capture()
    with pytest.warns(GraphQuarantinedWarning, match="calls"):
        runner(x=torch.randn(4, 16))


# From a warm-up -----------------------------------------------------------------------------------


def first_scale(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    if held.scale == 1.0:
        held.scale = x[:count].abs().max().item() + 2.0
    return x / held.scale


def largest(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    held.scale = max(held.scale, 1 + x[:count].abs().max().item())
    return x / held.scale


def words(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers in the order in which values came first."""
    for row in x[:count]:
        word = f"{row[0].item():.3f}"
        if word not in held.rows:
            held.rows.append(word)
    return x * len(held.rows)


def first_scale_noted(held: Any, x: torch.Tensor, count: int) -> None:
    if held.scale == 1.0:
        held.scale = x[:count].abs().max().item() + 2.0


def first_shape(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    if not held.rows:
        held.rows.append(x.shape[1])
    return x * held.rows[0]


def by_size(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    """The warm-ups of several sizes move it, so it is put back."""
    if count not in held.sizes:
        held.sizes[count] = 1 + x[:count].abs().max().item()
    return x / held.sizes[count]


def first_time(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    if held.scale == 1.0:
        held.scale = time.perf_counter()
    return x + (time.perf_counter() - held.scale) * 1e-6


def first_scale_of_what_is_written(held: Any, x: torch.Tensor, count: int) -> torch.Tensor:
    """It writes what it is given, which the model goes on with."""
    first_scale_noted(held, x, count)
    x.mul_(2)
    return x


@pytest.mark.parametrize(
    "do",
    [
        first_scale,
        largest,
        words,
        first_scale_noted,
        first_shape,
        by_size,
        first_time,
        first_scale_of_what_is_written,
    ],
)
def test_values_noted_by_only_the_first_run_are_replayed_without_warnings(do):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = serve(do, "capture")
    assert runner.report().reasons[Reason.HIT] == len(COUNTS)


def test_a_scale_noted_from_a_batch_before_capture_is_used_by_replays():
    model, twin = Noting(first_scale).eval(), Noting(first_scale).eval()
    runner = GraphRunner(model, mode="PIECEWISE", sizes=[4], inputs={"x": X})
    with torch.no_grad():
        x = torch.randn(4, 16)
        assert torch.equal(runner(x=x), twin(x))
        runner.capture()
        for _ in range(4):
            x = torch.randn(4, 16)
            assert torch.equal(runner(x=x), twin(x))
    assert runner.last_dispatch.reason is Reason.HIT


def test_replays_are_not_compared_where_eager_parts_differ_at_every_call(tmp_path):
    # In a file, where no trial puts it back.
    calls = tmp_path / "calls"
    calls.touch()

    def drawn():
        with calls.open("a") as file:
            file.write(".")
        count = calls.stat().st_size
        # After two runs of the capture: eager, padding, the replay and eager again.
        return 0.9 if count == 5 else 0.5 + 1e-3 * count

    part = eager_break(lambda x: x + drawn())
    runner = GraphRunner(
        lambda x: part(x * 1.0) * 1.0,
        mode="PIECEWISE",
        sizes=[2],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        options=GraphOptions(check="first"),
    )
    runner.capture()
    assert calls.stat().st_size == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner(x=torch.zeros(2, 4))
    assert runner.last_dispatch.reason is Reason.HIT
    (trial,) = runner.report().trust.trials
    assert not trial.deterministic
    assert any("replays are not compared" in note for note in trial.notes)
