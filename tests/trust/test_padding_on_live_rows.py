"""Padding that writes a row of state that a resting request has: named before that is read. A spare
row, a spare page, masked writes and kernels that skip padding: no word."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from graphrt import CompileOptions, GraphOptions, GraphRunner, InputSpec
from graphrt.compile import compile_module
from graphrt.errors import GraphQuarantinedWarning, RowsMixedError
from tests.draws import rest_long

WIDTH, ROWS, PAGE = 4, 32, 4
X = InputSpec(torch.float32, ("tokens", WIDTH))
INT = torch.int64

Program = tuple[Callable[..., torch.Tensor], dict[str, InputSpec]]
Steps = list[dict[str, torch.Tensor]]


def index(pad: int, *shape: int) -> InputSpec:
    return InputSpec(INT, ("tokens", *shape), pad=pad, index=True)


def t(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=INT)


def x(rows: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((rows, WIDTH), value)


# Programs ----------------------------------------------------------------------------------------


def by_slots(pad: int, rows: int = ROWS, *, bias: float = 0.0, layers: int = 1) -> Program:
    """Writes a row for each token, and reads one for each."""
    caches = [torch.zeros(rows, WIDTH) for _ in range(layers)]

    def forward(x, slot, read):
        for cache in caches:
            cache[slot] = x * 2 + bias
            x = x + cache[read]
        return x

    return forward, {"x": X, "slot": index(pad), "read": index(pad)}


def by_index_copy(pad: int, rows: int = ROWS) -> Program:
    cache = torch.zeros(rows, WIDTH)

    def forward(x, slot, read):
        cache.index_copy_(0, slot, x * 2)
        return x + cache.index_select(0, read)

    return forward, {"x": X, "slot": index(pad), "read": index(pad)}


def by_scatter(pad: int, rows: int = ROWS) -> Program:
    cache = torch.zeros(rows, WIDTH)

    def forward(x, slot, read):
        cache.scatter_(0, slot[:, None].expand_as(x), x * 2)
        return x + cache.gather(0, read[:, None].expand_as(x))

    return forward, {"x": X, "slot": index(pad), "read": index(pad)}


def by_one_hot(pad: int, rows: int = ROWS) -> Program:
    """Writes the whole cache, where a row of padding matches a slot."""
    cache, numbers = torch.zeros(rows, WIDTH), torch.arange(rows)

    def forward(x, slot, read):
        hits = (slot[:, None] == numbers).to(x.dtype)
        is_hit = hits.amax(0)[:, None]
        cache.copy_(cache * (1 - is_hit) + (hits.T @ (x * 2 + 1)) * is_hit)
        return x + cache[read.clamp(min=0)]

    return forward, {"x": X, "slot": index(pad), "read": index(pad)}


def by_positions(pad: int) -> Program:
    """Derives the slot from a request and a position, keys and values in one tensor."""
    cache = torch.zeros(2, ROWS, WIDTH)

    def forward(x, request, position):
        slot = request * 8 + position
        cache[0, slot] = x * 2
        cache[1, slot] = x * 3
        read = request[:, None] * 8 + torch.arange(8)
        seen = (torch.arange(8) <= position[:, None])[..., None]
        return x + (cache[0, read] * seen).sum(1) + (cache[1, read] * seen).sum(1)

    return forward, {"x": X, "request": index(pad), "position": index(0)}


def by_pages(pad: int, pages: int = ROWS // PAGE) -> Program:
    """A paged cache: slots for writes, block tables for masked reads."""
    keys, values = torch.zeros(pages, PAGE, WIDTH), torch.zeros(pages, PAGE, WIDTH)
    weight = torch.eye(WIDTH) + 0.1

    def forward(x, slot, table, length):
        keys.view(-1, WIDTH).index_copy_(0, slot, x @ weight + 0.5)
        values.view(-1, WIDTH).index_copy_(0, slot, x + 1)
        places = torch.arange(2 * PAGE)
        k, v = keys[table].flatten(1, 2), values[table].flatten(1, 2)
        scores = torch.einsum("td,tkd->tk", x, k)
        scores = scores.masked_fill(places >= length[:, None], float("-inf"))
        # A row of padding has length 0.
        return x + torch.einsum("tk,tkd->td", scores.softmax(-1).nan_to_num(), v)

    inputs = {"x": X, "slot": index(pad * PAGE), "table": index(pad, 2)}
    return forward, inputs | {"length": InputSpec(INT, ("tokens",))}


@torch.library.custom_op("graphrt_tests::store_row", mutates_args=("cache",))
def store_row(cache: torch.Tensor, new: torch.Tensor, slot: torch.Tensor, skips: bool) -> None:
    for row, at in zip(new, slot.tolist(), strict=True):
        if at >= 0 or not skips:
            cache[at] = row


@torch.library.custom_op("graphrt_tests::load_row", mutates_args=())
def load_row(cache: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    return cache[read.clamp(min=0)].clone()


def by_operator(pad: int, rows: int = ROWS, *, skips: bool = False) -> Program:
    cache = torch.zeros(rows, WIDTH)

    def forward(x, slot, read):
        store_row(cache, x * 2 + 1, slot, skips)
        return x + load_row(cache, read)

    return forward, {"x": X, "slot": index(pad), "read": index(pad)}


@torch.library.custom_op("graphrt_tests::store_along", mutates_args=("cache",))
def store_along(cache: torch.Tensor, slot: torch.Tensor, new: torch.Tensor) -> None:
    for row, at in zip(new, slot.tolist(), strict=True):
        cache[:, at] = row


def one_hot_along(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> None:
    hits = (at % cache.shape[1])[:, None] == torch.arange(cache.shape[1])
    cache.copy_(torch.where(hits.any(0)[:, None], hits.to(new.dtype).T @ new, cache))


# Kind of a write along dimension 1 of (layers, rows, width).
ALONG: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "[:, i]": lambda cache, at, new: cache.__setitem__((slice(None), at), new),
    "[:, i, :n]": lambda cache, at, new: cache[:, :, :3].__setitem__((slice(None), at), new[:, :3]),
    "T[:, i]": lambda cache, at, new: cache[1].T.__setitem__((slice(None), at), new.T),
    "index_copy_": lambda cache, at, new: cache.select(0, 1).index_copy_(
        -2, at % cache.shape[1], new
    ),
    "index_copy_ of dimension 1": lambda cache, at, new: cache.index_copy_(
        1, at % cache.shape[1], new.expand(3, *new.shape)
    ),
    "scatter_": lambda cache, at, new: cache[1].T.scatter_(
        1, (at % cache.shape[1]).expand(new.T.shape), new.T
    ),
    "put_": lambda cache, at, new: cache[:, :, 0].put_(
        at % cache.shape[1] - cache.shape[1], new[:, 0]
    ),
    "operator": store_along,
    "operator of a view": lambda cache, at, new: store_row(cache.transpose(0, 1), new, at, False),
    "one-hot": one_hot_along,
}


def along(pad: int, way: str, rows: int = ROWS) -> Program:
    """Rows are dimension 1: the commonest layout of keys and values."""
    cache = torch.zeros(3, rows, WIDTH)

    def forward(x, slot, read):
        ALONG[way](cache, slot, x * 2 + 1)
        return x + cache[:, read].sum(0)

    return forward, {"x": X, "slot": index(pad), "read": index(pad)}


# Steps -------------------------------------------------------------------------------------------


def slots_of(resting: int, writes: int = 2, others: int = 8, first: int = 4) -> Steps:
    """A request writes a row and rests, others step with padding, the request reads its row."""
    rows = [resting, *range(first, first + writes - 1)]
    steps = [{"x": x(writes), "slot": t(*rows), "read": t(*rows)}]
    for n in range(others):
        steps.append({"x": x(3, n + 2.0), "slot": t(4, 5, 6), "read": t(4, 5, 6)})
    return [*steps, {"x": x(1), "slot": t(7), "read": t(resting)}]


def later(resting: int, writes: int) -> Steps:
    """`slots_of`, after a padded step whose rows nobody has written before."""
    first = {"x": x(3), "slot": t(8, 9, 10), "read": t(8, 9, 10)}
    return [first, first, *slots_of(resting, writes)]


def positions_of(resting: int) -> Steps:
    steps = [{"x": x(5), "request": t(*[resting] * 5), "position": torch.arange(5)}]
    steps += [
        {"x": x(3, p + 2.0), "request": t(1, 2, 1), "position": t(p, p, p + 1)} for p in range(6)
    ]
    return [*steps, {"x": x(1), "request": t(resting), "position": t(5)}]


def pages_of(resting: int, *, unused: int, writes: int = 6) -> Steps:
    """Requests of up to two pages; `unused` fills the rest of a block table."""

    def step(value: float, *tokens: tuple[int, int]) -> dict[str, torch.Tensor]:
        tables = [(page, page + 1 if at >= PAGE else unused) for page, at in tokens]
        return {
            "x": x(len(tokens), value),
            "slot": t(*[page * PAGE + at for page, at in tokens]),
            "table": t(*tables),
            "length": t(*[at + 1 for _, at in tokens]),
        }

    steps = [step(1.0, *[(resting, at) for at in range(writes)])]
    steps += [step(2.0 + n, (2, n), (4, n), (4, n)) for n in range(3)]
    return [*steps, step(1.5, (resting, writes - 1 + (writes < 2 * PAGE)))]


# Running -----------------------------------------------------------------------------------------


def served(
    build: Callable[[], Program],
    steps: Steps,
    *,
    mode: str = "FULL",
    check: str | None = None,
    compile_options: CompileOptions | None = None,
) -> Iterator[tuple[bool, list[str]]]:
    """For each step, whether its result is right, and the warnings so far."""
    forward, inputs = build()
    expected, _ = build()
    if compile_options is not None:
        forward = compile_module(forward, [*inputs], options=compile_options)
    options = GraphOptions() if check is None else GraphOptions(check=check)
    runner = GraphRunner(
        forward, mode=mode, sizes=[1, 2, 4], inputs=inputs, options=options, platform="cpu"
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runner.capture()
        for step in steps:
            result = runner(**step).clone()
            words = [str(each.message) for each in said]
            yield torch.allclose(result, expected(**step), rtol=1e-5, atol=1e-6), words
    runner.close()


def is_named_before_a_wrong_value(results: Iterator[tuple[bool, list[str]]]) -> bool:
    """Whether the error of padding was given, and no value was wrong before or after."""
    rights, words = zip(*results, strict=True)
    return all(rights) and any("padding writes state" in each for each in words[-1])


WRONG: dict[str, tuple[Callable[[], Program], Steps]] = {
    "-1 is the last row": (lambda: by_slots(-1), slots_of(31)),
    "0 is the first row": (lambda: by_slots(0), slots_of(0)),
    "another row": (lambda: by_slots(17), slots_of(17)),
    "counted from the end": (lambda: by_slots(-3), slots_of(29)),
    "the live index is negative": (lambda: by_slots(31), slots_of(-1)),
    "eager prefill": (lambda: by_slots(-1), slots_of(31, writes=7)),
    "eager prefill of several layers": (lambda: by_slots(-1, layers=3), slots_of(31, writes=7)),
    "padding writes values": (lambda: by_slots(0, bias=1.0), slots_of(0, writes=7)),
    "padded steps come first": (lambda: by_slots(-1), later(31, 7)),
    "padded steps with values come first": (lambda: by_slots(-1, bias=1.0), later(31, 7)),
    "a full step before": (lambda: by_slots(-1), slots_of(31, writes=4)),
    "the request is alone": (lambda: by_slots(-1), slots_of(31, writes=1)),
    "index_copy_": (lambda: by_index_copy(0), slots_of(0)),
    "scatter_": (lambda: by_scatter(0), slots_of(0, writes=7)),
    "one-hot rows": (lambda: by_one_hot(0), slots_of(0, writes=7)),
    "derived slots": (lambda: by_positions(0), positions_of(0)),
    "derived slots from the end": (lambda: by_positions(-1), positions_of(3)),
    "pages": (lambda: by_pages(0), pages_of(0, unused=0)),
    "pages, another pad": (lambda: by_pages(6), pages_of(6, unused=6)),
    "an operator that counts from the end": (lambda: by_operator(-1), slots_of(31, writes=7)),
    **{f"dimension 1, {way}": (partial(along, 17, way), slots_of(17, writes=7)) for way in ALONG},
}


def at_levels(programs: Iterable[str]) -> list[Any]:
    """Each program without trials of steps and with them, in one of the modes each."""
    names = [*programs]
    levels = ("capture", "first", "sample", "always")
    return rest_long(
        itertools.product(names, levels, ("FULL", "PIECEWISE")),
        *((name, "capture", "FULL") for name in names),
        *((name, "always", "PIECEWISE") for name in names),
    )


@pytest.mark.parametrize(("name", "check", "mode"), at_levels(WRONG))
def test_padding_on_the_row_of_a_resting_request_is_named(name, check, mode):
    build, steps = WRONG[name]
    assert is_named_before_a_wrong_value(served(build, steps, check=check, mode=mode))


RIGHT: dict[str, tuple[Callable[[], Program], Steps]] = {
    "spare last row": (lambda: by_slots(-1, ROWS + 1), slots_of(31)),
    "spare last row with values": (lambda: by_slots(-1, ROWS + 1, bias=1.0), later(31, 7)),
    "spare last row, by its number": (lambda: by_slots(ROWS, ROWS + 1), later(31, 7)),
    "spare first row": (lambda: by_slots(0, bias=1.0), later(31, 7)),
    "spare row of several layers": (lambda: by_slots(0, bias=1.0, layers=3), later(31, 7)),
    "spare row, index_copy_": (lambda: by_index_copy(0), later(31, 7)),
    "spare row, scatter_": (lambda: by_scatter(0), later(31, 7)),
    "spare row, one-hot": (lambda: by_one_hot(0), later(31, 7)),
    "one-hot rows that skip -1": (lambda: by_one_hot(-1), later(31, 7)),
    "spare request": (lambda: by_positions(3), positions_of(0)),
    "spare page": (lambda: by_pages(0), pages_of(6, unused=0)),
    "spare page, full pages": (lambda: by_pages(0), pages_of(6, unused=0, writes=8)),
    "spare last page": (lambda: by_pages(7), pages_of(0, unused=7)),
    "an operator that skips -1": (lambda: by_operator(-1, skips=True), later(31, 7)),
    "an operator with a spare row": (lambda: by_operator(-1, ROWS + 1), later(31, 7)),
    **{f"dimension 1, {way}": (partial(along, ROWS, way, ROWS + 1), later(31, 7)) for way in ALONG},
}


@pytest.mark.parametrize(("name", "check", "mode"), at_levels(RIGHT))
def test_padding_on_a_row_of_nobody_is_not_named(name, check, mode):
    build, steps = RIGHT[name]
    for right, words in served(build, steps, check=check, mode=mode):
        assert right and not words


# Programs whose kernels show no row numbers: padding writes zeros, where zeros were.
COMPILED = (
    *(("wrong", name) for name in ("-1 is the last row", "scatter_", "derived slots")),
    *(("right", name) for name in ("spare last row", "spare request")),
)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "name", "check"),
    rest_long(
        [
            (kind, name, check)
            for kind, table in (("wrong", WRONG), ("right", RIGHT))
            for name in table
            for check in ("capture", "always")
            if "operator" not in name  # without fake implementations
        ],
        *((kind, name, "capture") for kind, name in COMPILED),
    ),
)
def test_padding_rows_of_inductors_code_are_named_as_those_of_operators(
    kind, name, check, tmp_path
):
    build, steps = (WRONG if kind == "wrong" else RIGHT)[name]
    cached = CompileOptions(backend="inductor", cache_dir=str(tmp_path), splitting_ops=())
    results = served(build, steps, check=check, compile_options=cached)
    if kind == "wrong":
        assert is_named_before_a_wrong_value(results)
        return
    for right, words in results:
        assert right and not [each for each in words if "padding" in each]


# Further programs that are right ------------------------------------------------------------------


def masked(pad: int) -> Program:
    """Padding of the slot is a live row; it writes back what is there."""
    cache = torch.zeros(ROWS, WIDTH)

    def forward(x, slot, read, mask):
        cache[slot] = torch.where(mask[:, None], x * 2 + 1, cache[slot])
        return x + cache[read]

    inputs = {"x": X, "slot": index(pad), "read": index(0)}
    return forward, inputs | {"mask": InputSpec(torch.bool, ("tokens",))}


def with_mask(steps: Steps) -> Steps:
    return [step | {"mask": torch.ones(len(step["x"]), dtype=torch.bool)} for step in steps]


def added(pad: int) -> Program:
    """Padding adds zeros to a live row."""
    cache = torch.zeros(ROWS, WIDTH)

    def forward(x, slot, read):
        cache.index_add_(0, slot, x)
        return x + cache[read]

    return forward, {"x": X, "slot": index(pad), "read": index(pad)}


def sink(pad: int) -> Program:
    """Row 0 has the first token of every request, which is the same, also in padding."""
    cache, table = torch.zeros(ROWS, WIDTH), torch.randn(8, WIDTH)

    def forward(x, token, slot, read):
        cache[slot] = table[token]
        return x + cache[0] + cache[read]

    inputs = {"x": X, "token": InputSpec(INT, ("tokens",)), "slot": index(pad), "read": index(pad)}
    return forward, inputs


def sinks() -> Steps:
    steps = [{"x": x(7), "token": t(0, 1, 2, 3, 4, 5, 6), "slot": torch.arange(7)}]
    steps += [{"x": x(3), "token": t(5, 6, 7), "slot": t(7, 8, 9 + n)} for n in range(6)]
    steps.append({"x": x(1), "token": t(0), "slot": t(0)})
    return [step | {"read": step["slot"]} for step in steps]


def by_position_in_the_batch(pad: int) -> Program:
    """A cache with a line for each row of the batch; a new request begins its line at 0."""
    cache = torch.zeros(4, 9, WIDTH)

    def forward(x, position):
        line = torch.arange(len(x))
        cache[line, position] = x * 2 + 1
        seen = (torch.arange(9) <= position[:, None])[..., None]
        return x + (cache[line] * seen).sum(1)

    return forward, {"x": X, "position": index(pad)}


def lines() -> Steps:
    rows = [4, 4, 4, 3, 3, 4, 4, 2, 1]
    # The fourth line begins anew at the sixth step.
    positions = [(0,) * 4, (1,) * 4, (2,) * 4, (3,) * 3, (4,) * 3, (5, 5, 5, 0), (6, 6, 6, 1)]
    positions += [(7, 7), (8,)]
    return [{"x": x(n), "position": t(*at)} for n, at in zip(rows, positions, strict=True)]


@torch.library.custom_op("graphrt_tests::count_rows", mutates_args=("counts",))
def count_rows(counts: torch.Tensor, experts: torch.Tensor) -> None:
    counts.copy_(torch.bincount(experts, minlength=len(counts)).to(counts.dtype)[:, None])


@torch.library.custom_op("graphrt_tests::column", mutates_args=())
def column(counts: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return (counts[experts] > 0).to(torch.float32)


def by_scratch_of_an_operator(pad: int) -> Program:
    """Each run fills a tensor that it then reads; padding's row is a live one."""
    counts = torch.zeros(8, 1)

    def forward(x, expert):
        count_rows(counts, expert)
        return x + column(counts, expert)

    return forward, {"x": X, "expert": InputSpec(INT, ("tokens",), pad=pad)}


