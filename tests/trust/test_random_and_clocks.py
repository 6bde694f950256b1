"""Random numbers, clocks and normalized weights: right programs that no trial may refuse."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason, eager_break
from graphrt.errors import GraphQuarantinedWarning

WIDTH = 8
X = InputSpec(torch.float32, ("tokens", WIDTH))
COUNTS = (4, 3, 2, 3, 1, 4, 6, 3)


def runner_of(forward: Callable[..., Any], mode: str = "FULL", level: str = "capture") -> Any:
    runner = GraphRunner(
        forward,
        mode=mode,
        sizes=[1, 2, 4],
        inputs={"x": X},
        platform="cpu",
        options=GraphOptions(check=level),
    )
    runner.capture()
    return runner


def goes_on(forward: Callable[..., Any], mode: str = "FULL", level: str = "capture") -> Any:
    """A runner of which every step that has a graph was replayed, and nothing was said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = runner_of(forward, mode, level)
        for seed, count in enumerate(COUNTS):
            generator = torch.Generator().manual_seed(seed)
            runner(x=torch.randn(count, WIDTH, generator=generator))
            wanted = Reason.HIT if count <= 4 else Reason.TOO_LARGE
            assert runner.last_dispatch.reason is wanted
    return runner


linear = nn.Linear(WIDTH, WIDTH)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(linear(x), 0.5, True)


DRAWING = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "twice": lambda x: torch.randn_like(x) + x * torch.randn_like(x),
    "dropout": lambda x: dropped(dropped(dropped(x))),
    "in inference mode": torch.inference_mode()(
        lambda x: torch.rand(x.shape) + torch.rand_like(x) + torch.rand(x.shape[0])[:, None]
    ),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) + torch.rand_like(x),
    "multinomial": lambda x: (
        torch.multinomial(torch.softmax(x, -1), 3)
        + torch.multinomial(torch.softmax(x, -1), 3, replacement=True)
    ),
    "exponential": lambda x: (
        torch.empty_like(x).exponential_() + torch.empty_like(x).exponential_()
    ),
    "poisson": lambda x: torch.poisson(torch.exp(x)) + torch.rand_like(x),
    "gumbel": lambda x: functional.gumbel_softmax(x, hard=True) + torch.rand_like(x),
    "alpha dropout": lambda x: functional.alpha_dropout(x, training=True) + torch.rand_like(x),
    "columns": lambda x: torch.rand(3, x.shape[0]).t() + torch.rand_like(x[:, :3]),
    "flat": lambda x: (x.flatten() + torch.rand(x.numel())).view_as(x) + torch.rand_like(x),
    "integers": lambda x: torch.randint(0, 9, (x.shape[0],)) + torch.randint(0, 9, (x.shape[0],)),
    "normal": lambda x: torch.normal(x, 1.0) + torch.normal(0.0, 1.0, x.shape),
    "attention": lambda x: (
        functional.scaled_dot_product_attention(*[x.view(-1, 1, 2, 4)] * 3, dropout_p=0.3).flatten(
            1
        )
        + torch.rand_like(x)
    ),
}


@pytest.mark.parametrize("level", ["capture", "always"])
@pytest.mark.parametrize("name", DRAWING)
def test_a_forward_that_draws_random_rows_is_replayed_without_warnings(name, level):
    goes_on(DRAWING[name], level=level)


@pytest.mark.parametrize("name", ["twice", "dropout", "multinomial", "normal"])
def test_an_eager_part_that_draws_random_rows_is_replayed_without_warnings(name):
    part = eager_break(DRAWING[name])
    goes_on(lambda x: part(x + 1) + 1, "PIECEWISE")


def test_draws_from_a_generator_of_the_forward_are_replayed_without_warnings():
    own = torch.Generator().manual_seed(3)
    part = eager_break(lambda x: x + torch.randn(x.shape, generator=own))
    goes_on(lambda x: part(part(x + 1)) + 1, "PIECEWISE")
    goes_on(lambda x: x + torch.rand(x.shape, generator=own) + torch.rand(x.shape, generator=own))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_generator_of_the_forwards_own_goes_on_from_step_to_step(mode):
    own, twin = (torch.Generator().manual_seed(3) for _ in range(2))

    def forward(x, generator=own):
        return x + torch.rand(x.shape, generator=generator)

    runner = runner_of(forward, mode)
    for count in (4, 4, 2, 4, 1, 2):
        x = torch.randn(count, WIDTH)
        assert torch.equal(runner(x=x), forward(x, twin))
        assert runner.last_dispatch.reason is Reason.HIT
    # The host seeds it between two steps.
    own.manual_seed(5)
    twin.manual_seed(5)
    assert torch.equal(runner(x=x), forward(x, twin))


def test_a_harmless_change_is_no_quarantine_in_a_forward_with_a_generator_of_its_own():
    """Each operator is given the generator as another Python object."""
    held = types.SimpleNamespace(own=torch.Generator().manual_seed(3), step=0)

    def forward(x):
        return x + torch.rand(x.shape, generator=held.own)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = runner_of(forward)
        for step in range(12):
            held.step = step
            runner.weights_changed()
            runner(x=torch.randn(4, WIDTH))
            assert runner.last_dispatch.reason is Reason.HIT


