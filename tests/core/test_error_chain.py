"""`error_chain` walks the causes of an error; an error with a source line is a new object."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial

import pytest
import torch

from graphrt import GraphRunner, InputSpec, Reason, eager_break
from graphrt.ascend.driver.explain import explain as explain_ascend
from graphrt.core.base._undo import notes_of, undo_after
from graphrt.core.base.errors import CaptureError, GraphRTError, GraphsDroppedWarning
from graphrt.core.device.contract import error_chain
from graphrt.cuda.explain import explain as explain_cuda


def chained() -> tuple[Exception, list[Exception]]:
    """An error with a cause and a context, and a circle behind them."""
    first, cause, context, behind = (KeyError(place) for place in range(4))
    first.__cause__, first.__context__ = cause, context
    cause.__context__, behind.__context__ = behind, first
    return first, [first, cause, context, behind]


def test_error_chain_yields_each_error_once_nearest_first() -> None:
    first, wanted = chained()
    assert list(error_chain(first)) == wanted


def test_error_chain_omits_left_out_errors_and_their_causes() -> None:
    first, (_, cause, context, _) = chained()
    explained = ValueError()
    explained.__context__ = context
    first.__context__ = explained
    cause.__context__ = None
    assert list(error_chain(first, leave_out=ValueError)) == [first, cause]
    assert list(error_chain(explained, leave_out=ValueError)) == [explained, context]


def test_adding_a_source_line_to_an_error_makes_a_new_error() -> None:
    """A frame that raised an object of its own would keep the memory of a failed capture."""
    bare = CaptureError("no room", op="aten::mm", got=1, expected=2, advice="less")
    told = bare.at("model.py:3")
    assert told is not bare and (bare.source, told.source) == (None, "model.py:3")
    assert str(told) == str(bare).replace("aten::mm", "aten::mm\n  at: model.py:3")
    assert told.at("other.py:1") is told and bare.at(None) is bare


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError


class SilentMemoryError(MemoryError):
    def __str__(self) -> str:
        raise SystemExit(3)


class FrozenNotesError(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.__notes__ = ("frozen",)  # type: ignore[assignment]


class RaisingNotesError(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise RuntimeError


class OwnNoteError(Exception):
    def add_note(self, note: str) -> None:
        raise RuntimeError


ODD = [SilentMemoryError, SilentError, FrozenNotesError, RaisingNotesError, OwnNoteError]


FAILS: ContextVar[bool] = ContextVar("FAILS", default=False)


@pytest.mark.parametrize("kind", ODD[1:])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("steps_before", [None, 0, 3], ids=["capture", "trial", "step"])
def test_an_odd_error_of_the_forward_is_raised_and_the_next_call_works(
    kind: type[Exception], mode: str, steps_before: int | None
) -> None:
    """Its text and its notes may raise. A served step of FULL runs no Python: one above the sizes
    does."""

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        if FAILS.get():
            raise kind
        return x + 1

    runner = GraphRunner(
        lambda x: part(x * 2) * 3,
        mode=mode,
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 2))},
        outputs=("tokens", 2),
        platform="cpu",
    )
    with runner:
        call = runner.capture
        if steps_before is not None:
            runner.capture()
            for _ in range(steps_before):
                runner(x=torch.ones(3, 2))
            rows = 5 if mode == "FULL" and steps_before else 3
            call = partial(runner, x=torch.ones(rows, 2))
        token = FAILS.set(True)
        try:
            with pytest.raises((kind, GraphRTError)) as raised:
                call()
        finally:
            FAILS.reset(token)
        assert any(isinstance(each, kind) for each in error_chain(raised.value))
        assert isinstance(raised.value, kind) or str(raised.value)
        runner.capture()
        for _ in range(3):
            assert torch.equal(runner(x=torch.ones(3, 2)), torch.full((3, 2), 9.0))
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT


def test_a_lack_of_memory_without_text_drops_the_graph_with_a_warning() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise SilentMemoryError

    inputs = {"x": InputSpec(torch.float32, ("tokens", 2))}
    runner = GraphRunner(
        forward, mode="FULL", sizes=[4], inputs=inputs, outputs=("tokens", 2), platform="cpu"
    )
    with runner, pytest.warns(GraphsDroppedWarning, match="out of memory"):
        runner.capture()


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_error_of_an_undo_is_a_note_of_the_first_one(kind: type[Exception]) -> None:
    def undo() -> None:
        raise kind

    first = KeyError("first")
    undo_after(first, undo)
    assert kind.__name__ in notes_of(first)[0]
    undo_after(kind(), undo)


def test_a_device_error_without_text_is_explained_as_any_other() -> None:
    error = SilentError()
    error.__cause__ = SilentMemoryError()
    for explain in (explain_cuda, explain_ascend):
        assert explain(error).what
