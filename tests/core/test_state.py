"""State saved around a capture: tensors, rows, and the host's own way."""

from __future__ import annotations

import pytest
import torch

from graphrt import State
from graphrt.core.base import InvalidOptionError, StateTooLargeError
from graphrt.core.capture import SavedState


def test_tensors_are_restored_in_place_as_often_as_asked():
    tensor, scalar = torch.arange(4.0), torch.tensor(3)
    saved = SavedState([tensor, scalar], limit_bytes=1 << 20)
    for _ in range(2):
        tensor.zero_()
        scalar.add_(1)
        saved.restore()
        assert tensor.tolist() == [0, 1, 2, 3]
        assert scalar.item() == 3


@pytest.mark.parametrize("rows", [slice(1, 3), [1, 2], torch.tensor([1, 2])])
def test_only_the_named_rows_are_saved(rows):
    tensor = torch.arange(4.0)
    saved = SavedState([State(tensor, rows=rows)], limit_bytes=8)
    tensor.fill_(9)
    saved.restore()
    assert tensor.tolist() == [9, 1, 2, 9]


def test_a_hosts_own_functions_are_used():
    box = [1]
    saved = SavedState([State(save=box.copy, restore=lambda old: box.__setitem__(0, old[0]))], 0)
    box[0] = 5
    saved.restore()
    assert box == [1]


def test_state_over_the_limit_is_refused_with_the_advice():
    with pytest.raises(StateTooLargeError, match="dummy page") as caught:
        SavedState([torch.zeros(1000)], limit_bytes=3999)
    assert "4000 bytes" in str(caught.value)


def test_a_state_that_is_neither_is_a_named_error():
    with pytest.raises(InvalidOptionError):
        State()
    with pytest.raises(InvalidOptionError):
        State(save=lambda: 0)
