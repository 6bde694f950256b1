"""Platforms to inject faults into, and the scenarios that run on them."""

from __future__ import annotations

from collections.abc import Callable

from graphrt import Platform, get_platform
from tests.faults.compiled import COMPILED
from tests.faults.scenarios import SCENARIOS
from tests.faults.sharing import SHARING
from tests.faults.world import World


def maker_of(name: str) -> Callable[[], Platform]:
    """What makes further instances of an installed platform, one for each fault; raises the named
    errors."""
    return type(get_platform(name))


def scenarios_of(name: str) -> dict[str, type[World]]:
    """The scenarios of a platform. Compiled code is run where it is compiled for."""
    return {**SCENARIOS, **SHARING, **({} if name == "ascend-sim" else COMPILED)}
