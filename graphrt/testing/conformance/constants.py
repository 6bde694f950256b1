"""Constants that a forward makes of Python data: every replay has the values of the capture."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.core.base.errors import BakedScalarError, CaptureSyncError, PageableCopyError
from graphrt.core.capture.guard import eager_break
from graphrt.core.dispatch.reasons import Reason
from graphrt.core.replay.pool import GraphPool
from graphrt.testing.conformance.base import FULL, PIECEWISE, ConformanceBase

_WEIGHTS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def _scalars(x: torch.Tensor) -> torch.Tensor:
    low = torch.tensor(-3.0, device=x.device)
    return torch.where(x > 2, torch.tensor(0.0, device=x.device, dtype=x.dtype), low) + x


def _scalar_of_the_host(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 2, torch.tensor(0.0), x) * torch.tensor(2.0)


def _made_by_an_operator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.full((1,), 7.0).to(x.device)


def _computed_on_the_host(x: torch.Tensor) -> torch.Tensor:
    rotary = torch.arange(16, dtype=torch.float32).view(8, 2).t()[1] * 0.5
    return x * rotary.to(device=x.device, dtype=torch.float32)


def _cast_on_the_way(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([2] * 8, dtype=torch.int32).to(x)


def _new_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_tensor(_WEIGHTS) + torch.as_tensor(_WEIGHTS, device=x.device)


def _copied_into_memory(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made.copy_(torch.tensor(_WEIGHTS))
    return x + made


def _list_as_index(x: torch.Tensor) -> torch.Tensor:
    return x + x[:, [-2]] + x[:, torch.tensor([1])]


def _list_on_the_left(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[:, [0, 2]] = 5.0
    made[:, [1, 3]] = x[:, [4, 5]]
    return made


_MASK = [True, False, False, True, True, False, True, False]


def _element_on_the_left(x: torch.Tensor) -> torch.Tensor:
    made = x[:, 0].clone()
    made[0] = 5.0
    return x + made[:, None]


def _written_in_place(x: torch.Tensor) -> torch.Tensor:
    total = torch.tensor([0.0] * 8, device=x.device)
    for _ in range(3):
        total += 1
    return x * total


def _host_writes_between(x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_WEIGHTS)
    first = table.to(x.device)
    table += 1
    return x * first + table.to(x.device)


def _numpy() -> Any:
    return pytest.importorskip("numpy")


def _arrays(x: torch.Tensor) -> torch.Tensor:
    np = _numpy()
    weights = np.arange(8, dtype=np.float32)
    total = torch.from_numpy(weights).to(x.device) + torch.tensor(weights * 2, device=x.device)
    total += torch.as_tensor(weights * 3, device=x.device) + torch.asarray(weights).to(x) * 4
    return x * total + x[:, np.array([2, 0])].sum(1, keepdim=True)


def _computed_of_an_array(x: torch.Tensor) -> torch.Tensor:
    np = _numpy()
    turned = torch.from_numpy(np.arange(16, dtype=np.float32)).view(8, 2).t()[1] * 0.5
    return x * turned.to(x.device)


def _nothing(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([], device=x.device).sum()


_FORWARDS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    _scalars,
    _scalar_of_the_host,
    _made_by_an_operator,
    _computed_on_the_host,
    _cast_on_the_way,
    _new_tensor,
    _copied_into_memory,
    _list_as_index,
    _list_on_the_left,
    _element_on_the_left,
    _written_in_place,
    _host_writes_between,
    _nothing,
]
_OF_ARRAYS: list[Callable[[torch.Tensor], torch.Tensor]] = [_arrays, _computed_of_an_array]


def _all(x: torch.Tensor) -> torch.Tensor:
    for forward in _FORWARDS:
        x = forward(x) * 0.125
    return x


class ConstantConformance(ConformanceBase):
    @pytest.mark.parametrize(
        "forward", [*_FORWARDS, *_OF_ARRAYS, _all], ids=lambda each: each.__name__[1:]
    )
    def test_replays_have_the_constants_of_a_forward(
        self, pool: GraphPool, forward: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        wrapper = self.wrap(forward, FULL, pool)
        x = self.tensor(1, 2, 3, 4)
        expected = self.host(forward(x))
        assert torch.equal(self.host(self.capture(wrapper, FULL, x)), expected)
        self._pinned_memory_is_used_by_others()
        for values in ((4, 3, 2, 1), (0, 9, 0, 9), (1, 2, 3, 4)):
            x.copy_(self.tensor(*values))
            expected = self.host(forward(x))
            assert torch.equal(self.host(self.step(wrapper, FULL, x)), expected)

    def test_the_memory_they_are_copied_from_lives_as_long_as_the_graph(
        self, pool: GraphPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept: list[weakref.ref[torch.Tensor]] = []
        make = self.platform.host_buffer

        def noted(nbytes: int) -> torch.Tensor:
            buffer = make(nbytes)
            kept.append(weakref.ref(buffer))
            return buffer

        monkeypatch.setattr(self.platform, "host_buffer", noted)
        wrapper = self.wrap(_new_tensor, FULL, pool)
        self.capture(wrapper, FULL, self.tensor(1, 2, 3, 4))
        gc.collect()
        assert [ref() is None for ref in kept] == [False] * len(kept)
        assert bool(kept) == self.platform.needs_pinned_copies
        wrapper.clear_graphs()
        gc.collect()
        assert [ref() is None for ref in kept] == [True] * len(kept)

    def test_segments_have_their_own_constants(self, pool: GraphPool) -> None:
        @eager_break
        def attention(x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(_WEIGHTS, device=x.device)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return _all(attention(_all(x) + _written_in_place(x)))

        wrapper = self.wrap(forward, PIECEWISE, pool, breakable=True)
        x = self.tensor(1, 2, 3, 4)
        expected = self.host(forward(x))
        assert torch.equal(self.host(self.capture(wrapper, PIECEWISE, x)), expected)
        self._pinned_memory_is_used_by_others()
        x.copy_(self.tensor(0, 9, 0, 9))
        expected = self.host(forward(x))
        assert torch.equal(self.host(self.step(wrapper, PIECEWISE, x)), expected)

    @pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
    def test_a_runner_captures_them(self, mode: str) -> None:
        attention = eager_break(lambda x: x * 2)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return _all(attention(_all(x)))

        runner = self.runner_of(forward, mode=mode, sizes=[2, 4])
        runner.capture()
        for values in ((4, 3, 2, 1), (0, 9), (1, 2, 3, 4)):
            x = self.tensor(*values)
            expected = self.host(forward(x))
            assert torch.equal(self.host(runner(x=x)), expected)
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT
        runner.close()

    def test_a_tensor_of_the_hosts_is_no_constant(self, pool: GraphPool) -> None:
        table = torch.tensor(_WEIGHTS)
        x = self.tensor(1, 2, 3, 4)
        wrapper = self.wrap(lambda x: x * (table * 1).to(x.device), FULL, pool)
        if not self.platform.needs_pinned_copies:
            self.capture(wrapper, FULL, x)
            table += 1
            assert self.first(self.step(wrapper, FULL, x)) == [2, 4, 6, 8]
            return
        with pytest.raises(PageableCopyError, match=r"constants\.py"):
            self.capture(wrapper, FULL, x)

    @pytest.mark.parametrize("computed", [False, True])
    def test_an_array_that_is_written_is_read_anew_or_named(
        self, pool: GraphPool, computed: bool
    ) -> None:
        table = _numpy().ones(8, dtype="float32")

        def forward(x: torch.Tensor) -> torch.Tensor:
            host = torch.from_numpy(table)
            return x * (host * 2 if computed else host).to(x.device)

        x = self.tensor(1, 2, 3, 4)
        wrapper = self.wrap(forward, FULL, pool)
        self.capture(wrapper, FULL, x)
        self.step(wrapper, FULL, x)
        table += 1
        if self.platform.device_type == "cpu":
            assert torch.equal(self.host(self.step(wrapper, FULL, x)), self.host(forward(x)))
        if not self.platform.needs_pinned_copies:
            return
        with pytest.raises(BakedScalarError, match=r"constants\.py"):
            self.step(wrapper, FULL, x)
        table -= 1
        assert torch.equal(self.host(self.step(wrapper, FULL, x)), self.host(forward(x)))

    def test_a_constant_that_another_capture_returned_is_one(self, pool: GraphPool) -> None:
        def makes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            table = torch.tensor(_WEIGHTS)
            return x + table.to(x.device), table.view(8, 1)

        def reads(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x * (table.view(8) * 2).to(x.device)

        first, second = (self.wrap(each, FULL, pool) for each in (makes, reads))
        x = self.tensor(1, 2, 3, 4)
        self.capture(second, FULL, *self.capture(first, FULL, x))
        for values in ((4, 3, 2, 1), (0, 9, 0, 9)):
            x.copy_(self.tensor(*values))
            expected = self.host(reads(*makes(x)))
            constants = self.step(first, FULL, x)
            assert torch.equal(self.host(self.step(second, FULL, *constants)), expected)
        constants[1].add_(1)
        if self.platform.needs_pinned_copies:
            with pytest.raises(BakedScalarError, match="earlier piece"):
                self.step(second, FULL, *constants)

    def test_an_array_that_never_reaches_the_device_may_be_written(self, pool: GraphPool) -> None:
        table = _numpy().ones(8, dtype="float32")

        def forward(x: torch.Tensor) -> torch.Tensor:
            host = torch.from_numpy(table)
            return x * host.dim()

        x = self.tensor(1, 2, 3, 4)
        wrapper = self.wrap(forward, FULL, pool)
        self.capture(wrapper, FULL, x)
        table += 1
        assert self.first(self.step(wrapper, FULL, x)) == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        "mask", [lambda x: _MASK, lambda x: torch.tensor(_MASK, device=x.device)]
    )
    def test_a_mask_among_indices_is_no_constant(
        self, pool: GraphPool, mask: Callable[[torch.Tensor], Any]
    ) -> None:
        x = self.tensor(1, 2, 3, 4)
        wrapper = self.wrap(lambda x: x[:, mask(x)], FULL, pool)
        if not self.platform.needs_pinned_copies:
            pytest.skip("captures may run the forward")
        with pytest.raises(CaptureSyncError):
            self.capture(wrapper, FULL, x)

    def _pinned_memory_is_used_by_others(self) -> None:
        """Overwrite free pinned memory: a buffer that was freed too early gets other bytes."""
        self.platform.synchronize()
        buffers = [self.platform.host_buffer(size) for size in (4, 8, 32, 64, 256) for _ in "1234"]
        for buffer in buffers:
            buffer.fill_(0xEE)
