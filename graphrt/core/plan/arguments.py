"""What a plan is made from: each argument in its own type, or a named error."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import fields
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
    from typing_extensions import Unpack  # in typing from Python 3.11 on


@public("graphrt.types")
class PlanArguments(TypedDict, total=False):
    """The keywords of `Plan`, which `GraphRunner` takes too."""

    mode: Mode | None
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


def checked_arguments(**arguments: Unpack[PlanArguments]) -> PlanArguments:
    """All arguments of a plan, each a copy in its own type: what the caller changes later, or can
    be read only once, is not the plan's.

    Raises `InvalidSizesError` for sizes and counts, `InvalidOptionError` for the others and
    `InvalidBatchError` for variants that cannot be hashed.
    """
    check_kind("budget", arguments["budget"], Budget)
    mode, sizes = arguments["mode"], arguments["sizes"]
    attention, pieces, traffic = arguments["attention"], arguments["pieces"], arguments["traffic"]
    levels = levels_of(attention)
    variants = items_of("variants", arguments["variants"], '["draft"]', empty="leave variants out")
    auto = isinstance(pieces, str) and pieces.strip().lower() == AUTO
    return {
        "mode": None if mode is None else GraphMode.parse(mode),
        "sizes": None if sizes is None else check_sizes(sizes),
        "max_size": _limit("max_size", arguments["max_size"]),
        "max_num_tokens": _limit("max_num_tokens", arguments["max_num_tokens"]),
        "max_num_reqs": _limit("max_num_reqs", arguments["max_num_reqs"]),
        "query_lens": check_query_lens(arguments["query_lens"]),
        "attention": levels if isinstance(attention, Mapping) else levels[UNNAMED],
        "pieces": AUTO if auto else PieceProvider.parse(pieces),
        "compiled": all_compiled(arguments["compiled"]),
        "loras": tuple(
            None if each is None else count_of("a number of active LoRAs", each, least=0)
            for each in items_of("loras", arguments["loras"], "(0, 4)", empty="leave loras out")
        ),
        "bounds": tuple(
            tuple(
                count_of("a bound", bound, least=0)
                for bound in items_of("each of bounds", case, "(4096,)")
            )
            for case in items_of(
                "bounds", arguments["bounds"], "[(4096,)]", empty="leave bounds out"
            )
        ),
        "variants": tuple(map(checked_variant, variants)),
        "budget": arguments["budget"],
        "traffic": None if traffic is None else check_traffic(traffic),
    }


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
    unknown = sorted(set(names) - PlanArguments.__annotations__.keys())
    if unknown:
        raise InvalidOptionError(
            "a plan has no such argument",
            got=", ".join(unknown),
            expected=", ".join(PlanArguments.__annotations__),
            advice=_home_of(unknown[0], homes or {})
            or nearest(unknown[0], list(PlanArguments.__annotations__))
            or "what a host hooks in goes into host=Host(...), how graphs are captured into "
            "options=GraphOptions(...)",
        )


def _home_of(name: str, homes: Mapping[str, type]) -> str | None:
    for argument, owner in homes.items():
        if name in (field.name for field in fields(owner)):
            return f"{argument}={owner.__name__}({name}=...)"
    return None


def _limit(name: str, value: object) -> int | None:
    return None if value is None else positive(name, value)
