"""`GraphOptions` from code, dict, JSON and dotted settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrt.compile import options as compile_options
from graphrt.compile.options import CompileOptions
from graphrt.core.base.errors import InvalidModeError, InvalidOptionError, InvalidSizesError
from graphrt.core.batch.modes import GraphMode
from graphrt.core.capture import options as module
from graphrt.core.capture.options import GraphOptions

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
    save_format=st.sampled_from([None, "binary", "unpacked"]),
    autotune=st.booleans(),
)
OPTIONS = st.builds(
    GraphOptions,
    mode=st.none() | st.sampled_from(GraphMode),
    sizes=st.none() | st.sets(st.integers(1, 9999), min_size=1).map(sorted),
    max_size=st.none() | st.integers(1, 9999),
    warmups=st.integers(0, 9),
    breaks=OPERATORS,
    outputs=st.sampled_from(["pool", "static", "clone"]),
    lazy=st.booleans(),
    strict=st.booleans(),
    launch=st.sampled_from(["graph", "eager"]),
    check_addresses=st.booleans(),
    state_limit_bytes=st.integers(0, 1 << 40),
    max_padding=st.none() | st.floats(0, 1e9),
    compile=COMPILE,
)


def test_defaults() -> None:
    options = GraphOptions()
    assert options.mode is None and options.sizes is None
    assert options.warmups == 1 and options.state_limit_bytes == 64 * 1024 * 1024
    assert options.compile == CompileOptions()


def test_every_field_is_checked() -> None:
    for owner, checks in (
        (GraphOptions, module._GRAPH_CHECKS),
        (CompileOptions, compile_options.CHECKS),
    ):
        assert list(checks) == [each.name for each in dataclasses.fields(owner)]


def test_from_code_takes_names_and_lists() -> None:
    options = GraphOptions(mode="full", sizes=[1, 2], breaks=["a::b"])  # type: ignore[arg-type]
    assert options.mode is GraphMode.FULL
    assert options.sizes == (1, 2) and options.breaks == ("a::b",)
    assert hash(options) == hash(GraphOptions(GraphMode.FULL, (1, 2), breaks=("a::b",)))


@given(OPTIONS)
def test_round_trips(options: GraphOptions) -> None:
    assert GraphOptions.from_dict(options.to_dict()) == options
    assert GraphOptions.from_json(options.to_json()) == options
    assert GraphOptions.from_json(options.to_json(indent=2)) == options


@given(OPTIONS)
def test_settings_round_trip(options: GraphOptions) -> None:
    plain = options.to_dict()
    nested = plain.pop("compile")
    settings = [f"{key}={json.dumps(value)}" for key, value in plain.items()]
    settings += [f"compile.{key}={json.dumps(value)}" for key, value in nested.items()]
    assert GraphOptions.from_settings(settings) == options


def test_from_settings() -> None:
    options = GraphOptions.from_settings(
        ["mode=FULL", "sizes=[1,2,4]", "compile.backend=inductor", "strict=true", "max_padding=1"]
    )
    assert options == GraphOptions(
        mode=GraphMode.FULL,
        sizes=(1, 2, 4),
        strict=True,
        max_padding=1.0,
        compile=CompileOptions(backend="inductor"),
    )


def test_later_settings_win_and_nested_ones_merge() -> None:
    options = GraphOptions.from_settings(
        [
            'compile={"backend": "x", "cache_dir": "/c"}',
            "compile.backend=y",
            "mode=NONE",
            "mode=FULL",
        ]
    )
    assert options.compile == CompileOptions(backend="y", cache_dir="/c")
    assert options.mode is GraphMode.FULL


def test_settings_go_on_top_of_a_base() -> None:
    base = GraphOptions(warmups=3, compile=CompileOptions(backend="x"))
    options = GraphOptions.from_settings(["compile.cache_dir=/c=d"], base)
    assert options.warmups == 3
    assert options.compile == CompileOptions(backend="x", cache_dir="/c=d")


def test_settings_can_unset() -> None:
    base = GraphOptions(sizes=(1,), mode=GraphMode.FULL)
    assert GraphOptions.from_settings(["sizes=null"], base).sizes is None


def test_one_operator_needs_no_brackets() -> None:
    assert GraphOptions.from_settings(["breaks=mine::attention"]).breaks == ("mine::attention",)


def test_values_are_never_evaluated() -> None:
    with pytest.raises(InvalidOptionError, match="__import__"):
        GraphOptions.from_settings(["warmups=__import__('os').getpid()"])


def test_merged_leaves_the_original() -> None:
    before = GraphOptions(warmups=2)
    assert before.merged({"strict": True}) == GraphOptions(warmups=2, strict=True)
    assert before == GraphOptions(warmups=2)


def test_override_skips_none() -> None:
    options = GraphOptions(mode=GraphMode.FULL, sizes=(1,))
    assert options.override(mode=None, sizes=None) == options
    assert options.override(mode="NONE", sizes=[2]).sizes == (2,)


def test_from_json_file(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text('{"mode": "PIECEWISE"}')
    assert GraphOptions.from_json(path).mode is GraphMode.PIECEWISE
    assert GraphOptions.from_json(str(path)).mode is GraphMode.PIECEWISE


# Mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("warmup", 1, "warmups"),
        ("Sizes", [1], "sizes"),
        ("splitting_op", ["a::b"], "compile.splitting_ops"),
        ("compile.backnd", "x", "compile.backend"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, value: Any, nearest: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        GraphOptions.from_settings([f"{key}={json.dumps(value)}"])
    assert key in caught.value.what and caught.value.advice == nearest
    assert repr(value) in str(caught.value.got)


def test_unknown_key_like_no_other() -> None:
    with pytest.raises(InvalidOptionError, match="unknown option 'zzzzzz'") as caught:
        GraphOptions.from_dict({"zzzzzz": 1})
    assert "warmups" in str(caught.value.expected)


WRONG = [
    ("mode", 3),
    ("sizes", "1,2"),
    ("sizes", [1, "2"]),
    ("sizes", 8),
    ("max_size", 0),
    ("max_size", 2.0),
    ("warmups", True),
    ("warmups", None),
    ("warmups", -1),
    ("breaks", "aten.mm"),
    ("breaks", ["aten::mm", 3]),
    ("outputs", "pools"),
    ("outputs", None),
    ("lazy", "yes"),
    ("strict", 1),
    ("launch", "graphs"),
    ("check_addresses", None),
    ("state_limit_bytes", "64MiB"),
    ("max_padding", -0.1),
    ("max_padding", float("nan")),
    ("max_padding", "1"),
    ("max_padding", False),
    ("compile", "inductor"),
    ("compile.backend", 3),
    ("compile.backend", ""),
    ("compile.compile_sizes", [0]),
    ("compile.compile_sizes", ["all"]),
    ("compile.compile_sizes", [True]),
    ("compile.dynamic_shapes", "backd"),
    ("compile.splitting_ops", {"a::b": 1}),
    ("compile.use_inductor_graph_partition", 1),
    ("compile.save_format", "zip"),
    ("compile.autotune", "yes"),
    ("compile.cache_dir", 1),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_value_names_key_value_and_expectation(key: str, value: Any) -> None:
    name, _, nested = key.partition(".")
    with pytest.raises(InvalidOptionError) as caught:
        GraphOptions.from_dict({name: {nested: value} if nested else value})
    error = caught.value
    assert repr(key) in error.what
    assert error.got is not None and error.expected and error.advice


def test_nearest_choice() -> None:
    with pytest.raises(InvalidOptionError, match="outputs=pool"):
        GraphOptions.from_settings(["outputs=Pools"])


def test_values_of_the_right_type_keep_their_own_errors() -> None:
    with pytest.raises(InvalidModeError, match="FULL_AND_PIECEWISE"):
        GraphOptions.from_settings(["mode=HALF"])
    with pytest.raises(InvalidSizesError, match="not sorted"):
        GraphOptions.from_settings(["sizes=[2,1]"])


@pytest.mark.parametrize("setting", ["mode", "=3", "", " =1"])
def test_setting_without_key_or_value(setting: str) -> None:
    with pytest.raises(InvalidOptionError, match="key=value"):
        GraphOptions.from_settings([setting])


def test_dots_into_a_plain_option() -> None:
    with pytest.raises(InvalidOptionError, match="warmups"):
        GraphOptions.from_settings(["warmups.x=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"mode": ', "not valid JSON"),
        ('{"mode": "FULL", "mode": "NONE"}', "given twice"),
        ("no_such_file.json", "no_such_file.json"),
        ("[1]", r"cannot be read"),
    ],
)
def test_bad_json(text: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        GraphOptions.from_json(text)


def test_json_file_that_is_no_object(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text("[1]")
    with pytest.raises(InvalidOptionError, match="a dict of options"):
        GraphOptions.from_json(path)
