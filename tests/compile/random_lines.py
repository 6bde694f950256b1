"""Source of random forwards: splitting operators between views, in-place updates and indexing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from graphrt.compile import opaque

Shape = tuple[int | str, ...]
"""Sizes of a tensor; "n" is the batch's number of tokens, "m" that of its requests."""


@opaque("graphrt_random::fill", mutates=["out"])
def fill(a: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.sigmoid(a))


@opaque("graphrt_random::bump", mutates=["a"])
def bump(a: torch.Tensor, by: float) -> None:
    a.mul_(0.5).add_(by)


@opaque("graphrt_random::fill_two", mutates=["first", "second"])
def fill_two(a: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    first.copy_(a + 1)
    second.add_(a * 0.25)


@opaque("graphrt_random::fresh", mutates=[], fake=torch.empty_like)
def fresh(a: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    return out.copy_(a * 0.5 + 1)


@opaque(
    "graphrt_random::both",
    mutates=["state"],
    fake=lambda a, state: (torch.empty_like(a), a.new_empty(a.shape[0])),
)
def both(a: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state.add_(0.125)
    out = torch.empty_like(a)
    return out.copy_(a - 1), a.reshape(a.shape[0], -1).sum(1)


@opaque("graphrt_random::quiet", mutates=["out"], splits=False)
def quiet(a: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(a.abs())


@opaque("graphrt_random::count", mutates=["out"])
def count(rows: int, out: torch.Tensor) -> None:
    out.add_(rows * 0.0625)


@dataclass(frozen=True)
class Source:
    """A forward; each of the `statements` may be several lines that belong together."""

    statements: tuple[str, ...]
    returned: tuple[str, ...]

    def text(self) -> str:
        """The Python of it."""
        lines = [line for each in self.statements for line in each.split("\n")]
        body = "".join(f"    {line}\n" for line in lines)
        returned = ", ".join(self.returned)
        comma = "," if len(self.returned) == 1 else ""
        return f"def forward(self, x, y, z):\n{body}    return ({returned}{comma})\n"

    def without(self, index: int) -> Source:
        """Less one statement."""
        return replace(self, statements=self.statements[:index] + self.statements[index + 1 :])


@dataclass
class Maker:
    """Makes one forward from a random generator."""

    random: random.Random
    shapes: dict[str, Shape] = field(
        default_factory=lambda: {
            "x": ("n", 4),
            "y": ("n", 4),
            "z": ("m", 4),
            "self.weight": (4,),
            "self.cache": (8, 4),
        }
    )
    statements: list[str] = field(default_factory=list)
    _names: int = 0

    def source(self, length: int) -> Source:
        """A forward of about `length` statements."""
        kinds: list[tuple[Callable[[], None], int]] = [
            *((self.computed, 3), (self.view, 6), (self.in_place, 6), (self.splitting, 9)),
            *((self.indexed, 4), (self.allocated, 1), (self.constant, 1), (self.several, 2)),
        ]
        makers, weights = zip(*kinds, strict=True)
        while len(self.statements) < length:
            self.random.choices(makers, weights)[0]()
        made = [name for name in self.shapes if "." not in name]
        kind = self.pick("few", "all", "sums")
        returned = made if kind == "all" else self.random.choices(made, k=self.pick(1, 2, 3))
        if kind == "sums":
            # Everything is read once more at the end, and most of it not returned.
            self.statements.append("sums = [" + ", ".join(f"{n}.sum()" for n in made) + "]")
            self.statements.append("total = torch.stack(sums)")
            returned.append("total")
        if self.chance(0.3):
            returned.append(returned[0])
        if self.chance(0.15):
            returned.append(self.pick("x", "y", "self.cache"))
        return Source(tuple(self.statements), tuple(returned))

    def pick(self, *options):
        return self.random.choice(options)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def rows(self) -> str:
        """The number of tokens, asked of one argument or the other."""
        return self.pick("x.shape[0]", "y.shape[0]", "y.size(0)", "len(x)")

    def some(self, shape: Shape | None = None, *, but: str = "") -> str | None:
        """A tensor, of a shape; those made last are likelier."""
        names = [n for n, s in self.shapes.items() if (shape is None or s == shape) and n != but]
        if not names:
            return None
        return names[-1 - int(len(names) * self.random.random() ** 2)]

    def batch(self) -> str:
        """A tensor with the batch's rows."""
        names = [n for n, s in self.shapes.items() if s and s[0] == "n"]
        return names[-1 - int(len(names) * self.random.random() ** 2)]

    def new(self, shape: Shape, text: str, *, before: str = "", after: str = "") -> str:
        """A statement that makes a tensor; "{}" in the lines around it is its name."""
        self._names += 1
        name = f"t{self._names}"
        lines = [before, f"{name} = {text}", after]
        self.statements.append("\n".join(line.format(name) for line in lines if line))
        self.shapes[name] = shape
        return name

    def computed(self) -> None:
        a = self.some()
        b = self.some(self.shapes[a], but=a) or a
        text = self.pick(
            f"{a} * 0.5 + 1", f"torch.relu({a})", f"{a} + {b}", f"torch.where({a} > 0, {a}, {b})"
        )
        self.new(self.shapes[a], text)

    def view(self) -> None:
        a = self.batch() if self.chance(0.7) else self.some()
        shape = self.shapes[a]
        options: list[tuple[Shape, str]] = [
            (shape, f"{a}.detach()"),
            (shape, f"{a}.view_as({a})"),
            (shape, f"{a}[...]"),
            (shape, f"{a}.contiguous()"),
            ((1, *shape), f"{a}.unsqueeze(0)"),
            ((1, *shape), f"{a}[None]"),
        ]
        if len(shape) == 2:
            options += [
                (shape[::-1], f"{a}.t()"),
                (shape[::-1], f"{a}.transpose(0, 1)"),
                (shape[::-1], f"{a}.T"),
                ((*shape, 1), f"{a}[..., None]"),
                ((shape[0],), f"{a}.select(1, 1)"),
            ]
        if len(shape) == 2 and shape[1] == 4:
            half = (shape[0], 2)
            options += [
                *((half, text) for text in (f"{a}[:, :2]", f"{a}[:, 1:3]", f"{a}.narrow(1, 2, 2)")),
                (half, f"{a}[:, ::2]"),
                (half, f"{a}.chunk(2, 1)[{self.pick(0, 1)}]"),
                (half, f"torch.split({a}, 2, dim=1)[1]"),
                ((shape[0],), f"{a}.unbind(1)[{self.pick(0, 3)}]"),
                ((shape[0], 2, 2), f"{a}.unflatten(1, (2, 2))"),
            ]
        if shape == ("n", 4):
            options += [
                (("n", 2, 2), f"{a}.view({self.rows()}, 2, 2)"),
                (("n*4",), f"{a}.reshape(-1)"),
                (("n*4",), f"{a}.flatten()"),
                (("n*2", 2), f"{a}.view({self.rows()} * 2, 2)"),
                ((4,), f"{a}[0]"),
                ((4,), f"{a}[-1]"),
            ]
        if shape == ("n", 2, 2):
            options += [(("n", 4), f"{a}.view({self.rows()}, 4)"), (("n", 4), f"{a}.flatten(1)")]
        if shape in (("n*4",), ("n*2", 2)):
            options.append((("n", 4), f"{a}.view(-1, 4)"))
        if shape[0] == 1 and len(shape) > 1:
            options += [(shape[1:], f"{a}.squeeze(0)"), (shape[1:], f"{a}[0]")]
        self.new(*self.pick(*options))

    def in_place(self) -> None:
        a = self.some() if self.chance(0.3) else self.batch()
        if a == "self.weight":
            a = "self.cache"
        shape = self.shapes[a]
        b = self.some(shape, but=a) or "0.5"
        options = [
            *(f"{a}.{call}" for call in ("add_(0.5)", "mul_(0.5)", "clamp_(-2, 2)", "neg_()")),
            *(f"{a}.copy_({b})", f"{a}.add_({b}, alpha=0.5)", f"torch.relu_({a})"),
            *(f"F.relu({a}, inplace=True)", f"{a}[0] = 0.25", f"{a}[...] = {b}"),
            f"torch.mul({a}, 0.5, out={a})",
            f"{a}[..., :1] += 0.5",
        ]
        if "." not in a:
            options += [f"{a} += {b}", f"{a} *= 0.5"]
        if len(shape) == 2 and shape[1] == 4:
            options += [f"{a}[:, 1] = 2.0", f"{a}[:, :2].add_(1)", f"{a}[:, 2:] = {a}[:, :2]"]
        if self.chance(0.25):
            self.new(shape, self.pick(f"{a}.add_(0.5)", f"{a}.mul_(0.5)", f"torch.relu_({a})"))
        else:
            self.statements.append(self.pick(*options))

    def splitting(self) -> None:
        a = self.batch() if self.chance(0.8) else self.some()
        shape = self.shapes[a]
        b = self.some(shape, but=a)
        kind = self.pick("empty", "fill", "bump", "two", "fresh", "both", "quiet", "count")
        if kind == "empty":
            self.new(shape, f"torch.empty_like({a})", after=f"fill({a}, {{}})")
        elif kind == "fresh":
            self.new(shape, f"fresh({a})")
        elif kind == "both":
            first, second = f"t{self._names + 1}", f"t{self._names + 2}"
            self._names += 2
            self.statements.append(f"{first}, {second} = both({a}, self.cache)")
            self.shapes |= {first: shape, second: shape[:1]}
        elif kind == "bump" and a != "self.weight":
            self.statements.append(f"bump({a}, {self.pick(0.25, -0.5)})")
        elif kind == "count" and a != "self.weight":
            self.statements.append(f"count({self.rows()}, {a})")
        elif kind == "two":
            text = f"torch.zeros_like({a})"
            name = self.new(shape, text, before="{}_ = torch.ones_like(" + a + ")")
            self.shapes[f"{name}_"] = shape
            self.statements.append(f"fill_two({a}, {name}, {name}_)")
        elif b is not None and b != "self.weight":
            self.statements.append(f"{'quiet' if kind == 'quiet' else 'fill'}({a}, {b})")

    def indexed(self) -> None:
        a = self.some(("n", 4)) or "x"
        w = self.some(("n", 4), but=a) or a
        self.new(
            *self.pick(
                (("n", 4), f"{a}[:, self.order]"),
                (("n", 4), f"{a}[:, ({w}.sum(0) > 0.3).long()]"),
                (("n", 4), f"{a}[torch.arange({self.rows()}, device=x.device).flip(0)]"),
                ((4,), f"{a}[{self.rows()} - 1] + 0"),
                ((1, 4), f"{a}[-1:].clone()"),
                ((4,), f"{a}.sum(0)"),
                (("n", 4), f"{a}[{w}.sum(1).argsort()]"),
                (("n", 4), f"torch.index_select({a}, 1, self.order)"),
                (("m", 4), f"z + {a}[0]"),
                (("n", 4), f"self.cache[({w}[:, 0] > 0.3).long()]"),
            )
        )

    def allocated(self) -> None:
        a = self.batch()
        self.new(
            *self.pick(
                (self.shapes[a], f"torch.zeros_like({a})"),
                (("n", 4), f"x.new_ones({self.rows()}, 4)"),
                (("n", 4), f"torch.full(({self.rows()}, 4), 0.5, device=x.device)"),
                (("n*2", 2), f"torch.zeros({self.rows()} * 2, 2, device=x.device)"),
                ((4,), "torch.zeros(4, device=x.device)"),
            )
        )

    def constant(self) -> None:
        self.new(
            (4,),
            self.pick(
                "torch.tensor([0.5, 1.0, 1.5, 2.0], device=x.device)",
                "self.weight * 2",
                "CONSTANT.to(x.device)",
                "CONSTANT.to(x.device) + self.weight",
            ),
        )

    def several(self) -> None:
        a = self.some(("n", 4)) or "x"
        self._names += 2
        first, second = f"t{self._names - 1}", f"t{self._names}"
        call, shape = self.pick(
            (f"{a}.chunk(2, 1)", ("n", 2)),
            (f"{a}.split([2, 2], dim=1)", ("n", 2)),
            (f"({a}, {a}.detach())", ("n", 4)),
            (f"torch.sort({a}, dim=1)[::1]", ("n", 4)),
            (f"torch.var_mean({a}, dim=1)", ("n",)),
        )
        self.statements.append(f"{first}, {second} = {call}")
        self.shapes |= {first: shape, second: shape}
        if "sort" in call:
            self.statements[-1] += f"\n{second} = {second}.to({first}.dtype)"
