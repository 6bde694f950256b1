"""The platform of docs/development/add_platform.md has the abstract methods alone, and passes the
conformance suite."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from graphrt.errors import PlatformError
from graphrt.platforms import Platform, PlatformRegistry, wrapper_class
from graphrt.testing import PlatformConformance
from tests.fuzz.running import judge, program_of
from tests.test_readme import example_with

LEAST = ModuleType("graphrt_least")
sys.modules[LEAST.__name__] = LEAST
exec(example_with("class LeastPlatform", "docs/development/add_platform.md"), vars(LEAST))
LeastPlatform, LeastWrapper = LEAST.LeastPlatform, LEAST.LeastWrapper


class TestLeastPlatform(PlatformConformance):
    platform = LeastPlatform()


def test_the_minimal_platform_defines_exactly_the_abstract_methods():
    methods = {name for name, value in vars(LeastPlatform).items() if callable(value)}
    assert methods == Platform.__abstractmethods__


def test_the_add_platform_pages_code_registers_as_a_plugin():
    registry = PlatformRegistry(group=None)
    registry.register(LEAST)
    assert type(registry.get("least")) is LeastPlatform


class OfAnother(LeastPlatform):
    """What a plugin's author forgets: whose wrapper it is."""

    name = "another"


class NoWrapper(LeastPlatform):
    def get_static_graph_wrapper_cls(self) -> str:
        return f"{__name__}.Calls"


class Nameless(LeastPlatform):
    def get_static_graph_wrapper_cls(self) -> str:
        return "graphrt.GraphWrapper"


@pytest.mark.parametrize(
    ("platform", "got"),
    [
        (OfAnother(), "platform_name = 'least'"),
        (Nameless(), "platform_name = None"),
        (NoWrapper(), "Calls"),
    ],
)
def test_a_wrapper_class_of_another_platform_is_refused_and_fails_conformance(platform, got):
    with pytest.raises(PlatformError, match=got):
        wrapper_class(platform)
    suite = TestLeastPlatform()
    suite.platform = platform
    with pytest.raises(PlatformError, match="get_static_graph_wrapper_cls"):
        suite.test_the_wrapper_class_names_this_platform()


def test_following_the_wrapper_class_advice_fixes_the_platform():
    class Own(LeastWrapper):
        platform_name = "another"

    globals()["Own"] = Own

    class Advised(OfAnother):
        def get_static_graph_wrapper_cls(self) -> str:
            return f"{__name__}.Own"

    assert wrapper_class(Advised()) is Own


@pytest.mark.parametrize("number", [9, 22, 51, 97, 98, 103])
def test_the_add_platform_pages_code_serves_what_the_fuzzer_found_wrong(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of inference mode, `out=` and in-place operators that resize or reshape, `item()`."""
    registry = PlatformRegistry(group=None)
    registry.register(LEAST)
    monkeypatch.setattr("graphrt.core.device.registry._default", registry)
    verdict = judge(program_of(number), "least")
    assert not verdict.is_defect, verdict
