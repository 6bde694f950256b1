from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cpu_capturing import capture, modes_left
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import rnn

from graphrt import GraphOptions, GraphRunner, InputSpec, Reason, eager_break
from graphrt.core.base.errors import (
    CaptureError,
    CaptureSyncError,
    NestedCaptureError,
    RefusedOpError,
)
from graphrt.cpu import Arena, TapeGraph

higher_order = SimpleNamespace(map=map_rows, scan=scan, while_loop=while_loop)

X = torch.arange(4.0)
MASK = torch.tensor([True, False, True, True])
REPEATS = torch.tensor([1, 2, 1, 1])
PLACES = torch.tensor([1, 2])
LENGTHS = torch.tensor([2, 1, 1])
GRU, LSTM, RNN = nn.GRU(1, 2), nn.LSTM(1, 2), nn.RNN(1, 2, nonlinearity="relu")
STATE = torch.zeros(1, 2, 2)
WEIGHT = torch.randn(4, 4)

HOST_READS = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool((X > 1).any()),
    "if": lambda: 1 if X.sum() > 0 else 2,
    "int": lambda: int(X[0]),
    "float": lambda: float(X[0]),
    "index": lambda: [0, 1][X.long()[1]],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "array": lambda: np.asarray(X),
    "dlpack": lambda: torch.from_dlpack(X),
    "np_dlpack": lambda: np.from_dlpack(X),
    "repr": lambda: repr(X),
    "format": lambda: f"{X.sum():.2f}",
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "contains": lambda: 3.0 in X,
    "tensor_split": lambda: X.tensor_split(PLACES),
    "tensor_split of torch": lambda: torch.tensor_split(X, PLACES),
    "tensor_split as an operator": lambda: torch.ops.aten.tensor_split(X, PLACES),
    "tensor_split of C": lambda: torch._C._VariableFunctions.tensor_split(X, PLACES),
    "pad_packed_sequence": lambda: rnn.pad_packed_sequence(packed()),
    "gru": lambda: GRU(packed(), STATE)[0].data,
    "lstm": lambda: LSTM(packed(), (STATE, STATE))[0].data,
    "rnn": lambda: RNN(packed(), STATE)[0].data,
    "sobol": lambda: torch._sobol_engine_ff_(PLACES.clone(), 3, torch.ones(2, 30).long(), 2, 0),
    "qparams": lambda: torch.choose_qparams_optimized(X, 4, 200, 0.16, 8),
    "saturate": lambda: torch._saturate_weight_to_fp16(WEIGHT.clone()),
    "inv": lambda: torch.linalg.inv(torch.eye(3)),
    "one_hot": lambda: F.one_hot(REPEATS, 10),
    "nested_mask": lambda: torch._nested_tensor_from_mask(torch.ones(1, 4, 2), MASK[None]),
}


def packed() -> rnn.PackedSequence:
    return rnn.PackedSequence(X[:, None], LENGTHS)


