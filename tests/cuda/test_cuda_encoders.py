"""The page of packed encoders on a GPU, with torch's attention of variable lengths."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphrt import Batch, GraphRunner, InputSpec, Reason
from tests.test_readme import blocks

pytestmark = pytest.mark.cuda


def test_pictures_packed_into_buckets_by_varlen_attention_are_those_alone():
    pytest.importorskip("transformers", reason="transformers is not installed")
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch has no varlen_attn")
    names: dict[str, Any] = {}
    first, _ = blocks("docs/how-to/encoders.md")
    exec(compile(first.code.partition("runner = ")[0], "encoders.md", "exec"), names)
    # Kernels of attention take heads of 32 and more in half precision.
    config = names["config"]
    config.hidden_size, config.num_heads = 128, 2
    # The page has set it to its own attention, which a model that is made looks up in the hub.
    config._attn_implementation = "sdpa"
    tower = names["qwen"].Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    names["tower"] = tower.to("cuda", torch.bfloat16)

    def by_kernel(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        ends, longest = given["cu_seq_lens_q"].int(), given["max_length_q"]
        qkv = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        return varlen.varlen_attn(*qkv, ends, ends, longest, longest)[None], None

    names["transformers"].AttentionInterface.register("flash_by_ends", by_kernel)
    tokens = ("tokens", names["UNIT"])
    with (
        torch.no_grad(),
        GraphRunner(
            names["encode"],
            mode="FULL",
            sizes=[16, 32, 64],
            max_num_reqs=4,
            inputs={
                "patches": InputSpec(torch.bfloat16, (*tokens, names["PATCH"])),
                "positions": InputSpec(torch.int64, (*tokens, 2)),
                "pictures": InputSpec(torch.int64, ("reqs+1",), pad="repeat"),
                "windows": InputSpec(torch.int64, ("tokens+1",), pad="repeat"),
            },
            outputs=("tokens", config.out_hidden_size),
            platform="cuda",
        ) as runner,
    ):
        tower.config._attn_implementation = "flash_by_ends"
        runner.capture()
        chosen = random.Random(0)
        for _ in range(30):
            counts = range(chosen.randint(1, 3))
            grids = torch.tensor([[1, *(2 * chosen.randint(1, 4) for _ in "hw")] for _ in counts])
            pixels = torch.randn(int(grids.prod(1).sum()), names["PATCH"]).bfloat16()
            inputs, back = names["inputs_of"](pixels, grids)
            tower.config._attn_implementation = "flash_by_ends"
            ours = runner(Batch(len(back), len(grids)), **inputs)[back.cuda()].float()
            assert runner.last_dispatch is not None
            assert runner.last_dispatch.reason is Reason.HIT
            tower.config._attn_implementation = "sdpa"
            theirs = tower(pixels.cuda(), grids.cuda()).pooler_output.float()
            torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)
