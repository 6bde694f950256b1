"""The report of a runner: what it prints, its plain data, and its findings."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from graphrt import (
    Batch,
    BatchDescriptor,
    Dispatch,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphRunner,
    InputSpec,
    Reason,
)
from graphrt.core.dispatch.dispatcher import COUNTED
from graphrt.errors import GraphQuarantinedWarning
from graphrt.observe import findings, report_text, write_page
from tests.observe.planted import MIXED, PADDED, TOO_LARGE, planted_runner, run_planted, step

KEYS = {
    "graphrt_report", "versions", "mode", "device", "capture_s", "pool_bytes",
    "driver_bytes", "graphs", "dropped", "missing", "steps", "live_tokens", "padded_tokens",
    "padding", "staging_waits", "platform", "axis", "trust", "limit", "uncompiled",
}  # fmt: skip
GRAPH_KEYS = {
    "graph", "mode", "tokens", "reqs", "attempts", "capture_s", "warm_up_s", "began_s",
    "pool_bytes", "driver_bytes", "streams", "steps", "not_served", "sizes", "live_tokens",
    "padded_tokens", "trial", "tried_steps", "deterministic", "failure", "notes", "replay_s",
    "eager_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def planted():
    runner = planted_runner()
    run_planted(runner)
    return runner.report()


def test_the_printed_report_lists_each_planted_fault_with_advice(planted):
    lines = report_text(planted).splitlines()
    faults = [line for line in lines if line[:2] in ("!!", "! ")]
    quarantine, too_large, padding = faults
    first = "!! FULL [16 tokens 16 reqs variant='mixed'] and 2 more in quarantine: "
    assert quarantine == f"{first}{MIXED} steps ran eagerly"
    assert too_large == f"!  {TOO_LARGE} steps of 26 ran eagerly, as TOO_LARGE (20 tokens)"
    last = "ran in FULL [16 tokens 16 reqs]: 50% padding"
    assert padding == f"!  {PADDED} steps (8 tokens) {last}"
    assert sum(line.startswith("     try: ") for line in lines) == 3
    assert "aten.sub.Tensor" in report_text(planted) and "plan a size of 20" in report_text(planted)
    assert "add 8 to sizes=" in report_text(planted)


def test_a_quarantine_that_recapture_has_ended_is_a_note_in_report_and_page(tmp_path: Path):
    factor = [2.0]
    runner = GraphRunner(
        lambda x: x * factor[0],
        mode="FULL",
        sizes=[2],
        inputs={"x": InputSpec(torch.float32, ("tokens", 4))},
        outputs=("tokens", 4),
        options=GraphOptions(check="always"),
        platform="cpu",
    )
    runner.capture()
    factor[0] = 3.0
    with pytest.warns(GraphQuarantinedWarning):
        runner(x=torch.ones(2, 4))
    for _ in range(2):
        runner(x=torch.ones(2, 4))
    (now,) = findings(runner.report())
    assert now.level == "error" and "in quarantine: 3 steps ran eagerly" in now.what
    runner.recapture()
    runner(x=torch.ones(2, 4))
    report = runner.report()
    (ended,) = findings(report)
    assert ended.level == "note"
    assert ended.what == "a quarantine of FULL [2 tokens 2 reqs] has ended: 3 steps ran eagerly"
    assert f"-  {ended.what}" in report_text(report)
    write_page(tmp_path / "page.html", report)
    assert ended.what in (tmp_path / "page.html").read_text()


def test_a_raised_step_is_reported_as_failed_and_not_as_eager():
    divisor = [1]

    def forward(x):
        return x * (1 // divisor[0])

    runner = GraphRunner(
        forward,
        mode="FULL",
        sizes=[4],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        platform="cpu",
    )
    runner.capture()
    divisor[0] = 0
    with pytest.raises(ZeroDivisionError):
        step(runner, 3)
    (finding,) = findings(runner.report())
    assert str(finding) == "1 step of 1 raised, as FAILED"


def test_the_printed_report_has_a_row_of_figures_per_graph(planted):
    rows = {line[:40].strip(): line.split() for line in report_text(planted).splitlines()}
    row = rows["FULL [16 tokens 16 reqs]"]
    assert row[5:7] == [str(PADDED), "50%"] and row[-1] == "tried"
    assert "KiB" in row and {"ms", "us", "s"} & set(row)
    assert f"Steps: 26: 16 HIT, {TOO_LARGE} TOO_LARGE, {MIXED} QUARANTINED" in report_text(planted)


def test_the_plain_data_of_a_report_is_json_with_the_documented_keys(planted):
    data = planted.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["graphrt_report"] == 2 and set(data) == KEYS
    assert all(set(graph) == GRAPH_KEYS for graph in data["graphs"])
    assert [each.level for each in findings(planted)] == ["error", "warning", "warning"]


def test_live_batch_sizes_are_counted_per_graph_and_per_reason(planted):
    data = planted.to_dict()
    sizes = {graph["graph"]: graph["sizes"] for graph in data["graphs"]}
    assert sizes["FULL [16 tokens 16 reqs]"] == [[8, PADDED]]
    assert sizes["FULL [4 tokens 4 reqs]"] == [[4, 2]]
    assert sizes["FULL [4 tokens 4 reqs variant='mixed']"] == [[3, MIXED]]
    (missed,) = [each for each in data["steps"] if each["reason"] == "TOO_LARGE"]
    assert missed["sizes"] == [[20, TOO_LARGE]] and missed["steps"] == TOO_LARGE
    quarantined = next(graph for graph in data["graphs"] if graph["not_served"])
    assert quarantined["not_served"] == {"QUARANTINED": MIXED} and quarantined["steps"] == 0


def test_live_sizes_are_counted_with_the_c_and_the_python_dispatcher():
    runner = planted_runner()
    for entrance in (runner._run, runner._engine.step):
        runner._run = entrance
        for tokens in (3, 3, 9, 4):
            step(runner, tokens)
    sizes = runner.report().sizes
    plain = {
        key[1].num_tokens: value
        for key, value in sizes.items()
        if type(key) is tuple and key[1].variant is None
    }
    assert plain == {2: {}, 4: {3: 4, 4: 2}, 16: {9: 2}}


def test_counts_of_ever_new_batch_sizes_use_bounded_memory():
    dispatcher = GraphDispatcher("FULL")
    for tokens in range(1, 3 * COUNTED + 1):
        dispatcher.dispatch(Batch(tokens))
    sizes = dispatcher.sizes()[Reason.NO_GRAPH]
    assert sum(sizes.values()) == 3 * COUNTED == dispatcher.counts()[Reason.NO_GRAPH]
    # The next ones are rounded up, by an eighth at most.
    assert sizes[COUNTED] == 1 and sizes[COUNTED + 64] == 64
    assert len(sizes) == COUNTED + 13 and max(sizes) == 3 * COUNTED


def test_a_rounded_live_size_is_never_larger_than_its_graph():
    dispatcher, tokens = GraphDispatcher("FULL"), COUNTED + 100
    dispatcher.publish("FULL", BatchDescriptor(tokens))
    for live in range(1, tokens + 1):
        dispatcher.dispatch(Batch(live))
    (sizes,) = [sizes for key, sizes in dispatcher.sizes().items() if type(key) is tuple]
    assert sum(sizes.values()) == tokens and max(sizes) == tokens
    assert sizes[tokens] == 36 and sizes[tokens - 36] == 64


def test_reported_capture_times_include_warm_ups_and_do_not_overlap(planted):
    records = planted.graphs
    assert all(0 < record.warm_up_s < record.capture_s for record in records)
    for before, after in pairwise(records):
        assert before.began_s + before.capture_s <= after.began_s


def test_the_padding_finding_names_only_the_sizes_that_pad():
    runner = planted_runner()
    for _ in range(30):
        step(runner, 16)
    for tokens, count in ((5, 2), (8, 8), (7, 4)):
        for _ in range(count):
            step(runner, tokens)
    (finding,) = findings(runner.report())
    assert finding.what.startswith("14 steps (5 to 8 tokens) ran in FULL [16 tokens")
    # (16 - 5) * 2 + (16 - 8) * 8 + (16 - 7) * 4, of 44 steps.
    assert finding.why == "122 of 704 computed rows are their padding"
    assert finding.advice.startswith("add 8 to sizes=, which saves 112 rows")


def test_a_report_of_a_run_without_faults_has_no_findings():
    runner = planted_runner()
    for _ in range(30):
        step(runner, 4)
        step(runner, 15)
    # Half of its rows are padding, which are few of all.
    step(runner, 8)
    assert findings(runner.report()) == ()
    assert "!" not in report_text(runner.report())


def test_graphs_that_served_no_step_are_a_finding_after_200_steps():
    runner = planted_runner()
    for _ in range(200):
        step(runner, 4)
    (finding,) = findings(runner.report())
    assert finding.level == "note" and "served no step" in finding.what


def test_a_runner_without_captured_graphs_reports_not_captured_with_advice():
    runner = planted_runner()
    runner.release()
    for _ in range(3):
        step(runner, 4)
    report = runner.report()
    assert len(report.to_dict()["missing"]) == 6
    (finding,) = findings(report)
    assert "as NOT_CAPTURED (4 tokens)" in finding.what and "capture()" in finding.advice


def test_reprs_of_reports_and_dispatches_are_short_and_evaluable(planted):
    assert repr(planted) == "RunnerReport(FULL, 6 graphs, 26 steps, 16 by graphs)"
    descriptor = BatchDescriptor(8, 8)
    assert repr(descriptor) == "BatchDescriptor(8, num_reqs=8)"
    assert repr(Batch(8, query_len=2)) == "Batch(8, query_len=2)"
    hit = Dispatch(GraphMode.FULL, descriptor, Reason.HIT, 3)
    assert repr(hit) == "Dispatch(FULL [8 tokens 8 reqs], HIT, slot 3)"
    assert repr({Reason.HIT: 7, GraphMode.FULL: 1}) == "{Reason.HIT: 7, GraphMode.FULL: 1}"
    for value in (descriptor, Batch(3, 1, 3, (4,), 2, "a", frozenset())):
        assert eval(repr(value)) == value


def test_a_report_is_saved_as_json(planted, tmp_path: Path):
    planted.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == planted.to_dict()


def test_the_printed_table_of_many_graphs_is_shortened():
    from graphrt import GraphRunner, InputSpec

    runner = GraphRunner(
        lambda x: x + 1,
        mode="FULL",
        sizes=list(range(1, 41)),
        inputs={"x": InputSpec(torch.float32, ("tokens", 2))},
        platform="cpu",
    )
    runner.capture()
    runner(x=torch.zeros(40, 2))
    lines = report_text(runner.report()).splitlines()
    assert "... and 16 graphs with fewer steps" in lines
    assert any(line.startswith("FULL [40 tokens") for line in lines)
