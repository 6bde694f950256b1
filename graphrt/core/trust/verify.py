"""The proof that a replay equals the same callable run eagerly on the same padded inputs."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base import VerificationError, tree


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
    return torch.equal(tree.octets(a), tree.octets(b))


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
    apart = (a.double() - b.double()).abs()
    return f"{int((apart != 0).sum())} of {a.numel()} values, by at most {apart.max().item():.3g}"
