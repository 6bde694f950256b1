"""What docs/stability.md promises: names that stay, and versions whose mismatch is named."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from graphrt import GraphPool, Plan
from graphrt.core.base.errors import PlanFileError, PlatformError
from graphrt.core.device.contract import OLDEST_CONTRACT
from graphrt.core.device.registry import PluginWarning
from graphrt.cpu import CpuPlatform
from graphrt.platforms import CONTRACT_VERSION, PlatformRegistry, hookimpl, installed_platforms
from tests.test_surface import PUBLIC

NAMES = Path(__file__).with_name("stable_names.txt")
STABLE = [
    module
    for module in PUBLIC
    if module not in ("graphrt.lowlevel", "graphrt.observe")
    and not module.startswith("graphrt.hosts.")
]


def test_stable_public_names_equal_the_recorded_list():
    kept = set(NAMES.read_text(encoding="utf-8").split())
    there = {
        f"{module}.{name}" for module in STABLE for name in importlib.import_module(module).__all__
    }
    assert kept - there == set(), "removed: deprecate it first, see docs/stability.md"
    assert there - kept == set(), f"added: write it down in {NAMES.name}"


class OtherPlatform(CpuPlatform):
    name = "other"


def plugin_of(version: Any) -> Any:
    class Versioned(OtherPlatform):
        contract_version = version

    class Plugin:
        @hookimpl
        def graphrt_platforms(self) -> Versioned:
            return Versioned()

    return Plugin()


@pytest.mark.parametrize("version", [CONTRACT_VERSION + 1, 0, "1"])
def test_a_plugin_for_an_unsupported_contract_version_is_refused(version):
    advice = "newer version of the plugin, or of graphrt"
    registry = PlatformRegistry({}, group=None)
    registry.register(plugin_of(version), name="mine")
    with pytest.warns(PluginWarning, match="PlatformError"):
        (record,) = registry.platforms()
    assert advice in (record.error or "") and f"contract_version = {version!r}" in record.error
    with pytest.raises(PlatformError, match="mine"):
        registry.get("other")
    platform = plugin_of(version).graphrt_platforms()
    with pytest.raises(PlatformError, match=advice):
        GraphPool(platform)


@pytest.mark.parametrize("version", range(OLDEST_CONTRACT, CONTRACT_VERSION + 1))
def test_a_plugin_for_a_documented_contract_version_is_accepted(version):
    page = Path(__file__).parent.parent / "docs" / "stability.md"
    accepted = f"Accepted are {OLDEST_CONTRACT} to {CONTRACT_VERSION}"
    assert accepted in page.read_text(encoding="utf-8")
    registry = PlatformRegistry({}, group=None)
    registry.register(plugin_of(version))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.get("other").name == "other"


def test_each_built_in_platform_states_the_current_contract_version():
    own = [each for each in installed_platforms() if each.origin == "built-in"]
    assert own
    for each in own:
        assert vars(type(each.platform))["contract_version"] == CONTRACT_VERSION


@pytest.mark.parametrize(
    ("version", "words"),
    [(5, "another graphrt wrote it"), (1, "format 1"), ("2", "format '2'"), (True, "format True")],
)
def test_a_plan_file_of_another_format_version_is_refused(version, words, tmp_path):
    path = tmp_path / "plan.json"
    Plan(mode="FULL", sizes=[1, 2]).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "graphrt_plan": version}))
    with pytest.raises(PlanFileError, match=words) as refused:
        Plan.load(path)
    assert "format 4" in str(refused.value)
