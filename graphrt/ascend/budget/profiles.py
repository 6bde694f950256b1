"""The stream formula of the ACL-graph design, by the versions of vllm-ascend that had it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import check_kind, count_of, items_of, shown
from graphrt.core.batch.modes import GraphMode, Mode
from graphrt.core.plan.budget import GraphCost
from graphrt.core.plan.sizes import check_sizes

DOMAINS = ("dp", "tp", "ep", "etp", "pcp", "dcp")
"""Groups of ranks that communicate inside a forward: data, tensor, expert and expert-tensor
parallel, context parallel of prefill and of decode."""


@dataclass(frozen=True)
class Deployment:
    """The figures of a model and its deployment that decide how many streams its graphs hold.

    `domains` are those of `DOMAINS` with more than one rank. `aiv` says that collectives are
    expanded into vector-core kernels (HCCL_OP_EXPANSION_MODE=AIV). `multi_stream` counts the side
    streams that the model itself opens (shared experts that overlap), `draft_layers` the layers of
    a draft model. Kernels and tasks are figures of one layer, `other_kernels` of the rest of the
    forward; only the structural model uses them.

    Raises `InvalidOptionError` for unknown domains and for counts that are negative.
    """

    layers: int
    domains: frozenset[str] = frozenset()
    aiv: bool = False
    moe: bool = False
    multi_stream: int = 0
    draft_layers: int = 0
    kernels_per_layer: int = 12
    tasks_per_layer: int = 1
    other_kernels: int = 20

    def __post_init__(self) -> None:
        domains = items_of("domains", self.domains, '{"tp"}')
        unknown = [domain for domain in domains if domain not in DOMAINS]
        if unknown:
            raise InvalidOptionError(
                "unknown communication domain",
                got=shown(unknown),
                expected=", ".join(DOMAINS),
                advice='domains={"tp"}',
            )
        # The only way to set a field of a frozen dataclass.
        object.__setattr__(self, "domains", frozenset(domains))
        for name, least in (
            ("layers", 1),
            ("multi_stream", 0),
            ("draft_layers", 0),
            ("kernels_per_layer", 0),
            ("tasks_per_layer", 0),
            ("other_kernels", 0),
        ):
            count_of(name, getattr(self, name), least=least)

    @property
    def pieces(self) -> int:
        """Pieces of one size (a *set*): attention is between them, a draft model has its own."""
        return self.layers + 1 + (self.draft_layers + 1 if self.draft_layers else 0)


@dataclass(frozen=True)
class StreamFigures:
    """The streams that a profile computes for a deployment."""

    profile: str
    usable: int
    """Streams that graphs may hold together."""
    full: int
    """Streams of a full graph."""
    piecewise: int
    """Streams of all pieces of one size."""
    pieces: int
    """Pieces of one size."""
    terms: tuple[tuple[str, int], ...]
    """The summands of `usable`, each with a text for people."""

    @property
    def cost(self) -> dict[GraphMode, GraphCost]:
        """The cost model of a plan: for `Budget(cost=)`."""
        pieces = GraphCost(self.piecewise, self.pieces)
        return {GraphMode.PIECEWISE: pieces, GraphMode.FULL: GraphCost(self.full)}


@dataclass(frozen=True)
class Profile:
    """One version of the formula: an estimate from experience, in streams.

    `by_expansion` tells collectives on vector cores (AIV) from those on streams of their own;
    `spare_set` keeps one piecewise set free for a dense model under AIV; `context_parallel` takes
    100 streams for each domain of context parallelism; `full_graphs` takes one stream for each
    full graph before the pieces get theirs; `drafts` counts the pieces of a draft model.
    """

    name: str
    streams: int
    by_expansion: bool = True
    spare_set: bool = True
    context_parallel: bool = True
    full_graphs: bool = False
    drafts: bool = True

    def pieces(self, model: Deployment) -> int:
        """Pieces of one piecewise set, as this version counted them."""
        return model.pieces if self.drafts else model.layers + 1

    def per_size(self, model: Deployment) -> int:
        """Streams of one piecewise set (ACL-graph design): pieces times parallel parts."""
        return self.pieces(model) * self._parts(model)

    def terms(self, model: Deployment, full_graphs: int = 0) -> tuple[tuple[str, int], ...]:
        """The addends of the stream formula, (reason, streams): what a device has, less what this
        version keeps free."""
        terms = [("ACL-graph design, 2048 less what it keeps free", self.streams)]
        if self.full_graphs and full_graphs:
            terms.append(("full graphs, one each", -full_graphs))
        if self.by_expansion and model.aiv and self.spare_set and not model.moe:
            terms.append(("one set spare for a dense model", -self.per_size(model)))
        if self.by_expansion and not model.aiv:
            for domain in ("pcp", "dcp") if self.context_parallel else ():
                if domain in model.domains:
                    terms.append((f"domain {domain}", -100))
            if communicating := _communicating(model):
                terms.append(("40 for each of dp and tp", -40 * communicating))
        return tuple(terms)

    def capacity(self, model: Deployment, full_graphs: int = 0) -> int:
        """How many piecewise sizes fit by this formula."""
        usable = sum(streams for _, streams in self.terms(model, full_graphs))
        return max(0, usable) // self.per_size(model)

    def figures(self, model: Deployment) -> StreamFigures:
        """The figures for a plan, which counts full graphs itself, at one stream each."""
        terms = self.terms(model)
        usable = max(0, sum(streams for _, streams in terms))
        return StreamFigures(self.name, usable, 1, self.per_size(model), self.pieces(model), terms)

    def _parts(self, model: Deployment) -> int:
        domains = model.domains
        if not self.by_expansion:
            return 1 + len(domains & {"dp", "tp", "ep", "etp"})
        if not model.aiv:
            return 1 + 2 * _communicating(model)
        parts = 1 + _communicating(model) + ("ep" in domains) + bool(model.multi_stream)
        return parts + (model.moe and "dp" in domains)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "0.9.1", 1920, by_expansion=False, spare_set=False, context_parallel=False, drafts=False
        ),
        Profile("0.11", 1800, context_parallel=False),
        Profile("0.20", 1800),
        Profile("last", 1800, full_graphs=True),
    )
}
"""The formula by a version of the host that had it; "last" is its last revision."""

# The second version of a formula -> the one of `PROFILES` with the same numbers.
_SAME = {"0.9.2": "0.9.1", "0.13": "0.20", "0.18": "0.20"}


_WITHOUT_FORMULA = (0, 21)
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def update_aclgraph_sizes(
    sizes: Sequence[int],
    model: Deployment,
    *,
    profile: str | Profile = "0.20",
    mode: Mode = GraphMode.PIECEWISE,
) -> tuple[int, ...]:
    """The capture sizes, in tokens, that the formula of a version leaves for piecewise graphs.

    Where too many are asked for, evenly spaced ones are kept, the first and the last among them,
    and only the last one where there is no room for two (old versions failed there). Modes
    without pieces keep all sizes. This is what hosts know by this name; `graphrt.Plan`
    chooses better. Source: the ACL-graph design.

    Raises `InvalidOptionError`, for an unknown profile too.
    """
    checked = check_sizes(sizes)
    check_kind("model", model, Deployment, optional=False, example="Deployment(layers=64)")
    mode = GraphMode.parse(mode)
    if not mode.has_piecewise:
        return checked
    full_graphs = len(checked) if mode.has_full else 0
    if not isinstance(profile, Profile):
        check_kind("profile", profile, str, optional=False, example='"0.20"')
        profile = profile_named(profile)
    return evenly_spaced(checked, profile.capacity(model, full_graphs))


def profile_named(name: str) -> Profile:
    """The profile of that name; raises `InvalidOptionError` if there is none, as of versions after
    the formula was removed."""
    profile = PROFILES.get(_SAME.get(name, name))
    if profile is not None:
        return profile
    version = _VERSION.match(name)
    if version is not None and tuple(map(int, version.groups())) >= _WITHOUT_FORMULA:
        raise InvalidOptionError(
            "vllm-ascend removed its stream formula in 0.21, so this version has none",
            got=shown(name),
            expected=", ".join(PROFILES),
            advice='"structural", which is the default; profile="last" is the formula\'s last form',
        )
    raise InvalidOptionError(
        "unknown stream profile",
        got=shown(name),
        expected=", ".join(PROFILES),
        advice='profile="0.20"',
    )


def evenly_spaced(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of `sizes` at even distances in the list, both ends included; at least the last."""
    if count >= len(sizes):
        return sizes
    if count <= 1:
        return sizes[-1:]
    step = (len(sizes) - 1) / (count - 1)
    return tuple(sizes[round(index * step)] for index in range(count - 1)) + sizes[-1:]


def _communicating(model: Deployment) -> int:
    return len(model.domains & {"dp", "tp"})
