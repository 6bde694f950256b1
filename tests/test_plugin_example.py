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


def run(code: str, *sites: Path, platform: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "GRAPHRT_PLATFORM"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (*sites, ROOT)))
    if platform is not None:
        environ["GRAPHRT_PLATFORM"] = platform
    return starts.run("-c", textwrap.dedent(code), env=environ)


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