def experts() -> Steps:
    values = [t(0, 1), t(2, 0, 0), t(1, 2, 3), t(0, 0, 0, 0, 0, 1, 2), t(3), t(0, 1, 2, 3)]
    return [{"x": x(len(each)), "expert": each} for each in values * 2]


FURTHER: dict[str, tuple[Callable[[], Program], Steps]] = {
    "masked writes": (lambda: masked(0), with_mask(later(0, 7))),
    "masked writes to the last row": (lambda: masked(-1), with_mask(later(31, 7))),
    "zeros added": (lambda: added(0), later(0, 7)),
    "the same value written again": (lambda: sink(0), sinks()),
    "lines of the batch": (lambda: by_position_in_the_batch(0), lines()),
    "lines of the batch, padded at their end": (lambda: by_position_in_the_batch(8), lines()),
    "scratch memory of an operator": (lambda: by_scratch_of_an_operator(0), experts()),
}


@pytest.mark.parametrize("check", ["capture", "always"])
@pytest.mark.parametrize("name", FURTHER)
def test_padding_that_leaves_live_rows_as_they_are_is_not_named(name, check):
    torch.manual_seed(0)
    build, steps = FURTHER[name]

    def seeded() -> Program:
        torch.manual_seed(0)
        return build()

    for right, words in served(seeded, steps, check=check):
        assert right and not words


