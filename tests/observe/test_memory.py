"""What graphs take together, predicted from the first two, shown, and warned of."""

from __future__ import annotations

import io
import json
import re
import warnings
from dataclasses import replace

import pytest
import torch

from graphrt import Budget, GraphCost, GraphMode, GraphRunner, InputSpec
from graphrt._forecast import GraphMemory, predicted
from graphrt.cli.app import app
from graphrt.core.base.texts import seconds_text, size_text
from graphrt.core.device.contract import MemoryFigures
from graphrt.errors import GraphMemoryWarning, InvalidOptionError
from graphrt.observe import MemoryWatch, page
from graphrt.observe.memory import taken_and_predicted

MIB = 1 << 20
SIZES = [1, 2, 4, 8, 16, 32, 64]


def runner_of(sizes: list[int] = SIZES, **more: object) -> GraphRunner[torch.Tensor]:
    """Its graphs take some MiB: a row is 64 KiB, of which a step makes several."""
    weight = torch.ones(16384)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * weight).exp().sum(1, keepdim=True)

    return GraphRunner(
        forward,
        mode="FULL",
        sizes=sizes,
        inputs={"x": InputSpec(torch.float32, ("tokens", 16384))},
        platform="cpu",
        **more,  # type: ignore[arg-type]
    )


def taken(tokens: list[int], pool: list[int], driver: list[int], mode: str = "FULL"):
    return [
        GraphMemory(mode, size, pool_mib * MIB, driver_mib * MIB)
        for size, pool_mib, driver_mib in zip(tokens, pool, driver, strict=True)
    ]


def test_later_graphs_are_predicted_to_take_only_driver_memory():
    forecast = predicted(taken([512, 256], [200, 0], [12, 2]), [("FULL", 64)] * 10)
    assert forecast is not None
    assert (forecast.captured, forecast.graphs) == (2, 12)
    assert forecast.captured_bytes == 214 * MIB
    assert forecast.left_bytes == 20 * MIB


def test_a_single_new_segment_does_not_predict_a_segment_per_graph():
    forecast = predicted(taken([512, 496], [200, 20], [0, 0]), [("FULL", 480)] * 30)
    assert forecast is not None and forecast.left_bytes == 0


def test_predicted_kept_memory_grows_with_the_tokens_of_a_graph():
    forecast = predicted(taken([512, 256], [500, 276], [0, 0]), [("FULL", 128), ("FULL", 64)])
    assert forecast is not None and forecast.left_bytes == (128 + 64) * MIB


def test_predicted_driver_memory_of_a_graph_is_bounded_by_the_first_graphs():
    # It takes memory in blocks, so one graph alone may seem to take more than it does.
    forecast = predicted(taken([8, 4], [20, 0], [2, 4]), [("FULL", 2), ("FULL", 1)])
    assert forecast is not None and forecast.left_bytes == 4 * MIB


def test_a_second_mode_is_predicted_from_its_own_first_two_graphs():
    pieces = taken([512, 256], [200, 0], [12, 6], "PIECEWISE")
    left = [("FULL", 128), ("FULL", 64)]
    before = predicted(pieces, left)
    after = predicted(pieces + taken([512, 256], [0, 0], [2, 1]), left)
    assert before is not None and before.left_bytes == 12 * MIB
    assert after is not None and after.left_bytes == 3 * MIB


def test_driver_memory_left_over_by_the_first_graph_is_shared_in_the_prediction():
    # The first two of 51 graphs of a Llama of 1B on an H100, of which each took 2.4 MiB.
    forecast = predicted(taken([512, 496], [202, 0], [4, 0]), [("FULL", 480)] * 49)
    assert forecast is not None and forecast.left_bytes == 49 * 2 * MIB


@pytest.mark.parametrize("count", [0, 1])
def test_no_memory_is_predicted_before_the_second_graph(count):
    assert predicted(taken([8], [20], [2])[:count], [("FULL", 4)]) is None


def test_graphs_of_unknown_memory_give_no_prediction():
    assert predicted([GraphMemory("FULL", 8), GraphMemory("FULL", 4)], [("FULL", 2)]) is None


def test_a_memory_watch_predicts_the_memory_of_all_graphs_within_a_tenth():
    runner = runner_of()
    watch = MemoryWatch(runner)
    runner.capture(progress=watch)
    assert [each.captured for each in watch.forecasts] == [2, 3, 4, 5, 6, 7]
    real = runner.report().pool_bytes
    first, last = watch.forecasts[0], watch.forecasts[-1]
    assert real and real > 4 * MIB and last.bytes == real and last.left_bytes == 0
    assert abs(first.bytes - real) <= max(0.1 * real, 64 * MIB) and first.bytes >= real / 2


def test_the_progress_bar_shows_the_predicted_memory():
    runner, stream = runner_of(), io.StringIO()
    runner.capture(progress=MemoryWatch(runner, stream=stream))
    lines = stream.getvalue().split("\r")
    assert "left" not in lines[2]
    assert re.search(r"left: about [\d.]+ (ms|us), [\d.]+ (B|KiB|MiB), next: ", lines[3])
    assert lines[-1].startswith("captured 7 graphs in ") and lines[-1].rstrip().endswith(" MiB")