DYNAMIC_SHAPES = {
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "argwhere": lambda: torch.argwhere(X),
    "masked_select": lambda: X.masked_select(MASK),
    "mask_index": lambda: X[MASK],
    "uint8_index": lambda: torch.ops.aten.index(X, [MASK.to(torch.uint8)]),
    "mask_put": lambda: X.clone().index_put_((MASK,), torch.ones(3)),
    "mask_assign": lambda: X.clone().__setitem__(MASK, torch.ones(3)),
    "unique": lambda: torch.unique(X),
    "unique_consecutive": lambda: torch.unique_consecutive(X),
    "repeat_interleave": lambda: X.repeat_interleave(REPEATS),
    "repeats_alone": lambda: torch.repeat_interleave(REPEATS),
    "bincount": lambda: torch.bincount(REPEATS),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", HOST_READS)
def test_a_host_read_is_refused_with_operator_source_and_advice(name, inference):
    with pytest.raises(CaptureSyncError) as caught:
        capture(HOST_READS[name], inference=inference)
    assert caught.value.op
    assert "test_cpu_refusals.py" in caught.value.source
    assert f'"{name}"' in caught.value.source
    assert caught.value.advice
    assert modes_left() == 0


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_constant_lengths_may_be_read_on_the_host_by_an_operator(inference):
    def forward() -> tuple[torch.Tensor, ...]:
        lengths = torch.tensor([2, 1, 1])
        padded, _ = rnn.pad_packed_sequence(rnn.PackedSequence(x[:, None], lengths))
        return padded + 0, x.tensor_split(torch.tensor([1, 2]))[1] + 0

    x = X.clone()
    with torch.inference_mode(inference), torch.no_grad():
        graph, outs = capture(forward, inference=inference)
        x += 3
        graph.replay()
        for out, expected in zip(outs, forward(), strict=True):
            assert torch.equal(out, expected)


def test_tensor_split_works_as_usual_after_a_refused_capture():
    capture(lambda: X + 1)
    with pytest.raises(CaptureSyncError):
        capture(lambda: X.tensor_split(PLACES))
    assert [part.tolist() for part in X.tensor_split(PLACES)] == [[0], [1], [2, 3]]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", DYNAMIC_SHAPES)
def test_a_shape_that_depends_on_data_is_refused(name, inference):
    with pytest.raises(RefusedOpError) as caught:
        capture(DYNAMIC_SHAPES[name], inference=inference)
    assert caught.value.op
    assert f'"{name}"' in caught.value.source
    assert caught.value.advice
    assert modes_left() == 0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("classes", [-1, 4])
def test_one_hot_is_refused_with_advice_that_can_be_captured(classes, inference):
    with pytest.raises(CaptureSyncError, match="one_hot") as caught:
        capture(lambda: F.one_hot(REPEATS, classes), inference=inference)
    assert caught.value.advice is not None
    advice = caught.value.advice.removeprefix("compare: ")
    x = REPEATS.clone()
    graph, out = capture(lambda: eval(advice, {"x": x, "torch": torch, "num_classes": 4}))
    x.copy_(REPEATS.flip(0) + 1)
    graph.replay()
    assert torch.equal(out, F.one_hot(x, 4))


@pytest.mark.parametrize(
    "read",
    [lambda: F.one_hot(X.long(), X.sum().item()), lambda: F.one_hot(X.long(), X.max().item())],
)
def test_a_host_read_for_an_argument_of_one_hot_is_refused_as_host_read(read):
    with pytest.raises(CaptureSyncError, match="read tensor data on the host"):
        capture(read)


def encode(
    check: str, pad: bool = False, keeps: bool = False, **options: bool
) -> tuple[nn.Module, GraphRunner]:
    """An encoder that is given a padding mask, or with `keeps` the places to keep; its runner."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, **options).eval()
    runner = GraphRunner(
        lambda x, mask: encoder(x, src_key_padding_mask=mask ^ keeps),
        mode="FULL",
        sizes=[2],
        inputs={
            "x": InputSpec(torch.float32, ("rows", 5, 8)),
            "mask": InputSpec(torch.bool, ("rows", 5), pad=pad),
        },
        outputs=("rows", 5, 8),
        options=GraphOptions(check=check),
        platform="cpu",
    )
    return encoder, runner


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("check", ["off", "sample"])
def test_an_encoder_that_makes_nested_tensors_is_refused_with_advice(check):
    _, refused = encode(check)
    with pytest.raises(CaptureSyncError, match="nested") as caught:
        refused.capture()
    assert caught.value.advice is not None and "enable_nested_tensor=False" in caught.value.advice
    encoder, served = encode(check, enable_nested_tensor=False)
    served.capture()
    for masked in (1, 4):
        x, mask = torch.rand(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
        mask[0, -masked:] = True
        out = served(x=x, mask=mask)
        assert served.last_dispatch.reason is Reason.HIT
        with torch.no_grad():
            assert torch.equal(out, encoder(x, src_key_padding_mask=mask))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [{"keeps": True}, {"pad": True}])
def test_an_encoder_whose_padding_hides_whole_rows_is_refused_with_advice_that_serves(kind):
    _, refused = encode("capture", **kind)
    with pytest.raises(CaptureSyncError, match="hides all") as caught:
        refused.capture()
    assert "encode" in str(caught.value)
    encoder, served = encode("capture", **kind, enable_nested_tensor=False)
    served.capture()
    keeps = kind.get("keeps", False)
    x, mask = torch.rand(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    for _ in range(2):
        out = served(x=x, mask=mask ^ keeps)
        assert served.last_dispatch.reason is Reason.HIT
        with torch.no_grad():
            assert torch.equal(out, encoder(x, src_key_padding_mask=mask))


def test_an_error_of_the_forward_in_a_warm_up_says_what_padding_it_was_given():
    served = GraphRunner(
        lambda ids: torch.ones(4, 2)[ids],
        mode="FULL",
        sizes=[2],
        inputs={"ids": InputSpec(torch.int64, ("rows",), pad=9)},
        platform="cpu",
    )
    with pytest.raises(IndexError) as caught:
        served.capture()
    notes = "".join(getattr(caught.value, "__notes__", ["ids=9"]))
    assert "ids=9" in notes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_eager_break_may_make_nested_tensors():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    part = eager_break(lambda x, mask: encoder(x, src_key_padding_mask=mask))
    runner = GraphRunner(
        lambda x, mask: part(x * 2, mask) + 1,
        mode="PIECEWISE",
        sizes=[4],
        inputs={
            "x": InputSpec(torch.float32, ("rows", 5, 8)),
            "mask": InputSpec(torch.bool, ("rows", 5)),
        },
        outputs=("rows", 5, 8),
        platform="cpu",
    )
    runner.capture()
    x, mask = torch.rand(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    for _ in range(2):
        out = runner(x=x, mask=mask)
        assert runner.last_dispatch.reason is Reason.HIT
        with torch.no_grad():
            torch.testing.assert_close(out, encoder(x * 2, src_key_padding_mask=mask) + 1)


@pytest.mark.parametrize("inference", [False, True])
def test_repeat_interleave_with_a_given_output_size_is_captured(inference):
    graph, out = capture(lambda: X.repeat_interleave(REPEATS, output_size=5), inference=inference)
    graph.replay()
    assert out.tolist() == X.repeat_interleave(REPEATS).tolist()


def test_another_thread_may_read_tensor_data_during_a_capture():
    seen: list[object] = []

    def read() -> None:
        seen.extend([X.tolist(), float(X.sum()), X.nonzero().shape, np.asarray(X).shape])

    def forward():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return X + 1

    graph, _ = capture(forward)
    assert len(seen) == 4
    assert graph.kernels == 1


def test_two_threads_may_capture_at_once():
    results: list[list[float]] = []

    def work(value: float) -> None:
        x = torch.full((4,), value)
        graph, out = capture(lambda: x * 2 + 1)
        x.add_(1)
        graph.replay()
        results.append(out.tolist())

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [[2.0 * i + 3] * 4 for i in range(4)]


def test_a_failed_forward_leaves_no_mode_and_the_next_capture_works():
    arena = Arena()
    kept, _ = capture(lambda: X + 1, arena=arena)
    before = arena.live_bytes

    def fails():
        y = X + 1
        z = y * 2
        raise ValueError(z.shape)

    with pytest.raises(ValueError, match="4"):
        capture(fails, arena=arena)
    assert modes_left() == 0
    assert arena.live_bytes == before
    graph, out = capture(lambda: X * 3, arena=arena)
    graph.replay()
    assert out.tolist() == (X * 3).tolist()
    assert kept.kernels == 1


def test_a_capture_inside_a_capture_is_refused_and_the_outer_one_goes_on():
    def forward():
        with pytest.raises(NestedCaptureError):
            TapeGraph().capture_begin(Arena())
        return X + 1

    graph, out = capture(forward)
    graph.replay()
    assert out.tolist() == (X + 1).tolist()


def test_a_dispatch_mode_left_open_is_named_and_survives_the_abort():
    from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

    class Foreign(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    mode = Foreign()
    with pytest.raises(CaptureError, match="Foreign"):
        capture(mode.__enter__)
    assert modes_left() == 1
    mode.__exit__(None, None, None)
    assert modes_left() == 0
    assert not is_in_torch_dispatch_mode()


def test_a_dispatch_mode_around_a_capture_still_sees_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        graph, out = capture(lambda: X + 1)
        assert "aten.add.Tensor" in seen
        seen.clear()
        graph.replay()
    assert seen == ["aten.add.out"]
    assert out.tolist() == (X + 1).tolist()


def test_aborting_twice_or_without_a_capture_does_nothing():
    graph = TapeGraph()
    graph.capture_abort()
    graph.capture_begin(Arena())
    graph.capture_abort()
    graph.capture_abort()
    assert modes_left() == 0


def test_growing_a_tensor_in_the_arena_is_refused():
    def forward():
        return (X + 1).resize_(1 << 20)

    with pytest.raises(RefusedOpError, match="cannot grow"):
        capture(forward)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_output_is_refused():
    with pytest.raises(RefusedOpError, match="nested"):
        capture(lambda: torch.nested.as_nested_tensor([X[:2], X]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("check", ["off", "sample"])
def test_a_nested_tensor_of_the_forward_is_read_only_in_an_eager_break(check):
    held = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])

    def read() -> torch.Tensor:
        return held.to_padded_tensor(0.0).sum(0)

    def of(read, mode: str) -> GraphRunner:
        return GraphRunner(
            lambda x: x * 2 + read(),
            mode=mode,
            sizes=[2],
            inputs={"x": InputSpec(torch.float32, ("rows", 4))},
            outputs=("rows", 4),
            options=GraphOptions(check=check),
            platform="cpu",
        )

    with pytest.raises(RefusedOpError, match="nested tensor from outside"):
        of(read, "FULL").capture()
    runner = of(eager_break(read), "PIECEWISE")
    runner.capture()
    for _ in range(2):
        x = torch.rand(2, 4)
        assert torch.equal(runner(x=x), x * 2 + torch.tensor([2.0, 2.0, 2.0, 1.0]))
        assert runner.last_dispatch.reason is Reason.HIT


def test_a_sparse_output_is_refused():
    with pytest.raises(RefusedOpError, match="sparse"):
        capture(lambda: torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,)))


_library = torch.library.Library("graphrt_cpu_refusals", "FRAGMENT")
_library.define("attend(Tensor x, Tensor(a!) out) -> Tensor(a!)")
_doubled = eager_break(lambda x: x * 2)
_library.impl("attend", lambda x, out: out.copy_(_doubled(x)), "CompositeExplicitAutograd")


def test_an_operator_that_breaks_inside_is_refused_with_advice_to_use_breaks():
    def forward(x):
        out = torch.empty_like(x)
        torch.ops.graphrt_cpu_refusals.attend(x + 1, out)
        return out - 1

    def captured(breaks):
        runner = GraphRunner(
            forward,
            mode="PIECEWISE",
            sizes=[2, 4],
            inputs={"x": InputSpec(torch.float32, ("tokens", 2))},
            outputs=("tokens", 2),
            options=GraphOptions(breaks=breaks),
        )
        runner.capture()
        return runner

    with pytest.raises(CaptureError, match=r'GraphOptions\(breaks=\("ns::operator",\)\)'):
        captured(())
    assert modes_left() == 0
    runner = captured(("graphrt_cpu_refusals::attend",))
    for rows in (4, 1, 2, 3):
        x = torch.randn(rows, 2)
        assert torch.equal(runner(x=x), (x + 1) * 2 - 1)
        assert runner.last_dispatch.reason is Reason.HIT


# Higher-order operators ---------------------------------------------------------------------------


def chosen(x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    return torch.cond(condition, lambda x: x * 2, lambda x: x - 1, (x,))


def turned(x: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.int64)
    loop = higher_order.while_loop
    return loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (start, x))[1]


HIGHER_ORDER = {
    "cond": (lambda x: chosen(x, x.sum() > 0), CaptureSyncError, "torch.where"),
    "while_loop": (turned, CaptureSyncError, "Python loop"),
    "map": (lambda x: higher_order.map(lambda row: row * 2, x), RefusedOpError, "directly"),
    "scan": (
        lambda x: higher_order.scan(lambda c, y: (c + y, c * y), torch.zeros(4), x)[1],
        RefusedOpError,
        "directly",
    ),
}


def runner_of(forward, width: int = 4, **arguments) -> GraphRunner:
    return GraphRunner(
        forward,
        mode=arguments.pop("mode", "FULL"),
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, ("tokens", width))},
        outputs=("tokens", width),
        platform="cpu",
        **arguments,
    )


@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_a_higher_order_operator_that_no_replay_repeats_is_refused_with_line_and_advice(name):
    forward, error, advice = HIGHER_ORDER[name]
    served = runner_of(forward)
    with pytest.raises(error, match=name) as caught:
        served.capture()
    assert caught.value.advice is not None and advice in caught.value.advice
    assert __file__ in str(caught.value.source)
    x = torch.rand(3, 4)
    assert torch.equal(served(x=x), forward(x))


@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_a_higher_order_operator_runs_in_an_eager_break(name):
    forward, _, _ = HIGHER_ORDER[name]
    part = eager_break(lambda x: forward(x) * 1)
    served = runner_of(lambda x: part(x * 1) + 1, mode="PIECEWISE")
    served.capture()
    for x in (torch.rand(4, 4), -torch.rand(4, 4)):
        assert torch.equal(served(x=x), forward(x) + 1)
        assert served.last_dispatch.reason is Reason.HIT


@pytest.mark.parametrize("condition", [True, False])
def test_a_cond_on_a_constant_is_served_by_its_branch(condition):
    served = runner_of(lambda x: chosen(x, torch.tensor(condition)))
    served.capture()
    for _ in range(2):
        x = torch.rand(3, 4)
        assert torch.equal(served(x=x), x * 2 if condition else x - 1)
        assert served.last_dispatch.reason is Reason.HIT


class Flexible(nn.Module):
    """Causal attention by `flex_attention`, with a score of its own that reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 24)
        self.register_buffer("bias", torch.rand(8))

    def forward(self, x):
        q, k, v = (part[None, None] for part in self.weight(x).chunk(3, -1))

        def score(scores, batch, head, i, j):
            return torch.where(i >= j, scores + self.bias[(i - j) % 8], -float("inf"))

        return flex_attention(q, k, v, score_mod=score)[0, 0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("check", ["capture", "always"])
def test_flex_attention_is_served_and_a_buffer_of_its_score_is_watched(check):
    model = Flexible().eval()
    served = runner_of(model, 8, options=GraphOptions(check=check))
    served.capture()
    for tokens in (1, 2, 3, 4):
        x = torch.rand(tokens, 8)
        with torch.no_grad():
            torch.testing.assert_close(served(x=x), model(x))
        assert served.last_dispatch.reason is Reason.HIT
    model.bias = torch.rand(8)
    for _ in range(40):
        served(x=x)
    assert served.last_dispatch.reason is Reason.QUARANTINED
