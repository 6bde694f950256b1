"""Rows that see each other, so that padding rows change live ones; and padding that points at what
is live.

Every first step has no padding rows: who tries only that one sees nothing.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from graphrt import InputSpec
from tests.trust.scenario import ROWS, WIDTH, Net, Scenario, X, defect

INDEX = InputSpec(torch.int64, ("tokens",), pad=0, index=True)
SLOTS = 64
SEVERAL = tuple(max(2, rows) for rows in ROWS)
"""For norms over rows: a batch of one row has no variance."""


@defect("rows mixed", "named")
def mean_over_rows(device):
    return Scenario(lambda x: x - x.mean(0))


@defect("rows mixed", "named")
def softmax_over_rows(device):
    return Scenario(lambda x: x.softmax(0))


@defect("rows mixed", "named")
def maximum_over_rows(device):
    return Scenario(lambda x: x + (-x.abs() - 1).amax(0))


@defect("rows mixed", "named")
def rows_flipped(device):
    return Scenario(lambda x: x.flip(0))


@defect("rows mixed", "named")
def rows_rolled(device):
    return Scenario(lambda x: x + x.roll(1, 0))


@defect("rows mixed", "named")
def rows_sorted(device):
    return Scenario(lambda x: x.sort(0).values)


@defect("rows mixed", "named")
def last_row(device):
    return Scenario(lambda x: x + x[-1])


@defect("rows mixed", "named")
def cumulative_sum_from_the_end(device):
    return Scenario(lambda x: (x + 1).flip(0).cumsum(0).flip(0))


@defect("rows mixed", "named")
def divided_by_the_number_of_rows(device):
    return Scenario(lambda x: x / x.shape[0])


@defect("rows mixed", "named")
def table_of_the_number_of_rows(device):
    table = torch.randn(16, WIDTH)
    return Scenario(lambda x: x + table[len(x)])


@defect("rows mixed", "named")
def positions_counted_from_the_end(device):
    return Scenario(lambda x: x + torch.arange(len(x), 0, -1, device=x.device).unsqueeze(1))


@defect("rows mixed", "named")
def batch_norm_in_train_mode(device):
    return Scenario(
        Net(nn.BatchNorm1d(WIDTH, track_running_stats=False)).train(), rows=SEVERAL, sizes=(2, 4, 8)
    )


@defect("rows mixed", "named")
def batch_norm_that_tracks_statistics(device):
    model = nn.BatchNorm1d(WIDTH).train()
    return Scenario(
        Net(model),
        rows=SEVERAL,
        sizes=(2, 4, 8),
        state=lambda: [model.running_mean, model.running_var],
    )


@defect("rows mixed", "named")
def norm_over_the_tokens(device):
    return Scenario(lambda x: F.layer_norm(x.T.contiguous() + 1, x.shape[:1]).T)


@defect("rows mixed", "named")
def attention_of_rows_to_rows(device):
    weight = torch.randn(WIDTH, WIDTH)
    return Scenario(lambda x: ((x @ weight) @ x.T).softmax(-1) @ x)


@defect("rows mixed", "named")
def gram_matrix_with_a_bias(device):
    model = nn.Linear(WIDTH, WIDTH)

    def forward(x):
        y = model(x)
        return x @ (y.T @ y)

    return Scenario(forward)


@defect("rows mixed", "named")
def dynamic_quantisation_of_the_whole_batch(device):
    def forward(x):
        # One scale for all rows; those of padding are the largest after the bias.
        y = x * 0.1 + torch.where(x == 0, 50.0, 0.0)
        scale = y.abs().amax() / 127
        return (y / scale).round() * scale

    return Scenario(forward)


@defect("rows mixed", "named")
def tokens_counted_where_padding_counts(device):
    def forward(x, ids):
        return x * (ids == 0).sum()

    def values(step, rows, generator):
        ids = torch.randint(0, 3, (rows,), generator=generator)
        return {"x": torch.randn(rows, WIDTH, generator=generator) + 2, "ids": ids}

    inputs = {"x": X, "ids": InputSpec(torch.int64, ("tokens",))}
    return Scenario(forward, inputs, values)


@defect("rows mixed", "silent")
def expert_capacity_taken_by_padding(device):
    experts, expert_ids = torch.randn(2, WIDTH, WIDTH), torch.arange(2)

    def forward(x):
        # The last rows come first, two rows an expert; padding rows all want expert 0.
        wanted = (x[:, 0] > 0).long()
        order = (wanted.unsqueeze(1) == expert_ids).long().flip(0).cumsum(0).flip(0)
        place = order.gather(1, wanted.unsqueeze(1))
        out = torch.einsum("te,teo->to", x, experts[wanted])
        return torch.where(place <= 2, out, x)

    return Scenario(forward)


@defect("rows mixed", "named")
def repeated_padding_in_a_mean(device):
    inputs = {"x": InputSpec(torch.float32, ("tokens", WIDTH), pad="repeat")}
    return Scenario(lambda x: x - x.mean(0), inputs)


@defect("rows mixed", "named")
def padding_that_makes_nan_for_all(device):
    def forward(x):
        # 0 / 0 in a padding row, and then a sum over rows.
        return x + 0.1 * (x / x.norm(dim=1, keepdim=True)).sum(0)

    return Scenario(forward)


@defect("rows mixed", "named")
def last_token_of_each_request(device):
    def forward(x, starts):
        # With padded requests the last one does not end at the last token.
        ends = torch.cat((starts[1:], starts.new_full((1,), x.shape[0])))
        return x + x[ends.clamp(max=x.shape[0]) - 1].sum(0)

    def values(step, rows, generator):
        return {
            "x": torch.randn(rows, WIDTH, generator=generator),
            "starts": torch.arange(rows, dtype=torch.int64),
        }

    return Scenario(forward, {"x": X, "starts": InputSpec(torch.int64, ("tokens",))}, values)


@defect("rows mixed", "named")
def rows_mixed_at_one_size_alone(device):
    # As by a kernel that is chosen by size; the first step of that size has no padding.
    return Scenario(lambda x: x - x.mean(0) if len(x) == 4 else x - 0)


@defect("rows mixed", "silent")
def rows_mixed_by_the_data_of_a_later_step(device):
    # As where experts run over only under load.
    def forward(x, load):
        crowded = (load.amax() > 5).float()
        return x - crowded * x.mean(0)

    def values(step, rows, generator):
        load = torch.full((rows,), float(step))
        return {"x": torch.randn(rows, WIDTH, generator=generator), "load": load}

    return Scenario(forward, {"x": X, "load": InputSpec(torch.float32, ("tokens",))}, values)


def cache_forward():
    """A forward that writes its rows to slots of a cache and adds the slots that are read."""
    cache, weight = torch.zeros(SLOTS, WIDTH), torch.randn(WIDTH, WIDTH)

    def forward(x, slots, table):
        cache.index_copy_(0, slots, x @ weight + 1)
        return x + cache[table].sum(1)

    return cache, forward


def cache_values(first_slot: int, late: int = 0):
    """Slots one after the other; from step `late` on slot 0, where the padding points, is read, and
    at that step written by the first row."""

    def values(step, rows, generator):
        slots = first_slot + (torch.arange(rows) + 8 * step) % (SLOTS - 8)
        if step == late:
            slots[0] = 0
        table = slots.unsqueeze(1).repeat(1, 2)
        if step >= late:
            table[:, 1] = 0
        return {
            "x": torch.randn(rows, WIDTH, generator=generator),
            "slots": slots,
            "table": table,
        }

    return values


CACHE_INPUTS = {
    "x": X,
    "slots": INDEX,
    "table": InputSpec(torch.int64, ("tokens", 2), pad=0, index=True),
}


@defect("index padding", "named")
def slot_padding_on_a_live_slot(device):
    _, forward = cache_forward()
    return Scenario(forward, CACHE_INPUTS, cache_values(0))


@defect("index padding", "silent")
def slot_padding_on_a_slot_that_is_live_later(device):
    _, forward = cache_forward()
    return Scenario(forward, CACHE_INPUTS, cache_values(1, late=7))


# Which of two writes of one row wins is not determined on a GPU.
@defect("index padding", "named", devices=("cpu",))
def padding_that_counts_from_the_end(device):
    # -1 is the last row for torch, and that one is live.
    cache, weight = torch.zeros(8, WIDTH), torch.randn(WIDTH, WIDTH)

    def forward(x, slots):
        cache.index_put_((slots,), x @ weight + 1)
        return x + cache.sum(0)

    def values(step, rows, generator):
        slots = torch.randperm(8, generator=generator)
        slots = torch.cat((slots[slots == 7], slots[slots != 7]))[:rows]
        return {"x": torch.randn(rows, WIDTH, generator=generator), "slots": slots}

    inputs = {"x": X, "slots": InputSpec(torch.int64, ("tokens",), pad=-1, index=True)}
    return Scenario(forward, inputs, values)


@defect("index padding", "named")
def segment_ids_padded_with_a_live_segment(device):
    def forward(x, segments):
        total = torch.zeros(8, WIDTH, device=x.device).index_add_(0, segments, x + 1)
        return total[segments]

    def values(step, rows, generator):
        segments = torch.arange(rows) // 2
        return {"x": torch.randn(rows, WIDTH, generator=generator), "segments": segments}

    return Scenario(forward, {"x": X, "segments": INDEX}, values)


@defect("index padding", "named")
def histogram_with_padding_in_it(device):
    def forward(x, segments):
        counts = torch.zeros(8, device=x.device)
        counts.index_add_(0, segments, torch.ones(len(segments), device=x.device))
        return x / counts[segments].unsqueeze(1)

    def values(step, rows, generator):
        segments = torch.randint(0, 2, (rows,), generator=generator)
        segments[0] = 0
        return {"x": torch.randn(rows, WIDTH, generator=generator), "segments": segments}

    return Scenario(forward, {"x": X, "segments": INDEX}, values)
