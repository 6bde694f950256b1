"""Which batch sizes are captured: the mixed list, the decode ladders and the keys they give."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.option_values import count_of, items_of, refused, shown
from graphrt.core.batch.descriptor import BatchDescriptor
from graphrt.core.batch.modes import GraphMode, Mode
from graphrt.core.plan.traffic import Traffic, fitted_sizes

CaptureKey = tuple[GraphMode, BatchDescriptor]
"""Names one planned graph: the runtime mode that it is captured in, and its descriptor."""

QueryLens = Sequence[int] | Mapping[int, Sequence[int]]
"""The query lengths of decode batches; or a schedule: up to so many requests these."""


def graph_name(key: CaptureKey) -> str:
    """How plans, reports and logs call a graph."""
    return f"{key[0].name} [{key[1]}]"


_WIDTH = 100
"""Characters of a printed line."""
_CAP = 512
"""The largest size by default where no platform says one, as `Platform.default_max_size`."""
_MOST_GRAPHS = 1 << 17
"""The most that a plan may have, over sizes, query lengths, numbers of LoRAs, bounds, variants. It
is far more than anybody captures: listing the graphs of a mistake would take minutes."""


@dataclass(frozen=True)
class CaptureSizes:
    """The sizes that can be captured for one host; those of a `Plan` are captured.

    `mixed` are the PIECEWISE sizes, `general` those of FULL graphs that serve any batch, and
    `decode` the ladder of uniform FULL sizes for each query length, and `decode_reqs` the most
    requests of its batches. `limit` is M of docs/concepts/sizes.md, `left_out` the host's own sizes
    that are larger than any graph.
    """

    max_num_reqs: int
    max_num_tokens: int
    limit: int
    mixed: tuple[int, ...]
    general: tuple[int, ...]
    decode: Mapping[int, tuple[int, ...]]
    decode_reqs: Mapping[int, int]
    left_out: tuple[int, ...] = ()

    def lines(self, mode: GraphMode) -> list[str]:
        """The lists of sizes that `mode` captures, in tokens, with how many there are."""
        if mode is GraphMode.NONE:
            return []
        lists = {"mixed": self.mixed} if mode.has_piecewise else {}
        if mode is GraphMode.FULL:
            lists["any batch"] = self.general
        elif mode.has_full:
            lists |= {f"decode, query length {q}": ladder for q, ladder in self.decode.items()}
        width = max(map(len, lists))
        largest = max((listed[-1] for listed in lists.values() if listed), default=0)
        lines = [f"Sizes, at most {largest} tokens:"]
        for name, listed in lists.items():
            head = f"  {name:{width}} {len(listed):4}: "
            text = head + (" ".join(map(str, listed)) or "none")
            lines.append(textwrap.fill(text, _WIDTH, subsequent_indent=" " * len(head)))
        tokens = self.max_num_tokens
        for most, above in (
            (f"{largest}, the largest that is captured", [n for n in self.left_out if n <= tokens]),
            (f"max_num_tokens={tokens}", [n for n in self.left_out if n > tokens]),
        ):
            if above:
                lines.append(f"left out: sizes above {most}: {' '.join(map(str, above))}")
        return lines


def captured_sizes(
    possible: CaptureSizes, keys: Iterable[CaptureKey], own: Iterable[int] | None
) -> CaptureSizes:
    """The sizes of the graphs `keys`, of all that were possible; `own` are the host's own sizes."""
    mixed: set[int] = set()
    general: set[int] = set()
    decode: dict[int | None, set[int]] = {query_len: set() for query_len in possible.decode}
    for mode, key in keys:
        of_mode = mixed if mode is GraphMode.PIECEWISE else general
        (decode[key.query_len] if key.uniform else of_mode).add(key.num_tokens)
    largest = max(mixed.union(general, *decode.values()), default=0)
    return replace(
        possible,
        mixed=tuple(sorted(mixed)),
        general=tuple(sorted(general)),
        decode={query_len: tuple(sorted(decode[query_len])) for query_len in possible.decode},
        left_out=tuple(size for size in own or () if largest and size > largest),
    )


def check_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """`sizes` as a tuple if they ascend and are positive; raises `InvalidOptionError` otherwise."""
    nothing = 'mode="NONE" to capture nothing, or sizes=None for the default list'
    listed = items_of("sizes", sizes, "[1, 2, 4, 8]", empty=nothing)
    checked = tuple(positive("a capture size", size) for size in listed)
    if list(checked) != sorted(set(checked)):
        what = "capture sizes are not sorted, or one of them is repeated"
        advice = f"sizes={shown(sorted(set(checked)))}"
        raise refused(what, list(listed), "ascending positive integers, each once", advice)
    return checked


