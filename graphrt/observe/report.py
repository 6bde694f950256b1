"""The report of a runner as text, with what deserves a look.

Findings are found in the plain data of a report (`RunnerReport.to_dict`), of this process or of a
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphrt.core.runner.report import RunnerReport, report_lines
from graphrt.observe.findings import Finding, findings_of

_MARKS = {"error": "!!", "warning": "! ", "note": "- "}


def findings(report: RunnerReport) -> tuple[Finding, ...]:
    """What deserves a look: quarantines, eager steps, padding, each with something to try; the
    worst first."""
    return findings_of(report.to_dict())


def report_text(report: RunnerReport | Mapping[str, Any]) -> str:
    """What `print(report)` shows, of a report or of the plain data of one, with what deserves a
    look before the table."""
    figures = report.to_dict() if isinstance(report, RunnerReport) else report
    return "\n".join(report_lines(figures, _told(findings_of(figures))))


def _told(by_rule: Iterable[Finding]) -> Iterator[str]:
    for finding in by_rule:
        yield f"{_MARKS[finding.level]} {finding.what}"
        yield from (f"     {line}" for line in finding.why.splitlines())
        yield f"     try: {finding.advice}"
