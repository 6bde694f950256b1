"""A forward may assign an attribute the value it has; a different value is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphrt import GraphMode, GraphPool, GraphRunner, InputSpec, Reason
from graphrt.compile import (
    CompileOptions,
    ReassignedStateError,
    RetraceError,
    compile_module,
)
from tests.models.families import VOCAB


class Flags:
    def __init__(self) -> None:
        self.updated, self.flag = {0: True}, True


class Holding(nn.Module):
    """Python state of each kind, which `line` writes."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.updated = {0: True, 1: True}
        self.numbers = [3, 4.5]
        self.names = {"a", "b"}
        self.pair = (1, "b")
        self.zero = 0.0
        self.tensors = {"a": torch.ones(4)}
        self.several = [torch.ones(4)]
        self.inner = {"x": {"y": 1}}
        self.held = Flags()
        namespace: dict[str, Any] = {}
        exec(f"def forward(self, x):\n    {line}\n    return x + 1", namespace)
        self.forward = namespace["forward"].__get__(self)


SAME = (
    "self.updated[0] = True",
    "self.updated.update({0: True})",
    "kept = self.updated.pop(1); self.updated[1] = kept",
    "self.numbers[0] = 3",
    "kept = self.numbers[1]; self.numbers[1] = 7; self.numbers[1] = kept",
    "self.names.add('a')",
    "self.pair = (1, 'b')",
    "self.tensors['a'] = self.tensors['a']",
    "self.several[0] = self.several[0]",
    "self.inner['x']['y'] = 1",
    "self.held.updated[0] = True",
    "self.held.flag = True",
)
OTHER = (
    "self.updated[0] = False",
    "self.updated[0] = 1",
    "self.updated[2] = True",
    "del self.updated[1]",
    "self.numbers[0] += 1",
    "self.numbers.append(1)",
    "self.numbers.reverse()",
    "self.names.add('c')",
    "self.pair = (2, 'b')",
    "self.zero = -0.0",
    "self.tensors['a'] = x",
    "self.several[0] = self.several[0] + 1",
    "self.inner['x']['y'] = 2",
    "self.held.updated[0] = False",
)


@pytest.mark.parametrize("line", SAME)
def test_a_forward_that_assigns_the_current_value_of_an_attribute_compiles(line):
    compiled = compile_module(Holding(line), ["x"], in_place=False)
    x = torch.randn(3, 4)
    for _ in range(2):
        assert torch.equal(compiled(x), x + 1)


@pytest.mark.parametrize("line", OTHER)
def test_a_forward_that_assigns_a_different_value_to_an_attribute_is_refused(line):
    compiled = compile_module(Holding(line), ["x"], in_place=False)
    with pytest.raises(ReassignedStateError, match="module"):
        compiled(torch.randn(3, 4))


@pytest.mark.parametrize("line", ["self.updated[0] = True", "self.held.flag = True"])
def test_an_attribute_that_a_forward_assigns_must_keep_that_value_between_calls(line):
    module = Holding(line)
    compiled = compile_module(module, ["x"], in_place=False)
    x = torch.randn(3, 4)
    compiled(x)
    module.updated[0] = module.held.flag = False
    with pytest.raises(RetraceError, match="False"):
        compiled(x)
    module.updated[0] = module.held.flag = True
    assert torch.equal(compiled(x), x + 1)


IN_PLACE = (
    "self.count += 1",
    "self.count *= x.mean() + 1",
    "self.count = self.count.add_(1)",
    "kept = self.count; kept += 1; self.count = kept",
    "self.plain -= 1",
    "self.tensors['a'] += 1",
    "self.several[0] += 1",
    "self.held.kept += 1",
)


class Counting(Holding):
    """A buffer, and tensors in other places, to which `line` writes."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.register_buffer("count", torch.zeros(4))
        self.plain, self.held.kept = torch.zeros(4), torch.zeros(4)
        namespace: dict[str, Any] = {}
        lines = [
            "def forward(self, x):",
            line,
            "y = x + self.count + self.plain + self.tensors['a']",
            "return y + self.several[0] + self.held.kept",
        ]
        exec("\n    ".join(lines), namespace)
        self.forward = namespace["forward"].__get__(self)


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("line", IN_PLACE)
def test_an_in_place_operator_that_assigns_the_same_tensor_compiles(line, in_graphs):
    module, eager = Counting(line), Counting(line)
    compiled = compile_module(module, ["x"], in_place=False)
    run = compiled
    if in_graphs:
        inputs = {"x": InputSpec(torch.float32, ("tokens", 4))}
        runner = GraphRunner(compiled, mode="FULL", sizes=[4], inputs=inputs, platform="cpu")
        runner.capture()

        def run(x):
            return runner(x=x)

    kept = module.count, module.plain, module.tensors["a"], module.several[0], module.held.kept
    for _ in range(3):
        x = torch.ones(4, 4)
        assert torch.equal(run(x), eager(x))
    now = module.count, module.plain, module.tensors["a"], module.several[0], module.held.kept
    assert all(was is each for was, each in zip(kept, now, strict=True))


@pytest.mark.parametrize(
    "line",
    [
        "self.count = self.count + 1",
        "self.count += 1; self.count = self.count + 1",
        "self.count = self.count.view(4)",
        "self.count, self.plain = self.plain, self.count",
    ],
)
def test_another_tensor_in_the_attribute_of_one_is_refused(line):
    compiled = compile_module(Counting(line), ["x"], in_place=False)
    with pytest.raises(ReassignedStateError, match="count"):
        compiled(torch.randn(4, 4))


STEPS, ROWS = 6, 2


class Whisper(nn.Module):
    """A decoder, and a cache whose flags its cross attention writes at every step."""

    def __init__(self) -> None:
        super().__init__()
        import transformers
        from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

        config = transformers.WhisperConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = transformers.WhisperForConditionalGeneration(config).eval()
            self.register_buffer("heard", torch.randn(ROWS, 8, 32))
        layers = [[StaticLayer(max_cache_len=n) for _ in range(2)] for n in (32, 8)]
        self.cache = EncoderDecoderCache(*(Cache(layers=each) for each in layers))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        outputs = self.model(
            encoder_outputs=(self.heard,),
            decoder_input_ids=input_ids[:, None],
            decoder_position_ids=self.position[None],
            past_key_values=self.cache,
        )
        self.position.add_(1)
        return outputs.logits[:, -1]


@pytest.mark.parametrize("mode", [pytest.param("FULL", marks=pytest.mark.long), "PIECEWISE"])
def test_a_whisper_decoder_is_compiled_and_served_by_graphs(mode):
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, twin, pool = Whisper(), Whisper(), GraphPool("cpu")
    tokens = torch.tensor([5, 7])
    with torch.no_grad():
        assert torch.equal(model(tokens), twin(tokens))  # fills the cross attention's cache
    whole = {"splitting_ops": ()} if mode == "FULL" else {}
    compile_module(model, {}, pool=pool, options=CompileOptions(backend="eager", **whole))
    with GraphRunner(
        model,
        mode=mode,
        sizes=[ROWS],
        inputs={"input_ids": InputSpec(torch.int64, ("tokens",))},
        outputs=("tokens", VOCAB),
        pool=pool,
    ) as runner:
        runner.capture()
        for step in range(STEPS):
            tokens = tokens + step + 1
            with torch.no_grad():
                expected = twin(tokens)
            torch.testing.assert_close(runner(input_ids=tokens), expected)
            assert runner.last_dispatch.reason is Reason.HIT
            assert runner.last_dispatch.mode is GraphMode.parse(mode)
