"""What to write where nobody says which dimensions are the batch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphrt
from graphrt import CompileOptions, GraphPool
from graphrt.compile import CompileError


def test_the_advice_for_missing_dynamic_dims_names_the_argument_and_works():
    module = nn.Linear(4, 4).eval()
    with pytest.raises(CompileError, match=r"try: dynamic_dims=\{'input': 0\}"):
        graphrt.compile(module, pool=GraphPool("cpu"))
    options = CompileOptions(backend="eager")
    graphrt.compile(module, pool=GraphPool("cpu"), dynamic_dims={"input": 0}, options=options)
    with torch.no_grad():
        assert module(torch.ones(3, 4)).shape == (3, 4)
