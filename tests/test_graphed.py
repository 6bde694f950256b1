"""`graphrt.graphed`: graphs of a module in two lines, and what it refuses."""

from __future__ import annotations

import functools
import gc
import operator
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphrt
from graphrt import GraphRunner, InputSpec, Reason
from graphrt.core.base.torch_names import runs_hooks
from graphrt.errors import (
    CaptureError,
    CaptureSyncError,
    GraphQuarantinedWarning,
    InvalidInputError,
    InvalidOptionError,
    OutputError,
)

GRAPHED: Any = graphrt.graphed


class Scaled(torch.nn.Module):
    """Rows times a table of constant size, with a second result and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.requires_grad_(False).eval()

    def forward(self, x: torch.Tensor, scale: torch.Tensor, twice: bool = False) -> dict[str, Any]:
        """Two results by name."""
        rows = self.linear(x) * scale.sum()
        return {"rows": rows * 2 if twice else rows, "sums": (rows.sum(-1), scale.sum())}


class Cached(torch.nn.Module):
    """Writes rows of a cache that an input addresses, or that a position is computed of."""

    def __init__(self, rows: int = 9) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(rows, 4))
        self.calls = torch.zeros(1)
        self.table = torch.rand(10, 4)
        self.eval()

    def forward(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The rows as the cache has them."""
        self.calls += 1
        self.cache[slots + 0] = self.table[ids]
        return self.cache[slots] * 2


def linear() -> torch.nn.Module:
    """A model of one input."""
    return torch.nn.Linear(4, 3).eval().requires_grad_(False)


def test_a_model_has_graphs_in_two_lines() -> None:
    """Every number of rows is a hit, with eager's results."""
    model = linear()
    fast = GRAPHED(model, inputs=(torch.rand(4, 4),), sizes=[1, 2, 4])
    for rows in range(1, 5):
        x = torch.rand(rows, 4)
        assert torch.allclose(fast(x), model(x), atol=1e-6)
        assert fast.runner.last_dispatch.reason is Reason.HIT
    assert any(each.status == "tried" for each in fast.runner.report().trust.trials)


def test_results_are_the_callers_own() -> None:
    """Ten results are kept, and the first still has its values."""
    fast = GRAPHED(linear(), torch.rand(4, 4))
    xs = [torch.rand(3, 4) for _ in range(10)]
    kept = [fast(x) for x in xs]
    assert torch.equal(kept[0], fast(xs[0]))


def test_sizes_are_powers_of_two_up_to_the_rows_given() -> None:
    """The largest is the number of rows given."""
    fast = GRAPHED(linear(), torch.rand(6, 4))
    assert {key[1].num_tokens for key in fast.runner.plan.keys} == {1, 2, 4, 6}


@pytest.mark.parametrize("keywords", [False, True])
@pytest.mark.parametrize("call", ["positional", "mixed", "keywords"])
def test_inputs_are_given_by_position_or_by_keyword(keywords: bool, call: str) -> None:
    """However they were given first, and are given then."""
    model, x, scale = Scaled(), torch.rand(4, 4), torch.rand(5)
    given: Any = {"scale": scale, "x": x} if keywords else (x, scale)
    fast = GRAPHED(model, given, [2, 4], axes={"scale": (None,)})
    x = x[:3]
    got = {
        "positional": lambda: fast(x, scale),
        "mixed": lambda: fast(x, scale=scale),
        "keywords": lambda: fast(scale=scale, x=x),
    }[call]()
    assert torch.allclose(got["rows"], model(x, scale)["rows"])
    assert got["sums"][0].shape == (3,)


