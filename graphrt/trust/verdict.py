"""The result of a trial, and the errors that a failed one raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphrt.core.base import errors
from graphrt.core.capture.refusals import Refusal
from graphrt.core.runner.findings import TrialRecord


@dataclass
class TriedGraph:
    """A graph that is tried: the record of its trials, and what has changed since its capture."""

    record: TrialRecord
    moved: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Python values that eager steps have changed: path -> (then, now)."""
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Python values that the host has changed."""
    replaced: dict[str, int] = field(default_factory=dict)
    """path of scratch memory that was replaced -> key of the storage there now"""
    has_other_scratch: bool = False
    """Whether a trial has passed where eager runs have other scratch memory than the graph."""
    varying: frozenset[int] | None = None
    """`Verdict.varying` of earlier trials; None if the host had changed something before each."""


@dataclass
class Verdict:
    """The result of a trial."""

    outputs: Any = None
    """Of the eager run whose effects remain."""
    failure: errors.GraphRTError | None = None
    """The first failure that was found; None if the graph stands for its forward."""
    deterministic: bool = True
    """Whether two eager runs were equal."""
    asks: bool = False
    """Whether the forward does something else where gradients or inference mode are on or off."""
    varying: frozenset[int] | None = None
    """Positions, in the run, of operators that are not the graph's, or have other arguments, though
    the host has changed nothing; None if it has."""
    is_doubtful: bool = False
    """Whether operators differ after a change of the host's, and may differ without it too. Then
    one step with equal results proves little."""
    notes: list[str] = field(default_factory=list)
    scratch: frozenset[int] = frozenset()
    """Keys of scratch memory that eager runs fill and the graph does not know."""
    harmless: tuple[str, ...] = ()
    """Paths of Python numbers that were moved on without an effect on results."""


CONSTANT = Refusal(
    errors.BakedScalarError,
    "{graph}: the forward makes a tensor of Python data, and the data has changed; a graph keeps "
    "the data of its capture",
    expected="{then}, as before",
    advice="keep what changes in a tensor on the device and write it in place (fill_, copy_), or "
    "pass it as an input; recapture() after the host has changed it for good",
)
REBOUND = Refusal(
    errors.PythonStateError,
    "{graph}: the forward reads a tensor and puts another one in its place; replays go on "
    "reading the one of the capture",
    expected="state that is written in place",
    advice="self.h.copy_(new) in place of self.h = new",
)
NOT_REPEATED = Refusal(
    errors.PythonStateError,
    "{graph}: two eager runs of one step, from the same state, {how}, so no graph can equal "
    "the forward",
    expected="a function of its inputs and of tensors",
    advice="keep what advances in a tensor and write it in place (add_, copy_), read clocks and "
    "files outside of the forward, or run it in an eager break",
)
SEEDED = Refusal(
    errors.PythonStateError,
    "{graph}: the forward seeds a generator, or sets its state; a replay draws the next numbers",
    expected="a generator that the forward only draws from",
    advice="seed it outside of the forward, draw the numbers before the step and pass them as an "
    "input, or seed and draw in an eager break",
)
NOT_EAGER = Refusal(
    errors.VerificationError,
    "{graph}: the replay of its graph differs from eager{where}",
    expected="equal bits, or the spread of eager runs where they differ",
    advice="pass what changes as an input or write it in place into a tensor; recapture() after "
    "what the forward reads was replaced",
)
CHANGED = Refusal(
    errors.PythonStateError,
    "{graph}: the host has changed Python values, and the forward does something else now; "
    "replays repeat what it did at capture",
    expected="the same operators with the same arguments as at the capture",
    advice="recapture() after a change that is for good; or keep what changes in a tensor that "
    "is written in place, or pass it as an input",
)
ROWS_MIXED = Refusal(
    errors.RowsMixedError,
    "{graph}: {how}",
    expected="the results without padding, up to {rounding:.3g} of their root mean square",
    advice="let each row depend on its own request only: mask the padding rows, take the last "
    "token of each request by an index input, address padding by a row that is nobody's "
    "(InputSpec(index=True, pad=...)), call eval() on a model whose BatchNorm still trains; where "
    "results may depend on padding by design, Host(mixes_rows=True) says so",
)
PADDING_ON_LIVE_ROW = Refusal(
    errors.RowsMixedError,
    "{graph}: padding writes state that live rows use, and spoils it while they rest",
    expected="padding that points at a row, or a page, which no request has",
    advice="allocate one row (or page) more and give it to nobody: InputSpec(..., index=True, "
    "pad=the old number of rows). In torch -1 is the last row; a kernel of your own may skip it",
)
PYTHON_MOVES = Refusal(
    errors.PythonStateError,
    "{graph}: {how}",
    expected="Python state that changes nothing, as a count of calls does",
    advice="keep it in a tensor that is written in place (self.count.add_(1); a list that grows: a "
    "buffer of its largest length, and a tensor for the position), pass it as an input, or advance "
    "it by the live rows, current_context().live.num_tokens; for a sliding-window cache use a "
    "static cache of full length",
)
