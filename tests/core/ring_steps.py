"""Steps that say what they saw, on any platform with an input ring: mixed, aborted, recaptured."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from graphrt import Batch, GraphOptions, GraphPool, GraphRunner, Host, InputSpec, eager_break

SIZES = [1, 2, 4, 8, 16]
MOST = 20
"""Tokens of the largest batch, which no graph serves."""
WIDTH = 8
PAD = -(1 << 40)
"""Live rows never hold it, so a sum that has it shows a padding row in the place of a live one."""


class Aborted(Exception):
    """What the hooks of an aborted step raise."""


class Hooks:
    """Hooks around each graph: one of the next step's raises when `fuse` reaches 0."""

    def __init__(self) -> None:
        self.fuse = -1

    def before_capture(self) -> None: ...

    def end_of_capture(self) -> None: ...

    def before_replay(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise Aborted


@eager_break
def between(rows: torch.Tensor) -> torch.Tensor:
    return rows + 1


class Log:
    """A runner whose forward writes what it saw of each input into a row of `rows`."""

    def __init__(
        self,
        platform: Any,
        device: str,
        steps: int,
        *,
        width: int = WIDTH,
        pool: GraphPool | None = None,
        mode: str = "FULL_AND_PIECEWISE",
        bind: Any = None,
        **options: Any,
    ) -> None:
        # The first row is written by warm-ups and captures.
        self.rows = torch.zeros(steps + 1, 6, dtype=torch.int64, device=device)
        self.device, self.width = device, width
        self.hooks = Hooks()

        def forward(
            ids: torch.Tensor,
            flags: torch.Tensor,
            starts: torch.Tensor,
            table: torch.Tensor,
            step: torch.Tensor,
        ) -> torch.Tensor:
            live = ids.ne(PAD)
            seen = torch.stack(
                [
                    torch.where(live, ids, 0).sum(),
                    live.sum(),
                    flags.to(torch.int64).sum(),
                    starts.to(torch.int64).amax(),
                    table.to(torch.int64).sum(),
                    between(starts.to(torch.int64)).amin() - 1,
                ]
            )
            self.rows.index_copy_(0, step, seen.view(1, 6))
            return ids + 1

        self.runner = GraphRunner(
            forward,
            inputs={
                "ids": InputSpec(torch.int64, ("tokens", width), pad=PAD),
                "flags": InputSpec(torch.uint8, ("tokens",)),
                "starts": InputSpec(torch.int32, ("reqs+1",), pad="repeat"),
                # Cut in blocks by its batch axis.
                "table": InputSpec(torch.int16, (2, "reqs"), pad=0),
                "step": InputSpec(torch.int64, (1,)),
            },
            outputs=("tokens", width),
            mode=mode,
            sizes=SIZES,
            max_num_reqs=MOST,
            platform=None if pool is not None else platform,
            pool=pool,
            host=Host(bind=bind, around_graph=self.hooks),
            options=GraphOptions(**{"check": "off", "inputs_in_graph": True, **options}),
        )
        self.runner.capture()
        self.expected = torch.zeros(steps, 6, dtype=torch.int64)

    def values(
        self, rng: random.Random, step: int, reqs: int, each: int
    ) -> dict[str, torch.Tensor]:
        """A step's inputs on the host; what a right step sees of them is noted."""
        tokens = reqs * each
        ids = torch.full((tokens, self.width), rng.randint(1, 1000), dtype=torch.int64)
        flags = torch.tensor([rng.randint(1, 9) for _ in range(tokens)], dtype=torch.uint8)
        starts = torch.arange(reqs + 1, dtype=torch.int32) * each + step % 7 + 1
        table = torch.tensor(
            [[rng.randint(1, 99) for _ in range(reqs)] for _ in range(2)], dtype=torch.int16
        )
        self.expected[step] = torch.tensor(
            [
                int(ids.sum()),
                ids.numel(),
                int(flags.sum()),
                int(starts.max()),
                int(table.sum()),
                int(starts.min()),
            ]
        )
        number = torch.tensor([step + 1], dtype=torch.int64)
        return {"ids": ids, "flags": flags, "starts": starts, "table": table, "step": number}

    def run(self, rng: random.Random, step: int, *, device: float = 0.0, slot: bool = False) -> Any:
        """One step of a random size and mode, each input of which is on the device with probability
        `device`; with `slot` its inputs are written in place."""
        each = rng.choice([1, 1, 2])
        reqs = rng.randint(1, MOST // each)
        on_host = self.values(rng, step, reqs, each)
        batch = Batch(reqs * each, reqs, 1 if each == 1 else None)
        if slot:
            place = self.runner.slot(batch)
            for name, value in on_host.items():
                place[name].copy_(value)
            return self.runner(place)
        values = {
            name: value.to(self.device) if rng.random() < device else value
            for name, value in on_host.items()
        }
        outputs = self.runner(batch, **values)
        for value in values.values():
            value.fill_(1)
        return outputs

    def abort(self, rng: random.Random, step: int, segment: int = 1, **how: Any) -> bool:
        """A step that fails before the launch of this segment of its graph; returns whether it had
        one, and did."""
        self.hooks.fuse = segment
        try:
            self.run(rng, step, **how)
        except Aborted:
            return True
        finally:
            self.hooks.fuse = -1
        return False

    def check(self, steps: int) -> None:
        seen = self.rows[1 : steps + 1].cpu()
        wrong = (seen != self.expected[:steps]).any(1).nonzero().flatten().tolist()
        assert not wrong, [
            (step, seen[step].tolist(), self.expected[step].tolist()) for step in wrong[:3]
        ]


def mixed_steps(
    log: Log,
    steps: int,
    seed: int,
    *,
    device: float = 0.0,
    slots: float = 0.0,
    aborts: float = 0.0,
    recaptures: float = 0.0,
    behind: Callable[[], None] = lambda: None,
) -> int:
    """Run so many steps, some of which are aborted first or come after a recapture; returns how
    many were aborted."""
    rng, aborted = random.Random(seed), 0
    for step in range(steps):
        if step % 100 == 50:
            behind()
        if rng.random() < recaptures:
            log.runner.recapture()
        if rng.random() < aborts:
            slot = rng.random() < slots
            aborted += log.abort(rng, step, rng.randint(1, 2), device=device, slot=slot)
        log.run(rng, step, device=device, slot=rng.random() < slots)
    log.check(steps)
    return aborted