@pytest.mark.parametrize("check", ["capture", "always"])
def test_an_idle_step_of_one_row_of_padding_is_not_named(check):
    idle = {"x": x(1, 0.0), "slot": t(32), "read": t(32)}
    steps = [idle, *later(31, 7)[:4], idle, *slots_of(30, 7), idle]
    for right, words in served(lambda: by_slots(32, ROWS + 1, bias=1.0), steps, check=check):
        assert right and not words


@pytest.mark.parametrize("check", ["capture", "always"])
def test_a_reset_of_the_whole_cache_between_steps_is_not_named(check):
    cache = torch.randn(ROWS, WIDTH)

    def forward(x, slot, read):
        cache[slot] = x * 2 + 1
        return x + cache[read]

    inputs = {"x": X, "slot": index(0), "read": index(0)}
    options = GraphOptions(check=check)
    runner = GraphRunner(forward, mode="FULL", sizes=[4], inputs=inputs, options=options)
    runner.capture()
    cache.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in later(31, 7):
            runner(**step)
            cache.zero_()


def test_at_always_a_row_is_named_that_was_there_before_and_eager_steps_alone_read():
    cache = torch.randn(ROWS, WIDTH)

    def forward(x, slot, read):
        cache[slot] = x * 2 + 1
        return x + cache[read]

    inputs = {"x": X, "slot": index(0), "read": index(0)}
    options = GraphOptions(check="always")
    runner = GraphRunner(forward, mode="FULL", sizes=[4], inputs=inputs, options=options)
    runner.capture()
    # Row 0 is a resting request's: no step writes it, and only one above all sizes reads it.
    eager = {"x": x(6), "slot": t(8, 9, 10, 11, 12, 13), "read": t(0, 9, 10, 11, 12, 13)}
    runner(**eager)
    with pytest.warns(GraphQuarantinedWarning, match=r"padding \(slot=0, read=0\) writes row 0 of"):
        runner(x=x(3), slot=t(4, 5, 6), read=t(4, 5, 6))


