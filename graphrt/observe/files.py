"""Reports in files: those of `RunnerReport.save` and `graphrt.observe.trace`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.base.files import read_bounded
from graphrt.core.base.option_values import shown
from graphrt.core.base.texts import printable
from graphrt.core.runner.report import FORMAT, RunnerReport
from graphrt.observe import figures

MOST_BYTES = 1 << 30
"""The largest file that is read: a trace of 100,000 steps has 30 MiB."""


@dataclass(frozen=True)
class Run:
    """A report of one runner as plain data."""

    label: str
    figures: Mapping[str, Any]


def load_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain data of a saved report; of a trace, that of its first runner. Raises
    `InvalidOptionError` for a file that is neither, or that a later version has written."""
    return dict(runs_of(path)[0].figures)


def runs_of(
    source: RunnerReport | Mapping[str, Any] | str | os.PathLike[str], label: str = "run"
) -> list[Run]:
    """The runs of a report, of its plain data, or of a file: a saved report, or a trace, in which
    each runner is one. Files are labelled by their names. Raises `InvalidOptionError`."""
    if isinstance(source, RunnerReport):
        return [Run(label, source.to_dict())]
    try:
        if isinstance(source, Mapping):
            return [Run(label, _checked(source, "the data"))]
        path = Path(source)
        data = json.loads(read_bounded(path, MOST_BYTES))
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__}")
        name = printable(path.stem, kept="")
        if "traceEvents" not in data:
            return [Run(name, _checked(data, str(path)))]
        metadata = data.get("otherData")
        reports = metadata.get("graphrt_reports") if isinstance(metadata, dict) else None
        if not isinstance(reports, list) or not reports:
            raise ValueError("a trace of something else")
        named = (
            [name]
            if len(reports) == 1
            else [f"{name}, runner {at + 1}" for at in range(len(reports))]
        )
        return [
            Run(name, _checked(each, str(path))) for name, each in zip(named, reports, strict=True)
        ]
    except InvalidOptionError:
        raise  # another version of the format
    except (OSError, TypeError, ValueError, RecursionError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidOptionError(
            "the report cannot be read",
            got=f"{shown(source if isinstance(source, Mapping) else str(source))} ({why})"[:500],
            expected="a file of report().save(path) or graphrt.observe.trace(path, runner)",
            advice="check the path",
        ) from error


def _checked(data: Any, where: str) -> Mapping[str, Any]:
    """A report of this version, as `graphrt.observe.figures` reads it."""
    version = data.get("graphrt_report") if isinstance(data, Mapping) else None
    if version != FORMAT:
        raise InvalidOptionError(
            "the report cannot be read",
            got=f"{where}: format {shown(version)}",
            expected=f"format {FORMAT}",
            advice="save it by runner.report().save(path) of this version of graphrt",
        )
    return figures.report(data, "")  # type: ignore[no-any-return]
