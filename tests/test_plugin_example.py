"""Out-of-tree platforms as users meet them: installed packages, found in a fresh interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import starts

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "platform_plugin"

PLATFORM = """
    from graphrt.cpu import CpuPlatform
    from graphrt.platforms import hookimpl

    class Mine(CpuPlatform):
        name = {name!r}

    @hookimpl
    def graphrt_platforms():
        return [Mine()]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the example package into, without a network."""
    source = tmp_path_factory.mktemp("source") / "platform_plugin"
    shutil.copytree(EXAMPLE, source)  # a build writes beside its sources
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def add_plugin(site: Path, name: str, code: str) -> None:
    """What pip leaves behind for a plugin package of one module."""
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(textwrap.dedent(code))
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[graphrt]\nplatform = {module}\n")


def run(
    code: str, *sites: Path, platform: str | None = None, plugins: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "GRAPHRT_PLATFORM"}
    environ["GRAPHRT_PLUGINS"] = plugins
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (*sites, ROOT)))
    if platform is not None:
        environ["GRAPHRT_PLATFORM"] = platform
    return starts.run("-c", textwrap.dedent(code), env=environ, cwd=cwd)


def test_the_example_platform_is_chosen_by_the_environment_variable(installed: Path) -> None:
    code = """
        import graphrt
        platform = graphrt.current_platform()
        path = platform.get_static_graph_wrapper_cls()
        from graphrt.platforms import installed_platforms, wrapper_class
        print(platform.name, path, wrapper_class(platform).__name__)
        print(*(f"{p.name}<{p.plugin}" for p in installed_platforms() if p.origin == "plugin"))
    """
    done = run(code, installed, platform="tracing_cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "tracing_cpu graphrt_example_platform.wrapper.TracingGraphWrapper TracingGraphWrapper",
        "tracing_cpu<graphrt-example-platform:tracing_cpu",
    ]


def test_the_example_platform_captures_and_counts_replays(installed: Path) -> None:
    code = """
        import torch, graphrt
        runner = graphrt.GraphRunner(
            lambda x: x * 2 + 1,
            inputs={"x": graphrt.InputSpec(torch.float32, ("tokens", 2))},
            outputs=("tokens", 2), mode="FULL", sizes=[4], max_num_tokens=4, max_num_reqs=4,
        )
        runner.capture()
        for _ in range(3):
            assert torch.equal(runner(x=torch.ones(3, 2)), torch.full((3, 2), 3.0))
        print(runner.platform.name, sum(runner.platform.trace.values()))
    """
    done = run(code, installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["tracing_cpu", "3"]


def test_naming_cpu_overrides_an_installed_plugin_platform(installed: Path) -> None:
    done = run("import graphrt; print(graphrt.current_platform().name)", installed, platform="cpu")
    assert done.stdout.strip() == "cpu", done.stderr


def test_an_unknown_platform_name_raises_with_the_known_names(installed: Path) -> None:
    done = run("import graphrt; graphrt.current_platform()", installed, platform="tpu")
    assert done.returncode == 1
    assert "PlatformError" in done.stderr
    assert "'tpu'" in done.stderr
    assert "cpu" in done.stderr
    assert "tracing_cpu" in done.stderr


def test_a_plugin_that_raises_at_import_is_skipped_with_a_warning(tmp_path: Path) -> None:
    add_plugin(tmp_path, "broken-plugin", "raise RuntimeError('no driver library')")
    code = """
        import graphrt
        print(graphrt.current_platform().name)
        from graphrt.platforms import installed_platforms
        print(next(p.error for p in installed_platforms() if p.plugin.startswith("broken-plugin")))
    """
    done = run(code, tmp_path, platform="cpu")
    assert done.returncode == 0, done.stderr
    first, *shown = done.stdout.splitlines()
    assert first == "cpu"
    assert shown[0].startswith("Traceback")
    assert shown[-1] == "RuntimeError: no driver library"
    assert "PluginWarning" in done.stderr
    assert "broken-plugin:platform could not be imported" in done.stderr


def test_two_plugins_with_the_same_platform_name_are_refused(tmp_path: Path) -> None:
    add_plugin(tmp_path, "vendor-a", PLATFORM.format(name="same"))
    add_plugin(tmp_path, "vendor-b", PLATFORM.format(name="same"))
    done = run("import graphrt; graphrt.current_platform()", tmp_path)
    assert done.returncode == 1
    assert "PlatformError: two plugins supply a platform called 'same'" in done.stderr
    assert "vendor-a:platform" in done.stderr
    assert "vendor-b:platform" in done.stderr


def test_two_available_plugin_platforms_need_a_choice_by_variable(tmp_path: Path) -> None:
    add_plugin(tmp_path, "vendor-a", PLATFORM.format(name="alpha"))
    add_plugin(tmp_path, "vendor-b", PLATFORM.format(name="beta"))
    code = "import graphrt; print(graphrt.current_platform().name)"
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "PlatformError" in done.stderr
    assert "'alpha' of vendor-a:platform" in done.stderr
    assert "'beta' of vendor-b:platform" in done.stderr
    assert "GRAPHRT_PLATFORM=" in done.stderr
    assert run(code, tmp_path, platform="beta").stdout.strip() == "beta"


CURRENT = "import graphrt; print(graphrt.current_platform().name)"


def test_a_plugin_in_the_working_directory_is_the_default_with_a_warning(tmp_path: Path) -> None:
    add_plugin(tmp_path, "planted", PLATFORM.format(name="planted"))
    done = run(CURRENT, cwd=tmp_path)
    assert done.stdout.strip() == "planted", done.stderr
    assert done.stderr.count("PluginWarning: platform 'planted' of plugin planted") == 1
    assert f"planted:platform is the default here: {tmp_path}/planted.py" in done.stderr
    for named in ({"platform": "planted"}, {"plugins": "planted"}, {"plugins": "planted:platform"}):
        quiet = run(CURRENT, cwd=tmp_path, **named)
        assert (quiet.stdout.strip(), quiet.stderr) == ("planted", "")
    done = run(CURRENT, cwd=tmp_path, plugins="off")
    assert (done.stdout.strip() != "planted", done.stderr) == (True, "")


SELF_REGISTERING = {
    "a module that registers itself": "register(sys.modules[__name__])",
    "a module with another name": "register(sys.modules[__name__], 'numpy')",
    "an object": """
        del graphrt_platforms
        class Other:
            @hookimpl
            def graphrt_platforms(self):
                return Mine()
        register(Other())
    """,
}


@pytest.mark.parametrize("how", SELF_REGISTERING)
@pytest.mark.parametrize("imported_by", ["graphrt", "the host"])
def test_a_plugin_that_registers_itself_at_import_is_warned_of_with_its_file(
    how: str, imported_by: str, tmp_path: Path
) -> None:
    ends = textwrap.dedent(SELF_REGISTERING[how])
    begins = textwrap.dedent(PLATFORM.format(name="planted"))
    imports = "import sys\nfrom graphrt.platforms import register\n"
    add_plugin(tmp_path, "planted", imports + begins + ends)
    code = CURRENT + "; from graphrt.platforms import installed_platforms as listed; "
    code += "print(*(p.file for p in listed() if p.name == 'planted'))"
    done = run("import planted; " * (imported_by == "the host") + code, tmp_path)
    assert done.stdout.split() == ["planted", f"{tmp_path}/planted.py"], done.stderr
    assert done.stderr.count("PluginWarning: platform 'planted' of plugin") == 1
    assert f" is the default here: {tmp_path}/planted.py" in done.stderr
    if how != "an object":
        done = run(CURRENT, tmp_path, plugins="planted")
        assert (done.stdout.strip(), done.stderr) == ("planted", "")


ASKING = {
    "at import": ("register(sys.modules[__name__]); get_platform('planted')\n", "{}", "imported"),
    "in its hook": (
        "@hookimpl(trylast=True)\ndef graphrt_platforms():\n    return get_platform('planted')\n",
        "",
        "give its platforms",
    ),
    "then raises": ("register(sys.modules[__name__]); raise ValueError('no')\n", "{}", "imported"),
    "an error without text": (
        "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute\n",
        "{}",
        "imported",
    ),
}


@pytest.mark.parametrize("how", ASKING)
def test_a_plugin_that_fails_while_it_is_looked_for_is_left_out_and_named_once(
    how: str, tmp_path: Path
) -> None:
    ends, begins, text = ASKING[how]
    imports = "import sys\nfrom graphrt.platforms import get_platform, hookimpl, register\n"
    add_plugin(
        tmp_path,
        "planted",
        imports + (textwrap.dedent(PLATFORM.format(name="planted")) if begins else "") + ends,
    )
    done = run(CURRENT, tmp_path)
    assert done.returncode == 0 and done.stdout.strip() != "planted", done.stderr
    assert done.stderr.count("PluginWarning") == 1 and "Recursion" not in done.stderr
    assert text in done.stderr and f"{tmp_path}/planted.py" in done.stderr


def test_a_plugin_imported_though_its_variable_is_off_is_warned_of(tmp_path: Path) -> None:
    imports = "import sys\nfrom graphrt.platforms import register\n"
    begins = textwrap.dedent(PLATFORM.format(name="planted"))
    add_plugin(tmp_path, "planted", imports + begins + "register(sys.modules[__name__])\n")
    for plugins in ("off", "other"):
        done = run(f"import planted; {CURRENT}", tmp_path, plugins=plugins)
        assert done.stdout.strip() == "planted"
        assert f"is the default here: {tmp_path}/planted.py" in done.stderr


MALFORMED = {
    "no Name": ("METADATA", "Metadata-Version: 2.1\nVersion: 1.0\n"),
    "an empty METADATA": ("METADATA", ""),
    "no bytes of text in METADATA": ("METADATA", b"Name: \xff\xfe\n"),
    "no module": ("entry_points.txt", "[graphrt]\nb3 = a b c!!\n"),
    "no value": ("entry_points.txt", "[graphrt]\nb3 =\n"),
    "no equals sign": ("entry_points.txt", "[graphrt]\nb3\n"),
    "no bytes of text": ("entry_points.txt", b"[graphrt]\nb3 = \xff\xfe\n"),
}


@pytest.mark.parametrize("how", MALFORMED)
@pytest.mark.parametrize("place", ["site", "working directory"])
def test_malformed_metadata_is_passed_over_with_a_warning_that_names_it(
    how: str, place: str, tmp_path: Path
) -> None:
    add_plugin(tmp_path, "bad-one", PLATFORM.format(name="bad"))
    add_plugin(tmp_path, "good-one", PLATFORM.format(name="good"))
    name, content = MALFORMED[how]
    path = tmp_path / "bad_one-1.0.dist-info" / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run(CURRENT, tmp_path) if place == "site" else run(CURRENT, cwd=tmp_path)
    assert done.stdout.strip() == "good", done.stderr
    left_out = [line for line in done.stderr.splitlines() if "is left out" in line]
    assert len(left_out) == 1 and str(path.parent) in left_out[0]
    assert "GRAPHRT_PLUGINS=off" in left_out[0]
    call = "import sys; from graphrt.cli.app import main; sys.argv[1:] = ['doctor', '--no-try']"
    done = run(f"{call}; main()", tmp_path)
    assert done.returncode == 0 and str(path.parent) in "".join(done.stdout.split()), done.stderr


def test_malformed_metadata_of_another_distribution_hides_no_plugin(tmp_path: Path) -> None:
    add_plugin(tmp_path, "good-one", PLATFORM.format(name="good"))
    for name in ("other-1.0.dist-info", ".dist-info"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    done = run(CURRENT, tmp_path)
    assert done.stdout.strip() == "good", done.stderr
    assert f"{tmp_path}/other-1.0.dist-info" in done.stderr


def test_doctor_names_the_file_of_a_plugin_and_obeys_none_of_its_text(tmp_path: Path) -> None:
    add_plugin(tmp_path, "planted", PLATFORM.format(name="planted"))
    evil = "raise RuntimeError('\\x1b[2J [bold red]markup[/bold red]')"
    add_plugin(tmp_path, "broken-plugin", evil)
    call = "import sys; from graphrt.cli.app import main; sys.argv[1:] = {}; main()"
    for options in (["doctor", "--no-try"], ["doctor", "--no-try", "--json"]):
        done = run(call.format(options), tmp_path)
        assert done.returncode == 0, done.stderr
        shown = "".join(done.stdout.split())
        assert f"{tmp_path}/planted.py" in shown and f"{tmp_path}/broken_plugin.py" in shown
        assert "\x1b[2J" not in done.stdout + done.stderr
        assert "[boldred]markup[/boldred]" in shown


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("import time; time.sleep(600)", "hangs"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import os; os._exit(7)", "exits"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "is killed"),
    ],
    ids=lambda value: value.split()[-1],
)
def test_a_plugin_that_hangs_or_ends_the_process_can_be_switched_off(
    code: str, ends: str, tmp_path: Path
) -> None:
    add_plugin(tmp_path, "bad-plugin", code)
    add_plugin(tmp_path, "good-plugin", PLATFORM.format(name="good"))
    if ends != "hangs":
        done = run(CURRENT, tmp_path)
        assert done.returncode != 0
        named = f"plugin bad-plugin:platform ({tmp_path}/bad_plugin.py); GRAPHRT_PLUGINS=off"
        assert (named in done.stderr) == (ends in ("KeyboardInterrupt", "GeneratorExit"))
    done = run(CURRENT, tmp_path, plugins="off")
    assert done.returncode == 0 and done.stdout.strip() not in ("", "good"), done.stderr
    done = run(CURRENT, tmp_path, plugins="good-plugin")
    assert (done.stdout.strip(), done.stderr) == ("good", "")
