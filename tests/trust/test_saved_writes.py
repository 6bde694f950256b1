"""Memory from outside is, after `restore`, bit for bit what it was before runs wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphrt.core.base import tree
from graphrt.core.base.errors import StateTooLargeError
from graphrt.trust.watching.watch import Watch
from graphrt.trust.watching.writes import SavedWrites, protection_check

MUCH = 1 << 20
ROWS, COLUMNS = 6, 4


def index(*rows: int) -> torch.Tensor:
    return torch.tensor(rows)


# Overlapping views of one storage.
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda base: base,
    lambda base: base[1:4],
    lambda base: base[::2],
    lambda base: base.t()[1:3].t(),
    lambda base: base.view(-1)[3:19].view(4, 4),
    lambda base: base[:, 2:],
]

WRITES: dict[str, Callable[[torch.Tensor, int, float], Any]] = {
    "add_": lambda t, row, x: t.add_(x),
    "copy_": lambda t, row, x: t.copy_(torch.full((1,), x)),
    "zero_": lambda t, row, x: t.zero_(),
    "row": lambda t, row, x: t[row].fill_(x),
    "column": lambda t, row, x: t[:, row % 2].mul_(x),
    "index_put_": lambda t, row, x: t.index_put_((index(row, 0),), torch.tensor(x).to(t)),
    "accumulated": lambda t, row, x: t.index_put_(
        (index(row, row),), torch.tensor(x).to(t), accumulate=True
    ),
    "second index": lambda t, row, x: t.__setitem__((slice(None), index(row % 2)), x),
    "two indices": lambda t, row, x: t.__setitem__((index(row, 1), index(0, 1)), x),
    "mask": lambda t, row, x: t.__setitem__(t > x, x),
    "index_copy_": lambda t, row, x: t.index_copy_(0, index(row), t[:1] + x),
    "index_add_": lambda t, row, x: t.index_add_(0, index(row, row), t[:2] * x),
    "index_fill_": lambda t, row, x: t.index_fill_(1, index(row % 2), x),
    "index_reduce_": lambda t, row, x: t.index_reduce_(0, index(row), t[:1] * x, "prod"),
    "scatter_": lambda t, row, x: t.scatter_(0, index(row, 0).view(2, 1), x),
    "scatter_add_": lambda t, row, x: t.scatter_add_(0, index(row, row).view(2, 1), t[:2] + x),
    "scatter_reduce_": lambda t, row, x: t.scatter_reduce_(
        0, index(row, 1).view(2, 1), t[:2] + x, "amax"
    ),
    "foreach": lambda t, row, x: torch._foreach_mul_([t[row], t[0]], x),
    "out": lambda t, row, x: torch.add(t[:1], x, out=t[row : row + 1]),
    "random": lambda t, row, x: t.normal_(),
    "set_to_sorted": lambda t, row, x: torch.sort(t.clone(), out=(t, torch.empty(0).long())),
}

RUNS = st.lists(
    st.tuples(
        st.integers(0, len(VIEWS) - 1),
        st.sampled_from(sorted(WRITES)),
        st.integers(0, 2),
        st.sampled_from([0.5, -0.0, 2.0, float("nan"), float("inf")]),
    ),
    max_size=8,
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tree.octets(tensor).tolist())


def do(saves: SavedWrites, base: torch.Tensor, run: list[tuple[int, str, int, float]]) -> None:
    def function():
        for view, name, row, x in run:
            WRITES[name](VIEWS[view](base), row, x)

    Watch(saves=saves).around(function)


def fresh(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    base = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) - 7
    base[0, 0], base[1, 1], base[2, 2] = float("nan"), -0.0, float("inf")
    return base.to(dtype)


@settings(max_examples=150)
@given(run=RUNS, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_any_writes_through_overlapping_views_are_put_back(run, dtype):
    base, saves = fresh(dtype), SavedWrites(MUCH)
    before = bits(base)
    do(saves, base, run)
    after = bits(base)
    saves.restore()
    assert bits(base) == before
    saves.restore()
    assert bits(base) == before
    assert run or (after == before and saves.bytes == 0)


@settings(max_examples=100)
@given(runs=st.lists(RUNS, min_size=2, max_size=4))
def test_writes_of_several_runs_from_the_same_state_are_put_back(runs):
    base, saves = fresh(), SavedWrites(MUCH)
    before = bits(base)
    for run in runs:
        do(saves, base, run)
        saves.restore()
        assert bits(base) == before


@settings(max_examples=100)
@given(first=RUNS, second=RUNS)
def test_values_taken_after_a_run_can_be_restored_later(first, second):
    base, saves = fresh(), SavedWrites(MUCH)
    do(saves, base, first)
    left, values = bits(base), saves.take()
    saves.restore()
    do(saves, base, second)
    saves.restore()
    saves.restore(values)
    assert bits(base) == left


@pytest.mark.parametrize("name", ["add_", "index_copy_"])
def test_after_a_memory_error_in_a_copy_the_next_run_is_saved(name, monkeypatch):
    base, saves = fresh(), SavedWrites(MUCH)
    before = bits(base)

    def no_memory(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("graphrt.trust.watching.writes.Region", no_memory)
        with pytest.raises(MemoryError):
            Watch(saves=saves).around(lambda: WRITES[name](base, 1, 2.0))
    Watch(saves=saves).around(lambda: WRITES[name](base, 1, 2.0))
    assert bits(base) != before
    saves.restore()
    assert bits(base) == before


def test_taken_values_are_copies_of_the_tensors():
    base, saves = torch.zeros(4), SavedWrites(MUCH)
    Watch(saves=saves).around(lambda: base.add_(1))
    [values] = saves.take()
    base.add_(1)
    assert values.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["index_copy_", "index_fill_", "scatter_"])
def test_writes_to_tensors_without_dimensions_are_put_back(name):
    state, saves = torch.tensor(3.0), SavedWrites(MUCH)
    source = torch.tensor(5.0) if name != "index_fill_" else 5.0
    Watch(saves=saves).around(lambda: getattr(state, name)(0, torch.tensor(0), source))
    assert state.item() == 5
    saves.restore()
    assert state.item() == 3


def test_rows_are_restored_though_the_run_changed_its_index_afterwards():
    state, rows, saves = torch.zeros(4), torch.tensor([1]), SavedWrites(MUCH)

    def run():
        state.index_fill_(0, rows, 7.0)
        rows.add_(1)

    Watch(saves=saves).around(run)
    saves.restore()
    assert state.tolist() == [0.0] * 4 and rows.tolist() == [1]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_writes_to_inference_tensors_and_parameters_are_put_back(inference, around):
    with torch.inference_mode(inference):
        state, rows = torch.zeros(4), torch.zeros(4, 2)
    weight = torch.zeros(4, requires_grad=not inference)
    saves = SavedWrites(MUCH)

    def run():
        with torch.inference_mode(inference), torch.no_grad():
            state.add_(1)
            rows[1] = 2
            rows.index_fill_(0, torch.tensor([3]), 4.0)
            weight.add_(1)

    Watch(saves=saves).around(run)
    with around():
        values = saves.take()
        saves.restore()
        saves.restore(values)
        assert state.sum() == 4 and rows.sum() == 12
        saves.restore()
        assert state.sum() == rows.sum() == weight.sum() == 0
    assert not any(each.requires_grad for each in values)


@pytest.mark.parametrize(
    ("write", "elements"),
    [
        (lambda t: t.index_put_((index(1, 2),), torch.tensor(1.0)), 2 * 8),
        (lambda t: t.index_copy_(0, index(3), torch.ones(1, 8)), 8),
        (lambda t: t.index_fill_(1, index(3, 4, 5), 1.0), 3 * 100),
        (lambda t: t.scatter_(0, torch.ones(1, 4, dtype=torch.int64), 1.0), 4),
        (lambda t: t[7].add_(1), 8),
        (lambda t: t.add_(1), 800),
        (lambda t: (t.add_(1), t.mul_(2), t.index_fill_(0, index(1), 0.0)), 800),
        (lambda t: (t[:50].add_(1), t[:50].add_(1), t[50:].add_(1)), 800),
        (lambda t: torch._foreach_add_([t[0], t[1]], 1.0), 16),
        (lambda t: t + 1, 0),
        (lambda t: t[:0].add_(1), 0),
    ],
)
def test_only_written_elements_are_saved_and_each_only_once(write, elements):
    state, saves = torch.zeros(100, 8), SavedWrites(MUCH)
    Watch(saves=saves).around(lambda: write(state))
    assert saves.bytes == elements * 4


def test_rows_written_by_several_runs_are_saved_only_once():
    state, saves = torch.zeros(100, 8), SavedWrites(MUCH)
    for _ in range(5):
        Watch(saves=saves).around(lambda: state.index_copy_(0, index(3), torch.ones(1, 8)))
        saves.restore()
    assert saves.bytes == 8 * 4


def test_writes_by_index_along_any_dimension_are_saved_and_restored():
    state, saves = torch.zeros(4, 4, 4), SavedWrites(MUCH)
    one, two = index(1, 2), index(0, 3)
    writes: list[Callable[[], Any]] = [
        lambda: state.index_copy_(0, one, torch.ones(2, 4, 4)),
        lambda: state.index_copy_(-1, one, torch.ones(4, 4, 2)),
        lambda: state.index_put_((one.int(),), torch.ones(2, 4, 4)),
        lambda: state.scatter_(0, one.view(1, 2, 1), 1.0),
        lambda: state.scatter_(1, one.view(1, 2, 1), 1.0),
        lambda: state.index_put_((one, two), torch.ones(2, 4)),
        lambda: state.__setitem__((one, slice(None), two), torch.ones(2, 4)),
        lambda: state.__setitem__((two, slice(None), one), torch.ones(2, 4)),
        lambda: state.__setitem__((torch.arange(4) > 2, two[:1]), torch.ones(1, 4)),
    ]
    for write in writes:
        Watch(saves=saves).around(write)
        assert state.any()
        saves.restore()
        assert not state.any()


def test_rows_beyond_the_limit_raise_naming_the_line_before_any_write():
    state, saves = torch.zeros(100, 8), SavedWrites(95)
    fill = lambda *rows: state.index_fill_(0, index(*rows), 1.0)  # noqa: E731
    with pytest.raises(StateTooLargeError, match=r"96 bytes.*test_saved_writes.py") as raised:
        Watch(saves=saves).around(lambda: fill(1, 2, 3))
    assert "at most 95 bytes" in str(raised.value)
    assert state.sum() == 0
    exactly = SavedWrites(96)
    Watch(saves=exactly).around(lambda: fill(1, 2, 3))
    exactly.restore()
    assert state.sum() == 0


@pytest.mark.parametrize(("limit", "protected"), [(128, 0), (127, 1)])
def test_a_tensor_too_large_to_save_is_checked_by_sums_and_not_restored(limit, protected):
    state, saves = torch.zeros(8, 4), SavedWrites(limit)
    Watch(saves=saves).around(lambda: state.mul_(2).add_(1))
    saves.restore()
    checked = saves.check_protected([0, 1, 2, 3, 4, 5, 6, 7])
    assert len(checked) == protected
    assert bool(protected) == (state.sum().item() != 0)


def test_without_sums_a_tensor_too_large_to_save_is_not_checked():
    state, small = torch.zeros(8, 4), torch.zeros(2)
    saves = SavedWrites(16, sums=False)
    Watch(saves=saves).around(lambda: (small.add_(1), state.add_(1)))
    saves.restore()
    assert saves.check_protected([]) == []
    assert state.sum() == 32 and small.sum() == 0


ROW = torch.tensor([1, 4, 7, 7])
SLOT = torch.tensor([0, 2, 3, 3])
PADDED_WRITES: dict[str, Callable[[torch.Tensor, int], object]] = {
    "index_copy_": lambda s, n: s.index_copy_(1, ROW[:n], torch.ones(2, n, 3, 5)),
    "index_put_": lambda s, n: s.__setitem__((slice(None), ROW[:n]), 1.0),
    "two indices": lambda s, n: s.__setitem__((slice(None), ROW[:n], SLOT[:n] % 3), 1.0),
    "apart": lambda s, n: s.__setitem__((slice(None), ROW[:n], slice(None), SLOT[:n]), 1.0),
    "scatter_": lambda s, n: s.scatter_(1, ROW[:n].view(1, n, 1, 1).expand(2, n, 3, 5), 1.0),
    "whole": lambda s, n: s.copy_(
        torch.zeros(8).index_fill_(0, ROW[:n], 1.0).view(8, 1, 1).expand(2, 8, 3, 5) + s
    ),
}


@pytest.mark.parametrize("name", PADDED_WRITES)
@pytest.mark.parametrize("pads", [[7], [5], []])
def test_only_rows_that_padding_writes_may_differ_from_the_unpadded_run(name, pads):
    state, saves = torch.zeros(2, 8, 3, 5), SavedWrites(MUCH)
    left: list[list[torch.Tensor]] = []
    # The first run saves memory that the second writes too.
    for rows in (4, 2, 4, 2):
        Watch(saves=saves).around(lambda rows=rows: PADDED_WRITES[name](state, rows))
        left.append(saves.take())
        saves.restore()
    # Rows behind the live ones of an index by rows are of padding, if anything is.
    expected = not pads or (name in ("scatter_", "whole") and pads == [5])
    assert (saves.spoilt_by_padding(left[2], left[3], pads, [(4, 2)], 0.0) is not None) is expected
    # Live rows may not differ.
    left[2] = [each + 1 for each in left[2]]
    assert saves.spoilt_by_padding(left[2], left[3], pads, [(4, 2)], 0.0) is not None


# Memory that only padding protects ---------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (5,), (5, 7, 3), (9, 8, 4), (2, 5, 3, 1)])
def test_the_check_by_sums_names_exactly_the_changed_rows(dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    keys_and_values = shape[0] == 2
    rows = shape[1 if keys_and_values else 0]
    for row in range(rows):
        own = protection_check(tensor, "cache")
        for place in [(0, row), (1, row)] if keys_and_values else [(row,)]:
            flat = tensor[place].view(-1) if tensor.dim() > len(place) else tensor[place]
            last = (-1,) if flat.dim() else ()
            now = protection_check(tensor, "cache")
            flat[last] = 1
            assert now([row]) == f"cache: rows {row} written by padding"
            flat[last] = 0
        assert own([]) == "cache: rows none written by padding"


@pytest.mark.parametrize(
    ("shape", "written", "pads", "ok"),
    [
        ((8, 3), [0], [0], True),
        ((8, 3), [7], [0], False),
        ((8, 3), [0, 7], [0], False),
        ((8, 3), [0, 7], [0, 7], True),
        ((8, 3), [7], [-1], False),  # addresses nothing
        ((8, 3), [], [-1], True),
        ((8, 3), [2], [2 * 3 + 1], True),  # a slot in a page of three
        ((8, 3), [1], [2 * 3 + 1], False),
        ((8,), [5], [5], True),
        ((2, 8, 3), [5], [5], True),
        ((2, 8, 3), [5], [16], True),
        ((2, 8, 3), [1], [16], False),
        ((2, 8, 3), [1], [0], False),
        ((1, 8, 3), [5], [5], True),
        ((1, 8, 3), [5], [0], False),
        ((2,), [1], [1], True),
        ((2, 3), [1], [0], False),
        ((3, 3), [1], [0], False),
        ((8, 16, 4, 3), [7], [7 * 16], True),  # pages of slots of heads
        ((8, 16, 4, 3), [7], [7 * 4], False),
        ((17, 4, 32, 8), [16], [16 * 32], True),  # pages of heads of slots
        ((17, 4, 32, 8), [15], [16 * 32], False),
        ((2, 17, 4, 32, 8), [16], [16 * 32], True),
        ((17, 4, 32), [16], [16 * 32], False),
    ],
)
def test_changed_rows_pass_only_in_rows_or_pages_named_by_padding(shape, written, pads, ok):
    tensor = torch.zeros(shape)
    own = protection_check(tensor, "cache")
    keys_and_values = len(shape) > 1 and shape[0] <= 2
    for row in written:
        (tensor[-1] if keys_and_values else tensor)[row] = 3.0
    if ok:
        assert "written by padding" in own(pads)
        return
    with pytest.raises(StateTooLargeError, match="other than those of padding") as raised:
        own(pads)
    other = [row for row in written if row not in pads]
    assert f"rows {', '.join(map(str, other))}\n" in str(raised.value)
    assert str(sorted(set(pads))) in str(raised.value)


def test_an_error_about_many_rows_lists_the_first_and_counts_the_rest():
    tensor = torch.zeros(20, 2)
    own = protection_check(tensor, "cache")
    tensor[3:] = 1
    with pytest.raises(StateTooLargeError, match=r"rows 3, 4, 5, 6, 7, 8, 9, 10 and 9 more"):
        own([])


def test_a_strided_view_with_an_odd_offset_is_summed_row_by_row():
    base = torch.zeros(10, 16, dtype=torch.uint8)
    for view in (base[1::2, 3:12], base.view(-1)[1:145].view(9, 16), base.t()):
        own = protection_check(view, "cache")
        view[2, 0] = 1
        assert own([2]) == "cache: rows 2 written by padding"
        view[2, 0] = 0


def test_data_moved_from_keys_to_values_changes_the_sums():
    tensor = torch.zeros(2, 4, 3)
    tensor[0, 1] = 5
    own = protection_check(tensor, "cache")
    tensor[1, 1], tensor[0, 1] = 5.0, 0.0
    assert own([1]) == "cache: rows 1 written by padding"


def test_a_scalar_tensor_beyond_the_limit_raises_state_too_large():
    state, saves = torch.tensor(0.0), SavedWrites(0)

    def run():
        Watch(saves=saves).around(lambda: state.add_(1))
        saves.check_protected([])

    with pytest.raises(StateTooLargeError):
        run()


AT = torch.tensor([3, 5])
PARTS: dict[str, Callable[[torch.Tensor], object]] = {
    "index_copy_": lambda s: s.index_copy_(2, AT, torch.ones(4, 8, 2, 16)),
    "index_add_": lambda s: s.index_add_(2, AT, torch.ones(4, 8, 2, 16)),
    "index_fill_": lambda s: s.index_fill_(-2, AT, 3.0),
    "index_put_": lambda s: s.__setitem__((slice(None), slice(None), AT), 7.0),
    "two indices": lambda s: s.__setitem__((AT - 3, slice(None), AT), 7.0),
    "index behind a slice": lambda s: s[:, 1:3].__setitem__((slice(None), 0, AT), 7.0),
    "list": lambda s: s.__setitem__((slice(None), slice(None), [3, 5]), 7.0),
    "scatter_": lambda s: s.scatter_(3, AT.expand(4, 8, 64, 2).clone(), 2.0),
    "scatter_add_": lambda s: s.scatter_add_(
        2, AT.view(2, 1).expand(4, 8, 2, 16).clone(), torch.ones(4, 8, 2, 16)
    ),
    "slice": lambda s: s.__setitem__((slice(None), slice(None), slice(3, 5)), 7.0),
    "copy to a slice": lambda s: s[..., 2:4].copy_(torch.ones(4, 8, 64, 2)),
    "select": lambda s: s[:, :, 3].add_(1),
    "narrow": lambda s: s.narrow(2, 3, 2).mul_(2),
    "mask": lambda s: s.__setitem__(s > 3, 0.0),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_write_by_index_saves_only_the_elements_written(name: str) -> None:
    state = torch.randn(4, 8, 64, 16)
    state.view(-1)[0] = 4.0
    before, saves = state.clone(), SavedWrites(MUCH)
    Watch(frozenset(), saves).around(lambda: PARTS[name](state))
    assert not torch.equal(state, before)
    assert saves.bytes <= state.nbytes / 8
    saves.restore()
    assert torch.equal(state, before)
