"""The MLA example: its counts, its proof, and its attention against keys and values that exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from examples.mla_decode import measure
from examples.mla_decode.__main__ import main
from examples.mla_decode.host import Host, Workload
from examples.mla_decode.measure import Result, counted, run
from examples.mla_decode.model import EPS, PRESETS, MlaDecoder, MlaLayer, rotate
from graphrt import Batch
from graphrt.attention import SdpaAttention

TINY = PRESETS["tiny"]
Logits = list[tuple[dict[str, torch.Tensor], torch.Tensor]]


def work(**changes: int) -> Workload:
    plain = {"batch": 3, "steps": 4, "context": 20, "prompt": 6, "query_len": 1, "page_size": 8}
    return Workload(**{**plain, **changes})


def check(results: list[Result], work: Workload, layers: int) -> None:
    eager, withheld, declared = results
    assert [result.mode for result in results] == ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"]
    for result, served, dispatches, launches in (
        (eager, "NONE", layers, 0),
        (withheld, "PIECEWISE", layers, layers + 1),
        (declared, "FULL", 0, 1),
    ):
        assert result.difference is None
        assert {step.mode for step in result.steps} == {served}
        assert sum(step.attention_dispatches for step in result.steps) == dispatches * work.steps
        assert sum(step.graph_launches for step in result.steps) == launches * work.steps
        assert result.prompts.attention_dispatches == layers
    assert withheld.prompts.mode == declared.prompts.mode == "PIECEWISE"
    assert len(withheld.resolution) == 1 and "NEVER" in withheld.resolution[0]
    assert declared.resolution == ()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"batch": 1, "steps": 12, "context": 0}, marks=pytest.mark.long),
        pytest.param({"batch": 4, "query_len": 2}, marks=pytest.mark.long),
        # The prompts' size serves decode steps too: with fewer tokens than padded requests have.
        {"batch": 5, "query_len": 3, "prompt": 4},
    ],
    ids=str,
)
def test_the_mla_example_captures_attention_only_where_declared(changes: dict[str, int]) -> None:
    chosen = work(**changes)
    results = run(TINY, chosen, "cpu", "sdpa")
    check(results, chosen, TINY.layers)
    for result in results:
        assert result.tokens.shape == (chosen.batch, chosen.steps * chosen.query_len)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
def test_the_mla_example_captures_triton_attention_where_declared() -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    model, chosen = replace(TINY, layers=1), work(batch=1, steps=2, context=3, query_len=2)
    check(run(model, chosen, "cpu", "triton"), chosen, model.layers)


def test_the_mla_example_fails_if_a_replay_differs_from_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Drifting(SdpaAttention):
        def run(self, step: Any, query: Any, caches: Any, out: torch.Tensor) -> None:
            super().run(step, query, caches, out)
            out += self.dispatches  # type: ignore[attr-defined]

    monkeypatch.setattr(measure, "SdpaAttention", Drifting)
    assert main(["--device", "cpu", "--tokens", "2", "--prompt", "3"]) == 1


def test_the_mla_example_prints_the_mode_and_writes_counts_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mla.json"
    arguments = ["--device", "cpu", "--layers", "2", "--tokens", "3", "--json", str(path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "FULL_AND_PIECEWISE -> PIECEWISE (attention-decode)" in printed
    written = json.loads(path.read_text())
    steps = [result["steps"] for result in written["results"]]
    assert [sum(s["attention_dispatches"] for s in each) for each in steps] == [6, 6, 0]
    assert [sum(s["graph_launches"] for s in each) for each in steps] == [0, 9, 3]


def test_absorbed_mla_attention_equals_attention_with_explicit_keys_and_values() -> None:
    host = Host(TINY, work(context=0, query_len=2), "cpu")
    attention = counted(SdpaAttention, declared=True)(TINY.shape(host.work.page_size))
    steps: Logits = []
    with host.runner("FULL_AND_PIECEWISE", attention, None) as runner:
        runner.capture()

        def step(batch: Batch, inputs: dict[str, torch.Tensor], query_len: Any) -> torch.Tensor:
            logits = runner(batch, **inputs)
            steps.append((inputs, logits.clone()))
            return logits

        host.generate(step)
    for request in range(host.work.batch):
        ids, rows = (torch.cat(parts) for parts in zip(*rows_of(steps, request), strict=True))
        assert len(ids) == host.work.prompt_lens[request] + 2 * host.work.steps
        torch.testing.assert_close(rows, plain_logits(host.model, ids), rtol=1e-4, atol=1e-4)


def rows_of(steps: Logits, request: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The token ids of a request in each step, and their logits [tokens, vocab]."""
    for inputs, logits in steps:
        start, end = inputs["query_start_loc"][request : request + 2].tolist()
        yield inputs["input_ids"][start:end], logits[start:end]


def plain_logits(model: MlaDecoder, ids: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence, without a cache and without absorption."""
    cos, sin = model.rotations[:, : len(ids)]
    hidden = model.embedding[ids]
    for layer in model.layers:
        hidden = hidden + F.linear(plain_attention(layer, hidden, cos, sin), layer.out)
        normed = F.rms_norm(hidden, hidden.shape[1:], eps=EPS)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
        hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(F.rms_norm(hidden, hidden.shape[1:], eps=EPS), model.head)


def plain_attention(
    layer: MlaLayer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """[tokens, heads * value], by keys and values of every head."""
    config, tokens = layer.config, len(hidden)
    normed = F.rms_norm(hidden, hidden.shape[1:], eps=EPS)
    query = F.linear(normed, layer.query).view(tokens, config.heads, -1)
    latent, key_rope = F.linear(normed, layer.down_latent).split((config.rank, config.rope), 1)
    latent = F.rms_norm(latent, (config.rank,), eps=EPS)
    keys = torch.einsum("tr,hnr->htn", latent, layer.up_key)
    values = torch.einsum("tr,hrv->htv", latent, layer.up_value)
    key_rope = rotate(key_rope, cos, sin).expand(config.heads, -1, -1)
    query_rope = rotate(query[..., config.nope :], cos[:, None], sin[:, None])
    query = torch.cat((query[..., : config.nope], query_rope), dim=-1).transpose(0, 1)
    output = F.scaled_dot_product_attention(
        query, torch.cat((keys, key_rope), dim=-1), values, is_causal=True
    )
    return output.transpose(0, 1).flatten(1)