@pytest.mark.parametrize("by", ["limit_bytes", "budget"])
def test_a_too_small_memory_limit_warns_once_after_two_graphs(by):
    limit = 1 * MIB
    # Its costs are too low, as costs by hand may be.
    costs = {GraphMode.FULL: GraphCost(device_bytes=1)}
    budget = {"budget": Budget(device_bytes=limit, cost=costs)} if by == "budget" else {}
    runner = runner_of(**budget)
    watch = MemoryWatch(runner, **({} if budget else {"limit_bytes": limit}))
    with pytest.warns(
        GraphMemoryWarning, match="after 2 of 7 graphs; 1.0 MiB is the limit"
    ) as all_of:
        runner.capture(progress=watch)
    assert len(all_of) == 1
    assert len(runner.report().graphs) == 7


def test_a_memory_watch_warns_again_after_release_and_the_report_adds_up():
    runner = runner_of()
    watch = MemoryWatch(runner, limit_bytes=MIB)
    for _ in range(3):
        with pytest.warns(GraphMemoryWarning, match="after 2 of 7 graphs; 1.0 MiB is the limit"):
            runner.capture(progress=watch)
        report = runner.report()
        assert sum(graph.pool_bytes or 0 for graph in report.graphs) == report.pool_bytes
        assert taken_and_predicted(report.to_dict()) is not None
        assert [each.captured for each in watch.forecasts] == [2, 3, 4, 5, 6, 7]
        runner.release()


def test_the_memory_warning_raised_as_error_ends_capture_and_keeps_earlier_graphs():
    runner = runner_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphMemoryWarning)
        with pytest.raises(GraphMemoryWarning):
            runner.capture(progress=MemoryWatch(runner, limit_bytes=MIB))
    assert len(runner.report().graphs) == 2
    with torch.no_grad():
        runner(x=torch.ones(33, 16384))
    assert runner.last_dispatch.reason.name == "HIT"


def test_too_little_free_device_memory_gives_a_warning(monkeypatch):
    runner = runner_of()
    watch = MemoryWatch(runner)
    runner.capture(progress=watch)
    assert not watch._warned
    full = MemoryFigures(free_bytes=MIB, total_bytes=1 << 30)
    monkeypatch.setattr(type(runner.platform), "memory_figures", lambda self: full)
    with pytest.warns(GraphMemoryWarning, match=r"9.0 MiB of it are still to come, and 1.0 MiB"):
        watch._warn_if_short(replace(watch.forecasts[0], bytes=19 * MIB, captured_bytes=10 * MIB))


def test_a_sufficient_memory_limit_gives_no_warning(recwarn):
    runner = runner_of()
    runner.capture(progress=MemoryWatch(runner, limit_bytes=1 << 30))
    assert not [each for each in recwarn if each.category is GraphMemoryWarning]


@pytest.mark.parametrize("limit", [0, -1, "many", 1.5])
def test_invalid_memory_limits_are_refused(limit):
    with pytest.raises(InvalidOptionError):
        MemoryWatch(runner_of(), limit_bytes=limit)


def test_a_memory_watch_of_a_plain_module_is_refused():
    with pytest.raises(InvalidOptionError, match="runner"):
        MemoryWatch(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_saved_report_shows_predicted_and_taken_memory(tmp_path):
    from typer.testing import CliRunner

    runner = runner_of()
    runner.capture()
    report, path = runner.report(), tmp_path / "run.json"
    report.save(path)
    told = taken_and_predicted(json.loads(path.read_text()))
    assert told is not None
    took, beforehand = told
    assert took.endswith("MiB") and beforehand.endswith("MiB")
    printed = CliRunner().invoke(app, ["report", str(path)], catch_exceptions=False).output
    assert f"Memory: {took}, {beforehand} predicted after two graphs" in printed
    assert f"{beforehand} predicted" in page(report)


def test_a_report_of_a_single_graph_has_no_predicted_memory():
    runner = runner_of([8])
    runner.capture()
    assert taken_and_predicted(runner.report().to_dict()) is None


@pytest.mark.parametrize("kind", ["report", "data", "file"])
def test_a_saved_report_says_what_a_capture_takes_before_its_first_graph(kind, tmp_path):
    """With a size that the report has not, it says how many graphs it speaks of."""
    before = runner_of()
    before.capture()
    report = before.report()
    report.save(tmp_path / "run.json")
    given = {"report": report, "data": report.to_dict(), "file": tmp_path / "run.json"}[kind]
    for sizes, of in ((SIZES, ""), ([*SIZES, 128], " for 7 of 8")):
        runner, stream = runner_of(sizes), io.StringIO()
        runner.capture(progress=MemoryWatch(runner, stream=stream, report=given))
        lines = stream.getvalue().split("\r")
        size = size_text(report.pool_bytes or 0)
        assert f"left: {seconds_text(report.capture_s)}, {size} by the report{of}" in lines[1]
        assert "left: about " in lines[3] and "report" not in lines[3]


def test_a_report_of_other_graphs_says_nothing_of_a_capture_and_is_refused():
    before = runner_of([3])
    before.capture()
    with pytest.raises(InvalidOptionError, match=r"FULL \[3 tokens 3 reqs\]"):
        MemoryWatch(runner_of(), report=before.report())
