"""The two ways to run a program with graphs: a runner, and a host with a wrapper of its own."""

from __future__ import annotations

from typing import Any

import torch

from graphrt import (
    Batch,
    BatchDescriptor,
    GraphOptions,
    GraphPool,
    GraphRunner,
    Host,
    Reason,
    forward_context,
    wrapper_class,
)
from tests.fuzz.eager import packed
from tests.fuzz.program import Program, built
from tests.fuzz.values import Values


class RunnerHost:
    """A program in a `GraphRunner`."""

    def __init__(self, program: Program, device: str, pool: GraphPool) -> None:
        setup = program.setup
        self.forward, self.state, self._held = built(program, device)
        self.padded: tuple[int, int] | None = None
        self.tried: tuple[int, int] | None = None
        self._program = program
        options = GraphOptions(
            outputs=setup.outputs,  # type: ignore[arg-type]
            check=setup.check,  # type: ignore[arg-type]
            lazy=setup.lazy,
            breaks=setup.breaks if setup.mode != "FULL" else (),
            warmups=setup.warmups,
        )
        specs: dict[str, Any] = program.specs()
        self._runner = GraphRunner(
            self.forward,
            mode=setup.mode,
            sizes=list(setup.sizes),
            max_num_tokens=setup.sizes[-1],
            inputs=packed(program, specs),
            host=Host(
                state=list(self.state.values()) if setup.declare_state else (),
                mixes_rows=setup.mixes_rows,
            ),
            options=options,
            pool=pool,
            device=device,
        )

    def capture(self) -> None:
        """Capture, unless the first steps do."""
        if not self._program.setup.lazy:
            self._runner.capture()

    def recapture(self) -> None:
        """Capture anew."""
        if self._program.setup.lazy:
            self._runner.release()
        else:
            self._runner.recapture()

    def step(self, batch: Batch, values: Values) -> Any:
        """Run a step; `padded` are then the sizes it was padded to, if a graph served it."""
        outputs = self._runner(batch, **packed(self._program, values))
        dispatch = self._runner.last_dispatch
        self.padded = None
        if (
            dispatch is not None
            and dispatch.reason is Reason.HIT
            and dispatch.descriptor is not None
        ):
            tokens = dispatch.descriptor.num_tokens
            reqs = dispatch.descriptor.num_reqs or min(tokens, self._runner.inputs.reqs)
            self.padded = tokens, reqs
        self.tried = None
        if self._program.setup.mixes_rows and dispatch.reason is Reason.QUARANTINED:
            # The trial that failed ran with padding, which such a host allows.
            tokens = next((s for s in self._program.setup.sizes if s >= batch.num_tokens), 0)
            self.tried = (tokens, min(tokens, self._runner.inputs.reqs)) if tokens else None
        return outputs

    def held(self) -> list[torch.Tensor]:
        """Tensors whose memory is not an output's own."""
        return self._held

    def close(self) -> None:
        """Destroy the graphs."""
        self._runner.close()


class WrapperHost:
    """A program in a wrapper class, with static inputs of its own for every size."""

    def __init__(self, program: Program, device: str, pool: GraphPool) -> None:
        setup = program.setup
        self.forward, self.state, self._held = built(program, device)
        self.padded: tuple[int, int] | None = None
        self.tried: tuple[int, int] | None = None
        self._program = program
        self._statics: dict[BatchDescriptor, Values] = {}
        piecewise = setup.mode == "PIECEWISE"
        self._mode = setup.mode
        self._wrapper = wrapper_class(pool.platform)(
            self.forward,
            setup.mode,
            pool=pool,
            breakable=piecewise,
            options=GraphOptions(
                outputs=setup.outputs,  # type: ignore[arg-type]
                check=setup.check,  # type: ignore[arg-type]
                lazy=True,
                breaks=setup.breaks if piecewise else (),
            ),
        )

    def capture(self) -> None:
        """Nothing: each first step of a size does."""

    def recapture(self) -> None:
        """Forget the graphs; the next steps capture anew."""
        self._wrapper.clear_graphs()

    def step(self, batch: Batch, values: Values) -> Any:
        """Run a step on the static inputs of its size, which get these values."""
        descriptor = BatchDescriptor(batch.num_tokens, batch.num_reqs)
        if descriptor not in self._statics:
            self._statics[descriptor] = {name: value.clone() for name, value in values.items()}
        statics = self._statics[descriptor]
        with torch.no_grad():
            for name, value in values.items():
                statics[name].copy_(value)
        self.padded = batch.num_tokens, batch.num_reqs or 1
        # Tensors of their own over the same memory: a forward may give what it gets another shape.
        fresh = {name: value.detach() for name, value in statics.items()}
        arguments = packed(self._program, fresh)
        with forward_context(self._mode, descriptor):
            return self._wrapper(**arguments)

    def held(self) -> list[torch.Tensor]:
        """Tensors whose memory is not an output's own: the program's, and its inputs."""
        return [*self._held, *(value for each in self._statics.values() for value in each.values())]

    def close(self) -> None:
        """Destroy the graphs."""
        self._wrapper.clear_graphs()
