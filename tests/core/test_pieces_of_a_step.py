"""Pieces that a host captures separately: captures and replays mixed within a step."""

from __future__ import annotations

from collections.abc import Callable
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

    def piece(self, forward: Forward) -> GraphWrapper:
        wrap, more = wrapper_class(get_platform("cpu")), {}
        if self.kept:
            more["read_context"] = lambda: self.current
        return wrap(forward, "PIECEWISE", pool=self.pool, options=self.options, **more)

    def step(self, pieces: list[GraphWrapper], x: torch.Tensor) -> torch.Tensor:
        if self.kept:
            self.begin(FOUR)
            return expected(x, *pieces).clone()
        with forward_context("PIECEWISE", FOUR):
            return expected(x, *pieces).clone()

    def begin(self, descriptor: BatchDescriptor) -> ForwardContext:
        fresh = ForwardContext(GraphMode.PIECEWISE, descriptor)
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
            host.step([shared, lambda h: h * 2, draft], x)  # type: ignore[list-item]
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


@pytest.mark.parametrize("check", ["off", "capture", "always"])
@pytest.mark.parametrize("kept", [False, True], ids=["entered", "begun"])
def test_pieces_after_a_dropped_piece_run_eagerly_until_all_are_recaptured(kept, check):
    host = Host(kept, check)
    pieces, x = [host.piece(layer) for layer in LAYERS], torch.randn(4, 8)
    with host.pool.capture_session():
        host.step(pieces, x)
    pieces[1].drop(FOUR)
    for _ in range(3):
        x.normal_()
        assert torch.equal(host.step(pieces, x), expected(x, *LAYERS))
    assert pieces[0].eager_calls[Reason.SEALED] == 0
    assert pieces[1].eager_calls[Reason.SEALED] == 3
    assert pieces[2].eager_calls[Reason.MISSING_GRAPH] == 3
    with host.pool.capture_session(), pytest.raises(CaptureError, match="reuse the memory"):
        host.step(pieces, x)
    host.pool.drop(FOUR)
    with host.pool.capture_session():
        host.step(pieces, x)
    eager = [dict(piece.eager_calls) for piece in pieces]
    for _ in range(3):
        x.normal_()
        assert torch.equal(host.step(pieces, x), expected(x, *LAYERS))
    assert [dict(piece.eager_calls) for piece in pieces] == eager


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
