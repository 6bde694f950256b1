"""Mutants are single changes that parse, and the explained survivors still exist in the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants.__main__ import chosen, drawn, explained, files
from tests.mutants.by_hand import by_hand
from tests.mutants.mutate import mutants
from tests.mutants.run import ASCEND_TESTS, ROOT, TESTS, asked_first

SMALL = """
class Ladder:
    def find(self, size, sizes=()):
        if size > 0 and sizes:
            self.asked += 1
            return [other for other in sizes if other >= size][0]
        raise ValueError(f"{size + 1} is none")
"""


def changes(text: str, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "small.py").write_text(text)
    return {f"{each.old} -> {each.new}": each.source for each in mutants(tmp_path, "small.py")}


def test_each_mutant_is_a_single_change_that_still_parses(tmp_path):
    texts = changes(SMALL, tmp_path)
    assert "size > 0 -> size >= 0" in texts
    assert "size > 0 and sizes -> size > 0 or sizes" in texts
    assert "self.asked += 1 -> pass" in texts
    assert "other >= size -> other > size" in texts
    for source in texts.values():
        ast.parse(source)
        assert source != SMALL


def test_mutants_with_equal_text_get_different_names(tmp_path):
    (tmp_path / "alike.py").write_text("def f(x):\n    x.a = 0\n    x.b = 0\n    return x + 0\n")
    names = [mutant.name for mutant in mutants(tmp_path, "alike.py")]
    assert len(set(names)) == len(names)
    assert {"alike.py f: 0 -> 1", "alike.py f: 0 -> 1 (2)", "alike.py f: 0 -> 1 (3)"} <= set(names)


def test_error_messages_are_not_mutated(tmp_path):
    assert not any("size + 1" in name for name in changes(SMALL, tmp_path))


@pytest.fixture
def few_files(monkeypatch):
    """To read all files of core takes two seconds each time."""
    few = [file for file in files() if "core/dispatch/" in file or "core/batch/" in file]
    few.append("graphrt/core/plan/sizes.py")
    monkeypatch.setattr(command, "files", lambda: few)
    return few


def test_the_same_seed_draws_the_same_mutants(few_files):
    assert chosen(1, 0) == chosen(1, 0)
    assert {mutant.file for mutant in chosen(1, 0)} <= set(few_files)


@pytest.mark.usefixtures("few_files")
def test_a_mutant_can_be_chosen_by_full_name_or_part_of_a_name():
    drawn = chosen(3, 0)
    assert chosen(3, 0, ["core/dispatch/"]) == [
        mutant for mutant in drawn if "core/dispatch/" in mutant.name
    ]
    other = next(each for each in mutants(ROOT, drawn[0].file) if each not in drawn)
    assert chosen(3, 0, [other.name]) == [other]


@pytest.mark.usefixtures("few_files")
def test_drawing_more_mutants_per_file_keeps_the_first_mutants():
    assert set(chosen(1, 0)) <= set(chosen(3, 0))


@pytest.mark.usefixtures("few_files")
def test_mutants_drawn_from_all_files_are_of_the_named_files_and_of_the_seed():
    some = drawn(5, 1, ["core/dispatch/"])
    assert some == drawn(5, 1, ["core/dispatch/"]) != drawn(5, 2, ["core/dispatch/"])
    assert len(some) == 5 and all("core/dispatch/" in mutant.file for mutant in some)


def test_every_explained_surviving_mutant_still_exists_in_the_code():
    named = {name.split(" ")[0] for name in explained()}
    all_files = [*files(TESTS), *files(ASCEND_TESTS)]
    names = {m.name for file in all_files if file in named for m in mutants(ROOT, file)}
    names |= {mutant.name for mutant in by_hand(ROOT)}
    assert sorted(explained().keys() - names) == []


def test_hand_written_mutants_change_files_covered_by_ascend_tests():
    mutants = by_hand(ROOT)
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 44
    assert {mutant.file for mutant in mutants} <= set(files(ASCEND_TESTS))
    for mutant in mutants:
        assert mutant.source != (ROOT / mutant.file).read_text()


def test_an_outdated_hand_written_mutant_raises(tmp_path):
    (tmp_path / "graphrt/ascend/update").mkdir(parents=True)
    (tmp_path / "graphrt/ascend/update/tasks.py").write_text("pass\n")
    with pytest.raises(ValueError, match="found 0 times"):
        by_hand(tmp_path)


@pytest.mark.parametrize("file", sorted({str(Path(file).parent) + "/" for file in files()}))
def test_every_mutated_file_has_tests_that_are_run_first(file):
    assert asked_first(file)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mutants run in forked processes")
@pytest.mark.long
def test_a_mutant_that_breaks_the_start_is_noticed():
    code = (
        "import torch\n"
        "from pathlib import Path\n"
        "from tests.mutants.run import copied, failing\n"
        "with copied() as tree:\n"
        "    tests = ['tests/core/test_sizes.py']\n"
        "    print(repr(failing(tree, tests, 200)))\n"
        "    place = tree / 'graphrt/core/plan/sizes.py'\n"
        "    place.write_text('raise ValueError()')\n"
        "    print(repr(failing(tree, tests, 200)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["''", "'no start'"], done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mutants run in forked processes")
def test_a_mutant_of_every_file_is_noticed_by_tests_or_explained():
    command = [sys.executable, "-m", "tests.mutants", "--per-file", "1", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.npu
@pytest.mark.long
def test_every_hand_written_ascend_mutant_is_noticed_or_explained():
    command = [sys.executable, "-m", "tests.mutants", "--per-file", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
