"""A forward that cannot be captured raises with the user's line and leaves no half-made graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from graphrt import GraphMode, GraphPool, eager_break, get_platform
from graphrt.core.base.errors import (
    CaptureError,
    CaptureSyncError,
    PageableCopyError,
    ResourceExhaustedError,
)
from graphrt.testing.conformance.base import FULL, PIECEWISE, ConformanceBase

pytestmark = pytest.mark.cuda

DEVICE = "cuda"


def reads_an_item(x, side):
    hidden = x + 1
    return hidden * hidden[0, 0].item()  # offends


def reads_a_list(x, side):
    return x * len((x + 1).tolist())  # offends


def copies_to_the_host(x, side):
    total = (x + 1).sum()
    return x + total.cpu().item()  # offends


_OF_THE_HOST = torch.ones(4, 8)


def copies_from_pageable_memory(x, side):
    return x + _OF_THE_HOST.to(x.device)  # offends


def takes_a_boolean_mask(x, side):
    hidden = x + 1
    return hidden[hidden > 2].sum() + hidden  # offends


def takes_the_nonzero(x, side):
    return x + (x > 2).nonzero().shape[0]  # offends


def synchronises_the_device(x, side):
    hidden = x + 1
    torch.cuda.synchronize()  # offends
    return hidden


def waits_for_uncaptured_work(x, side):
    with torch.cuda.stream(side):
        x.add_(0)
    torch.cuda.current_stream().wait_stream(side)  # offends
    return x + 1


def allocates_on_a_stream_outside(x, side):
    with torch.cuda.stream(side):
        table = torch.ones(1 << 22, device=x.device)  # offends
    return x + table.shape[0]


def forks_onto_the_legacy_stream(x, side):
    legacy = torch.cuda.default_stream()
    legacy.wait_stream(torch.cuda.current_stream())  # offends
    with torch.cuda.stream(legacy):
        hidden = x + 1
    torch.cuda.current_stream().wait_stream(legacy)
    return hidden


def allocates_too_much(x, side):
    hidden = x + 1
    return hidden + torch.empty(1 << 47, device=x.device)[:32].view(4, 8)  # offends


def forgets_to_join(x, side):
    side.wait_stream(torch.cuda.current_stream())  # offends
    with torch.cuda.stream(side):
        forgotten = x * 2
    return x + forgotten.shape[0]


@eager_break
def between(x):
    return x * 10


def forks_before_a_break_and_joins_after_it(x, side):
    side.wait_stream(torch.cuda.current_stream())  # offends
    with torch.cuda.stream(side):
        doubled = x * 2
    attended = between(x + 1)
    torch.cuda.current_stream().wait_stream(side)
    return attended + doubled


class Case(NamedTuple):
    forward: Callable[..., Any]
    error: type[CaptureError]
    says: str = ""
    mode: GraphMode = FULL

    @property
    def place(self) -> str | None:
        """File, line and function of the line that is marked, if one is."""
        lines, first = inspect.getsourcelines(self.forward)
        marked = [first + place for place, line in enumerate(lines) if "# offends" in line]
        return f"{Path(__file__).name}:{marked[0]} in {self.forward.__name__}: " if marked else None


CASES = [
    Case(reads_an_item, CaptureSyncError, "host"),
    Case(reads_a_list, CaptureSyncError, "host"),
    Case(copies_to_the_host, CaptureSyncError, "host"),
    Case(copies_from_pageable_memory, PageableCopyError, "of the host's"),
    Case(takes_a_boolean_mask, CaptureSyncError, "host"),
    Case(takes_the_nonzero, CaptureSyncError, "host"),
    Case(synchronises_the_device, CaptureSyncError, "host"),
    Case(waits_for_uncaptured_work, CaptureError, "not being captured"),
    Case(allocates_on_a_stream_outside, CaptureSyncError, "not captured"),
    Case(forks_onto_the_legacy_stream, CaptureError, "default stream"),
    Case(allocates_too_much, ResourceExhaustedError, "memory"),
    Case(reads_an_item, CaptureSyncError, "host", PIECEWISE),
    Case(copies_from_pageable_memory, PageableCopyError, "of the host's", PIECEWISE),
]
UNJOINED = [
    Case(forgets_to_join, CaptureError, "fork"),
    Case(forgets_to_join, CaptureError, "fork", PIECEWISE),
    Case(forks_before_a_break_and_joins_after_it, CaptureError, "fork", PIECEWISE),
]


def name_of(case: Case) -> str:
    return f"{case.forward.__name__}-{case.mode.name}"


class TestErrors(ConformanceBase):
    platform = get_platform("cuda", must_be_available=False)

    def failed(self, pool: GraphPool, case: Case, side: torch.cuda.Stream) -> CaptureError:
        """The error of the case's capture, which leaves nothing behind."""
        x = self.tensor(1, 2, 3, 4)
        wrapper = self.wrap(case.forward, case.mode, pool, breakable=True)
        with pytest.raises(CaptureError) as caught:
            self.capture(wrapper, case.mode, x, side)
        assert not wrapper.entries
        self.check_usable(pool, side)
        return caught.value

    def check_usable(self, pool: GraphPool, side: torch.cuda.Stream) -> None:
        """Captures, replays and eager work go on, on the side stream as well."""
        x = self.tensor(1, 2, 3, 4)
        for mode in (FULL, PIECEWISE):
            good = self.wrap(lambda x: between(x + 1) - 1, mode, pool, breakable=True)
            assert self.first(self.capture(good, mode, x)) == [19, 29, 39, 49]
            x.copy_(self.tensor(5, 6, 7, 8))
            assert self.first(self.step(good, mode, x)) == [59, 69, 79, 89]
            x.copy_(self.tensor(1, 2, 3, 4))
        assert self.first(torch.mm(x, x.t())) == [8, 16, 24, 32]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert self.first(x[x[:, 0] > 2] + 1) == [4, 5]
        torch.cuda.synchronize()
        assert torch.rand(8, device=DEVICE).isfinite().all()

    @pytest.mark.parametrize("case", CASES, ids=name_of)
    def test_a_capture_error_names_the_cause_and_the_users_line(
        self, pool: GraphPool, case: Case
    ) -> None:
        error = self.failed(pool, case, torch.cuda.Stream())
        assert isinstance(error, case.error), repr(error)
        assert case.says in str(error)
        assert case.place is not None and error.source is not None
        assert case.place in error.source
        assert error.source in str(error)

    @pytest.mark.parametrize("case", UNJOINED, ids=name_of)
    def test_a_capture_with_an_unjoined_stream_raises_a_named_error(
        self, pool: GraphPool, case: Case
    ) -> None:
        side = torch.cuda.Stream()
        error = self.failed(pool, case, side)
        assert case.says in str(error)
        assert hex(side.cuda_stream) in str(error).lower()
        assert case.place is not None and case.place in str(error.source)

    def test_after_each_failed_capture_the_next_capture_works(self, pool: GraphPool) -> None:
        for case in (*UNJOINED, *CASES):
            self.failed(pool, case, torch.cuda.Stream())
