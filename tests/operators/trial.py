"""One sample of an operator: captured, replayed with new values, and compared with eager code."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrt import (
    BatchDescriptor,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRTError,
    forward_context,
    wrapper_class,
)
from graphrt.core.base import tree
from graphrt.core.base.errors import CaptureError
from tests.operators.buffers import Buffers, Values, same
from tests.operators.results import Seen
from tests.operators.samples import Case, seed

EQUAL, REFUSED, AT_STEP, RANDOM = "equal", "refused", "refused at a step", "not deterministic"
WRONG, RAW, INVALID = "WRONG", "RAW", "eager raises"
BAD = (WRONG, RAW)

_UNINITIALISED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Of what these return, the numbers mean nothing."""
_WITH_SEEDS = frozenset(
    f"torch.ops.aten._{kind}_attention_forward" for kind in ("flash", "efficient")
)
"""The seeds that these return lie on the host in eager code, and on the device in a graph."""
_DESCRIPTOR = BatchDescriptor(1)
_CALLS = 1000
"""Eager calls that have to agree before a replay counts as wrong: of linalg.lstsq with complex
numbers and the driver gelsy one in 50 has other last bits while small blocks come and go around it,
one in thousands while they do not."""


@dataclass(frozen=True)
class Verdict:
    """What became of one sample. `error` is the class of what was raised, `operator` the one that
    was refused, `why` a line."""

    outcome: str
    error: str = ""
    operator: str = ""
    why: str = ""
    draws: int = 0
    """With how many values it was replayed that are not those of the capture."""
    random: bool = False
    """Of what is refused: whether eager code does not repeat its own bits either."""


@dataclass(frozen=True)
class Result:
    """What one call did: its result, its arguments after it, and the generator's state."""

    leaves: list[tuple[str, Seen]]
    after: list[Seen]
    generator: torch.Tensor

    def differs(self, other: Result, *, numbers: bool = True) -> str | None:
        """How `other` differs, in words."""
        paths, others = [p for p, _ in self.leaves], [p for p, _ in other.leaves]
        if paths != others:
            return f"results {others}, not {paths}"
        for (path, mine), (_, its) in zip(self.leaves, other.leaves, strict=True):
            how = mine.differs(its, numbers=numbers)
            if how is not None:
                return f"result{path}: {how}"
        for place, (mine, its) in enumerate(zip(self.after, other.after, strict=True)):
            how = mine.differs(its, numbers=numbers)
            if how is not None:
                return f"argument {place}: {how}"
        return None if torch.equal(self.generator, other.generator) else "the generator"