# What is in the error, and what happens after it --------------------------------------------------


def test_the_error_names_the_input_its_padding_the_row_and_a_spare_row():
    forward, _ = by_slots(-1)
    inputs = {"x": X, "slot": index(-1), "read": index(0)}
    options = GraphOptions(strict=True)
    runner = GraphRunner(forward, mode="FULL", sizes=[1, 2, 4], inputs=inputs, options=options)
    runner.capture()
    step, padded, *_ = slots_of(31)
    runner(**step)
    with pytest.raises(RowsMixedError, match=r"padding \(slot=-1\) writes row 31 of") as raised:
        runner(**padded)
    assert "one row (or page) more" in str(raised.value)


def by_decay(pad: int, rows: int = ROWS) -> Program:
    """Each step goes on from the old contents of its rows, as states of Mamba do."""
    cache = torch.zeros(rows, WIDTH)

    def forward(x, slot):
        cache[slot] = cache[slot] * 0.5 + x + 1
        return cache[slot]

    return forward, {"x": X, "slot": index(pad)}


# Five rows run eagerly, and four as a replay, which is seen at `always` alone.
@pytest.mark.parametrize(("check", "rows"), [("capture", 5), *(("always", n) for n in (1, 4, 5))])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_warning_says_that_the_row_is_spoilt_if_padding_wrote_it_before(
    check: str, rows: int, is_first: bool
) -> None:
    owner = {"x": x(rows, 3.0), "slot": torch.arange(rows)}
    padded = {"x": x(3, 2.0), "slot": t(6, 7, 8)}
    steps = [padded, padded, padded, owner] if is_first else [owner, padded, padded]
    rights, words = zip(*served(lambda: by_decay(0), steps, check=check), strict=True)
    (said,) = [each for each in words[-1] if "padding writes state" in each]
    assert ("the row is spoilt already" in said) is is_first
    # A request that comes after the padding goes on from its contents.
    assert rights == (True, True, True, not is_first)[: len(steps)]


