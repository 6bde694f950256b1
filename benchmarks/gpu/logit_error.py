"""Are replays equal to eager at the padded size, and how far is that from eager without padding?

    python3 -m benchmarks.gpu.logit_error [--model 1b] [--batches 300] [--json FILE]

Every batch from 1 to the largest runs three times on the same inputs: by graph, eagerly with the
same padding (must be equal bit for bit), and eagerly without padding, whose other matrix shapes
mean other kernels: that is the logit error, given by the size that serves the batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from benchmarks.common import arguments, environment, finish, show
from benchmarks.llama import CONFIGS, Llama
from graphrt import Batch
from graphrt.core.plan.sizes import capture_sizes


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="1b", choices=sorted(CONFIGS))
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args()
    machine = environment(options.device)
    largest, results = options.batches, {}
    model = Llama(
        CONFIGS[options.model], max_batch=largest, context=options.context, device=options.device
    )
    sizes = list(capture_sizes(max_num_reqs=largest, max_num_tokens=largest).mixed)
    for mode in ("FULL_DECODE_ONLY", "PIECEWISE"):
        with model.runner(mode, sizes) as runner:
            runner.capture()
            results[mode] = compared(model, runner, range(1, largest + 1))
        show(
            f"{options.model}, {mode}: error against unpadded eager",
            ["size", "batches", "not equal to padded", "max", "rms", "rms of logits", "argmax %"],
            [
                [
                    row["size"],
                    row["batches"],
                    row["not_equal_to_padded_eager"],
                    row["max_error"],
                    row["rms_error"],
                    row["rms_logits"],
                    row["argmax_differs_percent"],
                ]
                for row in results[mode]
            ],
        )
        unequal = sum(row["not_equal_to_padded_eager"] for row in results[mode])
        print(f"{largest} batches, {unequal} differ from eager at the same padded size")
    finish("logit_error", options, machine, results)


@torch.no_grad()
def compared(model: Llama, runner: Any, batches: range) -> list[dict[str, float]]:
    """One row for each captured size that served a batch."""
    found: dict[int, list[tuple[bool, torch.Tensor, torch.Tensor]]] = defaultdict(list)
    device = model.embedding.device
    for tokens in batches:
        values, batch = model.inputs(tokens), Batch(tokens, tokens, 1)
        replayed = runner(batch, **values).clone()
        hit = runner.last_dispatch
        assert hit.slot >= 0, hit
        padded = runner.run_padded_eagerly(batch, hit, values)
        equal = torch.equal(replayed, padded)
        eager = model(**{name: value.to(device) for name, value in values.items()})
        apart = (replayed.float() - eager.float()).abs()
        figures = torch.stack(
            (
                apart.max(),
                apart.square().mean(),
                eager.float().square().mean(),
                (replayed.argmax(-1) != eager.argmax(-1)).float().sum(),
            )
        )
        found[hit.descriptor.num_tokens].append((equal, figures, torch.tensor(tokens)))
    rows = []
    for size, seen in sorted(found.items()):
        figures = torch.stack([figures for _, figures, _ in seen]).double().cpu()
        tokens = sum(int(count) for _, _, count in seen)
        rows.append(
            {
                "size": size,
                "batches": len(seen),
                "not_equal_to_padded_eager": sum(not equal for equal, _, _ in seen),
                "max_error": figures[:, 0].max().item(),
                "rms_error": figures[:, 1].mean().sqrt().item(),
                "rms_logits": figures[:, 2].mean().sqrt().item(),
                "argmax_differs_percent": 100 * figures[:, 3].sum().item() / tokens,
            }
        )
    return rows


if __name__ == "__main__":
    main()
