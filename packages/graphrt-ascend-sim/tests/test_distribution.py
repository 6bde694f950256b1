"""The installed distribution: found by graphrt as a plugin, light, and in nobody's way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import starts

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
SOURCES = HERE / "src" / "graphrt_ascend_sim"

VENDOR = """
    from graphrt.cpu import CpuPlatform
    from graphrt.platforms import hookimpl

    class Vendor(CpuPlatform):
        name = "vendor"

    @hookimpl
    def graphrt_platforms():
        return Vendor()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed it into, without a network."""
    source = tmp_path_factory.mktemp("source") / "simulator"
    shutil.copytree(HERE, source)  # a build writes beside its sources
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(code: str, *sites: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "GRAPHRT_PLATFORM"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (*sites, ROOT)))
    environ |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment
    return starts.run("-c", textwrap.dedent(code), env=environ)


def test_the_wheel_has_the_sources_and_no_tests(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        return {name for name in found if (folder / name).is_file() and "__pycache__" not in name}

    assert files(installed / "graphrt_ascend_sim") == files(SOURCES)
    assert {"py.typed", "native/abi.h", "native/operators/operators.cpp"} <= files(SOURCES)
    others = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert others == {"graphrt_ascend_sim"}


def test_graphrt_finds_the_simulator_plugin_without_importing_or_building_anything_heavy(
    installed: Path, tmp_path: Path
) -> None:
    code = """
        import sys, torch
        import graphrt
        from graphrt.platforms import installed_platforms, wrapper_class
        (found,) = [each for each in installed_platforms() if each.name == "ascend-sim"]
        print(found.plugin, found.origin, found.error)
        print(graphrt.current_platform().name != "ascend-sim", "torch_npu" in sys.modules)
        print(wrapper_class(found.platform).platform_name, "torch_npu" in sys.modules)
    """
    # A compiler that is called fails, and what is built goes into this cache.
    done = run(code, installed, CXX="/bin/false", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "graphrt-ascend-sim:ascend-sim plugin None",
        "True False",
        "ascend-sim False",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_installed_simulator_is_chosen_only_if_named(installed: Path, tmp_path: Path) -> None:
    code = "import graphrt; print(graphrt.current_platform().name)"
    assert run(code, installed).stdout == run(code).stdout != ""
    assert run(code, installed, GRAPHRT_PLATFORM="cpu").stdout.strip() == "cpu"
    # Nor does it make two out-of-tree platforms of one.
    (tmp_path / "vendor.py").write_text(textwrap.dedent(VENDOR))
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[graphrt]\nvendor = vendor\n")
    done = run(code, tmp_path, installed)
    assert done.stdout.strip() == "vendor", done.stderr


def test_naming_the_simulator_without_its_requirements_raises_with_the_reason(
    installed: Path, tmp_path: Path
) -> None:
    cache = {"CXX": "/no/compiler", "XDG_CACHE_HOME": str(tmp_path)}
    code = "import graphrt; graphrt.current_platform()"
    done = run(code, installed, GRAPHRT_PLATFORM="ascend-sim", **cache)
    assert done.returncode == 1
    assert "PlatformError" in done.stderr
    reasons = ("torch_npu is not installed", "g++ is missing", "needs Linux", "cannot be imported")
    assert any(reason in done.stderr for reason in reasons), done.stderr


def test_running_the_simulator_module_without_arguments_prints_usage(installed: Path) -> None:
    code = "import runpy, sys; sys.argv[1:] = []; runpy.run_module('graphrt_ascend_sim')"
    done = run(code, installed)
    assert done.returncode == 1 and "SCRIPT|-m MODULE" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks for Linux before versions")
def test_a_torch_npu_of_another_version_than_torch_is_refused_with_both(installed: Path) -> None:
    code = """
        from graphrt_ascend_sim import loading
        loading.version = {"torch": "2.14.1+cpu", "torch_npu": "2.13.0"}.__getitem__
        print(loading.why_not())
    """
    done = run(code, installed)
    assert "torch_npu 2.13.0 needs torch 2.13, found 2.14.1+cpu" in done.stdout, done.stderr
