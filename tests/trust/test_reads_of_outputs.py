"""Outputs of one runner that the forward of a second runner uses are not listed as its reads."""

from __future__ import annotations

import pytest
import torch

from graphrt.core.base.torch_names import storage_use_count
from graphrt.core.replay import handout
from graphrt.core.replay.handout import is_spare
from graphrt.trust.reads import ReadSet
from graphrt.trust.watching.watch import Watch


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(handout, "mark_unreadable", lambda storage, _: found.append(storage))
    return found


def watched(
    shell: handout.Shell, handed_out: handout.HandedOut, kept: list[torch.Tensor] | None
) -> Watch:
    """A run that reads an output, and may keep it."""

    def forward() -> torch.Tensor:
        out = shell.hand_out((4,), handed_out)
        if kept is not None:
            kept.append(out)
        return out + 1

    # Tensors that are made by operators would be seen as the run's own.
    shell.hand_out((4,), handed_out)
    handout.expire(handed_out)
    watch = Watch()
    watch.around(forward)
    return watch


def test_an_output_that_the_forward_did_not_keep_is_no_read(marked: list[int]) -> None:
    handed_out: handout.HandedOut = []
    shell, reads = handout.Shell(torch.arange(4.0)), ReadSet(None)
    reads.note(watched(shell, handed_out, kept=None))
    assert {storage.data_ptr() for storage, _ in reads._held.values()} == set()
    handout.expire(handed_out)
    assert marked == []


def test_an_output_that_the_forward_keeps_is_a_read(marked: list[int]) -> None:
    handed_out: handout.HandedOut = []
    memory, kept = torch.arange(4.0), []
    shell, reads = handout.Shell(memory), ReadSet(None)
    reads.note(watched(shell, handed_out, kept))
    assert {storage.data_ptr() for storage, _ in reads._held.values()} == {memory.data_ptr()}
    handout.expire(handed_out)
    assert len(marked) == 1 and kept


def test_only_the_storage_of_an_unreferenced_output_is_spare(marked: list[int]) -> None:
    handed_out: handout.HandedOut = []
    shell = handout.Shell(torch.arange(4.0))
    out = shell.hand_out((4,), handed_out)
    name = out.untyped_storage()._cdata
    assert not is_spare(name)
    view = out[:2]
    del out
    assert not is_spare(name)
    del view
    assert is_spare(name) and storage_use_count(name) > 0
    assert not is_spare(torch.ones(3).untyped_storage()._cdata)
    out = shell.hand_out((4,), handed_out)
    handout.expire(handed_out)
    assert marked == [name] and not is_spare(name)
    del shell, handed_out
    assert not is_spare(name) and out is not None
