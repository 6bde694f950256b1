"""Pieces that a host captures separately: captures and replays mixed within a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphWrapper,
    KeyedGraphs,
    Reason,
    forward_context,
    get_platform,
    wrapper_class,
)
from graphrt.errors import CaptureError, PoolBusyError, StaleInputError

FOUR, OTHER = BatchDescriptor(4), BatchDescriptor(4, variant="other")
LAYERS = [torch.nn.Linear(8, 8).eval() for _ in range(3)]
Forward = Callable[[torch.Tensor], torch.Tensor]


def residual(layer: Forward) -> Forward:
    return lambda h: layer(h).relu() + h


def expected(x: torch.Tensor, *layers: Forward) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Host:
    """A host with contexts of its own: kept, or entered anew for each step."""

    def __init__(self, kept: bool, check: Any = "capture") -> None:
        self.pool = GraphPool("cpu")
        self.kept = kept
        self.current: ForwardContext | None = None
        self.contexts: dict[BatchDescriptor, ForwardContext] = {}
        self.options = GraphOptions(lazy=True, check=check)
        self.mode = GraphMode.PIECEWISE

    def piece(self, forward: Forward) -> GraphWrapper:
        wrap, more = wrapper_class(get_platform("cpu")), {}
        if self.kept:
            more["read_context"] = lambda: self.current
        return wrap(forward, self.mode, pool=self.pool, options=self.options, **more)

    def step(
        self, pieces: Sequence[Forward], x: torch.Tensor, descriptor: BatchDescriptor = FOUR
    ) -> torch.Tensor:
        with self.begun(descriptor):
            return expected(x, *pieces).clone()

    def begun(self, descriptor: BatchDescriptor) -> AbstractContextManager[Any]:
        if self.kept:
            self.begin(descriptor)
            return nullcontext()
        return forward_context(self.mode, descriptor)

    def begin(self, descriptor: BatchDescriptor) -> ForwardContext:
        fresh = ForwardContext(self.mode, descriptor)
        self.current = self.contexts.setdefault(descriptor, fresh)
        self.current.begin_step()
        return self.current


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=[False, True], ids=["entered", "begun"])
def host(request: Any) -> Host:
    return Host(request.param)


def test_capturing_a_piece_after_a_replayed_piece_of_its_step_is_refused(host):
    shared, target, draft = map(host.piece, (LAYERS[0], residual(LAYERS[1]), residual(LAYERS[2])))
    x = torch.randn(4, 8)
    with host.pool.capture_session():
        host.step([shared, target], x)
        with pytest.raises(CaptureError, match="reuse the memory"):
            host.step([shared, draft], x)
        # What stands between makes no difference: memory of the pool may be in use all the same.
        apart = host.piece(lambda h: draft(h * 2))
        with pytest.raises(CaptureError, match="reuse the memory"):
            host.step([shared, apart], x)
    x.normal_()
    ours = host.step([shared, target], x)
    assert torch.equal(ours, expected(x, LAYERS[0], residual(LAYERS[1])))
    ours = host.step([shared, draft], x)
    assert torch.equal(ours, expected(x, LAYERS[0], residual(LAYERS[2])))


def test_capturing_a_piece_whose_input_derives_from_a_replayed_piece_is_refused(host):
    shared, draft, x = host.piece(LAYERS[0]), host.piece(residual(LAYERS[1])), torch.randn(4, 8)
    with host.pool.capture_session():
        host.step([shared], x)
        with pytest.raises(CaptureError, match="reuse the memory"):
            host.step([shared, lambda h: h * 2, draft], x)
    assert not draft.entries


def test_capturing_a_piece_from_a_replays_output_without_begin_step_is_refused():
    host, x = Host(True), torch.randn(4, 8)
    host.current = ForwardContext(GraphMode.PIECEWISE, FOUR)
    shared, draft = host.piece(LAYERS[0]), host.piece(residual(LAYERS[1]))
    with host.pool.capture_session():
        shared(x)
        with pytest.raises(CaptureError, match="reuse the memory"):
            draft(shared(x)[1:])
    assert not draft.entries


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_step_whose_piece_failed_is_captured_anew_from_its_first_piece(host, error):
    fails = [True]

    def second(h: torch.Tensor) -> torch.Tensor:
        if fails.pop():
            raise error("once")
        return residual(LAYERS[1])(h)

    pieces = [host.piece(LAYERS[0]), host.piece(second)]
    x = torch.randn(4, 8)
    with pytest.raises((CaptureError, error)), host.pool.capture_session():
        host.step(pieces, x)
    assert not pieces[0].entries
    fails.append(False)
    with host.pool.capture_session():
        host.step(pieces, x)
    assert [len(piece.entries) for piece in pieces] == [1, 1]
    for _ in range(2):
        x.normal_()
        assert torch.equal(host.step(pieces, x), expected(x, LAYERS[0], residual(LAYERS[1])))


class Aborted(BaseException):
    """A host ends a request."""


def aborting(pieces: Sequence[Forward], after: int, error: type[BaseException]) -> list[Forward]:
    """Pieces, of which the host calls no more than so many before it raises."""

    def abort(_: torch.Tensor) -> torch.Tensor:
        raise error

    return [*pieces[:after], abort]


MODES = [GraphMode.PIECEWISE, GraphMode.FULL]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("aborts", [[1], [2], [1, 1], [2, 1], [1, 2, 1]])
def test_pieces_whose_step_was_aborted_between_their_captures_are_captured_together(
    host, aborts, most, mode, error, caplog
):
    caplog.set_level("INFO", "graphrt")
    host.options, host.mode = GraphOptions(lazy=True, max_graphs=most), mode
    pieces, x = [host.piece(layer) for layer in LAYERS], torch.randn(4, 8)
    for after in aborts:
        with pytest.raises(error):
            host.step(aborting(pieces, after, error), x)
        # The pieces behind those that have graphs run eagerly. A FULL wrapper without a limit is a
        # step of its own: its capture is refused, once.
        with (
            pytest.raises(CaptureError, match="reuse the memory")
            if mode is GraphMode.FULL and most is None
            else nullcontext()
        ):
            assert torch.equal(host.step(pieces, x.normal_()), expected(x, *LAYERS))
        assert pieces[0].entries and not pieces[2].entries
    if len(aborts) == 3:  # the third time it takes one step more
        with suppress(CaptureError):
            assert torch.equal(host.step(pieces, x.normal_()), expected(x, *LAYERS))
    for _ in range(3):
        assert torch.equal(host.step(pieces, x.normal_()), expected(x, *LAYERS))
        assert [len(piece.entries) for piece in pieces] == [1, 1, 1]
    eager = [dict(piece.eager_calls) for piece in pieces]
    assert torch.equal(host.step(pieces, x.normal_()), expected(x, *LAYERS))
    assert [dict(piece.eager_calls) for piece in pieces] == eager
    assert "[4 tokens] is captured again, as a piece had no graph" in caplog.text


@pytest.mark.parametrize("most", [None, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_aborted_anywhere_equal_eager_and_end_with_whole_sizes(host, most, seed):
    draw = random.Random(seed)
    host.options = GraphOptions(lazy=True, max_graphs=most)
    aborts = True

    def fragile(layer: Forward) -> Forward:
        def forward(h: torch.Tensor) -> torch.Tensor:
            if aborts and draw.random() < 0.05:
                raise Aborted
            return layer(h)

        return forward

    pieces = [host.piece(fragile(layer)) for layer in LAYERS]
    xs = {BatchDescriptor(4, variant=n): torch.randn(4, 8) for n in range(4)}
    for number in range(400):
        aborts = number < 250
        descriptor, x = draw.choice(list(xs.items()))
        ends = aborts and draw.random() < 0.5
        with suppress(Aborted):
            called = aborting(pieces, draw.randint(0, 2), Aborted) if ends else pieces
            assert torch.equal(host.step(called, x.normal_(), descriptor), expected(x, *LAYERS))
    sizes = [set(piece.entries) for piece in pieces]
    assert sizes[0] == sizes[1] == sizes[2] and len(sizes[0]) == min(most or 4, 4)


def test_a_strict_piece_behind_replays_is_refused_once_and_captured_with_them_then(host):
    host.options = GraphOptions(lazy=True, strict=True)
    pieces, x = [host.piece(layer) for layer in LAYERS], torch.randn(4, 8)
    with pytest.raises(Aborted):
        host.step(aborting(pieces, 1, Aborted), x)
    with pytest.raises(CaptureError, match="reuse the memory"):
        host.step(pieces, x)
    for _ in range(3):
        assert torch.equal(host.step(pieces, x.normal_()), expected(x, *LAYERS))


def test_a_piece_that_two_models_share_is_captured_again_ever_less_often(host):
    shared, target, draft = pieces = [host.piece(layer) for layer in LAYERS]
    x = torch.randn(4, 8)
    for number in range(200):
        own, layer = ((target, LAYERS[1]), (draft, LAYERS[2]))[number % 2]
        out = host.step([shared, own], x.normal_())
        assert torch.equal(out, expected(x, LAYERS[0], layer))
    assert host.pool.captures < 40
    assert sum(piece.eager_calls[Reason.MISSING_GRAPH] for piece in pieces) > 60


def test_a_piece_behind_one_whose_capture_failed_runs_eagerly_in_that_step(host):
    """The model goes on without the piece that failed."""
    fails = [True]

    def second(h: torch.Tensor) -> torch.Tensor:
        if fails and fails.pop():
            raise ValueError("once")
        return LAYERS[1](h)

    pieces, x = [host.piece(each) for each in (LAYERS[0], second, LAYERS[2])], torch.randn(4, 8)

    def forward() -> torch.Tensor:
        with host.begun(FOUR):
            h = pieces[0](x)
            try:
                h = pieces[1](h)
            except (CaptureError, ValueError):
                h = LAYERS[1](h)
            return pieces[2](h).clone()

    for entries in [0, 1, 1]:
        x.normal_()
        assert torch.equal(forward(), expected(x, *LAYERS))
        assert [len(piece.entries) for piece in pieces] == [entries] * 3


@pytest.mark.parametrize("check", ["off", "capture", "always"])
@pytest.mark.parametrize("dropped", [0, 1, 2])
@pytest.mark.parametrize("all_sizes", [False, True])
@pytest.mark.parametrize("kept", [False, True], ids=["entered", "begun"])
def test_a_dropped_piece_takes_the_others_of_its_step_along(kept, check, dropped, all_sizes):
    host = Host(kept, check)
    pieces, x = [host.piece(layer) for layer in LAYERS], torch.randn(4, 8)
    with host.pool.capture_session():
        host.step(pieces, x)
        host.step(pieces, x, OTHER)
    pieces[dropped].clear_graphs() if all_sizes else pieces[dropped].drop(FOUR)
    pieces[dropped].seal()  # `clear_graphs` has unsealed it
    assert [len(piece.entries) for piece in pieces] == [0 if all_sizes else 1] * 3
    for _ in range(3):
        x.normal_()
        assert torch.equal(host.step(pieces, x), expected(x, *LAYERS))
    with host.pool.capture_session():
        host.step(pieces, x)
    eager = [dict(piece.eager_calls) for piece in pieces]
    for _ in range(3):
        x.normal_()
        assert torch.equal(host.step(pieces, x), expected(x, *LAYERS))
    assert [dict(piece.eager_calls) for piece in pieces] == eager


@pytest.mark.parametrize("check", ["off", "capture"])
def test_a_piece_captured_again_elsewhere_is_read_there_by_the_next(host, check):
    """The results of the sizes between are kept, so the first piece finds its old place taken."""
    host.options = GraphOptions(lazy=True, check=check)
    pieces = [host.piece(layer) for layer in LAYERS]
    xs = {FOUR: torch.randn(4, 8)} | {
        BatchDescriptor(4, variant=n): torch.randn(4, 8) for n in range(3)
    }
    host.step(pieces, xs[FOUR])
    pieces[0].drop(FOUR)
    kept = []
    for descriptor in [*xs][1:]:
        with host.begun(descriptor):
            kept.append(pieces[0](xs[descriptor]))
            kept.append(pieces[1](kept[-1]))
            pieces[2](kept[-1])
    for _ in range(3):
        x = xs[FOUR].normal_()
        assert torch.equal(host.step(pieces, x), expected(x, *LAYERS))


@pytest.mark.trust
def test_a_moved_argument_of_a_piece_that_reads_pool_memory_is_refused():
    host = Host(False, "always")
    pieces, x = [host.piece(layer) for layer in LAYERS[:2]], torch.randn(4, 8)
    with host.pool.capture_session():
        host.step(pieces, x)
    host.step(pieces, x)
    with forward_context("PIECEWISE", FOUR), pytest.raises(StaleInputError):
        pieces[1](torch.randn(4, 8))
    assert torch.equal(host.step(pieces, x), expected(x, *LAYERS[:2]))


def test_a_step_cannot_continue_after_another_step_captured_in_between():
    host = Host(True)
    pieces, x = [host.piece(layer) for layer in LAYERS[:2]], torch.randn(4, 8)
    with host.pool.capture_session():
        host.step(pieces, x)
        first = host.begin(FOUR)
        half = pieces[0](x)
        host.begin(OTHER)
        pieces[1](pieces[0](torch.randn(4, 8)))
        host.current = first
        with pytest.raises(PoolBusyError):
            pieces[1](half)
    for _ in range(2):
        assert torch.equal(host.step(pieces, x), expected(x, *LAYERS[:2]))


def test_a_keyed_capture_between_pieces_ends_the_begun_step():
    host = Host(True)
    pieces, x = [host.piece(layer) for layer in LAYERS[:2]], torch.randn(4, 8)
    with host.pool.capture_session():
        host.step(pieces, x)
    host.begin(FOUR)
    half = pieces[0](x)
    KeyedGraphs(host.pool).capture("key", lambda: torch.randn(64, 8) + 1)
    with pytest.raises(PoolBusyError):
        pieces[1](half)
    assert torch.equal(host.step(pieces, x), expected(x, *LAYERS[:2]))


@pytest.mark.parametrize("clear", ["wrapper", "pool", "descriptor", "close"])
def test_clearing_graphs_between_the_pieces_of_an_entered_step_is_refused(clear):
    host = Host(False)
    pieces, x = [host.piece(layer) for layer in LAYERS[:2]], torch.randn(4, 8)
    with host.pool.capture_session():
        host.step(pieces, x)
    calls = {
        "wrapper": pieces[0].clear_graphs,
        "pool": host.pool.clear_graphs,
        "descriptor": lambda: host.pool.drop(FOUR),
        "close": host.pool.close,
    }
    with forward_context("PIECEWISE", FOUR):
        half = pieces[0](x)
        with pytest.raises(PoolBusyError):
            calls[clear]()
        assert torch.equal(pieces[1](half), expected(x, *LAYERS[:2]))
    calls[clear]()
    assert not pieces[0].entries


@pytest.mark.parametrize("check", ["off", "capture"])
def test_without_begin_step_a_piece_after_a_dropped_piece_raises_stale_input(check):
    host, x = Host(True, check), torch.randn(4, 8)
    host.current = ForwardContext(GraphMode.PIECEWISE, FOUR, slot=1)
    first, second = host.piece(LAYERS[0]), host.piece(LAYERS[1])
    with host.pool.capture_session():
        second(first(x))
    for _ in range(2):
        assert torch.equal(second(first(x)), expected(x, *LAYERS[:2]))
    first.drop(FOUR)
    with pytest.raises(StaleInputError):
        second(first(x))
