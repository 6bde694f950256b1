"""The HTML page of a run: its findings, no external resources, and the comparison of two runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from graphrt import Batch, GraphRunner, InputSpec
from graphrt.core.base.errors import InvalidOptionError
from graphrt.cpu.platform import CpuPlatform
from graphrt.observe import load_report, page, report_text, trace, write_page
from tests.observe.planted import places, planted_runner, run_planted, short_document, step

VOID = {"meta", "br", "i/"}


class Outline(HTMLParser):
    """Which tags are open, what is written where, and what the page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.findings: list[str] = []
        self.titles: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "li":
            self.findings.append("")
        if tag in ("h1", "h2", "h3"):
            self.titles.append("")
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]
        assert not any(key.startswith("on") for key in named)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "li" in self.open:
            self.findings[-1] += data
        if {"h1", "h2", "h3"} & set(self.open[-1:]):
            self.titles[-1] += data


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    runner, path = planted_runner(), tmp_path_factory.mktemp("page") / "planted.json"
    with trace(path, runner):
        run_planted(runner)
        runner.measure()
    return path


def test_the_page_lists_each_planted_fault_with_advice(traced: Path):
    quarantine, too_large, padding = Outline(page(traced)).findings
    assert quarantine.startswith("Fault") and "quarantine" in quarantine
    assert "aten.sub.Tensor" in quarantine and "Try: let each row depend" in quarantine
    assert "TOO_LARGE (20 tokens)" in too_large and "Try: plan a size of 20" in too_large
    assert "12 steps (8 tokens) ran in" in padding and "50% padding" in padding
    assert "add 8 to sizes=, which saves 96 rows" in padding
    assert "Try: add 8 to sizes=" in padding


def test_a_page_has_all_sections_and_loads_no_external_resource(traced: Path):
    text = page(traced)
    outline = Outline(text)
    assert outline.open == [] and outline.fetched == []
    assert not re.search("https?:|@import|url\\(", text)
    assert text.startswith("<!doctype html>") and 'lang="en"' in text
    assert outline.titles == [
        "graphrt run: FULL on cpu",
        "What deserves a look",
        "In figures",
        "Graphs",
        "Time of a step over its size",
        "Steps by reason",
        "Padding over batch size",
        "Where capture time went",
        "Memory over captures",
        "Memory that graphs read",
    ]


def test_a_page_of_a_run_without_steps_omits_padding():
    runner = planted_runner()
    titles = Outline(page(runner.report())).titles
    assert "Padding over batch size" not in titles
    runner.release()
    assert "None is captured." in page(runner.report())


def test_the_widths_of_bars_equal_the_shares_of_their_figures(traced: Path):
    text = page(traced)
    row = re.search(r'data-v="8">8</th><td class="wide">(.*?)</td>', text)
    # 96 live and 96 padding rows: the longest bar.
    assert row is not None
    assert re.findall(r'class="(\w+)" x="([\d.]+)" width="([\d.]+)"', row[1]) == [
        ("live", "0.00", "50.00"),
        ("pad", "50.00", "50.00"),
    ]


def test_host_names_with_markup_are_escaped_on_the_page():
    bad = '<img src="http://x" onerror="alert(1)">'
    runner = GraphRunner(
        lambda x: x - x.mean(0),
        mode="FULL",
        sizes=[2],
        variants=[bad],
        inputs={"x": InputSpec(torch.float32, ("tokens", 8))},
        outputs=("tokens", 8),
        platform="cpu",
    )
    runner.capture()
    runner(Batch(2, variant=bad), x=torch.ones(2, 8))
    text = page(runner.report(), title=bad)
    assert "<img" not in text and "&lt;img" in text
    assert Outline(text).fetched == []


MARKUP = """x"'><script>alert(1)</script><img src=x onerror=alert(1)> onclick=alert(1) x="""