def test_an_input_in_a_mapping_is_an_argument_that_is_a_dict() -> None:
    """Its tensors have dotted names."""

    def forward(x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x + more["y"]

    x = torch.rand(4, 2)
    fast = GRAPHED(forward, (x, {"y": x}))
    assert torch.equal(fast(x[:3], {"y": x[:3]}), x[:3] * 2)


def test_arguments_without_a_name_keep_their_place() -> None:
    """`*tensors` are called in their order."""

    def forward(first: torch.Tensor, /, *others: torch.Tensor) -> torch.Tensor:
        return first - sum(others)

    x = torch.rand(4, 2)
    fast = GRAPHED(forward, (x, x, x))
    assert torch.equal(fast(x[:3], x[:3], x[:3]), -x[:3])


@pytest.mark.parametrize("sizes", [[4], [1, 4]])
def test_rows_of_the_results_are_told_by_two_sizes(sizes: list[int]) -> None:
    """A result with as many constant rows as the batch has is not cut."""
    table = torch.rand(4, 2)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, table + 1

    fast = GRAPHED(forward, torch.rand(4, 2), sizes)
    rows, whole = fast(torch.rand(3, 2))
    assert (rows.shape, whole.shape) == ((3, 2), (4, 2))


def test_rows_that_grow_otherwise_are_refused() -> None:
    """Two rows for each are no axis."""
    with pytest.raises(OutputError, match="axes"):
        GRAPHED(lambda x: torch.cat([x, x]), torch.rand(4, 2))


def test_the_state_is_as_before() -> None:
    """The runs that show the results' axes, captures and trials leave no trace."""
    model = Cached()
    ids, slots = torch.tensor([1, 2, 3]), torch.tensor([0, 3, 5])
    spec = InputSpec(torch.int64, ("rows",), index=True, pad=-1)
    fast = GRAPHED(model, (ids, slots), axes={"slots": spec})
    assert not model.calls.any() and not model.cache.any()
    assert torch.equal(fast(ids, slots), model.table[ids] * 2)
    assert fast.runner.last_dispatch.reason is Reason.HIT and model.calls.item() == 1


def advised(error: InvalidInputError) -> dict[str, InputSpec]:
    """The axes that an error advises."""
    shown = re.search(r"axes=(\{.*\)\})", str(error))
    assert shown
    axes: dict[str, InputSpec] = eval(shown[1], {"InputSpec": InputSpec, "torch": torch})
    return axes


def advised_with(text: str, pad: float) -> dict[str, InputSpec]:
    """The axes that an error advises, with a padding for P."""
    shown = re.search(r"axes=(\{.*?\)\})", text)
    assert shown
    names = {"InputSpec": InputSpec, "torch": torch, "P": pad}
    axes: dict[str, InputSpec] = eval(shown[1], names)
    return axes


@pytest.mark.parametrize("off", [False, True])
def test_an_input_that_addresses_a_cache_needs_its_padding(off: bool) -> None:
    """The advice has the spec to write, and works when followed."""
    model, given = Cached(), (torch.tensor([1, 2, 3]), torch.tensor([0, 3, 5]))
    options = graphrt.GraphOptions(check="off" if off else "capture")
    with pytest.raises(InvalidInputError, match="'slots' addresses a write") as raised:
        GRAPHED(model, given, options=options)
    axes = advised(raised.value)
    fast = GRAPHED(model, given, axes=axes, options=options)
    assert torch.equal(fast(*given), model.table[given[0]] * 2)


def placed(mask: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The new row of each row of a cache; zeros where the mask, of (rows, slots), has none."""
    return (mask.to(new.dtype)[:, :, None] * new[:, None]).sum(0)


Cache, Slots, New = torch.Tensor, torch.Tensor, torch.Tensor
WRITES: dict[str, Callable[[Cache, Slots, New], object]] = {
    "index_copy_": lambda cache, at, new: cache.index_copy_(0, at, new),
    "scatter_": lambda cache, at, new: cache.scatter_(0, at[:, None].expand(-1, 4), new),
    "a copy with rows": lambda cache, at, new: cache.copy_(cache.index_copy(0, at, new)),
    "rows added": lambda cache, at, new: cache.add_(torch.zeros(9, 4).index_add(0, at, new)),
    "a mask": lambda cache, at, new: cache.masked_fill_(
        (torch.arange(9)[:, None] == at).any(1, keepdim=True), 3.0
    ),
    "where": lambda cache, at, new: cache.copy_(
        torch.where(
            (torch.arange(9)[:, None] == at).any(1, keepdim=True),
            placed(at[:, None] == torch.arange(9), new),
            cache,
        )
    ),
    "compared numbers": lambda cache, at, new: cache.add_(
        placed((at[:, None] == torch.arange(9)).long(), new)
    ),
}


@pytest.mark.parametrize("way", WRITES)
def test_however_an_input_decides_which_rows_are_written_its_padding_is_asked_for(way: str) -> None:
    """The spec in the advice makes a step leave what eager leaves, but for the spare row."""
    caches = [torch.zeros(9, 4), torch.zeros(9, 4)]

    def forward(cache: torch.Tensor) -> Callable[..., torch.Tensor]:
        def run(new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            WRITES[way](cache, slots, new)
            return new * 2

        return run

    given = torch.rand(4, 4), torch.tensor([1, 2, 3, 4])
    with pytest.raises(InvalidInputError, match="'slots' addresses a write") as raised:
        GRAPHED(forward(caches[0]), given)
    axes = advised(raised.value)
    fast = GRAPHED(forward(caches[0]), given, axes=axes)
    new, slots = torch.rand(3, 4), torch.tensor([0, 5, 7])
    fast(new, slots)
    forward(caches[1])(new, slots)
    assert fast.runner.last_dispatch.reason is Reason.HIT
    assert torch.equal(caches[0][:8], caches[1][:8])


# Kind of a cache -> its shape, and what writes new rows, of (rows, 4), into it.
DIMENSIONS: dict[str, tuple[tuple[int, ...], Callable[[Cache, Slots, New], object]]] = {
    "[:, i]": ((2, 9, 4), lambda cache, at, new: cache.__setitem__((slice(None), at), new)),
    "T[:, i]": ((9, 4), lambda cache, at, new: cache.T.__setitem__((slice(None), at), new.T)),
    "[:, i, ..., 0]": (
        (2, 9, 4, 3),
        lambda cache, at, new: cache.__setitem__((slice(None), at, ..., 0), new),
    ),
    "[0, 1:, i]": ((2, 3, 9, 4), lambda cache, at, new: cache[0, 1:].index_copy_(1, at, both(new))),
    "index_fill_": ((3, 9), lambda cache, at, new: cache.index_fill_(-1, at, 2.0)),
    "scatter_": ((4, 9), lambda cache, at, new: cache.scatter_(1, at.expand(4, -1), new.T)),
    "where": (
        (2, 9, 4),
        lambda cache, at, new: cache.copy_(
            torch.where(
                (at == torch.arange(9)[:, None]).any(1)[:, None],
                placed(at[:, None] == torch.arange(9), new),
                cache,
            )
        ),
    ),
}


def both(new: torch.Tensor) -> torch.Tensor:
    """Keys and values."""
    return torch.stack([new, -new])


@pytest.mark.parametrize("way", DIMENSIONS)
def test_the_advised_padding_is_the_last_row_of_the_dimension_that_is_addressed(way: str) -> None:
    """Whichever it is: a (2, rows, width) cache has its rows in dimension 1."""
    shape, write = DIMENSIONS[way]
    caches = [torch.zeros(shape), torch.zeros(shape)]

    def forward(cache: torch.Tensor) -> Callable[..., torch.Tensor]:
        def run(new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            write(cache, slots, new)
            return new * 2

        return run

    given = torch.rand(4, 4), torch.tensor([1, 2, 3, 4])
    with pytest.raises(InvalidInputError, match="index 8 of the memory") as raised:
        GRAPHED(forward(caches[0]), given)
    fast = GRAPHED(forward(caches[0]), given, axes=advised(raised.value))
    for _ in range(5):
        new, slots = torch.rand(3, 4), torch.randperm(8)[:3]
        fast(new, slots)
        forward(caches[1])(new, slots)
        assert fast.runner.last_dispatch.reason is Reason.HIT
        rows = shape.index(9)
        assert torch.equal(caches[0].narrow(rows, 0, 8), caches[1].narrow(rows, 0, 8))


def test_the_advised_spec_has_the_shape_of_the_input() -> None:
    """Two slots for each row."""
    cache = torch.zeros(17, 2)

    def forward(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache[slots] = x
        return cache[slots].sum(1)

    given = torch.rand(4, 2, 2), torch.arange(8).view(4, 2)
    with pytest.raises(InvalidInputError, match=r'\("rows", 2\), index=True, pad=16') as raised:
        GRAPHED(forward, given)
    assert GRAPHED(forward, given, axes=advised(raised.value))(*given).shape == (4, 2)


def test_all_inputs_of_an_address_are_advised_at_once() -> None:
    """The page and the place in it: row 5, 3 is the last of all."""
    pages = torch.zeros(6, 4, 2)

    def forward(x: torch.Tensor, page: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        pages[page, place] = x
        return pages[page, place] * 2

    given = torch.rand(3, 2), torch.tensor([0, 4, 2]), torch.tensor([0, 2, 1])
    with pytest.raises(InvalidInputError, match="index 5 and 3 of") as raised:
        GRAPHED(forward, given)
    assert torch.equal(GRAPHED(forward, given, axes=advised(raised.value))(*given), given[0] * 2)


def test_masks_are_advised_to_be_padded_with_false() -> None:
    """They have no row numbers."""
    seen = torch.zeros(9, dtype=torch.bool)

    def forward(x: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        seen.logical_or_(done.any(0))
        return x + seen.sum()

    given = torch.rand(4, 2), torch.eye(9)[:4].bool()
    with pytest.raises(InvalidInputError, match="rows of False write nothing") as raised:
        GRAPHED(forward, given)
    axes = advised(raised.value)
    assert axes == {"done": InputSpec(torch.bool, ("rows", 9), pad=False)}
    assert torch.equal(GRAPHED(forward, given, axes=axes)(*given), given[0] + 4)


def test_no_row_is_advised_where_numbers_of_rows_are_computed() -> None:
    """A flat index: the last row of the memory is no value of the input."""
    cache = torch.zeros(9, 4)

    def forward(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.view(-1)[at * 4] = x
        return cache[at, 0] * 2

    given = torch.rand(3), torch.tensor([0, 5, 2])
    with pytest.raises(InvalidInputError, match="a value of `at` whose place"):
        GRAPHED(forward, given)
    axes = {"at": InputSpec(torch.int64, ("rows",), index=True, pad=8)}
    assert torch.equal(GRAPHED(forward, given, axes=axes)(*given), given[0] * 2)


def test_no_row_is_advised_where_page_and_place_are_computed() -> None:
    """Although the places of the inputs at the capture are equal to these inputs."""
    pages = torch.zeros(3, 4, 4)

    def forward(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        pages[i // 4, i % 4] = x
        return pages[i // 4, i % 4] * 2

    given = torch.rand(4, 4), torch.arange(4)
    with pytest.raises(InvalidInputError, match="a value of `i` whose place") as raised:
        GRAPHED(forward, given)
    assert "pad=P" in str(raised.value)
    axes = {"i": InputSpec(torch.int64, ("rows",), index=True, pad=11)}
    assert torch.equal(GRAPHED(forward, given, axes=axes)(*given), given[0] * 2)


def test_a_count_has_no_spare_row() -> None:
    """Padding must hold a value that is not counted, or a mask must tell the rows."""
    count = torch.zeros((), dtype=torch.int64)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        count.add_((ids == 0).sum())
        return ids * 2

    given = torch.tensor([0, 5, 2])
    with pytest.raises(InvalidInputError, match="pass the count as an input, or a bool mask"):
        GRAPHED(forward, given)
    GRAPHED(forward, given, axes={"ids": InputSpec(torch.int64, ("rows",), pad=1)})(given[:1])
    assert count.item() == 1


# Kind of a workspace -> what fills its first rows by flags or numbers, before it reads any.
WORKSPACES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "copy_": lambda ws, x, at: ws.copy_(torch.where(at[:, None] > 2, x, -x)),
    "scatter_": lambda ws, x, at: ws.zero_().scatter_(1, at[:, None], 1.0),
    "where out=": lambda ws, x, at: torch.where(at[:, None] > 2, x, -x, out=ws),
    "fill_": lambda ws, x, at: ws.fill_(0).masked_fill_(at[:, None] > torch.arange(6), -1e9),
}


@pytest.mark.parametrize("level", ["off", "first"])
@pytest.mark.parametrize("way", WORKSPACES)
def test_a_workspace_that_is_filled_before_it_is_read_needs_no_padding(
    way: str, level: Any
) -> None:
    """Inputs decide its values alone: it is like memory that the call makes."""
    of = [torch.zeros(8, 6), torch.zeros(8, 6)]

    def forward(workspace: torch.Tensor) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            rows = workspace[: len(x)]
            WORKSPACES[way](rows, x, at)
            return x + rows

        return run

    given = torch.rand(4, 6), torch.tensor([1, 2, 3, 4])
    options = graphrt.GraphOptions(check=level)
    fast = GRAPHED(forward(of[0]), given, options=options)
    for count in (1, 2, 3, 4):
        step = torch.rand(count, 6), torch.randint(0, 6, (count,))
        assert torch.equal(fast(*step), forward(of[1])(*step))
        assert fast.runner.last_dispatch.reason is Reason.HIT


# The same, where padding could show: what is written lasts, or other rows of the batch have it.
LASTING: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "read before": lambda ws, x, at: ws[: len(x)].copy_(torch.where(at[:, None] > 2, x, ws[0])),
    "not filled": lambda ws, x, at: ws[: len(x)].scatter_(1, at[:, None], 1.0),
    "a part filled": lambda ws, x, at: (
        ws[: len(x), :3].zero_(),
        ws[: len(x)].scatter_(1, at[:, None], 1.0),
    ),
    "all rows": lambda ws, x, at: ws.zero_().index_copy_(0, at, x),
    "rows of the batch": lambda ws, x, at: ws[: len(x)].zero_().index_copy_(0, at - 1, x),
    "read behind": lambda ws, x, at: (
        ws[: len(x)].copy_(torch.where(at[:, None] > 2, x, -x)),
        x.add_(ws.sum()),
    ),
}


@pytest.mark.parametrize("way", LASTING)
def test_memory_that_keeps_rows_is_no_workspace(way: str) -> None:
    """Its padding is asked for."""
    workspace = torch.zeros(8, 6)

    def forward(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        LASTING[way](workspace, x * 1, at)
        return x * 2

    with pytest.raises(InvalidInputError, match="'at' addresses a write"):
        GRAPHED(forward, (torch.rand(4, 6), torch.tensor([1, 2, 3, 4])))


def test_memory_that_the_first_call_alone_fills_is_no_workspace() -> None:
    """Later calls go on from what they left."""
    workspace = torch.zeros(8, 6)
    calls: list[torch.Tensor] = []

    def forward(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = workspace[: len(x)]
        if not calls:
            calls.append(rows.zero_())
        rows.scatter_(1, at[:, None], 1.0)
        return x * rows

    with pytest.raises((InvalidInputError, graphrt.errors.PythonStateError)):
        GRAPHED(forward, (torch.rand(4, 6), torch.tensor([1, 2, 3, 4])))


Kept, Floats, Live = torch.Tensor, torch.Tensor, torch.Tensor
# Kind of a write by values of a float input -> a padding whose rows write nothing (None: there is
# none), and the write; `live` is True in each row.
BY_FLOATS: dict[str, tuple[float | None, Callable[[Kept, Floats, Live], object]]] = {
    "where out=": (0.0, lambda ws, x, live: torch.where(x > 0, x, ws, out=ws)),
    "where copied": (-1.0, lambda ws, x, live: ws.copy_(torch.where(x >= 0, x, ws))),
    "masked_fill_": (0.0, lambda ws, x, live: ws.masked_fill_(x > 0.5, 1.0)),
    "rows of floats": (
        8.0,
        lambda ws, x, live: ws.index_copy_(0, x[:, 0].clamp(0, 8).round().long(), x),
    ),
    "where out=, masked": (
        None,
        lambda ws, x, live: torch.where(live[:, None] & (x + 1 > 0.5), x + 1, ws, out=ws),
    ),
    "index, masked": (
        None,
        lambda ws, x, live: ws.index_add_(
            0, ((x[:, 0] + 1) > 1.5).long(), torch.where(live[:, None], x + 1, 0.0)
        ),
    ),
}


@pytest.mark.parametrize("way", BY_FLOATS)
def test_the_advice_for_writes_that_a_float_input_decides_works_when_followed(way: str) -> None:
    """A padding that writes nothing; without one, a bool input that says which rows are live."""
    pad, write = BY_FLOATS[way]
    kept = [torch.zeros(9, 4), torch.zeros(9, 4)]

    def forward(of: torch.Tensor) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
            rows = of[: len(x)] if "where" in way or "fill" in way else of
            write(rows, x, live)
            return x * 2

        return run

    def live(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.bool)

    given = torch.rand(4, 4), live(4)
    with pytest.raises(InvalidInputError, match="addresses a write") as raised:
        GRAPHED(forward(kept[0]), given)
    text = str(raised.value)
    axes = advised_with(text, pad if pad is not None else 0.0)
    assert ("live" in axes) or "add a bool input that is True in each row" in text
    fast = GRAPHED(forward(kept[0]), given, axes=axes)
    for count in (1, 4, 3, 2, 3, 1, 4):
        x = torch.rand(count, 4) * 3 - 1
        assert torch.equal(fast(x, live(count)), forward(kept[1])(x, live(count)))
        assert fast.runner.last_dispatch.reason is Reason.HIT
        assert torch.equal(kept[0][:8], kept[1][:8])


def test_masks_of_attention_and_values_that_are_kept_are_not_taken_for_addresses() -> None:
    """Positions hide scores, the slots are declared, and the last rows are kept."""
    keys, kept = torch.zeros(9, 4), torch.zeros(4, 4)

    def forward(x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        kept[: len(x)].copy_(x * 2)
        keys.index_copy_(0, slots, x)
        scores = (x @ keys.T).masked_fill(torch.arange(9) > positions[:, None], -1e9)
        keys.index_copy_(0, slots, scores.softmax(-1) @ keys)
        return x * 2

    spec = InputSpec(torch.int64, ("rows",), index=True, pad=8)
    given = torch.rand(4, 4), torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4])
    fast = GRAPHED(forward, given, axes={"slots": spec})
    assert torch.equal(fast(*given), given[0] * 2)


def test_integers_that_address_nothing_lasting_are_padded() -> None:
    """Ids that are looked up, and a scatter into memory of the call's own, are no cache."""
    table = torch.rand(10, 4)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(len(ids), 10)
        return made.scatter_(1, ids[:, None], 1.0) @ table + table[ids]

    fast = GRAPHED(forward, torch.tensor([3, 1, 2]))
    assert torch.allclose(fast(torch.tensor([7, 8])), table[[7, 8]] * 2)


def test_a_forward_with_sparse_tensors_is_refused_by_its_operator() -> None:
    """They have no memory to follow."""
    with pytest.raises(graphrt.errors.RefusedOpError, match="to_sparse"):
        GRAPHED(lambda x: x.to_sparse().to_dense() * 2, torch.rand(4, 2))


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((torch.rand(1, 4), torch.rand(1)), 'axes={"x": ("rows", None)}'),
        ((torch.rand(4, 4), torch.rand(5)), 'axes={"scale": ("rows", None)}, or None in place'),
        ((torch.rand(4, 4), 3.0), "no tensor"),
        ((torch.rand(4, 4),), "missing a required argument"),
        ({"x": torch.rand(4, 4), "y": torch.rand(4)}, "arguments of Scaled.forward"),
        ((), "missing a required argument"),
    ],
)
def test_inputs_whose_rows_cannot_be_told_are_named(inputs: Any, text: str) -> None:
    """And what the model cannot be called with."""
    with pytest.raises(InvalidInputError, match=re.escape(text)):
        GRAPHED(Scaled(), inputs)