def check_query_lens(query_lens: QueryLens) -> Any:
    """`query_lens`, each once and ascending; raises `InvalidOptionError` for what none can be."""
    if isinstance(query_lens, Mapping) and query_lens:
        pairs = [(positive("a number of requests", n), each) for n, each in query_lens.items()]
        spans = sorted(pairs, key=lambda pair: pair[0])
        return {most: _lengths(each, f"query_lens[{most}]", "[7]") for most, each in spans}
    return _lengths(query_lens, "query_lens", "(1,)")


def _lengths(query_lens: Iterable[int], name: str, example: str) -> tuple[int, ...]:
    listed = items_of(name, query_lens, example, empty=f"{name}={example}")
    return tuple(sorted({positive("a query length", each) for each in listed}))


def lengths_of(query_lens: QueryLens) -> list[int]:
    """All query lengths, ascending."""
    listed: Any = query_lens
    if isinstance(query_lens, Mapping):
        listed = itertools.chain(*query_lens.values())
    return sorted({*listed})


def capture_sizes(
    *,
    max_num_reqs: int | None = None,
    max_num_tokens: int | None = None,
    query_lens: QueryLens = (1,),
    sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    cap: int = _CAP,
    traffic: Traffic | None = None,
    mode: Mode | None = None,
    **_: object,
) -> CaptureSizes:
    """The sizes of a host, by default or from its own list; takes the checked arguments of a plan.

    A limit that the host leaves out follows from its sizes, or from the other limit. `max_size` is
    the largest size to capture: it takes the place of the default limit (not of
    the token budget) and cuts the host's own list. With `traffic` the default lists have as many
    sizes as without, and those that pad its batches least.

    By default any batch has the steps up to M (docs/concepts/sizes.md), a full decode batch and
    all tokens; uniform decode has these in whole requests, and a full decode batch, up to which it
    goes. It has none where not one request fits under M.
    """
    lengths, scheduled = lengths_of(query_lens), isinstance(query_lens, Mapping)
    given = max_num_tokens
    max_num_reqs, max_num_tokens = _largest_batch(max_num_reqs, max_num_tokens, sizes, query_lens)
    longest = max(lengths)
    if longest > max_num_tokens:
        widest = max_num_reqs * longest
        at_fault, advice = f"max_num_tokens={given}", f"max_num_tokens={widest}"
        if given is None:  # it follows from sizes: a larger max_num_tokens would give no graph
            at_fault, advice = f"sizes={shown(sizes)}", f"sizes=[..., {widest}]"
        raise InvalidOptionError(
            "not one decode request fits into the largest batch",
            got=f"query length {longest}, {at_fault}",
            expected=f"room for {longest} tokens",
            advice=advice,
        )
    reqs = _decode_reqs(query_lens, max_num_reqs, max_num_tokens)
    most = {q: spans[-1][1] if spans else 0 for q, spans in reqs.items()}
    widest = max(q * num_reqs for q, num_reqs in most.items())
    top = max(cap, widest if scheduled else 0) if max_size is None else max_size
    top = min(top, max_num_tokens)
    limit = top if max_size is not None else min(widest * 2, top)
    if mode is None or not GraphMode.parse(mode).has_piecewise:
        top = limit
    listed = None if sizes is None else _cut(tuple(sizes), max_num_tokens, max_size)
    _refuse_many(len(lengths) * (top // 16 if listed is None else len(listed)))
    ladders: dict[int, tuple[int, ...]] = {}
    if listed is not None:
        tokens = max_num_tokens if max_size is None else limit
        for q in lengths:
            full = max_num_reqs * q
            # In whole requests, and no larger than a batch can be.
            largest = min(full, tokens) // q * q
            rounded = {min(-(-size // q) * q, largest) for size in listed}
            ladders[q] = tuple(sorted((rounded | ({full} if full <= limit else set())) - {0}))
            if scheduled:
                ladders[q] = _up_to(limit, _needed(rounded, q, reqs[q]))
        general = _up_to(top, [*listed, widest]) if scheduled else listed
        return CaptureSizes(max_num_reqs, max_num_tokens, limit, listed, general, ladders, most)
    mixed = _up_to(top, [*_steps(top), widest, max_num_tokens])
    whole: list[int] = []
    for q in lengths:
        # A graph for any batch serves decode as well: there are steps of whole requests too.
        steps = (n * q for n in _steps(min(max_num_reqs, limit // q)))
        whole += _needed(steps, q, reqs[q])
        ladders[q] = _up_to(limit, _needed((-(-size // q) * q for size in mixed), q, reqs[q]))
    general = _up_to(limit, [*mixed, *whole])
    if traffic is not None:
        mixed, general = fitted_sizes(mixed, traffic), fitted_sizes(general, traffic)
        for q, ladder in ladders.items():
            live = {size: traffic.get(size, 0) for size in _needed(traffic, q, reqs[q])}
            ladders[q] = fitted_sizes(ladder, live, q)
    return CaptureSizes(max_num_reqs, max_num_tokens, limit, mixed, general, ladders, most)


def _decode_reqs(
    query_lens: QueryLens, max_num_reqs: int, max_num_tokens: int
) -> dict[int, list[tuple[int, int]]]:
    """query length -> the requests of its decode batches, as (more than, at most). Raises
    `InvalidOptionError` for a schedule that ends before the largest batch."""
    reqs: dict[int, list[tuple[int, int]]] = {q: [] for q in lengths_of(query_lens)}
    if not isinstance(query_lens, Mapping):
        return {q: [(0, max_num_reqs)] for q in reqs}
    if max(query_lens) < max_num_reqs:
        last = max(query_lens)
        raise InvalidOptionError(
            "the schedule of query lengths ends before the largest batch",
            got=f"query_lens up to {last} requests, max_num_reqs={max_num_reqs}",
            expected="the query lengths of every batch",
            advice=f"query_lens={{..., {max_num_reqs}: {list(query_lens[last])}}}",
        )
    least = 0
    for most, lengths in query_lens.items():
        for q in lengths:
            high = min(most, max_num_reqs, max_num_tokens // q)
            reqs[q] += [(least, high)] if least < high else []
        least = most
    return reqs


def _needed(sizes: Iterable[int], q: int, reqs: Sequence[tuple[int, int]]) -> set[int]:
    """The `sizes` in tokens that decode batches of these requests can have, and their widest."""
    known = {*sizes, *(most * q for _, most in reqs)}
    return {size for size in known for least, most in reqs if least * q < size <= most * q}


def _largest_batch(
    reqs: int | None, tokens: int | None, sizes: Sequence[int] | None, query_lens: QueryLens
) -> tuple[int, int]:
    """The requests and tokens of the largest batch, each as given or as it follows from the rest.
    Raises `InvalidOptionError` if nothing is given."""
    if isinstance(query_lens, Mapping):
        reqs = reqs or max(query_lens)
        most = max(most * max(each) for most, each in query_lens.items())
    else:
        most = (reqs or 0) * max(query_lens)
    if tokens is None:
        tokens = (most or None) if sizes is None else max(sizes)
    if tokens is None:
        raise InvalidOptionError(
            "the largest batch is unknown",
            expected="max_num_tokens, max_num_reqs or sizes",
            advice="sizes=[1, 2, 4, 8]",
        )
    return tokens if reqs is None else reqs, tokens


def descriptors_for(
    runs: Mode,
    held: CaptureSizes,
    *,
    loras: Sequence[int | None] = (0,),
    bounds: Sequence[tuple[int, ...]] = ((),),
    variants: Sequence[Hashable] = (None,),
    **_: object,
) -> tuple[CaptureKey, ...]:
    """The keys that a mode captures of these sizes, in capture order: PIECEWISE before FULL,
    largest first; of the checked arguments of a plan.

    There is a key for each of `loras` (active adapters; None is any number) and `variants`, and
    for FULL each of `bounds`: what bakes bounds in is attention, which runs between the pieces. No
    key has more active adapters than tokens: each token has one at most.
    """
    mode = GraphMode.parse(runs)
    keys: list[CaptureKey] = []
    if mode.has_piecewise:
        keys += [(GraphMode.PIECEWISE, BatchDescriptor(size)) for size in held.mixed]
    if mode.mixed_mode is GraphMode.FULL:
        keys += [
            (GraphMode.FULL, BatchDescriptor(size, min(size, held.max_num_reqs)))
            for size in held.general
        ]
    elif mode.has_full:
        keys += [
            (GraphMode.FULL, BatchDescriptor(size, size // q, uniform=True, query_len=q))
            for q, ladder in held.decode.items()
            for size in ladder
        ]
    _refuse_many(len(keys) * len(loras) * len(bounds) * len(variants))
    cases: dict[CaptureKey, None] = {}
    for runtime_mode, named in keys:
        of_mode = bounds if runtime_mode is GraphMode.FULL else ((),)
        for variant, lora, bound in itertools.product(variants, loras, of_mode):
            key = named._replace(bounds=bound, variant=variant)
            if lora != 0:
                active = min(lora or 0, key.num_tokens)
                key = key._replace(has_lora=True, num_active_loras=active)
            cases[runtime_mode, key] = None
    return tuple(sorted(cases, key=capture_order))


def capture_order(key: CaptureKey) -> tuple[object, ...]:
    """Pieces before FULL, largest first."""
    mode, descriptor = key
    widest = tuple(-bound for bound in descriptor.bounds)
    return (
        mode is GraphMode.FULL,
        -descriptor.num_tokens,
        -descriptor.lora_capacity,
        -(descriptor.query_len or 0),
        widest,
    )


def largest_of(keys: Iterable[CaptureKey]) -> frozenset[CaptureKey]:
    """The largest graph of each mode, the last of several."""
    by_size = sorted(keys, key=lambda key: key[1].num_tokens)
    return frozenset({key[0]: key for key in by_size}.values())


def _steps(limit: int) -> list[int]:
    """1, 2, 4, then every 8 below 256, then every 16, up to `limit`."""
    few = [n for n in (1, 2, 4) if n <= limit]
    return [*few, *range(8, min(limit + 1, 256), 8), *range(256, limit + 1, 16)]


def _up_to(limit: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """The sizes that are not larger than `limit`, ascending, each once."""
    return tuple(sorted({size for size in sizes if size <= limit}))


def check_decode(mode: GraphMode, sizes: CaptureSizes) -> None:
    """Raise `InvalidOptionError` if a mode captures decode batches alone, and none fits."""
    empty = [query_len for query_len, ladder in sizes.decode.items() if not ladder]
    if mode is GraphMode.FULL_DECODE_ONLY and len(empty) == len(sizes.decode):
        raise InvalidOptionError(
            f"mode {mode.name} captures decode batches, and none fits",
            got=f"query length {', '.join(map(str, empty))}, at most {sizes.limit} tokens",
            expected=f"a largest size of {min(empty)} or more",
            advice=f"max_size={min(max(empty) * sizes.max_num_reqs, sizes.max_num_tokens)}",
        )


def eager_range(sizes: CaptureSizes, keys: Iterable[CaptureKey], query_len: int) -> tuple[int, int]:
    """The first and the last size, in whole requests, of decode batches that are TOO_LARGE for
    every graph that may serve them; the first is larger than the last where there is none."""
    named = [descriptor for _, descriptor in keys]
    largest = max(
        (each.num_tokens for each in named if not each.uniform or each.query_len == query_len),
        default=0,
    )
    most = min(sizes.decode_reqs[query_len], sizes.max_num_tokens // query_len)
    return (largest // query_len + 1) * query_len, most * query_len


def size_notes(
    sizes: CaptureSizes, keys: Sequence[CaptureKey], mode: GraphMode, max_size: int | None
) -> list[str]:
    """Lines on batches that the captured sizes do not serve, and on a `max_size` that none has."""
    notes = []
    largest = max((descriptor.num_tokens for _, descriptor in keys), default=0)
    if keys and max_size is not None and largest != max_size:
        notes.append(f"Note: the largest size is {largest} instead of max_size={max_size}")
    for query_len in sizes.decode if keys else ():
        first, most = eager_range(sizes, keys, query_len)
        if first <= most:
            notes.append(
                f"Note: decode batches of {first} to {most} tokens (query length {query_len}) "
                "will run eagerly: max_size, sizes and the budget say which are captured"
            )
    mixed = max((each.num_tokens for _, each in keys if not each.uniform), default=0)
    if keys and mode.mixed_mode is not GraphMode.NONE and mixed < sizes.max_num_tokens:
        notes.append(
            f"Note: prompts and mixed batches of {mixed + 1} to {sizes.max_num_tokens} tokens have "
            "no graph: max_size, sizes and the budget say which are captured"
        )
    return notes


def _refuse_many(graphs: int) -> None:
    """Raise `InvalidOptionError` for more than anybody captures, before any of it is planned."""
    if graphs > _MOST_GRAPHS:
        raise InvalidOptionError(
            "a plan has too many graphs",
            got=f"{graphs} graphs",
            expected=f"at most {_MOST_GRAPHS}",
            advice="sizes=[1, 2, 4, 8] or a smaller max_size, and fewer loras, bounds, variants or "
            "query_lens",
        )


def _cut(sizes: tuple[int, ...], max_num_tokens: int, max_size: int | None) -> tuple[int, ...]:
    """A host's own sizes that a batch can have, up to `max_size`; raises `InvalidOptionError` if
    none is left."""
    names = {"max_num_tokens": max_num_tokens, "max_size": max_size}
    name, most = min(((n, m) for n, m in names.items() if m is not None), key=lambda each: each[1])
    kept = tuple(size for size in sizes if size <= most)
    if not kept:
        raise InvalidOptionError(
            f"{name} leaves no capture size",
            got=f"{name}={most}, sizes={list(sizes)}",
            expected=f"{name} >= {sizes[0]}",
            advice=f"{name}={sizes[-1]}, or no {name}",
        )
    return kept


def positive(name: str, number: object) -> int:
    """A count of at least 1; raises `InvalidOptionError` for anything else."""
    return count_of(name, number, least=1)
