"""The recipes of docs/how-to/: a bound for the query length, a variant for the longest context."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphrt import Batch, GraphMode, GraphRunner, Reason
from tests.test_readme import blocks


def all_names_of(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block.code, page, "exec"), names)
    return names


def names_of(page: str) -> dict[str, Any]:
    names = all_names_of(page)
    names["keys"][1:].normal_()
    names["values"][1:].normal_()
    return names


def alone(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the last tokens of one request: [tokens, heads, dim] of each."""
    query, keys, values = (each.transpose(0, 1) for each in (query, keys, values))
    rows, context = query.shape[1], keys.shape[1]
    seen = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen).transpose(0, 1)


class MixedLengths:
    """The page of query lengths, and steps for its runner."""

    def __init__(self) -> None:
        self.names = names_of("docs/how-to/query_lengths.md")
        self.runner = self.names["runner"]

    def step(self, lengths: list[int], cached: list[int]) -> None:
        """Its tokens are those of each request alone, whichever graph it takes."""
        page, pages = self.names["PAGE"], self.names["PAGES"]
        reqs, counts = len(lengths), torch.tensor(lengths)
        ends = counts.cumsum(0)
        table = 1 + torch.randperm(32)[: reqs * pages].view(reqs, pages)
        owner = torch.arange(reqs).repeat_interleave(counts)
        places = torch.cat([torch.arange(c, c + n) for n, c in zip(lengths, cached, strict=True)])
        qkv = torch.randn(sum(lengths), 3, self.names["HEADS"], self.names["DIM"])
        out = self.runner(
            Batch(sum(lengths), reqs, bounds=(max(lengths),)),
            qkv=qkv,
            slots=table[owner, places // page] * page + places % page,
            block_table=table,
            context_lens=torch.tensor(cached) + counts,
            query_start_loc=F.pad(ends, (1, 0)),
        )
        for row, (length, before, end) in enumerate(zip(lengths, cached, ends, strict=True)):
            context = [
                self.names[cache][table[row]].flatten(0, 1)[: before + length]
                for cache in ("keys", "values")
            ]
            live = slice(int(end) - length, int(end))
            torch.testing.assert_close(out[live], alone(qkv[live, 0], *context))


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> MixedLengths:
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    return MixedLengths()


def test_one_graph_serves_all_query_lengths_up_to_its_bound(mixed: MixedLengths):
    slots = set()
    for lengths in ([1, 3, 2, 4], [4, 4, 4], [3, 3, 3], [2, 4, 3], [4, 1, 4, 1]):
        mixed.step(lengths, [20, 0, 7, 3][: len(lengths)])
        dispatch = mixed.runner.last_dispatch
        assert (dispatch.reason, dispatch.mode) == (Reason.HIT, GraphMode.FULL)
        slots.add(dispatch.slot)
    assert len(slots) == 1


def test_a_step_without_proposals_takes_the_graph_of_one_token_a_request(mixed: MixedLengths):
    mixed.step([1, 1, 1], [4, 5, 0])
    assert mixed.runner.last_dispatch.descriptor.bounds == (1,)


def test_a_query_above_the_bound_runs_eagerly_with_right_tokens(mixed: MixedLengths):
    mixed.step([5, 1], [2, 9])
    assert mixed.runner.last_dispatch.reason is Reason.NO_GRAPH


def test_steps_of_several_depths_beside_a_schedule_take_the_graph_of_their_bound(
    mixed: MixedLengths,
):
    """Up to two requests verify four tokens, up to four two; some propose fewer."""
    page = mixed
    page.runner = GraphRunner(
        page.names["decode"],
        mode="FULL",
        query_lens={2: [4], 4: [2]},
        bounds=[(2,), (4,)],
        inputs=page.runner.inputs.declared.specs,
        outputs=("tokens", page.names["HEADS"], page.names["DIM"]),
        platform="cpu",
    )
    page.runner.capture()
    assert page.runner.plan.sizes.general == (1, 2, 4, 8)
    for lengths in ([4, 4], [4, 1], [3], [2, 2, 2, 2], [2, 1, 2, 2], [1, 1, 1]):
        page.step(lengths, [3, 0, 7, 20][: len(lengths)])
        dispatch = page.runner.last_dispatch
        assert (dispatch.reason, dispatch.mode) == (Reason.HIT, GraphMode.FULL)
        assert dispatch.descriptor.bounds == ((2,) if max(lengths) <= 2 else (4,))


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
def test_random_steps_of_mixed_query_lengths_all_hit_and_equal_eager(mixed: MixedLengths):
    chosen = random.Random(0)
    for _ in range(60):
        lengths = [chosen.randint(1, 4) for _ in range(chosen.randint(1, 4))]
        mixed.step(lengths, [chosen.randint(0, 20) for _ in lengths])
        assert mixed.runner.last_dispatch.reason is Reason.HIT


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize(
    ("longest", "variant"), [(1, "short"), (128, "short"), (129, "long"), (1024, "long")]
)
def test_the_longest_context_picks_the_kernel_and_tokens_are_those_of_eager(
    longest: int, variant: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    names = names_of("docs/how-to/long_contexts.md")
    for reqs in (1, 3, 8):
        lens = [min(longest, 1 + 40 * n) for n in range(1, reqs)] + [longest]
        rows, qkv = 1 + torch.randperm(8)[:reqs], torch.randn(reqs, 3, names["DIM"])
        out = names["runner"](names["batch_of"](lens), qkv=qkv, rows=rows, lens=torch.tensor(lens))
        dispatch = names["runner"].last_dispatch
        assert (dispatch.reason, dispatch.descriptor.variant) == (Reason.HIT, variant)
        for row, length, query, got in zip(rows, lens, qkv[:, :1], out, strict=True):
            context = (names[each][row, :length, None] for each in ("keys", "values"))
            torch.testing.assert_close(got[None, None], alone(query[:, None], *context))


# Encoders packed by a budget ----------------------------------------------------------------------


@pytest.mark.filterwarnings("error::graphrt.errors.GraphQuarantinedWarning")
def test_pictures_and_videos_of_random_sizes_packed_into_buckets_are_those_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setenv("GRAPHRT_PLATFORM", "cpu")
    names, chosen = all_names_of("docs/how-to/encoders.md"), random.Random(0)
    tower, runner = names["tower"], names["runner"]
    with torch.no_grad():
        # Initial weights are too small for one picture to show in another.
        for weight in tower.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.flatten(1).shape[1] ** -0.5)
        for step in range(30):
            sides = [1 + chosen.randrange(2 if step % 5 == 0 else 1) for _ in range(2)]
            grids = torch.tensor(
                [[each, *(2 * chosen.randint(1, 5) for _ in range(2))] for each in sides]
            )
            pixels = [torch.randn(int(grid.prod()), names["PATCH"]) for grid in grids]
            inputs, back = names["inputs_of"](torch.cat(pixels), grids)
            tower.config._attn_implementation = "flash_by_ends"
            ends = inputs["pictures"]
            ours = runner(Batch(len(back), len(ends) - 1), **inputs)[back]
            assert runner.last_dispatch.reason is (
                Reason.HIT if len(back) <= 64 else Reason.TOO_LARGE
            )
            tower.config._attn_implementation = "sdpa"
            theirs = [tower(p, g[None]).pooler_output for p, g in zip(pixels, grids, strict=True)]
            torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-3, atol=1e-4)


def test_packing_puts_each_picture_into_one_batch_within_the_budget():
    pytest.importorskip("transformers", reason="transformers is not installed")
    packed = all_names_of("docs/how-to/encoders.md")["packed"]
    chosen = random.Random(0)
    for _ in range(50):
        sides = [[2 * chosen.randint(1, 8) for _ in range(2)] for _ in range(chosen.randint(1, 9))]
        grids = torch.tensor([[1, *each] for each in sides])
        batches = packed(grids)
        assert sorted(index for batch in batches for index in batch) == [*range(len(grids))]
        tokens = [int(grids[batch].prod(1).sum()) // 4 for batch in batches]
        assert all(each <= 64 for each in tokens) and all(len(batch) <= 4 for batch in batches)
