"""Padding of host arguments, which the host never does itself."""

from __future__ import annotations

import pytest

from graphrt import HostArg
from graphrt.core.errors import InvalidUpdateError

TOKENS, REQS = 8, 4


@pytest.mark.parametrize(
    ("arg", "value", "expected"),
    [
        (HostArg("reqs", "zero"), [5, 6], [5, 6, 0, 0]),
        (HostArg("reqs", "repeat"), [5, 6], [5, 6, 6, 6]),
        (HostArg("reqs", "cumulative"), [2, 4], [2, 4, 4, 8]),
        (HostArg("reqs", "cumulative"), [2, 4, 6, 8], [2, 4, 6, 8]),
        (HostArg("tokens", "zero"), [1], [1] + [0] * 7),
        (HostArg(None), "BSND", "BSND"),
    ],
)
def test_values_are_padded_to_the_graph(arg, value, expected):
    assert arg.fitted("lengths", value, TOKENS, REQS) == expected


@pytest.mark.parametrize(
    ("arg", "value"),
    [
        (HostArg("reqs"), [1] * 5),
        (HostArg("reqs"), []),
        (HostArg("reqs", "cumulative"), [4, 2]),
        (HostArg("reqs", "cumulative"), [4, 9]),
        (HostArg("reqs", "cumulative"), [-1, 3]),
    ],
)
def test_values_that_do_not_fit_are_named_errors(arg, value):
    with pytest.raises(InvalidUpdateError, match="lengths"):
        arg.fitted("lengths", value, TOKENS, REQS)
