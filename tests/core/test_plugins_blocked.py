"""Plugins that a process forbids: nothing of them is imported, and who asks for them is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from graphrt.core.base.errors import InvalidOptionError, PluginBlockedError, UnknownPlatformError
from graphrt.core.device._allowed import AllowedPlugins
from graphrt.core.device.registry import PlatformRegistry
from tests import starts

ROOT = Path(__file__).parents[2]

PLUGIN = """
import pathlib
pathlib.Path({mark!r}).touch()
raise ImportError("was imported")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of two installed plugins, each of which leaves a mark where it is imported."""
    for name in ("first", "second"):
        package = tmp_path / f"pack_{name}"
        package.mkdir()
        mark = str(tmp_path / f"imported_{name}")
        # Its package runs code before the module that the entry point names.
        (package / "__init__.py").write_text(PLUGIN.format(mark=mark))
        (package / "plugin.py").write_text("")
        info = tmp_path / f"pack_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pack-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[graphrt]\n{name}_npu = pack_{name}.plugin\n")
    return tmp_path


def imported(site: Path) -> list[str]:
    return sorted(each.name for each in site.glob("imported_*"))


@pytest.fixture
def found(site: Path, monkeypatch: pytest.MonkeyPatch) -> PlatformRegistry:
    """A registry that finds those two."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("GRAPHRT_PLATFORM", raising=False)
    return PlatformRegistry({}, group="graphrt")


def outside(site: Path, code: str, **variables: str) -> str:
    """What a process of its own prints, with these variables and the two plugins."""
    path = f"{site}{os.pathsep}{ROOT}"
    inherited = {name: value for name, value in os.environ.items() if "GRAPHRT" not in name}
    quiet = "import warnings; warnings.simplefilter('ignore')\n"
    environ = {**inherited, "PYTHONPATH": path, **variables}
    done = starts.run("-c", quiet + code, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


NAMES = """
import graphrt.platforms as p
print(*(f"{e.plugin}:{e.blocked}" for e in p.installed_platforms() if e.origin == "plugin"))
"""


def test_a_blocked_plugin_is_never_imported(site):
    outside(site, NAMES, GRAPHRT_BLOCK_PLUGINS="first_npu")
    assert imported(site) == ["imported_second"]


@pytest.mark.parametrize(
    "spelling", ["first_npu", " first_npu ,", "FIRST-NPU", "pack-first:first_npu", "x,first.npu"]
)
def test_a_name_to_block_is_met_as_distributions_are_named(found, site, monkeypatch, spelling):
    monkeypatch.setenv("GRAPHRT_BLOCK_PLUGINS", spelling)
    with pytest.warns(UserWarning, match="second_npu"):
        names = {each.plugin: each.blocked for each in found.platforms()}
    assert names["pack-first:first_npu"] == "blocked by GRAPHRT_BLOCK_PLUGINS"
    assert imported(site) == ["imported_second"]


def test_a_list_of_plugins_keeps_out_all_others(found, site, monkeypatch):
    monkeypatch.setenv("GRAPHRT_ONLY_PLUGINS", "second_npu")
    with pytest.warns(UserWarning, match="second_npu"):
        blocked = {each.plugin: each.blocked for each in found.platforms()}
    assert imported(site) == ["imported_second"]
    assert blocked["pack-first:first_npu"] == "blocked: not in GRAPHRT_ONLY_PLUGINS"


@pytest.mark.parametrize(
    "lists",
    [
        {"GRAPHRT_ONLY_PLUGINS": ""},
        # A name that is allowed is met as it is written.
        {"GRAPHRT_ONLY_PLUGINS": "SECOND-NPU"},
        {"GRAPHRT_ONLY_PLUGINS": "first_npu", "GRAPHRT_BLOCK_PLUGINS": "first_npu"},
    ],
    ids=["none", "another spelling", "blocked and allowed"],
)
def test_lists_that_allow_none(found, site, monkeypatch, lists):
    for name, value in lists.items():
        monkeypatch.setenv(name, value)
    assert all(each.blocked for each in found.platforms())
    assert imported(site) == []


def test_who_asks_for_a_blocked_platform_is_told_by_what(found, site, monkeypatch):
    monkeypatch.setenv("GRAPHRT_BLOCK_PLUGINS", "first_npu,second_npu")
    with pytest.raises(PluginBlockedError, match="blocked by GRAPHRT_BLOCK_PLUGINS") as caught:
        found.get("first-npu")
    assert isinstance(caught.value, UnknownPlatformError)
    monkeypatch.setenv("GRAPHRT_PLATFORM", "second_npu")
    with pytest.raises(PluginBlockedError, match="pack-second:second_npu"):
        found.current()
    assert imported(site) == []


def test_a_platform_of_another_name_is_unknown_and_the_blocked_plugin_is_named(found, monkeypatch):
    monkeypatch.setenv("GRAPHRT_ONLY_PLUGINS", "")
    with pytest.raises(UnknownPlatformError, match="first_npu is blocked: not in GRAPHRT_ONLY"):
        found.get("abacus")


def test_a_registry_can_be_told_in_code(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    found = PlatformRegistry({}, allowed=AllowedPlugins(only=()))
    assert all(each.blocked for each in found.platforms())
    assert imported(site) == []


@pytest.mark.parametrize("given", [{"blocked": "first_npu"}, {"only": "x"}, {"blocked": [1]}])
def test_a_string_in_place_of_a_list_is_refused(given: dict[str, Any]):
    with pytest.raises(InvalidOptionError):
        AllowedPlugins(**given)


def test_doctor_shows_what_is_blocked_and_imports_none_of_it(site):
    pytest.importorskip("rich")
    code = "from graphrt.cli.doctor import print_doctor as p; p(as_json=True)"
    report = json.loads(outside(site, code, GRAPHRT_BLOCK_PLUGINS="first_npu,second_npu,third"))
    reasons = {each["plugin"]: each["reason"] for each in report["platforms"]}
    assert reasons["pack-first:first_npu"] == "blocked by GRAPHRT_BLOCK_PLUGINS"
    assert any("'third'" in each for each in report["notes"])
    assert imported(site) == []
    text = outside(
        site, code.replace("True", "False"), GRAPHRT_BLOCK_PLUGINS="first_npu", COLUMNS="200"
    )
    assert "no: blocked by GRAPHRT_BLOCK_PLUGINS" in text
