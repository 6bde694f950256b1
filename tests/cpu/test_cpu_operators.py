"""Every kind of operator: the capturing call and later replays equal eager."""

from __future__ import annotations

import pytest
import torch
from cpu_capturing import capture, same
from torch.nn import functional as F

from graphrt.core.base.errors import RefusedOpError
from graphrt.cpu.tape import lowering
from graphrt.cpu.tape.operators import operator_of


@torch.library.custom_op("graphrt_cpu_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("graphrt_cpu_test::add_into", mutates_args=("out",))
def add_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.add_(x)


@torch.library.custom_op("graphrt_cpu_test::grow", mutates_args=())
def grow(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int(x[0]) + 1)


@torch.library.custom_op("graphrt_cpu_test::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.conj() * 2 + x.conj().imag


def in_place_on_view(x):
    y = x.clone()
    y[1:, ::2].mul_(3)
    y.t()[0].zero_()
    return y


def metadata_in_place(x):
    y = x + 1
    y.t_()
    z = y.unsqueeze_(0)
    return z * 2


def transposed_in_place(x):
    square = x[:, :4].clone()
    square.t_()
    return square * torch.arange(4.0)


def given_outputs(x):
    out = torch.empty_like(x)
    torch.add(x, x, out=out)
    grown = torch.empty(0)
    torch.mul(x, 2, out=grown)
    return out, grown


def foreach(x):
    ys = torch._foreach_mul([x, x + 1], 2.0)
    torch._foreach_add_(ys, 1.0)
    return ys


def put(x):
    y = torch.zeros(6, 3)
    y.index_put_((torch.tensor([1, 4]),), x[:2, :3], accumulate=True)
    y[torch.tensor([0, 5])] += 1
    y[torch.zeros(6, 3, dtype=torch.bool)] = 9.0
    return y


def accumulate(x):
    y = torch.empty(4, 6)
    y.fill_(1)
    y += x
    y[0] = x[1]
    return y.scatter_add_(0, torch.zeros(4, 6, dtype=torch.int64), x)


def nested(x):
    return {"a": [x + 1, (x * 2, None)], "b": torch.topk(x, 2)}


CASES = {
    "pointwise": lambda x: (x + 1).mul(2).div(3).sub(0.5).exp(),
    "alpha": lambda x: torch.add(x, x, alpha=0.3),
    "integers": lambda x: (x * 10).to(torch.int64) // 3 % 2 + 7,
    "python_scalars": lambda x: (2 * x, x / 3, 1 - x, x**2, 2.0**x, x * 1e30, x - (1 << 40)),
    "comparison": lambda x: torch.where(x > 0, x, -x) * (x != 0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "topk": lambda x: torch.topk(x, 3, dim=1),
    "sort": lambda x: torch.sort(x, dim=0, descending=True),
    "max": lambda x: x.max(dim=1),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "cumsum": lambda x: x.cumsum(1).argmax(-1),
    "std_mean": lambda x: torch.std_mean(x, dim=1),
    "softmax": lambda x: F.softmax(x, -1) + F.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, (6,), torch.ones(6), torch.zeros(6)),
    "rms_norm": lambda x: F.rms_norm(x, (6,), torch.ones(6)),
    "gelu": lambda x: F.gelu(x) + F.silu(x) + F.relu(x),
    "linear": lambda x: F.linear(x, torch.ones(3, 6), torch.ones(3)),
    "matmul": lambda x: x @ x.t() + torch.einsum("ij,kj->ik", x, x),
    "bmm": lambda x: torch.bmm(x.view(2, 2, 6), x.view(2, 6, 2)),
    "conv": lambda x: F.conv1d(x.view(1, 4, 6), torch.ones(2, 4, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 2, 2, 6),) * 3),
    "split": lambda x: [p + 1 for p in x.split(2, 1)] + list(torch.chunk(x, 2)),
    "unbind_copy": lambda x: torch.unbind_copy(x),
    "split_copy": lambda x: torch.split_copy(x, 2),
    "cat": lambda x: torch.cat([x, x[:1]]).sum() + torch.stack([x, x]),
    "views": lambda x: x.view(2, 12).t()[1:].unsqueeze(0).expand(3, -1, -1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)) + 1,
    "reshape_copies": lambda x: x.t().reshape(-1),
    "contiguous": lambda x: x.t().contiguous(),
    "detach": lambda x: torch.alias_copy((x + 1).detach()),
    "to_copy": lambda x: (x.to(torch.float64), x.half(), x.bfloat16().float(), x.bool()),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "complex": lambda x: (torch.complex(x, x + 1).conj() * 2, torch.view_as_complex(x.view(-1, 2))),
    "conj_view": lambda x: torch.mm(torch.complex(x, x), torch.complex(x, x).t().conj()),
    "fft": lambda x: torch.fft.rfft(x),
    "nan": lambda x: x / 0 * 0,
    "constant": lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6]) + torch.arange(6),
    "factories": lambda x: (torch.zeros(3000), torch.full((4,), 2.5), torch.eye(3), torch.ones(2)),
    "like": lambda x: torch.zeros_like(x) + torch.full_like(x, 3) + x.new_ones(6),
    "zero_elements": lambda x: (torch.empty(0, 3), x[:0] + 1, torch.cat([x[:0], x])),
    "zero_dim": lambda x: x.sum() * 2 + x.mean(),
    "non_contiguous_output": lambda x: (x.t() + 1, torch.empty_like(x.t()).copy_(x.t())),
    "channels_last": lambda x: x.view(1, 2, 2, 6).to(memory_format=torch.channels_last) * 2,
    "embedding": lambda x: F.embedding(torch.tensor([0, 3, 1]), x),
    "gather": lambda x: x.gather(1, torch.tensor([[0], [1], [2], [3]])),
    "integer_index": lambda x: (x[torch.tensor([0, 2])], x[:, torch.tensor([1, 1])], x[None, 1]),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "tril": lambda x: torch.tril(x) + torch.triu(x, 1),
    "roll": lambda x: x.roll(1, 0).flip(1).repeat(2, 1).repeat_interleave(2, 0),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "searchsorted": lambda x: torch.searchsorted(torch.arange(5.0), x),
    "dropout_eval": lambda x: F.dropout(x, 0.5, training=False) + 1,
    "input_returned": lambda x: (x, x[1:], x.view(-1)),
    "expanded_output": lambda x: torch.ops.aten._unsafe_view(x, (24,)).expand(2, 24) + 0,
    "in_place_on_view": in_place_on_view,
    "metadata_in_place": metadata_in_place,
    "transposed_in_place": transposed_in_place,
    "given_outputs": given_outputs,
    "foreach": foreach,
    "index_put": put,
    "accumulate": accumulate,
    "nested": nested,
    "custom": lambda x: scaled(x + 1, 2.5),
    "inverse_quiet": lambda x: torch.linalg.inv_ex(x[:4, :4] + 3 * torch.eye(4)),
}


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in flat(item)]
    return []


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", CASES)
def test_capture_and_replay_of_each_operator_equal_eager(name, inference):
    torch.manual_seed(0)
    forward, x = CASES[name], torch.randn(4, 6)
    with torch.inference_mode(inference), torch.no_grad():
        expected = [t.clone() if t.data_ptr() == x.data_ptr() else t for t in flat(forward(x))]
    graph, result = capture(forward, x, inference=inference)
    assert len(flat(result)) == len(expected)
    assert all(map(same, flat(result), expected))
    for _ in range(2):
        x.copy_(torch.randn(4, 6))
        graph.replay()
        with torch.inference_mode(inference), torch.no_grad():
            assert all(map(same, flat(result), flat(forward(x))))