class Elements(HTMLParser):
    """Every tag, attribute and class of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts = 0
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.found |= {f"<{tag} {key}=>" for key, _ in attrs} | {f"<{tag}>"}
        classes = dict(attrs).get("class") or ""
        self.found |= {f".{word}" for word in classes.split()}


def with_markup(document, path):
    """A copy of a document with markup in one place."""
    document = json.loads(json.dumps(document))
    *holders, last = path if path[-1] is not None else path[:-1]
    holder = document
    for key in holders:
        holder = holder[key]
    if path[-1] is None:
        holder[MARKUP] = holder.pop(last)
    else:
        holder[last] = MARKUP
    return document


def test_markup_in_any_field_of_a_file_reaches_no_tag_attribute_or_class(traced: Path):
    whole = short_document(traced)
    allowed = Elements(page(traced)).found
    target, shown = traced.with_name("markup.json"), 0
    for report in (whole, whole["otherData"]["graphrt_reports"][0]):
        for path in places(report):
            target.write_text(json.dumps(with_markup(report, path)))
            try:
                text = page(target)
            except InvalidOptionError:
                continue  # no text belongs there
            elements = Elements(text)
            assert elements.scripts == 1 and elements.found <= allowed, path
            shown += "&lt;script&gt;" in text
    assert shown >= 40


def test_the_policy_of_a_page_allows_its_own_style_and_script_alone(traced: Path):
    text = page(traced)
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(rule) == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    # The policy would leave out a style in an element.
    assert not re.search("<[^>]* style=", text)
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_a_page_of_two_runs_shows_their_differences(tmp_path: Path):
    before, after = planted_runner(), planted_runner()
    run_planted(before)
    for _ in range(10):
        step(after, 4)
    before.report().save(tmp_path / "before.json")
    after.report().save(tmp_path / "after.json")
    text = page(tmp_path / "before.json", tmp_path / "after.json")
    outline = Outline(text)
    assert outline.titles[:3] == ["graphrt run: before and after", "Both runs", "Graph by graph"]
    rows = {
        re.sub("<.*?>", "", head): re.sub("<.*?>", " ", cells).split()
        for head, cells in re.findall(r"<tr>(<th [^>]*row.*?</th>)(.*?)</tr>", text)
    }
    assert rows["Eager steps"] == ["10", "0", "-10"]
    assert rows["Steps by graphs"] == ["61.5%", "100.0%", "+38.5", "points,", "better"]
    back = page(after.report(), before.report())
    assert "-38.5 points, worse" in back and "run 1" in back


def test_a_file_that_is_no_report_is_refused_and_writes_no_page(tmp_path: Path):
    for name, text in (
        ("absent.json", None),
        ("empty.json", ""),
        ("list.json", "[]"),
        ("other.json", '{"a": 1}'),
        ("newer.json", '{"graphrt_report": 99}'),
        ("trace.json", '{"traceEvents": []}'),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(InvalidOptionError, match="the report cannot be read"):
            write_page(tmp_path / "page.html", path)
    assert not (tmp_path / "page.html").exists()


def test_a_loaded_report_equals_the_saved_report(tmp_path: Path, traced: Path):
    report = planted_runner().report()
    report.save(tmp_path / "run.json")
    assert load_report(tmp_path / "run.json") == report.to_dict()
    (first,) = json.loads(traced.read_text())["otherData"]["graphrt_reports"]
    assert load_report(traced) == first


def test_many_batch_sizes_are_grouped():
    runner = GraphRunner(
        lambda x: x + 1,
        mode="FULL",
        sizes=list(range(2, 101, 2)),
        inputs={"x": InputSpec(torch.float32, ("tokens", 2))},
        platform="cpu",
    )
    runner.capture()
    for tokens in range(1, 101):
        runner(x=torch.zeros(tokens, 2))
    text = page(runner.report())
    assert ">1 to 5</th>" in text and ">96 to 100</th>" in text and "26 others" in text


def timed(graph: dict[str, object], replay_s: float, eager_s: float) -> dict[str, object]:
    return {**graph, "replay_s": replay_s, "eager_s": eager_s}


def dots(svg: str) -> list[tuple[str, str, str]]:
    """Class, place across and place down of the dots of a drawing."""
    return re.findall(r'<circle class="(\w+)" cx="([\d.]+)%" cy="([\d.]+)%"', svg)


def test_step_times_are_drawn_over_the_logarithm_of_the_size():
    """A graph that is no faster says so, and the drawing has the heights of the times."""
    data = planted_runner().report().to_dict()
    data["graphs"] = [
        timed(graph, 1e-3, 4e-3 if graph["tokens"] > 2 else 5e-4)
        for graph in data["graphs"]
        if "mixed" not in graph["graph"]
    ]
    text = page(data)
    (svg,) = re.findall(r'<svg class="curves" role="img" aria-label="FULL: .*?</svg>', text)
    by_graph, eager = ([d for d in dots(svg) if d[0] == css] for css in ("live", "eager"))
    # Sizes 2, 4 and 16: logarithms 1, 2 and 4.
    left, middle, right = (float(across) for _, across, _ in by_graph)
    assert abs((middle - left) - (right - left) / 3) < 0.02
    bottom, top = 86.0, 12.0
    heights = [(bottom - float(down)) / (bottom - top) for _, _, down in eager]
    assert heights == pytest.approx([0.125, 1.0, 1.0], abs=1e-3)
    assert [(bottom - float(d)) / (bottom - top) for *_, d in by_graph] == pytest.approx([0.25] * 3)
    assert "no gain: 500 us eagerly" in text and text.count("4.0 times") == 2
    assert "not timed" not in text


def test_each_kind_of_graph_has_its_own_curves_and_untimed_graphs_are_counted(traced: Path):
    text = page(traced)
    assert re.findall("<figcaption>(.*?)</figcaption>", text) == [
        "FULL",
        "FULL [variant=&#x27;mixed&#x27;]",
    ]
    # The smallest and the largest of each mode: "mixed" ones have the same sizes.
    total = len(load_report(traced)["graphs"])
    some = sum(graph["replay_s"] is not None for graph in load_report(traced)["graphs"])
    assert 0 < some < total and f"{total - some} graphs not timed." in text
    assert "No graph was timed. runner.measure()" in page(planted_runner().report())


def test_the_memory_curve_adds_up_what_each_capture_took():
    data = planted_runner().report().to_dict()
    for at, graph in enumerate(data["graphs"]):
        graph |= {"pool_bytes": (4 if at == 0 else at == 3) << 20, "driver_bytes": None}
    text = page(data)
    section = text.partition("Memory over captures")[2]
    assert "4.0 MiB after the first graph, 5.0 MiB after all 6" in section
    heights = [(86.0 - float(down)) / 74 for *_, down in dots(section)]
    assert heights == pytest.approx([0.8, 0.8, 0.8, 1, 1, 1])
    for graph in data["graphs"]:
        graph["pool_bytes"] = None
    assert "Memory over captures" not in page(data)


@pytest.mark.parametrize("axis", ["tokens", "rows"])
def test_a_model_without_tokens_has_rows_on_its_page_and_in_its_report(axis: str):
    runner = GraphRunner(
        lambda x: x + 1,
        mode="FULL",
        sizes=[2, 4],
        inputs={"x": InputSpec(torch.float32, (axis, 8))},
        platform="cpu",
    )
    runner.capture()
    for rows in (1, 3, 20):
        runner(x=torch.ones(rows, 8))
    for text in (page(runner.report()), report_text(runner.report())):
        told = re.sub(r"max_num_tokens=", "", text)
        if axis == "rows":
            assert "tokens" not in told and "reqs" not in re.sub("max_num_reqs", "", told)
            assert "FULL [4 rows]" in told and "(20 rows)" in told
            assert "max_num_tokens=" in text
        else:
            assert "FULL [4 tokens 4 reqs]" in told and "(20 tokens)" in told


def test_a_page_names_the_platform_and_the_package_of_a_plugin():
    class Plugged(CpuPlatform):
        pass

    Plugged.__module__ = "npu_plugin.platform"
    inputs = {"x": InputSpec(torch.float32, ("tokens", 8))}
    runner = GraphRunner(lambda x: x, sizes=[2], inputs=inputs, platform=Plugged(), mode="FULL")
    assert "platform cpu of npu_plugin<" in page(runner.report())
    assert "platform cpu<" in page(planted_runner().report())


def test_a_report_of_before_times_and_platforms_still_has_a_page():
    data = planted_runner().report().to_dict()
    del data["platform"], data["axis"]
    for graph in data["graphs"]:
        del graph["replay_s"], graph["eager_s"]
    assert "No graph was timed" in page(data)


def test_a_model_with_both_tokens_and_rows_keeps_tokens():
    inputs = {name: InputSpec(torch.float32, (name, 8)) for name in ("tokens", "rows")}
    runner = GraphRunner(
        lambda tokens, rows: tokens + rows, mode="FULL", sizes=[2], inputs=inputs, platform="cpu"
    )
    assert runner.report().axis == "tokens"
