"""defects.md and docs/concepts/trust.md say what the table of seeded defects says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from graphrt.core.capture.options import CHECK_LEVELS
from graphrt.errors import PythonStateError
from tests.trust.defects import DEFECTS
from tests.trust.page import GROUPS, MISTAKES, PAGE, counts, main, page, table
from tests.trust.scenario import Word

TRUST = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "trust.md"
TEXT = TRUST.read_text(encoding="utf-8")


def test_the_page_of_defects_is_up_to_date_with_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.trust.page --write"


def test_the_trust_document_has_the_counts_of_the_table():
    programs, right, late, silent = counts(MISTAKES)
    clean, all_right, *others = counts([each for each in DEFECTS if each.clean])
    assert f"\n- {right} of {programs} are right, or named before a wrong value.\n" in TEXT
    assert f"\n- {late} are named late" in TEXT
    assert f"\n- {silent} are not found by default" in TEXT
    assert f" {all_right} programs without a mistake are all right.\n" in TEXT
    assert (clean, others) == (all_right, [0, 0])


def test_every_group_of_defects_has_a_description_and_an_expected_outcome():
    assert set(GROUPS) == {each.group for each in DEFECTS}
    counted = {"right", "named", "late", "silent"}
    assert counted | {"crash"} == set(get_args(Word))
    assert {each.expected for each in DEFECTS} <= counted


def test_the_page_command_prints_the_table_of_defects(capsys):
    main([])
    assert capsys.readouterr().out == table()


def test_every_check_level_is_in_the_trust_document():
    assert all(f"| `{level}` |" in TEXT for level in CHECK_LEVELS)


def test_the_example_in_the_trust_document_is_refused_as_described():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (code,) = [each for each in blocks if "harmless by itself" in each]
    with pytest.raises(PythonStateError, match="calls"):
        exec(compile(code, TRUST.name, "exec"), {})
