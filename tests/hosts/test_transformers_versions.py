"""Another transformers than the tested ones is refused by name; it need not be installed."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from graphrt.errors import UnsupportedHostError
from graphrt.hosts.names import is_known, missing_names
from graphrt.hosts.transformers import with_graphs
from graphrt.hosts.transformers.versions import KNOWN


def call() -> None:
    with_graphs(torch.nn.Linear(2, 2), max_batch=1, max_len=16)


def standin(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    module = types.ModuleType("transformers")
    module.__version__ = version  # type: ignore[attr-defined]
    module.__path__ = []
    monkeypatch.setitem(sys.modules, "transformers", module)


def test_an_unknown_transformers_version_is_refused_with_the_known_versions(monkeypatch):
    standin(monkeypatch, "4.57.1")
    with pytest.raises(UnsupportedHostError, match=r"4\.57\.1") as raised:
        call()
    assert all(f"{known}.*" in str(raised.value) for known in KNOWN)
    assert "with_graphs" in str(raised.value)


def test_a_known_version_that_lacks_names_is_refused_with_all_missing_names(monkeypatch):
    standin(monkeypatch, f"{KNOWN[0]}.9")
    with pytest.raises(UnsupportedHostError) as raised:
        call()
    for name in ("PreTrainedModel", "_prepare_cache_for_generation", "DynamicLayer.update"):
        assert name in str(raised.value)


def test_with_graphs_without_transformers_says_transformers_is_not_installed(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedHostError, match="not installed"):
        call()


@pytest.mark.parametrize(
    ("version", "known"),
    [("5.17", True), ("5.17.0", True), ("5.170.0", False), ("5.16.9", False), ("5.24.1", True)],
)
def test_only_patch_releases_of_known_versions_are_accepted(version, known):
    assert is_known(version, KNOWN) is known


def test_arguments_that_a_function_does_not_take_are_missing_as_names_are():
    names = {"statistics": ("mean(data, weights)", "median", "mode(data)", "medium(data)")}
    assert list(missing_names(names)) == [
        "argument 'weights' of statistics.mean",
        "statistics.medium",
    ]


def test_a_package_that_a_hosts_module_lacks_is_named_in_place_of_the_hosts_names(
    tmp_path, monkeypatch
):
    (tmp_path / "a_host").mkdir()
    (tmp_path / "a_host" / "graphs.py").write_text("import a_package_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_it_needs"):
        list(missing_names({"a_host.graphs": ("capture",)}))
    assert list(missing_names({"a_host.others.more": ("capture",)})) == [
        "a_host.others.more.capture"
    ]