def test_axes_of_no_input_are_named() -> None:
    """A misspelt name."""
    with pytest.raises(InvalidInputError, match="names no input"):
        GRAPHED(linear(), torch.rand(4, 4), axes={"imput": ("rows",)})


def test_one_row_is_enough_where_its_axis_is_named() -> None:
    """The runs take it twice."""
    fast = GRAPHED(linear(), torch.rand(1, 4), [1, 2], axes={"input": ("rows",)})
    assert fast(torch.rand(2, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (torch.nn.Linear(4, 3).eval(), "weight.requires_grad is True"),
        (torch.nn.Linear(4, 3), "Linear.training is True"),
        (functools.partial(torch.nn.Linear(4, 3)), "Linear.training is True"),
        (torch.nn.Linear(4, 3).forward, "Linear.training is True"),
    ],
)
def test_training_and_gradients_are_refused_by_name(model: Any, text: str) -> None:
    """The error names the module, or the weight."""
    with pytest.raises(InvalidOptionError, match=text):
        GRAPHED(model, torch.rand(4, 4))


def test_a_module_without_gradients_is_served_with_them_off() -> None:
    """The caller has turned them off, so nobody waits for any."""
    with torch.no_grad():
        fast = GRAPHED(torch.nn.Linear(4, 3).eval(), torch.rand(4, 4))
    assert not fast(torch.rand(2, 4)).requires_grad


