"""The proof that a replay equals the same callable run eagerly on the same padded inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from graphrt.core.base import tree
from graphrt.core.base.errors import VerificationError
from graphrt.core.batch.descriptor import Batch
from graphrt.core.capture.state import SavedState

if TYPE_CHECKING:
    from graphrt.core.runner.runner import GraphRunner


def verify_step(
    runner: GraphRunner,
    batch: Batch | None,
    values: Mapping[str, Any],
    *,
    updates: Any = None,
    metadata: Any = None,
) -> Any:
    """Run one step by replay and once more eagerly; returns clones of its live outputs.

    The runner's declared state is put back in between, so it is advanced once. Other effects
    (the writes of a KV cache) happen twice, with equal values. A step that no graph serves is run
    once. Raises `VerificationError` naming the output, if live rows are not equal bit for bit; do
    not verify forwards that draw random numbers.
    """
    if batch is None:
        batch = runner.batch_of(values)
    saved = SavedState(runner.graphs.state, runner.options.state_limit_bytes)
    outputs = runner.step(batch, values, updates=updates, metadata=metadata)
    outputs = tree.map_tensors(torch.Tensor.clone, outputs)
    found = runner.last_dispatch
    if found is None or found.slot < 0:
        return outputs
    saved.restore()
    eager = runner.run_padded_eagerly(batch, found, values, updates, metadata)
    check_equal(outputs, eager, f"{found.mode.name} [{found.descriptor}]")
    return outputs


def check_equal(replayed: Any, eager: Any, what: str) -> None:
    """Raise `VerificationError` unless two trees of outputs are equal, bit for bit."""
    ours, theirs = dict(tree.leaves(replayed)), dict(tree.leaves(eager))
    if ours.keys() != theirs.keys():
        raise VerificationError(
            f"replay of {what} returned another structure than eager",
            got=list(ours),
            expected=list(theirs),
        )
    for path, value in ours.items():
        expected = theirs[path]
        if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
            equal = type(value) is type(expected) and value == expected
            difference = f"{value!r}, not {expected!r}"
        else:
            equal = _same_bits(value, expected)
            difference = "" if equal else _difference(value, expected)
        if not equal:
            raise VerificationError(
                f"replay of {what} differs from eager{' at ' + path if path else ''}",
                got=difference,
                expected="equal bits",
                advice="look for values that the forward takes from Python, inputs that it reads "
                "beside the declared ones, and state that is not declared",
            )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # As bytes, so that NaN equals itself and 0.0 does not equal -0.0.
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(first, second)


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
    apart = (a.double() - b.double()).abs()
    return f"{int((apart != 0).sum())} of {a.numel()} values, by at most {apart.max().item():.3g}"
