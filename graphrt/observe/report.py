"""The report of a runner as text, with its findings.

Findings come from the plain data of a report (`RunnerReport.to_dict`), of this process or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphrt.core.base.texts import printable
from graphrt.core.runner.report import RunnerReport, report_lines
from graphrt.observe.figures import in_its_words
from graphrt.observe.findings import Finding, findings_of

_MARKS = {"error": "!!", "warning": "! ", "note": "- "}


def findings(report: RunnerReport) -> tuple[Finding, ...]:
    """What deserves a look: quarantines, eager steps, padding, each with something to try; the
    worst first."""
    return findings_of(report.to_dict())


def report_text(report: RunnerReport | Mapping[str, Any]) -> str:
    """The text of `print(report)`, of a report or of its plain data, with the findings before the
    table."""
    figures = report.to_dict() if isinstance(report, RunnerReport) else report
    figures = in_its_words(figures, figures)
    lines = report_lines(figures, _finding_lines(findings_of(figures)))
    return printable(str(in_its_words(figures, "\n".join(lines))))


def _finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{_MARKS[finding.level]} {finding.what}"
        yield from (f"     {line}" for line in finding.why.splitlines())
        yield f"     try: {finding.advice}"
