"""Mode resolution against the table of the design, and parsing of mode names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graphrt import AttentionSupport, GraphMode
from graphrt.core.base.errors import InvalidModeError, InvalidOptionError
from graphrt.core.batch.modes import PieceProvider
from graphrt.core.plan.resolution import provider_of, resolve_mode

P, F, N = "PIECEWISE", "FULL", "NONE"
FDO, FAP = "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"

# (support, largest query length): for each requested mode, with pieces and without.
TABLE = {
    ("ALWAYS", 1): {P: (P, N), F: (F, F), FDO: (FDO, FDO), FAP: (FAP, FDO)},
    ("ALWAYS", 4): {P: (P, N), F: (F, F), FDO: (FDO, FDO), FAP: (FAP, FDO)},
    ("UNIFORM_BATCH", 1): {P: (P, N), F: (FAP, FDO), FDO: (FDO, FDO), FAP: (FAP, FDO)},
    ("UNIFORM_BATCH", 4): {P: (P, N), F: (FAP, FDO), FDO: (FDO, FDO), FAP: (FAP, FDO)},
    ("UNIFORM_SINGLE_TOKEN_DECODE", 1): {
        P: (P, N),
        F: (FAP, FDO),
        FDO: (FDO, FDO),
        FAP: (FAP, FDO),
    },
    ("UNIFORM_SINGLE_TOKEN_DECODE", 2): {P: (P, N), F: (P, N), FDO: (P, N), FAP: (P, N)},
    ("UNIFORM_SINGLE_TOKEN_DECODE", 4): {P: (P, N), F: (P, N), FDO: (P, N), FAP: (P, N)},
    ("NEVER", 1): {P: (P, N), F: (P, N), FDO: (P, N), FAP: (P, N)},
    ("NEVER", 4): {P: (P, N), F: (P, N), FDO: (P, N), FAP: (P, N)},
}
CASES = [
    (support, query_len, requested, pieces, expected)
    for (support, query_len), row in TABLE.items()
    for requested, (with_pieces, without) in row.items()
    for pieces, expected in (("breakable", with_pieces), (None, without))
]


@pytest.mark.parametrize(("support", "query_len", "requested", "pieces", "expected"), CASES)
def test_resolve_mode_gives_the_mode_of_the_design_table(
    support, query_len, requested, pieces, expected
):
    resolution = resolve_mode(
        requested,
        attention=AttentionSupport[support],
        query_lens=(1, query_len),
        pieces=pieces,
    )
    assert resolution.mode.name == expected
    chain = [resolution.requested, *(step.after for step in resolution.steps)]
    assert [step.before for step in resolution.steps] == chain[:-1]
    assert chain[-1] is resolution.mode


@pytest.mark.parametrize(("support", "query_len", "requested", "pieces", "expected"), CASES)
def test_refuse_steps_raises_exactly_if_the_mode_was_stepped_down(
    support, query_len, requested, pieces, expected
):
    resolution = resolve_mode(
        requested,
        attention=AttentionSupport[support],
        query_lens=(query_len,),
        pieces=pieces,
    )
    if requested == expected:
        resolution.refuse_steps()
    else:
        with pytest.raises(InvalidModeError, match=requested):
            resolution.refuse_steps()


@pytest.mark.parametrize(
    ("requested", "support", "expected"),
    [
        (FAP, "ALWAYS", F),
        (FAP, "UNIFORM_BATCH", FDO),
        (P, "ALWAYS", N),
        (F, "ALWAYS", F),
        (FDO, "NEVER", N),
    ],
)
def test_a_module_with_a_whole_graph_pass_disables_piecewise_modes(requested, support, expected):
    resolution = resolve_mode(
        requested, attention=AttentionSupport[support], compiled=[module(whole=True)]
    )
    assert resolution.mode.name == expected


def module(graphs: bool = True, whole: bool = False) -> SimpleNamespace:
    return SimpleNamespace(graphs=graphs, provides=None, whole_graph=whole)


@pytest.mark.parametrize(
    ("modules", "requested", "expected", "rules"),
    [
        ([module(), module(graphs=False)], FAP, N, ["graphs-off"]),
        ([module(graphs=False)], N, N, []),
        ([module(), module(whole=True)], FAP, F, ["whole-graph"]),
        ([module(), module(whole=True)], None, N, []),
        ([module(), module()], FAP, FAP, []),
    ],
)
def test_the_most_restricted_compiled_module_decides_the_mode(modules, requested, expected, rules):
    resolution = resolve_mode(requested, compiled=modules)
    assert resolution.mode.name == expected
    assert [step.rule for step in resolution.steps] == rules
    whole = any(each.whole_graph for each in modules)
    assert resolution.pieces is (None if whole else PieceProvider.BREAKABLE)


def test_graphrt_mode_none_is_the_last_step_of_mode_resolution(monkeypatch):
    monkeypatch.setenv("GRAPHRT_MODE", "NONE")
    resolution = resolve_mode("FULL", attention="UNIFORM_BATCH")
    assert [step.rule for step in resolution.steps] == ["attention-mixed", "environment"]
    assert resolution.mode is GraphMode.NONE


def test_an_empty_attention_mapping_restricts_no_mode():
    assert resolve_mode("FULL", attention={}).steps == ()


@pytest.mark.parametrize(("pieces", "expected"), [("breakable", FAP), (None, N), ("fx", FAP)])
def test_the_default_mode_depends_on_the_provider_of_pieces(pieces, expected):
    assert resolve_mode(None, pieces=pieces).mode.name == expected


def test_the_mode_steps_down_for_the_least_capable_attention_backend():
    levels = {"flash": AttentionSupport.ALWAYS, "mamba": AttentionSupport.UNIFORM_BATCH}
    (step,) = resolve_mode("FULL", attention=levels).steps
    assert step.backend == "mamba"
    assert "mamba" in step.why


@pytest.mark.parametrize("text", ["full", " Full ", "FULL", GraphMode.FULL])
def test_mode_names_are_parsed_in_any_case(text):
    assert GraphMode.parse(text) is GraphMode.FULL


@pytest.mark.parametrize("text", ["", "EAGER", "FULL+PIECEWISE", None, 3])
def test_parsing_an_unknown_mode_raises_and_lists_the_known_modes(text):
    with pytest.raises(InvalidModeError, match="FULL_DECODE_ONLY"):
        GraphMode.parse(text)


def test_only_none_piecewise_and_full_are_runtime_modes():
    assert [mode.name for mode in GraphMode if mode.is_runtime_mode] == [N, P, F]


@pytest.mark.parametrize(
    ("asked", "provider"),
    [("auto", PieceProvider.FX), ("fx", PieceProvider.FX), ("inductor", PieceProvider.INDUCTOR)],
)
def test_pieces_auto_uses_the_provider_that_a_compiled_module_brings(asked, provider):
    brings = SimpleNamespace(graphs=True, provides=PieceProvider.FX, whole_graph=False)
    assert provider_of([brings], asked) is provider
    with pytest.raises(InvalidOptionError, match="captures its own pieces"):
        provider_of([brings], "breakable")
