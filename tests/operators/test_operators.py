"""torch's operator samples: equal to eager code bit for bit, or refused by name."""

from __future__ import annotations

import os
import random

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator samples import expecttest")

from graphrt.core.base import tree
from graphrt.cpu import graph
from tests.operators import listing, trial
from tests.operators.buffers import same
from tests.operators.samples import SAMPLES, Case, cases, chosen
from tests.operators.table import Row, rows_of
from tests.operators.trial import EQUAL, INVALID, REFUSED, Sample
from tests.operators.workers import tried

FOUND = (
    ("addbmm", torch.float32),
    ("as_strided", torch.float32),
    ("as_strided.partial_views", torch.float32),
    ("linalg.lstsq", torch.complex64),
    ("linalg.lu_solve", torch.complex64),
    ("linalg.pinv", torch.complex64),
    ("linalg.pinv.singular", torch.complex64),
    ("pinverse", torch.complex64),
    ("resize_", torch.float32),
    ("sparse.mm.reduce", torch.float32),
    ("sparse.sampled_addmm", torch.float32),
    ("squeeze", torch.float32),
    ("squeeze.multiple", torch.float32),
    ("t", torch.float32),
    ("transpose", torch.float32),
    ("unsqueeze", torch.float32),
    ("vdot", torch.complex64),
)
"""Operators of which a sample once was wrong, had no name for its error, or ended the process."""


def some(device: str, count: int, dtypes: tuple[torch.dtype, ...] | None = None) -> list[Case]:
    """So many cases, always the same ones."""
    every = cases(device) if dtypes is None else cases(device, dtypes)
    return random.Random(0).sample(every, count)


def bad(rows: list[Row]) -> list[str]:
    return [f"{row}: {v.outcome} {v.error} {v.why}" for row in rows for v in row.worst]


def test_operators_equal_eager_code_or_are_refused_by_name():
    rows = [row for case in some("cpu", 12) for row in rows_of(case, 3)]
    counts = sum((row.counts for row in rows), start=type(rows[0].counts)())
    assert bad(rows) == []
    assert counts[EQUAL] > counts[REFUSED] + counts[INVALID]
    assert sum(row.stays for row in rows) < len(rows) / 10


@pytest.mark.parametrize(("name", "dtype"), FOUND, ids=str)
def test_operators_with_earlier_wrong_results_equal_eager_code(name, dtype):
    assert bad(rows_of(Case(name, dtype, "cpu"), 8)) == []


@pytest.mark.parametrize("name", ["nonzero", "unique", "masked_select", "item", "bincount"])
def test_operators_with_data_dependent_shapes_are_refused(name):
    dtype = torch.int64 if name == "bincount" else torch.float32
    outcomes = {v.outcome for row in rows_of(Case(name, dtype, "cpu"), 4) for v in row.verdicts}
    assert outcomes <= {REFUSED, INVALID} and REFUSED in outcomes


@pytest.mark.parametrize("name", ["exp", "add", "native_batch_norm", "linalg.inv"])
def test_each_draw_of_an_operator_sample_has_different_numbers(name):
    for first, *others in chosen(Case(name, torch.float32, "cpu"), 4):
        if all(t.numel() > 3 for t in tree.tensors(first)):
            assert not any(same(first, other) for other in others)


def test_the_operator_check_finds_a_result_a_replay_left_stale(monkeypatch):
    assemble = graph.assemble

    def stale(steps, *args):
        return assemble([s for s in steps if s.lowered.kind != "again"], *args)

    monkeypatch.setattr(graph, "assemble", stale)
    monkeypatch.setattr(trial, "_CALLS", 8)
    assert bad(rows_of(Case("native_batch_norm", torch.float32, "cpu"), 2))


def test_the_operator_check_finds_a_replay_with_wrong_values(monkeypatch):
    call = Sample._call

    def wrong(self, function, draw):
        result = call(self, function, draw)
        if type(function).__name__ == "CPUGraphWrapper" and draw == 1:
            result.leaves[0][1].numbers.flatten()[0] += 1
        return result

    monkeypatch.setattr(Sample, "_call", wrong)
    monkeypatch.setattr(trial, "_CALLS", 8)
    assert bad(rows_of(Case("exp", torch.float32, "cpu"), 2))


def test_the_operator_check_finds_a_refusal_missing_from_the_list(monkeypatch, tmp_path):
    case = Case("nonzero", torch.float32, "cpu")
    rows, every = rows_of(case), cases("cpu", (torch.float32,))
    monkeypatch.setattr(listing, "FILE", tmp_path / "refused.json")
    listing.write(rows, "cpu")
    known = listing.listed() | {"operators tried": {"float32": len(every)}}
    monkeypatch.setattr(listing, "listed", lambda: known)
    assert listing.lacking(rows, "cpu") == []
    known["refused"] = []
    assert listing.lacking(rows, "cpu")


@pytest.mark.long
def test_all_samples_of_all_operators_equal_eager_or_are_listed_refusals():
    jobs = max(1, (os.cpu_count() or 1) // 2)
    rows = [row for found in tried(cases("cpu"), SAMPLES, jobs) for row in found]
    assert bad(rows) == []
    assert listing.lacking(rows, "cpu") == []


@pytest.mark.cuda
def test_operators_on_a_gpu_equal_eager_code_or_are_refused_by_name():
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    rows = [row for case in some("cuda", 250, dtypes) for row in rows_of(case, 3)]
    counts = sum((row.counts for row in rows), start=type(rows[0].counts)())
    assert bad(rows) == []
    assert counts[EQUAL] > counts[REFUSED] + counts[INVALID]