def test_inputs_given_twice_or_beyond_those_known_are_named() -> None:
    """A call with too many inputs."""
    fast = GRAPHED(linear(), torch.rand(4, 4))
    x = torch.rand(4, 4)
    for args, kwargs in [((x, x), {}), ((x,), {"input": x}), ((), {"other": x})]:
        with pytest.raises(InvalidInputError, match=r"not those|not the declared"):
            fast(*args, **kwargs)
    assert fast(x).shape == (4, 3)


def test_a_tensor_stands_for_the_spec_of_inputs_like_it() -> None:
    """Of a runner: with a spec beside it."""
    runner: Any = GraphRunner(
        lambda x, more: x * more["scale"],
        inputs={"x": torch.rand(3, 4), "more": {"scale": InputSpec(torch.float32, (4,))}},
        sizes=[1, 2],
        platform="cpu",
    )
    runner.capture()
    scale = torch.rand(4)
    assert torch.equal(runner(x=torch.ones(2, 4), more={"scale": scale})[1], scale)
    with pytest.raises(InvalidInputError, match=r"InputSpec.of\(x"):
        GraphRunner(lambda x: x, inputs={"x": torch.rand(1, 4)}, sizes=[1], platform="cpu")


@pytest.mark.parametrize(
    ("axes", "shape"),
    [(("rows",), ("rows", 3, 2)), ((None, "tokens"), (4, "tokens", 2)), ((), (4, 3, 2))],
)
def test_a_spec_is_made_of_a_tensor_and_its_axes(axes: Any, shape: Any) -> None:
    """Dimensions without an axis keep their size."""
    assert InputSpec.of(torch.zeros(4, 3, 2), axes) == InputSpec(torch.float32, shape)


