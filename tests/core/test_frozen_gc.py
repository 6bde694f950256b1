"""`frozen_gc` disables garbage collection during a capture and restores its settings afterwards."""

from __future__ import annotations

import gc

import pytest

from graphrt.core.replay.recording import frozen_gc


def test_nested_frozen_gc_enables_collection_only_at_the_outermost_exit():
    assert gc.isenabled()
    with frozen_gc():
        with frozen_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def raise_if(frozen: bool) -> None:
    if frozen:
        raise ValueError("x")


@pytest.mark.parametrize("was_on", [True, False])
def test_frozen_gc_restores_the_garbage_collector_after_an_error(was_on):
    if not was_on:
        gc.disable()
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ValueError, match="x"), frozen_gc():
            raise_if(not gc.isenabled() and gc.get_freeze_count() > before)
        assert gc.isenabled() == was_on
        # Thawing thaws all, also the few hundred that Python itself has frozen.
        assert gc.get_freeze_count() <= before
    finally:
        gc.enable()


def test_frozen_gc_does_not_unfreeze_objects_the_host_froze():
    gc.freeze()
    try:
        with frozen_gc():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_collection_inside_frozen_gc_finalizes_no_earlier_garbage():
    class Noted:
        def __del__(self) -> None:
            finalized.append(inside)

    finalized: list[bool] = []
    inside = False
    cycle = [Noted()]
    cycle.append(cycle)
    del cycle
    with frozen_gc():
        inside = True
        gc.collect()
        inside = False
    gc.collect()
    assert finalized == [False]
