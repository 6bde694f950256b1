"""Random sequences of steps, captures, releases and failures are compared with an eager model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt import (
    Batch,
    GraphMode,
    GraphOptions,
    GraphRunner,
    Host,
    InputSpec,
    Reason,
    eager_break,
)
from tests.core.soft_ring import RingPlatform
from tests.draws import MORE

SIZES = [1, 2, 4, 8]
MOST = 10
"""Tokens of the largest batch, which no graph serves."""


class Refused(Exception):
    """What the forward raises at a size that is broken."""


@eager_break
def between(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Model(torch.nn.Module):
    """State that is written in place and by rows, and a number that a capture must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("rows", torch.zeros(MOST + 1, 2))
        self.steps = 0
        self.broken: set[int] = set()

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        if x.shape[0] in self.broken:
            raise Refused
        self.steps += 1
        self.count += 1
        self.rows.index_copy_(0, place, x + self.rows.index_select(0, place))
        return between(self.rows.index_select(0, place) * 2) + self.count


SETTINGS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"]),
        "ring": st.booleans(),
        "options": st.fixed_dictionaries(
            {
                "check": st.sampled_from(["off", "capture", "first"]),
                "outputs": st.sampled_from(["pool", "static", "clone"]),
                "lazy": st.sampled_from([False, False, True]),
                "max_padding": st.sampled_from([None, 1.5]),
            }
        ),
    }
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("next"),
            st.none(),
            st.none(),
        ),
        st.tuples(st.just("step"), st.integers(1, MOST), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, MOST), st.booleans()),
        st.tuples(st.just("break"), st.sampled_from(SIZES), st.just(None)),
        st.tuples(st.sampled_from(["release", "capture", "recapture"]), st.none(), st.none()),
    ),
    max_size=25,
)


class World:
    """A runner, the same model run eagerly, and what is known of the graphs."""

    def __init__(self, mode: str, ring: bool, options: dict[str, Any]) -> None:
        self.model, self.twin = Model(), Model()
        declared = options["check"] == "off"
        self.run = GraphRunner(
            self.model,
            inputs={
                "x": InputSpec(torch.float32, ("tokens", 2)),
                "place": InputSpec(torch.int64, ("tokens",), pad=MOST, index=True),
            },
            outputs=("tokens", 2),
            mode=mode,
            sizes=SIZES,
            max_num_tokens=MOST,
            max_num_reqs=MOST,
            platform=RingPlatform() if ring else "cpu",
            host=Host(state=(self.model.count, self.model.rows) if declared else ()),
            options=GraphOptions(inputs_in_graph=ring, **options),
        )
        self.keys = set(self.run.plan.keys)
        self.lazy = options["lazy"]
        self.value = 0.0

    def published(self) -> set[tuple[GraphMode, Any]]:
        return {(graph.mode, graph.descriptor) for graph in self.run.dispatcher.published}

    def same_state(self) -> None:
        assert torch.equal(self.model.count, self.twin.count)
        # The last row is nobody's.
        assert torch.equal(self.model.rows[:MOST], self.twin.rows[:MOST])

    def step(self, tokens: int, uniform: bool) -> None:
        broken = tokens in self.model.broken
        self.value += 1
        values = {
            "x": torch.full((tokens, 2), self.value),
            "place": torch.arange(tokens),
        }
        before = self.published()
        try:
            out = self.run(Batch(tokens, tokens, 1 if uniform else None), **values)
        except Refused:
            # Also at the size to which a step is padded that runs eagerly, or is tried.
            options = self.run.options
            others = self.lazy or options.check != "off"
            assert broken or (self.model.broken and others)
            # What a step has done that failed is not known; here it had done nothing.
            self.twin.load_state_dict(self.model.state_dict())
            return
        assert torch.equal(out, self.twin(**values))
        dispatch = self.run.last_dispatch
        assert dispatch is not None
        known = self.published()
        assert known >= before and (self.lazy or known == before)
        if dispatch.reason is Reason.HIT:
            assert (dispatch.mode, dispatch.descriptor) in known
        else:
            assert dispatch.mode is GraphMode.NONE

    def next(self) -> None:
        before = self.published()
        try:
            progress = self.run.capture_next()
        except Refused:
            after = self.published()
            assert before <= after
            return
        after = self.published()
        new = {(record.mode, record.descriptor) for record in progress.captured}
        assert after == before | new and not new & before
        assert progress.left <= len(self.keys - after)
        assert len(new) <= 1
        if progress.left == 0:
            assert self.run.graphs.sealing.closed
            assert not self.run.graphs.sealing.may_capture

    def act(self, what: str, first: Any, second: Any) -> None:
        if what == "step":
            self.step(first, second)
        elif what == "next":
            self.next()
        elif what == "break":
            for model in (self.model, self.twin):
                model.broken ^= {first}
            self.twin.broken = set()
        elif what == "release":
            self.run.release()
            assert self.published() == set()
        else:
            try:
                getattr(self.run, what)()
            except Refused:
                assert self.model.broken
            else:
                assert self.published() == self.keys
        self.same_state()

    def finish(self) -> None:
        """All that can be captured is, and nothing is tried for ever."""
        left, errors = 1, 0
        while left:
            try:
                left = self.run.capture_next().left
            except Refused:
                errors += 1
                assert errors <= len(self.keys)
            self.same_state()
        assert self.run.capture_next().captured == ()
        self.model.broken = set()
        self.run.capture()
        assert self.published() == self.keys
        assert self.run.graphs.sealing.closed
        for tokens in (1, 3, 8, MOST):
            self.step(tokens, True)
            self.same_state()


@pytest.mark.trust
@pytest.mark.draws
@settings(max_examples=20 * MORE, deadline=None)
@given(SETTINGS, ACTIONS)
def test_random_steps_captures_and_failures_match_an_eager_model(how, actions):
    world = World(**how)
    for action in actions:
        world.act(*action)
    world.finish()
    world.run.close()


@pytest.mark.trust
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_steps_of_every_size_after_each_capture_match_an_eager_model(mode, ring):
    world = World(mode, ring, {"check": "capture", "lazy": False})
    left = 1
    while left:
        left = world.run.capture_next().left
        for tokens in range(1, MOST + 1):
            world.act("step", tokens, tokens % 2 == 0)
    world.finish()