@pytest.mark.parametrize("axes", ["rows", ("rows",) * 4, (1.5,), (True,)])
def test_axes_that_are_none_of_a_tensor_are_named(axes: Any) -> None:
    """Too many, or values that are no axis."""
    with pytest.raises(InvalidInputError):
        InputSpec.of(torch.zeros(4, 3, 2), axes)


def test_a_tensor_given_first_is_the_only_input() -> None:
    """With several inputs an error names them."""
    one: Any = GraphRunner(
        lambda x: x * 2, inputs={"x": torch.ones(2, 2)}, sizes=[1, 2], platform="cpu"
    )
    one.capture()
    assert torch.equal(one(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    assert one.last_dispatch.reason is Reason.HIT
    two: Any = GraphRunner(
        lambda x, y: x + y,
        inputs=dict.fromkeys("xy", torch.ones(2, 2)),
        sizes=[1, 2],
        platform="cpu",
    )
    for values in ({}, {"y": torch.ones(1, 2)}):
        with pytest.raises(InvalidInputError, match="x, y by name"):
            two(torch.ones(1, 2), **values)


def _plus_0(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: inner(x) + 0


WAYS: dict[str, Callable[[torch.nn.Module], Callable[..., Any]]] = {
    "a module": lambda model: model,
    "its forward": lambda model: model.forward,
    "a partial": functools.partial,
    "a closure": lambda model: lambda x: model(x),
    "graphed inside of graphed": lambda model: GRAPHED(model, torch.rand(4, 4)),
    "graphed in a closure": lambda model: _plus_0(GRAPHED(model, torch.rand(4, 4))),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_replaced_is_noticed(way: str) -> None:
    """Checks look into the model, not into the objects of graphrt that call it."""
    model = linear()
    fast = GRAPHED(WAYS[way](model), torch.rand(4, 4))
    model.weight = torch.nn.Parameter(torch.rand(3, 4), requires_grad=False)
    x = torch.rand(2, 4)
    with pytest.warns(GraphQuarantinedWarning):
        served = fast(x)
    assert torch.allclose(served, model(x))


OTHERS: dict[str, tuple[Any, Any, Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "operator": (torch.ops.aten.mul, torch.ops.aten.add, lambda op, x: op(x, x)),
    "overload": (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, lambda op, x: op(x, x)),
    "in C": (operator.itemgetter(0), operator.itemgetter(1), lambda get, x: x * get([2, 3])),
    "pattern": (re.compile("a"), re.compile("b"), lambda made, x: x * bool(made.match("a"))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_object_of_a_type_in_c_is_noticed(kind: str) -> None:
    """Such objects are not entered: another one in the place of one is a change."""
    before, after, call = OTHERS[kind]
    model = SimpleNamespace(held=before)
    fast = GRAPHED(lambda x: call(model.held, x) + 1, torch.rand(4, 4))
    model.held = after
    x = torch.rand(2, 4)
    with pytest.warns(GraphQuarantinedWarning):
        served = [fast(x) for _ in range(8)]
    assert torch.equal(served[-1], call(after, x) + 1)


def test_hooks_of_the_model_see_inputs_as_the_model_is_called() -> None:
    """By position where they were given so."""
    model = linear()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    fast = GRAPHED(model, torch.rand(4, 4))
    x = torch.rand(2, 4)
    assert torch.allclose(fast(x), model(x))


class Sum(torch.nn.Module):
    """Two inputs, and one that is left out."""

    def forward(self, x: torch.Tensor, y: Any = None, z: Any = None) -> torch.Tensor:
        """What is given, added up."""
        return x + (0 if y is None else y * 2) + (0 if z is None else z)


KINDS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "a module": lambda model: model,
    "in a partial": functools.partial,
    "all modules": lambda model: model,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_name", [False, True])
def test_hooks_see_no_other_inputs_than_those_of_a_call(by_name: bool, kind: str) -> None:
    """A call by position of what was captured by keyword, and the other way round, is refused."""
    model, x = Sum().eval(), torch.rand(4, 4)

    def double(module: Any, args: Any) -> Any:
        return (args[0] * 2, *args[1:]) if args and type(module) is Sum else None

    add: Any = model.register_forward_pre_hook
    if kind == "all modules":
        add = torch.nn.modules.module.register_module_forward_pre_hook
    hook = add(double)
    by_position, by_keyword = ((x, x), {}), ((), {"x": x, "y": x})
    (args, kwargs), other = (by_keyword, by_position) if by_name else (by_position, by_keyword)
    try:
        fast = GRAPHED(KINDS[kind](model), kwargs or args)
        assert torch.equal(fast(*args, **kwargs), model(*args, **kwargs))
        with pytest.raises(InvalidInputError, match="the model has hooks"):
            fast(*other[0], **other[1])
        assert runs_hooks(torch.compile(model))
    finally:
        hook.remove()


def test_an_input_has_the_place_that_it_has_in_the_models_call() -> None:
    """Behind an argument that was left out none has a place; nor has one that only names give."""
    x = torch.rand(4, 4)
    fast = GRAPHED(Sum().eval(), {"x": x, "z": x})
    assert torch.equal(fast(x, z=x), x + x)
    with pytest.raises(InvalidInputError, match=r"at most \(x\)"):
        fast(x, x)

    def named(**inputs: torch.Tensor) -> torch.Tensor:
        return inputs["x"] - inputs["y"]

    fast = GRAPHED(named, {"y": x, "x": x})
    with pytest.raises(InvalidInputError, match=r"at most \(\)"):
        fast(x, x)


def test_a_runner_of_a_module_with_hooks_takes_its_input_by_name() -> None:
    """It calls the forward by name, which hooks would see."""
    model = torch.nn.Identity().eval()
    spec = {"input": InputSpec(torch.float32, ("rows", 4))}
    with GraphRunner(model, inputs=spec, sizes=[2], platform="cpu") as runner:
        runner.capture()
        x = torch.ones(2, 4)
        assert torch.equal(runner(x), x)
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,) if args else None)
        for call in (runner, runner.verify):
            with pytest.raises(InvalidInputError, match="the forward has hooks"):
                call(x)


def test_a_step_is_verified_as_it_is_called() -> None:
    """By its one tensor, or by a slot of inputs; a tensor that may be one of several is named."""
    spec = InputSpec(torch.float32, ("rows", 4))
    with GraphRunner(linear(), inputs={"input": spec}, sizes=[2], platform="cpu") as runner:
        runner.capture()
        x = torch.rand(2, 4)
        assert torch.equal(runner.verify(x), runner(x))
        slot = runner.slot(graphrt.Batch(2))
        slot["input"].copy_(x)
        assert torch.equal(runner.verify(slot), runner(x))
        with pytest.raises(graphrt.errors.InvalidBatchError, match="no Batch"):
            runner.verify(2)
    both = {"x": spec, "y": spec}
    with GraphRunner(lambda x, y: x + y, inputs=both, sizes=[2], platform="cpu") as runner:
        runner.capture()
        with pytest.raises(InvalidInputError, match=r"runner\(x=..., y=...\)"):
            runner.verify(x)


@graphrt.eager_break
def halved_above(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Asks the host for a number, and returns a new tensor in both branches."""
    return x / 2 if x.abs().max().item() > limit else x.clone()


def test_the_advice_for_host_reads_is_followed_with_the_same_call() -> None:
    """Refused as one graph; with the mode that the error names, served by pieces."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return halved_above(x + 1, 10.0) * 2

    x = torch.rand(4, 4)
    with pytest.raises(CaptureSyncError, match=r'mode="PIECEWISE"'):
        GRAPHED(forward, x)
    fast = GRAPHED(forward, x, mode="PIECEWISE")
    for rows in (x[:3], x[:3] * 100):
        assert torch.equal(fast(rows), forward(rows))
        assert fast.runner.last_dispatch.mode.name == "PIECEWISE"


@pytest.mark.parametrize("way", ["the result", "the module"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_compiled_modules_are_served_as_the_refusal_of_torch_compile_advises(
    way: str, mode: str
) -> None:
    """By position, by the module's own names, and not in training mode."""
    model = linear()
    with pytest.raises(CaptureError, match=r"graphrt.compile\(model, dynamic_dims=") as raised:
        GRAPHED(torch.compile(model, backend="eager"), torch.rand(4, 4))
    assert "torch.compile" in raised.value.what
    compiled = graphrt.compile(
        model, dynamic_dims={"input": 0}, options=graphrt.CompileOptions(backend="eager")
    )
    served = compiled if way == "the result" else model
    fast = GRAPHED(served, torch.rand(4, 4), mode=mode)
    x = torch.rand(3, 4)
    want = torch.nn.functional.linear(x, model.weight, model.bias)
    assert torch.allclose(fast(x), want) and torch.allclose(fast(input=x), want)
    assert fast.runner.last_dispatch.mode.name == mode
    model.train()
    with pytest.raises(InvalidOptionError, match="training"):
        GRAPHED(served, torch.rand(4, 4))


def test_a_runner_inside_runs_as_part_of_the_graphs() -> None:
    """Its buffers and graphs are no state of the forward."""
    spec = {"input": InputSpec(torch.float32, ("tokens", 4))}
    with GraphRunner(linear(), inputs=spec, sizes=[1, 2, 4], platform="cpu") as inner:
        inner.capture()
        fast = GRAPHED(lambda x: inner(input=x).clone() + 1, torch.rand(4, 4), [1, 2, 4])
        x = torch.rand(3, 4)
        assert torch.equal(fast(x), inner(input=x) + 1)


def test_captures_between_steps_end() -> None:
    """`while runner.capture_next()` does."""
    runner: Any = GraphRunner(
        lambda x: x * 2, inputs={"x": torch.ones(2, 2)}, sizes=[1, 2, 3], platform="cpu"
    )
    planned, calls = len(runner.plan.keys), 1
    while runner.capture_next():
        calls += 1
    assert calls == planned == len(runner.report().graphs)


def test_a_deleted_one_frees_its_graphs_without_a_collection() -> None:
    """Nor does a frame of its first runs hold them."""
    gc.collect()
    gc.disable()
    try:
        fast = GRAPHED(linear(), torch.rand(4, 4))
        graphs = weakref.ref(fast.runner.graphs)
        del fast
        assert graphs() is None
    finally:
        gc.enable()


@pytest.mark.cuda
def test_on_a_gpu_graphs_equal_eager_and_the_gain_is_told() -> None:
    """The device is the model's; inputs may come from the host."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).cuda()
    model.eval().requires_grad_(False)
    x = torch.rand(8, 64)
    fast = GRAPHED(model, (x.cuda(),), [1, 4, 8])
    for rows in range(1, 9):
        assert torch.equal(fast(x[:rows].cuda()), fast(x[:rows]))
        assert torch.allclose(fast(x[:rows]), model(x[:rows].cuda()), atol=1e-5)
        assert fast.runner.last_dispatch.reason is Reason.HIT
    timed = [each for each in fast.runner.report().graphs if each.replay_s]
    assert {each.descriptor.num_tokens for each in timed} == {1, 8}
    print(fast)


def test_the_verbs_that_messages_advise_are_there() -> None:
    """`recapture()` after a weight was replaced, `weights_changed()`, `measure()`, `report()`."""
    model = torch.nn.Linear(4, 3).requires_grad_(False).eval()
    rows = torch.rand(4, 4)
    fast = GRAPHED(model, (rows,), [2, 4])
    model.weight = torch.nn.Parameter(torch.ones(3, 4), requires_grad=False)
    fast.recapture()
    fast.weights_changed()
    fast.measure([2])
    assert torch.equal(fast(rows), model(rows))
    assert fast.report().reasons[Reason.HIT] == 1
    fast.runner.close()


@pytest.mark.parametrize("lengths", [(9, 5), (5, 9), (9, 9)], ids=str)
def test_two_memories_of_unlike_length_are_padded_with_a_row_of_both(
    lengths: tuple[int, int],
) -> None:
    caches = [torch.zeros(length, 4) for length in lengths]

    def forward(new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for cache in caches:
            cache[slots] = new
        return new * 2

    given = torch.rand(4, 4), torch.arange(4)
    with pytest.raises(InvalidInputError, match="'slots' addresses a write") as raised:
        graphrt.graphed(forward, given, platform="cpu")
    axes = advised(raised.value)
    assert axes["slots"].pad == min(lengths) - 1
    assert ("one length" in str(raised.value)) == (lengths[0] != lengths[1])
    fast = graphrt.graphed(forward, given, axes=axes, platform="cpu")
    for count in (3, 4, 2):
        new = torch.rand(count, 4)
        assert torch.equal(fast(new, torch.arange(count)), new * 2)
        assert all(torch.equal(cache[:count], new) for cache in caches)


def test_a_memory_whose_rows_are_computed_asks_for_a_place_in_each() -> None:
    flat, pages = torch.zeros(9, 4), torch.zeros(3, 4)

    def forward(new: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        flat[slots] = new
        pages[slots // 4] = new
        return new * 2

    with pytest.raises(InvalidInputError, match=r"pad=P\)"):
        graphrt.graphed(forward, (torch.rand(4, 4), torch.arange(4)), platform="cpu")


def test_outdated_graphs_alone_are_captured_again_and_looked_at() -> None:
    """As by the runner."""
    fast = graphrt.graphed(lambda x: x * 2, torch.rand(4, 4))
    fast.recapture(only_outdated=True)
    assert not fast.look().names


@pytest.mark.parametrize("kind", ["meta", "sparse", "csr", "nested"])
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
def test_an_input_without_rows_in_memory_is_named(kind: str) -> None:
    """Values on no device, and other layouts."""
    x = torch.ones(8, 4)
    made = {"meta": x.to("meta"), "sparse": x.to_sparse(), "csr": x.to_sparse_csr()}
    value = made[kind] if kind in made else torch.nested.nested_tensor([x])
    with pytest.raises(InvalidInputError, match="'x' has no rows in memory"):
        graphrt.graphed(lambda x: x * 2, value)


@pytest.mark.parametrize(("name", "value"), [("outputs", "static"), ("mode", "FULL_AND_PIECEWISE")])
def test_values_that_the_signature_has_not_are_refused(name: str, value: str) -> None:
    """A runner has them."""
    with pytest.raises(InvalidOptionError, match=name):
        GRAPHED(lambda x: x * 2, torch.rand(8, 4), **{name: value})


def test_a_row_that_is_not_there_is_torchs_own_error() -> None:
    """As in an eager run: not one of the copy that checks make of the row."""
    cache = torch.zeros(4, 4)
    axes = {"at": InputSpec(torch.int64, ("rows",), pad=7)}
    with pytest.raises(IndexError, match=r"index_copy_\(\): index 7"):
        graphrt.graphed(
            lambda x, at: cache.index_copy_(0, at, x)[at],
            inputs=(torch.ones(4, 4), torch.arange(4)),
            axes=axes,
        )
