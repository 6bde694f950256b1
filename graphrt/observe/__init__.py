"""Shows what a runner does: pages, timelines, metrics.

- `print(report_text(runner.report()))`: what deserves a look, with what to try, and a table of the
  graphs; `findings(report)` has it as objects.
- `write_page("run.html", runner.report())`: one page, which needs no network; two reports are
  compared. `graphrt report run.json --html run.html` does the same for saved reports.
- `with trace("trace.json", runner):` a timeline for Perfetto, and ranges for torch's profiler.
- `Metrics(runner).read()`: counters and latencies, to poll.
- `capture(progress=MemoryWatch(runner))`: the bar of `progress=True`, with a warning where the
  memory that it predicts is not there; a saved report predicts before the first graph.
- `with ranges(runner): runner.capture()`, later `annotate("profile.json", runner)`: the modules and
  ranges of each kernel of a replay, in a trace of torch's profiler.
- `print(layers(runner, Batch(8)))`: milliseconds of each layer of a replay.
- `runner.verify(nan=True)`, `GraphOptions(find_nan=True)`: the operator that makes a NaN.
- `explain(forward, inputs)`: what keeps a forward out of graphs, and how much faster they are.

Everything here reads a runner from outside; `graphrt.core` knows nothing of it. A step that is not
observed costs nothing more.
"""

from __future__ import annotations

from graphrt._forecast import Forecast
from graphrt.observe.explaining import Explanation, Obstacle, explain
from graphrt.observe.files import load_report
from graphrt.observe.findings import Finding
from graphrt.observe.layers import LayerTime, LayerTimes, layers
from graphrt.observe.memory import MemoryWatch
from graphrt.observe.metrics import Histogram, Metrics, Reading
from graphrt.observe.nans import NanError, NanWarning
from graphrt.observe.pages.whole import page, write_page
from graphrt.observe.ranges import Annotated, annotate, ranges
from graphrt.observe.report import findings, report_text
from graphrt.observe.timeline import Trace, trace

__all__ = [
    "Annotated",
    "Explanation",
    "Finding",
    "Forecast",
    "Histogram",
    "LayerTime",
    "LayerTimes",
    "MemoryWatch",
    "Metrics",
    "NanError",
    "NanWarning",
    "Obstacle",
    "Reading",
    "Trace",
    "annotate",
    "explain",
    "findings",
    "layers",
    "load_report",
    "page",
    "ranges",
    "report_text",
    "trace",
    "write_page",
]
