"""What came of a trial, and in which words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphrt.core.base.errors import (
    BakedScalarError,
    PythonStateError,
    RowsMixedError,
    VerificationError,
)


@dataclass
class Verdict:
    """What came of a trial."""

    outputs: Any = None
    """Of the last run, which was eager and whose effects remain."""
    failure: VerificationError | None = None
    deterministic: bool = True
    asks: bool = False
    """Whether the forward does something else where gradients or inference mode are on or off."""
    varying: frozenset[int] | None = None
    """The places of the operators that were others than the graph's, or had other arguments, though
    the host had changed nothing; None where it had."""
    is_doubtful: bool = False
    """Whether operators differ after a change of the host's, and may differ without it too: equal
    results at one step show little."""
    notes: list[str] = field(default_factory=list)
    harmless: tuple[str, ...] = ()
    """Python numbers that were moved further, and no operator is another one then."""


class Failure(NamedTuple):
    """One answer of a trial, as an error."""

    error: type[VerificationError]
    what: str
    expected: str
    advice: str


CONSTANT = Failure(
    BakedScalarError,
    "the forward makes a tensor of Python data, which is other data now; a graph has that of its "
    "capture for ever",
    "{then}, as before",
    "keep what changes in a tensor on the device and write it in place (fill_, copy_), or pass it "
    "as an input; recapture() after the host has changed it for good",
)
REBOUND = Failure(
    PythonStateError,
    "the forward reads a tensor and puts another one in its place; replays go on reading the one "
    "of the capture",
    "state that is written in place",
    "self.h.copy_(new) in place of self.h = new",
)
NOT_REPEATED = Failure(
    PythonStateError,
    "two eager runs of one step, from the same state, {how}, so no graph can stand for the forward",
    "a function of its inputs and of tensors",
    "keep what advances in a tensor and write it in place (add_, copy_), read clocks and files "
    "outside of the forward, or run it in an eager break",
)
NOT_EAGER = Failure(
    VerificationError,
    "the replay of its graph differs from eager{where}",
    "{allowed}",
    "pass what changes as an input or write it in place into a tensor; recapture() after what the "
    "forward reads was replaced",
)
_EVAL = ", call eval() on a model whose BatchNorm still trains"
CHANGED = Failure(
    PythonStateError,
    "the host has changed Python values, and the forward does something else now; replays repeat "
    "what it did at capture",
    "the operators and numbers of the capture",
    "recapture() after a change that is for good; or keep what changes in a tensor that is written "
    "in place, or pass it as an input",
)
ROWS_MIXED = Failure(
    RowsMixedError,
    "{how}",
    "differences of at most {rounding:.3g} of their root mean square",
    "let each row depend on its own request only (mask the padding rows, take the last token of "
    f"each request by an index input{_EVAL}); where rows are mixed by design, "
    "Host(mixes_rows=True) says so",
)
STATE_OF_PADDING = Failure(
    RowsMixedError,
    "padding rows change state that later steps read",
    "state as a step without padding leaves it",
    "mask the padding rows, or address them by an index input whose padding is a row that is "
    f"nobody's: InputSpec(index=True, pad=...){_EVAL}; where rows are mixed by design, "
    "Host(mixes_rows=True) says so",
)
PYTHON_OF_PADDING = Failure(
    PythonStateError,
    "padding rows change Python state that later steps depend on",
    "the Python state that a step without padding leaves",
    "advance it by the live rows, current_context().live.num_tokens, or keep it out of the forward",
)
NUMBER_MOVED = Failure(
    PythonStateError,
    "the forward moves a Python {kind} and does something else when it has moved on; replays "
    "repeat what it was at capture",
    "Python state that changes nothing, as a count of calls does",
    "keep it in a tensor that is written in place, or pass it as an input; for a sliding-window "
    "cache use a static cache of full length",
)
