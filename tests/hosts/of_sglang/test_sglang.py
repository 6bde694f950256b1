"""SGLang's backends on graphrt: captures, breaks, trials, and versions that do not fit.

SGLang is a stand-in that calls as SGLang's runners do (standin_sglang.py). Tests of SGLang's own
modules run where SGLang is installed.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import standin_sglang as host
import torch
from torch.nn.functional import pad

import graphrt.hosts.sglang
from graphrt import GraphPool, Reason
from graphrt.errors import GraphQuarantinedWarning, UnsupportedHostError
from graphrt.hosts.sglang import _state, versions
from tests import starts

ROOT = Path(__file__).resolve().parents[3]
SIZES = (8, 3, 1, 5, 4)


class Model(torch.nn.Module):
    """Embeds tokens and positions, and reads the metadata of the step."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.out = torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16)
        self.scale, self.context = 1.0, context.get_forward_context

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        lengths = self.context().attn_backend.forward_metadata
        angles = positions[:, None] * torch.arange(32) / 7
        hidden = self.embed(input_ids) + angles.sin() + lengths[:, None] / 50
        return self.out(hidden * self.scale)


def installed(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.17") -> dict[str, Any]:
    """A stand-in's modules, which are SGLang's from here on."""
    made = host.modules(version)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("GRAPHRT_SGLANG", "1")
    # Graphs of a CPU have no pool of SGLang's.
    monkeypatch.setattr(_state, "GraphPool", lambda handle: GraphPool("cpu"))
    _state.state.__init__()  # type: ignore[misc]
    return made


class Engine:
    """A model runner of the stand-in, with graphrt in it."""

    def __init__(self, made: dict[str, Any], **options: Any) -> None:
        graphrt.hosts.sglang.install()
        self.log: list[str] = []
        context = made[host.CONTEXT]
        self.model = Model(context)
        self.runner = made[host.MODEL_RUNNER].ModelRunner(self.model, self.log, context)
        backend = made[host.FULL].FullCudaGraphBackend
        make = made[host.DECODE].DecodeCudaGraphRunner
        self.decode = self.runner.decode = make(self.runner, backend, context, **options)
        self.decode.capture()

    def step(self, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The logits of a step, those of an eager one, and whether a graph served it. A product of
        as many rows has the same bits, whatever is in other rows."""
        batch = host.batch(size, seed)
        output = self.runner.forward(batch)
        rows = self.decode._pad_to_bucket(size, self.decode.capture_bs) if size <= 8 else size
        names = ("input_ids", "positions", "seq_lens")
        padded = {name: pad(getattr(batch, name), (0, rows - size)) for name in names}
        return (
            output.logits,
            self.runner.eager(SimpleNamespace(**padded))[:size],
            output.can_run_graph,
        )


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    with torch.inference_mode():
        yield installed(monkeypatch)
    graphrt.hosts.sglang.uninstall()


# Graphs -------------------------------------------------------------------------------------------


def test_every_step_by_a_full_graph_has_the_logits_of_an_eager_one(sglang):
    engine = Engine(sglang)
    for turn in range(3):
        for size in SIZES:
            logits, eager, by_graph = engine.step(size, turn)
            assert by_graph and torch.equal(logits, eager)
    report = graphrt.hosts.sglang.report()
    table = [line.split() for line in str(report).splitlines() if line.startswith("FULL [")]
    assert {line[1].strip("[]"): int(line[3]) for line in table} == {"1": 3, "4": 6, "8": 6}
    assert "15 HIT" in str(report)


def test_a_graph_is_captured_after_two_warm_ups_each_with_its_hook_and_its_barrier(sglang):
    engine = Engine(sglang)
    assert engine.log == ["synchronize", "barrier", "hook"] * 2 * len(engine.decode.capture_bs)


@pytest.mark.parametrize("reason", ["memory saver", "pdmux"])
def test_a_runner_that_graphrt_does_not_serve_keeps_sglangs_graphs(reason, sglang, caplog):
    caplog.set_level(logging.WARNING, "sglang.graphrt")
    key = "enable_memory_saver" if reason == "memory saver" else "enable_pdmux"
    engine = Engine(sglang, **{key: True})
    assert engine.log == ["own capture"] * 3
    assert "keeps SGLang's own graphs" in caplog.text and key.rpartition("_")[2] in caplog.text
    assert not graphrt.hosts.sglang.report().graphs
    logits, eager, _ = engine.step(4)
    assert torch.equal(logits, eager)
    # SGLang's runners tell its backends apart by their class.
    assert isinstance(engine.decode.backend, sglang[host.FULL].FullCudaGraphBackend)
    assert not engine.decode.backend.in_quarantine(4)


def test_graphs_of_a_runner_are_of_one_kind_so_that_the_first_size_tells_of_the_others(sglang):
    engine = Engine(sglang)
    assert list(engine.decode.backend._keyed._kinds) == [engine.decode]


def test_graphs_that_sglang_has_cleaned_up_are_captured_again(sglang):
    engine = Engine(sglang)
    engine.decode.backend.cleanup()
    engine.model.scale = 2.0
    engine.decode.capture()
    for size in SIZES:
        logits, eager, by_graph = engine.step(size)
        assert by_graph and torch.equal(logits, eager)


# Breaks -------------------------------------------------------------------------------------------


class Prefill:
    """A runner with a Breakable backend, over a body with two marked functions."""

    def __init__(self, made: dict[str, Any], model_runner: Any = None, **options: Any) -> None:
        self.calls: list[str] = []
        self.device_module = host.Device(self.calls)
        new = SimpleNamespace(tp_group=host.Group(self.calls), device="cpu")
        self.model_runner = model_runner or new
        mark = made[host.BREAKS].eager_on_graph

        def attend(x: torch.Tensor, into: torch.Tensor) -> None:
            self.calls.append("attend")
            into.copy_(x * self.factor)

        def exchange(x: torch.Tensor) -> torch.Tensor:
            self.calls.append("exchange")
            return x + self.factor

        def stub(x: torch.Tensor) -> torch.Tensor:
            self.calls.append("stub")
            return torch.zeros_like(x)

        self.attend, self.exchange = mark(True)(attend), mark(True, capture_stub=stub)(exchange)
        self.factor = 2.0
        self.layer = torch.nn.Linear(8, 8)
        self.buffer = torch.zeros(16, 8)
        self.backend = made[host.BREAKABLE].BreakableCudaGraphBackend(self, **options)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        attended = torch.empty_like(hidden)
        self.attend(hidden, attended)
        return self.exchange(attended * 3).relu() + x

    def capture(self, sizes: tuple[int, ...] = (16, 8, 1)) -> None:
        with self.backend.capture_session(None):
            for size in sizes:
                view = self.buffer[:size]
                self.backend.capture_one(host.ShapeKey(size), lambda view=view: self.body(view))


def test_marked_functions_are_eager_breaks_and_all_sizes_share_one_output_buffer(sglang):
    graphrt.hosts.sglang.install()
    prefill = Prefill(sglang)
    prefill.capture()
    first = prefill.backend.replay(host.ShapeKey(16), None)
    for turn, size in enumerate((8, 1, 16, 8)):
        prefill.factor = 3.0 + turn
        prefill.buffer[:size] = torch.randn(size, 8)
        prefill.calls.clear()
        output = prefill.backend.replay(host.ShapeKey(size), None)
        assert prefill.calls == ["attend", "exchange"]
        assert torch.equal(output, prefill.body(prefill.buffer[:size]))
        assert output.data_ptr() == first.data_ptr()


def test_runners_of_a_model_share_the_buffer_of_their_outputs_and_those_of_a_draft_do_not(sglang):
    graphrt.hosts.sglang.install()
    prefill = Prefill(sglang)
    verify, draft = Prefill(sglang, prefill.model_runner), Prefill(sglang)
    outputs = []
    for runner, size in ((prefill, 16), (verify, 8), (draft, 16)):
        runner.capture((size,))
        runner.buffer.normal_()
        output = runner.backend.replay(host.ShapeKey(size), None)
        assert torch.equal(output, runner.body(runner.buffer[:size]))
        outputs.append(output)
    assert outputs[0].data_ptr() == outputs[1].data_ptr() != outputs[2].data_ptr()


def test_with_debug_eager_a_whole_forward_is_one_break(sglang):
    graphrt.hosts.sglang.install()
    prefill = Prefill(sglang, debug_eager=True)
    prefill.capture((8,))
    prefill.buffer.normal_()
    prefill.factor = 5.0
    output = prefill.backend.replay(host.ShapeKey(8), None)
    assert torch.equal(output, prefill.body(prefill.buffer[:8]))


def test_breakable_graphs_that_sglang_has_cleaned_up_are_captured_again(sglang):
    graphrt.hosts.sglang.install()
    prefill = Prefill(sglang)
    prefill.capture((8,))
    prefill.backend.cleanup()
    prefill.layer = torch.nn.Linear(8, 8)
    prefill.capture((16, 8))
    for size in (8, 16):
        prefill.buffer.normal_()
        output = prefill.backend.replay(host.ShapeKey(size), None)
        assert torch.equal(output, prefill.body(prefill.buffer[:size]))


def test_a_capture_runs_the_stub_in_place_of_a_break_and_waits_for_ranks_before_each(sglang):
    graphrt.hosts.sglang.install()
    prefill = Prefill(sglang)
    prefill.capture((8,))
    warm_up = ["synchronize", "barrier", "attend", "exchange"]
    assert prefill.calls == [*warm_up, *warm_up, "barrier", "attend", "barrier", "stub"]


def test_marked_functions_outside_of_a_capture_of_graphrt_are_as_sglang_has_them(sglang):
    graphrt.hosts.sglang.install()
    prefill = Prefill(sglang)
    sglang[host.BREAKS]._current_capture_var = "a capture of SGLang's own"
    prefill.exchange(torch.ones(1))
    assert prefill.calls == ["stub"]


def test_functions_that_were_marked_before_are_replaced_and_put_back(sglang):
    module = sglang["sglang"]
    module.marked = before = sglang[host.BREAKS].eager_on_graph(True)(lambda x: x)
    graphrt.hosts.sglang.install()
    assert module.marked is not before and module.marked(3) == 3
    graphrt.hosts.sglang.uninstall()
    assert module.marked is before


# Trials -------------------------------------------------------------------------------------------


def test_a_graph_is_tried_once_though_each_step_has_another_context(sglang, monkeypatch, caplog):
    monkeypatch.setenv("GRAPHRT_CHECK", "first")
    caplog.set_level(logging.INFO, "sglang.graphrt")
    engine = Engine(sglang)
    for turn in range(6):
        for size in SIZES:
            logits, eager, by_graph = engine.step(size, turn)
            assert by_graph and torch.equal(logits, eager)
    tried = [each.getMessage() for each in caplog.records if ": tried" in each.getMessage()]
    assert len(tried) == 3 and all(each.endswith("as eager") for each in tried)
    trust = graphrt.hosts.sglang.report().trust
    assert [each.status for each in trust.trials] == ["tried"] * 3


@pytest.mark.filterwarnings("ignore::graphrt.errors.GraphQuarantinedWarning")
@pytest.mark.parametrize("slot", ["input_ids", "positions"])
def test_an_input_that_is_not_filled_is_named_and_its_batches_run_eagerly(
    slot, sglang, monkeypatch, caplog
):
    monkeypatch.setenv("GRAPHRT_CHECK", "first")
    caplog.set_level(logging.INFO, "sglang.graphrt")
    engine = Engine(sglang)
    load = engine.decode.load_batch

    def without(batch: Any) -> None:
        before = getattr(engine.decode.buffers, slot).clone()
        load(batch)
        getattr(engine.decode.buffers, slot).copy_(before)

    engine.decode.load_batch = without
    by_graph = []
    for turn in range(4):
        logits, eager, served = engine.step(4, turn)
        assert torch.equal(logits, eager)
        by_graph.append(served)
    # The trial itself serves the first one, by an eager run on inputs that it has filled.
    assert by_graph == [True, False, False, False]
    assert f"SGLang did not fill its inputs {slot} before the replay" in caplog.text
    report = graphrt.hosts.sglang.report()
    assert report.reasons[Reason.QUARANTINED] == 3
    assert "ran eagerly, as the graph of 4 is in quarantine" in caplog.text
    # Graphs of other sizes are tried by themselves.
    assert engine.decode.can_run_graph(host.batch(8))


def test_a_number_that_a_graph_has_baked_in_is_found_at_the_step_that_changes_it(
    sglang, monkeypatch
):
    monkeypatch.setenv("GRAPHRT_CHECK", "first")
    engine = Engine(sglang)
    for turn in range(3):
        logits, eager, by_graph = engine.step(8, turn)
        assert by_graph and torch.equal(logits, eager)
    engine.model.scale = 0.5
    with pytest.warns(GraphQuarantinedWarning, match=r"scale = 1\.0, then 0\.5"):
        logits, eager, _ = engine.step(8, 3)
    assert torch.equal(logits, eager)
    logits, eager, by_graph = engine.step(8, 4)
    assert not by_graph and torch.equal(logits, eager)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda runner: setattr(runner.server_args, "tp_size", 2), "ranks have to agree"),
        (lambda runner: setattr(runner, "mambaish_config", "mamba"), "Mamba"),
        (lambda runner: delattr(runner.attn_backend, "forward_metadata"), "forward_metadata"),
    ],
)
def test_a_model_that_is_not_tried_is_told_once_with_the_reason(
    change, expected, sglang, monkeypatch, caplog
):
    from graphrt.hosts.engine import log_untried
    from graphrt.hosts.sglang.trials import trials_of

    log_untried.cache_clear()
    monkeypatch.setenv("GRAPHRT_CHECK", "first")
    engine = Engine(sglang)
    change(engine.runner)
    caplog.clear()
    assert trials_of(engine.decode) is None and trials_of(engine.decode) is None
    assert caplog.text.count("no graph is tried") == 1 and expected in caplog.text


# Eager steps --------------------------------------------------------------------------------------


def test_eager_steps_are_told_the_first_tenth_and_hundredth_time(sglang, caplog):
    caplog.set_level(logging.INFO, "sglang.graphrt")
    engine = Engine(sglang)
    for turn in range(100):
        engine.step(9, turn)
    told = [each.getMessage() for each in caplog.records if "ran eagerly" in each.getMessage()]
    text = "graphrt: a step ran eagerly, as SGLang found no graph for a batch (DECODE)"
    assert told == [text, f"{text}, 10 times so far", f"{text}, 100 times so far"]
    assert graphrt.hosts.sglang.report().reasons[Reason.NO_GRAPH] == 100


# Versions and the switch --------------------------------------------------------------------------


def _names(made: dict[str, Any]) -> list[Any]:
    return [
        made[host.FULL].FullCudaGraphBackend,
        # By a module that has imported it: SGLang's own decode runner has the other one.
        made[host.DECODE].BreakableCudaGraphBackend,
        made[host.BREAKABLE].BreakableCudaGraphBackend,
        made[host.BREAKS].eager_on_graph,
        vars(made[host.MODEL_RUNNER].ModelRunner)["forward"],
        vars(made[host.DECODE].DecodeCudaGraphRunner)["can_run_graph"],
    ]


def test_all_names_are_replaced_and_uninstall_puts_every_one_back(sglang):
    before = _names(sglang)
    graphrt.hosts.sglang.install()
    assert not any(a is b for a, b in zip(before, _names(sglang), strict=True))
    graphrt.hosts.sglang.uninstall()
    assert all(a is b for a, b in zip(before, _names(sglang), strict=True))


def test_modules_that_were_imported_since_get_sglangs_names_back_too(sglang):
    graphrt.hosts.sglang.install()
    later, own = sglang["sglang"], vars(sglang[host.FULL])["FullCudaGraphBackend"].__bases__[-1]
    later.FullCudaGraphBackend = sglang[host.FULL].FullCudaGraphBackend
    graphrt.hosts.sglang.uninstall()
    assert later.FullCudaGraphBackend is own


def _without_a_backend(made: dict[str, Any]) -> None:
    del made[host.BREAKABLE].BreakableCudaGraphBackend


def _another_argument(made: dict[str, Any]) -> None:
    made[host.FULL].FullCudaGraphBackend.capture_one = lambda self, shape_key, forward: None


def _another_closure(made: dict[str, Any]) -> None:
    def eager_on_graph(enable, capture_stub=None):
        return lambda inner: lambda *args: inner(*args)

    made[host.BREAKS].eager_on_graph = eager_on_graph


def _marks_that_are_objects(made: dict[str, Any]) -> None:
    class Mark:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, *args: Any) -> Any:
            return self.inner(*args)

    made[host.BREAKS].eager_on_graph = lambda enable, capture_stub=None: Mark


def _another_attribute(made: dict[str, Any]) -> None:
    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        self.graphs[shape_key] = self._device_module, self._tp_group, self._pool

    made[host.FULL].FullCudaGraphBackend.capture_one = capture_one


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_without_a_backend, "BreakableCudaGraphBackend"),
        (_another_argument, "argument 'forward_fn'"),
        (_another_closure, "closes over capture_stub, inner"),
        (_marks_that_are_objects, "closes over capture_stub, inner"),
        (_another_attribute, "'_graphs' in the code of"),
    ],
)
def test_an_sglang_of_another_shape_is_refused_by_name_and_nothing_is_replaced(
    change, expected, sglang
):
    change(sglang)
    before = [dict(vars(module)) for module in sglang.values()]
    with pytest.raises(UnsupportedHostError, match=expected):
        graphrt.hosts.sglang.install()
    assert before == [dict(vars(module)) for module in sglang.values()]


@pytest.mark.parametrize("version", ["0.5.16", "0.6.0", "0.5.170"])
def test_an_unknown_version_of_sglang_is_refused_and_nothing_is_replaced(version, monkeypatch):
    made = installed(monkeypatch, version)
    before = _names(made)
    with pytest.raises(UnsupportedHostError, match=f"(?s){version}.*0.5.17"):
        graphrt.hosts.sglang.install()
    assert all(a is b for a, b in zip(before, _names(made), strict=True))


def test_an_install_that_ends_half_way_leaves_nothing_replaced(sglang, monkeypatch):
    before = _names(sglang)
    installing = importlib.import_module("graphrt.hosts.sglang.installing")
    monkeypatch.setattr(installing, "_counting", lambda original: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        graphrt.hosts.sglang.install()
    assert all(a is b for a, b in zip(before, _names(sglang), strict=True))


@pytest.mark.parametrize("variable", ["GRAPHRT_SGLANG=0", "GRAPHRT_SGLANG=", "GRAPHRT_MODE=NONE"])
def test_the_switch_leaves_sglang_its_own_graphs(variable, sglang, monkeypatch):
    monkeypatch.setenv(*variable.split("="))
    before = _names(sglang)
    graphrt.hosts.sglang.install()
    assert all(a is b for a, b in zip(before, _names(sglang), strict=True))


def test_an_invalid_value_of_the_sglang_switch_is_refused(sglang, monkeypatch):
    monkeypatch.setenv("GRAPHRT_SGLANG", "yes")
    with pytest.raises(UnsupportedHostError, match="GRAPHRT_SGLANG has a wrong value"):
        graphrt.hosts.sglang.install()


def test_the_plugin_switched_off_does_not_import_sglang(tmp_path):
    (tmp_path / "sglang.py").write_text("raise AssertionError('SGLang was imported')")
    environment = {name: text for name, text in os.environ.items() if name != "GRAPHRT_SGLANG"}
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = starts.run("-c", "from graphrt.hosts.sglang import *; print(install())", env=environment)
    assert done.stdout.splitlines() == ["None"], done.stderr


# SGLang itself ------------------------------------------------------------------------------------


def test_the_installed_sglang_is_as_graphrt_knows_it_and_is_put_back(monkeypatch):
    sglang = pytest.importorskip("sglang", reason="SGLang is not installed")
    versions.check(sglang.__version__)
    names = [host.FULL, host.BREAKABLE, host.BREAKS, host.MODEL_RUNNER, host.DECODE]
    made = {name: importlib.import_module(name) for name in names}
    before = _names(made)
    monkeypatch.setenv("GRAPHRT_SGLANG", "1")
    try:
        graphrt.hosts.sglang.install()
        assert not any(a is b for a, b in zip(before, _names(made), strict=True))
    finally:
        graphrt.hosts.sglang.uninstall()
    assert all(a is b for a, b in zip(before, _names(made), strict=True))
