"""The decoder: paged, batched and padded steps equal one full-sequence forward."""

from __future__ import annotations

import pytest
import torch

from graphrt.demo import Decoder, load_checkpoint, new_cache
from tests.demo.tiny_checkpoints import (
    CONFIGS,
    decoder_config,
    random_weights,
    reference_logits,
    write,
)

PAGE, BLOCKS = 4, 8


def build(raw):
    weights = random_weights(raw)
    config = decoder_config(raw)
    decoder = Decoder(config, weights, PAGE * BLOCKS)
    return decoder, weights, new_cache(config, 2 * BLOCKS + 1, PAGE, decoder.embedding)


def step(decoder, cache, rows, pad_tokens=0, pad_reqs=0):
    """`rows` are (ids, first position, pages); padding as the runner does it."""
    ids, positions, slots, table, starts = [], [], [], [], [0]
    for row_ids, first, pages in rows:
        span = range(first, first + len(row_ids))
        ids += row_ids
        positions += span
        slots += [pages[p // PAGE] * PAGE + p % PAGE for p in span]
        table.append((pages + [0] * BLOCKS)[:BLOCKS])
        starts.append(len(ids))
    padding = [0] * pad_tokens
    return decoder(
        cache,
        input_ids=torch.tensor(ids + padding),
        positions=torch.tensor(positions + padding),
        slot_mapping=torch.tensor(slots + padding),
        block_table=torch.tensor(table + [[0] * BLOCKS] * pad_reqs),
        query_start_loc=torch.tensor(starts + starts[-1:] * pad_reqs, dtype=torch.int32),
    )[: len(rows)]


IDS = [5, 9, 250, 17, 17, 3, 88, 120, 4, 299, 0, 42, 7]
OTHER = [11, 12, 13, 200, 1, 77]


@pytest.mark.parametrize("name", CONFIGS)
def test_decoder_logits_equal_the_reference_at_every_prefix_length(name):
    decoder, weights, cache = build(CONFIGS[name])
    expected = reference_logits(CONFIGS[name], weights, IDS)
    for length in (1, 2, 6, len(IDS)):
        got = step(decoder, cache.zero_(), [(IDS[:length], 0, [3, 1, 5, 2])])
        torch.testing.assert_close(got[0].double(), expected[length - 1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_chunked_prefill_and_decode_equal_the_reference(name, chunk):
    decoder, weights, cache = build(CONFIGS[name])
    expected = reference_logits(CONFIGS[name], weights, IDS)
    pages = [7, 2, 4, 6]
    for first in range(0, len(IDS), chunk):
        ids = IDS[first : first + chunk]
        got = step(decoder, cache, [(ids, first, pages)], pad_tokens=2, pad_reqs=1)
        want = expected[first + len(ids) - 1]
        torch.testing.assert_close(got[0].double(), want, rtol=1e-3, atol=1e-3)


def test_a_padded_mixed_batch_equals_the_reference_and_leaves_other_pages():
    raw = CONFIGS["qwen3"]
    decoder, weights, cache = build(raw)
    first, second = (reference_logits(raw, weights, ids) for ids in (IDS, OTHER))
    step(decoder, cache, [(IDS[:-1], 0, [1, 3, 5, 7])])
    step(decoder, cache, [(OTHER[:2], 0, [2, 4])])
    decode, chunk = (IDS[-1:], len(IDS) - 1, [1, 3, 5, 7]), (OTHER[2:], 2, [2, 4])
    unpadded, padded = cache.clone(), cache.clone()
    plain = step(decoder, unpadded, [decode, chunk])
    got = step(decoder, padded, [decode, chunk], pad_tokens=3, pad_reqs=3)
    torch.testing.assert_close(got[0].double(), first[-1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[1].double(), second[-1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(plain, got, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(unpadded[:, :, 1:], padded[:, :, 1:], rtol=1e-4, atol=1e-4)
    assert torch.equal(padded[:, :, 8:], cache[:, :, 8:])


def test_a_batch_of_padding_alone_gives_finite_logits():
    decoder, _, cache = build(CONFIGS["llama"])
    zeros = torch.zeros(8, dtype=torch.int64)
    out = decoder(
        cache, input_ids=zeros, positions=zeros, slot_mapping=zeros,
        block_table=torch.zeros(4, BLOCKS, dtype=torch.int64),
        query_start_loc=torch.zeros(5, dtype=torch.int32),
    )  # fmt: skip
    assert out.shape == (4, 300) and out.isfinite().all()
    assert not cache[:, :, 1:].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_demo_logits_equal_those_of_transformers(name, tmp_path):
    reason = "transformers is not installed: reference_logits, written apart, stands in for it"
    transformers = pytest.importorskip("transformers", reason=reason)
    write(tmp_path, CONFIGS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = load_checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.weights, PAGE * BLOCKS)
    cache = new_cache(checkpoint.config, BLOCKS + 1, PAGE, decoder.embedding)
    got = step(decoder, cache, [(IDS, 0, [1, 2, 3, 4])])
    with torch.no_grad():
        want = theirs(torch.tensor([IDS])).logits[0, -1]
    torch.testing.assert_close(got[0], want, rtol=1e-3, atol=1e-3)
