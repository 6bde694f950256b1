"""What an error came from: its causes and the errors in whose handlers it was raised."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.core.base.errors import CaptureError
from graphrt.core.base.homes import public


class Unexplained(CaptureError):
    """Of an error in a capture that no device is known to raise: it is the forward's own, and is
    raised as it is."""

    @classmethod
    def of(cls, error: BaseException) -> Unexplained:
        """The explanation of an error that has none."""
        return cls(
            f"capture failed: {type(error).__name__}: {error}",
            advice="run the same forward eagerly; if that passes, look for what cannot be captured",
        )


@public("graphrt.platforms")
def error_chain(
    error: BaseException, leave_out: type[BaseException] | None = None
) -> Iterator[BaseException]:
    """`error` and all that it came from, each once, nearest first.

    Errors of the type `leave_out` behind it are left out, with all that is known through them only.
    """
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop(0)
        # Not `in`: an error may define equality.
        if link is None or any(link is each for each in seen):
            continue
        if leave_out is not None and isinstance(link, leave_out) and link is not error:
            continue
        seen.append(link)
        yield link
        pending += [link.__cause__, link.__context__]
