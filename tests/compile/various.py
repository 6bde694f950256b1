"""Forwards as hosts write them, each with what is odd about it, for `test_various.py`.

A case is a function that builds a forward. `x` has n rows of four numbers; `more` gives the other
arguments of n rows, and `dims` says which of them have the batch. One that is `refused` cannot be
one graph: compiling it is an error of graphrt's.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphrt.compile import opaque

Build = Callable[[], Callable[..., Any]]
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    build: Build
    more: Callable[[int], Mapping[str, Any]]
    dims: Mapping[str, Any]
    refused: bool
    inductor: bool


def case(
    more: Callable[[int], Mapping[str, Any]] = lambda n: {},
    dims: Mapping[str, Any] | None = None,
    *,
    refused: bool = False,
    inductor: bool = False,
) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        name = build.__name__.replace("_", " ")
        CASES[name] = Case(build, more, {"x": 0} if dims is None else dims, refused, inductor)
        return build

    return add


def rows(n: int, width: int = 4) -> Tensor:
    return torch.randn(n, width)


WITH_Y = {"more": lambda n: {"y": rows(n)}, "dims": {"x": 0, "y": 0}}


def module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with these parts: tensors are buffers."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Made.forward = forward  # type: ignore[method-assign]
    return Made()


# What decides ------------------------------------------------------------------------------------


@case()
def a_flag_of_the_module() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x.sin() if self.flag else x.cos()

    return module(forward, flag=False)


@case()
def a_text_of_a_table_of_functions() -> Any:
    table = {"relu": F.relu, "silu": F.silu}
    return module(lambda self, x: table[self.act](x), act="silu")


@case(inductor=True)
def a_loop_over_layers() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = x + layer(x) * (at + 1)
        return x

    return module(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))


@case()
def a_while_that_counts() -> Any:
    def forward(x: Tensor) -> Tensor:
        left = 3
        while left:
            x, left = x * 1.5 + left, left - 1
        return x

    return forward


@case()
def a_loop_with_break_continue_and_else() -> Any:
    def forward(x: Tensor) -> Tensor:
        for at in range(6):
            if at == 1:
                continue
            if at == 4:
                break
            x = x + at
        else:
            x = x * 100
        return x

    return forward


@case(lambda n: {"limit": None})
def an_early_return() -> Any:
    def forward(x: Tensor, limit: float | None) -> Tensor:
        if limit is None:
            return x.exp()
        return x.clamp(max=limit)

    return forward


@case()
def an_error_that_is_caught() -> Any:
    def forward(x: Tensor) -> Tensor:
        try:
            return {"a": x}["b"]
        except KeyError:
            return x - 1

    return forward


@case()
def a_match_of_a_tuple() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        match self.how:
            case ("scale", by):
                return x * by
            case _:
                return x

    return module(forward, how=("scale", 3.0))


@case()
def a_generator_and_a_comprehension() -> Any:
    def parts(x: Tensor) -> Any:
        for at in range(x.shape[1]):
            yield x[:, at] * at

    return lambda x: torch.stack([part + 1 for part in parts(x)], dim=1)


@case()
def a_function_that_calls_itself() -> Any:
    def power(x: Tensor, n: int) -> Tensor:
        return x if n == 1 else x * power(x, n - 1)

    return lambda x: power(x, 4)


@case()
def an_assert_of_a_shape() -> Any:
    def forward(x: Tensor) -> Tensor:
        assert x.dim() == 2 and x.shape[-1] == 4, "four numbers a row"
        return x.mean(-1)

    return forward


@case()
def a_condition_on_every_number() -> Any:
    return lambda x: torch.where(x > 0, x.sqrt(), -x).nan_to_num()


@case(refused=True)
def a_condition_on_a_sum() -> Any:
    return lambda x: x if x.sum() > 0 else -x


@case()
def rows_that_are_not_zero() -> Any:
    return lambda x: x[x.sum(-1) > 0] + 1


@case()
def a_number_of_a_tensor() -> Any:
    return lambda x: x * float(x[0, 0])


# Arguments ---------------------------------------------------------------------------------------


@case(**WITH_Y, inductor=True)
def an_argument_by_keyword_only() -> Any:
    def forward(x: Tensor, *, y: Tensor) -> Tensor:
        return x * 2 + y

    return forward


@case()
def a_tensor_that_may_be_missing() -> Any:
    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask

    return forward


@case(lambda n: {"mask": torch.rand(n, 1) > 0.5}, {"x": 0, "mask": 0})
def a_tensor_that_may_be_missing_and_is_not() -> Any:
    def forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask

    return forward


@case(lambda n: {"scale": 0.5, "shift": 3, "negate": True, "how": "a"})
def plain_values() -> Any:
    def forward(x: Tensor, scale: float, shift: int, negate: bool, how: str) -> Tensor:
        x = x * scale + shift
        return (-x if negate else x) + len(how)

    return forward


@case(lambda n: {"y": rows(n)}, {"x": 0, "others": 0})
def keywords_that_are_gathered() -> Any:
    def forward(x: Tensor, **others: Tensor) -> Tensor:
        return x + sum(others.values())

    return forward


@case(lambda n: {"pair": (rows(n), rows(n))}, {"x": 0, "pair": 0})
def a_tuple_of_tensors() -> Any:
    def forward(x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = pair
        return x * first - second

    return forward


@case(lambda n: {"of": {"a": rows(n), "b": {"c": rows(n)}}}, {"x": 0, "of": 0})
def a_dict_of_dicts() -> Any:
    def forward(x: Tensor, of: dict[str, Any]) -> Tensor:
        return x + of["a"] * of["b"]["c"]

    return forward


@case(lambda n: {"y": torch.randn(3, 4)})
def an_argument_without_the_batch() -> Any:
    return lambda x, y: x @ y.t()


@case(lambda n: {"y": rows(3 * n)}, {"x": 0, "y": {0: "others"}})
def two_sizes() -> Any:
    return lambda x, y: (x @ y.t()).softmax(-1) @ y


@case(lambda n: {"starts": torch.arange(n + 1)}, {"x": 0, "starts": {0: "tokens+1"}})
def a_size_and_one_more() -> Any:
    return lambda x, starts: x * (starts[1:] - starts[:-1]).unsqueeze(1)


@case(lambda n: {"y": rows(n).t().contiguous()}, {"x": 0, "y": 1})
def a_batch_that_is_the_second_dimension() -> Any:
    return lambda x, y: x + y.t()


# Results -----------------------------------------------------------------------------------------


@case()
def a_dict_a_list_and_none() -> Any:
    return lambda x: {"a": x + 1, "b": [x * 2, None], "c": (x.sum(-1),)}


Pair = namedtuple("Pair", "first second")


@case()
def a_named_tuple() -> Any:
    return lambda x: Pair(x + 1, x * 2)


@case()
def a_plain_value_beside_a_tensor() -> Any:
    return lambda x: (x + 1, 7, "text")


@case()
def a_size_beside_a_tensor() -> Any:
    return lambda x: (x + 1, x.shape[0])


@case()
def its_own_argument() -> Any:
    return lambda x: (x, x + 1)


@case()
def the_same_result_twice() -> Any:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    return forward


@case(inductor=True)
def a_view_of_its_argument() -> Any:
    return lambda x: (x[:, 1:3], x.sum())


# Views -------------------------------------------------------------------------------------------


@case(inductor=True)
def heads_and_back() -> Any:
    return lambda x: x.view(-1, 2, 2).transpose(1, 2).reshape(x.shape[0], -1)


@case()
def chunks_splits_and_unbinds() -> Any:
    def forward(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        c, d = x.split([1, 3], dim=-1)
        e, *_ = x.unbind(-1)
        return a + b + c + d[:, :2] + e[:, None]

    return forward


@case()
def a_row_that_is_expanded() -> Any:
    return lambda x: x[:1].expand(x.shape[0], -1) + x


@case()
def windows() -> Any:
    return lambda x: x.unfold(1, 2, 1).sum(-1)


@case()
def the_last_row_first() -> Any:
    return lambda x: torch.cat([x[-1:], x[:-1]]).flip(1)


@case()
def a_product_of_sizes() -> Any:
    return lambda x: x.reshape(x.shape[0] * x.shape[1]).view(x.size()) / x.numel()


@case()
def strides_that_are_asked_for() -> Any:
    return lambda x: x.as_strided((x.shape[0], 2), (4, 1)) * x.stride(0)


# Dtypes ------------------------------------------------------------------------------------------


@case(lambda n: {"ids": torch.randint(0, 9, (n,))}, {"x": 0, "ids": 0}, inductor=True)
def an_embedding() -> Any:
    def forward(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.table(ids)

    return module(forward, table=nn.Embedding(9, 4))


@case()
def half_and_single() -> Any:
    return lambda x: x.half() * 2 + x.bfloat16() + x.double()


@case()
def integers_that_are_divided() -> Any:
    return lambda x: ((x * 10).int() // 3, (x * 10).long() % 4, (x * 10).int() / 2)


@case()
def complex_numbers() -> Any:
    return lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2, 2)) * 1j).flatten(1)


@case()
def a_mask_of_bits() -> Any:
    return lambda x: (x > 0) & (x < 1) | (x.abs() > 2)


@case(lambda n: {"y": torch.randint(-5, 5, (n, 4), dtype=torch.int8)}, {"x": 0, "y": 0})
def weights_of_a_byte() -> Any:
    return lambda x, y: x * (y.float() * 0.1) + y


@case()
def numbers_that_are_not_finite() -> Any:
    return lambda x: x.masked_fill(x > 0, -math.inf).softmax(-1)


# What is written ---------------------------------------------------------------------------------


@case()
def an_argument_that_is_written() -> Any:
    def forward(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    return forward


@case(**WITH_Y)
def a_part_of_an_argument_that_is_written() -> Any:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        y[:, 1:3] = x[:, :2]
        return y.sum(-1)

    return forward


@case()
def a_view_that_is_written() -> Any:
    def forward(x: Tensor) -> Tensor:
        y = x.clone()
        y.view(-1)[::2].mul_(3)
        return y

    return forward


@case(refused=True)
def a_counter_that_is_assigned() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count

    return module(forward, count=torch.zeros(1))


@case()
def a_counter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count

    return module(forward, count=torch.zeros(1))


@case(lambda n: {"slots": torch.randperm(16)[:n]}, {"x": 0, "slots": 0}, inductor=True)
def a_cache() -> Any:
    def forward(self: Any, x: Tensor, slots: Tensor) -> Tensor:
        self.cache[slots] = x
        return x @ self.cache.t()

    return module(forward, cache=torch.zeros(16, 4))


@case(lambda n: {"slots": torch.randperm(16)[:n]}, {"x": 0, "slots": 0})
def a_cache_by_index_copy() -> Any:
    def forward(self: Any, x: Tensor, slots: Tensor) -> Tensor:
        self.cache.index_copy_(0, slots, x)
        return self.cache.index_select(0, slots) + self.cache.sum()

    return module(forward, cache=torch.zeros(16, 4))


@case()
def a_result_that_is_given() -> Any:
    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.add(x, 1, out=out)
        return out.relu_()

    return forward


@case(lambda n: {"at": torch.randint(0, 4, (n, 1))}, {"x": 0, "at": 0})
def what_is_scattered() -> Any:
    return lambda x, at: x.scatter_add(1, at, torch.ones_like(x)).gather(1, at)


# Modules -----------------------------------------------------------------------------------------


@case(dims={"input": 0})
def a_norm_that_has_run() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()


@case(dims={"input": 0})
def a_weight_of_two_layers() -> Any:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.LayerNorm(4), second)


@case(inductor=True)
def attention() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, 2, 4).permute(1, 2, 0, 3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)

    return module(forward, qkv=nn.Linear(4, 24))


@case()
def parameters_in_a_list_and_a_dict() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for each in self.many:
            x = x * each
        return x + self.named["a"]

    many = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(2))
    return module(forward, many=many, named=nn.ParameterDict({"a": torch.randn(4)}))


@case(dims={"input": 0})
def a_weight_that_is_computed() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@case(dims={"input": 0})
def hooks() -> Any:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, arguments, output: output * 2)
    layer.register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))
    return nn.Sequential(layer, nn.ReLU())


@case()
def a_class_of_a_class() -> Any:
    class Base(nn.Module):
        factor = 2.0

        @staticmethod
        def shifted(x: Tensor) -> Tensor:
            return x + 1

        @property
        def twice(self) -> float:
            return self.factor * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.shifted(x) * self.twice

    class Derived(Base):
        factor = 3.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - 1

    return Derived()


@case()
def a_state_of_its_own() -> Any:
    cell = nn.GRUCell(4, 4)
    return module(lambda self, x: self.cell(x, x.cos()), cell=cell)


@case()
def layers_that_are_called_by_name() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return getattr(self, f"layer_{self.chosen}")(x)

    return module(forward, layer_0=nn.Linear(4, 4), layer_1=nn.Linear(4, 4), chosen=1)


# Around and beside -------------------------------------------------------------------------------


@case()
def autocast_inside() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x)
        return y.float() + x

    return module(forward, layer=nn.Linear(4, 4))


@case()
def gradients_off_inside() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.layer(x)
        return y * 2

    return module(forward, layer=nn.Linear(4, 4))


@case()
def a_context_that_does_nothing() -> Any:
    def forward(x: Tensor) -> Tensor:
        with contextlib.nullcontext():
            return x + 1

    return forward


@case()
def a_gradient_of_ones_own() -> Any:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    return lambda x: Doubled.apply(x) + 1


@opaque("graphrt_various::into", mutates=["out"])
def into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.flip(0) * float(x.abs().max()))


@case(inductor=True)
def an_opaque_function_between_layers() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out = torch.empty_like(hidden)
        into(hidden, out)
        return self.second(out) + hidden

    return module(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


@opaque("graphrt_various::counted", mutates=["total"], fake=lambda x, total: torch.empty_like(x))
def counted(x: Tensor, total: Tensor) -> Tensor:
    total.add_(len(x))
    return x.cumsum(0)


@case()
def an_opaque_function_that_writes_a_buffer() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return counted(x * 2, self.total) + self.total

    return module(forward, total=torch.zeros(1))


@torch.library.custom_op("graphrt_various::summed", mutates_args=())
def summed(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


@summed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 1)


@case()
def an_operator_of_ones_own() -> Any:
    return lambda x: x / summed(x.exp())


@case(refused=True)
def a_call_for_every_row() -> Any:
    return lambda x: torch.func.vmap(lambda row: row @ row)(x)


@case()
def what_is_partial_and_bound() -> Any:
    @dataclass
    class Scale:
        by: float
        names: list[str] = field(default_factory=list)

        def apply(self, x: Tensor, shift: float) -> Tensor:
            return x * self.by + shift

    return functools.partial(Scale(3.0).apply, shift=2.0)


class Kind(enum.Enum):
    PLUS = 1
    MINUS = 2


@case(lambda n: {"kind": Kind.MINUS})
def an_enumeration() -> Any:
    return lambda x, kind: x + 1 if kind is Kind.PLUS else x - 1


@case()
def the_largest_in_order() -> Any:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        values, at = x.topk(2, dim=-1)
        return values.cumsum(-1), at.sort(-1).values

    return forward


@case()
def sizes_in_arithmetic() -> Any:
    return lambda x: x / math.sqrt(x.shape[-1]) + x.shape[0] * 2 + torch.arange(x.shape[0])[:, None]


@case()
def a_size_that_is_padded() -> Any:
    return lambda x: F.pad(x, (0, 0, 0, 3)).sum(0) + (x.shape[0] + 7) // 8


@case()
def new_tensors_of_its_sizes() -> Any:
    def forward(x: Tensor) -> Tensor:
        n = x.shape[0]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        return (x @ x.t()).masked_fill(~mask, 0) + torch.eye(n) + x.new_full((n, 1), 2)

    return forward


@case()
def an_object_that_is_called() -> Any:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.by

    return Scale(0.5)


@case(dims={"input": 0})
def a_method_of_a_layer() -> Any:
    return nn.Linear(4, 4).forward