def test_a_mutating_custom_operator_is_issued_once_per_replay():
    x, out = torch.ones(3), torch.zeros(3)
    graph, _ = capture(lambda: add_into(x, out))
    assert out.tolist() == [1.0] * 3
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_a_custom_operator_that_returns_another_shape_at_replay_is_named():
    x = torch.tensor([2.0])
    graph, out = capture(lambda: grow(x))
    assert out.shape == (3,)
    x.fill_(5)
    with pytest.raises(Exception, match=r"grow.*\n.*\n.*\(6,\)"):
        graph.replay()


def test_casts_of_autocast_inside_the_forward_are_replayed():
    x, weight = torch.randn(4, 6), torch.randn(3, 6)

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled(F.linear(x, weight), 2.0)

    with torch.no_grad():
        expected = forward()
    graph, out = capture(forward)
    assert out.dtype == torch.bfloat16
    out.zero_()
    graph.replay()
    assert same(out, expected)


def test_a_profiler_range_may_begin_and_end_inside_a_capture():
    x = torch.ones(3)

    def forward():
        with torch.profiler.record_function("part"):
            return x + 1

    graph, out = capture(forward)
    assert graph.kernels == 1
    assert out.tolist() == [2.0] * 3


def test_an_out_variant_that_computes_a_different_result_is_not_used(monkeypatch):
    other = operator_of(torch.ops.aten.expm1.out)
    monkeypatch.setattr(lowering, "out_variant", lambda op: (other, ("out",), frozenset()))
    x = torch.randn(5)
    graph, out = capture(lambda: x.exp())
    assert same(out, x.exp())
    assert graph._steps[0].lowered.kind == "again"
    x.copy_(torch.randn(5))
    graph.replay()
    assert same(out, x.exp())


