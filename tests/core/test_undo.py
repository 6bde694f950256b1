"""Undo functions run after an error or interrupt, even if another error or interrupt follows."""

from __future__ import annotations

import pytest

from graphrt.core.base._undo import Undo, undoing


def fails_once(error: BaseException, done: list[str], name: str):
    raised = []

    def undo() -> None:
        if not raised:
            raised.append(error)
            raise error
        done.append(name)

    return undo


def noted(done: list[str], *functions) -> Undo:
    undo = Undo()
    undo.later(lambda: done.append("first"))
    for function in functions:
        undo.later(function)
    undo.later(lambda: done.append("last"))
    return undo


def test_undo_runs_registered_functions_in_reverse_order():
    done: list[str] = []
    noted(done).now()
    assert done == ["last", "first"]


def test_an_undo_function_that_raises_is_retried_and_the_rest_still_run():
    done: list[str] = []
    undo = noted(done, fails_once(ValueError("x"), done, "second try"))
    with pytest.raises(ValueError, match="x"):
        undo.now()
    assert done == ["last", "second try", "first"]


def test_an_interrupted_undo_function_is_retried_and_the_rest_still_run():
    done: list[str] = []
    undo = noted(done, fails_once(KeyboardInterrupt(), done, "second try"))
    with pytest.raises(KeyboardInterrupt):
        undo.now()
    assert done == ["last", "second try", "first"]


def test_an_undo_function_interrupted_twice_is_skipped():
    done: list[str] = []

    def always() -> None:
        done.append("tried")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noted(done, always).now()
    assert done == ["last", "tried", "tried", "first"]


def test_an_interrupt_during_undo_is_raised_instead_of_an_error():
    done: list[str] = []
    undo = noted(
        done,
        fails_once(KeyboardInterrupt(), done, "interrupted"),
        fails_once(ValueError("x"), done, "failed"),
    )
    with pytest.raises(KeyboardInterrupt):
        undo.now()
    assert done == ["last", "failed", "interrupted", "first"]


@undoing
def tried(done: list[str], undo: Undo, change) -> str:
    undo.later(lambda: done.append("first"))
    undo.after_error(lambda: done.append("result"))
    undo.later(lambda: done.append("last"))
    return change()


def test_after_error_functions_do_not_run_after_success():
    done: list[str] = []
    assert tried(done, lambda: "x") == "x"
    assert done == ["last", "first"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_or_interrupt_runs_all_undo_functions_in_reverse_order(error):
    done: list[str] = []

    def change() -> str:
        raise error

    with pytest.raises(error):
        tried(done, change=change)
    assert done == ["last", "result", "first"]


def test_an_interrupt_during_undo_after_success_runs_the_after_error_functions():
    done: list[str] = []

    @undoing
    def interrupted(done: list[str], undo: Undo) -> None:
        undo.after_error(lambda: done.append("result"))
        undo.later(fails_once(KeyboardInterrupt(), done, "second try"))

    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert done == ["second try", "result"]


def test_an_error_raised_during_undo_becomes_a_note_of_the_first_error():
    done: list[str] = []

    @undoing
    def fails(done: list[str], undo: Undo) -> None:
        undo.later(lambda: done.append("first"))
        undo.after_error(fails_once(ValueError("the second"), done, "second try"))
        raise ZeroDivisionError("the first")

    with pytest.raises(ZeroDivisionError, match="the first") as raised:
        fails(done)
    assert done == ["second try", "first"]
    notes = getattr(raised.value, "__notes__", ["ValueError: the second"])
    assert "ValueError: the second" in notes[0]


def test_an_interrupt_during_undo_of_an_error_is_raised_instead():
    done: list[str] = []

    @undoing
    def fails(done: list[str], undo: Undo) -> None:
        undo.later(fails_once(KeyboardInterrupt(), done, "second try"))
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        fails(done)
    assert done == ["second try"]
