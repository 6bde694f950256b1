"""`graphrt explain`: a forward of the user's own, named as module:name."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from graphrt.core.base.errors import GraphRTError, InvalidInputError, InvalidOptionError
from graphrt.core.base.option_values import shown
from graphrt.core.base.texts import error_line, printable
from graphrt.core.capture.refusals import source_of
from graphrt.core.inputs.spec import InputSpec
from graphrt.observe.explaining import explain

_INPUT = re.compile(r"(\w+)=(\w+)\[([\w+, ]+)\]", re.ASCII)
# More digits, which Python may not read, are left to `InputSpec`, which refuses them.
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
# Raised as they are; all else of the user's code, SystemExit too, is named.
_RAISED = (GraphRTError, KeyboardInterrupt)


def print_explanation(
    target: str,
    inputs: Sequence[str],
    *,
    tokens: int,
    platform: str | None,
    made: bool,
    as_json: bool,
) -> int:
    """Explain a forward; 1 if nothing could be captured, or the replay does not equal it. With
    `made` the target is called for the forward."""
    found = _found(target)
    if isinstance(found, type) and not made:
        raise InvalidOptionError(
            "the target is a class, and no forward",
            got=f"class {target}",
            expected="a function or a module that was made",
            advice="--made, which makes an instance without arguments; or name an instance, or a "
            "function that returns one, with --made",
        )
    specs = dict(_input(text) for text in inputs)
    forward = _made(target, found) if made else found
    try:
        explanation = explain(forward, specs, tokens=tokens, platform=platform)
    except _RAISED:
        raise
    except BaseException as error:
        # Such as a float8 input of an operator that this device has for other dtypes alone.
        where, written = source_of(error), ", ".join(inputs)
        raise InvalidInputError(
            "the forward fails on such inputs",
            got=error_line(error) + (f" at {where}" if where else ""),
            expected=f"a forward that takes {printable(written)}",
            advice="another dtype or shape; the forward's own call has the traceback",
        ) from error
    if explanation.code:
        module, _, name = target.partition(":")
        imported = f"from {module} import {name.partition('.')[0]}"
        call = f"{name}{'()' * made}"
        lines = [imported] if call == "forward" else [imported, f"forward = {call}"]
        explanation = replace(explanation, code="\n".join([*lines, explanation.code]))
    print(json.dumps(asdict(explanation), indent=1) if as_json else explanation)
    return 1 if explanation.mode is None or explanation.trial is not None else 0


def _found(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    # As `python3 -m` does: an installed command would not find modules of the current folder.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target_object: Any = importlib.import_module(module)
        for part in name.split("."):
            target_object = getattr(target_object, part)
    except KeyboardInterrupt:
        raise
    # A module may raise anything, and a script ends the process where it is imported.
    except BaseException as error:
        raise InvalidOptionError(
            "there is no such forward",
            got=f"{target} ({error_line(error)})",
            expected="module:name of a function or a module, in a module that can be imported",
            advice="graphrt explain engine.model:forward --input x=float32[tokens,16]",
        ) from error
    return _callable(target, target_object)


def _made(target: str, maker: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that the target returns."""
    try:
        forward = maker()
    except _RAISED:
        raise
    except BaseException as error:
        raise InvalidOptionError(
            "the forward cannot be made",
            got=f"{target}() raises {error_line(error)}",
            expected="a function or a class that --made calls without arguments",
            advice="name a function of your own that makes it: def made(): return Model(config)",
        ) from error
    return _callable(f"{target}()", forward)


def _callable(name: str, value: Any) -> Callable[..., Any]:
    """Raise `InvalidOptionError` for what is no forward."""
    if not callable(value):
        raise InvalidOptionError(
            "the target cannot be called",
            got=f"{name}, a {type(value).__name__}",
            expected="a function or a module",
            advice="name the function; --made calls it for the forward",
        )
    return value  # type: ignore[no-any-return]


def _input(text: str) -> tuple[str, InputSpec]:
    written = _INPUT.fullmatch(text.strip())
    dtype = getattr(torch, written[2], None) if written else None
    if written is None or not isinstance(dtype, torch.dtype):
        raise InvalidOptionError(
            "--input cannot be read",
            got=shown(text),
            expected="name=dtype[axis,...], where an axis is tokens, reqs, reqs+1 or a number",
            advice="--input x=float32[tokens,16]",
        )
    axes = [axis.strip() for axis in written[3].split(",")]
    return written[1], InputSpec(dtype, tuple(int(a) if _NUMBER.fullmatch(a) else a for a in axes))
