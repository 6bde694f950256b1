"""Descriptors name graphs, so they normalise what is equal and refuse what contradicts itself."""

from __future__ import annotations

import pytest

from graphrt import BatchDescriptor
from graphrt.core.base import InvalidBatchError


def test_equal_graphs_have_equal_descriptors():
    assert BatchDescriptor(8, 4, uniform=True) == BatchDescriptor(8, 4, uniform=True, query_len=2)
    assert BatchDescriptor(8, num_active_loras=2).has_lora


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_tokens": 0},
        {"num_tokens": -3},
        {"num_tokens": 8, "num_reqs": 0},
        {"num_tokens": 8, "num_active_loras": -1},
        {"num_tokens": 8, "uniform": True},
        {"num_tokens": 8, "uniform": True, "num_reqs": 3},
        {"num_tokens": 8, "uniform": True, "query_len": 3},
    ],
)
def test_contradictions_are_named_errors(arguments):
    with pytest.raises(InvalidBatchError):
        BatchDescriptor(**arguments)
