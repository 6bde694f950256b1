"""Arguments of attention that are none are named before anything is made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphrt.attention import GroupedShape, TritonAttention
from graphrt.errors import InvalidOptionError

SHAPE = GroupedShape(num_heads=8, num_kv_heads=2, head_dim=32, page_size=16)


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.zeros(2), "x", 0, None], ids=str)
@pytest.mark.parametrize("name", ["max_num_reqs", "max_query_len", "max_context", "splits"])
def test_wrong_bounds_and_split_policies_are_refused_by_triton_attention(name, value):
    if name == "max_context" and value is None:
        return
    with pytest.raises(InvalidOptionError, match=r"must be|option .splits. has a wrong value"):
        TritonAttention(SHAPE, **{"max_num_reqs": 4, "device": "cpu", name: value})
