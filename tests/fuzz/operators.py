"""What statements of programs are made of: code with holes that are filled with values at hand.

Holes: f floating, g floating and shaped as the first f, m floating matrix, q floating of three
dimensions, i int64, b bool, c complex, t any, s state, w weight; d a dimension, n a small number,
k a float. A digit behind the letter tells two of a kind apart. `v` are the results.
"""

from __future__ import annotations

from typing import NamedTuple


class Template(NamedTuple):
    """Code that gives so many results; none for a statement."""

    code: str
    results: int = 1


def words(text: str) -> list[str]:
    """The names in a text."""
    return text.split()


UNARY = words(
    "relu abs exp sin cos tanh sigmoid neg sqrt rsqrt log1p erf floor round sign square "
    "reciprocal expm1 trunc frac logit lgamma isnan isfinite atan sinc"
)
BINARY = words(
    "add sub mul div maximum minimum pow atan2 fmod remainder hypot copysign logaddexp lt ge "
    "eq ne xlogy fmax nextafter floor_divide"
)
NN_UNARY = words(
    "silu gelu softplus elu leaky_relu hardswish mish hardtanh logsigmoid selu softsign celu relu6"
)
REDUCTIONS = words("sum mean amax amin prod std var norm logsumexp argmax argmin all any")