def test_after_an_eager_step_on_padding_s_row_no_graph_of_any_kind_serves():
    forward, inputs = by_slots(0, bias=1.0)
    runner = GraphRunner(forward, mode="FULL", sizes=[1, 4], inputs=inputs)
    runner.capture()
    padded = {"x": x(3), "slot": t(4, 5, 6), "read": t(4, 5, 6)}
    runner(**padded)
    runner(**padded)
    assert runner.last_dispatch.slot >= 0
    with pytest.warns(GraphQuarantinedWarning, match="all graphs: padding writes state"):
        runner(x=x(5), slot=torch.arange(5), read=torch.arange(5))
    assert {each.status for each in runner.report().trust.trials} == {"quarantined"}
    runner(**padded)
    assert runner.last_dispatch.slot < 0


def test_two_caches_of_one_shape_are_told_apart():
    spare, full = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)

    def forward(x, slot, other):
        spare[slot] = x + 1
        full[other] = x + 2
        return spare[slot] + full[other]

    inputs = {"x": X, "slot": index(0), "other": index(0)}
    runner = GraphRunner(forward, mode="FULL", sizes=[4], inputs=inputs)
    runner.capture()
    step = {"x": x(3), "slot": t(4, 5, 6), "other": t(4, 5, 6)}
    runner(**step)
    runner(**step)
    with pytest.warns(GraphQuarantinedWarning, match=r"full\[other\]"):
        runner(x=x(5), slot=t(1, 2, 3, 4, 5), other=torch.arange(5))


