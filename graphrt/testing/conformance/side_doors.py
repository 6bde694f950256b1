"""A tensor that leaves an eager part by a side door, and is read by a graph, is refused.

A side door is any way but the part's result: an attribute, a list, a global, a closure.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.core.base.errors import SideDoorError
from graphrt.core.capture.guard import eager_break
from graphrt.core.replay.pool import GraphPool
from graphrt.testing.conformance.base import PIECEWISE, ConformanceBase

Forward = Callable[[torch.Tensor], Any]

_kept: dict[str, Any] = {}


def _by_dict() -> Forward:
    box: dict[str, torch.Tensor] = {}

    @eager_break
    def part(x: torch.Tensor) -> None:
        box["y"] = x * 10

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return box["y"] + 1

    return forward


def _by_list_given_to_it() -> Forward:
    @eager_break
    def part(x: torch.Tensor, out: list[torch.Tensor]) -> None:
        out.append(x * 10)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: list[torch.Tensor] = []
        part(x + 1, out)
        return out[0] + 1

    return forward


def _by_dict_given_to_it() -> Forward:
    @eager_break
    def part(state: dict[str, torch.Tensor]) -> None:
        state["y"] = state["x"] * 10

    def forward(x: torch.Tensor) -> torch.Tensor:
        state = {"x": x + 1}
        part(state)
        return state["y"] + 1

    return forward


def _by_attribute() -> Forward:
    layer = SimpleNamespace(y=None)

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        layer.y = x * 10
        return x * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        other = part(x + 1)
        result: torch.Tensor = layer.y + other * 0
        return result

    return forward


def _by_module_buffer() -> Forward:
    module = torch.nn.Module()
    module.register_buffer("y", None)

    @eager_break
    def part(x: torch.Tensor) -> None:
        module.y = x * 10

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        y = module.y
        assert isinstance(y, torch.Tensor)
        return y + 1

    return forward


def _by_global() -> Forward:
    @eager_break
    def part(x: torch.Tensor) -> None:
        _kept["y"] = x * 10

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        result: torch.Tensor = _kept.pop("y") + 1
        return result

    return forward


def _by_closure_cell() -> Forward:
    y: torch.Tensor | None = None

    @eager_break
    def part(x: torch.Tensor) -> None:
        nonlocal y
        y = x * 10

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        assert y is not None
        return y + 1

    return forward


def _by_object_that_it_returns() -> Forward:
    @eager_break
    def part(x: torch.Tensor) -> Any:
        return SimpleNamespace(y=x * 10)

    return lambda x: part(x + 1).y + 1


def _beside_its_result() -> Forward:
    """The result itself is bridged, and the graph reads the original."""
    box: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        box[:] = [x * 10]
        return box[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return box[0] + 1

    return forward


def _by_view() -> Forward:
    box: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> None:
        box[:] = [(x * 10)[1:].t()]

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return box[0].t() + 1

    return forward


def _past_another_eager_part() -> Forward:
    box: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> None:
        box[:] = [x * 10]

    @eager_break
    def another(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return another(x) + box[0]

    return forward


def _made_from_python_data() -> Forward:
    box: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> None:
        box[:] = [torch.tensor([1.0] * 8, device=x.device)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return box[0] + x

    return forward


def _written_by_the_graph() -> Forward:
    box: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> None:
        box[:] = [torch.empty_like(x)]

    @eager_break
    def another() -> torch.Tensor:
        return box[0] * 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x)
        box[0].copy_(x)
        return another() + 1

    return forward


def _into_another_eager_part() -> Forward:
    box: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> None:
        box[:] = [x * 10]

    @eager_break
    def another(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def forward(x: torch.Tensor) -> torch.Tensor:
        part(x + 1)
        return another(x + 0, box[0]) + 1

    return forward


def _out_of_the_forward() -> Forward:
    box: list[torch.Tensor] = []

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        box[:] = [x * 10]
        return x * 2

    def forward(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": part(x + 1) + 1, "kept": box[0]}

    return forward


SIDE_DOORS = [
    _by_dict,
    _by_list_given_to_it,
    _by_dict_given_to_it,
    _by_attribute,
    _by_module_buffer,
    _by_global,
    _by_closure_cell,
    _by_object_that_it_returns,
    _beside_its_result,
    _by_view,
    _past_another_eager_part,
    _made_from_python_data,
    _written_by_the_graph,
    _into_another_eager_part,
    _out_of_the_forward,
]


class SideDoorConformance(ConformanceBase):
    @pytest.mark.parametrize("door", SIDE_DOORS, ids=lambda door: door.__name__.strip("_"))
    def test_a_tensor_that_left_an_eager_part_by_a_side_door_is_refused(
        self, door: Callable[[], Callable[..., Any]], pool: GraphPool
    ) -> None:
        wrapper = self.wrap(door(), PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        with pytest.raises(SideDoorError, match=r"made at .*in part: ") as caught:
            self.capture(wrapper, PIECEWISE, x)
        assert "part" in caught.value.what
        if door is not _out_of_the_forward:
            assert "in forward: " in str(caught.value.source) or "<lambda>" in str(caught.value)
        assert not wrapper.entries
        fine = self.wrap(lambda x: x + 1, PIECEWISE, pool, breakable=True)
        assert self.first(self.capture(fine, PIECEWISE, x)) == [2, 3, 4, 5]

    @pytest.mark.parametrize("inference", [False, True])
    def test_a_place_that_was_there_before_may_be_written_by_an_eager_part_and_read(
        self, inference: bool, pool: GraphPool
    ) -> None:
        with torch.inference_mode(inference):
            kept = self.tensor(0, 0, 0, 0)

            @eager_break
            def part(x: torch.Tensor) -> None:
                kept[1:].copy_((x * 10)[1:])
                torch.mul(x[:1], 10, out=kept[:1])

            def forward(x: torch.Tensor) -> torch.Tensor:
                part(x + 1)
                return kept + 1

            wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
            x = self.tensor(1, 2, 3, 4)
            assert self.first(self.capture(wrapper, PIECEWISE, x)) == [21, 31, 41, 51]
            x.copy_(self.tensor(0, 1, 2, 3))
            assert self.first(self.step(wrapper, PIECEWISE, x)) == [11, 21, 31, 41]

    def test_what_eager_parts_keep_for_eager_parts_is_theirs(self, pool: GraphPool) -> None:
        box: list[torch.Tensor] = []

        @eager_break
        def first(x: torch.Tensor) -> None:
            box[:] = [x * 10]

        @eager_break
        def second(x: torch.Tensor) -> torch.Tensor:
            return box[0] + x

        def forward(x: torch.Tensor) -> torch.Tensor:
            first(x + 1)
            return second(x * 2) + 1

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        self.capture(wrapper, PIECEWISE, x)
        x.copy_(self.tensor(0, 1, 2, 3))
        assert self.first(self.step(wrapper, PIECEWISE, x)) == [11, 23, 35, 47]

    def test_a_place_that_the_first_eager_part_makes_is_there_after_a_warm_up(self) -> None:
        kept: list[torch.Tensor] = []

        @eager_break
        def part(x: torch.Tensor) -> None:
            if not kept:
                kept.append(torch.empty_like(x))
            kept[0].copy_(x * 10)

        def forward(x: torch.Tensor) -> torch.Tensor:
            part(x + 1)
            return kept[0] + 1

        with self.runner_of(forward) as runner:
            runner.capture()
            assert self.first(runner(x=self.tensor(1, 2, 3, 4))) == [21, 31, 41, 51]
            assert self.first(runner(x=self.tensor(0, 1, 2, 3))) == [11, 21, 31, 41]

    def test_what_the_step_before_left_behind_is_refused_too(self) -> None:
        """The first segment reads a tensor that the eager part of the run before made."""
        before = [self.tensor(0)]

        @eager_break
        def part(x: torch.Tensor) -> torch.Tensor:
            before[0] = torch.ones(1, device=x.device)
            return x + 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            return part(x + before[0])

        # Not made of its input: that a watched warm-up would refuse before the capture.
        with self.runner_of(forward) as runner:
            with pytest.raises(SideDoorError, match="again at every step") as caught:
                runner.capture()
            assert "in forward: " in str(caught.value.source)
            assert "in part: before[0] = torch.ones" in str(caught.value)