def test_a_python_binding_that_calls_a_different_operator_is_not_used(monkeypatch):
    monkeypatch.setattr(lowering, "_bindings", lambda name: (torch._C._VariableFunctions.expm1,))
    x = torch.randn(5)
    graph, out = capture(lambda: x.exp())
    assert graph._steps[0].lowered.call.fn is operator_of(torch.ops.aten.exp.out).raw
    x.copy_(torch.randn(5))
    graph.replay()
    assert same(out, x.exp())


def test_native_batch_norm_updates_its_statistics_once_per_call():
    x, eager, captured = torch.randn(8, 3), torch.zeros(2, 3), torch.zeros(2, 3)

    def forward(stats):
        return torch.native_batch_norm(x, None, None, stats[0], stats[1], True, 0.5, 1e-5)

    with torch.no_grad():
        forward(eager)
    graph, _ = capture(forward, captured)
    assert same(captured, eager)
    with torch.no_grad():
        forward(eager)
    graph.replay()
    assert same(captured, eager)


def test_an_output_that_nothing_reads_is_not_copied_at_replay():
    x = torch.randn(1, 2, 3, 8)
    graph, _ = capture(lambda: F.scaled_dot_product_attention(x, x, x))
    (step,) = graph._steps
    assert len(step.lowered.copies) == 1


def test_an_operator_that_conjugates_inside_gives_eager_results():
    x = torch.complex(torch.randn(3, 2), torch.randn(3, 2))
    graph, out = capture(torch.pinverse, x)
    with torch.no_grad():
        assert same(out, torch.pinverse(x))
        x.mul_(1j).add_(1)
        graph.replay()
        assert same(out, torch.pinverse(x))


def test_the_body_of_a_custom_operator_sees_conjugated_tensors_as_they_are():
    x = torch.complex(torch.randn(3), torch.randn(3))
    graph, out = capture(turned, x)
    assert same(out, turned(x))
    graph.replay()
    assert same(out, turned(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(2, 3),
        lambda x: x.as_strided_((2, 2), (1, 2)),
        lambda x: x.set_(torch.ones(3)),
    ],
)
def test_an_in_place_shape_change_of_an_outside_tensor_is_refused_and_undone(change):
    x = torch.randn(4, 6)
    before = x.clone()
    with pytest.raises(RefusedOpError, match="no replay repeats"):
        capture(change, x)
    assert same(x, before)


def test_a_view_of_an_outside_tensor_may_change_its_shape_in_place():
    x = torch.randn(4, 6)
    graph, out = capture(lambda x: x.view(2, 12).t_() * 2, x)
    x.copy_(torch.randn(4, 6))
    graph.replay()
    assert same(out, x.view(2, 12).t() * 2)


def test_an_in_place_squeeze_without_effect_is_captured():
    x = torch.randn(4, 6)
    graph, out = capture(lambda x: x.squeeze_() + 1, x)
    graph.replay()
    assert same(out, x + 1)


def test_an_output_that_is_marked_as_conjugated_keeps_its_numbers():
    lu, pivots = torch.linalg.lu_factor(torch.complex(torch.randn(3, 3), torch.randn(3, 3)))
    x = torch.complex(torch.randn(4, 3), torch.randn(4, 3))
    graph, out = capture(lambda: torch.linalg.lu_solve(lu, pivots, x, left=False))
    for _ in range(2):
        assert same(out, torch.linalg.lu_solve(lu, pivots, x, left=False))
        x.add_(1j)
        graph.replay()
