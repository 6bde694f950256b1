"""The `graphrt` command as a newcomer meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from graphrt import Budget, GraphMode, Plan
from graphrt.cli.app import app, main
from graphrt.cli.variables import OTHERS, VARIABLES
from graphrt.core.base.errors import InvalidModeError, InvalidOptionError
from graphrt.core.device.registry import PlatformRegistry, PluginWarning, hookimpl
from graphrt.cpu import CpuPlatform
from graphrt.demo.settings import read_settings, runner_settings
from graphrt.observe import report_text
from graphrt.trust.host_watch import watch_state
from tests.core.test_measured_budget import runner_of
from tests.demo.tiny_checkpoints import LLAMA, write
from tests.observe.planted import planted_runner, run_planted

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_doctor_lists_every_built_in_platform_with_reasons_for_missing_platforms():
    report = json.loads(run("doctor", "--json"))
    platforms = {platform["name"]: platform for platform in report["platforms"]}
    assert {"cpu", "accelerator", "cuda", "ascend"} <= platforms.keys()
    assert platforms["cpu"]["available"]
    assert platforms["cpu"]["wrapper"] == "graphrt.cpu.CPUGraphWrapper"
    for platform in platforms.values():
        assert platform["available"] or platform["reason"]
    assert report["versions"]["torch"]


def test_doctor_and_a_report_say_how_python_changes_are_detected():
    why_not = watch_state()
    seen = f"seen some steps later: {why_not}" if why_not else "seen at the next step"
    assert json.loads(run("doctor", "--json"))["host_changes"] == seen
    runner = planted_runner()
    steps = runner.report().trust.glance_steps
    (line,) = re.findall(
        "^A Python value changed after the capture: noticed (.*)$",
        str(runner.report()),
        re.MULTILINE,
    )
    if why_not:
        assert line == f"within {steps} steps ({why_not})"
    else:
        told = f"at the next step in [0-9]+ watched dicts, else within {steps} steps"
        assert re.fullmatch(told, line)


def test_doctor_prints_its_tables_as_text():
    text = run("doctor")
    assert "Current platform" in text
    assert "cpu" in text


@pytest.mark.parametrize("command", ["plan", "demo"])
def test_the_help_of_each_command_names_every_mode(command):
    named = set(re.findall(r"\b[A-Z][A-Z_]+\b", run(command, "--help")))
    assert named >= {mode.name for mode in GraphMode}


def test_plan_prints_mode_steps_capture_sizes_and_graphs():
    arguments = ["--mode", "FULL", "--max-num-reqs", "8", "--query-len", "3"]
    arguments += ["--attention", "flash=UNIFORM_BATCH", "--attention", "mamba=ALWAYS"]
    plan = json.loads(run("plan", *arguments, "--json"))
    assert plan["mode"] == "FULL_AND_PIECEWISE"
    assert plan["steps"][0]["backend"] == "flash"
    assert plan["sizes"]["decode"] == {"3": [3, 6, 9, 18, 24]}
    assert [g["num_tokens"] for g in plan["graphs"] if g["mode"] == "FULL"] == [24, 18, 9, 6, 3]
    assert "flash" in run("plan", *arguments)


def test_plan_names_the_decode_batches_above_the_largest_graph():
    assert "513 to 1024" in run("plan", "--max-num-reqs", "1024")


def test_plan_with_explicit_sizes_plans_only_those_sizes():
    for more in ([], ["-c", "mode=FULL_DECODE_ONLY"], ["--query-len", "2"]):
        plan = json.loads(run("plan", "--sizes", "1,2,4", *more, "--json"))
        assert {graph["num_tokens"] for graph in plan["graphs"]} <= {1, 2, 4}
    plan = json.loads(run("plan", "--sizes", "1,2,4", "--max-num-reqs", "8", "--json"))
    assert {graph["num_tokens"] for graph in plan["graphs"]} == {1, 2, 4}
    assert "of 5 to 8" not in run("plan", "--sizes", "1,2,4")


def test_plan_settings_given_with_c_reach_the_options():
    plan = json.loads(run("plan", "-c", "mode=FULL", "-c", "sizes=[1,2]", "--json"))
    assert (plan["mode"], plan["sizes"]["general"]) == ("FULL", [1, 2])


NPU = ["plan", "--platform", "ascend"]


def test_plan_budgets_npu_streams_on_a_machine_without_npu():
    plan = json.loads(
        run(*NPU, "--npu", "device=A2", "--layers", "64", "--npu", "domains=tp", "--json")
    )
    assert plan["mode"] == "FULL_AND_PIECEWISE"
    streams = plan["streams"]
    assert (streams["profile"], streams["usable"]) == ("structural", 1902)
    assert (streams["full"], streams["piecewise"], streams["pieces"]) == (3, 195, 65)
    assert sum(count for _, count in streams["terms"]) == streams["usable"]
    full = [graph["num_tokens"] for graph in plan["graphs"] if graph["mode"] == "FULL"]
    pieces = [graph["num_tokens"] for graph in plan["graphs"] if graph["mode"] == "PIECEWISE"]
    assert (len(full), full[0], full[-1]) == (35, 256, 1)
    assert (len(pieces), pieces[:2], pieces[-1]) == (9, [512, 384], 1)
    assert (
        plan["total"]["streams"]
        == 35 * 3 + 9 * 195
        <= plan["arguments"]["budget"]["streams"]
        == 1902
    )
    assert len(plan["left_out"]) == 51 - 9
    assert "needs 195 streams" in plan["left_out"][0]["why"]


def test_plan_prints_the_stream_budget_line_by_line():
    text = run(*NPU, "--npu", "device=A2", "--layers", "64", "--npu", "domains=tp")
    assert "documented for A2" in text and "kept in reserve" in text
    assert "a full graph holds 3, a piecewise size 195 (65 pieces)" in text
    assert "PIECEWISE [512 tokens]: 195 streams" in text
    left_out = [line for line in text.splitlines() if line.startswith("left out")]
    assert len(left_out) == 1 and left_out[0].startswith(
        "left out: PIECEWISE [496 tokens] and 41 more of 2 to 480 tokens: needs 195 streams; free: "
    )
    assert run(*NPU, "--npu", "device=A5", "--layers", "64") == run(
        *NPU, "--npu", "device=950", "--layers", "64"
    )


def test_plan_with_a_stream_profile_shows_the_sizes_of_that_version():
    arguments = [
        "--layers",
        "36",
        "--npu",
        "domains=tp",
        "--mode",
        "PIECEWISE",
        "--npu",
        "profile=0.20",
    ]
    text = run(*NPU, *arguments)
    assert "1 16 40 72 96 128 152 184 216 240 288 336 400 448 512" in text
    plan = json.loads(run(*NPU, *arguments, "--json"))
    assert len(plan["streams"]["formula_sizes"]) == 15
    assert [graph["streams"] for graph in plan["graphs"]] == [111] * 15


def test_a_budget_too_small_for_pieces_lowers_the_mode():
    arguments = ["--layers", "94", "--npu", "draft_layers=1", "--budget", "streams=200"]
    plan = json.loads(run(*NPU, *arguments, "--json"))
    assert plan["mode"] == "FULL_DECODE_ONLY"
    assert plan["steps"][-1]["rule"] == "budget"
    assert {graph["mode"] for graph in plan["graphs"]} == {"FULL"}
    text = run(*NPU, *arguments)
    assert "200 by --budget" in text
    assert "becomes FULL_DECODE_ONLY" in text
    assert json.loads(run(*NPU, *arguments, "--min-piecewise", "0", "--json"))["steps"] == []


def test_plan_for_an_npu_without_layers_asks_for_layers():
    assert "--layers" in run(*NPU)
    plan = json.loads(run(*NPU, "--json"))
    assert plan["streams"] is None and plan["left_out"] == []


def test_plan_honours_byte_and_second_budgets_and_traffic():
    arguments = ["--mode", "FULL", "--max-num-reqs", "16", "--budget", "bytes=100MiB"]
    arguments += ["--cost", "bytes=25MiB", "--cost", "seconds=0.5", "--platform", "cpu"]
    arguments += ["--traffic", "3=0.9", "--traffic", "20=0.1"]
    plan = json.loads(run("plan", *arguments, "--json"))
    assert [graph["num_tokens"] for graph in plan["graphs"]] == [32, 20, 8, 3]
    assert plan["total"]["capture_s"] == 2.0
    assert "100.0 of 100.0 MiB" in run("plan", *arguments)


def test_plan_fits_graphs_into_bytes_by_a_saved_report(tmp_path: Path):
    """On a machine without the device: of 16 MiB of pool at 128 tokens, and a MiB for each graph.
    Two of the sizes are not in the report."""
    runner, path = runner_of(Budget(device_bytes=1 << 40)), tmp_path / "run.json"
    runner.capture()
    runner.report().save(path)
    arguments = ["--mode", "FULL", "--sizes", "1,3,8,32,48,64", "--platform", "cpu"]
    arguments += ["--report", str(path)]
    assert "6 of 6 sizes, 14.0 MiB" in run("plan", *arguments)
    text = run("plan", *arguments, "--device-bytes", "12MiB", "--save", str(tmp_path / "plan"))
    assert "4 of 6 sizes, 12.0 of 12.0 MiB, 8.0 MiB of it are the pool" in text
    assert "needs 1.0 MiB; free: 0.0 of 12.0 MiB" in text
    plan = Plan.load(tmp_path / "plan", platform=runner.platform)
    assert len(plan.keys) == 4 and not plan.is_measured


def test_plan_says_that_bytes_without_costs_are_measured():
    text = run("plan", "--sizes", "1,2", "--device-bytes", "2GiB", "--platform", "cpu")
    assert "at most 2048.0 MiB: a runner captures two graphs of each mode" in text


def test_a_report_without_graphs_has_no_costs(tmp_path: Path):
    runner_of(Budget(device_bytes=1 << 40)).report().save(tmp_path / "run.json")
    with pytest.raises(InvalidOptionError, match="does not tell what graphs took"):
        run("plan", "--sizes", "1,2", "--report", str(tmp_path / "run.json"), "--platform", "cpu")


def test_plan_takes_a_schedule_of_query_lengths():
    text = run("plan", "-c", "query_lens={8: [7], 64: [4]}", "-c", "mode=FULL_DECODE_ONLY")
    assert "decode, query length 7    8: 7 14 21 28 35 42 49 56" in text
    assert "Sizes, at most 256 tokens" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--npu", "profile=0.20", "--platform", "cpu"],
        ["--npu", "device=A2", "--platform", "cpu"],
        ["--platform", "ascend", "--layers", "4", "--npu", "profile=1.0"],
        ["--platform", "ascend", "--layers", "4", "--npu", "device=A9"],
        ["--platform", "ascend", "--layers", "4", "--npu", "domains=pp"],
        ["--platform", "ascend", "--layers", "4", "--npu", "domain=tp"],
        ["--platform", "ascend", "--layers", "4", "--npu", "multi_stream=many"],
        ["--budget", "streams=many"],
        ["--budget", "streams=4MiB"],
        ["--cost", "kernels=4"],
        ["--traffic", "64"],
        ["--traffic", "0=1"],
        ["--traffic", "9" * 400 + "=1"],
        ["--budget", "bytes=" + "9" * 400],
        ["--cost", "bytes=" + "9" * 18 + "GiB"],
        ["--platform", "ascend", "--layers", "4", "--npu", "foo=1"],
    ],
)
def test_an_unreadable_budget_exits_with_2_and_advice(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["graphrt", "plan", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert "InvalidOptionError" in text and "try:" in text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--mode", "HALF"], InvalidModeError), (["--sizes", "4,2"], InvalidOptionError)],
)
def test_invalid_plan_settings_exit_with_a_named_error_without_traceback(
    arguments, error, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["graphrt", "plan", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert error.__name__ in text
    assert "Traceback" not in text


def test_the_demo_command_prints_that_graphs_equal_eager(tmp_path):
    page = str(tmp_path / "page.html")
    text = run("demo", "--max-new-tokens", "4", "--mode", "FULL", "--sizes", "8", "--html", page)
    assert "equal" in text
    assert "NOT EQUAL" not in text


def test_a_lowered_plan_mode_is_logged_once(caplog):
    run("plan", "--mode", "FULL", "--attention", "UNIFORM_BATCH")
    assert len(caplog.records) == 1


def test_a_strict_plan_refuses_a_lowered_mode(monkeypatch, capsys):
    flags = ["plan", "--mode", "FULL", "--attention", "UNIFORM_BATCH", "-c", "strict=true"]
    monkeypatch.setattr("sys.argv", ["graphrt", *flags])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "InvalidModeError: mode FULL cannot run here" in capsys.readouterr().err


def test_plan_save_writes_the_printed_plan(tmp_path):
    path = tmp_path / "plan.json"
    text = run("plan", "--sizes", "1,2", "--max-num-tokens", "2", "--save", str(path))
    assert text == f"{Plan.load(path)}\nSaved to {path}\n"
    assert json.loads(run("plan", "--sizes", "1,2", "--save", str(path), "--json"))


def test_an_unknown_setting_raises_with_all_known_settings():
    with pytest.raises(InvalidOptionError, match=r"sizes, .*outputs"):
        runner_settings(["nonsense=1"])


def test_command_line_settings_are_split_into_plan_arguments_and_options():
    arguments, options = runner_settings(["sizes=[1,2]", "mode=FULL", "check=off"])
    assert arguments == {"sizes": [1, 2], "mode": "FULL"} and options.check == "off"


@pytest.mark.parametrize(
    ("text", "value"), [("(0, 4)", (0, 4)), ("[0, null]", [0, None]), ("'a'", "a"), ("a b", "a b")]
)
def test_a_setting_value_is_read_as_json_python_literal_or_text(text, value):
    assert read_settings([f"loras={text}"]) == {"loras": value}


def command(*arguments: str, code: str | None = None, **environment: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of the command in a process of its own."""
    run_it = ["-m", "graphrt"] if code is None else ["-c", code]
    done = subprocess.run(
        [sys.executable, *run_it, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


HELP = """
import sys
from graphrt.cli.app import app
try:
    app(sys.argv[1:], prog_name="graphrt")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["cache", "ls", "--help"], ["--version"]]
)
def test_help_is_printed_without_importing_torch(arguments):
    returned, text, loaded = command(*arguments, code=HELP)
    assert (returned, loaded.strip()) == (0, "False") and "graphrt" in text


def test_the_command_runs_as_module_and_prints_its_version():
    from graphrt import __version__

    assert command("--version") == (0, f"graphrt {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--mode", "FUL"], "try: --mode FULL\n"),
        (["--sizes", "a,b"], "try: --sizes 1,2,4,8\n"),
        (["--query-len", "0"], "--query-len"),
        (["-c", "ouputs=clone"], "try: -c outputs\n"),
    ],
)
def test_a_plan_error_names_the_command_line_flag(arguments, flag, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["graphrt", "plan", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert flag in capsys.readouterr().err


WITHOUT = "import sys; sys.modules['safetensors'] = None; from graphrt.__main__ import main; main()"


def test_the_demo_with_a_model_but_no_safetensors_names_the_extra_to_install(tmp_path):
    write(tmp_path, LLAMA)
    returned, _, said = command("demo", "--model", str(tmp_path), code=WITHOUT)
    assert returned == 2
    assert 'graphrt demo --model needs safetensors: pip install "graphrt[demo]"' in said


def test_the_seeded_demo_runs_with_the_extra_cli_alone_and_prints_no_warning(tmp_path):
    code = WITHOUT.replace("import sys;", "import sys; sys.modules['tokenizers'] = None;", 1)
    page = tmp_path / "page.html"
    arguments = "--max-new-tokens", "2", "--sizes", "8,64", "--html", str(page)
    returned, text, said = command("demo", *arguments, code=code)
    assert (returned, said) == (0, "")
    assert ": equal" in text and page.exists()


def test_the_extra_of_the_command_brings_numpy_without_which_torch_warns():
    """torch says "Failed to initialize NumPy" at its first operators."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = [line for line in project.splitlines() if line.startswith("cli = ")]
    assert '"numpy>=' in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["explain", "torch.nn.functional:relu", "--input", "input=float32[tokens,4]"],
        ["plan"],
        ["attention"],
    ],
)
def test_a_first_command_prints_no_warning(arguments):
    returned, text, said = command(*arguments)
    assert (returned, said) == (0, "") and text


