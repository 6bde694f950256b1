"""Replays of what was captured on padding compute the bits of eager, whatever comes later."""

from __future__ import annotations

import os
import sys
import types
import unittest
from itertools import islice

import pytest
import torch
from cpu_capturing import capture, same
from torch import nn
from torch.nn import functional as F

from graphrt.core.base.errors import GraphRTError, RefusedOpError
from graphrt.cpu import Arena

pytestmark = pytest.mark.filterwarnings("ignore")

torch.manual_seed(0)
LSTM, GRU = nn.LSTM(4, 5, 2, batch_first=True), nn.GRU(4, 5, 2, batch_first=True)
PROJECTED, RNN = nn.LSTM(4, 5, proj_size=3, bidirectional=True), nn.RNN(4, 5)
LINEAR = nn.Linear(4, 5)
ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True).eval()


def attention(query, key, value):
    """As the module calls it, which asks first whether the three are one."""
    layer = ATTENTION
    weights = (layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias)
    return torch._native_multi_head_attention(query, key, value, 4, 2, *weights)[0]


MODELS = {
    "lstm": lambda x: LSTM(x)[0],
    "lstm_state": lambda x: LSTM(x)[1][1],
    "projected_lstm": lambda x: PROJECTED(x)[0],
    "gru": lambda x: GRU(x)[0],
    "rnn": lambda x: RNN(x)[0],
    "linear_of_a_transpose": lambda x: LINEAR(x.transpose(0, 1)),
    # The kernel asks whether they are one tensor, and projects all at once if so.
    "attention": lambda x: ATTENTION(x, x, x)[0],
    "attention_of_one_result": lambda x: (lambda h: attention(h, h, h))(x + 1),
    "attention_of_equal_views": lambda x: attention(x, x.view_as(x), x.view_as(x)),
    "attention_of_equal_views_of_a_result": lambda x: (
        lambda h: attention(h, h.view_as(h), h.view_as(h))
    )(x + 1),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
    "bce_sum": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid(), reduction="sum"),
    "qr": lambda x: torch.linalg.qr(x)[1],
    "strided_copy": lambda x: torch.as_strided_copy((x + 1)[1:], (2, 2), (1, 1), 0),
    **{
        mode: lambda x, mode=mode: F.interpolate(x[None], scale_factor=(1.7, 2.3), mode=mode)
        for mode in ("nearest", "bilinear", "bicubic", "nearest-exact")
    },
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", MODELS)
def test_replay_after_a_capture_on_zeros_equals_eager(name, inference):
    forward, x = MODELS[name], torch.zeros(2, 3, 4)
    graph, out = capture(forward, x, inference=inference)
    for _ in range(2):
        x.copy_(torch.randn(2, 3, 4))
        graph.replay()
        with torch.inference_mode(inference), torch.no_grad():
            assert same(out, forward(x))


@pytest.mark.parametrize(
    "forward",
    [
        torch.linalg.svdvals,
        torch.linalg.eigvalsh,
        torch.linalg.eigvals,
        torch.linalg.cond,
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
    ],
)
def test_eigenvalues_and_singular_values_without_vectors_are_refused_with_their_line(forward):
    with pytest.raises(RefusedOpError, match="another routine") as caught:
        capture(forward, torch.eye(3))
    assert caught.value.source


def test_an_alias_reaches_no_further_than_its_block():
    arena = Arena()
    first = arena.empty_strided((2, 3), (3, 1), torch.float32)
    second = arena.empty_strided((4,), (1,), torch.float32)
    alias = arena.alias(second[1:])
    assert alias.data_ptr() == second[1:].data_ptr()
    assert alias.storage_offset() == 1
    assert alias.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 16
    with pytest.raises(RuntimeError):
        arena.alias(first).resize_(8)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_replay_in_a_forked_process_leaves_memory_of_the_parent():
    x = torch.ones(4)
    graph, out = capture(lambda: x * 2 + 1)
    child = os.fork()
    if child == 0:
        x.fill_(10)
        graph.replay()
        os._exit(0 if out.tolist() == [21.0] * 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert out.tolist() == [3.0] * 4
    graph.replay()
    assert out.tolist() == [3.0] * 4


# torch's own samples of every operator -----------------------------------------------------------

_SAMPLES = 2
# What memory holds that nobody wrote is not defined; the last are for GPUs.
_LEFT_OUT = ("empty", "new_empty", "resize_", "jiterator")


def op_infos():
    if "expecttest" not in sys.modules:
        # torch's test helpers want it for one base class, which the samples do not need.
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_methods_invocations as known

    # It would set the seed inside of the forward.
    known.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return known.op_db


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in flat(v)] if isinstance(value, list | tuple) else []


def packed(tensor):
    return tensor.clone(memory_format=torch.contiguous_format)


def samples(info, seed):
    torch.manual_seed(seed)
    known = (torch.float32, torch.int64, torch.bool, torch.complex64)
    dtype = next((d for d in known if info.supports_dtype(d, "cpu")), None)
    if dtype is None:
        return []
    all_samples = list(islice(info.sample_inputs("cpu", dtype, requires_grad=False), 6))
    return all_samples[:: max(1, len(all_samples) // _SAMPLES)]


def differs(info, one, other, inference, zeros):
    """Whether a replay with the values of `other`, captured on `one` or on zeros, is not eager."""
    tensors, values = (flat([s.input, s.args, s.kwargs]) for s in (one, other))
    kept = [t.clone() for t in tensors]
    if [t.shape for t in tensors] != [t.shape for t in values]:
        return False
    if any(t.layout is not torch.strided for t in tensors):
        return False

    def forward():
        return info(one.input, *one.args, **one.kwargs)

    def give(new):
        with torch.inference_mode(inference), torch.no_grad():
            for t, v in zip(tensors, new, strict=True):
                t.copy_(v)
        torch.manual_seed(7)

    def eager(new):
        give(new)
        with torch.inference_mode(inference), torch.no_grad():
            return [t.clone() for t in flat(forward())]

    if zeros:
        kept = [torch.zeros_like(t) if t.is_floating_point() else t for t in kept]
    try:
        eager(kept)
        expected = eager(values)
    except (RuntimeError, IndexError, ValueError):
        return False  # zeros, an expanded input, or what a sample before wrote, that it refuses
    give(kept)
    try:
        graph, out = capture(forward, inference=inference)
    except GraphRTError:
        return False  # by name
    give(values)
    graph.replay()
    return not all(
        a.layout is not torch.strided or same(packed(a), packed(b))
        for a, b in zip(flat(out), expected, strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("inference", "zeros"),
    [(False, True), (True, False)],
    ids=["no_grad_on_zeros", "inference_mode_on_samples"],
)
def test_every_operator_of_torch_replays_as_eager_or_is_refused(inference, zeros):
    wrong = []
    for info in op_infos():
        if info.name.startswith(_LEFT_OUT):
            continue
        for one, other in zip(samples(info, 1), samples(info, 2), strict=False):
            if differs(info, one, other, inference, zeros):
                wrong.append(f"{info.name} {info.variant_test_name}")
    assert not wrong