@pytest.mark.parametrize("writer", ["host", "forward"])
def test_a_row_that_is_written_outside_of_the_runner_is_live(writer):
    cache = torch.zeros(ROWS, WIDTH)

    def forward(x, slot, read):
        cache[slot] = x * 2
        return x + cache[read]

    inputs = {"x": X, "slot": index(-1), "read": index(-1)}
    runner = GraphRunner(forward, mode="FULL", sizes=[1, 2, 4], inputs=inputs)
    runner.capture()
    if writer == "host":
        cache[31] = torch.arange(4.0) + 1
    else:
        forward(torch.arange(4.0)[None] + 1, t(31), t(31))
    was = cache[31].clone()
    with pytest.warns(GraphQuarantinedWarning, match="padding writes state"):
        runner(**slots_of(31)[1])
    assert torch.equal(cache[31], was)


@pytest.mark.parametrize("pad", [0, 3])
def test_a_row_that_is_only_read_is_live(pad):
    """Whoever wrote the row did it before the capture."""
    cache = torch.randn(ROWS, WIDTH)

    def forward(x, slot, read):
        cache[slot] = x * 2
        return x + cache[read]

    inputs = {"x": X, "slot": index(pad), "read": index(9)}
    runner = GraphRunner(forward, mode="FULL", sizes=[4], inputs=inputs)
    runner.capture()
    was = cache[pad].clone()
    with pytest.warns(GraphQuarantinedWarning, match="padding writes state"):
        result = runner(x=x(3), slot=t(4, 5, 6), read=t(pad, 5, 6))
    assert torch.equal(result[0], was + 1) and torch.equal(cache[pad], was)


