"""What graphrt's plugin of vLLM does before there is a vLLM, and its contexts of steps."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

import graphrt
from graphrt import GraphMode
from graphrt.hosts.table import Table
from graphrt.hosts.vllm import install, platform
from graphrt.hosts.vllm.breakable import called_by
from graphrt.hosts.vllm.log import VllmEagerSteps
from graphrt.hosts.vllm.steps import MOST, Steps
from tests import starts

ROOT = Path(__file__).resolve().parents[2]
Mode = SimpleNamespace
Key = namedtuple("Key", "num_tokens num_reqs uniform", defaults=(None, False))


def test_the_plugin_switched_off_does_not_import_vllm(tmp_path):
    (tmp_path / "vllm.py").write_text("raise AssertionError('vLLM was imported')")
    environment = {name: text for name, text in os.environ.items() if name != "GRAPHRT_VLLM"}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = """
import os
from graphrt.hosts.vllm import install, platform

print(platform(), install())
for value in ("", "0"):
    os.environ["GRAPHRT_VLLM"] = value
    print(platform(), install())
"""
    done = starts.run("-c", code, env=environment)
    assert done.stdout.splitlines() == ["None None"] * 3, done.stderr


@pytest.mark.parametrize("entry", [install, platform])
def test_an_invalid_value_of_the_vllm_switch_is_refused(entry, monkeypatch):
    monkeypatch.setenv("GRAPHRT_VLLM", "yes")
    with pytest.raises(graphrt.errors.UnsupportedHostError, match="GRAPHRT_VLLM has a wrong value"):
        entry()


def test_steps_of_equal_descriptors_share_a_context_with_fresh_tokens():
    steps = Steps(VllmEagerSteps(), Table())
    piecewise, full = Mode(name="PIECEWISE"), Mode(name="FULL")
    keys = [Key(4), Key(4, 4), Key(4, 4, True), Key(8)]
    made = [steps.of(mode, key) for mode in (piecewise, full) for key in keys]
    assert len({id(step) for step in made}) == len({(s.mode, s.descriptor) for s in made}) == 8
    first = steps.of(full, keys[1])
    token = first.token
    assert steps.of(full, keys[1]) is first is made[5] and first.token is not token
    assert (first.descriptor.num_tokens, first.descriptor.num_reqs) == (4, 4)
    assert steps.keyed(first, 1) is steps.keyed(first, 1) is not steps.keyed(first, 2)


def test_a_step_without_a_graph_has_the_context_of_mode_none():
    steps = Steps(VllmEagerSteps(), Table())
    for mode, key in [("NONE", Key(4)), ("NONE", None), ("FULL", None)]:
        assert steps.of(Mode(name=mode), key).mode is GraphMode.NONE


def test_the_number_of_kept_step_contexts_is_bounded():
    steps, mode = Steps(VllmEagerSteps(), Table()), Mode(name="FULL")
    for tokens in range(1, MOST + 100):
        steps.of(mode, Key(tokens))
    assert len(steps._steps) == MOST
    late = Key(MOST + 50)
    assert steps.of(mode, late).descriptor == steps.of(mode, late).descriptor


def test_a_vllm_marker_with_an_unknown_closure_is_refused_by_name():
    def closure(other=1):
        return other

    with pytest.raises(graphrt.errors.UnsupportedHostError, match="weak_args"):
        called_by(closure)
