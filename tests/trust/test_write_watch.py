"""The watch for writes alone saves what is written at every run, also by operators seen before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from graphrt import GraphRunner, InputSpec
from graphrt.compile.backend.as_operator import AsOperator, TellingUses
from graphrt.core.base import tree
from graphrt.core.base.thread_mode import is_watched
from graphrt.trust.watching import writes
from graphrt.trust.watching.watch import Watch
from graphrt.trust.watching.writes import SavedWrites, WriteWatch, note_operators

NAMESPACE = "graphrt_write_watch"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library(NAMESPACE, "DEF")
    yield made
    made._destroy()


def defined(library: torch.library.Library, schema: str, body: Any, key: str = "CPU") -> Any:
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, body, key)
    return getattr(getattr(torch.ops, NAMESPACE), name)


def watch_of(known: set[int] = frozenset(), saves: SavedWrites | None = None) -> WriteWatch:
    note_operators()
    return WriteWatch(known, saves or SavedWrites(1 << 20), SavedWrites(1 << 20), 4)


def saved(state: torch.Tensor, function: Callable[[], Any]) -> bool:
    """Whether a run that changes `state` is undone."""
    key, before = tree.storage_key(state), state.clone()
    assert key is not None
    saves = SavedWrites(1 << 20)
    watch_of({key}, saves).around(function)
    assert not torch.equal(state, before)
    saves.restore()
    return torch.equal(state, before)


def test_a_write_is_saved_at_every_call_of_an_operator(library):
    state = torch.zeros(4)
    moved = defined(library, "moved(Tensor(a!) x) -> ()", one_more)
    for _ in range(3):
        assert saved(state, lambda: moved(state))
        assert saved(state, lambda: state.add_(torch.ones(4).sin()))
        assert saved(state, lambda: torch.add(torch.ones(4), 1, out=state))


def one_more(x: torch.Tensor) -> None:
    x.add_(1)


def one_more_in_numpy(x: torch.Tensor) -> None:
    x.numpy()[:] += 1


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index_put_": lambda state, at: state.index_put_((at,), torch.full((len(at),), 7.0)),
    "index_copy_": lambda state, at: state.index_copy_(0, at, torch.full((len(at),), 7.0)),
    "index_add_": lambda state, at: state.index_add_(0, at, torch.full((len(at),), 7.0)),
    "scatter_": lambda state, at: state.scatter_(0, at, torch.full((len(at),), 7.0)),
    "several": lambda state, at: state.view(4, 4).index_put_((at // 4, at % 4), torch.ones(())),
}


@pytest.mark.parametrize("name", WRITES)
def test_rows_by_token_already_written_by_the_largest_run_are_not_saved(name):
    state, write = torch.zeros(16), WRITES[name]
    key = tree.storage_key(state)
    largest = SavedWrites(1 << 20)
    Watch(frozenset(), largest).around(lambda: write(state, torch.arange(8) % 5))
    largest.restore()
    assert not state.any()
    for tokens, indices, nobodys in (
        (4, torch.arange(4), True),
        # As many as tokens are written, or a token has none.
        (4, torch.tensor([9]), False),
        (4, torch.arange(5), False),
        (1, torch.tensor([9]), False),
    ):
        saves = SavedWrites(1 << 20)
        WriteWatch({key}, saves, largest, tokens).around(lambda at=indices: write(state, at))
        assert state.any()
        saves.restore()
        assert bool(state.any()) is nobodys
        state.zero_()


def test_rows_written_by_an_operator_unlike_the_largest_run_are_saved():
    state, other = torch.zeros(16), torch.zeros(16)
    known = {tree.storage_key(state), tree.storage_key(other)}
    largest = SavedWrites(1 << 20)
    at = torch.arange(4)
    Watch(frozenset(), largest).around(lambda: WRITES["index_copy_"](state, torch.arange(8)))
    largest.restore()
    for written, name in ((other, "index_copy_"), (state, "index_add_")):
        saves = SavedWrites(1 << 20)
        WriteWatch(known, saves, largest, 4).around(lambda w=written, n=name: WRITES[n](w, at))
        assert written.any()
        saves.restore()
        assert not written.any()


FORWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "only small": lambda s, x: (
        s.index_add_(0, torch.tensor([3]), torch.ones(1)) if x.shape[0] <= 2 else None
    ),
    "only small, by item": lambda s, x: (
        s.scatter_(0, torch.tensor([3]), s[3:4] + 1) if x.shape[0] <= 2 else None
    ),
    "a histogram": lambda s, x: s.index_add_(0, torch.tensor([x.shape[0]]), torch.ones(1)),
    "a histogram, put": lambda s, x: s.index_put_((torch.tensor(x.shape[0]),), s[x.shape[0]] + 1),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_capture_restores_rows_that_only_some_sizes_write(name):
    def forward(x: torch.Tensor) -> torch.Tensor:
        FORWARDS[name](state, x)
        return x + state[3]

    state = torch.zeros(9)
    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[1, 2, 4, 8],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        platform="cpu",
    )
    runner.capture()
    assert not state.any()


def test_a_redefined_operator_that_now_writes_has_its_write_saved():
    state = torch.zeros(4)
    # The first says nothing of what it writes, but its body's own operators do.
    for schema in ("again(Tensor x)", "again(Tensor(a!) x)"):
        library = torch.library.Library(NAMESPACE, "DEF")
        again = defined(library, f"{schema} -> Tensor", lambda x: x.add_(1).clone())
        for _ in range(2):
            assert saved(state, lambda again=again: again(state))
            state.zero_()
        library._destroy()


def test_a_redefined_operator_is_saved_only_where_its_schema_declares_the_write():
    state = torch.zeros(4)
    for schema in ("untold(Tensor x) -> ()", "untold(Tensor(a!) x) -> ()"):
        library = torch.library.Library(NAMESPACE, "DEF")
        untold = defined(library, schema, one_more_in_numpy)
        is_said = saved(state, lambda untold=untold: untold(state))
        assert is_said is ("!" in schema)
        library._destroy()


def test_composite_operators_are_decomposed_at_every_call(library):
    state = torch.zeros(4)
    whole = defined(library, "whole(Tensor x) -> Tensor", moved_on, "CompositeImplicitAutograd")
    with torch.inference_mode():
        for _ in range(2):
            assert saved(state, lambda: whole(state))
            # One of torch's own, whose schema does not say what its parts write.
            assert saved(state, lambda: F.instance_norm(rows, state, torch.ones(4), momentum=0.5))


rows = torch.arange(24.0).view(2, 4, 3)


def moved_on(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def test_autocast_reaches_the_body_of_an_operator_at_every_call(library):
    made = defined(library, "product(Tensor x) -> Tensor", lambda x: x @ x)
    watch, found = watch_of(), []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            watch.around(lambda: found.append(made(torch.eye(4)).dtype))
        assert found == [made(torch.eye(4)).dtype] * 3 == [torch.bfloat16] * 3


def test_higher_order_operators_run_under_the_write_watch():
    def run() -> torch.Tensor:
        return torch.ops.higher_order.cond(True, lambda a: a + 1, lambda a: a - 1, (weight,))

    weight = torch.ones(4)
    for _ in range(2):
        assert watch_of().around(run).tolist() == [2.0] * 4


def test_an_operator_that_writes_nothing_is_not_analysed(monkeypatch):
    asked: list[Any] = []
    facts = writes.facts_of
    monkeypatch.setattr(writes, "facts_of", lambda func: asked.append(func) or facts(func))
    watch, x = watch_of(), torch.tensor([1.0, 3.0])
    assert torch.equal(watch.around(x.sin), x.sin())
    assert not asked
    watch.around(x.sin_)
    assert [str(func) for func in asked] == ["aten.sin_.default"]


def test_a_write_inside_vmap_is_saved():
    state = torch.zeros(4)
    assert saved(state, lambda: torch.func.vmap(lambda row: row.add_(1.5))(state.view(2, 2)))


def test_python_numbers_as_arguments_reach_an_operator_that_writes():
    state = torch.zeros(4, dtype=torch.bfloat16)
    assert saved(state, lambda: state.add_(1).mul_(2.5).copy_(state + 1))


def test_a_power_with_a_python_number_as_base_runs_under_the_watch():
    exponents = torch.arange(4, dtype=torch.float32)
    found = watch_of().around(lambda: (2.0**exponents, torch.pow(3, exponents)))
    assert torch.equal(found[0], 2.0**exponents) and torch.equal(found[1], torch.pow(3, exponents))


def test_an_interrupted_watch_records_no_later_writes():
    watch, state = watch_of({tree.storage_key(torch.zeros(1))}), torch.zeros(4)
    found: list[bool] = []

    def interrupted() -> None:
        state.add_(1)
        raise KeyboardInterrupt

    watch.around(lambda: found.append(is_watched()))
    with pytest.raises(KeyboardInterrupt):
        watch.around(interrupted)
    assert found == [True] and not is_watched()
    state.add_(1)
    assert state.tolist() == [2.0] * 4


def test_writes_declared_by_compiled_pieces_are_saved():
    def kernel(target: torch.Tensor) -> None:
        target.numpy()[:] += 1  # no operator writes it

    state = torch.zeros(4)
    assert saved(state, lambda: AsOperator(kernel, None, [0], always=False)(state))
    assert saved(state, lambda: TellingUses(kernel, [0])(state))


def test_code_from_torch_compile_has_its_writes_saved():
    state = torch.zeros(4)
    compiled = torch.compile(lambda x: state.add_(x.sin()), backend="aot_eager")
    assert saved(state, lambda: compiled(torch.ones(4)))
    assert saved(state, lambda: compiled(torch.ones(4)))


def test_lengths_that_every_run_advances_are_put_back_before_the_next_run():
    # The next run reads them: a length, say, that goes on would soon be the index of no row.
    lengths, keys = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4)

    def forward(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        keys[rows, lengths[rows]] = x
        lengths[rows] = lengths[rows] + 1
        return x + 1

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=range(1, 9),
        inputs={
            "rows": InputSpec(torch.int64, ("tokens",), pad=2, index=True),
            "x": InputSpec(torch.float32, ("tokens",)),
        },
        outputs=("tokens",),
        platform="cpu",
    )
    runner.capture()
    assert len(runner.report().graphs) == 8
    assert lengths.tolist() == [0, 0, 0]


def test_writes_of_an_operator_defined_in_a_warm_up_are_put_back(
    library,
):
    of_size = {size: torch.zeros(4) for size in (2, 4, 8)}
    operators = list[Any]()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not operators:
            operators.append(defined(library, "late(Tensor(a!) x) -> ()", one_more_in_numpy))
        operators[0](of_size[len(x)])
        return x + 1

    inputs = {"x": InputSpec(torch.float32, ("tokens",))}
    runner = GraphRunner(forward, inputs=inputs, sizes=[2, 4, 8], mode="FULL", platform="cpu")
    runner.capture()
    assert not any(state.any() for state in of_size.values())


def test_writes_of_smaller_sizes_by_an_operator_that_the_largest_defines_alone_are_put_back(
    library,
):
    of_size = {size: torch.zeros(4) for size in (2, 4, 8)}
    operators = list[Any]()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not operators:
            operators.append(defined(library, "later(Tensor(a!) x) -> ()", one_more_in_numpy))
        if len(x) < 8:
            operators[0](of_size[len(x)])
        return x + 1

    inputs = {"x": InputSpec(torch.float32, ("tokens",))}
    runner = GraphRunner(forward, inputs=inputs, sizes=[2, 4, 8], mode="FULL", platform="cpu")
    runner.capture()
    assert not any(state.any() for state in of_size.values())
