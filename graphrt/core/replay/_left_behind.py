"""A pool in a child of its process that cannot be used there: who owns it, and says so."""

from __future__ import annotations

from graphrt.core.base.errors import PoolLeftBehindError


class LeftBehind:
    """The owner of such a pool for good, so that whoever takes a turn in it is told why."""

    def __init__(self, why: str, advice: str) -> None:
        self._why = why
        self._advice = advice

    def __repr__(self) -> str:
        return self._why

    def error(self) -> PoolLeftBehindError:
        """What a child gets in place of a step."""
        return PoolLeftBehindError(
            "the graph pool was made before this process was forked, and cannot be used in it",
            got=self._why,
            expected="a pool of this process's own",
            advice=self._advice,
        )


def in_capture(what: str) -> LeftBehind:
    """Another thread was in a capture or a trial: what it would put back stays as it was."""
    return LeftBehind(
        f"{what} was under way in another thread, and the state of the model is what it had made "
        "of it",
        "fork while nothing is captured or tried; or make model, pool and runner in the child",
    )


def without_device(name: str) -> LeftBehind:
    """What the device knew of the parent process, it does not know of a child."""
    return LeftBehind(
        f"graphs and memory of platform {name!r} do not survive a fork",
        "start the process with multiprocessing's 'spawn', and make model and runner in it",
    )