def test_memory_too_large_to_be_saved_is_looked_at_too():
    steps = slots_of(0, writes=7)
    forward, inputs = by_operator(0, skips=True)
    options = GraphOptions(state_limit_bytes=64)
    runner = GraphRunner(forward, mode="FULL", sizes=[1, 2, 4], inputs=inputs, options=options)
    runner.capture()
    assert runner.report().trust.protected
    runner(**steps[0])
    with pytest.warns(GraphQuarantinedWarning, match="padding writes state"):
        runner(**steps[1])


# Random programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", rest_long(range(40), *range(12)))
def test_at_always_no_wrong_value_goes_unnamed_and_no_spare_row_is_named(seed):
    """Requests of one slot each, of which some rest: steps write new values and read old ones."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    is_spare = seed % 2 == 0
    pad = draw(-4, 4)
    programs = [by_slots, by_index_copy, by_scatter, by_one_hot, by_operator]
    program = programs[draw(0, 5)]
    if program in (by_index_copy, by_scatter, by_one_hot):
        pad = abs(pad)
    slots = [slot for slot in range(8) if not (is_spare and slot == pad % 8)]
    held, steps = list[int](), []
    for _ in range(24):
        rows = draw(1, 7)
        order = torch.randperm(len(slots), generator=random)[:rows].tolist()
        writes = [slots[at] for at in order]
        held += [slot for slot in writes if slot not in held]
        reads = [held[draw(0, len(held))] for _ in writes]
        value = torch.randn(len(writes), WIDTH, generator=random)
        steps.append({"x": value, "slot": t(*writes), "read": t(*reads)})
    said: list[str] = []
    for right, said in served(lambda: program(pad, 8), steps, check="always"):
        assert right or said
        assert not (is_spare and said)
    assert said or is_spare


# Live tokens of nobody ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["capture", "always"])
@pytest.mark.parametrize("pad", [0, -1])
def test_live_tokens_that_an_eager_step_sends_to_the_spare_row_are_no_owner(pad: int, level: str):
    """A prefix that is cached already, rejected drafts: the host writes them where padding goes."""
    forward, inputs = by_slots(pad, bias=1.0)
    options = GraphOptions(check=level)
    runner = GraphRunner(
        forward, mode="FULL", sizes=[4], inputs=inputs, options=options, platform="cpu"
    )
    runner.capture()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            slots, reads = t(pad, pad, pad, 1, 2, 3), t(1, 2, 3, 1, 2, 3)
            runner(x=x(6), slot=slots, read=reads)
            runner(x=x(3), slot=t(1, 2, 3), read=t(1, 2, 3))
            assert runner.last_dispatch.reason.name == "HIT"


@pytest.mark.parametrize("level", ["capture", "always"])
def test_a_live_row_addressed_by_the_negative_padding_is_named_when_it_is_read(level: str):
    """As the page on trust says: until then it looks like a rejected draft."""
    *before, last = served(lambda: by_slots(-1), slots_of(-1, writes=2), check=level)
    assert all(right and not said for right, said in before)
    assert "the row is spoilt already" in "".join(last[1])


def test_one_live_token_in_the_row_of_the_padding_is_an_owner():
    forward, inputs = by_slots(0, bias=1.0)
    runner = GraphRunner(forward, mode="FULL", sizes=[4], inputs=inputs, platform="cpu")
    runner.capture()
    long = {"x": x(6), "slot": t(0, 4, 5, 1, 2, 3), "read": t(0, 4, 5, 1, 2, 3)}
    decode = {"x": x(3), "slot": t(1, 2, 3), "read": t(1, 2, 3)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in (long, decode) * 3:
            runner(**step)
    assert any("padding writes state" in str(each.message) for each in said)


@pytest.mark.parametrize("pad", [-1, 8])
def test_a_negative_padding_of_undeclared_indices_is_tried_at_the_row_that_it_names(pad: int):
    """-1 is row 8 of one cache and row 16 of the other: padding writes over a live 8."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(9, 4))
            self.register_buffer("v", torch.zeros(17, 4))

        def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            self.k[slots] = x
            self.v[slots] = x * 2
            return self.k[slots] + self.v[slots]

    specs = {
        "x": InputSpec(torch.float32, ("tokens", 4)),
        "slots": InputSpec(torch.int64, ("tokens",), pad=pad),
    }
    model, twin = Two(), Two()
    runner = GraphRunner(model, mode="FULL", sizes=[1, 2, 4], inputs=specs, platform="cpu")
    runner.capture()
    draw = torch.Generator().manual_seed(0)

    def serve() -> None:
        for _ in range(60):
            rows = int(torch.randint(1, 5, (), generator=draw))
            slots = torch.randperm(9, generator=draw)[:rows]
            x = torch.randn(rows, 4, generator=draw)
            assert torch.equal(runner(x=x, slots=slots), twin(x, slots))

    with pytest.warns(GraphQuarantinedWarning):
        serve()
