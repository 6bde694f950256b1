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
from graphrt.core.runner.report import FORMAT, RunnerReport

MOST_BYTES = 1 << 30
"""The largest file that is read: a trace of 100,000 steps has 30 MiB."""


@dataclass(frozen=True)
class Run:
    """A report of one runner as plain data, with the events of its timeline if it has one."""

    label: str
    figures: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...] = ()


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
    if isinstance(source, Mapping):
        return [Run(label, _checked(source, "the data"))]
    path = Path(source)
    try:
        data = json.loads(read_bounded(path, MOST_BYTES))
    except OSError as error:
        raise _no_report(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _no_report(path, str(error)) from error
    if not isinstance(data, dict):
        raise _no_report(path, f"a {type(data).__name__}")
    if "traceEvents" not in data:
        return [Run(path.stem, _checked(data, str(path)))]
    metadata = data.get("otherData")
    reports = metadata.get("graphrt_reports") if isinstance(metadata, dict) else None
    if not reports:
        raise _no_report(path, "a trace of something else")
    events = data["traceEvents"]
    return [
        Run(
            path.stem if len(reports) == 1 else f"{path.stem}, runner {pid}",
            _checked(figures, str(path)),
            tuple(event for event in events if event.get("pid") == pid),
        )
        for pid, figures in enumerate(reports, 1)
    ]


def _checked(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    version = data.get("graphrt_report")
    if version != FORMAT:
        raise InvalidOptionError(
            "the report cannot be read",
            got=f"{where}: format {shown(version)}",
            expected=f"format {FORMAT}",
            advice="save it by runner.report().save(path) of this version of graphrt",
        )
    return data


def _no_report(path: Path, why: str) -> InvalidOptionError:
    return InvalidOptionError(
        "the report cannot be read",
        got=f"{str(path)[:200]!r} ({why})",
        expected="a file of report().save(path) or graphrt.observe.trace(path, runner)",
        advice="check the path",
    )
