"""How far two results are apart: bits first, then values, over the size of what was expected."""

from __future__ import annotations

import struct
from typing import NamedTuple

import pytest
import torch

from graphrt.trust.compare import difference, rounding_of

nan, inf = float("nan"), float("inf")


def floats(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


OTHER_NAN = torch.tensor([*struct.pack("<I", 0x7FC00001)], dtype=torch.uint8).view(torch.float32)


@pytest.mark.parametrize(
    ("got", "expected", "relative"),
    [
        (floats(1, 2), floats(1, 2), None),
        (floats(nan, inf, -inf, -0.0), floats(nan, inf, -inf, -0.0), None),
        (floats(0.0), floats(-0.0), 0.0),
        (OTHER_NAN, floats(nan), 0.0),
        (floats(1, nan), floats(1, 1), inf),
        (floats(1, 1), floats(1, nan), inf),
        (floats(1, inf), floats(1, 1), inf),
        (floats(1, 1), floats(1, inf), inf),
        (floats(inf), floats(-inf), inf),
        (floats(3, 4), floats(3, 5), 1 / 17**0.5),
        (floats(2, 2), floats(2, 4), 2 / 10**0.5),
        (floats(inf, 3), floats(inf, 4), 0.25),
        (floats(nan, 3), floats(nan, 4), 0.25),
        (floats(1e-30), floats(0.0), inf),
        (floats(0.0), floats(2.0), 1.0),
        (floats(1, dtype=torch.bfloat16), floats(2, dtype=torch.bfloat16), 0.5),
        (floats(1, dtype=torch.float8_e5m2), floats(2, dtype=torch.float8_e5m2), 0.5),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 4j]), None),
        (torch.tensor([3 + 4j]), torch.tensor([0 + 5j]), 10**0.5 / 5),
        (torch.tensor([complex(nan, 1)]), torch.tensor([1 + 1j]), inf),
        (torch.tensor([complex(nan, 1)]), torch.tensor([complex(nan, 2)]), 0.0),
        (torch.tensor([3 + 4j]).conj(), torch.tensor([3 - 4j]), None),
        (torch.tensor([True]), torch.tensor([False]), inf),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), inf),
        (floats(), floats(), None),
        (torch.zeros(0, 3), torch.zeros(0, 4), inf),
        (torch.tensor(1.0), torch.tensor([1.0]), inf),
        (floats(1), floats(1, dtype=torch.float64), inf),
        (torch.zeros(2, 3), torch.zeros(3, 2), inf),
        (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]]), None),
        (1, 1, None),
        (1, 2, inf),
        (1, 1.0, inf),
        (1, True, inf),
        (nan, nan, None),
        ("a", "b", inf),
        (None, None, None),
        (floats(1), 1.0, inf),
        (floats(1), None, inf),
    ],
    ids=lambda value: "" if isinstance(value, torch.Tensor) else str(value),
)
def test_the_relative_difference_of_two_values(got, expected, relative):
    found = difference(got, expected)
    assert (None if found is None else found.relative) == (
        None if relative is None else pytest.approx(relative)
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(
    ("flips", "rounded", "relative"),
    [(1, True, 0.0), (2, True, 0.0), (3, True, inf), (1, False, inf), (0, True, None)],
)
def test_a_few_integers_may_be_flipped_by_rounding(dtype, flips, rounded, relative):
    expected = torch.zeros(16, dtype=dtype)
    got = expected.clone()
    got[:flips] = 100
    found = difference(got, expected, rounded=rounded)
    assert (None if found is None else found.relative) == relative
    assert found is None or found.text.startswith(f"{flips} of 16 values, by at most 100")


def test_without_rounding_a_single_changed_integer_is_an_infinite_difference():
    expected = torch.zeros(64, dtype=torch.int64)
    got = expected.clone()
    got[0] = 1
    assert difference(got, expected).relative == inf


def test_a_flipped_boolean_is_never_excused_by_rounding():
    got, expected = torch.zeros(64, dtype=torch.bool), torch.zeros(64, dtype=torch.bool)
    got[0] = True
    assert difference(got, expected, rounded=True).relative == inf


@pytest.mark.xfail(strict=True, reason="integers are compared as float64, which has 53 bits")
def test_a_difference_of_one_between_large_integers_is_found():
    expected = torch.full((8,), 1 << 60)
    found = difference(expected + 1, expected, rounded=True)
    assert found.relative == inf and found.text.startswith("8 of 8 values")


class Pair(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    ("got", "expected", "text"),
    [
        ({"a": 1}, {"b": 1}, "another structure"),
        ([1], [1, 2], "another structure"),
        ({"a": floats(1)}, {"a": [floats(1)]}, "another structure"),
        ({"a": floats(1), "b": floats(3)}, {"a": floats(1), "b": floats(1)}, "at ['b']"),
        (Pair(floats(1), 2), Pair(floats(1), 3), "2, not 3 at [1]"),
        ([floats(1), [floats(2, 3)]], [floats(1), [floats(2, 4)]], "1 of 2 values"),
        (torch.zeros(2), torch.zeros(3), "torch.float32 (2,), not torch.float32 (3,)"),
    ],
)
def test_a_difference_of_trees_is_described_with_its_place(got, expected, text):
    assert text in difference(got, expected).text


def test_the_largest_of_several_differences_is_reported():
    expected = [floats(1, 1), floats(1, 1), floats(1, 1)]
    found = difference([floats(1, 1.5), floats(1, 3), floats(1, 1)], expected)
    assert found.relative == 2 and found.text == "1 of 2 values, by at most 2 at [1]"
    # A difference in bits alone is one, too.
    assert difference([floats(0.0), floats(1)], [floats(-0.0), floats(1)]).relative == 0


def test_equal_trees_of_tensors_with_gradients_have_no_difference():
    leaf = torch.ones(2, requires_grad=True)
    assert difference({"a": [leaf, 1, None]}, {"a": [leaf.clone(), 1, None]}) is None
    assert difference(leaf * 2, leaf).relative == 1
    assert difference([], []) is None


@pytest.mark.parametrize(
    ("dtypes", "rounding"),
    [
        ([], 2e-4),
        ([torch.int64, torch.bool], 2e-4),
        ([torch.float64], 1e-8),
        ([torch.float64, torch.float32], 2e-4),
        ([torch.float32, torch.float16], 5e-2),
        ([torch.bfloat16, torch.float64], 1e-1),
        ([torch.float8_e4m3fn], 1e-1),
    ],
)
def test_the_rounding_tolerance_is_that_of_the_coarsest_dtype(dtypes, rounding):
    assert rounding_of(iter(dtypes), [], lambda use: "ieee") == rounding


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-2), (torch.bfloat16, 1e-1)])
def test_tf32_raises_the_rounding_tolerance_of_float32(dtype, rounding):
    assert rounding_of([dtype], [], lambda use: "tf32") == rounding
