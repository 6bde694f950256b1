"""What a guard would catch: each change between two calls is right or named, never silent."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from graphrt import Batch, GraphPool, GraphRunner, InputSpec
from graphrt.compile import (
    CompileOptions,
    CompileSealedError,
    RetraceError,
    TraceError,
    compile_module,
)
from graphrt.compile.trace.check import Overlaps
from graphrt.compile.trace.parameters import Leaf
from tests.compile.guard_changes import CHANGES, Change, Scaled, outcome, rows

FINE = ("right", "both raise", "RetraceError", "at compile time: TraceError")
NAMES = [each.name for each in CHANGES]


def test_the_table_has_at_least_sixty_changes_of_all_three_kinds():
    assert len(CHANGES) >= 60 and len(set(NAMES)) == len(NAMES)
    assert {each.where for each in CHANGES} == {"outside", "ambient", "call"}


@pytest.mark.parametrize("each", CHANGES, ids=NAMES)
def test_a_change_between_two_calls_is_right_or_named(each: Change):
    assert outcome(each, "eager") in FINE


@pytest.mark.long
@pytest.mark.parametrize("each", CHANGES, ids=NAMES)
def test_a_change_between_two_calls_is_right_or_named_with_inductor(each: Change):
    assert outcome(each, "inductor") in FINE


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("each", CHANGES, ids=NAMES)
def test_a_change_after_seal_is_right_or_named_by_weights_changed(each, backend):
    assert outcome(each, backend, sealed=True) in (*FINE, "CompileSealedError")


def test_a_retrace_error_names_the_changed_value():
    model = Scaled().eval()
    compiled = compile_module(model, ["x"], in_place=False)
    compiled(rows())
    model.scale = 3.0
    with pytest.raises(RetraceError, match=r"module\.scale is not as it was") as caught:
        compiled(rows())
    assert caught.value.input == "module.scale"
    assert "got: 3.0" in str(caught.value) and "expected: 2.0" in str(caught.value)
    model.scale = 2.0
    compiled(rows())


def test_seal_and_weights_changed_each_check_the_guards():
    model = Scaled().eval()
    compiled = compile_module(model, ["x"], in_place=False)
    compiled.ensure_compiled(rows())
    model.scale = 3.0
    with pytest.raises(RetraceError, match="scale"):
        compiled.seal()
    model.scale = 2.0
    compiled.seal()
    compiled.weights_changed()
    model.scale = 3.0
    with pytest.raises(RetraceError, match="scale"):
        compiled.weights_changed()


def test_a_changed_number_of_threads_needs_no_retrace():
    compiled = compile_module(Scaled().eval(), ["x"], in_place=False)
    compiled(rows())
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        compiled(rows())
    finally:
        torch.set_num_threads(before)


def test_guards_still_hold_after_a_reset_of_dynamo():
    compiled = compile_module(Scaled().eval(), ["x"], in_place=False)
    compiled(rows())
    torch._dynamo.reset()
    compiled(rows())
    compiled.unwrap().scale = 3.0
    with pytest.raises(RetraceError, match="scale"):
        compiled(rows())


def test_size_one_shares_the_code_unless_the_forward_branches_on_size():
    shared = compile_module(lambda x: x * 2, ["x"])
    shared(rows())
    assert torch.equal(shared(rows(1)), rows(1) * 2)
    assert shared.figures.traces == 1
    asking = compile_module(lambda x: x * (2 if x.shape[0] == 1 else 3), ["x"])
    asking(rows())
    assert asking.figures.traces == 2
    asking.seal()
    assert torch.equal(asking(rows(1)), rows(1) * 2)
    assert torch.equal(asking(rows(5)), rows(5) * 3)


def test_an_empty_batch_is_compiled_before_seal_and_refused_after():
    compiled = compile_module(lambda x: x.sum(0) + len(x.shape), ["x"])
    compiled(rows())
    sealed = compile_module(lambda x: x.sum(0) + len(x.shape), ["x"])
    sealed(rows())
    sealed.seal()
    assert torch.equal(compiled(rows()[:0]), torch.full((4,), 2.0))
    with pytest.raises(CompileSealedError):
        sealed(rows()[:0])


def test_an_axis_of_size_one_beside_a_larger_axis_gives_eager_results():
    def forward(x, pages):
        return x * (2 if pages.shape[0] == 1 else 3) + pages.sum()

    compiled = compile_module(forward, {"x": 0, "pages": {0: "reqs"}})
    for tokens, reqs in ((6, 3), (6, 1), (1, 3), (1, 1)):
        args = rows(tokens), torch.ones(reqs, 2)
        assert torch.equal(compiled(*args), forward(*args))


class Config:
    on: torch.Tensor | None = None


class Restoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mode, self.config = nn.Linear(4, 4), "a", Config()

    def forward(self, x):
        before, self.mode, self.config.on = self.mode, "b", x
        x = self.linear(x) * (2 if self.mode == "b" else 3)
        self.mode, self.config.on = before, None
        self.passing = 1
        del self.passing
        return x


def test_an_attribute_set_and_restored_within_a_call_is_no_reassigned_state():
    model = Restoring().eval()
    compiled = compile_module(model, ["x"], in_place=False)
    with torch.no_grad():
        assert torch.equal(compiled(rows()), model(rows()))
    assert (model.mode, model.config.on, hasattr(model, "passing")) == ("a", None, False)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * (2 if x.shape[0] == 1 else 3)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_graphs_of_a_single_token_replay_the_code_compiled_for_size_one(mode):
    model, pool = Deciding().eval(), GraphPool("cpu")
    expected = {n: model(rows(n)).detach() for n in (1, 2, 4)}
    compiled = compile_module(model, ["x"], pool=pool, options=CompileOptions(backend="eager"))
    inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
    with GraphRunner(
        model, mode=mode, sizes=[1, 2, 4], inputs=inputs, outputs=("tokens", 4), pool=pool
    ) as runner:
        runner.capture()
        for n in (1, 2, 4, 1):
            assert torch.equal(runner(Batch(n, n, 1), x=rows(n)), expected[n])
        assert compiled.figures.traces == 2
        runner.weights_changed()
        model.linear.register_forward_hook(lambda *_: None)
        with pytest.raises(RetraceError):
            runner.weights_changed()
        with pytest.raises(RetraceError):
            runner.weights_changed()


def _half(model: nn.Module) -> None:
    model.half()


def _transposed(model: nn.Module) -> None:
    model.first.weight.data = model.first.weight.data.t().contiguous().t()


def _fewer_rows(model: nn.Module) -> None:
    model.first.weight.data = model.first.weight.data[:2]


class Columns(Scaled):
    """Reads its weight by operators that take any dtype and shape."""

    def forward(self, x):
        return x * self.first.weight.sum(0)


@pytest.mark.parametrize("change", [_half, _transposed, _fewer_rows])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_weight_changed_in_place_to_another_dtype_or_layout_is_named(change, sealed):
    model = Columns().eval()
    compiled = compile_module(model, ["x"], in_place=False)
    compiled(rows())
    if sealed:
        compiled.seal()
    change(model)
    with pytest.raises(RetraceError, match=r"the weight first\.weight is another one"):
        compiled(rows())
    for told in (compiled.rebind_weights, compiled.weights_changed):
        with pytest.raises(RetraceError, match=r"first\.weight"):
            told()


def test_a_global_tensor_changed_in_place_to_another_dtype_is_named():
    table = torch.ones(4)
    model = Scaled().eval()

    def forward(x):
        return model.first(x).sum(1, keepdim=True) * table

    compiled = compile_module(forward, ["x"])
    compiled(rows())
    table.data = table.double()
    with pytest.raises(RetraceError, match="float64"):
        compiled(rows())


class Halves(nn.Module):
    def forward(self, x):
        first, second = x.sin().chunk(2)
        return first + 2 * second


class Second(nn.Module):
    def forward(self, x):
        return x.sin()[1]


class Several(nn.Module):
    def forward(self, x):
        assert x.shape[0] > 1
        return x.sin()


@pytest.mark.parametrize("kind", [Halves, Second, Several])
def test_a_forward_that_fails_for_a_single_row_compiles_and_refuses_single_rows(kind):
    model = kind()
    compiled = compile_module(model, ["x"], in_place=False)
    for size in (4, 2, 6):
        x = torch.randn(size, 4)
        assert torch.equal(compiled(x), model(x))
    with pytest.raises(TraceError):
        compiled(torch.randn(1, 4))
    compiled.seal()
    with pytest.raises(CompileSealedError):
        compiled(torch.randn(1, 4))
    assert torch.equal(compiled(x), model(x))


def test_an_argument_that_changes_from_none_to_a_tensor_is_named():
    def forward(x, mask=None):
        return x.sin() if mask is None else x * mask

    compiled = compile_module(forward, ["x"])
    compiled(torch.randn(3, 4))
    with pytest.raises(RetraceError, match=r"mask differs .* in the type") as caught:
        compiled(torch.randn(3, 4), torch.ones(3, 4))
    assert "got: Tensor" in str(caught.value) and "expected: NoneType" in str(caught.value)


# Arguments in one memory ---------------------------------------------------------------------


def test_a_written_argument_may_share_no_memory_with_another_argument():
    base = torch.zeros(4, 6)
    columns = [base[:, :3], base[:, 3:], base[1:, 3:], base[:2, :3], base[:, 2:4], base[:, 4:]]
    cube = base.view(4, 2, 3)
    views = [
        *columns,
        cube[:, 0],
        cube[:, 1],
        cube[1:, :, :1],
        cube[..., 1:],
        base[::2],
        base[1::2],
    ]
    views += [base, base[2:], base[0], base[1, 1:2], base[:, 0], base[:, 5], base[0, 0], base[3, 5]]
    views += [base.t(), base[:, :0], base[:0], base[1:2, 1:4], base[:1].expand(3, 6)]
    views += [base.view(torch.int32), base.view(torch.float64).view(2, 6)[:, 3:4]]
    places = [_bytes(each) for each in views]
    told = Overlaps({"one"}, writes_weights=False)
    for (one, mine), (other, others) in itertools.product(
        zip(views, places, strict=True), repeat=2
    ):
        refused = _refuses(told, [Leaf("one", one), Leaf("other", other)])
        assert refused == _refuses(told, [Leaf("other", other), Leaf("one", one)])
        assert refused or not mine & others
        if one.dtype is other.dtype and one.stride() == other.stride() and one.dim() <= 2:
            assert refused == bool(mine & others)


def _bytes(tensor: torch.Tensor) -> set[int]:
    both = zip(tensor.shape, tensor.stride(), strict=True)
    places = itertools.product(*([n * step for n in range(size)] for size, step in both))
    width = tensor.element_size()
    firsts = [tensor.data_ptr() + sum(each) * width for each in places]
    return {first + n for first in firsts for n in range(width)}


def _refuses(overlaps: Overlaps, leaves: list[Leaf], **weights: torch.Tensor) -> bool:
    try:
        overlaps.check(leaves, weights)
    except RetraceError:
        return True
    return False


def test_read_only_arguments_may_share_memory_and_written_weights_may_not():
    weight = torch.zeros(4, 6)
    one, other = Leaf("one", weight[1:]), Leaf("other", weight[0])
    same = [one, Leaf("other", weight[1])]
    read, writes = Overlaps((), writes_weights=False), Overlaps((), writes_weights=True)
    assert not _refuses(read, same, w=weight) and not _refuses(writes, same)
    assert _refuses(writes, [one, other], w=weight) and not _refuses(writes, [one], w=weight[:1])
    assert _refuses(Overlaps({"one"}, writes_weights=False), [one], w=weight)
    assert not _refuses(Overlaps({"other"}, writes_weights=False), [one], w=weight)
    with pytest.raises(RetraceError, match="argument one shares memory with the module's w"):
        writes.check([one], {"w": weight})
