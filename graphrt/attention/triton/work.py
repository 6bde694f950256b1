"""How decode attention is cut along its keys: on the host, and in the same way in kernels.

A request of n tokens is cut into equal spans of a multiple of `UNIT` tokens, and a kernel's program
takes one span of one request for one block of query rows. What bounds the work is the number of
spans, so that a grid fixed at capture fits any lengths.

The rule, fitted to sweeps on an H200 (`benchmarks/gpu/attention/kernels.py`): two waves of
programs, as a wave that is not full costs most; but no spans longer than `AIM`, since many short
programs even out better than few long ones; and none so short that merging them costs as much as
reading their keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

UNIT = 64
"""Tokens by which spans are rounded: a multiple of every block of keys that the kernels load."""
SHORT = 2 * UNIT
"""Tokens up to which a request is never split."""
AIM = 1536
"""Tokens of the longest span, while there is room for more spans."""
_MERGE_SHARE = 5
"""On a full device, merging a span may take the time of reading its keys, divided by this."""


@dataclass(frozen=True)
class Splits:
    """How a launch is cut: every request into at most `num_splits` spans of at least `UNIT` tokens.

    With `scheduled`, `num_splits` is the number of spans of all requests together: the list of them
    that `schedule_spans` wrote on the device.
    """

    num_splits: int
    scheduled: bool = False

    def grid(self, reqs: int) -> int:
        """Spans that the launch has programs for."""
        return self.num_splits if self.scheduled else reqs * self.num_splits


@dataclass(frozen=True)
class Room:
    """How many spans a device has room for. `wave` is the number whose programs run at the same
    time, `processors` that of multiprocessors. Writing and merging one span takes as long as
    reading the keys of `merge_tokens` tokens."""

    wave: float
    processors: int
    merge_tokens: float

    def limit(self, reqs: int, longest: int = 1 << 30) -> int:
        """Spans that a step may have: 8 waves or 4 a processor, but at least 2 a request; fewer
        where requests of at most `longest` tokens (by default without a bound) cannot have so
        many."""
        most = max(2 * reqs, min(int(8 * self.wave), 4 * self.processors))
        return max(reqs + 1, min(most, reqs + max(int(2 * self.wave), -(-reqs * longest // AIM))))

    def coarse(self, reqs: int) -> int:
        """Spans beyond one a request in two waves; 0 if the requests alone fill them."""
        return max(0, int(2 * self.wave) - reqs)

    def shortest_span(self, reqs: int) -> int:
        """Tokens of the shortest span of `reqs` requests. Below it, to write and merge a span takes
        more than a fifth (`_MERGE_SHARE`) of the time in which its keys are read."""
        return int(UNIT * max(1.0, self.merge_tokens / _MERGE_SHARE * reqs / self.wave))

    def chunk(self, total: int, reqs: int) -> int:
        """Tokens of a span, by the rule, for `total` tokens of `reqs` requests."""
        coarse = self.coarse(reqs)
        two_waves = min(AIM, -(-total // coarse)) if coarse else AIM
        return max(two_waves, -(-total // (self.limit(reqs) - reqs)), self.shortest_span(reqs))


def scheduled_splits(reqs: int, room: Room, longest: int) -> Splits:
    """A launch over the list of spans that `schedule_spans` writes for the lengths of the step,
    which are at most `longest`."""
    return Splits(room.limit(reqs, longest), scheduled=True)


def fixed_splits(longest: int, reqs: int, room: Room) -> Splits:
    """The same number of spans for each of `reqs` requests: by the rule, as if all had `longest`
    tokens. Numbers are rounded to 1, 2, 3, 4, 6, 8, 12, ..., of which the rule was fitted."""
    if longest <= SHORT:
        return Splits(1)
    reqs = max(1, reqs)
    wanted = -(-longest // room.chunk(longest * reqs, reqs))
    power = 1 << (wanted.bit_length() - 1)
    rounded = min((power, 3 * power // 2, 2 * power), key=lambda count: abs(count - wanted))
    return Splits(most_splits(rounded, reqs, room))


def most_splits(num_splits: int, reqs: int, room: Room) -> int:
    """`num_splits`, but no more than the spans of `reqs` requests may be."""
    return max(1, min(num_splits, 2 * room.limit(reqs) // reqs))


@triton.jit
def span_of(length, chunk, most, UNIT: tl.constexpr):
    """Tokens of each span of a request, and its number of spans, `most` at most: 1 for an empty
    request."""
    wanted = tl.minimum(tl.maximum(tl.cdiv(length, chunk), 1), most)
    wanted = tl.where(length <= 2 * UNIT, 1, wanted)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, wanted), UNIT), 1) * UNIT
    return span, tl.maximum(tl.cdiv(length, span), 1)


@triton.jit
def span_at(
    item, context_lens, schedule, num_splits, reqs, UNIT: tl.constexpr, SCHEDULED: tl.constexpr
):
    """For span number `item`: its request, its first token and its end, the length of the request,
    and its number of spans. The end is -1 for a span that no request needs."""
    if SCHEDULED:
        request = tl.load(schedule + 1 + reqs + item)
        owner = tl.maximum(request, 0)
        split = item - tl.load(schedule + 1 + owner)
        chunk = tl.load(schedule)
        most = 1 << 30
    else:
        request = item // num_splits
        owner = request
        split = item % num_splits
        chunk = UNIT
        most = num_splits
    length = tl.load(context_lens + owner)
    span, count = span_of(length, chunk, most, UNIT)
    begin = split * span
    end = tl.maximum(tl.minimum(begin + span, length), 0)
    end = tl.where(split < count, end, -1)
    return request, begin, end, length, count


@triton.jit(do_not_specialize=["reqs", "limit", "coarse", "least"])
def schedule_spans(
    context_lens,
    schedule,
    reqs,
    limit,
    coarse,
    least,
    AIM: tl.constexpr,
    UNIT: tl.constexpr,
    REQS: tl.constexpr,
    ITEMS: tl.constexpr,
    SORTED: tl.constexpr,
):
    """Write the spans of a step: int32 schedule = [chunk, first span of each request,
    request of each span or -1]. One program.

    The chunk, the most tokens of a span, is that of `Room.chunk`: `limit`, `coarse` and `least` are
    what `Room.limit`, `Room.coarse` and `Room.shortest_span` return for `reqs`. There are at most
    `limit` spans, because sum(ceil(n / chunk)) <= sum(n) / chunk + reqs, and
    chunk >= sum(n) / (limit - reqs).

    `REQS` is `reqs` rounded up to a power of two; requests of spans are written `ITEMS` at a time.
    With `SORTED` the longest spans come first, so that the last programs to end are short ones.
    """
    rows = tl.arange(0, REQS)
    lengths = tl.load(context_lens + rows, mask=rows < reqs, other=0).to(tl.int32)
    total = tl.sum(lengths.to(tl.int64), 0)
    chunk = tl.where(coarse > 0, tl.minimum(tl.cdiv(total, tl.maximum(coarse, 1)), AIM), AIM)
    chunk = tl.maximum(tl.maximum(chunk, tl.cdiv(total, limit - reqs)), least)
    chunk = (tl.cdiv(chunk, UNIT) * UNIT).to(tl.int32)
    # 1 << 30 bounds nothing: `chunk` keeps the spans of all requests together below `limit`.
    span, count = span_of(lengths, chunk, 1 << 30, UNIT)
    count = tl.where(rows < reqs, count, 0)
    if SORTED:
        # Columns are the other requests, whose lengths are loaded again: no transpose of a vector.
        others = tl.arange(0, REQS)
        their_lengths = tl.load(context_lens + others, mask=others < reqs, other=0).to(tl.int32)
        their_span, their_count = span_of(their_lengths, chunk, 1 << 30, UNIT)
        their_count = tl.where(others < reqs, their_count, 0)
        longer = their_span[None, :] > span[:, None]
        earlier = (their_span[None, :] == span[:, None]) & (others[None, :] < rows[:, None])
        first = tl.sum(tl.where(longer | earlier, their_count[None, :], 0), 1)
    else:
        first = tl.cumsum(count, 0) - count
    tl.store(schedule, chunk)
    tl.store(schedule + 1 + rows, first, mask=rows < reqs)
    spans = tl.sum(count, 0)
    for start in range(0, limit, ITEMS):
        items = start + tl.arange(0, ITEMS)
        behind = items[:, None] - first[None, :]
        owns = (behind >= 0) & (behind < count[None, :])
        request = tl.sum(tl.where(owns, rows[None, :], 0), 1)
        request = tl.where(items < spans, request, -1)
        tl.store(schedule + 1 + reqs + items, request, mask=items < limit)
