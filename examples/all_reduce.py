"""Two ranks decode with half of every layer each: an all-reduce after attention, one after the MLP.

python3 examples/all_reduce.py [FULL | PIECEWISE] prints for each rank whether every decoded step
equals the same padded step run eagerly, bit for bit, whether both ranks decode the same tokens, and
the microseconds of a step. With two GPUs all-reduces are in the graphs, over NCCL; in PIECEWISE
attention runs between them. Without, the ranks are on the CPU over gloo, in PIECEWISE alone, and
all-reduces are eager parts too.
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from graphrt import Batch, GraphRunner, InputSpec, eager_break
from graphrt.errors import VerificationError

RANKS, LAYERS, HIDDEN, HEADS, VOCABULARY = 2, 4, 256, 8, 1000
SEQUENCES, LENGTH = 8, 32
ROW = "{:<6}{:<11}{:<9}{:>9}{:>9}"


def sum_over_ranks(hidden):
    dist.all_reduce(hidden)
    return hidden


class Decoder:
    """The half of one rank: its heads, its part of each MLP, and its KV cache."""

    def __init__(self, rank, device, mode):
        def weights(seed, *sizes):
            generator = torch.Generator().manual_seed(seed)
            return (torch.randn(sizes, generator=generator) / sizes[0] ** 0.5).to(device)

        half = HIDDEN // RANKS
        mine = slice(rank * half, (rank + 1) * half)
        self.table = weights(1, VOCABULARY, HIDDEN)
        self.layers = []
        for layer in range(LAYERS):
            qkv = weights(10 + layer, HIDDEN, 3, HIDDEN)[..., mine].reshape(HIDDEN, -1)
            out = weights(20 + layer, HIDDEN, HIDDEN)[mine]
            up = weights(30 + layer, HIDDEN, 4 * HIDDEN)[:, 4 * mine.start : 4 * mine.stop]
            down = weights(40 + layer, 4 * HIDDEN, HIDDEN)[4 * mine.start : 4 * mine.stop]
            self.layers.append([each.contiguous() for each in (qkv, out, up, down)])
        # The last row is what padding writes.
        self.cache = torch.zeros(LAYERS, 2, SEQUENCES + 1, LENGTH, half, device=device)
        self.attend = eager_break(self.attention) if mode == "PIECEWISE" else self.attention
        self.sum = sum_over_ranks if device == "cuda" else eager_break(sum_over_ranks)

    def attention(self, qkv, positions, rows, layer):
        query, key, value = qkv.chunk(3, dim=-1)
        keys, values = self.cache[layer]
        keys.index_put_((rows, positions), key)
        values.index_put_((rows, positions), value)
        shape = (len(rows), LENGTH, HEADS // RANKS, -1)
        keys, values = keys[rows].view(shape), values[rows].view(shape)
        scores = torch.einsum("bhd,blhd->bhl", query.view(len(rows), HEADS // RANKS, -1), keys)
        later = torch.arange(LENGTH, device=rows.device) > positions[:, None]
        weights = scores.masked_fill(later[:, None], float("-inf")).softmax(dim=-1)
        return torch.einsum("bhl,blhd->bhd", weights, values).reshape(len(rows), -1)

    def __call__(self, tokens, positions, rows):
        hidden = self.table[tokens]
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            attended = self.attend(hidden @ qkv, positions, rows, layer)
            hidden = hidden + self.sum(attended @ out)
            hidden = hidden + self.sum(torch.relu(hidden @ up) @ down)
        return hidden @ self.table.T


def decode(step, device):
    """Greedy tokens of all sequences; one after the other ends, so that batches get smaller."""
    tokens = torch.arange(1, SEQUENCES + 1, device=device)
    decoded = [tokens]
    for position in range(LENGTH):
        live = max(SEQUENCES * (LENGTH - position) // LENGTH, 1)
        rows = torch.arange(live, device=device)
        positions = torch.full_like(rows, position)
        logits = step(Batch(live, live, 1), tokens=tokens[:live], positions=positions, rows=rows)
        tokens = logits.argmax(dim=-1)
        decoded.append(tokens)
    return torch.cat(decoded).tolist()


def timed(step, device):
    """Microseconds of a step, and the tokens."""
    decode(step, device)
    start = time.perf_counter()
    decoded = decode(step, device)
    return round(1e6 * (time.perf_counter() - start) / LENGTH), decoded


def run_rank(rank, mode, store):
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.set_grad_enabled(False)
    forward = Decoder(rank, device, mode)
    ids = InputSpec(torch.int64, ("tokens",))
    inputs = {
        "tokens": ids,
        "positions": ids,
        "rows": InputSpec(torch.int64, ("tokens",), index=True, pad=SEQUENCES),
    }
    sizes, outputs = [1, 2, 4, 8], ("tokens", VOCABULARY)
    # Graphs hold the communicator: the runner is closed before the group is destroyed.
    with GraphRunner(
        forward, mode=mode, sizes=sizes, inputs=inputs, outputs=outputs, platform=device
    ) as runner:
        runner.capture()
        result = "equal"
        try:
            # Each step, by its graph and eagerly with the same padding.
            verified = decode(runner.verify, device)
        except VerificationError as error:
            result, verified = "differs", str(error)
        graph_us, decoded = timed(runner, device)
        eager_us, _ = timed(lambda batch, **values: forward(**values), device)
        ran = runner.last_dispatch.mode.name
    table = [None] * RANKS
    dist.all_gather_object(table, (verified, decoded))
    if any(each != (verified, verified) for each in table):
        result = "differs"
    row = ROW.format(rank, ran, result, eager_us, graph_us)
    dist.all_gather_object(table, row)
    dist.destroy_process_group()
    if rank == 0:
        print(ROW.format("rank", "mode", "result", "eager us", "graph us"), *table, sep="\n")
        sys.exit(any("differs" in each for each in table))


if __name__ == "__main__":
    has_gpus = torch.cuda.device_count() >= RANKS
    mode = sys.argv[1] if len(sys.argv) > 1 else "FULL" if has_gpus else "PIECEWISE"
    if mode == "FULL" and not has_gpus:
        sys.exit(f"FULL needs {RANKS} GPUs, found {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (mode, f"{directory}/store"), nprocs=RANKS)
