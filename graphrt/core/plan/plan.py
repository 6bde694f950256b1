"""`Plan`: from what a host may run to the graphs that are captured for it.

A new argument is a type in `PlanArguments` (of sizes: `SizeArguments`), a row of `_ARGUMENTS` and a
sentence of `Plan`. All arguments are handed to `resolve_mode`, `capture_sizes` and
`descriptors_for`, which take those that they name.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from graphrt.core.base.errors import InvalidOptionError, ResourceExhaustedError
from graphrt.core.base.option_values import check_kind, count_of, items_of
from graphrt.core.base.texts import printable
from graphrt.core.batch.descriptor import checked_variant
from graphrt.core.batch.modes import AttentionSupport, GraphMode, Mode, PieceProvider, graphs_off
from graphrt.core.device.platform import Platform
from graphrt.core.device.registry import resolve_platform
from graphrt.core.plan import resolution, saved, sizes
from graphrt.core.plan.budget import (
    Budget,
    GraphCost,
    budget_lines,
    by_priority,
    fit,
    total_of,
)
from graphrt.core.plan.traffic import Traffic, by_worth, check_traffic

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


class SizeArguments(TypedDict, total=False):
    """The arguments of a plan that say how large its graphs are."""

    sizes: Sequence[int] | None
    max_size: int | None
    max_num_tokens: int | None
    max_num_reqs: int | None
    query_lens: sizes.QueryLens
    traffic: Traffic | None


class PlanArguments(SizeArguments, total=False):
    """The arguments of `Plan`, which `GraphRunner` takes too."""

    mode: Mode | None
    attention: resolution.Attention
    pieces: PieceProvider | str | None
    compiled: Sequence[Any]
    loras: Sequence[int | None]
    bounds: Sequence[tuple[int, ...]]
    variants: Sequence[Hashable]
    budget: Budget | None


def _pieces(value: Any) -> PieceProvider | str | None:
    auto = isinstance(value, str) and value.strip().lower() == resolution.AUTO
    return resolution.AUTO if auto else PieceProvider.parse(value)


def _budget(value: Budget) -> Budget:
    check_kind("budget", value, Budget)
    return value


def _cases(name: str, example: str, check: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    """The items of an argument, each of which is captured by itself, checked one by one."""
    return tuple(map(check, items_of(name, value, example, empty=f"leave {name} out")))


def _loras(active: Any) -> int | None:
    return None if active is None else count_of("a number of active LoRAs", active, least=0)


def _bounds(case: Any) -> tuple[int, ...]:
    items = items_of("bounds", case, "[(4096,)]")
    return tuple(count_of("a bound", each, least=0) for each in items)


_ARGUMENTS: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
    "mode": (None, GraphMode.parse),
    "sizes": (None, sizes.check_sizes),
    "max_size": (None, partial(sizes.positive, "max_size")),
    "max_num_tokens": (None, partial(sizes.positive, "max_num_tokens")),
    "max_num_reqs": (None, partial(sizes.positive, "max_num_reqs")),
    "query_lens": ((1,), sizes.check_query_lens),
    "attention": (AttentionSupport.ALWAYS, resolution.levels_of),
    "pieces": (resolution.AUTO, _pieces),
    "compiled": ((), resolution.all_compiled),
    "loras": ((0,), partial(_cases, "loras", "(0, 4)", _loras)),
    "bounds": (((),), partial(_cases, "bounds", "[(4096,)]", _bounds)),
    "variants": ((None,), partial(_cases, "variants", '["draft"]', checked_variant)),
    "budget": (None, _budget),
    "traffic": (None, check_traffic),
}
"""name of an argument -> its default, and a function that returns a checked copy in its own type.
Where the default is None, None stays None."""


def checked_arguments(given: Mapping[str, Any]) -> PlanArguments:
    """All arguments of a plan, each a copy in its own type: the caller may change the original
    later, or have given an iterator.

    Raises `InvalidOptionError`, and `InvalidBatchError` for variants that cannot be hashed.
    """
    checked: Any = {}
    for name, (default, check) in _ARGUMENTS.items():
        value = given.get(name, default)
        checked[name] = None if value is None is default else check(value)
    return checked  # type: ignore[no-any-return]


def check_plan_arguments(names: Collection[str], beside: object = None) -> None:
    """Raise `InvalidOptionError` for names that are no arguments of a plan, or beside a plan."""
    if beside is not None and names:
        raise InvalidOptionError(
            "arguments of a plan were given beside a plan",
            got=", ".join(names),
            expected="either",
            advice="plan.replace(...), or leave plan out",
        )
    for name in sorted(set(names) - _ARGUMENTS.keys()):
        raise InvalidOptionError(
            "a plan has no such argument",
            got=name,
            expected=", ".join(_ARGUMENTS),
            advice="hooks of a host go into host=Host(...); strict=, lazy=, check= and such "
            "into options=GraphOptions(...), which a runner takes",
        )


class Plan:
    """Which graphs a host's batches need: the mode, the sizes, the keys, and what a budget holds.

    It is resolved when it is made and does not change. `print(plan)` shows all of it, `save` keeps
    it, and `graphrt plan` prints the same. `mode` is the one that runs, `resolution` how it came
    to that, `sizes` the lists of sizes in tokens, `keys` what is captured, in capture order,
    `captured` the same with what each takes, and `left_out` what the budget does not hold, and why.

    `max_num_tokens` (T) and `max_num_reqs` (S) are the largest batch of the host, by default the
    largest of `sizes` (in tokens), or of S alone the tokens of its longest decode batch; one of the
    three is needed. No size is above T. `max_size` is
    the largest size to capture. `query_lens` are the tokens of a request in a decode step, (1,) by
    default; or by the number of requests, up to each key: `{8: [7], 32: [5]}` is 7 tokens up to 8
    requests, and 5 up to 32. `attention` is what the attention of the model can be captured in (a
    level or its name, ALWAYS by default), or that of each backend by name. `pieces` is what cuts
    the forward; "auto", the default, stands for pieces that a compiled module brings along, else
    for breakable capture. `compiled` are the compiled modules of the forward (`graphrt.compile`),
    which must all be named unless the forward is one itself.

    There is a graph for each of `loras` (active adapters, None for any number; (0,) by default),
    `variants` (None alone) and, for FULL, `bounds` (none). `budget` limits what is captured.
    `traffic` (size in tokens: share of the steps) says which sizes pad little: the default lists
    have as many as without it, and a budget keeps those that are worth most. `platform` is where
    the graphs will be, by default the current one; it says the largest size that is captured by
    default.

    `GRAPHRT_MODE=NONE` in the environment makes
    every plan one without graphs.
    """

    def __init__(
        self,
        mode: Mode | None = None,
        /,
        *,
        platform: Platform | str | None = None,
        **arguments: Unpack[PlanArguments],
    ) -> None:
        """Raises the named errors of bad modes, sizes, options and platforms."""
        if mode is not None and "mode" in arguments:
            raise TypeError("Plan() got two values for its argument 'mode'")
        check_plan_arguments(arguments)
        # All arguments, checked, those left out by their defaults.
        self.arguments = checked_arguments({"mode": mode, **arguments})
        self.platform = resolve_platform(platform, must_be_available=False)
        self.compiled = self.arguments["compiled"]
        self.attention = resolution.levels_of(self.arguments["attention"])
        """What each attention backend supports, by name."""
        resolved = resolution.resolve_mode(**self.arguments)
        self.pieces = resolved.pieces
        cap = self.platform.default_max_size()
        possible = self._possible = sizes.capture_sizes(**self.arguments, cap=cap)
        sizes.check_decode(resolved.mode, possible)
        # The sizes of full decode batches: a host that is busy runs these most.
        fulls = [reqs * query_len for query_len, reqs in possible.decode_reqs.items()]
        # Sizes in tokens -> the same, the most valuable first.
        self._worth = partial(by_worth, traffic=self.arguments["traffic"], landmarks=fulls)
        keys = sizes.descriptors_for(resolved.mode, possible, **self.arguments)
        budget = self.arguments["budget"] or Budget()
        budget.check_costs(keys)
        fitted = fit(keys, budget, resolved, self._worth)
        self.resolution, self.captured, self.left_out = fitted
        self.resolution.log_steps()
        self.mode = self.resolution.mode
        self.keys = tuple((each.mode, each.descriptor) for each in self.captured)
        own = self.arguments["sizes"]
        self.sizes = sizes.captured_sizes(possible, self.keys, own)

    @property
    def total(self) -> GraphCost:
        """What all graphs take together."""
        return total_of(each.cost for each in self.captured)

    def capture_order(self, *, limited: bool = False) -> tuple[sizes.CaptureKey, ...]:
        """`keys` in the order in which they are captured: as they are, or, where the device tells
        how many streams are free for graphs, those first that are worth most if it runs out; where
        their number or bytes are `limited`, these behind the largest of each mode. A budget whose
        costs are measured has a second of each mode next: by these the others are predicted."""
        if not (limited or self.is_measured or self.platform.stream_room() is not None):
            return self.keys
        ranked = by_priority(self.keys, self._worth)
        largest = sizes.largest_of(self.keys) if limited or self.is_measured else ()
        first = [key for key in ranked if key in largest]
        if self.is_measured:
            first.sort(key=_tokens, reverse=True)  # the others fit into the pool of the first
            seconds = sizes.largest_of(key for key in ranked if key not in largest)
            first += sorted(filter(seconds.__contains__, ranked), key=_tokens, reverse=True)
        return tuple(dict.fromkeys([*first, *ranked]))

    @property
    def is_measured(self) -> bool:
        """Whether a runner measures what graphs take, as the budget limits bytes without costs."""
        budget = self.arguments["budget"]
        return budget is not None and budget.is_measured

    def replace(self, *, platform: Platform | str | None = None, **changes: Any) -> Plan:
        """The plan with other arguments, resolved again; on the same platform by default."""
        arguments: Any = {**self.arguments, **changes}
        return Plan(**arguments, platform=self.platform if platform is None else platform)

    def refuse_less(self) -> None:
        """Raise `InvalidModeError` or `ResourceExhaustedError` if the mode that runs, or what
        is captured, is less than was asked for (`strict`)."""
        self.resolution.refuse_steps()
        if self.left_out:
            first = self.left_out[0]
            raise ResourceExhaustedError(
                f"the budget holds {len(self.keys)} of {len(self.keys) + len(self.left_out)} "
                "graphs",
                got=f"{first.mode.name} [{first.descriptor}] {first.why}",
                expected="every planned graph (strict=True)",
                advice="fewer sizes, a larger budget, or strict=False to capture what fits",
            )

    def fitted_to(self, platform: Platform, compiled: Sequence[Any]) -> Plan:
        """The plan for this platform and these compiled modules: itself if it was made for them.

        What comes out differently is printed as a `PlanChangedWarning`.
        """
        platform = resolve_platform(platform, must_be_available=False)
        compiled = items_of("compiled", compiled, "[module]")
        same_modules = list(map(id, self.compiled)) == list(map(id, compiled))
        off = any(step.rule == resolution.SWITCHED_OFF for step in self.resolution.steps)
        # A plan that has no graphs anyway notes no step for the switch.
        same_switch = off == graphs_off() or (not off and self.mode is GraphMode.NONE)
        if platform.name == self.platform.name and same_modules and same_switch:
            return self
        plan = self.replace(platform=platform, compiled=compiled)
        saved.warn_changed(f"{self!r}", self.differences(plan))
        return plan

    def differences(self, other: Plan) -> list[str]:
        """The printed lines that differ: "- " and one of this plan, "+ " and one of the other."""
        check_kind("other", other, Plan, optional=False)
        return saved.differences(self.lines(), other.lines())

    # For people and files ------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """The plan for people."""
        lines = self.resolution.lines()
        for name, support in self.attention.items():
            whose = "" if name == resolution.UNNAMED else f"{name} supports "
            lines.append(f"Attention: {whose}{support.name}")
        lines += self.sizes.lines(self.mode)
        counts = Counter(mode.name for mode, _ in self.keys)
        total = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
        lines.append(f"Graphs to capture, largest first: {len(self.keys)} ({total})")
        max_size = self.arguments["max_size"]
        lines += sizes.size_notes(self.sizes, self.keys, self.mode, max_size)
        budget = self.arguments["budget"]
        if budget is not None:
            lines += budget_lines(budget, self.captured, self.left_out)
        return lines

    def __str__(self) -> str:
        # Not among `lines`, in which a plan that was made without the modules would differ.
        code = (getattr(module, "code_line", None) for module in self.compiled)
        lines = [*self.lines(), *(line(self.mode) for line in code if line is not None)]
        return printable("\n".join(lines))  # a saved one may name anything

    def __repr__(self) -> str:
        return f"Plan({self.mode.name}, {len(self.keys)} graphs, {self.platform.name})"

    def as_dict(self) -> dict[str, Any]:
        """The arguments and all that follows from them, in JSON's types.

        Raises `InvalidOptionError` for variants that are no strings, ints or tuples of them.
        """
        results = {
            "platform": self.platform.name,
            "requested": self.resolution.requested,
            "mode": self.mode,
            "steps": [vars(step) for step in self.resolution.steps],
            "sizes": vars(self.sizes),
            "total": self.total,
            "graphs": self.captured,
            "left_out": self.left_out,
        }
        return {"arguments": self._content()["arguments"], **saved.in_json(results)}

    def _content(self) -> dict[str, Any]:
        """What a file of the plan holds. The arguments are among the printed lines too: without
        that an edit of one, such as a share of the traffic, might change no line."""
        arguments = saved.plain_arguments(self.arguments)
        printed = [f"Platform: {self.platform.name}", *self.lines()]
        printed += [f"{name} = {json.dumps(value)}" for name, value in arguments.items()]
        return {"arguments": arguments, "printed": printed}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, without its compiled modules. Raises `PlanFileError`, and
        what `as_dict` does."""
        saved.write(path, self._content())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        platform: Platform | str | None = None,
        compiled: Sequence[Any] = (),
    ) -> Plan:
        """The plan in a file of `save`, resolved again for `platform` (by default the current one).

        Where that prints something else than the plan of the file did, the lines are a
        `PlanChangedWarning`. `compiled` are the compiled modules of the forward. Raises
        `PlanFileError` for a file that is damaged or no plan.
        """
        where = resolve_platform(platform, must_be_available=False)
        plan, printed, made_with = saved.read(
            path, lambda arguments: cls(**arguments, compiled=compiled, platform=where)
        )
        changed = saved.differences(printed, plan._content()["printed"])
        saved.warn_changed(f"{os.fspath(path)}, made with {made_with},", changed)
        return plan


def _tokens(key: sizes.CaptureKey) -> int:
    return key[1].num_tokens
