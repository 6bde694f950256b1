"""Random forwards: right in plain calls, PIECEWISE and FULL, or refused by name.

The models of a seed are always the same; one that fails prints its smallest source.
"""

from __future__ import annotations

import shutil

import pytest

from tests.compile.random_models import outcome, smallest, source_of

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on the CPU needs g++"
)


def check_seeds(first: int, count: int, backend: str, device: str, cache_dir: str) -> None:
    """At most one of ten is refused, but for constants that stay on the host of a GPU."""
    refused = 0
    for seed in range(first, first + count):
        source = source_of(seed)
        kind, what = outcome(source, backend, device, cache_dir)
        if kind == "wrong":
            source = smallest(source, backend, device, cache_dir)
            what = outcome(source, backend, device, cache_dir)[1] or what
            pytest.fail(f"seed {seed}, {backend}: {what}\n{source.text()}")
        refused += kind == "refused" and "is a tensor on the host" not in (what or "")
    assert refused <= max(1, count / 10)


def test_some_random_models_give_eager_results_or_are_refused(tmp_path):
    check_seeds(0, 6, "eager", "cpu", str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_many_random_models_give_eager_results_or_are_refused(first, tmp_path):
    check_seeds(first, 100, "eager", "cpu", str(tmp_path))


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("first", range(1000, 1100, 10))
def test_random_models_give_eager_results_through_inductor(first, tmp_path):
    check_seeds(first, 10, "inductor", "cpu", str(tmp_path))


@pytest.mark.cuda
@pytest.mark.parametrize("first", range(2000, 2025, 5))
def test_random_models_give_eager_results_on_a_gpu(first, tmp_path):
    check_seeds(first, 5, "inductor", "cuda", str(tmp_path))
