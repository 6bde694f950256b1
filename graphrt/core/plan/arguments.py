"""What a plan is made from: each argument in its own type, or a named error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.homes import public
from graphrt.core.base.option_values import check_kind, count_of, items_of, nearest
from graphrt.core.batch.descriptor import checked_variant
from graphrt.core.batch.modes import AttentionSupport, GraphMode, Mode, PieceProvider
from graphrt.core.plan.budget import Budget
from graphrt.core.plan.resolution import AUTO, UNNAMED, all_compiled, levels_of
from graphrt.core.plan.sizes import check_query_lens, check_sizes, positive
from graphrt.core.plan.traffic import Traffic, check_traffic

if TYPE_CHECKING:
    pass  # in typing from Python 3.11 on


class _AllButMode(TypedDict, total=False):
    """The keywords of `Plan` but the mode, which needs no name there."""

    sizes: Sequence[int] | None
    max_size: int | None
    max_num_tokens: int | None
    max_num_reqs: int | None
    query_lens: Sequence[int]
    attention: AttentionSupport | str | Mapping[str, AttentionSupport | str]
    pieces: PieceProvider | str | None
    compiled: Sequence[Any]
    loras: Sequence[int | None]
    bounds: Sequence[tuple[int, ...]]
    variants: Sequence[Hashable]
    budget: Budget | None
    traffic: Traffic | None


@public("graphrt.types")
class PlanArguments(_AllButMode, total=False):
    """The keywords of `Plan`, which `GraphRunner` takes too."""

    mode: Mode | None


def _attention(value: Any) -> AttentionSupport | dict[str, AttentionSupport]:
    levels = levels_of(value)
    return levels if isinstance(value, Mapping) else levels[UNNAMED]


def _pieces(value: Any) -> PieceProvider | str | None:
    auto = isinstance(value, str) and value.strip().lower() == AUTO
    return AUTO if auto else PieceProvider.parse(value)


def _budget(value: Any) -> Budget:
    check_kind("budget", value, Budget)
    return value  # type: ignore[no-any-return]


def _cases(name: str, example: str, check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check_all(value: Any) -> tuple[Any, ...]:
        return tuple(map(check, items_of(name, value, example, empty=f"leave {name} out")))

    return check_all


def _loras(active: Any) -> int | None:
    return None if active is None else count_of("a number of active LoRAs", active, least=0)


def _bounds(case: Any) -> tuple[int, ...]:
    return tuple(count_of("a bound", each, least=0) for each in items_of("bounds", case, "(4096,)"))


_ARGUMENTS: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
    "mode": (None, GraphMode.parse),
    "sizes": (None, check_sizes),
    "max_size": (None, partial(positive, "max_size")),
    "max_num_tokens": (None, partial(positive, "max_num_tokens")),
    "max_num_reqs": (None, partial(positive, "max_num_reqs")),
    "query_lens": ((1,), check_query_lens),
    "attention": (AttentionSupport.ALWAYS, _attention),
    "pieces": (AUTO, _pieces),
    "compiled": ((), all_compiled),
    "loras": ((0,), _cases("loras", "(0, 4)", _loras)),
    "bounds": (((),), _cases("bounds", "[(4096,)]", _bounds)),
    "variants": ((None,), _cases("variants", '["draft"]', checked_variant)),
    "budget": (None, _budget),
    "traffic": (None, check_traffic),
}
"""By the name of an argument: its default, and what makes a copy of it in its own type, or raises.
Where the default is None, None stays None."""


def checked_arguments(given: Mapping[str, Any]) -> PlanArguments:
    """All arguments of a plan, each a copy in its own type: what the caller changes later, or can
    be read only once, is not the plan's.

    Raises `InvalidSizesError` for sizes and counts, `InvalidOptionError` for the others and
    `InvalidBatchError` for variants that cannot be hashed.
    """
    checked: Any = {}
    for name, (default, check) in _ARGUMENTS.items():
        value = given.get(name, default)
        checked[name] = None if value is None is default else check(value)
    return checked  # type: ignore[no-any-return]


def check_plan_arguments(
    names: Collection[str], beside: object = None, homes: Mapping[str, type] | None = None
) -> None:
    """Raise `InvalidOptionError` for names that are no arguments of a plan, or beside a plan.

    `homes` are arguments that take a dataclass, whose fields are often given in their place.
    """
    if beside is not None and names:
        raise InvalidOptionError(
            "arguments of a plan were given beside a plan",
            got=", ".join(names),
            expected="either",
            advice="plan.replace(...), or leave plan out",
        )
    for name in sorted(set(names) - _ARGUMENTS.keys()):
        owners = {
            f"{argument}={owner.__name__}({name}=...)"
            for argument, owner in (homes or {}).items()
            if name in (field.name for field in fields(owner))
        }
        raise InvalidOptionError(
            "a plan has no such argument",
            got=name,
            expected=", ".join(_ARGUMENTS),
            advice=next(iter(owners), nearest(name, list(_ARGUMENTS)))
            or "what a host hooks in goes into host=Host(...), how graphs are captured into "
            "options=GraphOptions(...)",
        )
