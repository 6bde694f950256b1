"""What is undone after an error or an interrupt, also when another one comes meanwhile."""

from __future__ import annotations

import pytest

from graphrt.core.base._undo import Undo


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


def test_changes_are_undone_last_first():
    done: list[str] = []
    noted(done).now()
    assert done == ["last", "first"]


def test_an_error_leaves_nothing_else_done_and_is_not_repeated():
    done: list[str] = []
    undo = noted(done, fails_once(ValueError("x"), done, "never"))
    with pytest.raises(ValueError, match="x"):
        undo.now()
    assert done == ["last", "first"]


def test_an_interrupt_meanwhile_has_the_same_change_undone_again_and_the_rest():
    done: list[str] = []
    undo = noted(done, fails_once(KeyboardInterrupt(), done, "second try"))
    with pytest.raises(KeyboardInterrupt):
        undo.now()
    assert done == ["last", "second try", "first"]


def test_a_change_that_is_interrupted_twice_is_given_up():
    done: list[str] = []

    def always() -> None:
        done.append("tried")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noted(done, always).now()
    assert done == ["last", "tried", "tried", "first"]


def test_an_interrupt_goes_before_errors():
    done: list[str] = []
    undo = noted(
        done,
        fails_once(KeyboardInterrupt(), done, "interrupted"),
        fails_once(ValueError("x"), done, "never"),
    )
    with pytest.raises(KeyboardInterrupt):
        undo.now()
    assert done == ["last", "interrupted", "first"]