POINTWISE = [
    *(Template(f"{{f}}.{name}()") for name in UNARY),
    *(Template(f"torch.{name}({{f}}, {{g}})") for name in BINARY),
    *(Template(f"F.{name}({{f}})") for name in NN_UNARY),
    Template("{f} * {k} + {g}"),
    Template("{f} / ({g}.abs() + 1)"),
    Template("{k} - {f}"),
    Template("{i} + {n}"),
    Template("{i} * {i1}"),
    Template("{i} // 3"),
    Template("{i} & 5"),
    Template("{i} << 1"),
    Template("({f} > {k}) & ({g} < 1)"),
    Template("~{b}"),
    Template("{c} * {c1}"),
    Template("{c}.conj()"),
    Template("{c}.abs()"),
    Template("{c}.real"),
    Template("{c}.imag * 2"),
    Template("torch.polar({f}.float(), {g}.float())"),
    Template("torch.complex({f}.float(), {g}.float())"),
    Template("torch.addcmul({f}, {g}, {g1}, value={k})"),
    Template("torch.lerp({f}, {g}, 0.25)"),
    Template("{f}.clamp(-1, 1)"),
    Template("{f}.clamp(min={g})"),
    Template("torch.where({b}, {t}, {t1})"),
    Template("torch.where({f} > 0, {f}, {g})"),
    Template("{f}.masked_fill({f} < 0, {k})"),
    Template("{f}.masked_fill({b}, 1)"),
    Template("{f}.nan_to_num(0.5)"),
    Template("torch.frexp({f})", 2),
    Template("{t}.to({dtype})"),
    Template("{t}.float()"),
    Template("{t}.double()"),
    Template("{f}.bfloat16()"),
    Template("{t}.bool()"),
    Template("{f}.view(torch.int32)"),
    Template("{t}.contiguous()"),
    Template("{t}.clone()"),
    Template("{t}.detach()"),
    Template("torch.zeros_like({t})"),
    Template("torch.full_like({f}, {k})"),
    Template("torch.ones({f}.shape[0], 8, dtype={f}.dtype, device={f}.device)"),
    Template("torch.arange({t}.shape[0], device={t}.device)"),
    Template("{f} + torch.tensor([{k}], dtype={f}.dtype, device={f}.device)"),
    Template("{f}.new_zeros({f}.shape[0], 4)"),
    Template("torch._foreach_add([{f}, {g}], [{g}, {f}])", 2),
    Template("torch.vmap(lambda row: row * 2 + 1)({f})"),
    Template("torch.bucketize({f}, torch.linspace(-1, 1, 5, device={f}.device))"),
]
ROWS = [
    *(Template(f"{{f}}.{name}(-1)") for name in REDUCTIONS),
    *(Template(f"{{f}}.{name}({{d}}, keepdim=True)") for name in REDUCTIONS[:7]),
    Template("{f}.cumsum(-1)"),
    Template("{f}.cumprod({d})"),
    Template("{f}.logcumsumexp(-1)"),
    Template("{f}.cummax(-1)", 2),
    Template("{f}.max(-1)", 2),
    Template("{f}.median(-1)", 2),
    Template("{f}.sort(-1)", 2),
    Template("{f}.sort(-1, descending=True, stable=True)", 2),
    Template("{f}.topk(2, -1)", 2),
    Template("{f}.kthvalue(1, -1)", 2),
    Template("{f}.argsort(-1)"),
    Template("torch.softmax({f}, -1)"),
    Template("F.log_softmax({f}, {d})"),
    Template("F.layer_norm({f}, {f}.shape[-1:])"),
    Template("F.rms_norm({f}, {f}.shape[-1:])"),
    Template("F.group_norm({m}, 2)"),
    Template("F.normalize({f}, dim=-1)"),
    Template("F.instance_norm({q})"),
    Template("{f}.diff(dim=-1)"),
    Template("torch.quantile({f}, 0.5, dim=-1)"),
    Template("torch.var_mean({f}, -1)", 2),
    Template("torch.aminmax({f}, dim=-1)", 2),
    Template("torch.cdist({m}, {m})"),
    Template("F.one_hot({i}.remainder(5), 5)"),
    Template("F.pad({f}, (1, 1))"),
    Template("F.pad({q}, (1, 1), mode='replicate')"),
]
MATRIX = [
    Template("{m} @ {w}"),
    Template("{m}.to(w0.dtype) @ w0"),
    Template("F.linear({f}, w0, b0)"),
    Template("F.linear({f}.float(), w0)"),
    Template("torch.addmm(b0, {m}, w0, beta={k})"),
    Template("torch.einsum('ti,ij->tj', {m}, {w})"),
    Template("torch.einsum('ti,tj->tij', {m}, {m1})"),
    Template("torch.bmm({q}, {q}.transpose(1, 2))"),
    Template("torch.matmul({q}, {q1}.mT)"),
    Template("{q} @ {m}.unsqueeze(-1)[:, :1]"),
    Template("torch.outer({f}.flatten()[:3], b0)"),
    Template("F.conv1d({q}, k0, padding=1)"),
    Template("F.conv1d({m}.unsqueeze(1), k1)"),
    Template("F.conv1d({m}.float().t().unsqueeze(0), k2, padding=1).squeeze(0).t()"),
    Template("F.max_pool1d({q}, 2)"),
    Template("F.avg_pool1d({m}.unsqueeze(1), 2)"),
    Template("F.interpolate({q}, scale_factor=2)"),
    Template("F.scaled_dot_product_attention({q}, {q}, {q})"),
    Template("F.glu({f}, -1)"),
    Template("torch.linalg.vector_norm({f}, dim=-1)"),
    Template("torch.fft.rfft({f}.float())"),
    Template("torch.linalg.qr({q}.float())", 2),
    Template("torch.kron({m}, b0[:2])"),
    Template("F.bilinear({m}.float(), {m}.float(), w3)"),
    Template("{m}.float()[:, :3] @ torch.linalg.pinv(w0[:3, :5]).T"),
    Template("torch.ops.graphrt_fuzz.weigh({m}, {w})"),
    Template("torch.ops.graphrt_fuzz.parts({f})", 2),
]
INDEXING = [
    Template("F.embedding({i}.remainder(16), table)"),
    Template("table[{i}.remainder(16)]"),
    Template("table.index_select(0, {i}.flatten().remainder(16))"),
    Template("{f}.gather(-1, {i}.remainder({f}.shape[-1]))"),
    Template("{m}.gather(1, {i}.unsqueeze(-1).remainder({m}.shape[1]))"),
    Template("torch.take_along_dim({f}, {f}.argsort(-1), -1)"),
    Template("{f}.scatter(-1, {f}.argsort(-1), {g})"),
    Template("{m}.scatter_add(1, {m}.argsort(1), {m})"),
    Template("{f}.scatter_reduce(-1, {f}.argsort(-1), {g}, 'amax')"),
    Template("{m}.index_fill(1, torch.tensor([0, 2], device={m}.device), {k})"),
    Template("{m}.index_add(1, torch.tensor([0], device={m}.device), {m}[:, :1])"),
    Template("{m}[torch.arange({m}.shape[0], device={m}.device), 0]"),
    Template("{m}[:, [0, -1]]"),
    Template("{f}[..., torch.tensor([True, False, True, True, False, False, True, True])]"),
    Template("cache[slots]"),
    Template("cache.index_select(0, slots).to({f}.dtype)"),
    Template("torch.take(b0, {i}.remainder(8))"),
    Template("torch.searchsorted(b0.sort().values, {f}.float())"),
    Template("torch.tril({q})"),
    Template("F.embedding_bag({i}.reshape({i}.shape[0], -1).remainder(16), table)"),
]
VIEWS = [
    Template("{t}[:, 1:]"),
    Template("{t}[..., ::2]"),
    Template("{t}[:, :4]"),
    Template("{t}[..., 0]"),
    Template("{t}.transpose(0, -1)"),
    Template("{q}.transpose(1, 2)"),
    Template("{m}.t().contiguous().t()"),
    Template("{t}.unsqueeze({n})"),
    Template("{t}.unsqueeze(-1).expand(*{t}.shape, 3)"),
    Template("{t}.unsqueeze(1).expand({t}.shape[0], 2, *{t}.shape[1:])"),
    Template("{t}.unflatten(-1, (2, -1))"),
    Template("{t}.view({t}.shape[0], -1)"),
    Template("{t}.reshape(-1, 2, 4)"),
    Template("{t}.flatten(1)"),
    Template("{t}.squeeze(-1)"),
    Template("{t}.permute(0, 2, 1)"),
    Template("{t}.movedim(-1, 1)"),
    Template("{t}.unbind(-1)[0]"),
    Template("{t}[:, :2].unbind(1)", 2),
    Template("{t}.chunk(2, -1)", 2),
    Template("{t}.split([2, {t}.shape[-1] - 2], -1)", 2),
    Template("{t}.tensor_split(2, -1)", 2),
    Template("{t}.narrow(1, 1, 2)"),
    Template("{t}.diagonal(0, -2, -1)"),
    Template("torch.view_as_complex({f}.float().unflatten(-1, (-1, 2)).contiguous())"),
    Template("torch.view_as_complex({f}.unflatten(-1, (-1, 2)))"),
    Template("torch.view_as_real({c})"),
    Template("{f}.as_strided(({f}.shape[0], 2), ({f}.stride(0), 1))"),
    Template("{t}.as_strided({t}.shape, {t}.stride())"),
    Template("{t}.unfold(-1, 2, 2)"),
    Template("{t}.flip(-1)"),
    Template("{t}.roll(1, -1)"),
    Template("{t}.repeat(1, 2)"),
    Template("{t}.repeat_interleave(2, -1)"),
    Template("{t}.view_as({t})"),
    Template("{f}.expand_as({g})"),
    Template("{t}.select(-1, 1)"),
    Template("torch.cat([{f}, {g}], -1)"),
    Template("torch.stack([{f}, {g}], 1)"),
    Template("torch.hstack([{m}, {m1}])"),
    Template("torch.broadcast_tensors({f}, {f}[..., :1])", 2),
    Template("torch.atleast_2d({t})"),
    Template("{t}.view(torch.int16)"),
    Template("{t}.tile(2, 1)[: {t}.shape[0]]"),
]
