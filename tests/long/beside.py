"""What runs beside the main runner of a long run: threads, hosts with wrappers, compiled modules,
runners that come and go. Each must give, bit for bit, what its forward gives eagerly."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor, nn

from graphrt import (
    BatchDescriptor,
    ForwardContext,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    GraphWrapper,
    InputSpec,
    compile,
)
from graphrt.errors import PoolBusyError

WIDTH = 16
SIZES = [1, 2, 4, 8]
STEPS_A_THREAD = 4


class Small(nn.Module):
    """Rows by rows, so that padding changes no bit."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.register_buffer("weight", torch.randn(WIDTH, generator=random).to(device))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] of the same."""
        return torch.tanh(x * self.weight) + x.roll(1, 1)


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a new thread."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            # Grad mode is a thread's own.
            with torch.no_grad():
                results.append(work())
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class Beside:
    """Base: a step with this random source returns what is wrong."""

    def __init__(self, device: str, level: str) -> None:
        self.device, self.level = device, level

    def step(self, number: random.Random) -> list[str]:
        """Run once; one line for each wrong output."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back."""

    def runner(self, forward: Any, pool: GraphPool, **options: Any) -> GraphRunner:
        """A runner of one input, all of whose modules are known to no checks but their own."""
        return GraphRunner(
            forward,
            mode=options.pop("mode", "FULL"),
            sizes=SIZES,
            inputs={"x": InputSpec(torch.float32, ("tokens", WIDTH))},
            outputs=("tokens", WIDTH),
            options=GraphOptions(check=self.level, **options),
            pool=pool,
        )

    def values(self, number: random.Random, sizes: int = SIZES[-1]) -> Tensor:
        """Random rows."""
        return torch.randn(number.randint(1, sizes), WIDTH).to(self.device)


class Pair(Beside):
    """Two runners, each stepped from a thread of its own at once: in two pools, or in one, where
    a step that meets another one is refused by name and tried again."""

    def __init__(self, device: str, level: str, *, one_pool: bool) -> None:
        super().__init__(device, level)
        self.refused = 0
        self._pools = [GraphPool(device)]
        self._pools += self._pools if one_pool else [GraphPool(device)]
        self._models = [Small(seed, device) for seed in (1, 2)]
        self._runners = [
            self.runner(model, pool, outputs="clone")
            for model, pool in zip(self._models, self._pools, strict=True)
        ]
        for each in self._runners:
            each.capture()

    def step(self, number: random.Random) -> list[str]:
        started = Barrier(2)
        wrong: list[str] = []

        def work(at: int, given: list[Tensor]) -> None:
            try:
                with torch.no_grad():
                    expected = [self._models[at](x) for x in given]
                    started.wait(60)
                    outputs = [self._retried(self._runners[at], x) for x in given]
                for ours, theirs in zip(outputs, expected, strict=True):
                    if not torch.equal(ours, theirs):
                        wrong.append(f"runner {at} of two in threads, {len(theirs)} rows")
            except Exception as error:
                started.abort()
                wrong.append(f"runner {at} of two in threads: {type(error).__name__}: {error}")

        inputs = [[self.values(number) for _ in range(STEPS_A_THREAD)] for _ in range(2)]
        threads = [Thread(target=work, args=(at, given)) for at, given in enumerate(inputs)]
        for each in threads:
            each.start()
        if number.random() < 0.01 and self._pools[0] is not self._pools[1]:
            # In this thread, while nothing of the first pool may be disturbed by it.
            extra = self.runner(self._models[0], GraphPool(self.device))
            extra.capture()
            extra.close()
            extra.pool.close()
        for each in threads:
            each.join()
        return wrong

    def _retried(self, runner: GraphRunner, x: Tensor) -> Tensor:
        while True:
            try:
                output: Tensor = runner(x=x)
                return output
            except PoolBusyError:
                if self._pools[0] is not self._pools[1]:
                    raise
                self.refused += 1

    def close(self) -> None:
        for each in (*self._runners, *self._pools):
            each.close()


class Hosted(Beside):
    """A host with a context and buffers of its own around a wrapper that captures when asked."""

    def __init__(self, device: str, level: str) -> None:
        super().__init__(device, level)
        self._model = Small(3, device)
        self._context: ForwardContext | None = None
        self._pool = GraphPool(device)
        self._wrapper = GraphWrapper(
            self._model,
            "FULL",
            pool=self._pool,
            read_context=lambda: self._context,
            options=GraphOptions(check=level, lazy=True),
        )
        self._buffers = {size: torch.zeros(size, WIDTH, device=device) for size in SIZES}
        self._descriptors = {size: BatchDescriptor(size) for size in SIZES}

    def step(self, number: random.Random) -> list[str]:
        if number.random() < 0.02:
            self._wrapper.clear_graphs()
        x = self.values(number)
        size = next(size for size in SIZES if size >= len(x))
        self._buffers[size][: len(x)] = x
        self._context = ForwardContext(GraphMode.FULL, self._descriptors[size])
        output = self._wrapper(self._buffers[size])[: len(x)]
        self._context = None
        return [] if torch.equal(output, self._model(x)) else [f"a host's wrapper, {len(x)} rows"]

    def close(self) -> None:
        self._wrapper.clear_graphs()
        self._pool.close()


class Compiled(Beside):
    """A compiled module's pieces in PIECEWISE steps, released and captured anew at times."""

    def __init__(self, device: str, level: str) -> None:
        super().__init__(device, level)
        self._plain = Small(4, device)
        self._pool = GraphPool(device)
        module = compile(Small(4, device), {"x": 0}, pool=self._pool, in_place=False)
        self._runner = self.runner(module, self._pool, mode="FULL_AND_PIECEWISE")
        self._runner.capture()

    def step(self, number: random.Random) -> list[str]:
        if number.random() < 0.01:
            self._runner.recapture()
        x = self.values(number)
        output = self._runner(x=x)
        return [] if torch.equal(output, self._plain(x)) else [f"a compiled module, {len(x)} rows"]

    def close(self) -> None:
        self._runner.close()
        self._pool.close()


class Passing(Beside):
    """A runner that is made, captured, stepped, captured again when asked, and closed."""

    def step(self, number: random.Random) -> list[str]:
        model = Small(number.randrange(100), self.device)
        with self.runner(model, GraphPool(self.device), lazy=number.random() < 0.5) as runner:
            if not runner.options.lazy:
                runner.capture()
            wrong = [self._one(runner, model, number) for _ in range(3)]
            runner.release()
            wrong.append(self._one(runner, model, number))
            runner.capture()
            wrong.append(self._one(runner, model, number))
        runner.pool.close()
        return [each for each in wrong if each]

    def _one(self, runner: GraphRunner, model: Small, number: random.Random) -> str:
        x = self.values(number)
        equal = torch.equal(runner(x=x), model(x))
        return "" if equal else f"a runner that comes and goes, {len(x)} rows"