def test_doctor_runs_a_step_on_each_available_platform():
    report = json.loads(run("doctor", "--json"))
    tried = {platform["name"]: platform["tried"] for platform in report["platforms"]}
    assert tried["cpu"]["error"] is None and 0 < tried["cpu"]["step_s"] < 1
    for platform in report["platforms"]:
        assert (platform["tried"] is None) == (not platform["available"])
    assert "cpu works" in run("doctor")
    assert "cpu works" not in run("doctor", "--no-try")


def test_doctor_exits_with_1_if_a_platform_fails_its_step(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr("graphrt.cpu.platform.CpuPlatform.begin_capture", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "cpu does not work: " in result.output and "no such device" in result.output


class OtherDevice(CpuPlatform):
    """A platform whose device torch may not know, or which fails where it is asked something."""

    def __init__(self, name: str, device_type: str, fails: str = "") -> None:
        self.name, self.device_type = name, device_type
        if fails:
            setattr(self, fails, self._broken)

    def _broken(self, *_: object) -> Any:
        raise RuntimeError("the driver is broken")

    def device_count(self) -> int:
        return 1

    @hookimpl
    def graphrt_platforms(self) -> Any:
        return self


def doctor_of(monkeypatch, *plugins: object) -> PlatformRegistry:
    """The registry that the command sees, of these plugins alone."""
    made = PlatformRegistry({}, group=None)
    for plugin in plugins:
        made.register(plugin, f"plugin of {getattr(plugin, 'name', 'none')}")
    monkeypatch.setattr("graphrt.cli.doctor.installed_platforms", made.platforms)
    monkeypatch.setattr("graphrt.cli.doctor.current_platform", lambda: made.current({}))
    return made


@pytest.mark.parametrize("fails", ["versions", "device_count", "get_device_name"])
def test_doctor_shows_the_traceback_of_a_failing_platform_and_continues(fails, monkeypatch):
    names = SimpleNamespace(get_device_name=lambda at: f"number {at}")
    if fails == "get_device_name":
        names.get_device_name = OtherDevice("", "")._broken
    monkeypatch.setattr("torch.broken_device", names, raising=False)
    broken = OtherDevice("broken", "broken_device", "" if fails == "get_device_name" else fails)
    fine = OtherDevice("fine", "unheard_of")
    doctor_of(monkeypatch, broken, fine)
    with pytest.warns(PluginWarning, match="the driver is broken"):
        result = CliRunner().invoke(app, ["doctor", "--no-try", "--json"])
    report = json.loads(result.stdout)
    told = {each["name"]: each for each in report["platforms"]}
    assert not told["broken"]["available"] and told["fine"]["available"]
    assert "the driver is broken" in told["broken"]["reason"]
    assert "Traceback" in told["broken"]["error"] and not told["fine"]["error"]
    text = CliRunner().invoke(app, ["doctor", "--no-try"]).stdout
    assert "plugin of broken failed:" in text and "Current platform: fine" in text


def test_doctor_lists_the_device_names_of_a_platform(monkeypatch):
    names = SimpleNamespace(get_device_name=lambda at: f"number {at}")
    monkeypatch.setattr("torch.named_device", names, raising=False)
    doctor_of(monkeypatch, OtherDevice("named", "named_device"), OtherDevice("other", "unheard_of"))
    told = json.loads(CliRunner().invoke(app, ["doctor", "--no-try", "--json"]).stdout)
    assert [each["devices"] for each in told["platforms"]] == [["number 0"], []]


def test_doctor_without_any_platform_exits_with_1(monkeypatch):
    doctor_of(monkeypatch)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "No current platform: " in result.stdout


def test_doctor_suggests_the_nearest_name_for_a_misspelled_variable(monkeypatch):
    monkeypatch.setenv("GRAPHRT_CHEK", "first")
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    monkeypatch.setenv("GRAPHRT_SIM_SOC", "A2")
    text = run("doctor")
    assert "GRAPHRT_CHEK=first: graphrt reads no such variable; is GRAPHRT_CHECK meant?" in text
    assert "GRAPHRT_MODE=NONE: NONE turns all graphs off" in text
    assert "cpu works" not in text
    environment = {
        each["name"]: each for each in json.loads(run("doctor", "--json"))["environment"]
    }
    assert environment["GRAPHRT_CHEK"]["nearest"] == "GRAPHRT_CHECK"
    assert environment["GRAPHRT_SIM_SOC"]["meaning"]


def test_doctor_knows_every_environment_variable_of_the_code():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "graphrt").rglob("*.py"))
    names = set(re.findall(r"\bGRAPHRT_[A-Z_]*[A-Z]\b(?!_)", text))
    assert {name for name in names if not name.startswith(OTHERS)} == set(VARIABLES)


def test_the_report_command_prints_a_report_and_writes_a_page(tmp_path):
    runner = planted_runner()
    run_planted(runner)
    runner.report().save(tmp_path / "run.json")
    text = run("report", str(tmp_path / "run.json"))
    memory = "Memory: 256.0 KiB, 256.0 KiB predicted after two graphs"
    assert text == f"run: {report_text(runner.report())}\n{memory}\n"
    page = tmp_path / "run.html"
    run("report", str(tmp_path / "run.json"), str(tmp_path / "run.json"), "--html", str(page))
    assert "Graph by graph" in page.read_text(encoding="utf-8")
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        run("report", str(tmp_path / "other.json"))
