"""When nothing may be compiled any more."""

from __future__ import annotations

from graphrt.compile.errors import CompileSealedError
from graphrt.core.base.option_values import shown
from graphrt.core.replay.recording import current_capture


def check_may_compile(module: object, *, sealed: bool) -> None:
    """Raise `CompileSealedError` after `seal()`, and inside of an open capture."""
    if sealed:
        when, advice = "after seal()", "before serving, or capture() with this forward"
    elif current_capture() is not None:
        when, advice = "inside of an open capture", "before capture(), or leave warm-ups on"
    else:
        return
    raise CompileSealedError(
        f"a module would have to be compiled {when}",
        got=shown(module),
        expected="a module that was compiled before",
        advice=f"call ensure_compiled() {advice}",
    )
