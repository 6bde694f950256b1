"""`GraphOptions` from code, dict, JSON and dotted settings."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrt.compile import options as compile_options
from graphrt.compile.options import CompileOptions
from graphrt.core.base.errors import InvalidOptionError
from graphrt.core.capture import options as module
from graphrt.core.capture.options import GraphOptions
from graphrt.demo.settings import read_settings, runner_settings

WORD = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
OPERATORS = st.lists(
    st.builds(lambda ns, op, tail: f"{ns}::{op}{tail}", WORD, WORD, st.sampled_from(["", ".out"])),
    max_size=3,
)
COMPILE = st.builds(
    CompileOptions,
    backend=st.text(min_size=1),
    compile_sizes=st.lists(st.one_of(st.integers(1, 9999), st.just("capture_sizes"))),
    dynamic_shapes=st.sampled_from(["backed", "unbacked", "backed_size_oblivious"]),
    splitting_ops=st.none() | OPERATORS,
    use_inductor_graph_partition=st.booleans(),
    cache_dir=st.none() | st.text(min_size=1),
    save_format=st.sampled_from(["binary", "unpacked"]),
    autotune=st.booleans(),
)
OPTIONS = st.builds(
    GraphOptions,
    warmups=st.integers(0, 9),
    breaks=OPERATORS,
    outputs=st.sampled_from(["pool", "static", "clone"]),
    lazy=st.booleans(),
    strict=st.booleans(),
    check=st.sampled_from(["off", "capture", "first", "sample", "always"]),
    state_limit_bytes=st.none() | st.integers(0, 1 << 40),
    max_padding=st.none() | st.floats(1, 1e9),
)


def test_graph_options_have_the_documented_defaults() -> None:
    options = GraphOptions()
    assert options.warmups is None and options.state_limit_bytes is None


def test_every_field_of_the_options_has_a_check() -> None:
    for owner, checks in (
        (GraphOptions, module._CHECKS),
        (CompileOptions, compile_options.CHECKS),
    ):
        assert list(checks) == [each.name for each in dataclasses.fields(owner)]


def test_breaks_given_as_a_list_become_a_tuple() -> None:
    options = GraphOptions(breaks=["a::b"])  # type: ignore[arg-type]
    assert options.breaks == ("a::b",)
    assert hash(options) == hash(GraphOptions(breaks=("a::b",)))


@given(OPTIONS)
def test_options_survive_a_round_trip_through_dict_and_json(options: GraphOptions) -> None:
    assert GraphOptions.from_dict(options.to_dict()) == options
    assert GraphOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options


@given(OPTIONS)
def test_options_survive_a_round_trip_through_settings(options: GraphOptions) -> None:
    plain = options.to_dict()
    settings = [f"{key}={json.dumps(value)}" for key, value in plain.items()]
    assert GraphOptions.from_dict(read_settings(settings)) == options


def test_settings_are_parsed_into_options_of_the_right_types() -> None:
    options = GraphOptions.from_dict(
        read_settings(["outputs=clone", "strict=true", "max_padding=1"])
    )
    assert options == GraphOptions(outputs="clone", strict=True, max_padding=1.0)


def test_a_later_setting_overrides_an_earlier_setting() -> None:
    assert GraphOptions.from_dict(read_settings(["warmups=0", "warmups=2"])).warmups == 2


def test_settings_override_base_options_and_null_unsets_an_option() -> None:
    base = GraphOptions(warmups=3, max_padding=2.0)
    options = base.merged(read_settings(["max_padding=null"]))
    assert (options.warmups, options.max_padding) == (3, None)


def test_settings_of_mode_and_sizes_become_plan_arguments() -> None:
    arguments, options = runner_settings(["mode=FULL", "sizes=[1,2]", "outputs=clone"])
    assert arguments == {"mode": "FULL", "sizes": [1, 2]}
    assert options == GraphOptions(outputs="clone")
    with pytest.raises(InvalidOptionError, match="unknown option 'mode'"):
        GraphOptions.from_dict(read_settings(["mode=FULL"]))


def test_a_single_operator_setting_needs_no_brackets() -> None:
    assert GraphOptions.from_dict(read_settings(["breaks=mine::attention"])).breaks == (
        "mine::attention",
    )


def test_setting_values_are_never_evaluated_as_python() -> None:
    with pytest.raises(InvalidOptionError, match="__import__"):
        GraphOptions.from_dict(read_settings(["warmups=__import__('os').getpid()"]))


def test_merged_leaves_the_original_options_unchanged() -> None:
    before = GraphOptions(warmups=2)
    assert before.merged({"strict": True}) == GraphOptions(warmups=2, strict=True)
    assert before == GraphOptions(warmups=2)


# Mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("warmup", 1, "warmups"),
        ("Outputs", "pool", "outputs"),
        ("Sizes", [1], "sizes"),
    ],
)
def test_an_unknown_setting_is_advised_the_nearest_option(
    key: str, value: Any, nearest: str
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        runner_settings([f"{key}={json.dumps(value)}"])
    assert key in caught.value.what and caught.value.advice == nearest
    assert repr(value) in str(caught.value.got)


def test_an_unknown_option_without_near_match_lists_all_options() -> None:
    with pytest.raises(InvalidOptionError, match="unknown option 'zzzzzz'") as caught:
        GraphOptions.from_dict({"zzzzzz": 1})
    assert "warmups" in str(caught.value.expected)


WRONG = [
    ("warmups", True),
    ("warmups", -1),
    ("breaks", "aten.mm"),
    ("breaks", ["aten::mm", 3]),
    ("outputs", "pools"),
    ("outputs", None),
    ("lazy", "yes"),
    ("strict", 1),
    ("check", "sometimes"),
    ("state_limit_bytes", "64MiB"),
    ("max_padding", -0.1),
    ("max_padding", 0.5),
    ("max_padding", float("nan")),
    ("max_padding", "1"),
    ("max_padding", False),
]


WRONG_COMPILE = [
    ("backend", 3),
    ("backend", ""),
    ("compile_sizes", [0]),
    ("compile_sizes", ["all"]),
    ("compile_sizes", [True]),
    ("dynamic_shapes", "backd"),
    ("use_inductor_graph_partition", 1),
    ("save_format", "zip"),
    ("autotune", "yes"),
    ("cache_dir", 1),
]


@pytest.mark.parametrize(
    ("owner", "prefix", "key", "value"),
    [(GraphOptions, "", *each) for each in WRONG]
    + [(CompileOptions, "compile.", *each) for each in WRONG_COMPILE],
)
def test_a_wrong_option_value_raises_with_key_value_and_expectation(
    owner: Any, prefix: str, key: str, value: Any
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        owner.from_dict({key: value})
    error = caught.value
    assert repr(prefix + key) in error.what
    assert error.got is not None and error.expected and error.advice


def test_a_misspelled_choice_is_advised_the_nearest_choice() -> None:
    with pytest.raises(InvalidOptionError, match="outputs=pool"):
        GraphOptions.from_dict(read_settings(["outputs=Pools"]))


@pytest.mark.parametrize("setting", ["mode", "=3", "", " =1"])
def test_a_setting_without_key_or_value_raises(setting: str) -> None:
    with pytest.raises(InvalidOptionError, match="key=value"):
        GraphOptions.from_dict(read_settings([setting]))


def test_a_dotted_setting_below_a_plain_option_raises() -> None:
    with pytest.raises(InvalidOptionError, match="warmups"):
        GraphOptions.from_dict(read_settings(["warmups.x=1"]))


def test_from_dict_refuses_an_argument_that_is_no_dict() -> None:
    with pytest.raises(InvalidOptionError, match="a dict of options"):
        GraphOptions.from_dict([1])  # type: ignore[arg-type]
