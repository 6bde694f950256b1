"""Autocast keeps a cast of each weight as long as it is on: no graph may read that one."""

from __future__ import annotations

import pytest
import torch

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason, eager_break, opaque


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))

    @eager_break
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.relu()


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"lazy": True}, {"check": "off"}, {"warmups": 0}])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("kept", [False, True])
def test_weights_written_in_place_reach_graphs_captured_under_autocast(
    mode: str, options: dict[str, object], kept: bool
) -> None:
    model = Model().eval()
    run = GraphRunner(
        model.forward,
        mode=mode,
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        options=GraphOptions.from_dict(options),
        platform="cpu",
    )
    with half():
        if kept:
            # The casts of this call are there when the capture begins.
            model(torch.randn(1, 8))
        if not run.options.lazy:
            run.capture()
        for rows in (4, 2, 3):
            run(x=torch.randn(rows, 8))
        # What captures and trials have cast is not left to the host.
        x = torch.randn(4, 8)
        expected = model(x)
        run(x=torch.randn(4, 8))
        assert torch.equal(model(x), expected)
    for _ in range(2):
        with torch.no_grad():
            model.first.weight.mul_(2)
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        run.weights_changed()
        for rows in (4, 2):
            x = torch.randn(rows, 8)
            with half():
                outputs = run(x=x)
            with half(), torch.no_grad():
                assert torch.equal(outputs, model(x))
            assert run.last_dispatch is not None
            assert run.last_dispatch.reason is Reason.HIT
    assert torch.is_autocast_cache_enabled()


def test_without_autocast_a_capture_leaves_the_autocast_cache_setting_on() -> None:
    """Torch guards compiled code by this setting, and compiles it anew for another one."""
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_cache_enabled())
        return x * 2

    specs = {"x": InputSpec(torch.float32, ("tokens", 8))}
    with GraphRunner(forward, mode="FULL", sizes=[2, 4], inputs=specs, platform="cpu") as run:
        run.capture()
        run(x=torch.ones(2, 8))
    assert set(seen) == {True}


@opaque("tests_autocast_casts::product", mutates=["out"])
def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x @ weight)


MADE_EARLIER = half()


class KeepsCasts(Model):
    """One that was made earlier, while casts were kept, says so again when it is entered."""

    def __init__(self, way: str, made: str) -> None:
        super().__init__()
        self.way, self.made = way, made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with MADE_EARLIER if self.made == "earlier" else half():
            hidden = getattr(self, self.way)(x)
            return self.first(hidden).float()

    @eager_break
    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).float()

    def operator(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        product(x, self.first.weight, out)
        return out


@pytest.mark.parametrize("made", ["earlier", "in the forward"])
@pytest.mark.parametrize(
    ("way", "mode"), [("operator", "FULL"), ("operator", "PIECEWISE"), ("part", "PIECEWISE")]
)
def test_a_graph_reads_no_autocast_copy_made_by_code_outside_the_graph(
    way: str, mode: str, made: str
) -> None:
    model = KeepsCasts(way, made).eval()
    run = GraphRunner(
        model.forward,
        mode=mode,
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        platform="cpu",
    )
    run.capture()
    for step in range(8):
        if step > 3:
            with torch.no_grad():
                model.first.weight.mul_(1.5)
        x = torch.randn(4 - step % 3, 8)
        with torch.no_grad():
            assert torch.equal(run(x=x), model(x)), step
        assert run.last_dispatch is not None
        assert run.last_dispatch.reason is Reason.HIT