class Sample:
    """One sample of `case`, and the `variant` of the operator that it is given to."""

    def __init__(self, case: Case, variant: str, draws: Sequence[Values]) -> None:
        self._case = case
        self._draws = draws
        self._buffers = Buffers(draws[0])
        self._outs: Any = None
        self._out_layouts: list[tuple[Any, Any]] = []
        self._function = self._of(variant)
        self._numbers = case.op.name not in _UNINITIALISED

    def run(self, pool: GraphPool) -> Verdict:
        """Capture and replay it on the pool's platform."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._run(pool)

    def _run(self, pool: GraphPool) -> Verdict:
        try:
            self._prepare()
            expected = {0: self._call(self._function, 0)}
        except Exception as error:
            return Verdict(INVALID, type(error).__name__, why=_line(error))
        if self._buffers.grown(self._draws[0]):
            return Verdict(INVALID, why="an argument gets other memory: there is no static buffer")
        for draw in range(1, len(self._draws)):
            try:
                expected[draw] = self._call(self._function, draw)
            except Exception:
                continue  # such values it does not take: only the others are replayed
        return self._replayed(pool, expected)

    def _replayed(self, pool: GraphPool, expected: dict[int, Result]) -> Verdict:
        options = GraphOptions(lazy=True, check="off")
        wrapper = wrapper_class(pool.platform)(
            self._function, GraphMode.FULL, pool=pool, options=options
        )
        step = "capture"
        draws = sum(not same(self._draws[0], self._draws[draw]) for draw in list(expected)[1:])
        try:
            for draw in (0, *list(expected)[1:], 0):
                with forward_context(GraphMode.FULL, _DESCRIPTOR):
                    how = expected[draw].differs(self._call(wrapper, draw), numbers=self._numbers)
                if how is not None:
                    return self._wrong(f"{step}, values {draw}: {how}", draw, [expected[draw]])
                if not wrapper.entries:
                    return Verdict(WRONG, why="nothing was captured")
                step = "replay"
        except GraphRTError as error:
            how = expected[0].differs(self._eagerly(), numbers=self._numbers)
            named = _named(error, step)
            if how is None:
                return named
            result = self._wrong(f"eager code after {type(error).__name__}: {how}", 0, [])
            return result if result.outcome == WRONG else replace(named, random=True)
        except Exception as error:
            return Verdict(RAW, type(error).__name__, why=f"{step}: {_line(error)}")
        finally:
            wrapper.clear_graphs()
        return Verdict(EQUAL, draws=draws)

    def _eagerly(self) -> Result:
        """Eager code after a refusal. The first call of cuSOLVER after a capture that failed in it
        raises what that one met, after torch's own captures too; the next one works."""
        try:
            return self._call(self._function, 0)
        except RuntimeError as error:
            if "cusolver error" not in str(error):
                raise
            return self._call(self._function, 0)

    def _wrong(self, why: str, draw: int, seen: list[Result]) -> Verdict:
        """Whether it is, or eager code does not repeat itself either; where its memory lies may
        change the order in which a library adds."""
        sizes = random.Random(0)
        junk: list[torch.Tensor] = []
        for _ in range(_CALLS):
            size = sizes.randrange(1, sizes.choice((64, 12000)))
            junk.append(torch.empty(size, dtype=torch.uint8, device=self._case.device))
            if sizes.random() < 0.5:
                junk.pop(sizes.randrange(len(junk)))
            seen = [*seen[:1], self._call(self._function, draw)]
            how = seen[0].differs(seen[-1], numbers=self._numbers)
            if how is not None:
                return Verdict(RANDOM, why=how)
        return Verdict(WRONG, why=why)

    def _prepare(self) -> None:
        """Make the outputs that an `out=` variant is given."""
        if self._outs is not None:
            args, kwargs = self._buffers.values
            with torch.device(self._case.device):  # such as of arange
                made = self._case.op(*args, **kwargs)
            self._outs = tree.map_leaves(torch.empty_like, made)
            self._out_layouts = [(t.size(), t.stride()) for t in tree.tensors(self._outs)]

    def _call(self, function: Callable[..., Any], draw: int) -> Result:
        """Call it with the values of one draw in the buffers, and the generator as it is then."""
        self._buffers.write(self._draws[draw])
        for out, (size, stride) in zip(tree.tensors(self._outs), self._out_layouts, strict=True):
            out.as_strided_(size, stride, 0).fill_(1)  # a refused call may have laid it out anew
        seed(self._case.name, "call", draw)
        args, kwargs = self._buffers.values
        made = function(*args, **kwargs)
        if self._case.name in _WITH_SEEDS:
            made = [t for t in tree.tensors(made) if t.is_floating_point()]
        places = self._buffers.places()
        leaves = [(path, Seen.of(leaf, places)) for path, leaf in tree.leaves(made)]
        after = [Seen.of(t, []) for t in (*self._buffers.tensors, *tree.tensors(self._outs))]
        return Result(leaves, after, torch.get_rng_state())

    def _of(self, variant: str) -> Callable[..., Any]:
        op = self._case.op
        if variant == "call":
            return lambda *args, **kwargs: op(*args, **kwargs)
        if variant == "in place":
            in_place = op.get_inplace()
            return lambda *args, **kwargs: in_place(*args, **kwargs)
        if variant == "out=":
            self._outs = ()
            return lambda *args, **kwargs: op(*args, **kwargs, out=self._outs)
        assert variant == "out= grown", variant

        def grown(*args: Any, **kwargs: Any) -> Any:
            like = op(*args, **kwargs)
            outs = tree.map_leaves(lambda t: t.new_empty(0), like)
            return op(*args, **kwargs, out=outs)

        return grown


def variants(case: Case) -> list[str]:
    """The ways in which the operator can be called."""
    op = case.op
    names = ["call"]
    if op.get_inplace() is not None:
        names.append("in place")
    return names + (["out=", "out= grown"] if op.supports_out else [])


def _named(error: GraphRTError, step: str) -> Verdict:
    cause = error.__cause__
    unexplained = type(error) is CaptureError and not isinstance(cause, GraphRTError | None)
    outcome = RAW if unexplained else REFUSED if step == "capture" else AT_STEP
    why = error.what.splitlines()[0]
    return Verdict(outcome, type(error).__name__, getattr(error, "op", None) or "", why)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:160]
