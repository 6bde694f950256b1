"""docs/trust.md says what the table of seeded defects says."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from graphrt.core.capture.options import CHECK_LEVELS
from graphrt.errors import PythonStateError
from tests.trust.defects import DEFECTS
from tests.trust.page import BEGIN, END, GROUPS, PAGE, main, table, written
from tests.trust.scenario import Word

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_table_of_now():
    assert TEXT.count(BEGIN) == TEXT.count(END) == 1
    assert written(TEXT) == TEXT, "python -m tests.trust.page --write"


def test_every_group_is_described_once_and_no_program_is_left_out():
    assert set(GROUPS) == {each.group for each in DEFECTS}
    counted = {"right", "named", "late", "silent"}
    assert counted | {"crash"} == set(get_args(Word))
    assert {each.expected for each in DEFECTS} <= counted


def test_the_command_prints_the_table(capsys):
    main([])
    assert capsys.readouterr().out == table()


def test_every_level_is_on_the_page():
    assert all(f"| `{level}` |" in TEXT for level in CHECK_LEVELS)


def test_the_example_is_refused_by_the_name_that_the_page_says():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    with pytest.raises(PythonStateError, match="calls"):
        exec(compile(code, PAGE.name, "exec"), {})
