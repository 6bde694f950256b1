"""The table of `edits.py`: what the second start finds, and whether its results are right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compile import edits_kept, edits_reached, edits_served
from tests.compile.edits import AROUND, EDITS, HIT, MISS, PROGRAMS, Edit
from tests.draws import rest_long

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
COMPILERS = [
    "stand-in",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.long,
            pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++"),
        ],
    ),
]


class Starts:
    """Programs on disk, each with the cache of its first start."""

    def __init__(self, root: Path, compiler: str) -> None:
        self.root, self.compiler = root, compiler
        self._first: dict[str, dict[str, Any]] = {}
        self._server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("edits_start.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TRITON_INTERPRET": "0",
                "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def run(self, *several: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(several), file=self._server.stdin, flush=True)
        record: list[dict[str, Any]] = json.loads(self._server.stdout.readline())
        for each in record:
            assert "error" not in each, each["error"]
        return record

    def given(self, program: str, directory: Path, cache: Path, **more: Any) -> dict[str, Any]:
        return {
            "directory": str(directory),
            "cache": str(cache),
            "compiler": self.compiler,
            "environment": {},
            "options": {},
            "setup": "",
            "setup_after": "",
            "around": AROUND.get(program, ""),
            **more,
        }

    def written(self, program: str) -> Path:
        directory = self.root / program / "source"
        directory.mkdir(parents=True, exist_ok=True)
        programs = {**PROGRAMS, **edits_served.PROGRAMS, **edits_reached.PROGRAMS}
        for name, text in programs[program].items():
            (directory / name).write_text(text)
        return directory

    def first(self, program: str) -> tuple[Path, Path]:
        """The sources of a program, and a copy of the cache of its first start."""
        directory, kept = self.written(program), self.root / program / "kept"
        if program not in self._first:
            (record,) = self.run(self.given(program, directory, kept))
            self._first[program] = record
            assert record.get("right") and record["compiled"] and not record["loaded"], record
        cache = self.root / program / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        if kept.exists():
            shutil.copytree(kept, cache)
        return directory, cache

    def second(self, edit: Edit) -> dict[str, Any]:
        """The start after an edit."""
        directory, cache = self.first(edit.program)
        if edit.moved:
            there = self.root / "moved" / edit.program
            shutil.rmtree(there, ignore_errors=True)
            directory = Path(shutil.move(directory, there))
        for name, (old, new) in edit.files.items():
            text = (directory / name).read_text()
            assert old in text, edit
            (directory / name).write_text(text.replace(old, new) if old else new)
        more: dict[str, Any] = {"around": edit.around} if edit.around else {}
        (record,) = self.run(
            self.given(
                edit.program,
                directory,
                cache,
                setup=edit.setup,
                setup_after=edit.setup_after,
                options=dict(edit.options),
                environment=dict(edit.environment),
                **more,
            )
        )
        return record


def outcome(record: dict[str, Any]) -> str:
    if "refused" in record:
        return "refused"
    if record["compiled"] and record["loaded"]:
        return "part"
    return MISS if record["compiled"] else HIT


@pytest.fixture(scope="module", params=COMPILERS)
def starts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starts]:
    made = Starts(tmp_path_factory.mktemp("edits"), request.param)
    yield made
    made.close()


KEPT = (
    "nothing",
    "a comment in the forward (plain)",
    "a docstring of a helper (plain)",
    "a comment in a composite body (composite)",
    "a local variable's name (composite)",
    "a comment in a Triton kernel (triton)",
    "a part that becomes a helper (plain)",
    "a constant that is read by traced code",
    "a submodule's attribute",
    "a method of a class replaced by another file",
    "what an opaque operator calls",
    "a custom operator's fake",
    "a closure of a composite operator",
    "a variable of the environment that a composite operator reads",
    "a decomposition",
    "a value reached by attribute",
    "a value reached by packed",
    "an item's method",
    "a partial in a table",
    "a constant of a function that the graph calls",
    "a Triton kernel",
    "a branch's limit on sizes",
    "autocast",
    "a private setting of Inductor",
    "a pass after fusion",
    "the program moved, a composite operator",
)
"""One edit for each part of the key; test_cache_key.py and test_key_of_called_code.py have the
others in one process."""


@pytest.mark.parametrize(
    "edit",
    rest_long(
        [*EDITS, *edits_served.EDITS, *edits_kept.EDITS, *edits_reached.EDITS],
        *KEPT,
        name=lambda edit: edit.name,
    ),
    ids=lambda edit: edit.name,
)
def test_a_second_start_after_an_edit_hits_or_misses_as_the_table_says(starts: Starts, edit: Edit):
    record = starts.second(edit)
    # Inductor saves no code that calls such functions, which is a warning at every start.
    unsaved = starts.compiler == "inductor" and edit.program == "allowed"
    must = MISS if unsaved else edit.must
    assert (outcome(record), record.get("right")) == (must, True), record
    assert record["traced"] == 1, "nothing is kept of a trace"


# What has become of the cache itself -----------------------------------------------------------

PROGRAM = "plain"


def found_in(starts: Starts, cache: Path, **more: Any) -> dict[str, Any]:
    (record,) = starts.run(starts.given(PROGRAM, starts.written(PROGRAM), cache, **more))
    assert record["right"], record
    return record


def told(record: dict[str, Any]) -> str:
    return "\n".join(record["told"])


def test_a_moved_cache_directory_is_a_hit(starts: Starts, tmp_path: Path):
    _, cache = starts.first(PROGRAM)
    shutil.move(cache, tmp_path / "elsewhere")
    assert outcome(found_in(starts, tmp_path / "elsewhere")) == HIT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_of_another_owner_is_a_miss(starts: Starts):
    _, cache = starts.first(PROGRAM)
    os.chown(cache, 12345, -1)
    record = found_in(starts, cache)
    assert outcome(record) == MISS and "belongs to user 12345" in told(record)


def test_a_truncated_piece_is_a_miss_and_is_stored_again(starts: Starts):
    _, cache = starts.first(PROGRAM)
    largest = max(cache.rglob("*.piece"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    record = found_in(starts, cache)
    assert outcome(record) == MISS and "compiled again" in told(record)
    assert outcome(found_in(starts, cache)) == HIT


FULL = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "


@pytest.mark.parametrize("bytes_left", [pytest.param(0, marks=pytest.mark.long), 100])
def test_a_full_disk_is_a_miss_that_stores_nothing(starts: Starts, tmp_path: Path, bytes_left: int):
    if starts.compiler == "inductor":
        pytest.skip("Inductor itself needs the disk")
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes_left}, {bytes_left}))"
    record = found_in(starts, tmp_path / "cache", setup_after=FULL + limit)
    assert outcome(record) == MISS and "cannot be written" in told(record)
    assert not list((tmp_path / "cache").rglob("*.piece"))
    assert outcome(found_in(starts, tmp_path / "cache")) == MISS
    assert outcome(found_in(starts, tmp_path / "cache")) == HIT


# Names in archives are read by a codec of Python's, whose own files a test's Python may not share.
NOBODY = "import os, encodings.cp437; os.seteuid(65534)"


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes somebody else")
def test_a_read_only_cache_is_read_and_stores_nothing_new(starts: Starts, readable: Path):
    """Root's own cache, and a start of a user that may not write there."""
    if starts.compiler == "inductor":
        pytest.skip("Inductor itself writes where only root may")
    _, cache = starts.first(PROGRAM)
    shutil.copytree(cache, readable / "cache")
    for each in (readable / "cache").rglob("*"):
        each.chmod(0o755 if each.is_dir() else 0o644)
    (readable / "cache").chmod(0o755)
    shutil.copytree(starts.written(PROGRAM), readable / "source")
    (readable / "inductor").mkdir()
    (readable / "inductor").chmod(0o777)
    request = starts.given(
        PROGRAM,
        readable / "source",
        readable / "cache",
        setup_after=NOBODY,
        environment={"TORCHINDUCTOR_CACHE_DIR": str(readable / "inductor")},
    )
    (record,) = starts.run(request)
    assert (outcome(record), record["right"]) == (HIT, True), record
    (record,) = starts.run({**request, "options": {"autotune": False}})
    assert (outcome(record), record["right"]) == (MISS, True), record
    assert "cannot be written" in told(record)


@pytest.fixture
def readable() -> Iterator[Path]:
    """A directory that others may read, which a test's own is not."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def test_two_simultaneous_first_starts_are_right_and_a_third_start_hits(
    starts: Starts, tmp_path: Path
):
    request = starts.given(PROGRAM, starts.written(PROGRAM), tmp_path / "cache")
    records = starts.run(request, request)
    assert all(each["right"] for each in records), records
    assert MISS in map(outcome, records)
    assert outcome(found_in(starts, tmp_path / "cache")) == HIT


LARGE = "import torch; large = torch.ones(1 << 23); from torch._inductor import decomposition; "
LARGE += "decomposition.decompositions['edits'] = lambda x: x + large"


def test_a_start_with_a_dependency_too_large_to_compare_stores_nothing(
    starts: Starts, tmp_path: Path
):
    """It is a miss at every start, not only at the first."""
    for _ in range(2):
        record = found_in(starts, tmp_path / "cache", setup=LARGE)
        assert outcome(record) == MISS and "cannot be read" in told(record)
    assert not (tmp_path / "cache").exists()