OWN = torch.Generator()


def seeded_first(x):
    OWN.manual_seed(1)
    return x + torch.rand(x.shape, generator=OWN)


def seeded_last(x):
    y = x + torch.rand(x.shape, generator=OWN)
    OWN.manual_seed(1)
    return y


def put_back(x):
    state = OWN.get_state()
    y = x + torch.rand(x.shape, generator=OWN)
    OWN.set_state(state)
    return y


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return x + torch.rand_like(x)


@torch.library.custom_op("graphrt_test_draws::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("pause_s", [0, 2e-4, 1e-3, 5e-3])
@pytest.mark.parametrize("operator", [torch.relu, doubled], ids=["of torch", "of the host's"])
def test_another_thread_may_draw_during_the_trials_of_a_forward_that_draws_nothing(
    operator, pause_s
):
    """torch does not say of an operator of the host's whether it draws."""
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            torch.rand(1)
            if pause_s:
                time.sleep(pause_s)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(10):
            goes_on(lambda x: operator(linear(x)), level="always")
    finally:
        done.set()
        thread.join()


SEEDING = [seeded_first, seeded_last, put_back, forked]


@pytest.mark.parametrize("forward", SEEDING, ids=lambda each: each.__name__)
def test_a_forward_that_seeds_a_generator_or_puts_its_state_back_is_named(forward):
    OWN.manual_seed(1)
    runner = runner_of(forward)
    x = torch.randn(4, WIDTH)
    with pytest.warns(GraphQuarantinedWarning, match="the forward seeds a generator"):
        runner(x=x)
    state, default = OWN.get_state(), torch.get_rng_state()
    wanted = forward(x)
    OWN.set_state(state)
    torch.set_rng_state(default)
    assert torch.equal(runner(x=x), wanted)


@pytest.mark.parametrize("forward", SEEDING, ids=lambda each: each.__name__)
def test_an_eager_part_may_seed_a_generator(forward):
    OWN.manual_seed(1)
    part = eager_break(forward)
    goes_on(lambda x: part(x + 1) + 1, "PIECEWISE")


MIXING = {
    "after": lambda x: x - x.mean(0) + torch.rand_like(x),
    "before": lambda x: torch.rand_like(x) * 0 + x - x.mean(0),
    "in place": lambda x: (torch.empty_like(x).uniform_() + x).cumsum(0).flip(0),
}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", MIXING)
def test_mixed_rows_are_found_in_a_forward_that_also_draws_random_numbers(name, mode):
    part = eager_break(lambda x: MIXING[name](torch.rand_like(x) + x))
    forward = MIXING[name] if mode == "FULL" else lambda x: part(x + 1) + 1
    runner = runner_of(forward, mode)
    runner(x=torch.randn(4, WIDTH))
    with pytest.warns(GraphQuarantinedWarning, match="other padding rows change"):
        runner(x=torch.randn(3, WIDTH))


# Generators and clocks of eager parts ------------------------------------------------------------


def parts() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Eager parts that give something else at every call, each with generators of its own."""
    dice, numpy_dice = random.Random(3), np.random.default_rng(3)
    old_dice = np.random.RandomState(3)

    def by_rows(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([random.random() for _ in x])[:, None]

    def by_numpy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(numpy_dice.standard_normal(x.shape).astype("float32"))

    def in_place(x: torch.Tensor) -> torch.Tensor:
        x.add_(time.perf_counter() % 1)
        return x

    return {
        "Python's": lambda x: x + random.random(),
        "Python's, by rows": lambda x: by_rows(by_rows(x)),
        "an own one of Python": lambda x: x + dice.random(),
        "an own one of NumPy": lambda x: by_numpy(by_numpy(x)),
        "an old one of NumPy": lambda x: x + old_dice.rand(),
        "a clock": lambda x: x + time.perf_counter() % 1,
        "a clock, in place": in_place,
        "the system": lambda x: x + int.from_bytes(os.urandom(4), "big") / 2**32,
    }


@pytest.mark.parametrize("level", ["capture", "always"])
@pytest.mark.parametrize("name", parts())
def test_clocks_and_random_draws_in_an_eager_part_are_replayed_without_warnings(name, level):
    part = eager_break(parts()[name])
    goes_on(lambda x: part(x + 1) * 2, "PIECEWISE", level)


@pytest.mark.parametrize("name", ["Python's", "an own one of Python", "an own one of NumPy"])
def test_a_tried_step_advances_python_and_numpy_generators_as_a_plain_step(name):
    """Generators that only the forward has are put back after captures and trials too."""
    part, twin = eager_break(parts()[name]), parts()[name]
    random.seed(5)
    runner = runner_of(lambda x: part(x + 1) * 2, "PIECEWISE")
    got = [runner(x=torch.ones(4, WIDTH)).clone() for _ in range(3)]
    random.seed(5)
    for each in got:
        assert torch.equal(each, twin(torch.ones(4, WIDTH) + 1) * 2)


def coarse() -> float:
    """A clock that is never twice the same in a trial, nor nearly so."""
    return time.perf_counter() * 1000 % 64


@pytest.mark.parametrize("where", ["captured", "both", "argument"])
def test_a_clock_read_in_a_captured_piece_is_found(where):
    part = eager_break(lambda x, now: x + (coarse() if where == "both" else now * 0))

    def forward(x: torch.Tensor) -> torch.Tensor:
        now = coarse()
        y = part(x + 1, now if where == "argument" else 0.0)
        return y * 2 if where == "argument" else y + now

    runner = runner_of(forward, "PIECEWISE")
    if where == "argument":
        # It reaches no output here.
        runner(x=torch.randn(4, WIDTH))
        return
    with pytest.warns(GraphQuarantinedWarning, match="two eager runs"):
        runner(x=torch.randn(4, WIDTH))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_python_or_numpy_draw_in_a_captured_piece_is_named_by_the_warning(draw):
    runner = runner_of(lambda x: x * float(draw()))
    with pytest.warns(GraphQuarantinedWarning, match="repeats those that Python and NumPy drew"):
        runner(x=torch.randn(4, WIDTH))


def test_mixed_rows_are_found_in_an_eager_part_that_also_draws_random_numbers():
    def mixed(x: torch.Tensor) -> torch.Tensor:
        noise = torch.tensor([random.random() for _ in x])[:, None]
        return x - x.mean(0) + noise

    part = eager_break(lambda x: mixed(mixed(x)))
    runner = runner_of(lambda x: part(x + 1) * 2, "PIECEWISE")
    runner(x=torch.randn(4, WIDTH))
    with pytest.warns(GraphQuarantinedWarning, match="other padding rows change"):
        runner(x=torch.randn(3, WIDTH))


# Normalized weights ------------------------------------------------------------------------------


class Net(nn.Module):
    """A model with one normalized layer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def normalized(name: str) -> Net:
    torch.manual_seed(1)
    made = {
        "old weight norm": nn.utils.weight_norm,
        "weight norm": nn.utils.parametrizations.weight_norm,
        "old spectral norm": nn.utils.spectral_norm,
        "spectral norm": nn.utils.parametrizations.spectral_norm,
    }[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Net(made(nn.Linear(WIDTH, WIDTH)))


NORMS = ("old weight norm", "weight norm", "old spectral norm", "spectral norm")


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_normalized_weights_are_replayed_without_warnings(name, train, mode):
    with torch.no_grad():
        model, twin = normalized(name).train(train), normalized(name).train(train)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runner = runner_of(model, mode)
            for count in COUNTS * 3:
                x = torch.randn(count, WIDTH)
                assert torch.allclose(runner(x=x.clone()), twin(x), atol=1e-5)
                wanted = Reason.HIT if count <= 4 else Reason.TOO_LARGE
                assert runner.last_dispatch.reason is wanted
            # A new value in the old tensors is what graphs go on with.
            for own in (model, twin):
                dict(own.named_parameters())["body.bias"].fill_(3.0)
                list(own.parameters())[-1].mul_(2.0)
            x = torch.randn(3, WIDTH)
            assert torch.allclose(runner(x=x.clone()), twin(x), atol=1e-5)


@pytest.mark.parametrize("way", ["capture_next", "lazy"])
@pytest.mark.parametrize("name", NORMS)
def test_normalized_weights_raise_no_stale_tensor_warning_when_captured_graph_by_graph(name, way):
    model, twin = normalized(name).eval(), normalized(name).eval()
    options = GraphOptions(lazy=way == "lazy")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = GraphRunner(model, mode="FULL", sizes=[1, 2, 4], inputs={"x": X}, options=options)
        while way == "capture_next" and runner.capture_next().left:
            pass
        for count in (4, 3, 2, 1, 4):
            x = torch.randn(count, WIDTH)
            assert torch.allclose(runner(x=x.clone()), twin(x), atol=1e-5)
            assert runner.last_dispatch.reason is Reason.HIT


def test_an_attribute_computed_from_inputs_still_raises_a_stale_tensor_warning():
    from graphrt.errors import StaleTensorWarning

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.hidden = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = x @ self.weight
            return self.hidden + 1

    with pytest.warns(StaleTensorWarning, match=r"model\.hidden"):
        runner_of(Leaving())


def test_nearly_equal_draws_of_an_eager_part_do_not_fail_the_replay():
    def runner_over(values: Any) -> Any:
        part = eager_break(lambda x: x + next(values))
        return runner_of(lambda x: part(x + 1) * 2, "PIECEWISE")

    counter = itertools.count()
    runner_over(counter)
    # Eager, on padding, the replay, eager again, once more.
    of_trial = [0.5, 0.0, 0.9, 0.5 + 3e-6, 0.1]
    runner = runner_over(itertools.chain([0.0] * next(counter), of_trial, itertools.repeat(0.0)))
    runner(x=torch.randn(4, WIDTH))
    assert runner.last_dispatch.reason is Reason.HIT
