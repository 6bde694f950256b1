"""Public calls given garbage raise a graphrt error or work, and the next right call works."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from garbage import GARBAGE, RUNNERS, TARGETS, Target, parameters

import graphrt
from graphrt import GraphRTError
from graphrt.types import PlanArguments

OF_PLANS = tuple(PlanArguments.__annotations__)
"""What a runner and a plan take beside the names of their signatures."""


@pytest.fixture(autouse=True, scope="module")
def no_runner_stays() -> Iterator[None]:
    """One that lives on keeps this process's watcher of dicts, which tests elsewhere take away."""
    yield
    RUNNERS.clear()


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # "x" is the path of a plan too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def named(name: str, target: Target, call: Callable[..., Any], right: dict[str, Any]) -> list[str]:
    names = parameters(call, right)
    if name in ("Plan", "Plan.replace", "GraphRunner"):
        names += [each for each in OF_PLANS if each not in names]
    return [each for each in names if each not in target.skipped]


@pytest.mark.parametrize("name", TARGETS)
def test_a_garbage_argument_raises_a_graphrt_error_and_the_next_call_works(name: str) -> None:
    target = TARGETS[name]
    call, right = target.make()
    faults: list[str] = []
    for parameter in named(name, target, call, right):
        for kind, make in GARBAGE.items():
            if not target.shared:
                call, right = target.make()
            try:
                call(**{**right, parameter: make()})
            except (GraphRTError, *target.own):
                pass
            except Exception as error:
                faults.append(f"{parameter}={kind}: {type(error).__name__}: {text(error)}")
            if not target.shared:
                call, right = target.make()
            try:
                call(**right)
            except Exception as error:
                faults.append(f"after {parameter}={kind}: {type(error).__name__}: {text(error)}")
                break
    assert not faults, "\n".join(faults)


def text(error: Exception) -> str:
    try:
        return str(error)[:100]
    except Exception:
        return "?"


UNTRIED = {
    # Values that graphrt makes, or protocols: nobody calls them with arguments of a host's.
    "CaptureSession",
    "Dispatch",
    "GraphMode",
    "AttentionSupport",
    "PieceProvider",
    "Reason",
    "InputSlot",
    "KeyedGraph",
    "Platform",
    "RunnerReport",
    "SegmentHooks",
    "GraphRTError",
    "Graphed",
    # Without arguments.
    "current_context",
    "current_platform",
    # Looked at where they are used: see "Batch in ...".
    "Batch",
}


def test_every_public_callable_is_tried_with_garbage() -> None:
    calls = {
        name
        for name in graphrt.__all__
        if inspect.isclass(getattr(graphrt, name)) or inspect.isroutine(getattr(graphrt, name))
    }
    tried = {name.partition(".")[0].partition(" ")[0] for name in TARGETS}
    assert calls - tried - UNTRIED == set()
    assert tried >= {"compile", "opaque", "support_compile"}


@pytest.mark.parametrize(
    ("owner", "left_out"),
    [
        (
            "GraphRunner",
            {"close", "look", "release", "report", "seal", "unwrap", "weights_changed"},
        ),
        (
            "GraphDispatcher",
            # Without arguments, or what wrappers and runners call.
            {
                "counts",
                "failed",
                "not_replayed",
                "not_served_by",
                "run_eagerly",
                "sizes",
                "withdraw_all",
            },
        ),
        ("GraphOptions", {"of_process", "state_limit", "to_dict"}),
        ("Plan", {"as_dict", "capture_order", "lines", "refuse_less"}),
        ("KeyedGraphs", {"clear_graphs"}),
        (
            "GraphWrapper",
            # A wrapper hands its arguments on.
            {
                "clear_graphs",
                "destroy_graphs",
                "in_session",
                "seal",
                "serve_owner",
                "unseal",
                "unwrap",
            },
        ),
    ],
)
def test_every_public_method_with_arguments_is_tried_with_garbage(
    owner: str, left_out: set[str]
) -> None:
    kind = getattr(graphrt, owner)
    methods = {
        name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")
    }
    assert {name for name in methods if f"{owner}.{name}" not in TARGETS} == left_out
