"""Models of transformers decode the tokens of eager, with nothing declared but their input; what a
graph cannot follow is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt import Reason
from tests.draws import on_devices, rest_long
from tests.models import families
from tests.models.caches import full_length_cache, growing_cache, ring_cache
from tests.models.families import CLEAN, FAMILIES, ROPES, SLIDING, STEPS, WINDOW, Decoder, Outcome

pytest.importorskip("transformers", reason="transformers is not installed: no models to decode")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
CACHES = {"full length": full_length_cache, "ring": ring_cache}


def check_tokens(outcome: Outcome) -> None:
    assert outcome.equal == outcome.steps, outcome
    assert outcome.worst < 1e-3
    assert outcome.distinct > 2 * families.BATCH


def check_clean(outcome: Outcome, steps: int = STEPS) -> None:
    check_tokens(outcome)
    assert outcome.findings == []
    assert outcome.reasons == {Reason.HIT: 2 * steps}
    assert outcome.captured == 1


# To a graph all of them are one kind of model, but for experts.
@pytest.mark.parametrize(("name", "device"), on_devices(CLEAN, "llama", "qwen3_moe"))
def test_two_sequences_decode_as_in_eager_without_warnings(name, device):
    check_clean(families.decode(name, device))


# A step costs a trial: few of them for `make test`.
@pytest.mark.parametrize(("name", "device"), on_devices(CLEAN, "llama", "mixtral"))
def test_two_sequences_decode_without_warnings_at_level_always(name, device):
    steps = 8 if device == "cpu" else STEPS
    check_clean(families.decode(name, device, check="always", steps=steps), steps)


@pytest.mark.parametrize(("name", "device"), on_devices(CLEAN, "llama"))
def test_a_graph_captured_before_the_first_prompt_leaves_the_cache_empty(name, device):
    check_clean(families.decode(name, device, capture_first=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_that_grows_is_named_before_it_gives_a_wrong_token(device):
    outcome = families.decode("llama", device, new_cache=growing_cache)
    assert outcome.findings, outcome
    assert outcome.equal == outcome.steps, outcome


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_that_follow_the_length_are_right_or_refused_with_their_line(name, device):
    outcome = families.decode(name, device)
    if not outcome.findings:
        check_clean(outcome)
        return
    assert "modeling_rope_utils.py" in " ".join(outcome.findings), outcome.findings
    assert outcome.equal == outcome.steps, outcome


@pytest.mark.parametrize("prompt_length", [WINDOW - 3, WINDOW + 4], ids=["filling", "full"])
@pytest.mark.parametrize(("name", "device"), on_devices(SLIDING, "gemma2"))
def test_a_sliding_cache_decodes_as_in_eager_or_is_named(name, prompt_length, device):
    outcome = families.decode(name, device, prompt_length=prompt_length)
    if not outcome.findings:
        check_clean(outcome)
        return
    # A full layer makes an index of a Python number: no GPU captures that, and the line is named.
    names = [FAMILIES[name].moving] + ["cache_utils.py"] * (device == "cuda")
    assert any(each in " ".join(outcome.findings) for each in names), outcome.findings
    assert outcome.equal == outcome.steps, outcome


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("name", "device"), on_devices(SLIDING, "gemma2"))
def test_a_sliding_window_kept_in_tensors_decodes_without_warnings(name, cache, device):
    check_clean(families.decode(name, device, new_cache=CACHES[cache]))


def eager_logits(name: str, new_cache: Any, length: int) -> torch.Tensor:
    """Of a prompt and of 12 tokens after it, the same ones for every cache."""
    decoder = Decoder(name, "cpu", new_cache)
    prompts = families.prompts_of(0, length + 12, "cpu")
    logits = [decoder.prefill(prompts[:, :length])]
    logits += [decoder.forward(tokens) for tokens in prompts[:, length:].unbind(1)]
    return torch.stack(logits)


@pytest.mark.parametrize("length", [WINDOW - 3, WINDOW, WINDOW + 4])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", rest_long(SLIDING, "gemma2"))
def test_a_sliding_window_kept_in_tensors_equals_the_window_of_the_model(name, cache, length):
    own = eager_logits(name, None, length)
    torch.testing.assert_close(eager_logits(name, CACHES[cache], length), own, rtol=1e-4, atol=1e-4)
